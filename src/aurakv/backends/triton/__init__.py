"""NVIDIA GPUs, in Triton: `backend` is what the protocol asks for, the packages below are named for what they do."""
