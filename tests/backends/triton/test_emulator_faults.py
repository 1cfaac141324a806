"""Waits, barriers and fences taken out of the PTX of these kernels: the emulator tells, or results change."""

from __future__ import annotations

import contextlib
import importlib.util
import re

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from tests.helpers.gpu import EMULATED
from tests.helpers.ptx import EmulationError, why_not

if why_not() is not None or EMULATED:
    pytest.skip(why_not() or "this run is emulated", allow_module_level=True)

from aurakv import Format, Pages, Scoring
from aurakv.attention import ops
from aurakv.attention.step import Attention, Rows
from aurakv.backends import reference
from aurakv.storage.pages import allocate
from tests.helpers.ptx.driver import emulating


def attended(queries: int, capability: tuple[int, int], kernel: str, old: str, new: str) -> tuple[float, int]:
    """The error of attention over 300 tokens where `old` is `new` in the PTX of a kernel, and how often that was."""
    torch.manual_seed(0)
    format = Format.parse("k4v4", 64)
    lengths, table = torch.zeros(1, dtype=torch.int32), torch.randperm(5).int()[None]
    pages = Pages(format, 64, allocate(format, 64, 5, 1, torch.device("cpu")), table, lengths, torch.zeros(1).int())
    k, v = torch.randn(2, 300, 1, 64)
    ops.append(pages, k, v, [0, 300], backend="reference")
    q = torch.randn(queries, 4, 64)
    starts, changed = torch.tensor([0, queries], dtype=torch.int32), 0

    def change(ptx: str) -> str:
        nonlocal changed
        if f".entry {kernel}(" not in ptx:
            return ptx
        ptx, count = re.subn(old, new, ptx)
        changed += count
        return ptx

    with emulating(capability, change):
        part = ops.attend(q, pages, starts, backend="triton")
    truth = reference.attend(q.double(), Attention(pages, Rows(starts), Scoring()))
    return float((part.out - truth.out).norm() / truth.out.norm()), changed


FAULTS = {
    "no copy is waited for": (1, (8, 0), "decode_attention", r"(cp\.async\.wait_group) \d", r"\1 7"),
    "no barrier is waited for": (1, (9, 0), "decode_attention", r"@!done bra\.uni again;", ""),
    "fewer bytes are expected": (1, (9, 0), "decode_attention", r"(expect_tx\S+ _, \[\S+\]), (\d+)", r"\1, 16"),
    "no barrier between warps": (40, (8, 0), "extend_warps_kernel", r"bar\.sync\s+0;", ""),
    "products are not waited for": (40, (9, 0), "extend_kernel", r"(wgmma\.wait_group\S+) \d", r"\1 7"),
    "no fence before products": (40, (9, 0), "extend_kernel", r"fence\.proxy\.async\S*;", ""),
    "another function": (1, (8, 0), "decode_attention", r"ex2\.approx\.ftz\.f32", "abs.f32"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(fault: str) -> None:
    error, changed = float("nan"), 1
    with contextlib.suppress(EmulationError):
        error, changed = attended(*FAULTS[fault])
    assert changed
    assert not error < 0.01


@pytest.mark.parametrize(("queries", "capability"), [(1, (8, 0)), (1, (9, 0)), (40, (8, 0)), (40, (9, 0))])
def test_without_a_fault(queries: int, capability: tuple[int, int]) -> None:
    assert attended(queries, capability, "none", "", "")[0] < 0.004
