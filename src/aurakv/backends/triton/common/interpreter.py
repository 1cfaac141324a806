"""What Triton's interpreter needs to run these kernels on the CPU, for tests (TRITON_INTERPRET=1)."""

# mypy: ignore-errors

from triton.runtime import interpreter


def repair():
    """NumPy 2.4 refuses int() of the one-element arrays that Triton's interpreter keeps scalars in. Where it spreads a
    comparison of scalars over a tensor, it makes integers of it, which Triton 3.9 then refuses as a mask."""
    original_patch, original_splat = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_splat

    def patch(tensor, scope):
        original_patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def splat(self, kind, scalar):
        result = original_splat(self, kind, scalar)
        if scalar.data.dtype == bool:
            result.data = result.data.astype(bool)
        return result

    interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_splat = patch, splat
