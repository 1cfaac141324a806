"""What the kernels share: codes, levels, slots, masks, specialisation."""
