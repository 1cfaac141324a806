// Conversions. A name here is `cvt.` with rounding (rn rz rm rp for floats, rni rzi rmi rpi to integers, rna of tf32),
// then ftz and sat where they were written, then the types.
#include <cfenv>
#include <cmath>
#include <limits>

#include "machine.hpp"

namespace ptx {
namespace {

template <class T> constexpr bool is64 = sizeof(T) == 8;
template <class T> T integer(Warp& w, i32 slot, int lane) {
    if constexpr (is64<T>)
        return static_cast<T>(w.doubles(slot)[lane]);
    else
        return static_cast<T>(w.words(slot)[lane]);
}
template <class T, class N> void store(Warp& w, i32 slot, const N* x, u32 m) {
    if constexpr (is64<T>) {
        u64 r[LANES];
        for (int l = 0; l < LANES; l++) r[l] = static_cast<u64>(x[l]);
        w.put(slot, r, m);
    } else {
        u32 r[LANES];
        for (int l = 0; l < LANES; l++)
            r[l] = sizeof(T) == 2 ? static_cast<u16>(x[l]) : static_cast<u32>(x[l]);
        w.put(slot, r, m);
    }
}

// Integers: sign or zero extension, or the lower bits. What is narrower than 16 bits fills a 16-bit register.
template <class From, class To, bool SAT> void whole(Warp& w, const Instruction& i, u32 m) {
    using Kept = std::conditional_t<sizeof(To) == 1, std::conditional_t<std::is_signed_v<To>, i32, u32>, To>;
    Kept r[LANES];
    for (int l = 0; l < LANES; l++) {
        From x = integer<From>(w, i.slots[1], l);
        if (SAT) {
            __int128 wide = x, low = std::numeric_limits<To>::min(), high = std::numeric_limits<To>::max();
            r[l] = static_cast<To>(wide < low ? low : wide > high ? high : wide);
        } else {
            r[l] = static_cast<To>(x);
        }
    }
    store<Kept>(w, i.slots[0], r, m);
}

struct Half {
    static float get(u32 x) { return half_to_float(static_cast<u16>(x)); }
};
struct Brain {
    static float get(u32 x) { return brain_to_float(static_cast<u16>(x)); }
};
struct Single {
    static float get(u32 x) { return as_float(x); }
};

int mode_of(char c) { return c == 'z' ? FE_TOWARDZERO : c == 'm' ? FE_DOWNWARD : c == 'p' ? FE_UPWARD : FE_TONEAREST; }
float rounded(float x, char c) {
    switch (c) {
        case 'z': return std::trunc(x);
        case 'm': return std::floor(x);
        case 'p': return std::ceil(x);
        default: return std::nearbyint(x);
    }
}
float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

// To integers: beyond the range the nearest end, NaN gives 0 (or the upper bit, of 64 bits)
template <class S, class To, char MODE, bool FTZ> void to_integer(Warp& w, const Instruction& i, u32 m) {
    auto a = w.words(i.slots[1]);
    To r[LANES];
    constexpr To low = std::numeric_limits<To>::min(), high = std::numeric_limits<To>::max();
    for (int l = 0; l < LANES; l++) {
        float x = FTZ ? flushed(S::get(a[l])) : S::get(a[l]);
        double y = rounded(x, MODE);
        if (x != x)
            r[l] = is64<To> ? static_cast<To>(1ull << 63) : 0;
        else
            r[l] = y <= static_cast<double>(low) ? low : y >= static_cast<double>(high) ? high : static_cast<To>(y);
    }
    store<To>(w, i.slots[0], r, m);
}
template <class From, char MODE> void from_integer(Warp& w, const Instruction& i, u32 m) {
    u32 r[LANES];
    std::fesetround(mode_of(MODE));
    for (int l = 0; l < LANES; l++) {
        volatile From x = integer<From>(w, i.slots[1], l);
        volatile float y = static_cast<float>(x);
        r[l] = as_bits(static_cast<float>(y));
    }
    std::fesetround(FE_TONEAREST);
    w.put(i.slots[0], r, m);
}
template <class From> void half_from_integer(Warp& w, const Instruction& i, u32 m) {
    u32 r[LANES];
    for (int l = 0; l < LANES; l++) r[l] = double_to_half(static_cast<double>(integer<From>(w, i.slots[1], l)));
    w.put(i.slots[0], r, m);
}

u16 half_toward_zero(float x) {
    u16 h = float_to_half(x);
    if (x == x && std::fabs(half_to_float(h)) > std::fabs(x)) h--;  // from infinity, too
    return h;
}
u16 brain_toward_zero(float x) { return x == x ? static_cast<u16>(as_bits(x) >> 16) : 0x7FFF; }

template <class S, u16 (*F)(float), bool RELU> void narrow(Warp& w, const Instruction& i, u32 m) {
    auto a = w.words(i.slots[1]);
    u32 r[LANES];
    for (int l = 0; l < LANES; l++) {
        float x = S::get(a[l]);
        r[l] = F(RELU && x < 0 ? 0 : x);
    }
    w.put(i.slots[0], r, m);
}
// The first source goes to the upper half
template <u16 (*F)(float), bool RELU> void pair(Warp& w, const Instruction& i, u32 m) {
    auto a = w.words(i.slots[1]), b = w.words(i.slots[2]);
    u32 r[LANES];
    for (int l = 0; l < LANES; l++) {
        float x = as_float(a[l]), y = as_float(b[l]);
        r[l] = static_cast<u32>(F(RELU && x < 0 ? 0 : x)) << 16 | F(RELU && y < 0 ? 0 : y);
    }
    w.put(i.slots[0], r, m);
}
template <class S, bool FTZ> void widen(Warp& w, const Instruction& i, u32 m) {
    auto a = w.words(i.slots[1]);
    u32 r[LANES];
    for (int l = 0; l < LANES; l++) {
        float x = S::get(a[l]);
        r[l] = x == x ? as_bits(FTZ ? flushed(x) : x) : 0x7FFFFFFF;
    }
    w.put(i.slots[0], r, m);
}
template <char MODE, bool FTZ, bool SAT> void integral(Warp& w, const Instruction& i, u32 m) {
    auto a = w.words(i.slots[1]);
    u32 r[LANES];
    for (int l = 0; l < LANES; l++) {
        float x = as_float(a[l]);
        x = FTZ ? flushed(x) : x;
        x = MODE == 0 ? x : rounded(x, MODE);
        if (SAT) x = x != x ? 0 : x < 0 ? 0 : x > 1 ? 1 : x;
        r[l] = x == x ? as_bits(x) : 0x7FFFFFFF;
    }
    w.put(i.slots[0], r, m);
}
// 10 bits of fraction, ties away from zero
void tf32(Warp& w, const Instruction& i, u32 m) {
    auto a = w.words(i.slots[1]);
    u32 r[LANES];
    for (int l = 0; l < LANES; l++) r[l] = as_float(a[l]) == as_float(a[l]) ? (a[l] + 0x1000) & ~0x1FFFu : 0x7FFFFFFF;
    w.put(i.slots[0], r, m);
}
void single_to_double(Warp& w, const Instruction& i, u32 m) {
    u64 r[LANES];
    for (int l = 0; l < LANES; l++) r[l] = as_bits(static_cast<double>(as_float(w.words(i.slots[1])[l])));
    w.put(i.slots[0], r, m);
}
void double_to_single(Warp& w, const Instruction& i, u32 m) {
    u32 r[LANES];
    for (int l = 0; l < LANES; l++) r[l] = as_bits(static_cast<float>(as_double(w.doubles(i.slots[1])[l])));
    w.put(i.slots[0], r, m);
}
// cvt.pack.sat: two integers saturated, then shifted into the third
template <class To, int BITS> void pack_saturated(Warp& w, const Instruction& i, u32 m) {
    u32 r[LANES];
    constexpr i64 low = std::numeric_limits<To>::min(), high = std::numeric_limits<To>::max();
    auto one = [](i32 x) -> u32 { return static_cast<std::make_unsigned_t<To>>(x < low ? low : x > high ? high : x); };
    for (int l = 0; l < LANES; l++) {
        u32 both = one(w.words(i.slots[1])[l]) << BITS | one(w.words(i.slots[2])[l]);
        if constexpr (BITS == 8) both |= w.words(i.slots[3])[l] << 16;
        r[l] = both;
    }
    w.put(i.slots[0], r, m);
}

template <class T> constexpr const char* name_of() {
    constexpr bool s = std::is_signed_v<T>;
    return sizeof(T) == 1 ? s ? "s8" : "u8" : sizeof(T) == 2 ? s ? "s16" : "u16" : sizeof(T) == 4 ? s ? "s32" : "u32" : s ? "s64" : "u64";
}
template <class T> constexpr const char* sort() { return is64<T> ? "q" : "w"; }
void put(const std::string& name, const std::string& operands, Handler h) {
    registry()[name] = {h, strdup(operands.c_str()), PLAIN};
}
template <class From, class To> void between() {
    std::string types = std::string(".") + name_of<To>() + "." + name_of<From>(), operands = std::string(sort<To>()) + sort<From>();
    put("cvt" + types, operands, whole<From, To, false>);
    put("cvt.sat" + types, operands, whole<From, To, true>);
}
template <class From> void from() {
    between<From, i8>(), between<From, u8>(), between<From, i16>(), between<From, u16>();
    between<From, i32>(), between<From, u32>(), between<From, i64>(), between<From, u64>();
    std::string t = name_of<From>(), operands = std::string("w") + sort<From>();
    put("cvt.rn.f32." + t, operands, from_integer<From, 'n'>);
    put("cvt.rz.f32." + t, operands, from_integer<From, 'z'>);
    put("cvt.rm.f32." + t, operands, from_integer<From, 'm'>);
    put("cvt.rp.f32." + t, operands, from_integer<From, 'p'>);
    put("cvt.rn.f16." + t, operands, half_from_integer<From>);
}
template <class S, class To, char MODE> void to_integers(const std::string& mode, const std::string& t) {
    std::string types = std::string(".") + name_of<To>() + "." + t, operands = std::string(sort<To>()) + "w";
    put("cvt." + mode + types, operands, to_integer<S, To, MODE, false>);
    put("cvt." + mode + ".ftz" + types, operands, to_integer<S, To, MODE, true>);
}
template <class S, char MODE> void to_all(const std::string& mode, const std::string& t) {
    to_integers<S, i8, MODE>(mode, t), to_integers<S, u8, MODE>(mode, t);
    to_integers<S, i16, MODE>(mode, t), to_integers<S, u16, MODE>(mode, t);
    to_integers<S, i32, MODE>(mode, t), to_integers<S, u32, MODE>(mode, t);
    to_integers<S, i64, MODE>(mode, t), to_integers<S, u64, MODE>(mode, t);
}
template <char MODE> void integrals(const std::string& mode) {
    put("cvt." + mode + ".f32.f32", "ww", integral<MODE, false, false>);
    put("cvt." + mode + ".ftz.f32.f32", "ww", integral<MODE, true, false>);
    to_all<Single, MODE>(mode, "f32"), to_all<Half, MODE>(mode, "f16");
}

struct All {
    All() {
        from<i8>(), from<u8>(), from<i16>(), from<u16>(), from<i32>(), from<u32>(), from<i64>(), from<u64>();
        integrals<'n'>("rni"), integrals<'z'>("rzi"), integrals<'m'>("rmi"), integrals<'p'>("rpi");
        put("cvt.sat.f32.f32", "ww", integral<0, false, true>);
        put("cvt.ftz.f32.f32", "ww", integral<0, true, false>);
        put("cvt.f32.f16", "ww", widen<Half, false>), put("cvt.ftz.f32.f16", "ww", widen<Half, true>);
        put("cvt.f32.bf16", "ww", widen<Brain, false>), put("cvt.ftz.f32.bf16", "ww", widen<Brain, true>);
        put("cvt.rn.f16.f32", "ww", narrow<Single, float_to_half, false>);
        put("cvt.rz.f16.f32", "ww", narrow<Single, half_toward_zero, false>);
        put("cvt.rn.bf16.f32", "ww", narrow<Single, float_to_brain, false>);
        put("cvt.rz.bf16.f32", "ww", narrow<Single, brain_toward_zero, false>);
        put("cvt.rn.f16x2.f32", "www", pair<float_to_half, false>);
        put("cvt.rz.f16x2.f32", "www", pair<half_toward_zero, false>);
        put("cvt.rn.relu.f16x2.f32", "www", pair<float_to_half, true>);
        put("cvt.rn.bf16x2.f32", "www", pair<float_to_brain, false>);
        put("cvt.rz.bf16x2.f32", "www", pair<brain_toward_zero, false>);
        put("cvt.rn.relu.bf16x2.f32", "www", pair<float_to_brain, true>);
        put("cvt.rna.tf32.f32", "ww", tf32);
        put("cvt.f64.f32", "qw", single_to_double), put("cvt.rn.f32.f64", "wq", double_to_single);
        put("cvt.pack.sat.s16.s32", "www", pack_saturated<i16, 16>);
        put("cvt.pack.sat.u16.s32", "www", pack_saturated<u16, 16>);
        put("cvt.pack.sat.s8.s32.b32", "wwww", pack_saturated<i8, 8>);
        put("cvt.pack.sat.u8.s32.b32", "wwww", pack_saturated<u8, 8>);
    }
} all;

}  // namespace
}  // namespace ptx
