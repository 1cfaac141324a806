"""The codec against theory, the specification's numbers and golden bytes."""

import itertools
import json
import math

import numpy as np
import pytest
import torch

import aurakv as kv
from aurakv.errors import InputError
from aurakv.format import levels as level_tables
from aurakv.format import rotation
from aurakv.format.levels import CODE_BITS
from aurakv.format.packing import pack, unpack
from tools.make_golden import DIMS, PATH, golden

LLOYD_MAX = {
    2: (0.4527800, 1.5104176),
    3: (0.2450942, 0.7560053, 1.3439093, 2.1519457),
    4: (0.1283950, 0.3880483, 0.6567591, 0.9423405, 1.2562312, 1.6180464, 2.0690172, 2.7325896),
}
MSE = {2: 0.117482, 3: 0.0345478, 4: 0.00950101, 5: 0.00250467, 6: 6.44240e-4, 8: 4.11851e-5}


def theory(codec):
    return level_tables.mse(codec.levels)


def relative_error(x, codec):
    """Mean squared error of encode and decode, relative to the mean square of each vector."""
    decoded = kv.decode(kv.encode(x, codec), codec, dtype=x.dtype)
    return ((decoded - x).square().sum(-1) / x.square().sum(-1)).mean().item()


def test_golden():
    """Signs, levels, codes and scales never change: files and transfers depend on them."""
    expected = json.loads(PATH.read_text())
    assert golden() == expected


@pytest.mark.parametrize("bits", LLOYD_MAX)
def test_lloyd_max_levels_equal_the_specification(bits):
    solved = level_tables._solve_lloyd_max(2 ** (bits - 1))  # float64; the specification prints seven decimals of it
    assert tuple(round(x, 7) for x in solved) == LLOYD_MAX[bits]
    levels = level_tables.lloyd_max(bits)
    assert levels[2 ** (bits - 1) :] == tuple(np.float32(x) for x in solved)
    assert levels == tuple(-x for x in reversed(levels))


