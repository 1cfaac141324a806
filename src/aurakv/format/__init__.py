"""What bytes mean: levels, rotation, packing, and the codec made of them."""
