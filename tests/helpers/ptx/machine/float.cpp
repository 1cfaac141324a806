// Floating-point arithmetic and comparisons. Results are rounded once, to nearest even; `approx` functions are computed
// as exactly as the C library does.
#include <cmath>

#include "machine.hpp"

namespace ptx {

u16 float_to_half(float x) {
    _Float16 h = static_cast<_Float16>(x);
    u16 r;
    std::memcpy(&r, &h, 2);
    return x == x ? r : 0x7FFF;
}
u16 double_to_half(double x) {
    if (x != x) return 0x7FFF;
    float f = static_cast<float>(x);
    if (static_cast<double>(f) != x && !std::isinf(f)) {  // to odd, so that the next rounding is the only one
        u32 bits = as_bits(f);
        if (std::fabs(static_cast<double>(f)) > std::fabs(x)) bits--;
        f = as_float(bits | 1);
    }
    return float_to_half(f);
}
u16 float_to_brain(float x) {
    u32 bits = as_bits(x);
    if (x != x) return 0x7FFF;
    return static_cast<u16>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

namespace {

float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
u32 canonical(float x) { return x == x ? as_bits(x) : 0x7FFFFFFF; }

// Types: how a slot is read and written. Two halves of a word are two numbers.
struct F32 {
    using Number = float;
    static constexpr int parts = 1;
    static float get(u32 x, int) { return as_float(x); }
    static u32 set(float x, int) { return canonical(x); }
    static float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
};
struct F32Ftz : F32 {
    static float get(u32 x, int) { return flushed(as_float(x)); }
    static u32 set(float x, int) { return canonical(flushed(x)); }
};
struct F32Sat : F32 {
    static u32 set(float x, int) { return x != x ? 0 : as_bits(x < 0 ? 0.0f : x > 1 ? 1.0f : x); }
};
template <int PARTS> struct F16 {
    using Number = double;
    static constexpr int parts = PARTS;
    static double get(u32 x, int part) { return half_to_float(static_cast<u16>(x >> 16 * part)); }
    static u32 set(double x, int part) { return static_cast<u32>(double_to_half(x)) << 16 * part; }
    static double fma(double a, double b, double c) { return a * b + c; }  // the product is exact
};
template <int PARTS> struct BF16 {
    using Number = double;
    static constexpr int parts = PARTS;
    static double get(u32 x, int part) { return brain_to_float(static_cast<u16>(x >> 16 * part)); }
    static u32 set(double x, int part) {
        float f = static_cast<float>(x);
        if (static_cast<double>(f) != x && x == x && !std::isinf(f)) {
            u32 bits = as_bits(f);
            if (std::fabs(static_cast<double>(f)) > std::fabs(x)) bits--;
            f = as_float(bits | 1);
        }
        return static_cast<u32>(float_to_brain(f)) << 16 * part;
    }
    static double fma(double a, double b, double c) { return a * b + c; }
};

template <class N> N add(N a, N b) { return a + b; }
template <class N> N sub(N a, N b) { return a - b; }
template <class N> N mul(N a, N b) { return a * b; }
template <class N> N divide(N a, N b) { return a / b; }
template <class N> bool below(N a, N b) { return a < b || (a == b && std::signbit(a) && !std::signbit(b)); }
template <class N> N least(N a, N b) { return a != a ? b : b != b ? a : below(a, b) ? a : b; }
template <class N> N most(N a, N b) { return a != a ? b : b != b ? a : below(a, b) ? b : a; }
template <class N> N least_nan(N a, N b) { return a != a || b != b ? N(NAN) : least(a, b); }
template <class N> N most_nan(N a, N b) { return a != a || b != b ? N(NAN) : most(a, b); }
template <class N> N least_signed(N a, N b) {  // of magnitudes, with the product's sign
    N r = least(std::fabs(a), std::fabs(b));
    return std::signbit(a) != std::signbit(b) ? -r : r;
}
template <class N> N most_signed(N a, N b) {
    N r = most(std::fabs(a), std::fabs(b));
    return std::signbit(a) != std::signbit(b) ? -r : r;
}

template <class T, typename T::Number (*F)(typename T::Number, typename T::Number)>
void two(Warp& w, const Instruction& i, u32 m) {
    auto a = w.words(i.slots[1]), b = w.words(i.slots[2]);
    u32 r[LANES];
    for (int l = 0; l < LANES; l++) {
        u32 x = 0;
        for (int p = 0; p < T::parts; p++) x |= T::set(F(T::get(a[l], p), T::get(b[l], p)), p);
        r[l] = x;
    }
    w.put(i.slots[0], r, m);
}
template <class T, bool RELU> void fma(Warp& w, const Instruction& i, u32 m) {
    auto a = w.words(i.slots[1]), b = w.words(i.slots[2]), c = w.words(i.slots[3]);
    u32 r[LANES];
    for (int l = 0; l < LANES; l++) {
        u32 x = 0;
        for (int p = 0; p < T::parts; p++) {
            auto y = T::fma(T::get(a[l], p), T::get(b[l], p), T::get(c[l], p));
            x |= T::set(RELU && y < 0 ? 0 : y, p);
        }
        r[l] = x;
    }
    w.put(i.slots[0], r, m);
}
template <class T, typename T::Number (*F)(typename T::Number)> void one(Warp& w, const Instruction& i, u32 m) {
    auto a = w.words(i.slots[1]);
    u32 r[LANES];
    for (int l = 0; l < LANES; l++) {
        u32 x = 0;
        for (int p = 0; p < T::parts; p++) x |= T::set(F(T::get(a[l], p)), p);
        r[l] = x;
    }
    w.put(i.slots[0], r, m);
}
// Signs change as bits, so that NaN keeps its own
template <u32 AND, u32 XOR> void sign(Warp& w, const Instruction& i, u32 m) {
    auto a = w.words(i.slots[1]);
    u32 r[LANES];
    for (int l = 0; l < LANES; l++) r[l] = (a[l] & AND) ^ XOR;
    w.put(i.slots[0], r, m);
}
void copysign32(Warp& w, const Instruction& i, u32 m) {
    auto a = w.words(i.slots[1]), b = w.words(i.slots[2]);
    u32 r[LANES];
    for (int l = 0; l < LANES; l++) r[l] = (a[l] & 0x80000000) | (b[l] & 0x7FFFFFFF);
    w.put(i.slots[0], r, m);
}

template <class N> N reciprocal(N a) { return N(1) / a; }
template <class N> N root(N a) { return std::sqrt(a); }
template <class N> N inverse_root(N a) { return static_cast<N>(1 / std::sqrt(static_cast<double>(a))); }
template <class N> N power(N a) { return static_cast<N>(std::exp2(static_cast<double>(a))); }
template <class N> N logarithm(N a) { return static_cast<N>(std::log2(static_cast<double>(a))); }
template <class N> N sine(N a) { return static_cast<N>(std::sin(static_cast<double>(a))); }
template <class N> N cosine(N a) { return static_cast<N>(std::cos(static_cast<double>(a))); }
template <class N> N tangent(N a) { return static_cast<N>(std::tanh(static_cast<double>(a))); }

template <class N> bool eq(N a, N b) { return a == b; }
template <class N> bool ne(N a, N b) { return a < b || a > b; }
template <class N> bool lt(N a, N b) { return a < b; }
template <class N> bool le(N a, N b) { return a <= b; }
template <class N> bool gt(N a, N b) { return a > b; }
template <class N> bool ge(N a, N b) { return a >= b; }
template <class N> bool equ(N a, N b) { return !(a < b || a > b); }
template <class N> bool neu(N a, N b) { return !(a == b); }
template <class N> bool ltu(N a, N b) { return !(a >= b); }
template <class N> bool leu(N a, N b) { return !(a > b); }
template <class N> bool gtu(N a, N b) { return !(a <= b); }
template <class N> bool geu(N a, N b) { return !(a < b); }
template <class N> bool num(N a, N b) { return a == a && b == b; }
template <class N> bool nan(N a, N b) { return a != a || b != b; }

// As for integers
template <class T, bool (*F)(typename T::Number, typename T::Number)> void setp(Warp& w, const Instruction& i, u32 m) {
    auto a = w.words(i.slots[2]), b = w.words(i.slots[3]);
    u32 bits = 0;
    for (int l = 0; l < LANES; l++) bits |= static_cast<u32>(F(T::get(a[l], 0), T::get(b[l], 0))) << l;
    u32 other = ~bits;
    if (i.extra[0]) {
        u32 c = w.predicate(i.slots[4]) ^ (i.extra[1] ? ALL : 0);
        bits = i.extra[0] == 1 ? bits & c : i.extra[0] == 2 ? bits | c : bits ^ c;
        other = i.extra[0] == 1 ? other & c : i.extra[0] == 2 ? other | c : other ^ c;
    }
    w.put_predicate(i.slots[0], bits, m);
    w.put_predicate(i.slots[1], other, m);
}

void put(const std::string& name, const char* operands, Handler h) { registry()[name] = {h, operands, PLAIN}; }

template <class T> void basic(const std::string& t) {
    using N = typename T::Number;
    put("add" + t, "www", two<T, add<N>>);
    put("sub" + t, "www", two<T, sub<N>>);
    put("mul" + t, "www", two<T, mul<N>>);
    put("fma" + t, "wwww", fma<T, false>);
    put("min" + t, "www", two<T, least<N>>);
    put("max" + t, "www", two<T, most<N>>);
    put("min.NaN" + t, "www", two<T, least_nan<N>>);
    put("max.NaN" + t, "www", two<T, most_nan<N>>);
    put("min.xorsign.abs" + t, "www", two<T, least_signed<N>>);
    put("max.xorsign.abs" + t, "www", two<T, most_signed<N>>);
    put("ex2.approx" + t, "ww", one<T, power<N>>);
    put("tanh.approx" + t, "ww", one<T, tangent<N>>);
}
template <class T> void single(const std::string& t) {
    using N = typename T::Number;
    basic<T>(t);
    for (auto how : {"full", "approx", "rn"}) put(std::string("div.") + how + t, "www", two<T, divide<N>>);
    for (auto how : {"approx", "rn"}) {
        put(std::string("rcp.") + how + t, "ww", one<T, reciprocal<N>>);
        put(std::string("sqrt.") + how + t, "ww", one<T, root<N>>);
    }
    put("rsqrt.approx" + t, "ww", one<T, inverse_root<N>>);
    put("lg2.approx" + t, "ww", one<T, logarithm<N>>);
    put("sin.approx" + t, "ww", one<T, sine<N>>);
    put("cos.approx" + t, "ww", one<T, cosine<N>>);
}
template <class T> void compare(const std::string& t) {
    using N = typename T::Number;
    const std::pair<const char*, Handler> all[] = {
        {"eq", setp<T, eq<N>>},   {"ne", setp<T, ne<N>>},   {"lt", setp<T, lt<N>>},   {"le", setp<T, le<N>>},
        {"gt", setp<T, gt<N>>},   {"ge", setp<T, ge<N>>},   {"equ", setp<T, equ<N>>}, {"neu", setp<T, neu<N>>},
        {"ltu", setp<T, ltu<N>>}, {"leu", setp<T, leu<N>>}, {"gtu", setp<T, gtu<N>>}, {"geu", setp<T, geu<N>>},
        {"num", setp<T, num<N>>}, {"nan", setp<T, nan<N>>},
    };
    for (auto& [name, handler] : all) put(std::string("setp.") + name + t, "ppww", handler);
}

struct All {
    All() {
        single<F32>(".f32"), single<F32Ftz>(".ftz.f32");
        compare<F32>(".f32"), compare<F32Ftz>(".ftz.f32");
        put("fma.sat.f32", "wwww", fma<F32Sat, false>);
        put("add.sat.f32", "www", two<F32Sat, add<float>>);
        put("mul.sat.f32", "www", two<F32Sat, mul<float>>);
        basic<F16<1>>(".f16"), basic<F16<2>>(".f16x2"), basic<BF16<1>>(".bf16"), basic<BF16<2>>(".bf16x2");
        compare<F16<1>>(".f16"), compare<BF16<1>>(".bf16");
        put("fma.relu.f16", "wwww", fma<F16<1>, true>);
        put("fma.relu.f16x2", "wwww", fma<F16<2>, true>);
        put("abs.f32", "ww", sign<0x7FFFFFFF, 0>), put("neg.f32", "ww", sign<ALL, 0x80000000>);
        for (auto t : {"f16", "bf16"}) {
            put(std::string("abs.") + t, "ww", sign<0x7FFF, 0>), put(std::string("neg.") + t, "ww", sign<0xFFFF, 0x8000>);
        }
        for (auto t : {"f16x2", "bf16x2"}) {
            put(std::string("abs.") + t, "ww", sign<0x7FFF7FFF, 0>);
            put(std::string("neg.") + t, "ww", sign<ALL, 0x80008000>);
        }
        put("copysign.f32", "www", copysign32);
    }
} all;

}  // namespace
}  // namespace ptx
