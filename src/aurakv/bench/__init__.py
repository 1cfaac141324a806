"""Measuring speed: what this machine is, how fast it reads memory, and the kernels against torch."""
