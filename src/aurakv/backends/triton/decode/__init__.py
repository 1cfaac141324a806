"""One or a few queries a sequence, on tensor cores (Gluon)."""
