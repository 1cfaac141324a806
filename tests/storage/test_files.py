"""Save and load: what comes back behaves as the original did, bit for bit."""

import itertools

import pytest
import torch
from safetensors.torch import load_file

import aurakv as kv
from aurakv.errors import CapacityError
from aurakv.storage.pages import parts
from tests.storage.file_cases import CACHES, fmt, pool, ring_file
from tools.fuzz_files import File, SmallTensors, append, exercise, saved


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


def test_lengths_written_on_the_device_are_saved(tmp_path):
    cache = CACHES["paged"]()
    cache.reserve(10)
    kv.append(cache.pages, torch.randn(4, 2, 32), torch.randn(4, 2, 32))
    kv.save(cache, tmp_path / "c")
    assert kv.load(tmp_path / "c").lengths == [1] * 4


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
