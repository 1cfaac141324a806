"""The ring of tiles with codes of 3 bits: shared memory of its own, which Triton does not know.

Rows of 48 bytes fit no layout of Triton, whose sizes are powers of two. Here a tile lies as in memory: one bulk copy of
whole sectors for a side, no padding. Lane l reads the 96 bits of 32 codes at 12·l of eight rows, three words without a
bank conflict, by inline assembly that has the address from `open_ring`. A slot has keys before values; behind the
slots are their barriers. The size is a multiple of 1024, so that what Triton puts behind it is aligned as it expects.
"""

# mypy: ignore-errors

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROW = gl.constexpr(48)  # bytes


@gluon.constexpr_function
def slot_bytes(key_bits, value_bits, tile):
    return ROW.value * tile * ((key_bits == 3) + (value_bits == 3))


@gluon.constexpr_function
def _open(slot, sides, stages):
    """$0: the address of the ring. Barriers count one arrival for each side of a tile."""
    size = -(-(slot + 8) * stages // 1024) * 1024
    lines = [f"{{ .shared .align 1024 .b8 ring[{size}];", ".reg .pred one;", "elect.sync _|one, 0xffffffff;"]
    lines += [f"@one mbarrier.init.shared::cta.b64 [ring+{slot * stages + 8 * i}], {sides};" for i in range(stages)]
    return "\n".join([*lines, "fence.proxy.async.shared::cta;", "bar.warp.sync 0xffffffff;", "mov.u32 $0, ring; }"])


# $1: from; $2: bytes; $3: to; $4: barrier. Every lane has read what was there before.
_COPY = gl.constexpr("""{ .reg .pred one;
bar.warp.sync 0xffffffff;
elect.sync _|one, 0xffffffff;
@one mbarrier.arrive.expect_tx.shared::cta.b64 _, [$4], $2;
@one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$3], [$1], $2, [$4];
mov.b32 $0, 0; }""")

_WAIT = gl.constexpr("""{ .reg .pred done;
again: mbarrier.try_wait.parity.shared::cta.b64 done, [$1], $2;
@!done bra.uni again;
mov.b32 $0, $3; }""")


@gluon.jit
def open_ring(SLOT: gl.constexpr, SIDES: gl.constexpr, STAGES: gl.constexpr):
    """The address of the ring, its barriers ready. Once for each program."""
    ASM: gl.constexpr = _open(SLOT, SIDES, STAGES)
    return gl.inline_asm_elementwise(ASM, "=r,r", [gl.program_id(0)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def copy_rows(source, count, target, bar):
    """Start the copy of rows of codes."""
    gl.inline_asm_elementwise(
        _COPY, "=r,l,r,r,r", [source, count * ROW, target, bar], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_for(ring, slot, phase, SLOT: gl.constexpr, STAGES: gl.constexpr):
    """Wait for the copies into a slot; its address."""
    return gl.inline_asm_elementwise(
        _WAIT, "=r,r,r,r", [ring + SLOT * STAGES + 8 * slot, phase, ring + SLOT * slot],
        dtype=gl.int32, is_pure=False, pack=1)  # fmt: skip


@gluon.constexpr_function
def octet_layout(tile, n):
    """[octets of tokens, 8, 4, n]: lane 4g + c has [:, g, c, :]."""
    regs = [[0, 0, 0, 1 << i] for i in range((n - 1).bit_length())]
    regs += [[1 << i, 0, 0, 0] for i in range((tile // 8 - 1).bit_length())]
    lanes = [[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    return gl.DistributedLinearLayout(regs, lanes, [], [], [tile // 8, 8, 4, n])


@gluon.constexpr_function
def octet_slice(tile, n, dim):
    """The layout of one dimension of `octet_layout`."""
    layout = octet_layout(tile, n)
    for other in (3, 2, 1, 0):
        layout = gl.SliceLayout(other, layout) if other != dim else layout
    return layout


@gluon.jit
def triples(tile, TILE: gl.constexpr, N: gl.constexpr):
    """Where each lane has its three words of each octet of tokens, N times: [octets, 8, 4, N] int32."""
    octet = gl.arange(0, TILE // 8, layout=octet_slice(TILE, N, 0))
    g = gl.arange(0, 8, layout=octet_slice(TILE, N, 1))
    c = gl.arange(0, 4, layout=octet_slice(TILE, N, 2))
    n = gl.arange(0, N, layout=octet_slice(TILE, N, 3))
    lane = tile + (4 * ROW // 16) * (4 * g[None, :, None, None] + c[None, None, :, None])
    return lane + (8 * ROW * octet[:, None, None, None] + 0 * n[None, None, None, :])


@gluon.jit
def in_octets(x):
    """A constant [1, 1] of `octet_slice` beside tensors of `octet_layout`."""
    return gl.expand_dims(gl.expand_dims(x, 1), 2)
