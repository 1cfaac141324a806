"""Codes of whole sequences back to 16-bit vectors, side by side, for attention kernels of others."""
