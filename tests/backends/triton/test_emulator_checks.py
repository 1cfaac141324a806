"""What the emulator of PTX tells about wrong kernels, and plain Triton kernels on it against torch."""

from __future__ import annotations

import importlib.util

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

import triton
import triton.language as tl

from tests.helpers.ptx import EmulationError, why_not

if why_not() is not None or triton.knobs.runtime.interpret:
    pytest.skip(why_not() or "Triton interprets", allow_module_level=True)

from tests.helpers.ptx.driver import Utils, emulating
from tests.helpers.ptx.snippets import run

WORDS = torch.arange(256, dtype=torch.int32)
REGISTERS = ".reg .b64 %a; .reg .b32 %x, %s; .reg .pred %q; mad.wide.u32 %a, %lane, 4, %p0; mov.u32 %s, dynamic;"


def out() -> torch.Tensor:
    return torch.zeros(256, dtype=torch.int32)


WRONG = {
    "beyond a tensor": ("ld.global.b32 %x, [%a+1024];", "no tensor of the launch"),
    "before a tensor": ("add.s64 %a, %p0, -4; st.global.b32 [%a], %lane;", "no tensor of the launch"),
    "not aligned": ("ld.global.b32 %x, [%a+2];", "not aligned to 4 bytes"),
    "not aligned vector": ("{ .reg .b32 y; ld.global.v2.b32 {%x, y}, [%a]; }", "not aligned to 8 bytes"),
    "beyond shared memory": ("st.shared.b32 [%s+512], %lane;", "at shared"),
    "a copy that is not waited for": (
        "mad.lo.u32 %s, %lane, 16, %s; mad.wide.u32 %a, %lane, 16, %p0;"
        "cp.async.cg.shared.global [%s], [%a], 16; cp.async.commit_group; ld.shared.b32 %x, [%s];",
        "a copy under way",
    ),
    "a copy too early waited for": (
        "mad.lo.u32 %s, %lane, 16, %s; mad.wide.u32 %a, %lane, 16, %p0;"
        "cp.async.cg.shared.global [%s], [%a], 16; cp.async.commit_group; cp.async.wait_group 1;"
        "ld.shared.b32 %x, [%s];",
        "a copy under way",
    ),
    "a lane that does not come": (
        "setp.eq.u32 %q, %lane, 3; @%q ret; shfl.sync.bfly.b32 %x, %lane, 2, 31, -1;",
        "which takes no part",
    ),
    "lanes that never meet": (
        "setp.lt.u32 %q, %lane, 16; @%q bra low; bar.warp.sync -1; bra end;"
        "low: bar.warp.sync -1; add.u32 %x, %lane, 1; end:",
        "never come",
    ),
    "no end": ("again: bra again;", "does not end"),
    "an unknown instruction": ("tcgen05.fence::before_thread_sync;", "does not know this instruction"),
    "a register of another size": ("mov.b32 %x, %a;", r"is a \.b64"),
    "an mbarrier that nobody made": (
        "{ .reg .pred d; mbarrier.try_wait.parity.shared::cta.b64 d, [%s], 0; }",
        "no mbarrier",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_kernels(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.helpers.ptx import launch

    monkeypatch.setattr(launch, "MOST", 100_000)
    assembly, told = WRONG[case]
    with pytest.raises(EmulationError, match=told):
        run(REGISTERS + "\n" + assembly, WORDS.clone(), shared=512)


RACE = """.reg .b32 %x, %s, %o; .reg .b64 %a;
mov.u32 %s, dynamic; mad.lo.u32 %s, %lane, 4, %s; st.shared.b32 [%s], 0; bar.sync 0;
st.shared.b32 [%s], %lane; {barrier}
xor.b32 %o, %lane, 32; mov.u32 %s, dynamic; mad.lo.u32 %s, %o, 4, %s; ld.shared.b32 %x, [%s];
mad.wide.u32 %a, %lane, 4, %p0; st.global.b32 [%a], %x;"""


def test_memory_that_nothing_wrote_is_nan() -> None:
    found = out()
    run(REGISTERS + "ld.shared.b32 %x, [%s]; st.global.b32 [%a], %x;", found, shared=512)
    assert found[:32].view(torch.float32).isnan().all()
    assert found[:32].view(torch.float16).isnan().all()


def test_races() -> None:
    found = out()
    run(RACE.replace("{barrier}", "bar.sync 0;"), found, warps=2, shared=256)
    assert found[:64].tolist() == [i ^ 32 for i in range(64)]
    with pytest.raises(EmulationError, match="race"):
        run(RACE.replace("{barrier}", "bar.warp.sync -1;"), found, warps=2, shared=256)


def test_a_barrier_that_a_warp_does_not_reach() -> None:
    with pytest.raises(EmulationError, match="no warp can go on"):
        run(".reg .pred q; setp.lt.u32 q, %lane, 32; @q bra end; bar.sync 1, 64; end:", out(), warps=2)


BULK = """.reg .b32 %s, %x, %b; .reg .pred one, done; .reg .b64 %a; mov.u32 %s, dynamic; add.u32 %b, %s, 1024;
elect.sync _|one, -1;
@one mbarrier.init.shared::cta.b64 [%b], 1;
@one mbarrier.arrive.expect_tx.shared::cta.b64 _, [%b], 512;
@one cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%s], [%p0], 512, [%b];
bar.warp.sync -1;
{wait}
mad.lo.u32 %s, %lane, 4, %s; ld.shared.b32 %x, [%s]; mad.wide.u32 %a, %lane, 4, %p1; st.global.b32 [%a], %x;"""
WAIT = "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%b], 0; @!done bra again;"


def test_bulk_copies() -> None:
    found = out()
    run(BULK.replace("{wait}", WAIT), WORDS.clone(), found, shared=2048)
    assert torch.equal(found[:32], WORDS[:32])
    with pytest.raises(EmulationError, match="a copy under way"):
        run(BULK.replace("{wait}", ""), WORDS.clone(), found, shared=2048)
    with pytest.raises(EmulationError, match="no warp can go on"):  # it waits for more bytes than come
        run(BULK.replace("{wait}", WAIT).replace("_, [%b], 512", "_, [%b], 528"), WORDS.clone(), found, shared=2048)


@triton.jit
def softmax_kernel(x, y, columns, COLUMNS: tl.constexpr):
    row = tl.program_id(0)
    o = tl.arange(0, COLUMNS)
    b = tl.load(x + row * columns + o, mask=o < columns, other=-float("inf"))
    e = tl.exp(b - tl.max(b, 0))
    tl.store(y + row * columns + o, e / tl.sum(e, 0), mask=o < columns)


@triton.jit
def matmul_kernel(a, b, c, n, k, BLOCK: tl.constexpr, DEEP: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    o = tl.arange(0, DEEP)
    sums = tl.zeros([BLOCK, BLOCK], tl.float32)
    for i in range(0, k, DEEP):
        left = tl.load(a + rows[:, None] * k + (i + o)[None, :])
        right = tl.load(b + (i + o)[:, None] * n + columns[None, :])
        sums = tl.dot(left, right, sums)
    tl.store(c + rows[:, None] * n + columns[None, :], sums)


@triton.jit
def count_kernel(x, counts, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(counts + tl.load(x + o), 1)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_softmax(capability: tuple[int, int]) -> None:
    x = torch.randn(5, 777)
    y = torch.empty_like(x)
    with emulating(capability):
        softmax_kernel[(5,)](x, y, 777, 1024)
    torch.testing.assert_close(y, x.softmax(-1), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("capability", "instruction"), [((8, 0), "mma.sync"), ((9, 0), "wgmma.mma_async")])
def test_matmul(capability: tuple[int, int], instruction: str, dtype: torch.dtype) -> None:
    """Pipelined by Triton with copies that run beside the program; float32 as tf32."""
    a, b = (torch.randint(-8, 9, (128, 128)).to(dtype) for _ in "ab")
    c = torch.empty(128, 128)
    with emulating(capability):
        compiled = matmul_kernel[(2, 2)](a, b, c, 128, 128, 64, 32)
    assert instruction in compiled.asm["ptx"]
    assert torch.equal(c, a.float() @ b.float())


def test_atomics() -> None:
    x = torch.randint(0, 7, (512,), dtype=torch.int32)
    counts = torch.zeros(7, dtype=torch.int32)
    with emulating((8, 0)):
        count_kernel[(4,)](x, counts, 128)
    assert torch.equal(counts, torch.bincount(x, minlength=7).int())


def test_a_mask_that_is_missing() -> None:
    x, y = torch.randn(2, 700), torch.empty(2, 600)
    with emulating((8, 0)), pytest.raises(EmulationError, match=r"softmax_kernel.*no tensor of the launch"):
        softmax_kernel[(2,)](x, y, 700, 1024)


@pytest.mark.parametrize(("dynamic", "fits"), [(0, True), (1024, False), (50000, True), (130000, False)])
def test_shared_memory_that_a_kernel_declares_itself(dynamic: int, fits: bool) -> None:
    """With what Triton asks for it may be 48 KiB, unless that alone is more: then what a program can have, 163 KiB."""
    ptx = """.version 8.0
.target sm_80
.address_size 64
.visible .entry kernel()
{
.shared .align 16 .b8 own[48640];
ret;
}"""
    load = Utils((8, 0), None).load_binary
    if fits:
        load("kernel", ptx.encode(), dynamic, 0)
    else:
        with pytest.raises(EmulationError, match="48640 bytes of shared memory"):
            load("kernel", ptx.encode(), dynamic, 0)
