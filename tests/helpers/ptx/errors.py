"""What the emulator raises."""


class EmulationError(RuntimeError):
    """What the emulator does not know, or what a GPU would have done wrong, silently or not."""
