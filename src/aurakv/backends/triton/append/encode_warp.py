"""Encoding by warps on their own: 16 vectors of 16 bits and 64 or 128 coordinates at a time, without shared memory.

Tensors have one element for each lane of the warp. Lane 4g + c reads, of rows g and g + 8, 16 bytes of every 64, as the
tensor cores want them; it gets the rotated coordinates c·DIM/4 … of both rows, so that their codes are neighbours, too.
A product transforms five bits of the coordinates (tables.encode_bits), the signs of further products the others.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from ..common.codes import energy_of, load_cells, quantise_eight
from ..common.slots import enter_sequence, no_sequence, place_rows

_LOAD = tl.constexpr("ld.global.nc.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];")
LOAD_AGAIN = tl.constexpr("ld.global.nc.v4.b32 {$0, $1, $2, $3}, [$4];")
_WORDS = tl.constexpr("=r,=r,=r,=r,l")


@triton.constexpr_function
def multiply(name, k, to, a, b, start):
    """PTX of a product of the tensor cores, over k coordinates."""
    return f"mma.sync.aligned.m16n8k{k}.row.col.f32.{name}.{name}.f32 {{{to}}}, {{{a}}}, {{{b}}}, {{{start}}};"


@triton.constexpr_function
def registers(first, n):
    return ", ".join(f"${first + i}" for i in range(n))


@triton.constexpr_function
def rotate_asm(rest, name):
    """PTX: results $0 … [column quarter, rest, 4] from first factors [rest, k-step, 4] and the matrix [column quarter,
    k-step, 2]. Result i is the sum of the products of factors j with signs (−1)^|i & j|. Sums that begin alike are
    formed once, and all with one factor before the next, so that few registers are needed at a time."""
    factors, matrix = 16 * rest, 24 * rest
    lines = [".reg .f32 z; .reg .b32 n<8>;", "mov.f32 z, 0f00000000;"]
    known = {(j, 0): "z, z, z, z" for j in range(4)}  # sums so far, by the bits of i that they depend on
    for tile in range(rest):
        signed = [[registers(factors + 8 * tile + 4 * step, 4) for step in range(2)]]
        if tile:
            lines += [f"xor.b32 n{i}, ${factors + 8 * tile + i}, 0x80008000;" for i in range(8)]
            signed.append(["n0, n1, n2, n3", "n4, n5, n6, n7"])
        found = {}
        for j in range(4):
            for i in range(1 << tile.bit_length()):
                to = registers(4 * (rest * j + i), 4)
                if tile < rest - 1:
                    to = ", ".join(f"s{tile}_{j}_{i}_{n}" for n in range(4))
                    lines.append(f".reg .f32 {to};")
                start = known[j, i & ((1 << max(tile - 1, 0).bit_length()) - 1)]
                for step, factor in enumerate(signed[(i & tile).bit_count() % 2]):
                    lines.append(multiply(name, 16, to, factor, registers(matrix + 4 * j + 2 * step, 2), start))
                    start = to
                found[j, i] = to
        known = found
    return "{\n" + "\n".join(lines) + "\n}"


@triton.constexpr_function
def power_asm(rest, name):
    """PTX: $0, $1 the sums of squares of rows g and g + 8, the diagonal of the products of all rows, from operands
    $2 … as in rotate_asm. Lane $n holds row g's, $n+1 says in which of two registers."""
    last = 2 + 8 * rest
    lines = [".reg .f32 z, a<4>, b<4>; .reg .pred p;", "mov.f32 z, 0f00000000;"]
    for i in range(4 * rest):
        pair = (2 + 2 * i, 3 + 2 * i)
        for to, other in zip("ab", pair, strict=True):
            sums = ", ".join(f"{to}{n}" for n in range(4))
            lines.append(multiply(name, 8, sums, registers(pair[0], 2), f"${other}", sums if i else "z, z, z, z"))
    lines += [f"setp.ne.b32 p, ${last + 1}, 0;", "selp.f32 a0, a1, a0, p;", "selp.f32 b0, b3, b2, p;"]
    lines += [f"shfl.sync.idx.b32 $0, a0, ${last}, 31, 0xffffffff;"]
    lines += [f"shfl.sync.idx.b32 $1, b0, ${last}, 31, 0xffffffff;"]
    return "{\n" + "\n".join(lines) + "\n}"


@triton.constexpr_function
def constraints(outs, ins):
    return ",".join(["=&f"] * outs + ["r"] * ins)


@triton.constexpr_function
def floats(n):
    return (tl.float32,) * n


@triton.constexpr_function
def operand_name(dtype):
    return {"bf16": "bf16", "fp16": "f16"}[str(dtype)]


