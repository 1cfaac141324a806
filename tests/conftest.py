import contextlib
from pathlib import Path

import pytest
import torch

from aurakv import backends

with contextlib.suppress(ImportError):
    import setuptools  # noqa: F401  # torch's compilers need it, and it cannot be imported after Python's own distutils

torch.set_num_threads(1)  # the cases are small, and several test processes share the cores


def pytest_addoption(parser):
    parser.addoption("--backend", action="append", help="run conformance on this backend only (may repeat)")
    parser.addoption("--capability", help="kernels as on a GPU of this compute capability, such as 8.0")
    parser.addoption("--emulate", help="an emulated GPU of this compute capability, such as 8.0, with CPU tensors")
    parser.addoption("--native-from", help="run only if the native library is loaded from this folder")


def pytest_configure(config):
    if chosen := config.getoption("--capability"):
        from aurakv.backends.triton.common import target

        target.assume(target.parsed(chosen))
    if chosen := config.getoption("--emulate"):
        from aurakv.backends.triton.common import target
        from tests.helpers.ptx import driver

        driver.start(target.parsed(chosen))
    if chosen := config.getoption("--native-from"):
        from aurakv.backends.native import abi

        library = abi.library()
        place = library if isinstance(library, str) else library._name
        if Path(chosen).resolve() not in Path(place).resolve().parents:
            raise pytest.UsageError(f"the native library is to come from {chosen}, got {place}")


def pytest_generate_tests(metafunc):
    """`backend` takes every backend that runs on this machine, with the device it runs on."""
    if "backend" in metafunc.fixturenames:
        chosen = metafunc.config.getoption("--backend") or [
            name for name in backends.names() if not name.startswith("broken") and _device(name)
        ]
        marks = {"metal": pytest.mark.mps}
        metafunc.parametrize("backend", [pytest.param(name, marks=marks.get(name, ())) for name in chosen])


def _device(name: str) -> str | None:
    devices = ["cuda"] if torch.cuda.is_available() else []
    devices += ["mps"] if name == "metal" and torch.backends.mps.is_available() else []
    return next((d for d in (*devices, "cpu") if backends.why_not(name, None, d) is None), None)


@pytest.fixture(scope="session")
def ranks():
    """Processes of a gloo group, by their number; each group is started once."""
    from tests.helpers.ranks import Ranks

    started = {}

    def get(size):
        if size not in started or not started[size].alive:
            started[size] = Ranks(size)
        return started[size]

    yield get
    for group in started.values():
        group.close()


@pytest.fixture
def device(backend):
    found = _device(backend)
    if found is None:
        pytest.skip(f"{backend}: {backends.why_not(backend)}")
    return found


@pytest.fixture
def world():
    """Caches of every kind with tokens in them, for calls that are refused."""
    from tests.helpers.refusals import every_kind

    return every_kind()
