"""Caches of the original kernels against packers written here, bit by bit, as those kernels state their layouts."""

import math

import numpy as np
import pytest
import torch

import aurakv as kv
from aurakv.errors import InputError
from aurakv.storage.legacy import codes_from_nibbles, codes_from_u32

BITS = (2, 3, 4, 5, 6, 8)
DIMS = (16, 64, 80, 112, 128, 256, 576)


def u32_words(codes: list[int], bits: int) -> list[int]:
    """One row of AURA: code i at bit i·bits of the stream, word after word, the rest of the last word 0."""
    words = [0] * math.ceil(len(codes) * bits / 32)
    for i, code in enumerate(codes):
        word, shift = divmod(i * bits, 32)
        words[word] |= (code << shift) & 0xFFFFFFFF
        if shift + bits > 32:
            words[word + 1] |= code >> (32 - shift)
    return words


def random_cache(dim, bits, *shape):
    generator = torch.Generator().manual_seed(dim * bits)
    codes = torch.randint(0, 2**bits, (*shape, dim), generator=generator)
    return codes, torch.rand(shape, generator=generator) * 10


def as_int32(words) -> torch.Tensor:
    return torch.tensor(words, dtype=torch.int64).to(torch.uint32).view(torch.int32)


def expected(codes, norms, codec, divisor):
    """x̂ = Rᵀ · norm · level / divisor in float64."""
    levels = torch.tensor(codec.levels, dtype=torch.float64)
    return codec.unrotate(levels[codes] * norms.double()[..., None] / divisor)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", DIMS)
def test_u32(dim, bits):
    codec = kv.Codec(dim, bits, dtype=torch.float32)
    codes, norms = random_cache(dim, bits, 5, 3)
    words = as_int32([[u32_words(row, bits) for row in token] for token in codes.tolist()])
    for given, options in ((words, {}), (words.view(torch.uint32), {}), (words, {"divisor": math.sqrt(dim)})):
        got = codes_from_u32(given, norms, codec, **options)
        assert got.data.shape == (5, 3, codec.row_bytes)
        want = expected(codes, norms, codec, options.get("divisor", 1.0))
        error = (kv.decode(got, codec, dtype=torch.float64) - want).norm() / want.norm()
        assert error < 1e-7  # the scale is rounded to float32 once


@pytest.mark.parametrize("dim", [64, 128, 256, 512])
def test_nibbles(dim):
    codec = kv.Codec(dim, 4, dtype=torch.float32)
    codes, norms = random_cache(dim, 4, 2, 7, 3)
    data = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    got = codes_from_nibbles(data, norms, codec)
    want = expected(codes, norms, codec, math.sqrt(dim))
    assert (kv.decode(got, codec, dtype=torch.float64) - want).norm() < 1e-7 * want.norm()
    bare = codes_from_nibbles(data, norms, codec, divisor=1.0)
    assert torch.equal(bare.scale, norms)


def test_equal_norms_of_blocks_become_one_scale():
    codec = kv.Codec(512, 4, dtype=torch.float32)
    codes, norms = random_cache(512, 4, 4, 2)
    data = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    both = norms[..., None].repeat(1, 1, 2)
    assert torch.equal(codes_from_nibbles(data, both, codec).scale, codes_from_nibbles(data, norms, codec).scale)
    both[3, 1, 1] *= 1.001
    with pytest.raises(InputError, match="norms of the 2 blocks of a vector must be equal to become one scale"):
        codes_from_nibbles(data, both, codec)


def test_appended_codes_attend_as_the_original_would():
    """A float64 softmax over the vectors that the original kernels decode, keys of 3 bits and values of 4."""
    torch.manual_seed(0)
    key, value = kv.Codec(80, 3, dtype=torch.float32), kv.Codec(64, 4, dtype=torch.float32, seed=5)
    codes, norms = random_cache(80, 3, 50, 2)
    words = as_int32([[u32_words(row, 3) for row in token] for token in codes.tolist()])
    nibbles, value_norms = random_cache(64, 4, 50, 2)
    data = (nibbles[..., 0::2] | nibbles[..., 1::2] << 4).to(torch.uint8)
    cache = kv.KVCache.contiguous(kv.Format(key, value), 1, 2, backend="reference")
    cache.append_codes(codes_from_u32(words, norms, key), codes_from_nibbles(data, value_norms, value), [0, 50])
    q = torch.randn(1, 4, 80, dtype=torch.float64)
    k, v = expected(codes, norms, key, 1.0), expected(nibbles, value_norms, value, 8.0)
    weight = torch.einsum("hgd,nhd->hgn", q[0].view(2, 2, 80), k).div(math.sqrt(80)).softmax(-1)
    want = torch.einsum("hgn,nhd->hgd", weight, v).view(1, 4, 64)
    assert (cache.attend(q).out - want).norm() < 1e-6 * want.norm()


