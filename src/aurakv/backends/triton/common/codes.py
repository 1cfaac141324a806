"""Device functions: packed rows to levels and back. The only code that knows widths and level tables.

A tile of coded rows has 8·GROUPS columns in plane-major order: column i is code i // GROUPS of group i % GROUPS, a
group being 8 neighbouring coordinates (BITS whole bytes). Queries, offsets and outputs follow through `coordinates`, so
a tile needs no shuffling. A tile of 16-bit vectors (BITS = 16) has its columns in natural order.

Constexprs: BITS the width; GROUPS = columns / 8; COEF the level table's arithmetic (arithmetic.curve), () to look
levels up; ASM the PTX that turns 8 nibbles into 8 float16 levels, "" where the target has none.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
if INTERPRETED.value:
    from .interpreter import repair

    repair()


@triton.jit
def cast(x, DTYPE: tl.constexpr):
    """x rounded to the nearest DTYPE. The interpreter would cut bfloat16 off instead of rounding."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        x = x.to(tl.float32)
        bits = x.to(tl.int32, bitcast=True)
        bits = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), 0x7FC00000)
        return ((bits >> 16) & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)


@triton.jit
def coordinates(COLUMNS: tl.constexpr, BITS: tl.constexpr):
    """The coordinate of each column of a tile."""
    o_column = tl.arange(0, COLUMNS)
    if BITS == 16:
        return o_column
    else:
        return (o_column % (COLUMNS // 8)) * 8 + o_column // (COLUMNS // 8)


@triton.jit
def load_pieces(p_row, o_piece, m_piece, TYPE: tl.constexpr):
    """Pieces of type TYPE of each row, as uint32 (or uint64). Typed pointers let neighbours be loaded together."""
    p = p_row.to(tl.pointer_type(TYPE), bitcast=True)
    x = tl.load(p[:, None] + o_piece[None, :], mask=m_piece, other=0)
    if tl.uint64 == TYPE:
        return x
    else:
        return x.to(tl.uint32)


@triton.jit
def load_groups(p_row, o_group, m_group, BITS: tl.constexpr):
    """The 8 codes of each group as the low and the high 32 bits of their bytes. Rows start at even
    addresses, at 4 and 8 bits at multiples of 8."""
    if BITS == 2:
        low = load_pieces(p_row, o_group, m_group, tl.uint16)
    elif BITS == 4:
        low = load_pieces(p_row, o_group, m_group, tl.uint32)
    elif BITS == 8:
        both = load_pieces(p_row, o_group, m_group, tl.uint64)
        low = both.to(tl.uint32)
    elif BITS == 6:
        low = load_pieces(p_row, o_group * 3, m_group, tl.uint16)
        low = low | load_pieces(p_row, o_group * 3 + 1, m_group, tl.uint16) << 16
    else:  # odd groups begin in the middle of a 16-bit piece; their number is even, so no piece is beyond the row
        o_piece = o_group * BITS // 2
        shift = ((o_group & 1) * 8)[None, :]
        first = load_pieces(p_row, o_piece, m_group, tl.uint16)
        first = first | load_pieces(p_row, o_piece + 1, m_group, tl.uint16) << 16
        low = first >> shift
    if BITS == 5:
        last = load_pieces(p_row, o_group * 5 // 2 + 2, m_group, tl.uint16)
        low = tl.where(shift > 0, low | last << 24, low)
        high = (last >> shift) & 255
    elif BITS == 6:
        high = load_pieces(p_row, o_group * 3 + 2, m_group, tl.uint16)
    elif BITS == 8:
        high = (both >> 32).to(tl.uint32)
    else:
        high = low
    return low, high


@triton.jit
def extract(low, high, PLANE: tl.constexpr, BITS: tl.constexpr):
    """Code PLANE of each group, from the low and high 32 bits of its bytes."""
    BIT: tl.constexpr = PLANE * BITS
    if BIT + BITS <= 32:
        code = low >> BIT
    elif BIT >= 32:
        code = high >> (BIT - 32)
    else:
        code = (low >> BIT) | (high << (32 - BIT))
    return code & ((1 << BITS) - 1)


@triton.jit
def log2(x):
    """Accurate to about 2^-22."""
    if INTERPRETED:
        return tl.log2(x)
    else:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def centred(code, BITS: tl.constexpr):
    """(2·code + 1) / 2^BITS − 1, exactly. n | 2^23 as bits is the float 2^23 + n: no integer conversion."""
    return (code << 1 | 0x4B000001).to(tl.float32, bitcast=True) * 2**-BITS - (8388608.0 * 2**-BITS + 1)


@triton.jit
def fused(a, b, c):
    """a·b + c in float16, rounded once."""
    if INTERPRETED:  # numbers like these have exact sums in float64
        return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float16)
    else:
        return tl.fma(a, b, c)


@triton.jit
def poly7(x, COEF: tl.constexpr):
    """The levels of the table `poly7` but for its factor, in the same float16 arithmetic."""
    s = x * x
    u = tl.full(x.shape, COEF[3], tl.float16)
    if COEF[4] != 0:
        u = fused(s, tl.full(x.shape, COEF[4], tl.float16), u)
    u = fused(s, u, tl.full(x.shape, COEF[2], tl.float16))
    return fused(s * x, u, x)


@triton.jit
def to_levels(code, p_levels, BITS: tl.constexpr, COEF: tl.constexpr):
    """The float32 level of each code."""
    if len(COEF) == 0:
        return tl.load(p_levels + code.to(tl.int32))
    else:
        x = centred(code, BITS)
        if COEF[0] == 7:
            return COEF[1] * poly7(x.to(tl.float16), COEF).to(tl.float32)
        t = x * x
        if COEF[0] == 0:
            t = log2((1 + 2**-BITS) - t)
        y = tl.full(code.shape, COEF[len(COEF) - 1], tl.float32)
        for i in tl.static_range(2, len(COEF)):
            y = y * t + COEF[len(COEF) - i]
        return y * x


@triton.jit
def spread_nibbles(w, BITS: tl.constexpr):
    """8 codes of 2 or 3 bits, one in each nibble."""
    if BITS == 2:
        w = (w | w << 8) & 0x00FF00FF
        w = (w | w << 4) & 0x0F0F0F0F
        w = (w | w << 2) & 0x33333333
    elif BITS == 3:
        w = (w & 0xFFF) | (w & 0xFFF000) << 4
        w = (w & 0x003F003F) | (w & 0x0FC00FC0) << 2
        w = (w & 0x07070707) | (w & 0x38383838) << 1
    return w


@triton.jit
def stack_planes(a, b, c, d, e, f, g, h):
    """Eight planes [rows, groups] side by side: [rows, 8·groups]."""
    x = tl.join(tl.join(tl.join(a, e), tl.join(c, g)), tl.join(tl.join(b, f), tl.join(d, h)))
    x = tl.reshape(x, [a.shape[0], a.shape[1], 8])
    return tl.reshape(tl.permute(x, [0, 2, 1]), [a.shape[0], 8 * a.shape[1]])


@triton.jit
def load_codes(p_row, m_row, SIDE: tl.constexpr):
    """Bytes of the codes of rows at byte pointers p_row [rows], see load_groups."""
    o_group = tl.arange(0, SIDE.groups)
    m_group = m_row[:, None]
    if SIDE.dim < 8 * SIDE.groups:
        m_group = m_group & (o_group < SIDE.dim // 8)[None, :]
    return load_groups(p_row, o_group, m_group, SIDE.bits)


@triton.jit
def stack_codes(low, high, BITS: tl.constexpr):
    """All codes of groups as a tile [rows, 8·groups]."""
    return stack_planes(
        extract(low, high, 0, BITS),
        extract(low, high, 1, BITS),
        extract(low, high, 2, BITS),
        extract(low, high, 3, BITS),
        extract(low, high, 4, BITS),
        extract(low, high, 5, BITS),
        extract(low, high, 6, BITS),
        extract(low, high, 7, BITS),
    )


@triton.jit
def load_levels(p_row, m_row, p_levels, SIDE: tl.constexpr):
    """Rows of codes at byte pointers p_row [rows] as levels [rows, 8·GROUPS] times SIDE.unit, of type SIDE.operand."""
    BITS: tl.constexpr = SIDE.bits
    ASM: tl.constexpr = SIDE.asm
    COEF: tl.constexpr = SIDE.coef
    low, high = load_codes(p_row, m_row, SIDE)
    if len(ASM) > 0:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            ASM,
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r",
            [spread_nibbles(low, BITS)],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
        return stack_planes(a, b, c, d, e, f, g, h)
    else:
        level = to_levels(stack_codes(low, high, BITS), p_levels, BITS, COEF)
        if SIDE.unit != 1:
            level = level * SIDE.unit
        return level.to(SIDE.operand)


@triton.jit
def load_level_pairs(p_row, m_row, p_levels, SIDE: tl.constexpr):
    """Like load_levels, with each level as the sum of two float16 numbers; p_levels, if needed, has both in a word."""
    BITS: tl.constexpr = SIDE.bits
    COEF: tl.constexpr = SIDE.coef
    low, high = load_codes(p_row, m_row, SIDE)
    code = stack_codes(low, high, BITS)
    if len(COEF) == 0:
        word = tl.load(p_levels + code.to(tl.int32))
        first = (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
        return first, ((word >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    else:
        level = to_levels(code, p_levels, BITS, COEF) * SIDE.unit
        first = level.to(tl.float16)
        return first, (level - first.to(tl.float32)).to(tl.float16)


@triton.jit
def quantise(z, p_bounds, BITS: tl.constexpr, GRID: tl.constexpr):
    """The number of boundaries strictly below each z: by its cell of a grid with at most one in each, or by halving."""
    if len(GRID) > 0:
        place = (z * GRID[0] + GRID[1]) * (GRID[2] - 2) + 0.5
        place = tl.where(place > 0, place, 0.0)  # of NaN, too
        cell = tl.minimum(place, GRID[2] - 1.5).to(tl.int32)
        # from shared memory, which serves 32 lanes in a few cycles; memory takes one for each line of the table
        flat = tl.reshape(cell, [cell.numel])
        o_cell = tl.arange(0, GRID[2])
        bound = tl.reshape(tl.gather(tl.load(p_bounds + o_cell), flat, 0), z.shape)
        code = tl.reshape(tl.gather(tl.load(p_bounds + GRID[2] + o_cell), flat, 0), z.shape).to(tl.int32)
        code += (z > bound).to(tl.int32)
    else:
        code = tl.zeros(z.shape, tl.int32)
        for i in tl.static_range(BITS):
            bound = tl.load(p_bounds + code + ((1 << (BITS - 1 - i)) - 1))  # the step is 2^(BITS − 1 − i)
            code += tl.where(z > bound, 1 << (BITS - 1 - i), 0)
    return code


LANE_LOAD = tl.constexpr(  # each lane its own word from $1 on
    "{ .reg .b64 a; .reg .b32 t; mov.u32 t, %laneid; mul.wide.u32 a, t, 4; add.s64 a, a, $1; ld.global.b32 $0, [a]; }"
)


@triton.jit
def load_cells(p_cells):
    """The rows of tables.bounds, each lane its own column."""
    p = p_cells.to(tl.int64)
    bound = tl.inline_asm_elementwise(LANE_LOAD, "=r,l", [p], dtype=tl.int32, is_pure=True, pack=1)
    level = tl.inline_asm_elementwise(LANE_LOAD, "=r,l", [p + 128], dtype=tl.int32, is_pure=True, pack=1)
    return bound, level


@triton.jit
def quantise_groups(y, inverse, size, cells, ASM: tl.constexpr, GROUPS: tl.constexpr):
    """y · inverse = y / size [rows, 8·GROUPS] in plane-major order as words of 8 codes; the sums of the squares of
    their levels (see `energy_of`), and of levels times y: [rows, GROUPS]. For tables that grids.cells serves: a lane
    looks up what another one holds."""
    even, odd = tl.split(tl.permute(tl.reshape(y, [y.shape[0], 2, 2, 2, GROUPS]), [0, 4, 1, 2, 3]))
    y04, y26 = tl.split(even)
    y15, y37 = tl.split(odd)
    y0, y4 = tl.split(y04)
    y2, y6 = tl.split(y26)
    y1, y5 = tl.split(y15)
    y3, y7 = tl.split(y37)
    zero = tl.zeros([y.shape[0], GROUPS], tl.int32)
    return quantise_eight(
        (y0, y1, y2, y3, y4, y5, y6, y7), inverse, size, cells, zero, zero.to(tl.float32, bitcast=True), ASM
    )


@triton.jit
def quantise_eight(y, inverse, size, cells, energy, product, ASM: tl.constexpr):
    """Eight coordinates y: a word of their codes, and both sums with theirs added (see `energy_of`)."""
    return tl.inline_asm_elementwise(
        ASM, "=&r,=&r,=&f,f,f,f,f,f,f,f,f,f,f,r,r,r,f",
        [y[0], y[1], y[2], y[3], y[4], y[5], y[6], y[7], inverse, size, cells[0], cells[1], energy, product],
        dtype=(tl.int32, tl.int32, tl.float32), is_pure=True, pack=1)  # fmt: skip


@triton.jit
def energy_of(energy, SQUARE: tl.constexpr):
    """A sum of squares of levels: an integer times SQUARE, or where that is 0 the bits of a float."""
    if SQUARE > 0:
        return energy.to(tl.float32) * SQUARE
    else:
        return energy.to(tl.float32, bitcast=True)


@triton.jit
def pack_words(code, BITS: tl.constexpr, GROUPS: tl.constexpr):
    """Codes [rows, 8·GROUPS] in plane-major order as words [rows, GROUPS] of 8 codes."""
    o_plane = tl.arange(0, 8)
    planes = tl.reshape(code, [code.shape[0], 8, GROUPS])
    if BITS <= 4:
        return tl.sum(planes << (o_plane * BITS)[None, :, None], axis=1)
    else:
        return tl.sum(planes.to(tl.int64) << (o_plane * BITS).to(tl.int64)[None, :, None], axis=1)


@triton.jit
def store_words(p_row, m_row, word, DIM: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr):
    """Words of `pack_words` to rows of bytes."""
    rows: tl.constexpr = word.shape[0]
    if BITS == 2:
        store_pieces(p_row, m_row, word.to(tl.uint16), 1, 0, DIM // 8)
    elif BITS == 3:  # 16 codes are 3 pieces of 16 bits
        low, high = tl.split(tl.reshape(word, [rows, GROUPS // 2, 2]))
        store_pieces(p_row, m_row, low.to(tl.uint16), 3, 0, DIM // 16)
        store_pieces(p_row, m_row, (low >> 16 | high << 8).to(tl.uint16), 3, 1, DIM // 16)
        store_pieces(p_row, m_row, (high >> 8).to(tl.uint16), 3, 2, DIM // 16)
    elif BITS == 4:
        store_pieces(p_row, m_row, word.to(tl.uint32, bitcast=True), 1, 0, DIM // 8)
    elif BITS == 8:
        store_pieces(p_row, m_row, word, 1, 0, DIM // 8)
    elif BITS == 6:  # 16 codes are 3 pieces of 32 bits
        low, high = tl.split(tl.reshape(word, [rows, GROUPS // 2, 2]))
        store_pieces(p_row, m_row, low.to(tl.uint32), 3, 0, DIM // 16)
        store_pieces(p_row, m_row, (low >> 32 | high << 16).to(tl.uint32), 3, 1, DIM // 16)
        store_pieces(p_row, m_row, (high >> 16).to(tl.uint32), 3, 2, DIM // 16)
    elif DIM % 32 == 0:  # 32 codes of 5 bits are 5 pieces of 32 bits
        even, odd = tl.split(tl.reshape(word, [rows, GROUPS // 4, 2, 2]))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        store_pieces(p_row, m_row, a.to(tl.uint32), 5, 0, DIM // 32)
        store_pieces(p_row, m_row, (a >> 32 | b << 8).to(tl.uint32), 5, 1, DIM // 32)
        store_pieces(p_row, m_row, (b >> 24 | c << 16).to(tl.uint32), 5, 2, DIM // 32)
        store_pieces(p_row, m_row, (c >> 16 | d << 24).to(tl.uint32), 5, 3, DIM // 32)
        store_pieces(p_row, m_row, (d >> 8).to(tl.uint32), 5, 4, DIM // 32)
    else:  # 16 are 5 of 16
        low, high = tl.split(tl.reshape(word, [rows, GROUPS // 2, 2]))
        store_pieces(p_row, m_row, low.to(tl.uint16), 5, 0, DIM // 16)
        store_pieces(p_row, m_row, (low >> 16).to(tl.uint16), 5, 1, DIM // 16)
        store_pieces(p_row, m_row, (low >> 32 | high << 8).to(tl.uint16), 5, 2, DIM // 16)
        store_pieces(p_row, m_row, (high >> 8).to(tl.uint16), 5, 3, DIM // 16)
        store_pieces(p_row, m_row, (high >> 24).to(tl.uint16), 5, 4, DIM // 16)


@triton.jit
def store_pieces(p_row, m_row, x, STEP: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """x [rows, n], of which the first COUNT exist, to pieces FIRST, FIRST + STEP, … of rows at byte pointers. Typed
    pointers let neighbours be stored together; rows start at even addresses, at 4 and 8 bits at multiples of 8, at 6
    bits and where 32 divides the dimension at multiples of 4."""
    o_piece = tl.arange(0, x.shape[1])
    p = p_row.to(tl.pointer_type(x.dtype), bitcast=True)[:, None] + (o_piece * STEP + FIRST)[None, :]
    m = m_row[:, None]
    if x.shape[1] > COUNT:
        m = m & (o_piece < COUNT)[None, :]
    tl.store(p, x, mask=m)
