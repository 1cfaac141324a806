import pytest
import torch

from aurakv import backends
from aurakv.backends import metal as module
from aurakv.backends.metal import Metal
from tests.backends.metal import emulator

EMULATED = "metal-emulated"


def _params():
    reason = emulator.why_not()
    missing = pytest.mark.skipif(reason is not None, reason=str(reason))
    params = [pytest.param((EMULATED, "cpu"), id="emulated", marks=missing)]
    if torch.backends.mps.is_available():
        params.append(pytest.param(("metal", "mps"), id="mps", marks=pytest.mark.mps))
    return params


@pytest.fixture(params=_params())
def metal(request):
    """(backend, device): the kernels in the emulator and, where there is one, on an Apple GPU."""
    name, device = request.param
    if name == EMULATED and name not in backends.names():
        backends.register(Metal(EMULATED, "cpu", emulator.compile_shader))
    return name, device


@pytest.fixture
def by_itself(metal, monkeypatch):
    """The device whose tensors get these kernels by themselves: an Apple GPU, or here the CPU, for which the emulated
    ones take the place of `metal`. And what was compiled."""
    name, device = metal
    sources = []
    if name == EMULATED:

        def compiler(source):
            sources.append(source)
            return emulator.compile_shader(source)

        monkeypatch.setitem(module.backends, "metal", Metal("metal", device, compiler))
    backends._best.cache_clear()
    yield device, sources
    backends._best.cache_clear()
