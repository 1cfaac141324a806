"""What a model teaches: offsets and scales of keys, and policies made of them."""
