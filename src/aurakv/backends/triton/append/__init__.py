"""New tokens: rotate, quantise, pack and write to their slots."""