@pytest.mark.parametrize("bits", CODE_BITS)
def test_scalar_mse_equals_theory(bits):
    """By the formula, and by quantising four million normal numbers, one from each of as many equal shares."""
    levels = level_tables.lloyd_max(bits)
    assert level_tables.mse(levels) == pytest.approx(MSE[bits], rel=1e-3)
    jitter = torch.rand(4_000_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = torch.special.ndtri((torch.arange(4_000_000) + jitter) / 4_000_000)
    codes = torch.bucketize(x, torch.tensor(level_tables.boundaries(levels), dtype=torch.float64))
    assert (torch.tensor(levels, dtype=torch.float64)[codes] - x).square().mean().item() == pytest.approx(
        MSE[bits], rel=1e-3
    )


def test_each_level_is_the_mean_of_its_cell():
    """Lloyd-Max at every width to float64 accuracy: the defining equations, not a number of iterations."""
    for bits in CODE_BITS:
        half = level_tables._solve_lloyd_max(2 ** (bits - 1))
        edges = [0.0, *((a + b) / 2 for a, b in itertools.pairwise(half)), math.inf]
        for level, lo, hi in zip(half, edges, edges[1:], strict=False):
            mass, first, _ = level_tables._moments(lo, hi)
            assert abs(first / mass - level) < 1e-11
    assert level_tables._solve_lloyd_max(128)[-1] == pytest.approx(4.6035356, abs=1e-7)


@pytest.mark.parametrize(("bits", "excess"), [(2, 1e-6), (3, 3e-5), (4, 5.5e-4), (5, 6e-3), (6, 2.9e-2)])
def test_int8_table_is_the_best_of_its_kind(bits, excess):
    """The pinned integers and divisor are what a search over divisors finds."""
    best = level_tables.lloyd_max(bits)
    half = np.array(best[2 ** (bits - 1) :])
    assert level_tables.mse(level_tables.table("int8", bits)) / level_tables.mse(best) - 1 < excess

    def error(divisor):
        integers = np.round(half * divisor)
        if integers.max() > 126 or len(set(integers)) < len(integers):
            return math.inf
        return level_tables.mse([*(-integers[::-1] / divisor), *(integers / divisor)])

    searched = min(error(round(divisor, 2)) for divisor in np.arange(20, 60, 0.01))
    assert level_tables.mse(level_tables.table("int8", bits)) == pytest.approx(searched, rel=1e-6)


@pytest.mark.parametrize(
    ("bits", "excess"), [(2, 1e-9), (3, 2.2e-3), (4, 1.97e-2), (5, 5.8e-2), (6, 0.112), (8, 0.241)]
)
def test_cubic_table_is_the_best_of_its_kind(bits, excess):
    pinned = level_tables.mse(level_tables.table("cubic", bits))
    assert pinned / level_tables.mse(level_tables.lloyd_max(bits)) - 1 < excess
    a, b = level_tables.CUBIC[bits]
    x = np.arange(2**bits) - (2**bits - 1) / 2
    for da, db in ((1e-4, 0), (-1e-4, 0), (0, 1e-3), (0, -1e-3), (1e-4, -1e-3), (-1e-4, 1e-3)):
        nudged = a * (1 + da) * x * (1 + b * (1 + db) * x * x)
        assert level_tables.mse(list(nudged)) > pinned * (1 - 1e-9)


@pytest.mark.parametrize("bits", CODE_BITS)
def test_uniform_table_is_the_best_of_its_kind(bits):
    levels = level_tables.table("uniform", bits)
    assert np.allclose(np.diff(levels), levels[-1] - levels[-2], rtol=1e-5)
    pinned = level_tables.mse(levels)
    for factor in (0.9999, 1.0001):
        assert level_tables.mse([x * factor for x in levels]) > pinned
    assert bits > 2 or pinned / level_tables.mse(level_tables.lloyd_max(bits)) < 1.0117


@pytest.mark.parametrize(("bits", "excess"), [(5, 0.0117), (6, 0.0103), (8, 0.043)])
def test_poly7_table_is_the_best_of_its_kind(bits, excess):
    """Neighbours of its numbers are worse, and its levels are float16 numbers but for a factor."""
    levels = level_tables.table("poly7", bits)
    numbers = level_tables.POLY7[bits]
    assert level_tables.mse(levels) / level_tables.mse(level_tables.lloyd_max(bits)) - 1 < excess
    unit = np.array(levels) / numbers[0]
    assert np.abs(unit / np.float16(unit) - 1).max() < 1e-7  # but for the rounding of levels to float32
    x = (2 * np.arange(2**bits) + 1) / 2**bits - 1

    def error(a, b, c, d):
        return level_tables.mse(list(a * x * (1 + b * x**2 + c * x**4 + d * x**6)))

    pinned = error(*numbers)
    for i, step in enumerate((0.005, 2**-5, 2**-5, 2**-5)):
        for moved in (numbers[i] - step, numbers[i] + step):
            assert numbers[i] == 0 or error(*numbers[:i], moved, *numbers[i + 1 :]) > pinned


@pytest.mark.parametrize(("bits", "least", "most"), [(3, 0.005, 0.0052), (4, 0.06, 0.061)])
def test_minifloat_table(bits, least, most):
    levels = level_tables.table("minifloat", bits)
    pinned = level_tables.mse(levels)
    assert least < pinned / level_tables.mse(level_tables.lloyd_max(bits)) - 1 < most
    for factor in (0.999, 1.001):
        assert level_tables.mse([x * factor for x in levels]) > pinned


@pytest.mark.parametrize("dim", [*DIMS, 16, 32, 48, 144, 224, 384, 1024])
def test_rotation_is_orthonormal(dim):
    r = rotation.rotation(dim, 3, torch.float64, torch.device("cpu"))
    torch.testing.assert_close(r @ r.T, torch.eye(dim, dtype=torch.float64), atol=1e-12, rtol=0)
    h = rotation.hadamard(dim)
    assert set(h.unique().tolist()) == {-1.0, 1.0} or dim == 1


@pytest.mark.parametrize("dim", [0, 8, 24, 72, 100, 120, 136, 2048, 128.0, "128"])
def test_other_dimensions_are_refused(dim):
    with pytest.raises(InputError, match="head_dim must be"):
        kv.Codec.key(dim, 4)


def test_splitmix64_known_answers():
    """Outputs of splitmix64(1234567), from its reference implementation's published test vector."""
    outputs = (6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821)
    assert rotation.signs(5, 1234567) == [-1 if x >> 63 else 1 for x in outputs]


@pytest.mark.parametrize("bits", CODE_BITS)
def test_pack_is_the_little_endian_bit_stream(bits):
    codes = torch.randint(0, 2**bits, (5, 3, 80), generator=torch.Generator().manual_seed(bits))
    data = pack(codes, bits)
    assert data.shape == (5, 3, 80 * bits // 8)
    for row, packed in zip(codes.flatten(0, 1).tolist(), data.flatten(0, 1).tolist(), strict=True):
        stream = sum(code << (i * bits) for i, code in enumerate(row))
        assert stream.to_bytes(len(packed), "little") == bytes(packed)
    assert torch.equal(unpack(data, bits), codes)


def test_nibbles_and_bytes():
    assert pack(torch.tensor([1, 2, 3, 4, 5, 6, 7, 8]), 4).tolist() == [0x21, 0x43, 0x65, 0x87]
    assert pack(torch.arange(248, 256), 8).tolist() == list(range(248, 256))


@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize("side", [kv.Codec.key, kv.Codec.value])
def test_gaussian_vectors_reach_theory(bits, side):
    codec = side(128, bits)
    x = torch.randn(4000, 1, 128, generator=torch.Generator().manual_seed(1))
    assert relative_error(x, codec) <= 1.05 * theory(codec)


@pytest.mark.parametrize("bits", CODE_BITS)
@pytest.mark.parametrize("side", [kv.Codec.key, kv.Codec.value])
def test_one_hot_vectors_are_at_most_theory(bits, side):
    codec = side(128, bits)
    assert relative_error(torch.eye(128)[:, None] * 3, codec) <= theory(codec)


def dc_error(bits, rotate):
    """Relative error on data with a DC offset of three sigma, with the rotation `rotate(seed)`."""
    x = torch.randn(200, 128, generator=torch.Generator().manual_seed(2)).double() + 3
    total = 0.0
    for seed in range(32):
        codec = kv.Codec.value(128, bits, seed=seed)
        r = rotate(seed)
        y = x @ r.T
        unit = y / y.square().mean(-1, keepdim=True).sqrt()
        chosen = codec.level_tensor(torch.float64, x.device)[
            torch.bucketize(unit, codec.boundary_tensor(torch.float64, x.device))
        ]
        scale = (y * chosen).sum(-1, keepdim=True) / chosen.square().sum(-1, keepdim=True)
        total += ((chosen * scale - y).square().sum(-1) / y.square().sum(-1)).mean().item()
    return total / 32


@pytest.mark.parametrize("bits", CODE_BITS)
def test_dc_offset_needs_the_signs(bits):
    x = torch.randn(200, 1, 128, generator=torch.Generator().manual_seed(2)) + 3
    codecs = [kv.Codec.value(128, bits, seed=seed) for seed in range(32)]
    measured = sum(relative_error(x, codec) for codec in codecs) / 32
    assert measured <= 1.1 * theory(codecs[0])

    signed = dc_error(bits, lambda seed: rotation.rotation(128, seed, torch.float64, torch.device("cpu")))
    assert signed == pytest.approx(measured, rel=0.01)  # the same computation, so that the next line means something
    bare = dc_error(bits, lambda seed: rotation.hadamard(128) / math.sqrt(128))
    assert bare > 1.1 * theory(codecs[0])


@pytest.mark.parametrize("bits", CODE_BITS)
def test_offset_is_subtracted_and_added(bits):
    codec = kv.Codec.key(64, bits)
    offset = torch.randn(2, 64, generator=torch.Generator().manual_seed(3)) * 50
    x = torch.randn(100, 2, 64, generator=torch.Generator().manual_seed(4))
    codes, shifted = kv.encode(x, codec), kv.encode(x + offset, codec, offset)
    plain = kv.decode(codes, codec)
    near = kv.decode(shifted, codec, offset) - offset
    assert ((near - plain).norm() / plain.norm()).item() < 0.02 + 1e-3  # a few codes flip by the rounding of x + offset
    rotated = kv.decode(shifted, codec, offset, rotated=True)
    torch.testing.assert_close(codec.unrotate(rotated), kv.decode(shifted, codec, offset), atol=2e-4, rtol=1e-5)


@pytest.mark.parametrize("scale", ["l2", "lsq"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_scales(scale, dtype):
    codec = kv.Codec.key(128, 4, scale=scale, dtype=dtype)
    x = torch.randn(50, 1, 128, generator=torch.Generator().manual_seed(5)) * 7
    codes = kv.encode(x, codec)
    assert codes.scale.dtype == dtype
    decoded = kv.decode(codes, codec)
    if scale == "l2":  # keeps the norm
        torch.testing.assert_close(decoded.norm(dim=-1), x.norm(dim=-1), rtol=1e-3, atol=0)
    else:  # the residual is orthogonal to what was stored
        assert ((decoded * (x - decoded)).sum(-1) / x.square().sum(-1)).abs().max() < 1e-3


def test_zero_vector_decodes_to_the_offset():
    for scale in ("l2", "lsq"):
        codec = kv.Codec.key(64, 3, scale=scale)
        offset = torch.randn(2, 64)
        codes = kv.encode(offset.expand(3, 2, 64), codec, offset)
        assert codes.scale.tolist() == [[0.0, 0.0]] * 3
        assert torch.equal(kv.decode(codes, codec, offset), offset.expand(3, 2, 64))


def test_scales_saturate_and_are_counted():
    fmt = kv.Format.parse("k4v4", 64)
    cache = kv.KVCache.contiguous(fmt, 1, 2)
    k = torch.randn(3, 2, 64)
    k[1, 0] *= 1e6
    k[2, 1] *= 1e30  # squares overflow float32
    cache.append(k, torch.randn(3, 2, 64), [0, 3])
    keys, _ = cache.codes(0)
    assert keys.scale[1, 0] == keys.scale[2, 1] == 65504
    assert cache.saturated == 2
    wide = kv.Codec.key(64, 4, dtype=torch.float32)
    assert kv.decode(kv.encode(k, wide), wide)[2, 1].norm() == pytest.approx(k[2, 1].norm().item(), rel=1e-5)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("scale", ["l2", "lsq"])
def test_nan_and_inf_never_become_numbers(poison, scale):
    codec = kv.Codec.key(64, 4, scale=scale)
    x = torch.randn(4, 2, 64)
    x[2, 1, 5] = poison
    decoded = kv.decode(kv.encode(x, codec), codec)
    assert decoded[2, 1].isnan().all()
    assert decoded.isnan().sum() == 64


def test_asymmetric_table_with_a_zero_level():
    codec = kv.Codec.value(64, 2, table=(-3.0, 0.0, 3.0, 6.0))
    x = torch.randn(64, 1, 64)
    codes = kv.encode(x, codec)
    assert codes.scale.isfinite().all()
    ones = kv.encode(codec.unrotate(torch.ones(1, 1, 64)), codec)  # every coordinate is nearest to the level 0
    assert ones.scale.item() == 0
    assert kv.decode(ones, codec).abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sixteen_bits_keep_every_bit(dtype):
    codec = kv.Codec.key(64, 16, dtype=dtype)
    x = torch.randn(5, 2, 64).to(dtype)
    x[0, 0, 0] = math.inf
    codes = kv.encode(x, codec)
    assert codes.scale is None
    assert codes.data.shape == (5, 2, 64 * dtype.itemsize)
    assert torch.equal(kv.decode(codes, codec, dtype=dtype), x)


def test_adding_nothing_to_input_types():
    x = torch.randn(6, 2, 96)
    codec = kv.Codec.key(96, 4)
    for dtype in (torch.float16, torch.bfloat16):
        half, full = kv.encode(x.to(dtype), codec), kv.encode(x.to(dtype).float(), codec)
        assert torch.equal(half.data, full.data)
        assert torch.equal(half.scale, full.scale)


@pytest.mark.parametrize("name", ["k4v4", "k3/v16", "k8:plain/v5:lloyd-max"])
def test_using_a_format_does_not_change_it(name):
    """Nothing is remembered in it that would be wrong in another process, where hashes of texts differ."""
    format, again = kv.Format.parse(name, 64), kv.Format.parse(name, 64)
    parts = (format, format.key, format.value)
    before = [dict(vars(part)) for part in parts]
    assert {format: 1}[again] == {format.key: 1}[again.key] == 1
    kv.decode(kv.encode(torch.randn(2, 1, 64), format.key), format.key)
    assert [vars(part) for part in parts] == before
