"""What the emulator of Metal refuses to compile, because Metal lacks it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.backends.metal import emulator
from tests.backends.metal.emulator import EmulationError, compile_shader

pytestmark = pytest.mark.skipif(emulator.why_not() is not None, reason=str(emulator.why_not()))

SOURCE = (Path(__file__).parent / "sketch.metal").read_text()
HEADER = "#include <metal_stdlib>\nusing namespace metal;\n"
REFUSED = {
    "declare one threadgroup array": (SOURCE.replace("sums[4][4][32];", "sums[4][4][32], more[4];")),
    "Metal has no double": HEADER + "kernel void f(device float* x) { double y = 1; x[0] = float(y); }",
    "Metal has no goto": HEADER + "kernel void f(device float* x) { goto end; end: x[0] = 1; }",
    "Metal has no new": HEADER + "kernel void f(device float* x) { x[0] = *new float; }",
    "Metal has no throw": HEADER + "kernel void f(device float* x) { if (x[0] > 1) throw 1; }",
    "Metal has no malloc": HEADER + "kernel void f(device float* x) { x[0] = *(device float*)malloc(4); }",
    "no address space, at line 3": HEADER + "static float g(const float* x) { return *x; }",
    "recursion: g calls h calls g": HEADER
    + "static int h(int x);\nstatic int g(int x) { return h(x); }\nstatic int h(int x) { return g(x); }",
    "recursion: f calls f": HEADER + "struct S { int f(int x) const { return x > 0 ? f(x - 1) : 0; } };",
    "recursion: m calls m": HEADER + "static int m(int x) { return x < m(x - 1) && x > (2) ? 1 : 0; }",
    "recursion: g calls g": HEADER + "template <class T> static T g(T x) { return x > 0 ? g<T>(x - 1) : T(0); }",
    "recursion: h calls g calls h": HEADER
    + "template <int N, class T> static T g(T x);\ntemplate <class T> static T h(T x) { return g<2, vec<T, 2>>(x); }\n"
    "template <int N, class T> static T g(T x) { return h<T>(x); }",
    r"recursion: V operator-\(V, int\) \(source.metal, line 4\) calls V operator-\(V, int\)": HEADER
    + "struct V { int x; };\nstatic V operator-(V a, int b) { return a.x > b ? V{a.x - 1} - b : a; }\n"
    "kernel void f(device int* x) { V v{x[0]}; x[0] = (v - 1).x; }",
    r"recursion: A::A\(int\) \(source.metal, line 3\) calls A::A\(int\)": HEADER
    + "struct A { int n; A(int i) : n(i > 0 ? A(i - 1).n + 1 : 0) {} };\n"
    "kernel void f(device int* x) { x[0] = A(x[0]).n; }",
    "recursion: AGAIN calls f calls AGAIN": HEADER + "#define AGAIN f(x - 1)\nstatic int f(int x) { return AGAIN; }",
    "Metal has no long long, at line 3": HEADER + "static void f() { long long x = 1; }",
    "Metal has no long double, at line 3": HEADER + "static float f() { return float(1.5e-3L); }",
    "Metal has no __builtin_alloca": HEADER + "static void f() { thread int* x = (thread int*)__builtin_alloca(4); }",
    "variable length": HEADER + "kernel void f(device int* x, constant long& n) { int y[n]; y[0] = 1; x[0] = y[0]; }",
    "Metal has no pointers to functions": HEADER + "static int f(int x) { int (*g)(int) = f; return g(x); }",
    "Metal has no lambdas": HEADER + "static int f(int x) { auto g = [&](int y) { return x + y; }; return g(1); }",
    "Metal has no derived classes": HEADER + "struct A { int a; };\nstruct B : A { int b; };",
    "Metal has no static variables": HEADER + "static int f() { static int n = 0; return n; }",
    "only available with .-std=c..17": HEADER + "kernel void f(device float* x) { if constexpr (true) x[0] = 1; }",
    "outside functions must be constant, at line 3": HEADER + "const float x[2] = {1, 2};",
    "belongs into a kernel": HEADER + "static void f() { threadgroup float x[2]; }",
    "must be device or constant": HEADER + "kernel void f(thread float* x) { x[0] = 1; }",
    "at most 31": HEADER + f"kernel void f({', '.join(f'device float* x{i}' for i in range(32))}) {{ }}",
    "refused the source": HEADER + "kernel void f(device float* x) { x[0] = y; }",
    "torch takes source for ASCII, got '≤' at line 3": HEADER + "// 0 ≤ x",
}


@pytest.mark.parametrize("error", REFUSED)
def test_what_metal_refuses_is_refused(error):
    with pytest.raises(EmulationError, match=error):
        compile_shader(REFUSED[error])


@pytest.mark.parametrize(
    "word",
    ["double x;", "goto x;", "try {}", "catch (...) {}", "throw 1;", "new int;", "delete x;", "virtual void f();",
     "dynamic_cast<int>(x);", "typeid(x);", "std::max(1, 2);", "asm(\"\");", "thread_local int x;", "malloc(4);",
     "wchar_t x;", "calloc(1, 4);", "noexcept(1);", "register int x;", "__asm__(\"\");", "__float128 x;",
     "_Float64 x;", "_Float32x x;", "_Decimal64 x;", "_Complex float x;", "__bf16 x;"],
)  # fmt: skip
def test_words_that_metal_lacks(word):
    name = re.match(r"\w+", word)[0]
    with pytest.raises(EmulationError, match=f"Metal has no {name}, at line 3"):
        compile_shader(HEADER + f"kernel void f(device float* y) {{ {word} }}")
    compile_shader(HEADER + f"kernel void f(device float* y) {{ y[0] = 1; }}  // {word}")


SIGNATURES = {
    "positions and sizes must share one type": "device uint* x, uint i [[thread_position_in_grid]], "
    "uint2 n [[threads_per_threadgroup]]",
    "buffers must be numbered 0, 1, …": "device uint* x [[buffer(0)]], device uint* y [[buffer(2)]]",
    "the attribute texture is not emulated": "device uint* x, device uint* y [[texture(0)]]",
}


@pytest.mark.parametrize("error", SIGNATURES)
def test_signatures_that_metal_refuses(error):
    with pytest.raises(EmulationError, match=error):
        compile_shader(HEADER + f"kernel void f({SIGNATURES[error]}) {{ x[0] = 1; }}")
