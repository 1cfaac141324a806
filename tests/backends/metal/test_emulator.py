"""The emulator of Metal: right results, and a kernel broken on purpose is caught with the line that is wrong."""

from __future__ import annotations

import concurrent.futures
import inspect
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.backends.metal import emulator
from tests.backends.metal.emulator import EmulationError, compile_shader, emulate

pytestmark = pytest.mark.skipif(emulator.why_not() is not None, reason=str(emulator.why_not()))

SOURCE = (Path(__file__).parent / "sketch.metal").read_text()
LEVELS = np.array([float(x) for x in re.findall(r"-?\d\.\d{3}(?=f)", SOURCE)][:16])
SCALE = 128**-0.5
HEADER = "#include <metal_stdlib>\nusing namespace metal;\n"


def inputs(heads, tokens, seed=0):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((heads, 4, 128), np.float32) * 3
    key_codes, value_codes = rng.integers(0, 256, (2, heads, tokens, 64), np.uint8)
    key_scales, value_scales = rng.uniform(0.5, 1.5, (2, heads, tokens)).astype(np.float16)
    return q, key_codes, key_scales, value_codes, value_scales


def expected(q, key_codes, key_scales, value_codes, value_scales):
    def expand(codes, scales):
        levels = LEVELS[np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:2], 128)]
        return levels * scales[..., None].astype(float)

    p = np.einsum("hgd,htd->hgt", q.astype(float), expand(key_codes, key_scales)) * SCALE
    p = np.exp(p - p.max(-1, keepdims=True))
    return np.einsum("hgt,htd->hgd", p / p.sum(-1, keepdims=True), expand(value_codes, value_scales))


def attend(source, data, splits=3, backwards=False):
    library = compile_shader(source, backwards)
    heads, tokens = data[2].shape
    partial, statistics = torch.empty(splits, heads, 4, 128), torch.empty(splits, heads, 4, 2)
    out = torch.empty(heads, 4, 128)
    library.decode(
        *(torch.from_numpy(x.copy()) for x in data), partial, statistics, tokens, -(-tokens // splits), SCALE,
        threads=(splits * 128, heads), group_size=(128, 1), arg_casts={7: "int32", 8: "int32"},
    )  # fmt: skip
    sizes = {"threads": (128, heads * 4), "group_size": (128, 1), "arg_casts": "int32"}
    library.merge(partial, statistics, out, splits, heads * 4, **sizes)
    return out.numpy()


@pytest.mark.parametrize(("heads", "tokens", "splits"), [(1, 1, 1), (1, 40, 3), (1, 5, 4), (2, 257, 4)])
def test_attention_is_right_in_any_order_of_threads(heads, tokens, splits):
    data = inputs(heads, tokens, tokens)
    got = attend(SOURCE, data, splits)
    assert abs(got - expected(*data)).max() < 2e-5
    assert np.array_equal(got, attend(SOURCE, data, splits, backwards=True))


def test_python_threads_launch_one_after_the_other():
    """Whatever they launch, one library or several."""
    data, source = inputs(1, 40), SOURCE + "// for threads\n"
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda i: attend(source + "\n" * (i % 2), data), range(12)))
    for got in found:
        assert np.array_equal(got, found[0])
    assert abs(found[0] - expected(*data)).max() < 2e-5


