"""The second kernel of a decode: pieces of jobs to results.

In: pieces and lses as `decode_attention` leaves them; lengths, ends, starts, q, key_scale as there; sink_logits:
learned logits [heads] if LOGITS; key_offset, value_offset float32 [kv_heads, DIM] if KEY_OFFSET (its products with
queries are then added to the scores here) and VALUE_OFFSET; if UNCOMPRESSED, the first tokens of each sequence as
16-bit vectors: u_data, pieces of u_size numbers with keys at u_keys and values at u_values, one page a sequence in
u_table, u_lengths of them, as far as lengths go; if RECENT, its last ones beyond these lengths, likewise: r_data, …,
none where lengths are ends.
Out: out [tokens, heads, DIM] in its dtype, lse_out float32 [tokens, heads], natural logarithm.
The launcher guarantees: the same programs, scan and SCAN as for `decode_attention`; if EARLY, launched to overlap its
end.
"""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from .piece_queries import load_coordinates, natural
from .primitives import rotated
from .schedule import find_job, make_scan, query_rows, seen, span_of
from .shapes import padded

FIRST_AT_ONCE = gl.constexpr(4)  # by default there are no more
RECENT_AT_ONCE = gl.constexpr(8)


@gluon.jit
def add_vectors(
    found, vectors, seq, visible, b_seen, kv_head, kv_heads, b_q, scale, AT_ONCE: gl.constexpr, ACROSS: gl.constexpr,
    DIM: gl.constexpr, SOME: gl.constexpr,
):  # fmt: skip
    """Scores and values of 16-bit vectors of a sequence, which are not rotated, on top of what was found: the maximum,
    the sum of the weights below it, the weighted sum. visible: how many any row sees; if SOME, each row the first
    b_seen of them."""
    top, other, b_sum = found
    data, table, size, keys, values = vectors
    HEAD: gl.constexpr = top.type.layout
    OUT: gl.constexpr = b_sum.type.layout
    ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    WARPS: gl.constexpr = gl.num_warps()
    # each warp has all tokens of its rows, in registers: they are read at once and nothing waits for other warps
    block: gl.constexpr = gl.BlockedLayout(
        [AT_ONCE, 1, padded(DIM) // 32], [1, 1, 32], [ACROSS, WARPS // ACROSS, 1], [2, 1, 0]
    )
    o_token = gl.arange(0, AT_ONCE, layout=gl.SliceLayout(1, gl.SliceLayout(2, block)))
    o_dim = gl.arange(0, padded(DIM), layout=gl.SliceLayout(0, gl.SliceLayout(1, block)))
    o_dim = natural(o_dim, DIM)[None, None, :]
    m_dim = (o_dim < DIM) if padded(DIM) > DIM else (o_dim >= 0)
    b_query = gl.convert_layout(b_q, block)
    if SOME:
        b_limit = gl.convert_layout(b_seen, gl.SliceLayout(0, gl.SliceLayout(2, block)))
    p_piece = data + (gl.load(table + seq).to(gl.int64) * kv_heads + kv_head) * size
    for t in range(0, visible, AT_ONCE):
        m_token = t + o_token < visible
        o_vector = (t + o_token)[:, None, None] * DIM + o_dim
        m_vector = m_token[:, None, None] & m_dim
        b_key = gl.load(p_piece + keys + o_vector, mask=m_vector, other=0.0).to(gl.float32)
        b_value = gl.load(p_piece + values + o_vector, mask=m_vector, other=0.0).to(gl.float32)
        m_score = m_token[:, None]
        if SOME:
            m_score = m_score & ((t + o_token)[:, None] < b_limit[None, :])
        score = gl.sum(b_query * b_key, 2) * scale
        score = gl.where(gl.abs(score) < float("inf"), score, float("nan"))  # an infinite key damages, it is not a mask
        score = gl.where(m_score, score, -float("inf"))
        new = gl.maximum(top, gl.convert_layout(gl.max(score, 0), HEAD))
        old = gl.where(top == new, 1.0, gl.exp2(top - new))
        weight = gl.exp2(score - gl.convert_layout(new, gl.SliceLayout(0, gl.SliceLayout(2, block)))[None, :])
        weight = gl.where(m_score, weight, 0.0)
        other = other * old + gl.convert_layout(gl.sum(weight, 0), HEAD)
        b_more = gl.expand_dims(weight, 2) * b_value
        if SOME:  # 0 times a damaged value would be NaN
            b_more = gl.where(gl.expand_dims(m_score, 2), b_more, 0.0)
        b_more = gl.sum(b_more, 0)
        b_sum = b_sum * gl.convert_layout(old, ROW)[:, None] + gl.convert_layout(b_more, OUT)
        top = new
    return top, other, b_sum


@gluon.jit(do_not_specialize=["seqs", "tokens", "programs"])  # they change from call to call
def merge_pieces(
    pieces, lses, out, lse_out, sink_logits, signs, q, key_scale, key_offset, value_offset, lengths, ends, starts,
    u_data, u_table, u_lengths, u_size, u_keys, u_values, r_data, r_table, r_lengths, r_size, r_keys, r_values,
    seqs, tokens, kv_heads, first, recent, window, sinks, bias_scale, q_stride, programs, out_stride,
    GROUP: gl.constexpr, ROWS: gl.constexpr, DIM: gl.constexpr, TILE: gl.constexpr, SEQS: gl.constexpr,
    CLIP: gl.constexpr, WINDOW: gl.constexpr, SINKS: gl.constexpr, SEVERAL: gl.constexpr,
    LOGITS: gl.constexpr, KEY_OFFSET: gl.constexpr, VALUE_OFFSET: gl.constexpr, UNCOMPRESSED: gl.constexpr,
    KEY_SCALE: gl.constexpr, CHUNK: gl.constexpr, HEADS: gl.constexpr, ACROSS: gl.constexpr, ALONE: gl.constexpr,
    EARLY: gl.constexpr, RECENT: gl.constexpr,
):  # fmt: skip
    """Put the pieces of HEADS rows of a job together, CHUNK at a time, and rotate the results back. ALONE: the end of
    `decode_attention`, whose program has found all of the job: one piece, with its number.

    signs: value signs / √DIM, behind them the matrix of `rotated`, transposed. ACROSS of the warps share the
    pieces, the others the rows."""
    number = gl.program_id(0)  # of the job
    member = 0 if ALONE else gl.program_id(1) * HEADS
    WARPS: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 1, padded(DIM) // 32], [1, 1, 32], [ACROSS, WARPS // ACROSS, 1], [2, 1, 0]
    )
    HEAD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, layout))
    COORDINATE: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, layout))
    OUT: gl.constexpr = gl.SliceLayout(0, layout)  # [row, coordinate]
    ROW: gl.constexpr = gl.SliceLayout(1, OUT)
    COLUMN: gl.constexpr = gl.SliceLayout(0, OUT)
    ALL: gl.constexpr = gl.SliceLayout(
        0, gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    )  # the same in each warp
    SCAN: gl.constexpr = make_scan(CLIP, WINDOW, SINKS, SEVERAL, TILE, GROUP, ROWS, UNCOMPRESSED)
    scan = (first, recent, window, sinks)
    o_seq = gl.arange(0, SEQS, layout=ALL)
    b_seq = gl.minimum(o_seq, seqs - 1)
    _, b_count, b_blocks = query_rows(b_seq, starts, tokens, SCAN)
    b_jobs = gl.where(o_seq < seqs, b_blocks * kv_heads, 0)
    seq, job = find_job(number, o_seq, b_jobs, seqs, kv_heads, SCAN)
    if ALONE:
        t0, t1, _, _, _ = span_of(seq, starts, tokens, ends, lengths, scan, SCAN)
        tiles = t1 - t0
        p0 = number
        p1 = number
    else:
        b_t0, b_t1, _, _ = seen(b_seq, b_count, ends, lengths, scan, SCAN)
        b_tiles = (b_t1 - b_t0) * b_jobs
        total = gl.sum(b_tiles, 0)
        before = gl.sum(gl.where(o_seq < seq, b_tiles, 0), 0)
        tiles = gl.sum(gl.where(o_seq == seq, b_t1 - b_t0, 0), 0)
        start = before + job * tiles
        last = start + gl.maximum(tiles, 1) - 1
        each = total // programs
        extra = total - each * programs
        cut = extra * (each + 1)  # up to here programs have one tile more
        p0 = gl.where(start < cut, start // (each + 1), extra + (start - cut) // gl.maximum(each, 1))
        p1 = gl.where(last < cut, last // (each + 1), extra + (last - cut) // gl.maximum(each, 1))
    begin, queries, blocks = query_rows(seq, starts, tokens, SCAN)
    kv_head = job // gl.maximum(blocks, 1)
    known = kv_head < kv_heads  # there may be fewer jobs than programs
    count = gl.where((tiles > 0) & known, p1 - p0 + 1, 0)

    o_piece = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    member = member + gl.arange(0, HEADS, layout=HEAD)
    row = member
    if SEVERAL:
        row = (job - kv_head * blocks) * ROWS + member
    m_row = (member < ROWS) & (row < queries * GROUP) & known
    head = kv_head * GROUP + row % GROUP
    o_token = begin + row // GROUP
    d = natural(gl.arange(0, padded(DIM), layout=COORDINATE), DIM)
    m_d = (d < DIM) if padded(DIM) > DIM else (d >= 0)
    b_sign = load_coordinates(signs, d, m_d, 0.0, DIM)
    o_kv_head = gl.where(known, kv_head, 0) * DIM
    bias = gl.zeros([HEADS], gl.float32, HEAD)
    if KEY_OFFSET or UNCOMPRESSED or RECENT:
        p_q = q + (o_token * q_stride + head * DIM)[None, :, None] + d[None, None, :]
        b_q = gl.load(p_q, mask=m_row[None, :, None] & m_d[None, None, :], other=0.0).to(gl.float32)
        if KEY_SCALE:
            b_q = b_q / load_coordinates(key_scale + o_kv_head, d, m_d, 1.0, DIM)[None, None, :]
    if KEY_OFFSET:
        b_offset = load_coordinates(key_offset + o_kv_head, d, m_d, 0.0, DIM)
        bias = gl.sum(gl.sum(b_q * b_offset[None, None, :], 2), 0) * bias_scale
    if LOGITS:
        top = gl.load(sink_logits + head, mask=m_row, other=0.0).to(gl.float32) * 1.4426950408889634
        other = gl.where(top == -float("inf"), 0.0, 1.0)
    else:
        top = gl.full([HEADS], -float("inf"), gl.float32, HEAD)
        other = gl.zeros([HEADS], gl.float32, HEAD)
    mass = gl.zeros([HEADS], gl.float32, HEAD)
    b_out = gl.zeros([HEADS, padded(DIM)], gl.float32, OUT)
    o_column = gl.convert_layout(d, COLUMN)[None, :]
    m_column = (o_column < DIM) if padded(DIM) > DIM else (o_column >= 0)
    b_uncompressed = gl.zeros([HEADS, padded(DIM)], gl.float32, OUT)  # not rotated; their weights are in `other`
    if UNCOMPRESSED or RECENT:
        found = (top, other, b_uncompressed)
        of_head = gl.where(known, kv_head, 0)
        if UNCOMPRESSED:
            end = gl.load(ends + seq)
            held = gl.minimum(gl.load(u_lengths + seq), gl.minimum(end, gl.load(lengths + seq)))
            b_seen = end - (queries - 1) + row // GROUP  # a row sees so many keys of its sequence, if CLIP
            first_ones = (u_data, u_table, u_size, u_keys, u_values)
            found = add_vectors(
                found, first_ones, seq, gl.where(known, held, 0), b_seen, of_head, kv_heads, b_q, bias_scale,
                FIRST_AT_ONCE, ACROSS, DIM, SEVERAL and CLIP,
            )  # fmt: skip
        if RECENT:
            coded, end = gl.load(lengths + seq), gl.load(ends + seq)
            held = gl.where(known & (coded < end), gl.load(r_lengths + seq), 0)
            b_seen = end - coded - (queries - 1) + row // GROUP
            recent_ones = (r_data, r_table, r_size, r_keys, r_values)
            found = add_vectors(
                found, recent_ones, seq, held, b_seen, of_head, kv_heads, b_q, bias_scale, RECENT_AT_ONCE, ACROSS, DIM,
                SEVERAL and CLIP,
            )  # fmt: skip
        top, other, b_uncompressed = found
    if EARLY:
        gdc_wait()
    for i in range(0, count, CHUNK):
        o_row = i + o_piece
        piece = gl.where(o_row == 0, 2 * p0 + 1, 2 * (p0 + o_row))
        piece = gl.where(count == 1, 2 * programs + number, piece)
        index = piece[:, None] * ROWS + member[None, :]
        m_piece = (o_row < count)[:, None] & m_row[None, :]
        b_lse = gl.load(lses + index, mask=m_piece, other=-float("inf")) + bias[None, :]
        m_piece = gl.expand_dims(m_piece, 2) & m_d[None, None, :]
        b_piece = gl.load(pieces + gl.expand_dims(index, 2) * DIM + d[None, None, :], mask=m_piece, other=0.0)
        new = gl.maximum(top, gl.max(b_lse, 0))
        old = gl.where(top == new, 1.0, gl.exp2(top - new))
        weight = gl.where(b_lse == -float("inf"), 0.0, gl.exp2(b_lse - new[None, :]))
        mass = mass * old + gl.sum(weight, 0)
        other = other * old
        b_out = b_out * gl.convert_layout(old, ROW)[:, None] + gl.sum(b_piece * gl.expand_dims(weight, 2), 0)
        if UNCOMPRESSED or RECENT:
            b_uncompressed = b_uncompressed * gl.convert_layout(old, ROW)[:, None]
        top = new
    whole = mass + other
    inverse = gl.where(whole == 0.0, 0.0, 1.0 / whole)
    b_out = b_out * gl.convert_layout(inverse, ROW)[:, None]
    b_out = b_out + (b_out - b_out)  # an infinity is damage: NaN
    y = rotated(b_out, signs + DIM, HEADS, DIM) * gl.convert_layout(b_sign, COLUMN)[None, :]
    if UNCOMPRESSED or RECENT:
        b_uncompressed += gl.sum(b_uncompressed * 0.0, 1)[:, None]  # a damaged value: all of it NaN
        y += b_uncompressed * gl.convert_layout(inverse, ROW)[:, None]
    if VALUE_OFFSET:
        b_offset = load_coordinates(value_offset + o_kv_head, o_column, m_column, 0.0, DIM)
        y += gl.convert_layout(mass * inverse, ROW)[:, None] * b_offset
    o_out = gl.convert_layout(o_token * out_stride + head * DIM, ROW)[:, None]
    m_out = gl.convert_layout(m_row.to(gl.int32), ROW)[:, None] > 0
    gl.store(out + o_out + o_column, y.to(out.dtype.element_ty), mask=m_out & m_column)
    gl.store(lse_out + o_token * (kv_heads * GROUP) + head, (top + gl.log2(whole)) * 0.6931471805599453, mask=m_row)
