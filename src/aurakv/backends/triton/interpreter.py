"""What Triton's interpreter needs to run these kernels on the CPU, for tests (TRITON_INTERPRET=1)."""

# mypy: ignore-errors

from triton.runtime import interpreter


def repair():
    """NumPy 2.4 refuses int() of the one-element arrays that Triton 3.6's interpreter keeps scalars in."""
    original = interpreter._patch_lang_tensor

    def patch(tensor, scope):
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch
