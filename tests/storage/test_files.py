"""Save and load: what comes back behaves as the original did, bit for bit, and every bad file gets its sentence."""

import builtins
import errno
import itertools
import json
import os
import stat
import sys

import pytest
import torch
from safetensors.torch import load_file

import aurakv as kv
from aurakv.errors import CapacityError, FileError, InputError
from aurakv.storage.pages import parts
from aurakv.storage.uncompressed import Uncompressed
from tools.fuzz_files import File, SmallTensors, append, container, exercise, run, saved

LEVELS = (-2.0, -0.5, 0.25, 1.5)
OWN = kv.Format(kv.Codec.key(32, 2, table=LEVELS, seed=2**64 - 1), kv.Codec.value(16, 3, dtype=torch.float32))
EXACT = Uncompressed(first=3, recent=5, dtype=torch.float16, rollback=6)


def fmt(name, dims=32):
    return kv.Format.parse(name, dims)


def pool(format, page_size, **options):
    return kv.PagePool(format, 1000, page_size, 2, **options)


def offset(dim):
    return torch.randn(2, dim, generator=torch.Generator().manual_seed(3))


CACHES = {
    "contiguous": lambda: kv.KVCache.contiguous(fmt("k4v3"), 4, 2),
    "contiguous with capacity": lambda: kv.KVCache.contiguous(fmt("k8v2"), 4, 2, capacity=500),
    "contiguous uncompressed": lambda: kv.KVCache.contiguous(fmt("k5v6", (64, 32)), 4, 2, uncompressed=EXACT),
    "own levels": lambda: kv.KVCache.contiguous(OWN, 4, 2, uncompressed=Uncompressed(recent=20, dtype=torch.float32)),
    "offsets": lambda: kv.KVCache.contiguous(fmt("k4v4"), 4, 2, key_offset=offset(32), value_offset=offset(32)),
    "16 bits": lambda: kv.KVCache.contiguous(fmt("k16:f32/v16:f16", (24, 7)), 4, 2),
    "mixed": lambda: kv.KVCache.contiguous(fmt("k16/v4"), 4, 2, value_offset=offset(32)),
    "ring": lambda: kv.KVCache.ring(fmt("k4v4"), 4, 2, window=20, page_size=8, chunk=4, rollback=3),
    "ring with sinks": lambda: kv.KVCache.ring(fmt("k3v5"), 4, 2, window=9, sinks=5, page_size=4, chunk=8, rollback=2),
    "ring uncompressed": lambda: kv.KVCache.ring(
        OWN, 4, 2, window=17, sinks=2, page_size=5, rollback=6, uncompressed=EXACT
    ),
    "first tokens": lambda: kv.KVCache.contiguous(fmt("k4v4"), 4, 2, uncompressed=Uncompressed(first=4)),
    "paged by 7, many first tokens": lambda: kv.KVCache.paged(
        pool(fmt("k4v4"), 7, key_offset=offset(32)), 4, uncompressed=Uncompressed(100, 0, torch.float16)
    ),
    "ring first tokens": lambda: kv.KVCache.ring(
        fmt("k4v4"), 4, 2, window=9, page_size=4, uncompressed=Uncompressed(first=2)
    ),
    "ring of one": lambda: kv.KVCache.ring(fmt("k4v4"), 4, 2, window=1, page_size=1, chunk=1),
    "paged": lambda: kv.KVCache.paged(pool(fmt("k4v4"), 16), 4),
    "paged by 1": lambda: kv.KVCache.paged(pool(fmt("k6v8"), 1), 4),
    "paged by 7 uncompressed": lambda: kv.KVCache.paged(pool(OWN, 7, key_offset=offset(32)), 4, uncompressed=EXACT),
    "paged fixed width": lambda: kv.KVCache.paged(pool(fmt("k4v16"), 8), 4, max_tokens=300),
}


@pytest.fixture(params=CACHES)
def filled(request):
    """Sequences of different lengths, one empty, one forked and gone its own way, rings wrapped several times."""
    torch.manual_seed(1)
    cache = CACHES[request.param]()
    cache.backend = "reference"
    append(cache, [70, 0, 33, 5])
    append(cache, [1, 0, 90, 1])
    cache.fork(0, 3)
    append(cache, [40, 0, 0, 2])
    cache.truncate(0, 110)
    return cache


