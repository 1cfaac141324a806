"""Device functions: which sequence a block of rows belongs to, and where its tokens lie in the pages.

Every index read from device memory is forced into range: kernels stay inside their tensors whatever it holds.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

FIT_ENTRIES = tl.constexpr(256)  # table entries looked at in one go


@triton.jit
def find_block(p_starts, tokens, seqs, i_block, ROWS: tl.constexpr, BLOCK: tl.constexpr, SEQS: tl.constexpr):
    """Block i_block of rows, ROWS of them per token and BLOCK per block: its sequence, its first row inside that, and
    the sequence's first and last + 1 token. A block past the end belongs to a sequence without tokens.

    SEQS: a power of two ≥ seqs; 0 if row i is the only one of sequence i, or pads the batch.
    """
    PER_TOKEN: tl.constexpr = (ROWS + BLOCK - 1) // BLOCK
    if SEQS == 0:
        i_seq = i_block // PER_TOKEN
        return i_seq, (i_block % PER_TOKEN) * BLOCK, i_seq, i_seq + 1
    else:
        o_seq = tl.arange(0, SEQS)
        b_from, b_to = seq_tokens(p_starts, tokens, o_seq, o_seq < seqs)
        b_blocks = ((b_to - b_from) * ROWS + (BLOCK - 1)) // BLOCK
        m_before = tl.cumsum(b_blocks, 0) <= i_block
        i_seq = tl.sum(m_before.to(tl.int32), 0)
        i_first = (i_block - tl.sum(tl.where(m_before, b_blocks, 0), 0)) * BLOCK
        i_from, i_to = seq_tokens(p_starts, tokens, i_seq, i_seq < seqs)
        return tl.minimum(i_seq, seqs - 1), i_first, i_from, i_to


@triton.jit
def seq_tokens(p_starts, tokens, i_seq, m_seq):
    """First and last + 1 row of token sequences."""
    i_from = tl.load(p_starts + i_seq, mask=m_seq, other=0)
    i_to = tl.load(p_starts + i_seq + 1, mask=m_seq, other=0)
    i_from = tl.minimum(tl.maximum(i_from, 0), tokens)
    return i_from, tl.minimum(tl.maximum(i_to, i_from), tokens)


@triton.jit
def table_entry(page, width, pinned, RING: tl.constexpr):
    if RING:
        return tl.where(page < pinned, page, pinned + (page - pinned) % (width - pinned))
    else:
        return tl.minimum(page, width - 1)


@triton.jit
def page_bases(p_table, i_seq, page, m_page, pages, width, pinned, RING: tl.constexpr):
    """Indices of the pages that hold page number `page` of a sequence, as int64."""
    entry = table_entry(tl.maximum(page, 0), width, pinned, RING)
    i_page = tl.load(p_table + i_seq.to(tl.int64) * width + entry, mask=m_page, other=0)
    return tl.minimum(tl.maximum(i_page, 0), pages - 1).to(tl.int64)


@triton.jit
def sequences_fit(pool, b_seq, m_seq, b_old, b_new, RING: tl.constexpr, SEQS: tl.constexpr, ENTRIES: tl.constexpr):
    """Whether tokens b_old … b_new − 1 of sequences [SEQS] all have a page to be written to.

    pool: (table, lengths, overflow, starts, tokens, seqs, pages, width, page_size, pinned)."""
    p_table, _, _, _, _, _, pages, width, page_size, pinned = pool
    b_fits = m_seq & (b_old >= 0)
    if not RING:
        b_fits = b_fits & (b_new <= width.to(tl.int64) * page_size)
    b_first = tl.where(b_fits, b_old, 0) // page_size
    b_last = tl.where(b_fits & (b_new > b_old), (b_new - 1) // page_size, b_first - 1)
    b_oldest = b_new - (width - pinned) * page_size  # of a ring, what survives
    o_entry = tl.arange(0, ENTRIES)
    b_missing = tl.zeros([SEQS], tl.int32)
    for i in range(0, tl.max(b_last - b_first, 0) + 1, ENTRIES):
        page = b_first[:, None] + i + o_entry[None, :]
        m_page = m_seq[:, None] & (page <= b_last[:, None])
        if RING:
            m_page = m_page & ((page < pinned) | ((page + 1) * page_size > b_oldest[:, None]))
        entry = table_entry(page, width, pinned, RING)
        i_page = tl.load(p_table + b_seq[:, None].to(tl.int64) * width + entry, mask=m_page, other=0)
        b_missing += tl.sum(((i_page < 0) | (i_page >= pages)).to(tl.int32), 1)
    return b_fits & (b_missing == 0)


@triton.jit
def no_sequence():
    """What `enter_sequence` takes as known at first."""
    zero = tl.full([], 0, tl.int32)
    return zero, zero, zero, zero, zero, zero, zero


@triton.jit
def enter_sequence(pool, i_block, known, HEADS: tl.constexpr, LONG: tl.constexpr, COUNTED: tl.constexpr,
                   RING: tl.constexpr, SEQS: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """What is known about the sequence of a block of an append, and whether that was refused.

    known: first and last + 1 block of a sequence, its number, its first and last + 1 token, its old length, whether it
    fits. Blocks of the same sequence read none of that again: memory is slow and these loads wait for each other.
    LONG: a block is tokens of one head, neighbours in a page of at least 16; else all heads of a token are neighbours.
    COUNTED: lengths count the tokens of the append already.
    """
    _, lengths, _, starts, tokens, seqs, _, _, _, _ = pool
    PER_TOKEN: tl.constexpr = 1 if LONG else HEADS
    block = i_block // HEADS if LONG else i_block
    i_lo, i_hi, i_seq, i_from, i_to, old, fits = known
    if (block < i_lo) | (block >= i_hi):
        i_seq, i_first, i_from, i_to = find_block(starts, tokens, seqs, block, PER_TOKEN, ROWS, SEQS)
        i_lo = block - i_first // ROWS
        i_hi = i_lo + ((i_to - i_from) * PER_TOKEN + (ROWS - 1)) // ROWS
        if COUNTED and SEQS == 0:  # a sequence without a row pads the batch, whatever its length
            i_to = tl.where(tl.load(starts + i_seq + 1) > tl.load(starts + i_seq), i_to, i_from)
        old = tl.load(lengths + i_seq)
        if COUNTED:
            old -= i_to - i_from
        o_one = tl.arange(0, 1)
        b_fits = sequences_fit(
            pool, i_seq + o_one, o_one == 0, old + o_one, old + (i_to - i_from) + o_one, RING, 1, FIT_ENTRIES
        )
        fits = tl.sum(b_fits.to(tl.int32), 0)
    return (i_lo, i_hi, i_seq, i_from, i_to, old, fits), (fits == 0) & (i_to > i_from)


@triton.jit
def place_rows(pool, i_block, known, o_row, HEADS: tl.constexpr, LONG: tl.constexpr, RING: tl.constexpr,
               ROWS: tl.constexpr, ANY_PAGE: tl.constexpr = False):  # fmt: skip
    """Rows o_row (token, head) of a block of an append: their token, head, row inside the page, the page's piece for
    that head, and which of them are written."""
    table, _, _, _, _, _, _, width, page_size, pinned = pool
    i_lo, _, i_seq, i_from, i_to, old, fits = known
    start = ((i_block // HEADS if LONG else i_block) - i_lo) * ROWS
    if LONG:
        i_head = i_block % HEADS + 0 * o_row
        i_token = i_from + start + o_row
    else:
        i_head = (start + o_row) % HEADS
        i_token = i_from + (start + o_row) // HEADS
    position = old + (i_token - i_from)
    m_row = (i_token < i_to) & (fits > 0)
    if RING:  # of tokens that share a slot only the last one stays
        new = old + (i_to - i_from)
        m_row = m_row & ((position < pinned * page_size) | (position >= new - (width - pinned) * page_size))
    if LONG and ROWS == 16 and not ANY_PAGE:  # no page is smaller then: one division for all rows
        first, size = (old + start).to(tl.uint32), page_size.to(tl.uint32)  # the shorter division
        i_row = (first % size).to(tl.int32) + o_row
        over = (i_row >= page_size).to(tl.int32)
        i_page = (first // size).to(tl.int32) + over
        i_row -= over * page_size
    else:
        i_page, i_row = position // page_size, position % page_size
    entry = table_entry(tl.maximum(i_page, 0), width, pinned, RING)
    i_page = tl.load(table + i_seq.to(tl.int64) * width + entry, mask=m_row, other=0)
    return i_token, i_head, i_row, i_page * HEADS + i_head, m_row


@triton.jit
def row_places(data, o_piece, i_row, page_bytes, codes, scales, BYTES: tl.constexpr, DTYPE: tl.constexpr):
    """Where codes and scales of rows of pieces go."""
    p_piece = data + o_piece.to(tl.int64) * page_bytes
    p_scale = (p_piece + scales).to(tl.pointer_type(DTYPE), bitcast=True) + i_row
    return p_piece + codes + i_row.to(tl.int64) * BYTES, p_scale


@triton.jit
def place_token(pool, i_seq, position, RING: tl.constexpr):
    """Where one token of a sequence goes: its page, its row inside that, and whether there is such a page."""
    table, _, _, _, _, _, pages, width, page_size, pinned = pool
    fits = position >= 0
    if not RING:
        fits = fits & (position < width.to(tl.int64) * page_size)
    position = tl.where(fits, position, 0)
    entry = table_entry(position // page_size, width, pinned, RING)
    i_page = tl.load(table + i_seq.to(tl.int64) * width + entry, mask=fits, other=-1)
    return i_page, position % page_size, fits & (i_page >= 0) & (i_page < pages)


@triton.jit
def advance_lengths(pool, refused, programs, RING: tl.constexpr, SEQS: tl.constexpr, ENTRIES: tl.constexpr):
    """The program that ends last advances the lengths: no program may read them afterwards.

    While the kernel runs, `overflow` above its lowest bit counts the programs that have ended.
    """
    _, lengths, overflow, starts, tokens, seqs, _, _, _, _ = pool
    if refused:
        tl.atomic_or(overflow, 1, sem="relaxed")
    tl.debug_barrier()
    ended = tl.atomic_add(overflow, 2, sem="acq_rel") >> 1
    if ended == programs - 1:
        for first in range(0, seqs, SEQS):
            o_seq = first + tl.arange(0, SEQS)
            m_seq = o_seq < seqs
            b_from, b_to = seq_tokens(starts, tokens, o_seq, m_seq)
            b_old = tl.load(lengths + o_seq, mask=m_seq, other=0)
            b_new = b_old + (b_to - b_from)
            m_fits = sequences_fit(pool, o_seq, m_seq, b_old, b_new, RING, SEQS, ENTRIES)
            tl.store(lengths + o_seq, b_new, mask=m_fits & (b_to > b_from))
        tl.atomic_add(overflow, -2 * programs, sem="acq_rel")
