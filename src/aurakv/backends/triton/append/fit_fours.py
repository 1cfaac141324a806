"""Fits of which four neighbours are rounded at once (format/fit.py, AT_ONCE), by lanes of the tensor cores' layout.

Tensors have one element for each thread. A warp has two vectors at eight scales, the 16 rows of its products: lane
4g + c has scale g of both vectors and, of every 16 coordinates, c, 4 + c, 8 + c and 12 + c. The first of these in all
lanes are four neighbours, which do not wait for each other; then come the second ones. A sum of products is where its
coordinate is rounded, and a level is where the next product takes it from, so nothing moves between lanes.

fit, scratch and constexprs: see fit.py; here fit[0] ends in the `tiles` of fit_tables.py, aims lie in the order of the
lanes, and TOGETHER vectors have half as many warps.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from ....format import fit as fitting
from ..common.codes import quantise, to_levels
from .encode_warp import LOAD_AGAIN, fold_asm, load_words, multiply, over_four, prefetch_line, registers
from .fit import BLOCK, VECTORS, scale_at, store_vectors

assert fitting.AT_ONCE == 4
assert len(fitting.SCALES) == 8

_LOAD = tl.constexpr("ld.global.v4.b32 {$0, $1, $2, $3}, [$4];")  # what this kernel has stored
_ADD = tl.constexpr(fold_asm("add.rn.f32"))


@triton.constexpr_function
def product_asm(k):
    """PTX: sums $0 … $3 of one column in eight, from those before, first factors and second ones over k coordinates."""
    a, b = k // 4, k // 8
    return multiply("f16", k, registers(0, 4), registers(8, a), registers(8 + a, b), registers(4, 4))


@triton.constexpr_function
def product_constraints(k):
    return ",".join(["=f"] * 4 + ["f"] * 4 + ["r"] * (k // 4 + k // 8))


@triton.constexpr_function
def place(e, v):
    """Which sum of a tile is that of coordinate 4e + c of vector v."""
    return e // 2 * 4 + v * 2 + e % 2


@triton.constexpr_function
def first_asm():
    """PTX: which of eight scales, those of lanes 4 apart, has the least $1: the first of equals."""
    lines = [".reg .f32 l, m; .reg .b32 n; .reg .pred p, q;", "mov.f32 l, $1; mov.b32 $0, $2;"]
    for distance in (4, 8, 16):
        lines += [f"shfl.sync.bfly.b32 m, l, {distance}, 31, 0xffffffff;"]
        lines += [f"shfl.sync.bfly.b32 n, $0, {distance}, 31, 0xffffffff;"]
        lines += ["setp.eq.f32 q, m, l;", "setp.lt.and.u32 q, n, $0, q;", "setp.lt.or.f32 p, m, l, q;"]
        lines += ["selp.f32 l, m, l, p;", "selp.b32 $0, n, $0, p;"]
    return "{\n" + "\n".join(lines) + "\n}"


@triton.jit
def as_float(x):
    return x.to(tl.float32, bitcast=True)


@triton.jit
def four_floats(p, ASM: tl.constexpr):
    a, b, c, d = load_words(p, 1, 16, ASM)
    return as_float(a), as_float(b), as_float(c), as_float(d)


@triton.jit
def add_product(sums, a, b, K: tl.constexpr):
    """sums (four) plus the product of a and b."""
    ASM: tl.constexpr = product_asm(K)
    return tl.inline_asm_elementwise(
        ASM, product_constraints(K), sums + a + b,
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def to_words(level):
    """Levels as two float16 numbers that add up to them, the larger one in the lower half of a word."""
    high = level.to(tl.float16)
    low = (level - high.to(tl.float32)).to(tl.float16)
    return (low.to(tl.int16, bitcast=True).to(tl.int32) << 16) | (high.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF)


@triton.jit
def half_of(word, HALF: tl.constexpr):
    """A half of a word, as float16."""
    return (word >> (16 * HALF)).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def tables_of(p_cells, p_levels, p_bounds, WRITER: tl.constexpr):
    """What `nearest` reads; cells count from 2^23 in the bits of float32 numbers."""
    if len(WRITER.cell) > 0:
        return p_cells.to(tl.int64) - 0x4B000000 * 16, p_levels, p_bounds
    else:
        return p_cells, p_levels, p_bounds


@triton.jit
def above(u, bound):
    """-1 where u is above the boundary, else 0: the sign of a difference. Predicates are few, so that one comparison
    would wait for another."""
    return (as_float(bound) - u).to(tl.int32, bitcast=True) >> 31


@triton.jit
def choose(low, high, m):
    return low ^ ((low ^ high) & m)


@triton.jit
def nearest(u, tables, WRITER: tl.constexpr):
    """fit.nearest of both aims u, with levels as to_words has them; neither waits for what the other one reads."""
    ASM: tl.constexpr = WRITER.cell
    if len(ASM) > 0:
        first = tl.inline_asm_elementwise(ASM, "=&r,f", [u[0]], dtype=tl.uint32, is_pure=True, pack=1)
        second = tl.inline_asm_elementwise(ASM, "=&r,f", [u[1]], dtype=tl.uint32, is_pure=True, pack=1)
        first = load_words(tables[0] + first.to(tl.int64) * 16, 1, 16, LOAD_AGAIN)
        second = load_words(tables[0] + second.to(tl.int64) * 16, 1, 16, LOAD_AGAIN)
        m_first, m_second = above(u[0], first[0]), above(u[1], second[0])
        words = (choose(first[2], first[3], m_first), choose(second[2], second[3], m_second))
        return (first[1] - m_first, second[1] - m_second), words
    else:
        BITS: tl.constexpr = WRITER.how.bits
        codes, words = (), ()
        for v in tl.static_range(2):
            code = quantise(u[v] * WRITER.unit, tables[2], BITS, ())
            level = to_levels(code.to(tl.uint32), tables[1], BITS, ()) * (1.0 / WRITER.unit)
            codes, words = codes + (code,), words + (to_words(level),)  # noqa: RUF005
        return codes, words


@triton.jit
def sums_of(word, u, before, cost, WRITER: tl.constexpr):
    """What the sums of fit_vectors get from the level `word` for the aim u, and what is before it."""
    level = half_of(word, 0).to(tl.float32)
    if WRITER.parts == 2:
        level += half_of(word, 1).to(tl.float32)
    total, rest = before + level, u - level
    weighted = cost * rest
    return weighted * rest, weighted * total, cost * total * total


@triton.jit
def factor_of(level, PART: tl.constexpr, E: tl.constexpr):
    """A part of a level where products take coordinate 4E + c from, in a word that has nothing else."""
    if E % 2 == PART:
        return level & (-65536 if E % 2 else 65535)
    else:
        return level << 16 if E % 2 else (level >> 16) & 65535


@triton.jit
def added(x, y):
    """Sums of the elements of two tuples."""
    sums = ()
    for i in tl.static_range(len(x)):
        sums = sums + (x[i] + y[i],)  # noqa: RUF005
    return sums


@triton.jit
def zeros(COUNT: tl.constexpr, THREADS: tl.constexpr, DTYPE: tl.constexpr):
    found = ()
    for _ in tl.static_range(COUNT):
        found = found + (tl.full([THREADS], 0, DTYPE),)  # noqa: RUF005
    return found


@triton.jit
def round_tile(tile, p_tile, aim, cost, inverse, tables, sums, WORD: tl.constexpr, WRITER: tl.constexpr):
    """Round 16 coordinates, whose products have the tile at p_tile: their words of eight codes [vector, half] as far as
    this lane has them, the factors of later products [part, 4], and the sums of fit_vectors (error, mixed, energy)
    [vector]."""
    BITS: tl.constexpr = WRITER.how.bits
    PARTS: tl.constexpr = WRITER.parts
    THREADS: tl.constexpr = inverse.shape[0]
    EQUAL: tl.constexpr = WRITER.equal
    if not EQUAL:
        own = load_words(p_tile, 1, 16, LOAD_AGAIN)
    shift = (tl.arange(0, THREADS) % 4 * BITS).to(WORD)
    words = zeros(4, THREADS, WORD)
    factors = zeros(4 * PARTS, THREADS, tl.int32)
    nothing, no_codes = tl.zeros([THREADS], tl.int32), tl.zeros([THREADS], WORD)
    for e in tl.static_range(4):
        before = (tile[place(e, 0)], tile[place(e, 1)])
        u = (aim[0][e] * inverse - before[0], aim[1][e] * inverse - before[1])
        codes, levels = nearest(u, tables, WRITER)
        more = ()
        for part in tl.static_range(PARTS):
            a, b = factor_of(levels[0], part, e), factor_of(levels[1], part, e)
            more = more + ((a, b, nothing, nothing) if e < 2 else (nothing, nothing, a, b))
            if e < 3 and not EQUAL:  # what those after it in this tile wait for
                upper = tile[4:]
                if e == 0:
                    tile = add_product(tile[:4], (a, b), (own[0],), 8) + upper
                tile = tile[:4] + add_product(upper, (a, b), (own[2 + e // 2],), 8)
        factors = added(factors, more)
        first = codes[0].to(WORD) << shift << (e % 2 * 4 * BITS)
        second = codes[1].to(WORD) << shift << (e % 2 * 4 * BITS)
        words = added(words, (first, no_codes, second, no_codes) if e < 2 else (no_codes, first, no_codes, second))
        error, mixed, energy = sums_of(levels[0], u[0], before[0], cost[e], WRITER)
        error2, mixed2, energy2 = sums_of(levels[1], u[1], before[1], cost[e], WRITER)
        sums = added(sums, (error, error2, mixed, mixed2, energy, energy2))
    return words, factors, sums


@triton.jit
def ask_for(fit, WRITER: tl.constexpr, TOGETHER: tl.constexpr):
    """Bring a fit near, without waiting: it is read once a step, and is far away by then."""
    THREADS: tl.constexpr = TOGETHER * 16
    LINES: tl.constexpr = (WRITER.how.dim * WRITER.how.dim * 4 + 127) // 128
    for i in tl.static_range(0, LINES, THREADS):
        prefetch_line(fit[0].to(tl.int64) + tl.minimum(i + tl.arange(0, THREADS), LINES - 1) * 128)


@triton.jit
def fit_fours(i_first, fit, p_levels, p_bounds, p_scratch, p_data, p_scale, m_vector, DTYPE: tl.constexpr,
              WRITER: tl.constexpr, TOGETHER: tl.constexpr):  # fmt: skip
    """fit.fit_vectors for such a fit."""
    DIM: tl.constexpr = WRITER.how.dim
    PARTS: tl.constexpr = WRITER.parts
    SCALES: tl.constexpr = WRITER.scales
    TILES: tl.constexpr = DIM // BLOCK
    THREADS: tl.constexpr = TOGETHER * 16
    WORDS: tl.constexpr = DIM // 8 * 32  # of a vector: each of the lanes has some codes of each word, at its scale
    WORD: tl.constexpr = tl.int32 if WRITER.how.bits <= 4 else tl.int64
    thread = tl.arange(0, THREADS)
    lane, i_vector = thread % 32, thread // 32 * 2
    i_scale, i_column = lane // 4, lane % 4
    inverse = (1.0 / WRITER.unit) / scale_at(i_scale, SCALES)
    p_aim = p_scratch.to(tl.int64) + ((i_first + i_vector) * DIM + i_column * 4) * 4
    if not WRITER.equal:
        p_tiles = (fit[0] + DIM * DIM).to(tl.int64) + lane * 16
        p_cost = fit[1].to(tl.int64) + i_column * 16
    p_results = p_scratch + (VECTORS * DIM + 2 * VECTORS)
    p_words = p_results.to(tl.pointer_type(WORD), bitcast=True)
    p_results += TOGETHER * WORDS * 2
    p_lane = p_words + (i_vector * WORDS + lane)
    tables = tables_of(fit[2], p_levels, p_bounds, WRITER)
    pending = zeros(8 * TILES, THREADS, tl.float32)  # sums of products, of this tile and those after it
    sums = zeros(6, THREADS, tl.float32)
    for t in range(TILES):
        aim = (four_floats(p_aim + t * 64, _LOAD), four_floats(p_aim + (DIM * 4 + t * 64), _LOAD))
        if WRITER.equal:
            one = tl.full([THREADS], 1.0, tl.float32)
            words, _, sums = round_tile(
                pending[:8], None, aim, (one, one, one, one), inverse, tables, sums, WORD, WRITER
            )
        else:
            cost = four_floats(p_cost + t * 64, LOAD_AGAIN)
            p_tile = p_tiles + t * (TILES * 512)
            words, factors, sums = round_tile(pending[:8], p_tile, aim, cost, inverse, tables, sums, WORD, WRITER)
            later = ()
            for n in tl.static_range(1, TILES):
                b = load_words(p_tile + n * 512, 1, 16, LOAD_AGAIN)
                lower, upper = pending[8 * n : 8 * n + 4], pending[8 * n + 4 : 8 * n + 8]
                for part in tl.static_range(PARTS):
                    a = factors[4 * part : 4 * part + 4]
                    lower, upper = add_product(lower, a, b[:2], 16), add_product(upper, a, b[2:], 16)
                later = later + lower + upper
            pending = later + zeros(8, THREADS, tl.float32)
        for i in tl.static_range(4):
            tl.store(p_lane + (i // 2 * WORDS + (2 * t + i % 2) * 32), words[i])
    FIRST: tl.constexpr = first_asm()
    for v in tl.static_range(2):
        error, mixed, energy = over_four(sums[v], _ADD), over_four(sums[2 + v], _ADD), over_four(sums[4 + v], _ADD)
        loss = (error - tl.where(energy > 0, mixed * mixed / energy, 0.0)) / (inverse * inverse)
        loss = tl.where(loss == loss, loss, float("inf"))
        best = tl.inline_asm_elementwise(FIRST, "=&r,f,r", [loss, i_scale], dtype=tl.int32, is_pure=True, pack=1)
        m_best = (best == i_scale) & (i_column == 0)
        p_result = p_results + i_vector + v
        tl.store(p_result, (mixed + energy) / inverse, mask=m_best)
        tl.store(p_result + TOGETHER, energy, mask=m_best)
        tl.store(p_result + 2 * TOGETHER, best.to(tl.float32), mask=m_best)
    tl.debug_barrier()
    o_vector = tl.arange(0, TOGETHER)
    p_result = p_results + o_vector
    best = tl.load(p_result + 2 * TOGETHER).to(tl.int32)
    store_vectors(
        i_first, p_scratch, p_words + o_vector * WORDS + best * 4, tl.load(p_result), tl.load(p_result + TOGETHER),
        p_data, p_scale, m_vector, DTYPE, WRITER, 32, 4,
    )  # fmt: skip