def same_state(a, b):
    assert a.lengths == b.lengths
    for seq in range(a.seqs):
        assert torch.equal(a.positions(seq), b.positions(seq))
        for ours, theirs in zip(a.codes(seq), b.codes(seq), strict=True):
            for x, y in zip(ours, theirs, strict=True):
                assert (x is None) == (y is None)
                assert x is None or torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def same_life(a, b):
    """Whatever is done next gives the same bits on both."""
    steps = [
        lambda c: append(c, [1, 3, 0, 70]),
        lambda c: c.fork(3, 1),
        lambda c: append(c, [2, 1, 1, 0]),
        lambda c: c.truncate(1, c.lengths[1] - 1),
        lambda c: c.reorder([3, 1, 0, 2]),
        lambda c: c.free(2),
        lambda c: append(c, [1, 1, 25, 40]),
    ]
    same_state(a, b)
    for i, step in enumerate(steps):
        for cache in (a, b):
            torch.manual_seed(i)
            step(cache)
        same_state(a, b)
        same_attention(a, b)
    torch.manual_seed(9)
    q = torch.randn(50, 4, a.format.key.dim)
    k, v = (torch.randn(50, 2, codec.dim) for codec in (a.format.key, a.format.value))
    for x, y in zip(*(c.step(q, k, v, [0, 40, 40, 49, 50]) for c in (a, b)), strict=True):
        assert torch.equal(x, y)
    same_state(a, b)


def same_attention(a, b):
    starts = [0, *itertools.accumulate(int(n > 0) for n in a.lengths)]
    q = torch.randn(starts[-1], 4, a.format.key.dim)
    for x, y in zip(a.attend(q, starts), b.attend(q, starts), strict=True):
        assert torch.equal(x, y)
        assert x.isfinite().all()


def test_goes_on_as_the_original(filled, tmp_path):
    kv.save(filled, tmp_path / "c")
    paged = {"spare_pages": 600} if "paged" in str(storage(tmp_path / "c")) else {}
    loaded = kv.load(tmp_path / "c", backend="reference", **paged)
    assert (loaded.format, loaded.uncompressed, loaded.seqs) == (filled.format, filled.uncompressed, filled.seqs)
    assert loaded.page_table.kept == filled.page_table.kept
    assert loaded.page_table.max_width == filled.page_table.max_width
    for name in ("key_offset", "value_offset"):
        ours, theirs = getattr(filled.pool, name), getattr(loaded.pool, name)
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)
    same_life(filled, loaded)
    exercise(loaded)


def test_saving_changes_nothing_and_is_repeatable(filled, tmp_path):
    before = [table.pool.data.clone() for table in filled.page_tables]
    first = saved(filled)
    assert all(torch.equal(a, table.pool.data) for a, table in zip(before, filled.page_tables, strict=True))
    assert saved(filled) == first
    (tmp_path / "c").write_bytes(first)
    assert saved(kv.load(tmp_path / "c")) == first


def test_chosen_sequences_in_their_order(filled, tmp_path):
    kv.save(filled, tmp_path / "c", seqs=[3, 1, 3])
    loaded = kv.load(tmp_path / "c", backend=filled.backend)
    lengths = filled.lengths
    assert loaded.lengths == [lengths[3], lengths[1], lengths[3]]
    filled.reorder([3, 1, 3])
    same_state(filled, loaded)
    same_attention(filled, loaded)
    kv.save(filled, tmp_path / "none", seqs=[])
    assert kv.load(tmp_path / "none").lengths == []


def storage(path):
    return File(path.read_bytes()).manifest["storage"]


@pytest.mark.parametrize("name", CACHES)
def test_empty_caches(name, tmp_path):
    cache = CACHES[name]()
    kv.save(cache, tmp_path / "c")
    loaded = kv.load(tmp_path / "c", **({"spare_pages": 9} if "paged" in name else {}))
    assert loaded.lengths == [0] * 4
    append(loaded, [1, 0, 2, 1])
    assert loaded.lengths == [1, 0, 2, 1]


