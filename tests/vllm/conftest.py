"""What tests of vLLM's engine share."""

from pathlib import Path

import pytest


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
