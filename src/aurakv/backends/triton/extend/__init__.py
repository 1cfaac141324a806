"""Many queries a sequence, on warp-group products (Gluon; Hopper)."""
