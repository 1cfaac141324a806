"""A cold import: no optional package, no CUDA, no noticeable time on top of torch."""

import importlib.resources
import json
import subprocess
import sys

import pytest

import aurakv as kv

COLD = """
import sys, time
import torch
blocked = ("triton", "transformers", "safetensors", "aurakv.backends.triton", "aurakv.backends.native")
for name in [name for name in sys.modules if name.split(".")[0] in blocked]:
    del sys.modules[name]

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if any(name == b or name.startswith(b + ".") for b in blocked):
            asked.append(name)
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

asked = []
sys.meta_path.insert(0, Refuse())
start = time.perf_counter()
import aurakv as kv
seconds = time.perf_counter() - start
while_importing = list(asked)
missing = [name for name in kv.__all__ if not hasattr(kv, name)]

format = kv.Format.parse("k4v3", 64)
cache = kv.KVCache.contiguous(format, 1, 2)
x = torch.linspace(-1, 1, 5 * 2 * 64).view(5, 2, 64).sin()
cache.append(x, x, [0, 5])
out = cache.attend(x[-1:].repeat(1, 2, 1)).out
error = None
try:
    kv.load("nothing.safetensors")
except Exception as e:
    error = [type(e).__name__, str(e)]

import json
print(json.dumps({
    "seconds": seconds,
    "asked": while_importing,
    "missing": missing,
    "cuda": torch.cuda.is_initialized(),
    "out": [list(out.shape), bool(out.isfinite().all()), float(out.norm()) > 0],
    "error": error,
    "loaded": [name for name in sys.modules if name.split(".")[0] in blocked],
}))
"""


def cold() -> dict:
    run = subprocess.run([sys.executable, "-c", COLD], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def test_cold_import():
    seen = cold()
    assert seen["asked"] == [], "importing aurakv looks for an optional package"
    assert seen["loaded"] == []
    assert seen["missing"] == []
    assert not seen["cuda"], "importing aurakv initialises CUDA"
    assert seen["out"] == [[1, 4, 64], True, True], "without optional packages the reference must still work"
    name, sentence = seen["error"]
    assert "safetensors" in sentence, f"{name}: {sentence}"
    seconds = min(seen["seconds"], *(cold()["seconds"] for _ in range(2))) if seen["seconds"] > 0.3 else seen["seconds"]
    assert seconds < 0.5, f"importing aurakv takes {seconds:.2f} s on top of torch"


def test_public_names():
    assert kv.__all__ == sorted(kv.__all__)
    assert all(hasattr(kv, name) for name in kv.__all__)
    assert issubclass(kv.FileError, kv.InputError)
    assert all(issubclass(e, kv.AuraError) for e in (kv.InputError, kv.CapacityError, kv.BackendError))


def test_types_are_shipped():
    assert importlib.resources.files("aurakv").joinpath("py.typed").is_file()


@pytest.mark.parametrize("line", ["import aurakv.hf", "from aurakv import models; models.load()"])
def test_a_missing_package_says_what_brings_it(line):
    guarded = f"try:\n    {line}\nexcept ImportError as error:\n    print(error)"
    code = f"import sys; sys.modules['transformers'] = None\n{guarded}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert run.stdout == 'this needs the package transformers: pip install "aurakv[hf]"\n', run.stderr
