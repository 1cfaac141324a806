"""Format names, sizes and the page layout."""

import itertools

import pytest
import torch

import aurakv as kv
from aurakv.errors import InputError

NAMES = [
    "k4v4",
    "k8v3",
    "k16v4",
    "k16v16",
    "k5v2",
    "k6v5",
    "k4:lsq/v4",
    "k4v4:f32",
    "k4:lloyd-max:lsq:f32:seed7/v8:cubic:l2",
    "k16:f32/v16:f16",
    "k4:minifloat/v4:minifloat",
    "k3v3:minifloat",
    "k2:[-1.5,-0.25,0.5,2.0]/v3",
]


@pytest.mark.parametrize("name", NAMES)
def test_names_parse_and_print(name):
    fmt = kv.Format.parse(name, 128)
    assert str(fmt) == name
    assert kv.Format.parse(str(fmt), 128) == fmt


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("k4:int8:l2:f16:seed0/v4:cubic:lsq:f16:seed1", "k4v4"),
        ("k4/v4", "k4v4"),
        ("k16:bf16/v4", "k16v4"),
        ("k4:f32:lsq/v4", "k4:lsq:f32/v4"),
    ],
)
def test_defaults_are_not_printed(spelled, name):
    assert str(kv.Format.parse(spelled, 128)) == name


WRONG = """ k4|v4k4|k4v|k04v4|k4v4 |K4V4|k7v4|k4:lsqv4|k4:lsq:l2/v4|k4:nonsense/v4|k16:lsq/v4|k4:int8:cubic/v4
k2:[1,2]/v4|k2:[4,3,2,1]/v4|k2:[0,1,2,1e99]/v4|k2:[0,1,2,nan]/v4|k2:[0,1,2,1_4]/v4|k2:[]/v4|k8:int8/v4|k2:minifloat/v4
k4v4:bf16|k4v4:seed99999999999999999999|k\u0664v4|k4v4\n""".replace("/v4\n", "/v4|").split("|")


@pytest.mark.parametrize("name", [*WRONG, "k4:seed\uff11/v4", "k4v4:seed\u0663", "", 4, None])
def test_wrong_names_are_refused(name):
    with pytest.raises(InputError):
        kv.Format.parse(name, 64)


@pytest.mark.parametrize("head_dim", [64.0, "64", (64,), (64, 64, 64), None, (64, 100)])
def test_wrong_dimensions_are_refused(head_dim):
    with pytest.raises(InputError, match="head_dim must be"):
        kv.Format.parse("k4v4", head_dim)


def test_user_levels_survive_the_name():
    levels = torch.randn(256, generator=torch.Generator().manual_seed(0)).sort().values.tolist()
    fmt = kv.Format(kv.Codec.key(64, 8, table=tuple(levels)), kv.Codec.value(64, 4))
    again = kv.Format.parse(fmt.name, 64)
    assert again == fmt
    assert again.key.levels == fmt.key.levels == tuple(torch.tensor(levels).tolist())


@pytest.mark.parametrize(
    ("name", "ratio"), [("k4v4", 3.88), ("k4v2", 5.12), ("k8v4", 2.61), ("k3v3", 5.12), ("k2v2", 7.53), ("k16v16", 1.0)]
)
def test_compression(name, ratio):
    """The sizes that the specification states for D = 128."""
    fmt = kv.Format.parse(name, 128)
    assert round(fmt.compression, 2) == ratio
    assert fmt.bytes_per_token == round(512 / fmt.compression)


def test_dtype_of_sixteen_bit_sides():
    assert str(kv.Format.parse("k16v4", 64, dtype=torch.float32)) == "k16:f32/v4"
    assert kv.Format.parse("k16:f16/v16", 64, dtype=torch.float32).key.dtype == torch.float16


def test_key_and_value_dimensions_may_differ():
    fmt = kv.Format.parse("k4v3", (192, 128))
    assert (fmt.key.row_bytes, fmt.value.row_bytes) == (96, 48)


@pytest.mark.parametrize("name", ["k4v4", "k3v5", "k16:f32/v2", "k4:f32/v6", "k2v16"])
@pytest.mark.parametrize("page_size", [1, 7, 16, 64, 1000])
@pytest.mark.parametrize("dim", [80, 128])
def test_page_layout(name, page_size, dim):
    fmt = kv.Format.parse(name, dim)
    layout = fmt.layout(page_size)
    sizes = [fmt.key.row_bytes, fmt.key.scale_bytes, fmt.value.row_bytes, fmt.value.scale_bytes]
    for (start, end), size in zip(itertools.pairwise(layout), sizes, strict=True):
        assert start % 16 == 0
        assert 0 <= end - start - size * page_size < 16
    if page_size % 8 == 0:  # no padding in ordinary pages
        assert layout.bytes == page_size * fmt.bytes_per_token


def test_pages_hold_what_the_layout_says():
    """The bytes of a page, picked out by hand."""
    fmt = kv.Format.parse("k3v5:f32", 80)
    cache = kv.KVCache.paged(kv.PagePool(fmt, 2, 24, kv_heads=3), 1)
    k, v = torch.randn(30, 3, 80), torch.randn(30, 3, 80)
    cache.append(k, v, [0, 30])
    keys, values = kv.encode(k, fmt.key), kv.encode(v, fmt.value)
    raw, table = cache.pages.data, cache.pages.table[0].tolist()
    at = fmt.layout(24)
    for pos in range(30):
        for head in range(3):
            piece, row = raw[table[pos // 24], head], pos % 24
            assert torch.equal(piece[at.key_codes + row * 30 :][:30], keys.data[pos, head])
            assert torch.equal(piece[at.key_scales + row * 2 :][:2].view(torch.float16)[0], keys.scale[pos, head])
            assert torch.equal(piece[at.value_codes + row * 50 :][:50], values.data[pos, head])
            assert torch.equal(piece[at.value_scales + row * 4 :][:4].view(torch.float32)[0], values.scale[pos, head])
