"""Fitted codes (format/fit.py): scales that are tried, and coordinates that make up for the errors of earlier ones.

A vector is tried at WRITER.scales times its root mean square. With equal weights the best of these is all there is to
find (`best_scale`). With weights, coordinate i of a vector aims at z_i / scale minus what earlier levels have added to
it, sum over j < i of A_ij l_j, where z = A y. A lane has one (vector, scale) and goes through its coordinates in blocks
of BLOCK: inside a block by multiply-adds, and from a block to later ones by products of the tensor cores. PANEL blocks
have their sums, tiles [rows, BLOCK], in registers; what blocks of earlier panels add to them comes first.

fit: (A float16 [dim, dim] with ones on its diagonal; near float32 [dim, BLOCK], of each row of A what lies in its own
block before the diagonal, there d; cells float32 [cells, 4], see `nearest`) of one head.
scratch: of one program, float32: z of VECTORS vectors, their sizes and sums d z², codes and levels of all rows.
Levels are over WRITER.unit here, so that they are float16 numbers or sums of two.
With WRITER.fours neighbours are rounded at once, see fit_fours.py.
Constexprs: WRITER (specialise.Writer) with weights; TOGETHER vectors are rounded at a time: with all scales as many
rows as there are lanes.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from ..common.codes import quantise, store_words, to_levels
from .encode import fitted_scale, in_range, rotate, whole_matrix

BLOCK = tl.constexpr(16)
VECTORS = tl.constexpr(16)  # whose z is found together, a tile of the tensor cores
PANEL = tl.constexpr(4)


@triton.constexpr_function
def mirrored(i):
    """The four bits of i in the other order."""
    return int(f"{i:04b}"[::-1], 2)


@triton.constexpr_function
def scratch_size(dim, together, scales, fours):
    """float32 numbers of a program: z, sizes, sums; words of 64 bits for eight coordinates; levels in two parts, or, of
    which four lanes have a word each, the sums of a vector and which scale is best."""
    rows = together * scales
    if fours:
        return 16 * dim + 32 + 4 * rows * (dim // 8) * 2 + together * 4
    return 16 * dim + 32 + rows * (dim // 8) * 2 + rows * dim


@triton.jit
def scale_at(i, SCALES: tl.constexpr):
    """Scale i of all, for indices of any shape."""
    scale = tl.where(i == 0, SCALES[0], SCALES[1])
    for n in tl.static_range(2, len(SCALES)):
        scale = tl.where(i == n, SCALES[n], scale)
    return scale


@triton.jit
def load_four(p):
    """Four neighbours at each of p [rows], aligned to 16 bytes."""
    even, odd = tl.split(tl.reshape(tl.load(p[:, None] + tl.arange(0, 4)[None, :]), [p.shape[0], 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def load_row(p_block, ROW: tl.constexpr):
    """Row ROW of a block of `near` up to the diagonal, for all rows p_block [rows] of a tile."""
    row = ()
    for j in tl.static_range(0, ROW + 1, 4):
        row = row + load_four(p_block + (ROW * BLOCK + j))
    return row


@triton.jit
def split_columns(x):
    """The columns of x [rows, BLOCK]."""
    ROWS: tl.constexpr = x.shape[0]
    parts = (x,)
    for n in tl.static_range(4):
        halves = ()
        for i in tl.static_range(1 << n):
            if n < 3:
                even, odd = tl.split(tl.reshape(parts[i], [ROWS, BLOCK >> (n + 1), 2]))
            else:
                even, odd = tl.split(parts[i])
            halves = halves + (even, odd)  # noqa: RUF005
        parts = halves
    columns = ()
    for i in tl.static_range(BLOCK):
        columns = columns + (parts[mirrored(i)],)  # noqa: RUF005
    return columns


@triton.jit
def join_columns(columns):
    """[rows, BLOCK] of its columns."""
    ROWS: tl.constexpr = columns[0].shape[0]
    parts = ()
    for i in tl.static_range(BLOCK):
        parts = parts + (columns[mirrored(i)],)  # noqa: RUF005
    for n in tl.static_range(4):
        pairs = ()
        for i in tl.static_range(8 >> n):
            pairs = pairs + (tl.reshape(tl.join(parts[2 * i], parts[2 * i + 1]), [ROWS, 2 << n]),)  # noqa: RUF005
        parts = pairs
    return parts[0]


@triton.jit
def nearest(u, p_cells, p_levels, p_bounds, WRITER: tl.constexpr):
    """The number of boundaries strictly below u [rows], and the level of that code.

    A cell has (its boundary, the number of those below it, the levels below and above it), see grids.Cells."""
    GRID: tl.constexpr = WRITER.grid
    BITS: tl.constexpr = WRITER.how.bits
    if len(GRID) > 0:
        place = tl.minimum(tl.maximum(u * (GRID[0] * WRITER.unit) + GRID[1], 0.0), 1.0)
        # 2^23 + n has n in its low bits; the mask is for NaN
        cell = (place * (GRID[2] - 2) + 8388608.0).to(tl.int32, bitcast=True) & (GRID[2] - 1)
        bound, below, low, high = load_four(p_cells + cell * 4)
        m_above = u > bound
        return below.to(tl.int32, bitcast=True) + m_above.to(tl.int32), tl.where(m_above, high, low)
    else:
        code = quantise(u * WRITER.unit, p_bounds, BITS, ())
        return code, to_levels(code.to(tl.uint32), p_levels, BITS, ()) * (1.0 / WRITER.unit)


@triton.constexpr_function
def aims_at_once(dim, fours):
    """Coordinates of z: many for programs of many warps."""
    return min(64, dim & -dim) if fours else BLOCK.value


@triton.jit
def in_lanes(o):
    """Where coordinate o lies in the order of the lanes of fit_fours.py."""
    return o // BLOCK * BLOCK + o % 4 * 4 + o % BLOCK // 4


@triton.jit
def aims_of(y, fit, p_scratch, WRITER: tl.constexpr):
    """Leaves z = A y of vectors y in scratch: the sums of d z²."""
    SIDE: tl.constexpr = WRITER.how
    DIM: tl.constexpr = SIDE.dim
    high = y.to(tl.float16)
    low = (y - high.to(tl.float32)).to(tl.float16)
    WIDTH: tl.constexpr = aims_at_once(DIM, WRITER.fours)
    o_vector, o_block, o_column = tl.arange(0, VECTORS), tl.arange(0, WIDTH), tl.arange(0, SIDE.columns)
    own = tl.zeros([VECTORS, WIDTH], tl.float32)
    for i in range(0, DIM, WIDTH):
        p = fit[0] + (o_block + i)[None, :] * DIM + o_column[:, None]
        b = tl.load(p, mask=(o_column < DIM)[:, None], other=0)
        z = tl.dot(high, b, tl.dot(low, b))
        o_aim = i + o_block
        if WRITER.fours:
            o_aim = in_lanes(o_aim)
            cost = tl.load(fit[1] + o_aim)
        else:  # all of it: fit_vectors then finds what it waits for close by
            near = tl.load(fit[1] + i * BLOCK + o_block[:, None] * BLOCK + o_block[None, :])
            cost = tl.sum(tl.where(o_block[:, None] == o_block[None, :], near, 0.0), 0)
        tl.store(p_scratch + o_vector[:, None] * DIM + o_aim[None, :], z)
        own += cost[None, :] * z * z
    return tl.sum(own, 1)


@triton.jit
def find_aims(p_row, stride, change, o_head, m_row, p_matrix, fit, p_scratch, WRITER: tl.constexpr):
    """z = A y of VECTORS vectors, over the root mean square of y, and that as `size`: 0 for a vector of zeros, NaN for
    one that is not finite."""
    SIDE: tl.constexpr = WRITER.how
    DIM: tl.constexpr = SIDE.dim
    y = rotate(p_row, stride, change, o_head, m_row, p_matrix, whole_matrix(p_matrix, SIDE), SIDE)
    y, power, unit = in_range(y)
    rms = tl.sqrt(power / DIM)
    rms = tl.where(rms > 0, rms, 1.0)
    y = y * (1.0 / rms)[:, None]
    if WRITER.equal:
        o_column = tl.arange(0, SIDE.columns)
        m_column = (o_column < DIM)[None, :]
        p_vector = p_scratch + tl.arange(0, VECTORS)[:, None] * DIM
        tl.store(p_vector + in_lanes(o_column)[None, :], y, mask=m_column)
        own = tl.sum(tl.where(m_column, y * y, 0.0), 1)
    else:
        own = aims_of(y, fit, p_scratch, WRITER)
    size = tl.where(power > 0, rms * unit * (SIDE.post / WRITER.unit), 0.0)
    p_sizes = p_scratch + VECTORS * DIM + tl.arange(0, VECTORS)
    tl.store(p_sizes, tl.where(power < float("inf"), size, float("nan")))
    tl.store(p_sizes + VECTORS, own)
    tl.debug_barrier()


@triton.jit
def add_products(sums, FIRST: tl.constexpr, x, p_matrix, i_block, i_column, WRITER: tl.constexpr):
    """Sums of blocks i_block + FIRST …, with the products of A and the levels x of block i_column, in both parts."""
    DIM: tl.constexpr = WRITER.how.dim
    o_block = tl.arange(0, BLOCK)
    added = ()
    for n in tl.static_range(FIRST, PANEL):
        i_row = o_block + (i_block + n) * BLOCK
        p = p_matrix + i_row[None, :] * DIM + (o_block + i_column * BLOCK)[:, None]
        b = tl.load(p, mask=(i_row < DIM)[None, :], other=0)
        total = tl.dot(x[0], b, sums[n])
        if WRITER.parts == 2:
            total = tl.dot(x[1], b, total)
        added = added + (total,)  # noqa: RUF005
    return added


@triton.jit
def in_parts(x, WRITER: tl.constexpr):
    """Levels as the sum of two float16 numbers, or as one, twice."""
    high = x.to(tl.float16)
    if WRITER.parts == 2:
        return high, (x - high.to(tl.float32)).to(tl.float16)
    else:
        return high, high


@triton.jit
def earlier_sums(p_parts, p_matrix, i_panel, ROWS: tl.constexpr, WRITER: tl.constexpr):
    """What the levels at p_parts [2, rows, dim], of all blocks before i_panel, add to those of its panel."""
    DIM: tl.constexpr = WRITER.how.dim
    sums = no_sums(ROWS, PANEL)
    for i_column in range(i_panel):
        p = p_parts + tl.arange(0, ROWS)[:, None] * DIM + (tl.arange(0, BLOCK) + i_column * BLOCK)[None, :]
        x = (tl.load(p), tl.load(p + (WRITER.parts - 1) * ROWS * DIM))
        sums = add_products(sums, 0, x, p_matrix, i_panel, i_column, WRITER)
    return sums


@triton.jit
def no_sums(ROWS: tl.constexpr, COUNT: tl.constexpr):
    sums = ()
    for _ in tl.static_range(COUNT):
        sums = sums + (tl.zeros([ROWS, BLOCK], tl.float32),)  # noqa: RUF005
    return sums


@triton.jit
def fit_vectors(i_first, fit, p_levels, p_bounds, p_scratch, p_data, p_scale, m_vector, DTYPE: tl.constexpr,
                WRITER: tl.constexpr, TOGETHER: tl.constexpr):  # fmt: skip
    """Round vectors i_first … of what find_aims left, TOGETHER of them, and write codes and scales where m_vector."""
    SIDE: tl.constexpr = WRITER.how
    DIM: tl.constexpr = SIDE.dim
    BITS: tl.constexpr = SIDE.bits
    SCALES: tl.constexpr = WRITER.scales
    COUNT: tl.constexpr = len(SCALES)
    ROWS: tl.constexpr = TOGETHER * COUNT
    WORD: tl.constexpr = tl.int32 if BITS <= 4 else tl.int64
    o_row = tl.arange(0, ROWS)
    inverse = (1.0 / WRITER.unit) / scale_at(o_row % COUNT, SCALES)
    p_aim = p_scratch + (i_first + o_row // COUNT) * DIM
    p_words = (p_scratch + (VECTORS * DIM + 2 * VECTORS)).to(tl.pointer_type(WORD), bitcast=True)
    p_parts = (p_scratch + (VECTORS * DIM + 2 * VECTORS + ROWS * (DIM // 8) * 2)).to(
        tl.pointer_type(tl.float16), bitcast=True
    )
    p_part = p_parts + o_row[:, None] * DIM + tl.arange(0, BLOCK)[None, :]
    # of what is left of the aim t = z / scale, rest = t - A l: sums of d rest², d rest (A l) and d (A l)²
    error = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS], tl.float32)
    energy = tl.zeros([ROWS], tl.float32)
    for i_panel in range(0, DIM // BLOCK, PANEL):
        sums = earlier_sums(p_parts, fit[0], i_panel, ROWS, WRITER)
        for i_block in range(i_panel, min(i_panel + PANEL, DIM // BLOCK)):
            before = split_columns(sums[0])
            aim = ()
            for i in tl.static_range(0, BLOCK, 4):
                aim = aim + load_four(p_aim + i_block * BLOCK + i)
            levels = ()
            word = tl.zeros([ROWS], WORD)
            near = load_row(fit[1] + i_block * (BLOCK * BLOCK) + 0 * o_row, 0)
            total = before[0]
            for i in tl.static_range(BLOCK):
                cost = near[i]
                if i < BLOCK - 1:  # what the next one needs but for this one's level, before anything waits for that
                    near = load_row(fit[1] + i_block * (BLOCK * BLOCK) + 0 * o_row, i + 1)
                    ahead = before[i + 1]
                    for j in tl.static_range(i):
                        ahead += near[j] * levels[j]
                u = aim[i] * inverse - total
                code, level = nearest(u, fit[2], p_levels, p_bounds, WRITER)
                total += level
                rest = u - level
                weighted = cost * rest
                error += weighted * rest
                mixed += weighted * total
                energy += cost * total * total
                if i < BLOCK - 1:
                    total = ahead + near[i] * level
                levels = levels + (level,)  # noqa: RUF005
                word += code.to(WORD) << (i % 8 * BITS)
                if i % 8 == 7:
                    tl.store(p_words + o_row * (DIM // 8) + i_block * 2 + i // 8, word)
                    word = tl.zeros([ROWS], WORD)
            x = in_parts(join_columns(levels), WRITER)
            if DIM > PANEL * BLOCK:
                tl.store(p_part + i_block * BLOCK, x[0])
                if WRITER.parts == 2:
                    tl.store(p_part + (i_block * BLOCK + ROWS * DIM), x[1])
            sums = add_products(sums, 1, x, fit[0], i_block, i_block, WRITER) + no_sums(ROWS, 1)
        tl.debug_barrier()
    # y'Gy - (y'Gl)² / l'Gl, which the best has least of: differences of large sums would hide it
    loss = (error - tl.where(energy > 0, mixed * mixed / energy, 0.0)) / (inverse * inverse)
    mixed = (mixed + energy) / inverse
    best = tl.argmin(tl.reshape(loss, [TOGETHER, COUNT]), 1)  # the first of equals
    m_best = tl.arange(0, COUNT)[None, :] == best[:, None]
    mixed = tl.sum(tl.where(m_best, tl.reshape(mixed, [TOGETHER, COUNT]), 0.0), 1)
    energy = tl.sum(tl.where(m_best, tl.reshape(energy, [TOGETHER, COUNT]), 0.0), 1)
    o_vector = tl.arange(0, TOGETHER)
    p_best = p_words + (o_vector * COUNT + best) * (DIM // 8)
    store_vectors(i_first, p_scratch, p_best, mixed, energy, p_data, p_scale, m_vector, DTYPE, WRITER, 1, 1)


@triton.jit
def store_vectors(i_first, p_scratch, p_words, mixed, energy, p_data, p_scale, m_vector, DTYPE: tl.constexpr,
                  WRITER: tl.constexpr, STEP: tl.constexpr, PIECES: tl.constexpr):  # fmt: skip
    """Codes and scales of vectors i_first … where m_vector. p_words [vectors]: words of eight codes, STEP apart, each
    the sum of PIECES neighbours."""
    SIDE: tl.constexpr = WRITER.how
    DIM: tl.constexpr = SIDE.dim
    GROUPS: tl.constexpr = SIDE.groups
    o_vector, o_group = tl.arange(0, p_words.shape[0]), tl.arange(0, GROUPS)
    p_sizes = p_scratch + VECTORS * DIM + i_first + o_vector
    size, own = tl.load(p_sizes), tl.load(p_sizes + VECTORS)
    scale = fitted_scale(own, mixed, energy)
    scale = tl.where((energy > 0) & (size > 0), scale * size, 0.0)
    scale = tl.where(scale > SIDE.largest, SIDE.largest, tl.where(scale < -SIDE.largest, -SIDE.largest, scale))
    tl.store(p_scale, tl.where(size == size, scale, float("nan")).to(DTYPE), mask=m_vector)
    m_group = (o_group < DIM // 8)[None, :]
    words = tl.load(p_words[:, None] + (o_group * STEP)[None, :], mask=m_group, other=0)
    for i in tl.static_range(1, PIECES):
        words += tl.load(p_words[:, None] + (o_group * STEP + i)[None, :], mask=m_group, other=0)
    store_words(p_data, m_vector, words, DIM, SIDE.bits, GROUPS)
    tl.debug_barrier()