@triton.constexpr_function
def operand_index(i, dim):
    """Which word [row // 8, piece, word] of the loaded ones is factor i of rotate_asm."""
    rest = dim // 32
    tile, step, row, half = i // 8, i // 4 % 2, i % 2, i // 2 % 2
    piece, word = (2 * step + half, tile) if rest == 4 else (half, 2 * step + tile)
    return row * dim // 8 + piece * 4 + word


@triton.constexpr_function
def result_index(i, row, dim):
    """Where the results [column quarter, product, 4] have coordinate i of a lane and row."""
    rest = dim // 32
    return i // (2 * rest) * 4 * rest + i // 2 % rest * 4 + 2 * row + i % 2


@triton.jit
def load_words(p, PIECES: tl.constexpr, STEP: tl.constexpr, ASM: tl.constexpr):
    """PIECES times four words, STEP bytes apart."""
    words = ()
    for i in tl.static_range(PIECES):
        words = words + tl.inline_asm_elementwise(
            ASM, _WORDS, [p + i * STEP], dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=False, pack=1
        )
    return words


@triton.jit
def rotate_rows(x, p_matrix, lane, where, SIDE: tl.constexpr):
    """R x / SIDE.post [row // 8, coordinate] of the words x of both rows, and the sums of its squares."""
    DIM: tl.constexpr = SIDE.dim
    REST: tl.constexpr = DIM // 32
    NAME: tl.constexpr = operand_name(SIDE.operand)
    p_sign = p_matrix + 2048 + (lane % 4) * 16
    sign = load_words(p_sign, REST, 64, LOAD_AGAIN)
    words = ()
    for i in tl.static_range(8 * REST):
        words = words + (x[operand_index(i, DIM)] ^ sign[operand_index(i, DIM) % (DIM // 8)],)  # noqa: RUF005
    POWER: tl.constexpr = power_asm(REST, NAME)
    power = tl.inline_asm_elementwise(
        POWER, constraints(2, 8 * REST + 2), words + where, dtype=floats(2), is_pure=True, pack=1
    )
    b = load_words(p_matrix + lane * 16, 4, 512, LOAD_AGAIN)
    ASM: tl.constexpr = rotate_asm(REST, NAME)
    y = tl.inline_asm_elementwise(
        ASM, constraints(16 * REST, 8 * REST + 16), words + b, dtype=floats(16 * REST), is_pure=True, pack=1
    )
    return same_order(y, DIM), (power[0] * (DIM / 4**SIDE.halvings), power[1] * (DIM / 4**SIDE.halvings))


@triton.jit
def over_four(x, ASM: tl.constexpr):
    """Over the lanes of a row, see `fold_asm`."""
    return tl.inline_asm_elementwise(ASM, "=&f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.constexpr_function
def fold_asm(op):
    return f"""{{ .reg .f32 t;
shfl.sync.bfly.b32 t, $1, 1, 31, 0xffffffff;
{op} $0, $1, t;
shfl.sync.bfly.b32 t, $0, 2, 31, 0xffffffff;
{op} $0, $0, t; }}"""


@triton.jit
def swap_sum(mine, other, ASM: tl.constexpr):
    """Sums over the four lanes of a row: of row g in lanes of even c, of row g + 8 in the others. mine: of that row."""
    return tl.inline_asm_elementwise(ASM, "=&r,r,r", [mine, other], dtype=mine.dtype, is_pure=True, pack=1)


@triton.constexpr_function
def swap_asm(kind):
    return f"""{{ .reg .b32 t;
shfl.sync.bfly.b32 t, $2, 1, 31, 0xffffffff;
add.{kind} $0, $1, t;
shfl.sync.bfly.b32 t, $0, 2, 31, 0xffffffff;
add.{kind} $0, $0, t; }}"""


@triton.jit
def in_range(y, SIDE: tl.constexpr):
    """Rotated coordinates times powers of two that keep squares in range, the sums of those, and the inverses of the
    powers: 0 for a vector of zeros, NaN for one that is not finite."""
    N: tl.constexpr = SIDE.dim // 4
    PEAK: tl.constexpr = fold_asm("max.NaN.f32")
    SUM: tl.constexpr = fold_asm("add.rn.f32")
    scaled, powers, units = (), (), ()
    for row in tl.static_range(2):
        peak = tl.full([32], 0.0, tl.float32)
        for i in tl.static_range(N):
            peak = tl.maximum(peak, tl.abs(y[row * N + i]), propagate_nan=tl.PropagateNan.ALL)
        peak = over_four(peak, PEAK)
        exponent = peak.to(tl.int32, bitcast=True) & 0x7F800000
        exponent = tl.minimum(tl.maximum(exponent, 0x00800000), 0x7E800000)
        unit = exponent.to(tl.float32, bitcast=True)
        factor = (0x7F000000 - exponent).to(tl.float32, bitcast=True)
        total = tl.full([32], 0.0, tl.float32)
        for i in tl.static_range(N):
            z = y[row * N + i] * factor
            total += z * z
            scaled = scaled + (z,)  # noqa: RUF005
        total = over_four(total, SUM)
        units = units + (tl.where(total < float("inf"), tl.where(total > 0, unit, 0.0), float("nan")),)  # noqa: RUF005
        powers = powers + (tl.where(total > 0, total, 1.0),)  # noqa: RUF005
    return scaled, powers, units


@triton.jit
def same_order(y, DIM: tl.constexpr):
    """Results in the order [row // 8, coordinate]."""
    found = ()
    for i in tl.static_range(DIM // 2):
        found = found + (y[result_index(i % (DIM // 4), i // (DIM // 4), DIM)],)  # noqa: RUF005
    return found


@triton.jit
def approximate(x, ASM: tl.constexpr):
    return tl.inline_asm_elementwise(ASM, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def encode_words(y, power, odd, cells, WRITER: tl.constexpr):
    """Words of codes [row // 8, word] of what `rotate_rows` gives, and a scale: of row g in lanes of even c, of row
    g + 8 in the odd ones."""
    SIDE: tl.constexpr = WRITER.how
    DIM: tl.constexpr = SIDE.dim
    GROUPS: tl.constexpr = DIM // 32
    ASM: tl.constexpr = WRITER.groups
    one = tl.full([32], 1.0, tl.float32)
    unit = (one, one)
    usual = (tl.minimum(power[0], power[1]) > 1e-25) & (power[0] + power[1] < 1e25)
    if tl.max((~usual).to(tl.int32), 0) > 0:
        y, power, unit = in_range(y, SIDE)
    words = ()
    energies, products = (), ()
    for row in tl.static_range(2):
        mean = power[row] * (1 / DIM)
        inverse = approximate(mean, "rsqrt.approx.ftz.f32 $0, $1;")
        size = mean * inverse
        energy, product = tl.full([32], 0, tl.int32), tl.full([32], 0.0, tl.float32)
        for i in tl.static_range(GROUPS):
            eight = y[row * (DIM // 4) + 8 * i : row * (DIM // 4) + 8 * i + 8]
            word, energy, product = quantise_eight(eight, inverse, size, cells, energy, product, ASM)
            words = words + (word,)  # noqa: RUF005
        energies = energies + (energy,)  # noqa: RUF005
        products = products + (product,)  # noqa: RUF005
    KIND: tl.constexpr = swap_asm("u32") if WRITER.square > 0 else swap_asm("rn.f32")
    energy = swap_sum(tl.where(odd, energies[1], energies[0]), tl.where(odd, energies[0], energies[1]), KIND)
    energy = energy_of(energy, WRITER.square)
    if SIDE.lsq:
        FLOAT: tl.constexpr = swap_asm("rn.f32")
        scale = (
            swap_sum(tl.where(odd, products[1], products[0]), tl.where(odd, products[0], products[1]), FLOAT) / energy
        )
    else:
        scale = approximate(tl.where(odd, power[1], power[0]) / energy, "sqrt.approx.ftz.f32 $0, $1;")
    scale = tl.where(energy > 0, scale * SIDE.post, 0.0) * tl.where(odd, unit[1], unit[0])
    scale = tl.where(scale > SIDE.largest, SIDE.largest, tl.where(scale < -SIDE.largest, -SIDE.largest, scale))
    return words, scale


@triton.jit
def store_words(p, m, words, BITS: tl.constexpr):
    """Words of 8 codes of BITS bits, all of a lane, to bytes at p where m."""
    if BITS == 4:
        store_vector(p, m, words)
    elif BITS == 2 and len(words) == 4:
        store_vector(p, m, (words[0] | words[1] << 16, words[2] | words[3] << 16))
    elif BITS == 2:
        tl.store(p.to(tl.pointer_type(tl.int32), bitcast=True), words[0] | words[1] << 16, mask=m)
    elif len(words) == 4:
        p = p.to(tl.pointer_type(tl.int32), bitcast=True)
        tl.store(p, words[0] | words[1] << 24, mask=m)
        tl.store(p + 1, words[1].to(tl.uint32, bitcast=True) >> 8 | words[2] << 16, mask=m)
        tl.store(p + 2, words[2].to(tl.uint32, bitcast=True) >> 16 | words[3] << 8, mask=m)
    else:
        p = p.to(tl.pointer_type(tl.int16), bitcast=True)
        tl.store(p, words[0].to(tl.int16), mask=m)
        tl.store(p + 1, (words[0] >> 16 | words[1] << 8).to(tl.int16), mask=m)
        tl.store(p + 2, (words[1] >> 8).to(tl.int16), mask=m)


@triton.jit
def store_vector(p, m, words):
    if len(words) == 4:
        tl.inline_asm_elementwise(
            "{ .reg .pred q; setp.ne.b32 q, $2, 0; @q st.global.v4.b32 [$1], {$3, $4, $5, $6}; mov.b32 $0, 0; }",
            "=r,l,r,r,r,r,r", [p, m.to(tl.int32), words[0], words[1], words[2], words[3]],
            dtype=tl.int32, is_pure=False, pack=1)  # fmt: skip
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred q; setp.ne.b32 q, $2, 0; @q st.global.v2.b32 [$1], {$3, $4}; mov.b32 $0, 0; }",
            "=r,l,r,r,r", [p, m.to(tl.int32), words[0], words[1]],
            dtype=tl.int32, is_pure=False, pack=1)  # fmt: skip


@triton.jit
def token_of(i_block, known, HEADS: tl.constexpr):
    """The first token of a block."""
    return known[3] + (i_block // HEADS - known[0]) * 16


@triton.jit
def row_offset(i_token, tokens, stride):
    """Where a token lies, in bytes; the last one where there is none."""
    return tl.minimum(i_token, tokens - 1).to(tl.int64) * (2 * stride[0])


@triton.jit
def prefetch_line(p):
    """Ask for a cache line that is needed soon, without waiting."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [p], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def append_alone(x, stride, matrix, bounds, data, page_bytes, codes, scales, pool, blocks,
                 BYTES: tl.constexpr, DTYPE: tl.constexpr, WRITER: tl.constexpr, HEADS: tl.constexpr,
                 COUNTED: tl.constexpr, RING: tl.constexpr, SEQS: tl.constexpr):  # fmt: skip
    """append_kernels.append_blocks for blocks of 16 tokens of one head, rows of which are aligned to 16 bytes."""
    SIDE: tl.constexpr = WRITER.how
    ROW: tl.constexpr = 2 * SIDE.dim
    QUARTER: tl.constexpr = BYTES // 4
    lane = tl.arange(0, 32)
    where = (lane // 8 * 8 + lane // 4 % 2 * 4 + lane // 8, lane // 4 % 2)  # of the squares of row g, see power_asm
    cells = load_cells(bounds)
    tokens = pool[4]
    ahead = tl.num_programs(0) // HEADS * 16  # tokens to this program's next block, as a rule
    known = no_sequence()
    refused = tl.full([], False, tl.int1)
    p_matrix, p_x = matrix.to(tl.int64), x.to(tl.int64)
    for i_block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        known, no = enter_sequence(pool, i_block, known, HEADS, True, COUNTED, RING, SEQS, 16)
        refused = refused | no
        i_token = token_of(i_block, known, HEADS) + lane // 4
        p_head = p_x + (i_block % HEADS).to(tl.int64) * (2 * stride[1])
        i_next = i_token - lane // 4 + lane // 2 + ahead
        prefetch_line(p_head + row_offset(i_next, tokens, stride) + lane % 2 * (ROW // 2))
        p_head += lane % 4 * 16
        words = load_words(p_head + row_offset(i_token, tokens, stride), ROW // 64, 64, _LOAD)
        words = words + load_words(p_head + row_offset(i_token + 8, tokens, stride), ROW // 64, 64, _LOAD)
        y, power = rotate_rows(words, p_matrix, lane, where, SIDE)
        _, _, i_row, o_piece, m_row = place_rows(pool, i_block, known, lane // 4, HEADS, True, RING, 16)
        _, _, i_row2, o_piece2, m_row2 = place_rows(pool, i_block, known, lane // 4 + 8, HEADS, True, RING, 16)
        odd = lane % 2 > 0
        words, scale = encode_words(y, power, odd, cells, WRITER)
        p_piece, p_piece2 = data + o_piece.to(tl.int64) * page_bytes, data + o_piece2.to(tl.int64) * page_bytes
        p_scale = tl.where(odd, p_piece2, p_piece) + scales
        p_scale = p_scale.to(tl.pointer_type(DTYPE), bitcast=True) + tl.where(odd, i_row2, i_row)
        tl.store(p_scale, scale.to(DTYPE), mask=tl.where(odd, m_row2, m_row) & (lane % 4 < 2))
        HALF: tl.constexpr = len(words) // 2
        store_words(p_piece + codes + i_row * BYTES + lane % 4 * QUARTER, m_row, words[:HALF], SIDE.bits)
        store_words(p_piece2 + codes + i_row2 * BYTES + lane % 4 * QUARTER, m_row2, words[HALF:], SIDE.bits)
    return refused
