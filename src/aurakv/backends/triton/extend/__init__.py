"""Many queries a sequence, on tensor cores (Gluon)."""
