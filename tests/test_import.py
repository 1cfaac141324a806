"""A cold import: no optional package, no CUDA, no noticeable time on top of torch."""

import importlib
import importlib.resources
import importlib.util
import json
import subprocess
import sys

import pytest

import aurakv as kv
from aurakv.errors import AuraError, BackendError, CapacityError, FileError, InputError

COLD = """
import sys, time
import torch
blocked = ("triton", "transformers", "safetensors")
for name in [name for name in sys.modules if name.split(".")[0] in blocked]:
    del sys.modules[name]

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if any(name == b or name.startswith(b + ".") for b in blocked):
            asked.append(name)
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

asked = []
sys.meta_path.insert(0, Refuse())
start = time.process_time()
import aurakv as kv
missing = [name for name in kv.__all__ if not hasattr(kv, name)]
seconds = time.process_time() - start
while_importing = list(asked)

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
    assert set(kv.__all__) <= set(dir(kv))
    assert issubclass(FileError, InputError)
    assert all(issubclass(e, AuraError) for e in (InputError, CapacityError, BackendError))


LAZY = """
import sys
import aurakv
assert "torch" not in sys.modules, "importing aurakv imports torch"
import torch
aurakv.{name}
torch.ops.aurakv.encode, torch.ops.aurakv.attend
"""


@pytest.mark.parametrize("name", ["KVCache", "attend", "Format"])
def test_torch_comes_with_the_first_name_and_the_operators_with_it(name):
    run = subprocess.run([sys.executable, "-c", LAZY.format(name=name)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("name", "new"),
    {
        "InputError": "aurakv.errors.InputError",
        "Exact": "aurakv.storage.uncompressed.Uncompressed",
        "attend_dense": "aurakv.attention.ops.attend_dense",
        "ShardedCache": "aurakv.parallel.ShardedCache",
        "codec": "aurakv.format.codec",
        "table": "aurakv.storage.page_table",
    }.items(),
)
def test_an_old_name_says_the_new_one(name, new):
    with pytest.raises(AttributeError, match=rf"^aurakv.{name} is {new} now$"):
        getattr(kv, name)
    with pytest.raises(ImportError, match=rf"^aurakv.{name} is {new} now$"):
        exec(f"from aurakv import {name}")
    assert not hasattr(kv, name)


def test_old_names_are_where_the_sentence_says():
    for new in kv._NEW.values():
        home, _, name = new.rpartition(".")
        found = getattr(importlib.import_module(home), name, None)
        assert found is not None or importlib.util.find_spec(new), new


def test_no_module_has_the_name_of_an_old_one():
    assert not [name for name in kv._NEW if importlib.util.find_spec(f"aurakv.{name}")]


def test_an_unknown_name():
    with pytest.raises(AttributeError, match="module 'aurakv' has no attribute 'attention_please'"):
        kv.attention_please  # noqa: B018


def test_types_are_shipped():
    assert importlib.resources.files("aurakv").joinpath("py.typed").is_file()


@pytest.mark.parametrize("line", ["import aurakv.hf", "from aurakv import models; models.load()"])
def test_a_missing_package_says_what_brings_it(line):
    guarded = f"try:\n    {line}\nexcept ImportError as error:\n    print(error)"
    code = f"import sys; sys.modules['transformers'] = None\n{guarded}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert run.stdout == 'this needs the package transformers: pip install "aurakv[hf]"\n', run.stderr


def test_dir_shows_what_there_is_to_use():
    shown = {name for name in dir(kv) if not name.startswith("_")}
    assert set(kv.__all__) | {"errors", "storage", "parallel"} <= shown
    assert not shown & {"TYPE_CHECKING", "annotations", "importlib", "sys"}
