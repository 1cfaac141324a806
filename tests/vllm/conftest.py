"""What tests of vLLM's engine share."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # before vLLM is imported: engines run in this process
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session", autouse=True)
def emulated() -> Iterator[None]:
    """With --emulate, layers in engines are on that GPU."""
    from tests.helpers.gpu import EMULATED  # known once pytest is configured

    with pytest.MonkeyPatch.context() as patch:
        if EMULATED and importlib.util.find_spec("vllm"):
            from tests.helpers import emulated_vllm

            emulated_vllm.start(patch)
        yield


@pytest.fixture
def calibrations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """Where calibrations are kept; `model` lies in the folder of the user."""
    if "model" in request.fixturenames:
        request.getfixturevalue("model")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "aurakv" / "calibrations"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.vllm.test_engine import random_model

    return random_model(tmp_path_factory.mktemp("llama"), "llama")
