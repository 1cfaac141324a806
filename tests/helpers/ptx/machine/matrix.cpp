// Products of matrices by a warp: mma.sync of 16 × 8 results.
//
// Lane 4g + c. A register of either operand holds 32 bits of neighbours along k: A's registers are rows g, g + 8 of the
// first half of k, then of the second; B's are column g of both halves. Sums are made in float64 and rounded once:
// tensor cores cut them off in ways that are not documented.
#include "machine.hpp"

namespace ptx {
namespace {

struct Halves {
    static constexpr int each = 2;  // in a register
    static float get(u32 x, int j) { return half_to_float(static_cast<u16>(x >> 16 * j)); }
};
struct Brains {
    static constexpr int each = 2;
    static float get(u32 x, int j) { return brain_to_float(static_cast<u16>(x >> 16 * j)); }
};
struct Tf32 {
    static constexpr int each = 1;
    static float get(u32 x, int) { return as_float(x & ~0x1FFFu); }
};
struct Signed {
    static constexpr int each = 4;
    static i32 get(u32 x, int j) { return static_cast<i8>(x >> 8 * j); }
};
struct Unsigned {
    static constexpr int each = 4;
    static i32 get(u32 x, int j) { return static_cast<u8>(x >> 8 * j); }
};

// slots: d, a, b, c
template <class A, class B, int HALVES, class Number, class Sum, class Result, bool SATURATES>
void multiply(Warp& w, const Instruction& i, u32 m) {
    if (m != ALL) throw Error("not all lanes of the warp take part in a product");
    constexpr int K = 4 * A::each * HALVES;
    Number a[16][K], b[K][8];
    for (int r = 0; r < 2 * HALVES; r++) {
        auto x = w.words(i.slots[4 + r]);
        for (int l = 0; l < LANES; l++)
            for (int j = 0; j < A::each; j++)
                a[l / 4 + 8 * (r & 1)][(r >> 1) * 4 * A::each + l % 4 * A::each + j] = A::get(x[l], j);
    }
    for (int r = 0; r < HALVES; r++) {
        auto x = w.words(i.slots[4 + 2 * HALVES + r]);
        for (int l = 0; l < LANES; l++)
            for (int j = 0; j < B::each; j++) b[r * 4 * B::each + l % 4 * B::each + j][l / 4] = B::get(x[l], j);
    }
    Sum sum[16][8] = {};
    for (int row = 0; row < 16; row++)
        for (int k = 0; k < K; k++)
            for (int n = 0; n < 8; n++) sum[row][n] += static_cast<Sum>(a[row][k] * b[k][n]);
    u32 d[4][LANES];
    for (int r = 0; r < 4; r++) {
        auto c = w.words(i.slots[4 + 3 * HALVES + r]);
        for (int l = 0; l < LANES; l++) {
            Result start;
            std::memcpy(&start, &c[l], 4);
            Sum x = sum[l / 4 + 8 * (r >> 1)][2 * (l % 4) + (r & 1)] + static_cast<Sum>(start);
            if (SATURATES) x = x < -2147483648.0 ? static_cast<Sum>(-2147483648ll) : x > 2147483647.0 ? static_cast<Sum>(2147483647ll) : x;
            Result y = static_cast<Result>(x);
            std::memcpy(&d[r][l], &y, 4);
        }
    }
    for (int r = 0; r < 4; r++) w.put(i.slots[r], d[r], m);
}

template <class T, int HALVES> void floats(const char* name) {
    registry()[name] = {multiply<T, T, HALVES, float, double, float, false>, "w*", MEET};
}
template <class A, class B, int HALVES> void integers(const std::string& shape, const std::string& types) {
    registry()["mma." + shape + "." + types] = {multiply<A, B, HALVES, i32, i64, i32, false>, "w*", MEET};
    registry()["mma." + shape + ".satfinite." + types] = {multiply<A, B, HALVES, i32, i64, i32, true>, "w*", MEET};
}

struct All {
    All() {
        floats<Halves, 2>("mma.m16n8k16.f32.f16.f16.f32"), floats<Halves, 1>("mma.m16n8k8.f32.f16.f16.f32");
        floats<Brains, 2>("mma.m16n8k16.f32.bf16.bf16.f32"), floats<Brains, 1>("mma.m16n8k8.f32.bf16.bf16.f32");
        floats<Tf32, 2>("mma.m16n8k8.f32.tf32.tf32.f32"), floats<Tf32, 1>("mma.m16n8k4.f32.tf32.tf32.f32");
        integers<Signed, Signed, 2>("m16n8k32", "s32.s8.s8.s32"), integers<Signed, Signed, 1>("m16n8k16", "s32.s8.s8.s32");
        integers<Unsigned, Unsigned, 2>("m16n8k32", "s32.u8.u8.s32");
        integers<Signed, Unsigned, 2>("m16n8k32", "s32.s8.u8.s32"), integers<Unsigned, Signed, 2>("m16n8k32", "s32.u8.s8.s32");
    }
} all;

}  // namespace
}  // namespace ptx
