"""Encoded vectors outside pages: decode, scores, values."""