def test_each_page_is_stored_once(tmp_path):
    cache = kv.KVCache.paged(pool(fmt("k4v4"), 8), 6)
    append(cache, [80, 0, 0, 0, 0, 9])
    for seq in (1, 2, 3):
        cache.fork(0, seq)
    append(cache, [1, 1, 0, 0, 0, 0])
    kv.save(cache, tmp_path / "c")
    pages = load_file(tmp_path / "c")["pages"]  # an ordinary safetensors file
    assert pages.shape[0] == 10 + 1 + 1 + 2  # of the appends each needs a page of its own
    loaded = kv.load(tmp_path / "c", spare_pages=1)
    assert [loaded.pool.references(page) for page in range(15)].count(4) == 10
    assert loaded.pool.free_pages == 1
    loaded.free(5)
    assert loaded.pool.free_pages == 3
    kv.save(cache, tmp_path / "c", seqs=[5])
    assert load_file(tmp_path / "c")["pages"].shape[0] == 2


def test_room_that_is_only_reserved_is_not_saved(tmp_path):
    for make in (CACHES["paged"], CACHES["ring"], CACHES["contiguous"]):
        cache = make()
        append(cache, [3, 0, 0, 20])
        small = saved(cache)
        cache.reserve(100)
        assert saved(cache) == small


def test_contiguous_is_trimmed_and_grows_again(tmp_path):
    cache = kv.KVCache.contiguous(fmt("k4v4"), 2, 2, capacity=10_000)
    append(cache, [3, 65])
    kv.save(cache, tmp_path / "c")
    loaded = kv.load(tmp_path / "c")
    assert loaded.pool.page_size == 128
    append(loaded, [500, 0])
    assert loaded.lengths == [503, 65]


def test_unused_rows_are_zero(tmp_path):
    """A page taken over from a freed sequence must not carry its tokens into the file of another."""
    cache = kv.KVCache.paged(kv.PagePool(fmt("k4v4"), 2, 16, 2), 2)
    append(cache, [32, 0])
    cache.free(0)
    append(cache, [0, 3])
    kv.save(cache, tmp_path / "c")
    file = load_file(tmp_path / "c")["pages"]
    for part in parts(cache.format, file, 16):
        assert (part.data[:, :, 3:] == 0).all()
        assert (part.scale[:, :, 3:] == 0).all()
        assert (part.scale[:, :, :3] != 0).all()


def test_damaged_vectors_stay_damaged(tmp_path):
    cache = kv.KVCache.contiguous(fmt("k4v4"), 1, 1)
    k = torch.randn(3, 1, 32)
    k[1] = torch.nan
    cache.append(k, k, [0, 3])
    kv.save(cache, tmp_path / "c")
    loaded = kv.load(tmp_path / "c")
    same_state(cache, loaded)
    assert loaded.attend(torch.randn(1, 1, 32)).out.isnan().all()


def test_overflow_is_reported_and_nothing_written(tmp_path):
    cache = CACHES["paged"]()
    append(cache, [3, 0, 0, 0])
    kv.append(cache.pages, torch.randn(40, 2, 32), torch.randn(40, 2, 32), [0, 40, 40, 40, 40])
    with pytest.raises(CapacityError, match="an earlier append did not fit"):
        kv.save(cache, tmp_path / "c")
    assert os.listdir(tmp_path) == []
    kv.save(cache, tmp_path / "c")  # reported once
    assert kv.load(tmp_path / "c").lengths == [3, 0, 0, 0]


def test_lengths_written_on_the_device_are_saved(tmp_path):
    cache = CACHES["paged"]()
    cache.reserve(10)
    kv.append(cache.pages, torch.randn(4, 2, 32), torch.randn(4, 2, 32))
    kv.save(cache, tmp_path / "c")
    assert kv.load(tmp_path / "c").lengths == [1] * 4


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
    with pytest.raises(FileNotFoundError):
        kv.load(tmp_path / "missing")
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