BARRIER = "  threadgroup_barrier(mem_flags::mem_threadgroup);"
READS = "top = max(top, scores[s][head].x)"
ROW = "uint row = (where.x * groups.y + where.y) * 4 + head;"
AFTER = "scores[team][head] = float2(top, whole);"
CODES = "expand(key_codes"
BROKEN = {  # what: error, the line that is wrong, what is replaced, by what
    "missing barrier": ("uninitialised|race", READS, BARRIER, ""),
    "a device barrier instead": (
        "race: .* reads threadgroup",
        READS,
        BARRIER,
        BARRIER.replace("mem_threadgroup)", "mem_device)"),
    ),
    "a barrier that orders no memory": (
        "race: .* reads threadgroup",
        READS,
        BARRIER,
        BARRIER.replace("mem_threadgroup)", "mem_none)"),
    ),
    "barrier in one simdgroup": ("race: .* reads threadgroup", READS, BARRIER, "if (team == 0)" + BARRIER),
    "barrier by half a simdgroup": ("divergence", BARRIER, BARRIER, "if (lane < 16)" + BARRIER + "else" + BARRIER),
    "write after read": ("race: .* reads threadgroup", READS, ROW, "if (lane == 0) " + AFTER + ROW),
    "write after others read": (
        "race: .* writes threadgroup",
        ROW,
        ROW,
        "if (lane == 31) " + AFTER + ROW,
    ),
    "memory nobody wrote": ("uninitialised", READS, "if (lane == 0) scores", "if (lane == 0 && team > 0) scores"),
    "one token too many": ("out of range: read", CODES, "t < end; t += 4", "t <= end; t += 4"),
    "a row too far": ("out of range: read", CODES, "key_codes[row * 32 + lane]", "key_codes[row * 33 + lane]"),
    "a vector too far": (
        "out of range: read of 4 bytes at byte 4096",
        "query[h] = queries",
        "* 32 + lane] * scale",
        "* 32 + lane + 1] * scale",
    ),
    "a vector written too far": (
        "out of range: write",
        "] = merged;",
        "partial[row * 32 + lane]",
        "partial[row * 32 + lane + 1]",
    ),
    "a negative index": ("out of range: read", "value_scales[row]", "value_scales[row]", "value_scales[int(row) - 1]"),
    "a table index of 5 bits": (
        "out of range: index",
        "LEVELS[codes & 15]",
        "LEVELS[codes & 15]",
        "LEVELS[codes & 31]",
    ),
    "a thread index too far": (
        "out of range: index",
        "highest[h] = top;",
        "highest[h] = top;",
        "highest[h + 1] = top;",
    ),
    "a threadgroup index too far": ("out of range: index", "sums[team][h]", "sums[team][h]", "sums[team][h + 1]"),
    "a threadgroup pointer too far": (
        "out of range: read",
        "merged += sums",
        "sums[s][head][lane] * factor",
        "(&sums[s][head][0])[lane + 1024] * factor",
    ),
    "a threadgroup pointer into the next array": (
        "out of range: read of 4 bytes at byte 8192 of a threadgroup array",
        "merged += sums",
        "sums[s][head][lane] * factor",
        "(&sums[s][head][0])[lane + 1] * factor",
    ),
    "simd_sum in divergent code": (
        "divergence",
        "simd_sum(score)",
        "score = simd_sum",
        "if (lane < 16) score = simd_sum",
    ),
    "simd_sum in both branches": (
        "divergence",
        "simd_sum(score)",
        "score = simd_sum(score);",
        "if (lane < 16) score = simd_sum(score); else score = simd_sum(score);",
    ),
    "return before simd_sum": (
        "divergence",
        "simd_sum(score)",
        "score = simd_sum",
        "if (lane == 31) return; score = simd_sum",
    ),
    "splits writing one row": ("race: .* writes device", "] = merged;", ROW, "uint row = where.y * 4 + head;"),
    "a misaligned vector": (
        "misaligned",
        "query[h] = queries",
        "queries[(where.y * 4 + h) * 32 + lane]",
        "*(device const float4*)((device const float*)queries + lane)",
    ),
    "a shuffle past the simdgroup": (
        "out of range: simd_shuffle reads lane 40",
        "simd_sum(score)",
        "score = simd_sum(score);",
        "score = simd_sum(score); score += simd_shuffle(score, 40);",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_kernels_are_caught(what):
    kind, at, old, new = BROKEN[what]
    assert SOURCE.count(old) == 1
    assert SOURCE.count(at) == 1
    line = SOURCE[: SOURCE.index(at)].count("\n") + 1
    with pytest.raises(EmulationError, match=rf"(?s){kind}.*\bline {line}\b"):
        attend(SOURCE.replace(old, new), inputs(2, 40))


FENCE = "threadgroup_barrier(mem_flags::mem_threadgroup);"
DIVERGENT = {  # what a threadgroup of 64 does: which threads are where when it is found
    f"if (team == 1) return;\n{FENCE}": (
        "thread 0 is at threadgroup_barrier, line 5, thread 32 has returned"
    ),
    f"if (team == 0) return;\n{FENCE}": (
        "thread 32 is at threadgroup_barrier, line 5, thread 0 has returned"
    ),
    f"if (team == 0)\n{FENCE}\nelse\n{FENCE}": (
        "thread 0 is at threadgroup_barrier, line 5, thread 32 is at threadgroup_barrier, line 7"
    ),
    f"if (team == 0) {FENCE} else {FENCE}": (
        "thread 0 is at threadgroup_barrier, line 4, thread 32 is at threadgroup_barrier, line 4"
    ),
    f"if (team == 0) {{\n{FENCE}\n{FENCE} }} else\n{FENCE}": (
        "thread 0 is at threadgroup_barrier, line 5, thread 32 is at threadgroup_barrier, line 7"
    ),
    f"for (uint i = 0; i < team; ++i)\n{FENCE}": (
        "thread 32 is at threadgroup_barrier, line 5, thread 0 has returned"
    ),
}  # fmt: skip


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("body", DIVERGENT)
def test_simdgroups_that_do_not_meet_at_a_barrier(body, backwards):
    library = compile_shader(
        HEADER + "kernel void f(device int* x, uint at [[thread_index_in_threadgroup]]) { uint team = at / 32;\n"
        f"{body}\nx[at] = 1; }}", backwards,
    )  # fmt: skip
    with pytest.raises(EmulationError, match=f"divergence in group 0: {DIVERGENT[body]}"):
        library.f(torch.zeros(64, dtype=torch.int32), threads=64, group_size=64)


def test_simdgroup_barrier_orders_a_simdgroup():
    fence = "simdgroup_barrier(mem_flags::mem_threadgroup); if (lane == 0) "
    attend(SOURCE.replace(ROW, fence + AFTER + ROW), inputs(2, 40))
    for other in ("mem_device", "mem_none"):
        with pytest.raises(EmulationError, match=r"race: .* writes threadgroup"):
            attend(SOURCE.replace(ROW, fence.replace("mem_threadgroup", other) + AFTER + ROW), inputs(2, 40))


ADD, LOAD, STORE = (f"atomic_{name}_explicit(&n[0], " for name in ("fetch_add", "load", "store"))
PLAIN = "((threadgroup int*)n)[0]"
ATOMICS = {  # what a threadgroup of 64 does with one atomic number, and what is wrong with it
    f"if (i == 0) {STORE}0, relaxed); {FENCE} {ADD}1, relaxed); {ADD}2, relaxed); {FENCE} x[i] = {LOAD}relaxed);": None,
    f"{STORE}7, relaxed); x[i] = {LOAD}relaxed);": None,
    f"x[i] = {ADD}1, relaxed);": "uninitialised: thread 0 of group 0 reads",
    f"x[i] = {LOAD}relaxed);": "uninitialised: thread 0 of group 0 reads",
    f"{STORE}7, relaxed); x[i] = {PLAIN};": "race: thread 1 of group 0 writes threadgroup memory that thread 0 .* read",
    f"{STORE}7, relaxed); if (i == 63) x[i] = {PLAIN};": "race: thread 63 of group 0 reads .* several threads wrote",
    f"if (i == 0) {PLAIN} = 0; {ADD}1, relaxed); x[i] = 0;": "race: thread 1 of group 0 writes .* thread 0 .* wrote",
    f"if (i == 0) {PLAIN} = 0; {FENCE} if (i == 40) {PLAIN} = 1; else x[i] = {LOAD}relaxed);": "race: thread 40",
}


@pytest.mark.parametrize("body", ATOMICS)
def test_atomics_race_with_other_accesses_alone(body):
    body, error, x = body.replace("relaxed", "memory_order_relaxed"), ATOMICS[body], torch.zeros(64, dtype=torch.int32)
    library = compile_shader(
        HEADER + "kernel void f(device int* x, uint i [[thread_index_in_threadgroup]]) {\n"
        f"threadgroup atomic_int n[1];\n{body} }}"
    )
    if error is None:
        library.f(x)
        assert x.tolist() == [192 if "fetch_add" in body else 7] * 64
    else:
        with pytest.raises(EmulationError, match=f"{error}.*, at line 5"):
            library.f(x)


def test_atomics_of_arguments():
    source = HEADER + "kernel void f(device int* x, device atomic_int* n) {\n"
    add = "atomic_fetch_add_explicit({}, 1, memory_order_relaxed); x[0] = 0; }}"
    x = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(EmulationError, match=r"out of range: write of 4 bytes at byte 8 of argument 1 .*, at line 4"):
        compile_shader(source + add.format("n + 2")).f(x, x.clone(), threads=1)
    with pytest.raises(EmulationError, match=r"misaligned: an address ends in 2.*, at line 4"):
        compile_shader(source + add.format("(device atomic_int*)((device uchar*)n + 2)")).f(x, x.clone(), threads=1)
    with pytest.raises(EmulationError, match="read-only: thread 0 of group 0 writes argument 1, at line 4"):
        read_only = source.replace("device atomic_int", "device const atomic_int")
        compile_shader(read_only + add.format("(device atomic_int*)n")).f(x, x.clone(), threads=1)


def test_threadgroup_arrays_are_aligned_like_their_types():
    """Not by chance better: as another type they may not be."""
    source = HEADER + "kernel void f(device float* x) {\nthreadgroup TYPE y[8]; threadgroup uchar z[3]; z[2] = 0;\n"
    source += "*(threadgroup float4*)y = float4(1.0f); x[0] = float(y[0].x) + z[2]; }"
    x = torch.zeros(1)
    compile_shader(source.replace("TYPE", "float4")).f(x)
    assert x.item() == 1
    with pytest.raises(EmulationError, match=r"misaligned: an address ends in 8.*, at line 5"):
        compile_shader(source.replace("TYPE", "half4")).f(x)


SHIFTS = {  # what a kernel does, and by how much it shifts too far
    "x[1] = 1 << x[0];": 40,
    "x[1] = int(uint(x[1]) >> uint(x[0]));": 40,
    "uint2 y = uint2(1u) << uint2(uint(x[0])); x[1] = int(y[0]);": 40,
    "x[1] <<= -x[2];": -3,
    "ulong y = 1; x[1] = int(y << (x[0] + 24));": 64,
    "ulong y = 1; x[1] = int((y << x[0]) >> 40);": None,
    "x[1] = x[0] > 31 ? 1 : 1 << x[0];": None,
}


@pytest.mark.parametrize("body", SHIFTS)
def test_shifts_by_the_width_of_a_number_or_more(body):
    """Undefined in C++14, which Metal follows."""
    library, x = compile_shader(HEADER + f"kernel void f(device int* x) {{\n{body} }}"), torch.tensor([40, 1, 3]).int()
    if SHIFTS[body] is None:
        library.f(x, threads=1)
        assert x.tolist() == [40, 1, 3]
    else:
        with pytest.raises(EmulationError, match=f"a shift by {SHIFTS[body]}, thread 0 of group 0, at line 4"):
            library.f(x, threads=1)


@pytest.mark.skipif("pattern" not in " ".join(emulate.flags()), reason="needs g++ 12")
@pytest.mark.parametrize(
    "body", ["float y[8]; y[3] = 1;", "float4 y[4]; y[1] = 1;", "half y[4]; y[1] = 1;"], ids=["float", "float4", "half"]
)
def test_what_a_thread_never_wrote_is_wild(body):
    """No zeros by chance; which line read it is not told."""
    read = "y[int(x[1])][0]" if "float4" in body else "y[int(x[1])]"
    library, x = (
        compile_shader(HEADER + f"kernel void f(device float* x) {{ {body} x[0] = {read}; }}"),
        torch.tensor([0, 2.0]),
    )
    library.f(x, threads=1)
    assert not abs(x[0]) < 1e30


def test_arguments_that_are_read_only():
    """Whatever a cast says: clang's front end refuses that of `constant`, C++ takes both."""
    for space in ("constant", "device const"):
        library = compile_shader(HEADER + f"kernel void f({space} float* x) {{ ((device float*)x)[0] = 1; }}")
        with pytest.raises(EmulationError, match="read-only: thread 0 of group 0 writes argument 0, at line 3"):
            library.f(torch.zeros(1))


def test_limits_of_a_launch():
    source = HEADER + "kernel void big(device float* x) { threadgroup float y[8193]; y[0] = 1; x[0] = y[0]; }"
    x = torch.zeros(1)
    with pytest.raises(EmulationError, match="at most 32768"):
        compile_shader(source).big(x, threads=1)
    with pytest.raises(EmulationError, match="at most 1024"):
        compile_shader(source.replace("8193", "8")).big(x, threads=2048, group_size=2048)


def test_arguments_follow_torch():
    source = HEADER + (
        "kernel void add(device float* x, constant long& a, constant float& b, constant int* c,"
        " uint i [[thread_position_in_grid]]) { x[i] = float(a) + b + float(c[1]); }"
    )
    add, x = compile_shader(source).add, torch.zeros(3)
    add(x, 5, 0.5, [1, 20], arg_casts={3: "int32"})  # as many threads as the first tensor has elements
    assert x.tolist() == [25.5] * 3
    with pytest.raises(EmulationError, match="c is int, got 2 of int64"):
        add(x, 5, 0.5, [1, 20])
    with pytest.raises(EmulationError, match="b is float, got 1 of int64"):
        add(x, 5, 1, [1, 20], arg_casts={3: "int32"})
    with pytest.raises(EmulationError, match="a cast is one of"):
        add(x, 5, 0.5, [1, 20], arg_casts={3: "int64"})
    with pytest.raises(EmulationError, match="takes 4 arguments"):
        add(x, 5)
    with pytest.raises(EmulationError, match="arg_casts is a name or a dict"):
        add(x, 5, 0.5, [1, 20], arg_casts=["int32"])
    with pytest.raises(EmulationError, match="begins with an int has ints only"):
        add(x, 5, 0.5, [1, 20.5], arg_casts={3: "int32"})
    with pytest.raises(EmulationError, match="a tensor, a number or a list of numbers"):
        add(x, 5, 0.5, [])
    with pytest.raises(EmulationError, match="takes CPU tensors"):
        add(x.to("meta"), 5, 0.5, [1, 20], arg_casts={3: "int32"})
    with pytest.raises(EmulationError, match="as many positive numbers"):
        add(x, 5, 0.5, [1, 20], arg_casts={3: "int32"}, threads=(3, 1), group_size=3)
    with pytest.raises(EmulationError, match="as many positive numbers"):
        add(x, 5, 0.5, [1, 20], arg_casts={3: "int32"}, threads=0)
    with pytest.raises(EmulationError, match="not emulated"):
        add(x, 5, 0.5, [1, 20], arg_casts={3: "int32"}, error_buf_idx=4)
    with pytest.raises(RuntimeError, match="no kernel subtract"):
        compile_shader(source).subtract(x)
    with pytest.raises(EmulationError, match="at most 4096 bytes"):
        add(x, 5, 0.5, [1] * 1025, arg_casts={3: "int32"})


def test_a_kernel_is_asked_as_in_torch():
    """The names that torch's library and kernels have, and its default group sizes."""
    library = compile_shader(
        HEADER
        + """kernel void plane(device uint* x, uint2 at [[thread_position_in_grid]],
          uint2 n [[threads_per_threadgroup]]) { x[at.y * 1500 + at.x] = n.x; }
        kernel void line(device uint* x, uint i [[thread_position_in_grid]],
          uint n [[threads_per_threadgroup]]) { x[i] = n; }
        [[max_total_threads_per_threadgroup(2 * 32)]]
        kernel void shared(device uint* x) { threadgroup uint y[8]; y[0] = 1; x[0] = y[0]; }"""
    )
    assert dir(library) == ["line", "plane", "shared"]
    kernel, x, y = library.shared, torch.zeros(2, 1500, dtype=torch.int32), torch.zeros(700, dtype=torch.int32)
    assert (library.line.max_threads_per_threadgroup, kernel.max_threads_per_threadgroup) == (1024, 64)
    assert kernel.thread_execution_width == 32
    assert kernel.static_thread_group_memory_length == 32
    found = inspect.signature(kernel).parameters.values()
    assert [p.name for p in found if p.kind is p.KEYWORD_ONLY] == [
        "threads", "group_size", "arg_casts", "error_buf_idx",
    ]  # fmt: skip
    library.line(y)
    assert set(y.tolist()) == {700}
    library.plane(x, threads=(1500, 2))
    assert x.tolist() == [[1024] * 1024 + [476] * 476] * 2
    with pytest.raises(EmulationError, match="a threadgroup of 65 threads: at most 64"):
        kernel(x, threads=65, group_size=65)


def test_simd_operations_and_a_ragged_last_group():
    library = compile_shader(
        HEADER
        + """kernel void many(device const half4* x, device float* y, device uint* z, constant int& add,
          uint i [[thread_position_in_grid]], uint n [[threads_per_threadgroup]],
          ushort lane [[thread_index_in_simdgroup]]) {
            float v = float(dot(x[i], half4(1.0h)));
            y[i] = simd_max(v) + simd_broadcast(v, 3) * 0.1;
            uint4 bits = uint4(as_type<uint>(v), simd_shuffle_xor(i, 1), simd_shuffle(i, lane / 2), n);
            z[i] = bits.x ^ (bits.y + bits.z * 256) ^ uint(add) ^ bits[3];
          }"""
    )
    x = np.random.default_rng(1).integers(-8, 8, (102, 4)).astype(np.float16)
    y, z = torch.zeros(102), torch.zeros(102, dtype=torch.int32)
    library.many(torch.from_numpy(x), y, z, -5, threads=102, group_size=64, arg_casts={3: "int32"})
    v, i = x.sum(1).astype(np.float32), np.arange(102, dtype=np.uint32)
    first = i // 64 * 64 + i % 64 // 32 * 32
    top = np.array([v[f : min(f + 32, 102 if f >= 64 else 64)].max() for f in first])
    size = np.where(i < 64, 64, 38).astype(np.uint32)
    bits = (
        v.view(np.uint32) ^ ((i ^ 1) + (first + (i - first) // 2) * 256).astype(np.uint32) ^ np.uint32(2**32 - 5) ^ size
    )
    assert np.array_equal(y.numpy(), top + v[first + 3] * np.float32(0.1))
    assert np.array_equal(z.numpy().view(np.uint32), bits)


def test_matrices_and_atomics():
    library = compile_shader(
        HEADER
        + """kernel void product(device const float* a, device const float* b, device float* c, device atomic_int* n,
          uint lane [[thread_index_in_simdgroup]]) {
            simdgroup_float8x8 x, y, z = simdgroup_float8x8(2.0f);
            simdgroup_load(x, a, 24);
            simdgroup_load(y, b, 8, ulong2(0, 0), true);
            simdgroup_multiply_accumulate(z, x, y, z);
            simdgroup_store(z, c, 8);
            atomic_fetch_add_explicit(n, int(lane), memory_order_relaxed);
          }"""
    )
    a, b, c, n = torch.randn(8, 24), torch.randn(8, 8), torch.zeros(8, 8), torch.zeros(1, dtype=torch.int32)
    library.product(a, b, c, n, threads=32)
    torch.testing.assert_close(c, a[:, :8] @ b.T + 2 * torch.eye(8))
    assert int(n) == 31 * 16
