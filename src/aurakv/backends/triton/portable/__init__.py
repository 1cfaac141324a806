"""Attention in plain Triton: every format and call, every GPU, and the interpreter."""