def test_scales_beyond_float16_saturate_as_in_encode():
    codec = kv.Codec(16, 8)
    got = codes_from_u32(torch.zeros(2, 1, 4, dtype=torch.int32), torch.tensor([[1e9], [1.0]]), codec)
    assert got.scale.tolist() == [[torch.finfo(torch.float16).max], [1.0]]


def test_padding_bits_must_be_zero():
    codec = kv.Codec(80, 3)  # 240 bits in 8 words
    words = torch.full((1, 1, 8), -1, dtype=torch.int32)
    words[..., 7] = 0xFFFF
    codes_from_u32(words, torch.ones(1, 1), codec)
    for bit in (16, 24, 31):
        bad = words.clone()
        bad[..., 7] = (words[..., 7].long() | 1 << bit).to(torch.uint32).view(torch.int32)
        with pytest.raises(InputError, match="the bits of a row after its 80 codes of 3 bits must be 0"):
            codes_from_u32(bad, torch.ones(1, 1), codec)


def words(*shape):
    return torch.zeros(shape, dtype=torch.int32)


def octets(*shape):
    return torch.zeros(shape, dtype=torch.uint8)


C4, C512 = kv.Codec(64, 4), kv.Codec(512, 4)
UNCODED = kv.Codec(64, 16, dtype=torch.float16)
ONE = torch.ones(3, 2)
BAD = [
    (codes_from_u32, words(3, 2, 8), ONE, UNCODED, "must not be one of 16 bits"),
    (codes_from_u32, words(3, 2, 8).long(), ONE, C4, "words must be uint32 or int32, got torch.int64"),
    (codes_from_u32, [1, 2], ONE, C4, "words must be uint32 or int32, got list"),
    (codes_from_u32, words(3, 2, 7), ONE, C4, r"words must be \[..., kv_heads, 8\] for 64 codes of 4 bits"),
    (codes_from_u32, words(8), ONE, C4, r"words must be \[..., kv_heads, 8\]"),
    (codes_from_u32, words(3, 2, 8), torch.ones(2, 3), C4, r"norms must be \[3, 2\] like the rows, got \[2, 3\]"),
    (codes_from_u32, words(3, 2, 8), ONE.long(), C4, "norms must be float32, float16, bfloat16 or float64"),
    (codes_from_u32, words(3, 2, 8), ONE.to("meta"), C4, "norms must be on cpu like the codes, got meta"),
    (codes_from_u32, words(3, 2, 8), ONE * torch.nan, C4, "norms must be finite and not negative"),
    (codes_from_u32, words(3, 2, 8), ONE * torch.inf, C4, "norms must be finite and not negative"),
    (codes_from_u32, words(3, 2, 8), -ONE, C4, "norms must be finite and not negative"),
    (codes_from_u32, words(3, 2, 8), ONE.clone().requires_grad_(), C4, "norms requires grad"),
    (codes_from_nibbles, octets(3, 2, 32), ONE, UNCODED, "must not be one of 16 bits"),
    (codes_from_nibbles, octets(3, 2, 32), ONE, kv.Codec(64, 3), "nibbles need a codec of 4 bits, got 3"),
    (codes_from_nibbles, octets(3, 2, 32).int(), ONE, C4, "data must be uint8, got torch.int32"),
    (codes_from_nibbles, octets(3, 2, 64), ONE, C4, r"data must be \[..., kv_heads, 32\]"),
    (codes_from_nibbles, octets(3, 2, 32), torch.ones(3, 2, 2), C4, r"norms must be \[3, 2\] like the rows"),
    (codes_from_nibbles, octets(3, 2, 256), torch.ones(3, 2, 4), C512, r"norms must be \[3, 2, 2\] like the rows"),
    (codes_from_nibbles, octets(3, 2, 256), [1.0], C512, "norms must be a tensor, got list"),
]


@pytest.mark.parametrize(("function", "data", "norms", "codec", "sentence"), BAD, ids=range(len(BAD)))
def test_wrong_input(function, data, norms, codec, sentence):
    with pytest.raises(InputError, match=sentence):
        function(data, norms, codec)


def test_divisors_of_any_kind():
    given = [codes_from_nibbles(octets(3, 2, 32), ONE, C4, divisor=x).scale for x in (8, 8.0, np.float32(8))]
    assert torch.equal(given[0], given[1])
    assert torch.equal(given[0], given[2])


@pytest.mark.parametrize("divisor", [0.0, -1.0, math.nan, math.inf, True, "8"])
def test_wrong_divisor(divisor):
    with pytest.raises(InputError, match="divisor must be positive and finite"):
        codes_from_nibbles(octets(3, 2, 32), ONE, C4, divisor=divisor)
    with pytest.raises(InputError, match="divisor must be positive and finite"):
        codes_from_u32(words(3, 2, 8), ONE, C4, divisor=divisor)
