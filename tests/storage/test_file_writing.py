"""What cannot be saved or written: one sentence, and no file is lost."""

import builtins
import errno
import os
import stat
import sys

import pytest
import torch

import aurakv as kv
from aurakv.errors import CapacityError, FileError, InputError
from tests.storage.file_cases import CACHES
from tools.fuzz_files import append


def test_overflow_is_reported_and_nothing_written(tmp_path):
    cache = CACHES["paged"]()
    append(cache, [3, 0, 0, 0])
    kv.append(cache.pages, torch.randn(40, 2, 32), torch.randn(40, 2, 32), [0, 40, 40, 40, 40])
    with pytest.raises(CapacityError, match="an earlier append did not fit"):
        kv.save(cache, tmp_path / "c")
    assert os.listdir(tmp_path) == []
    kv.save(cache, tmp_path / "c")  # reported once
    assert kv.load(tmp_path / "c").lengths == [3, 0, 0, 0]


def test_what_cannot_be_saved(tmp_path):
    cache = CACHES["paged"]()
    with pytest.raises(InputError, match="this cache has sequences 0 … 3, got 4"):
        kv.save(cache, tmp_path / "c", seqs=[0, 4])
    cache.pages.lengths.fill_(5)
    with pytest.raises(InputError, match="lengths were raised beyond the pages it has"):
        kv.save(cache, tmp_path / "c")
    uncompressed = CACHES["contiguous uncompressed"]()
    uncompressed.reserve(4)
    kv.append(uncompressed.pages, torch.randn(4, 2, 64), torch.randn(4, 2, 32))
    with pytest.raises(InputError, match="keeps uncompressed tokens"):
        kv.save(uncompressed, tmp_path / "c")
    assert os.listdir(tmp_path) == []


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    cache = CACHES["contiguous"]()
    path = tmp_path / "c"
    kv.save(cache, path)
    old = path.read_bytes()
    append(cache, [1, 2, 3, 4])

    def fail(*args):
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space"):
        kv.save(cache, path)
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ["c"]


def test_what_cannot_be_written_is_called_as_the_user_did(tmp_path, monkeypatch):
    cache, missing, folder = CACHES["contiguous"](), tmp_path / "missing" / "c", tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(FileError, match=f"^{missing} cannot be written: there is no folder {missing.parent}$"):
        kv.save(cache, missing)
    with pytest.raises(FileError, match=f"^{folder} cannot be written: it is a folder$"):
        kv.save(cache, str(folder))

    def fail(source, target):
        raise PermissionError(errno.EACCES, "Permission denied", str(source))

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(PermissionError) as caught:
        kv.save(cache, tmp_path / "c")
    assert caught.value.filename == str(tmp_path / "c")
    assert os.listdir(tmp_path) == ["folder"]
    assert os.listdir(folder) == []


@pytest.mark.skipif(sys.platform == "win32", reason="permissions of POSIX")
def test_permissions_are_those_of_any_new_file(tmp_path):
    kv.save(CACHES["ring"](), tmp_path / "c")
    (tmp_path / "d").write_bytes(b"")
    assert stat.S_IMODE((tmp_path / "c").stat().st_mode) == stat.S_IMODE((tmp_path / "d").stat().st_mode)


def test_arguments(tmp_path):
    kv.save(CACHES["ring"](), tmp_path / "c")
    with pytest.raises(InputError, match="spare_pages are for paged caches, got 3 for a ring one") as info:
        kv.load(tmp_path / "c", spare_pages=3)
    assert not isinstance(info.value, FileError)
    with pytest.raises(InputError, match="spare_pages must be a whole number of at least 0, got -1"):
        kv.load(tmp_path / "c", spare_pages=-1)
    with pytest.raises(FileError, match=r"missing cannot be read: No such file or directory$"):
        kv.load(tmp_path / "missing")
    with pytest.raises(FileError, match="cannot be read: Is a directory"):
        kv.load(tmp_path)
    with pytest.raises(InputError, match=r"^device must be a torch.device or the name of one"):
        kv.load(tmp_path / "c", "banana")
    assert kv.load(str(tmp_path / "c"), "cpu", "reference").backend == "reference"


def test_safetensors_is_optional(tmp_path, monkeypatch):
    cache = CACHES["ring"]()
    real = builtins.__import__

    def blocked(name, *args, **kwargs):
        if name.startswith("safetensors"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", blocked)
    for call in (lambda: kv.save(cache, tmp_path / "c"), lambda: kv.load(tmp_path / "c")):
        with pytest.raises(InputError, match=r"need the package safetensors: pip install aurakv\[files\]"):
            call()
    assert os.listdir(tmp_path) == []