def test_the_name_of_the_format_is_spelled_out():
    """Defaults of a name may change one day; a file must not change its meaning with them."""
    manifest = File(saved(CACHES["contiguous"]())).manifest
    assert manifest["format"] == "k4:int8:l2:f16:seed0/v3:cubic:lsq:f16:seed1"
    assert (manifest["kind"], manifest["version"]) == ("aurakv-cache", 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", CACHES)
def test_from_one_device_to_another(name, tmp_path):
    torch.manual_seed(1)
    cache = CACHES[name]()
    append(cache, [70, 0, 33, 5])
    kv.save(cache, tmp_path / "cpu")
    here, there = (kv.load(tmp_path / "cpu", device, "reference") for device in ("cpu", "cuda"))
    assert there.pool.device.type == "cuda"
    q = torch.randn(4, 4, cache.format.key.dim)
    for x, y in zip(here.attend(q[:3], [0, 1, 1, 2, 3]), there.attend(q[:3].cuda(), [0, 1, 1, 2, 3]), strict=True):
        torch.testing.assert_close(x, y.cpu())
    kv.save(there, tmp_path / "cuda")
    assert (tmp_path / "cuda").read_bytes() == (tmp_path / "cpu").read_bytes()


# bad files


def ring_file():
    torch.manual_seed(0)
    cache = kv.KVCache.ring(fmt("k4v4"), 3, 2, window=8, sinks=3, page_size=4, chunk=4, rollback=2, uncompressed=EXACT)
    append(cache, [100, 3, 0])
    return File(saved(cache))


def paged_file():
    torch.manual_seed(0)
    cache = kv.KVCache.paged(pool(fmt("k4v4"), 8, key_offset=offset(32)), 3, max_tokens=40)
    append(cache, [20, 9, 0])
    cache.fork(0, 2)
    return File(saved(cache))


def contiguous_file():
    torch.manual_seed(0)
    cache = kv.KVCache.contiguous(fmt("k4v4"), 2, 2)
    append(cache, [20, 9])
    return File(saved(cache))


def field(name, value):
    def change(file):
        file.manifest[name] = value

    return change


def without(name):
    return lambda file: file.manifest.pop(name)


def number(name, at, value):
    def change(file):
        numbers = file.numbers(name)
        numbers[at] = value
        file.set_numbers(name, numbers)

    return change


def tensor(name, *new):
    def change(file):
        if new:
            file.tensors[name] = list(new)
        else:
            del file.tensors[name]

    return change


def spelled(**options):
    key = {"table": "int8", "scale": "l2", "dtype": "f16", "seed": "seed0"} | options
    return field("format", f"k4:{':'.join(key.values())}/v4:cubic:lsq:f16:seed1")


NAN, INF = 0x7FC00000, 0x7F800000
BAD = [
    (ring_file, field("kind", "other"), "must describe itself as 'aurakv-cache'"),
    (ring_file, field("version", 2), "version must be 1, got 2"),
    (ring_file, field("version", True), "version must be 1, got True"),
    (ring_file, without("version"), "version must be 1, got None"),
    (ring_file, field("storage", "heap"), "storage must be one of .* got heap"),
    (ring_file, field("storage", ["ring"]), "storage must be one of"),
    (ring_file, without("window"), r"fields are not those of a cache: missing \['window'\], unknown \[\]"),
    (ring_file, field("extra", 1), r"missing \[\], unknown \['extra'\]"),
    (ring_file, field("max_width", 3), r"unknown \['max_width'\]"),
    (paged_file, field("window", 3), r"unknown \['window'\]"),
    (ring_file, field("format", 4), "format must be a text, got 4"),
    (ring_file, field("format", "k4v4"), "format must be k<bits>:<options>/v<bits>:<options>, got k4v4"),
    (ring_file, field("format", "k4:int8/v4:cubic"), "format must spell out every option"),
    (ring_file, field("format", "k7:int8/v4:cubic"), "format is wrong: bits must be one of"),
    (ring_file, spelled(table="[" + ",".join(["nan"] * 16) + "]"), "levels must be"),
    (ring_file, spelled(table="[" + ",".join(["1e60"] * 16) + "]"), "levels must be finite"),
    (ring_file, spelled(table="[1,2]"), "needs 16 levels, got 2"),
    (ring_file, spelled(table="[a]"), "levels must be"),
    (ring_file, spelled(table="[" + ",".join(map(str, range(16, 0, -1))) + "]"), "levels must be sorted"),
    (ring_file, spelled(dtype="bf16"), "scales are stored as f16 or f32"),
    (ring_file, spelled(seed="seed18446744073709551616"), "seed must be a whole number from 0"),
    (ring_file, field("key_dim", 0), "key_dim must be a whole number from 1 to 1024, got 0"),
    (ring_file, field("key_dim", 33), "format is wrong: head_dim must be"),
    (ring_file, field("value_dim", 2**40), "value_dim must be a whole number from 1 to 1024"),
    (ring_file, field("value_dim", 64), "'pages' must have the shape"),
    (ring_file, field("kv_heads", 2**20), "kv_heads must be a whole number from 1 to 65536"),
    (ring_file, field("kv_heads", 1), "'pages' must have the shape"),
    (ring_file, field("kv_heads", -1), "kv_heads must be a whole number from 1"),
    (ring_file, field("page_size", 0), "page_size must be a whole number from 1"),
    (ring_file, field("page_size", 4.0), "page_size must be a whole number from 1 to 2147483647, got 4.0"),
    (ring_file, field("page_size", 2**31), "page_size must be a whole number from 1"),
    (ring_file, field("page_size", 8), "must have the shape"),
    (paged_file, field("page_size", 2**31 - 1), r"'pages' must have the shape \[n, 2, 77309411296\]"),
    (contiguous_file, field("page_size", 128), "page_size must be 64 for at most 20 tokens, got 128"),
    (contiguous_file, number("lengths", 0, 65), "page_size must be 128 for at most 65 tokens, got 64"),
    (ring_file, field("window", 0), "window must be a whole number from 1"),
    (ring_file, field("window", 2**31 - 1), "a ring keeps at most 2147483647 tokens"),
    (ring_file, field("window", 100), "'table' must have the shape"),
    (ring_file, field("sinks", -1), "sinks must be a whole number from 0"),
    (ring_file, field("chunk", 0), "chunk must be a whole number from 1"),
    (ring_file, field("rollback", None), "rollback must be a whole number from 0 to 2147483647, got None"),
    (paged_file, field("max_width", 4), r"'table' must have the shape \[3, 4\], got \[3, 5\]"),
    (paged_file, field("max_width", 2), "sequences must have at most 16 tokens, got 20"),
    (paged_file, field("max_width", 0), r"'table' must have the shape \[3, 3\]"),
    (ring_file, field("exact_dtype", "f64"), "exact_dtype must be one of"),
    (ring_file, field("exact_dtype", "f32"), "'exact_pages' must have the shape"),
    (ring_file, field("exact_first", 2**31 - 1), "a ring keeps at most"),
    (ring_file, field("exact_recent", -3), "exact_recent must be a whole number from 0"),
    (ring_file, field("exact_rollback", 10**30), "exact_rollback must be a whole number"),
    (ring_file, field("checksums", []), "checksums must be one for each tensor"),
    (paged_file, number("lengths", 0, -1), "lengths must not be negative, got -1"),
    (paged_file, number("lengths", 0, 41), "sequences must have at most 40 tokens, got 41"),
    (paged_file, number("lengths", 0, 2**31 - 1), "sequences must have at most 40 tokens, got 2147483647"),
    (paged_file, number("lengths", 0, 25), "table names pages outside 0"),
    (paged_file, number("lengths", 1, 3), "table must be -1 where a sequence has no tokens"),
    (paged_file, number("table", 0, 5), "table names pages outside 0 … 4"),
    (paged_file, number("table", 0, -1), "table names pages outside 0"),
    (paged_file, number("table", 0, -(2**31)), "table names pages outside 0"),
    (paged_file, number("table", 1, 0), "table names a page at two different entries"),
    (paged_file, number("table", 5, 1), "table leaves pages unused"),
    (paged_file, number("table", 4, 0), "table must be -1 where"),
    (paged_file, number("key_offset", 1, NAN), "key_offset must be finite"),
    (paged_file, number("key_offset", 1, INF), "key_offset must be finite"),
    (ring_file, number("highest", 0, 99), "highest cannot be 99 for a sequence of 100 tokens"),
    (ring_file, number("highest", 0, -1), "highest cannot be -1 for a sequence of 100 tokens"),
    (ring_file, number("highest", 0, 115), "highest cannot be 115 for a sequence of 100 tokens"),
    (ring_file, number("highest", 1, 4), "highest cannot be 4 for a sequence of 3 tokens"),
    (ring_file, number("exact_highest", 0, 2**31 - 1), "exact_highest cannot be 2147483647 for a sequence of 100"),
    (ring_file, number("lengths", 2, 1), "highest cannot be 0 for a sequence of 1 tokens"),
    (ring_file, number("exact_table", 0, 100), "exact_table names pages outside"),
    (ring_file, tensor("highest"), r"tensors are not those of a cache: missing \['highest'\]"),
    (ring_file, tensor("exact_pages"), r"missing \['exact_pages'\]"),
    (ring_file, tensor("more", "U8", [1], b"x"), r"missing \[\], unknown \['more'\]"),
    (paged_file, tensor("highest", "I32", [1], b"xxxx"), r"unknown \['highest'\]"),
    (paged_file, tensor("lengths", "I64", [3], bytes(24)), "'lengths' must be torch.int32, got torch.int64"),
    (paged_file, tensor("lengths", "I32", [3, 1], bytes(12)), r"'lengths' must have the shape \[n\], got \[3, 1\]"),
    (paged_file, tensor("lengths", "I32", [], bytes(4)), r"'lengths' must have the shape \[n\], got \[\]"),
    (paged_file, tensor("key_offset", "F16", [2, 32], bytes(128)), "'key_offset' must be torch.float32"),
    (paged_file, tensor("key_offset", "F32", [1, 32], bytes(128)), r"'key_offset' must have the shape \[2, 32\]"),
    (paged_file, tensor("pages", "U8", [0, 2, 10], b""), "'pages' must have the shape"),
    (paged_file, tensor("pages", "I8", [4], b"xxxx"), "'pages' must be torch.uint8, got torch.int8"),
]


@pytest.mark.parametrize(("make", "change", "sentence"), BAD, ids=range(len(BAD)))
def test_hostile_files(make, change, sentence, tmp_path):
    file = make()
    (tmp_path / "c").write_bytes(file.raw())
    kv.load(tmp_path / "c")  # right before the change
    change(file)
    refused(tmp_path / "c", file.raw(), sentence)


def refused(path, raw, sentence):
    path.write_bytes(raw)
    with pytest.raises(FileError, match=sentence) as info, SmallTensors(4 * len(raw) + 4096):
        kv.load(path)
    assert str(info.value).startswith(f"{path} is not a cache that can be loaded: ")
    assert "\n" not in str(info.value)
    assert path.read_bytes() == raw


def test_an_offset_at_16_bits(tmp_path):
    file = File(saved(kv.KVCache.contiguous(fmt("k16/v4"), 1, 1)))
    file.tensors["key_offset"] = ["F32", [1, 32], bytes(128)]
    refused(tmp_path / "c", file.raw(), "key_offset has no meaning for vectors stored at 16 bits")


def test_corrupted_and_truncated(tmp_path):
    path, raw = tmp_path / "c", paged_file().raw()
    for name, sentence in (("pages", "'pages' is corrupted"), ("table", "'table' is corrupted")):
        file = paged_file()
        file.tensors[name][2][-1] ^= 1
        refused(path, file.raw(seal=False), f"{sentence}: the checksum differs")
    file = ring_file()
    file.manifest["rollback"] = 1
    refused(path, file.raw(seal=False), "its description is corrupted: the checksum differs")
    refused(path, raw[:-1], "it is not a whole safetensors file")
    refused(path, raw + b"\0", "it is not a whole safetensors file")
    refused(path, b"", "its header is not JSON")
    refused(path, raw[:100], "its header is not JSON")
    refused(path, b"\xff" * 100, "the header of a cache has at most 65536 bytes")
    refused(path, (9000).to_bytes(8, "little") + b"[" * 9000, "its header is not JSON")


def test_every_flipped_bit_is_noticed(tmp_path):
    path, raw = tmp_path / "c", bytearray(saved(kv.KVCache.ring(kv.Format.parse("k2v2", 16), 1, 1, window=2)))
    for at in range(0, len(raw), 3):
        raw[at] ^= 1 << at % 8
        path.write_bytes(raw)
        with pytest.raises(FileError):
            kv.load(path)
        raw[at] ^= 1 << at % 8


def test_metadata_given_twice_or_in_excess(tmp_path):
    path, file = tmp_path / "c", ring_file()
    text = file.text()
    refused(path, file.raw(text=text[:-1] + ',"window":8}'), "a name is given twice")
    refused(path, container({"aurakv": text, "more": "x"}, file.tensors), "its metadata must be a text called 'aurakv'")
    refused(path, container({"other": text}, file.tensors), "its metadata must be a text called 'aurakv'")
    refused(path, container(None, file.tensors), "its metadata must be a text called 'aurakv'")
    raw = file.raw()
    size = int.from_bytes(raw[:8], "little")
    twin = b"{" + b'"__metadata__":{"aurakv":"x"},' + raw[9 : 8 + size]
    refused(path, len(twin).to_bytes(8, "little") + twin + raw[8 + size :], "a name is given twice")
    refused(path, file.raw(text=json.dumps([text])), "must describe itself")
    refused(path, file.raw(text="{" * 5000), "its header is not JSON")


def test_widths_that_cost_nothing_in_a_file_cost_nothing_in_memory(tmp_path):
    """Without sequences a table of any width takes no bytes."""
    for make, name, widest in ((ring_file, "window", 2**30), (paged_file, "max_width", 2**31 - 1)):
        file = make()
        for prefix in ("", "exact_") if name == "window" else ("",):
            file.tensors[f"{prefix}pages"][1:] = [[0, *file.tensors[f"{prefix}pages"][1][1:]], b""]
            file.tensors[f"{prefix}table"][1:] = [[0, file.tensors[f"{prefix}table"][1][1]], b""]
            if name == "window":
                file.set_numbers(f"{prefix}highest", [], [0])
        file.set_numbers("lengths", [], [0])
        width = -(-3 // 4) + -(-(widest + 4 - 1 + 2) // 4) + 1 if name == "window" else widest
        file.manifest[name] = widest
        file.tensors["table"][1] = [0, width]
        (tmp_path / "c").write_bytes(file.raw())
        with SmallTensors(4096):
            assert kv.load(tmp_path / "c").lengths == []


def test_a_ring_at_the_end_of_its_positions(tmp_path):
    """A length near 2^31 is legal in a ring: nothing may be as large as it, and an append beyond is refused."""
    file = ring_file()
    for name in ("lengths", "highest", "exact_highest"):
        file.set_numbers(name, [2**31 - 2, *file.numbers(name)[1:]])
    (tmp_path / "c").write_bytes(file.raw())
    with SmallTensors(2**20):
        cache = kv.load(tmp_path / "c")
        assert len(cache.positions(0)) < 40
        append(cache, [1, 0, 0])
        assert cache.attend(torch.randn(1, 2, 32), [0, 1, 1, 1]).out.isfinite().all()
        with pytest.raises(CapacityError, match="a sequence has at most 2147483647 tokens, got 2147483648"):
            append(cache, [1, 0, 0])
    assert cache.lengths[0] == 2**31 - 1


def test_the_memory_limit_of_these_tests_works(tmp_path):
    raw = paged_file().raw()
    (tmp_path / "c").write_bytes(raw)
    with pytest.raises(AssertionError, match="more than"), SmallTensors(4 * len(raw)):
        kv.load(tmp_path / "c", spare_pages=200)


def test_fuzz(tmp_path):
    outcomes = run(1500, 1, tmp_path)
    assert outcomes["a right cache"] > 50
    assert len(outcomes) > 40
