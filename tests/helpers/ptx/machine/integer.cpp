// Integers, logic, moves, comparisons and choices.
#include "machine.hpp"

namespace ptx {
namespace {

template <class T> struct Wide;
template <> struct Wide<i32> { using type = i64; };
template <> struct Wide<u32> { using type = u64; };
template <> struct Wide<i16> { using type = i32; };
template <> struct Wide<u16> { using type = u32; };
template <> struct Wide<i64> { using type = __int128; };
template <> struct Wide<u64> { using type = unsigned __int128; };

template <class T> constexpr bool is64 = sizeof(T) == 8;
template <class T> using Slot = std::conditional_t<is64<T>, u64, u32>;
template <class T> const Slot<T>* in(Warp& w, i32 slot) {
    if constexpr (is64<T>)
        return w.doubles(slot);
    else
        return w.words(slot);
}
// As it is kept in a slot: 16-bit registers have no upper half
template <class T> Slot<T> kept(T x) { return static_cast<Slot<T>>(static_cast<std::make_unsigned_t<T>>(x)); }

template <class T, T (*F)(T)> void one(Warp& w, const Instruction& i, u32 m) {
    auto a = in<T>(w, i.slots[1]);
    Slot<T> r[LANES];
    for (int l = 0; l < LANES; l++) r[l] = kept<T>(F(static_cast<T>(a[l])));
    w.put(i.slots[0], r, m);
}
template <class T, T (*F)(T, T)> void two(Warp& w, const Instruction& i, u32 m) {
    auto a = in<T>(w, i.slots[1]), b = in<T>(w, i.slots[2]);
    Slot<T> r[LANES];
    for (int l = 0; l < LANES; l++) r[l] = kept<T>(F(static_cast<T>(a[l]), static_cast<T>(b[l])));
    w.put(i.slots[0], r, m);
}
template <class T, T (*F)(T, T, T)> void three(Warp& w, const Instruction& i, u32 m) {
    auto a = in<T>(w, i.slots[1]), b = in<T>(w, i.slots[2]), c = in<T>(w, i.slots[3]);
    Slot<T> r[LANES];
    for (int l = 0; l < LANES; l++)
        r[l] = kept<T>(F(static_cast<T>(a[l]), static_cast<T>(b[l]), static_cast<T>(c[l])));
    w.put(i.slots[0], r, m);
}
// Of both halves of a word
template <class T, T (*F)(T, T)> u32 halves(u32 a, u32 b) {
    u32 low = kept<T>(F(static_cast<T>(a), static_cast<T>(b)));
    return low | static_cast<u32>(kept<T>(F(static_cast<T>(a >> 16), static_cast<T>(b >> 16)))) << 16;
}
// The second operand has 32 bits whatever the type
template <class T, T (*F)(T, u32)> void shift(Warp& w, const Instruction& i, u32 m) {
    auto a = in<T>(w, i.slots[1]);
    auto b = w.words(i.slots[2]);
    Slot<T> r[LANES];
    for (int l = 0; l < LANES; l++) r[l] = kept<T>(F(static_cast<T>(a[l]), b[l]));
    w.put(i.slots[0], r, m);
}

template <class T> using U = std::make_unsigned_t<T>;
template <class T> T add(T a, T b) { return static_cast<T>(static_cast<U<T>>(a) + static_cast<U<T>>(b)); }
template <class T> T sub(T a, T b) { return static_cast<T>(static_cast<U<T>>(a) - static_cast<U<T>>(b)); }
template <class T> T mul_lo(T a, T b) { return static_cast<T>(static_cast<typename Wide<T>::type>(a) * b); }
template <class T> T mul_hi(T a, T b) {
    return static_cast<T>(static_cast<typename Wide<T>::type>(a) * static_cast<typename Wide<T>::type>(b) >> 8 * sizeof(T));
}
template <class T> T mad_lo(T a, T b, T c) { return add<T>(mul_lo<T>(a, b), c); }
template <class T> T mad_hi(T a, T b, T c) { return add<T>(mul_hi<T>(a, b), c); }
template <class T> T div(T a, T b) {
    if (b == 0) return static_cast<T>(-1);  // unspecified
    if (std::is_signed_v<T> && b == static_cast<T>(-1)) return sub<T>(0, a);
    return static_cast<T>(a / b);
}
template <class T> T rem(T a, T b) {
    if (b == 0) return a;
    if (std::is_signed_v<T> && b == static_cast<T>(-1)) return 0;
    return static_cast<T>(a % b);
}
template <class T> T min(T a, T b) { return a < b ? a : b; }
template <class T> T max(T a, T b) { return a > b ? a : b; }
template <class T> T min_relu(T a, T b) { return max<T>(min<T>(a, b), 0); }
template <class T> T max_relu(T a, T b) { return max<T>(max<T>(a, b), 0); }
template <class T> T abs(T a) { return a < 0 ? sub<T>(0, a) : a; }
template <class T> T neg(T a) { return sub<T>(0, a); }
template <class T> T and_(T a, T b) { return a & b; }
template <class T> T or_(T a, T b) { return a | b; }
template <class T> T xor_(T a, T b) { return a ^ b; }
template <class T> T not_(T a) { return static_cast<T>(~a); }
template <class T> T cnot(T a) { return a == 0; }
template <class T> T move(T a) { return a; }
template <class T> T shl(T a, u32 n) { return n >= 8 * sizeof(T) ? 0 : static_cast<T>(static_cast<U<T>>(a) << n); }
template <class T> T shr(T a, u32 n) {
    u32 most = 8 * sizeof(T) - 1;
    if (n > most) return std::is_signed_v<T> ? static_cast<T>(a >> most) : 0;
    return static_cast<T>(a >> n);
}
template <class T> u32 popc(T a) { return __builtin_popcountll(static_cast<U<T>>(a)); }
template <class T> u32 clz(T a) { return a == 0 ? 8 * sizeof(T) : __builtin_clzll(static_cast<u64>(a)) - (64 - 8 * sizeof(T)); }
u32 brev32(u32 a) {
    u32 r = 0;
    for (int b = 0; b < 32; b++) r |= (a >> b & 1) << (31 - b);
    return r;
}
template <class T, u32 (*F)(T)> void counted(Warp& w, const Instruction& i, u32 m) {
    auto a = in<T>(w, i.slots[1]);
    u32 r[LANES];
    for (int l = 0; l < LANES; l++) r[l] = F(static_cast<T>(a[l]));
    w.put(i.slots[0], r, m);
}
i32 sad(i32 a, i32 b, i32 c) { return add<i32>(static_cast<i32>(a > b ? static_cast<u32>(a) - b : static_cast<u32>(b) - a), c); }

u32 prmt(u32 a, u32 b, u32 picks) {
    u64 octets = static_cast<u64>(b) << 32 | a;
    u32 r = 0;
    for (int n = 0; n < 4; n++) {
        u32 pick = picks >> 4 * n & 15, octet = octets >> 8 * (pick & 7) & 255;
        if (pick & 8) octet = octet >> 7 ? 255 : 0;
        r |= octet << 8 * n;
    }
    return r;
}

template <class T> void bfe(Warp& w, const Instruction& i, u32 m) {
    auto a = in<T>(w, i.slots[1]);
    auto b = w.words(i.slots[2]), c = w.words(i.slots[3]);
    Slot<T> r[LANES];
    constexpr u32 bits = 8 * sizeof(T);
    for (int l = 0; l < LANES; l++) {
        u32 at = b[l] & 255, n = c[l] & 255;
        u64 x = static_cast<U<T>>(a[l]), y = at >= 64 ? 0 : x >> at;
        y = n >= 64 ? y : y & ((1ull << n) - 1);
        if (std::is_signed_v<T> && n) {
            u32 sign = min<u32>(at + n - 1, bits - 1);
            bool set = x >> sign & 1;
            u32 have = at >= bits ? 0 : min<u32>(n, bits - at);
            if (set && have < 64) y |= ~0ull << have;
        }
        r[l] = kept<T>(static_cast<T>(y));
    }
    w.put(i.slots[0], r, m);
}
template <class T> void bfi(Warp& w, const Instruction& i, u32 m) {
    auto a = in<T>(w, i.slots[1]), b = in<T>(w, i.slots[2]);
    auto c = w.words(i.slots[3]), d = w.words(i.slots[4]);
    Slot<T> r[LANES];
    for (int l = 0; l < LANES; l++) {
        u32 at = c[l] & 255, n = d[l] & 255;
        u64 field = n >= 64 ? ~0ull : (1ull << n) - 1;
        u64 keep = at >= 64 ? 0 : field << at;
        u64 bits = at >= 64 ? 0 : (static_cast<u64>(a[l]) & field) << at;
        r[l] = kept<T>(static_cast<T>((b[l] & ~keep) | bits));
    }
    w.put(i.slots[0], r, m);
}

void lop3(Warp& w, const Instruction& i, u32 m) {
    auto a = w.words(i.slots[1]), b = w.words(i.slots[2]), c = w.words(i.slots[3]);
    u32 table = w.words(i.slots[4])[0], r[LANES];
    for (int l = 0; l < LANES; l++) {
        u32 x = 0;
        for (int n = 0; n < 8; n++)
            if (table >> n & 1) x |= (n & 4 ? a[l] : ~a[l]) & (n & 2 ? b[l] : ~b[l]) & (n & 1 ? c[l] : ~c[l]);
        r[l] = x;
    }
    w.put(i.slots[0], r, m);
}

// shf of the words (high, low): left gives the upper word, right the lower one
template <bool LEFT, bool WRAP> void funnel(Warp& w, const Instruction& i, u32 m) {
    auto low = w.words(i.slots[1]), high = w.words(i.slots[2]), by = w.words(i.slots[3]);
    u32 r[LANES];
    for (int l = 0; l < LANES; l++) {
        u32 n = WRAP ? by[l] & 31 : min<u32>(by[l], 32);
        u64 both = static_cast<u64>(high[l]) << 32 | low[l];
        r[l] = LEFT ? static_cast<u32>((both << n) >> 32) : static_cast<u32>(both >> n);
        if (LEFT && n == 32) r[l] = low[l];
    }
    w.put(i.slots[0], r, m);
}

template <class T> void mul_wide(Warp& w, const Instruction& i, u32 m) {
    auto a = in<T>(w, i.slots[1]), b = in<T>(w, i.slots[2]);
    using R = typename Wide<T>::type;
    Slot<R> r[LANES];
    for (int l = 0; l < LANES; l++) r[l] = kept<R>(static_cast<R>(static_cast<T>(a[l])) * static_cast<R>(static_cast<T>(b[l])));
    w.put(i.slots[0], r, m);
}
template <class T> void mad_wide(Warp& w, const Instruction& i, u32 m) {
    using R = typename Wide<T>::type;
    auto a = in<T>(w, i.slots[1]), b = in<T>(w, i.slots[2]);
    auto c = in<R>(w, i.slots[3]);
    Slot<R> r[LANES];
    for (int l = 0; l < LANES; l++)
        r[l] = kept<R>(add<R>(static_cast<R>(static_cast<T>(a[l])) * static_cast<R>(static_cast<T>(b[l])), static_cast<R>(c[l])));
    w.put(i.slots[0], r, m);
}

template <class A, class B> void dp4a(Warp& w, const Instruction& i, u32 m) {
    auto a = w.words(i.slots[1]), b = w.words(i.slots[2]), c = w.words(i.slots[3]);
    u32 r[LANES];
    for (int l = 0; l < LANES; l++) {
        u32 sum = c[l];
        for (int n = 0; n < 4; n++)
            sum += static_cast<u32>(static_cast<i32>(static_cast<A>(a[l] >> 8 * n)) * static_cast<i32>(static_cast<B>(b[l] >> 8 * n)));
        r[l] = sum;
    }
    w.put(i.slots[0], r, m);
}

template <class T> bool eq(T a, T b) { return a == b; }
template <class T> bool ne(T a, T b) { return a != b; }
template <class T> bool lt(T a, T b) { return a < b; }
template <class T> bool le(T a, T b) { return a <= b; }
template <class T> bool gt(T a, T b) { return a > b; }
template <class T> bool ge(T a, T b) { return a >= b; }
// slots: p, not p (or -1), a, b; with a combination another predicate. extra: 0 none, 1 and, 2 or, 3 xor; negated
template <class T, bool (*F)(T, T)> void setp(Warp& w, const Instruction& i, u32 m) {
    auto a = in<T>(w, i.slots[2]), b = in<T>(w, i.slots[3]);
    u32 bits = 0;
    for (int l = 0; l < LANES; l++) bits |= static_cast<u32>(F(static_cast<T>(a[l]), static_cast<T>(b[l]))) << l;
    u32 other = ~bits;
    if (i.extra[0]) {
        u32 c = w.predicate(i.slots[4]) ^ (i.extra[1] ? ALL : 0);
        bits = i.extra[0] == 1 ? bits & c : i.extra[0] == 2 ? bits | c : bits ^ c;
        other = i.extra[0] == 1 ? other & c : i.extra[0] == 2 ? other | c : other ^ c;
    }
    w.put_predicate(i.slots[0], bits, m);
    w.put_predicate(i.slots[1], other, m);
}

template <class T> void selp(Warp& w, const Instruction& i, u32 m) {
    auto a = in<T>(w, i.slots[1]), b = in<T>(w, i.slots[2]);
    u32 p = w.predicate(i.slots[3]);
    Slot<T> r[LANES];
    for (int l = 0; l < LANES; l++) r[l] = p >> l & 1 ? a[l] : b[l];
    w.put(i.slots[0], r, m);
}

template <u32 (*F)(u32, u32)> void predicates(Warp& w, const Instruction& i, u32 m) {
    w.put_predicate(i.slots[0], F(w.predicate(i.slots[1]), w.predicate(i.slots[2])), m);
}
void predicate_not(Warp& w, const Instruction& i, u32 m) { w.put_predicate(i.slots[0], ~w.predicate(i.slots[1]), m); }
void predicate_move(Warp& w, const Instruction& i, u32 m) { w.put_predicate(i.slots[0], w.predicate(i.slots[1]), m); }

// Pieces of a word or double word, lowest first
template <int BITS> void pack(Warp& w, const Instruction& i, u32 m) {
    int n = i.count - 1;
    if (BITS == 32) {
        u32 r[LANES] = {};
        for (int k = 0; k < n; k++)
            for (int l = 0; l < LANES; l++) r[l] |= (w.words(i.slots[1 + k])[l] & ((1u << 32 / n) - 1)) << 32 / n * k;
        w.put(i.slots[0], r, m);
    } else {
        u64 r[LANES] = {};
        for (int k = 0; k < n; k++)
            for (int l = 0; l < LANES; l++)
                r[l] |= (static_cast<u64>(w.words(i.slots[1 + k])[l]) & ((1ull << 64 / n) - 1)) << 64 / n * k;
        w.put(i.slots[0], r, m);
    }
}
template <int BITS> void unpack(Warp& w, const Instruction& i, u32 m) {
    int n = i.count - 1;
    u64 all[LANES];
    for (int l = 0; l < LANES; l++) all[l] = BITS == 32 ? w.words(i.slots[n])[l] : w.doubles(i.slots[n])[l];
    for (int k = 0; k < n; k++) {
        u32 r[LANES];
        for (int l = 0; l < LANES; l++) r[l] = static_cast<u32>(all[l] >> BITS / n * k & ((1ull << BITS / n) - 1));
        w.put(i.slots[k], r, m);
    }
}

template <class T> void arithmetic(const std::string& t, const char* sort) {
    std::string s = sort, d = s + s, e = d + s;
    auto put = [&](const std::string& name, const std::string& operands, Handler h) {
        registry()[name + "." + t] = {h, strdup(operands.c_str()), PLAIN};
    };
    put("add", e, two<T, add<T>>);
    put("sub", e, two<T, sub<T>>);
    put("mul.lo", e, two<T, mul_lo<T>>);
    put("mul.hi", e, two<T, mul_hi<T>>);
    put("mad.lo", e + s, three<T, mad_lo<T>>);
    put("mad.hi", e + s, three<T, mad_hi<T>>);
    put("div", e, two<T, div<T>>);
    put("rem", e, two<T, rem<T>>);
    put("min", e, two<T, min<T>>);
    put("max", e, two<T, max<T>>);
    put("shr", d + "w", shift<T, shr<T>>);
    std::string two_sources = "pp" + d;
    put("setp.eq", two_sources, setp<T, eq<T>>);
    put("setp.ne", two_sources, setp<T, ne<T>>);
    put("setp.lt", two_sources, setp<T, lt<T>>);
    put("setp.le", two_sources, setp<T, le<T>>);
    put("setp.gt", two_sources, setp<T, gt<T>>);
    put("setp.ge", two_sources, setp<T, ge<T>>);
    if constexpr (!std::is_signed_v<T>) {
        put("setp.lo", two_sources, setp<T, lt<T>>);
        put("setp.ls", two_sources, setp<T, le<T>>);
        put("setp.hi", two_sources, setp<T, gt<T>>);
        put("setp.hs", two_sources, setp<T, ge<T>>);
    } else {
        put("abs", d, one<T, abs<T>>);
        put("neg", d, one<T, neg<T>>);
        put("min.relu", e, two<T, min_relu<T>>);
        put("max.relu", e, two<T, max_relu<T>>);
    }
    put("selp", e + "p", selp<T>);
    put("mov", d, one<T, move<T>>);
}
template <class T> void logic(const std::string& t, const char* sort) {
    std::string s = sort, d = s + s, e = d + s;
    auto put = [&](const std::string& name, const std::string& operands, Handler h) {
        registry()[name + "." + t] = {h, strdup(operands.c_str()), PLAIN};
    };
    put("and", e, two<T, and_<T>>);
    put("or", e, two<T, or_<T>>);
    put("xor", e, two<T, xor_<T>>);
    put("not", d, one<T, not_<T>>);
    put("cnot", d, one<T, cnot<T>>);
    put("shl", d + "w", shift<T, shl<T>>);
    put("shr", d + "w", shift<T, shr<T>>);
    put("mov", d, one<T, move<T>>);
    put("selp", e + "p", selp<T>);
    put("setp.eq", "pp" + d, setp<T, eq<T>>);
    put("setp.ne", "pp" + d, setp<T, ne<T>>);
}

struct All {
    All() {
        arithmetic<i16>("s16", "w"), arithmetic<u16>("u16", "w");
        arithmetic<i32>("s32", "w"), arithmetic<u32>("u32", "w");
        arithmetic<i64>("s64", "q"), arithmetic<u64>("u64", "q");
        registry()["add.s16x2"] = registry()["add.u16x2"] = {two<u32, halves<u16, add<u16>>>, "www", PLAIN};
        logic<u16>("b16", "w"), logic<u32>("b32", "w"), logic<u64>("b64", "q");
        for (auto t : {"f16", "bf16", "f32"}) {
            registry()[std::string("mov.") + t] = registry()["mov.b32"];
            registry()[std::string("selp.") + t] = registry()["selp.b32"];
        }
        registry()["mov.f64"] = registry()["mov.b64"];
        registry()["selp.f64"] = registry()["selp.b64"];
        registry()["mul.wide.s32"] = {mul_wide<i32>, "qww", PLAIN};
        registry()["mul.wide.u32"] = {mul_wide<u32>, "qww", PLAIN};
        registry()["mul.wide.s16"] = {mul_wide<i16>, "www", PLAIN};
        registry()["mul.wide.u16"] = {mul_wide<u16>, "www", PLAIN};
        registry()["mad.wide.s32"] = {mad_wide<i32>, "qwwq", PLAIN};
        registry()["mad.wide.u32"] = {mad_wide<u32>, "qwwq", PLAIN};
        registry()["mad.wide.s16"] = {mad_wide<i16>, "wwww", PLAIN};
        registry()["mad.wide.u16"] = {mad_wide<u16>, "wwww", PLAIN};
        registry()["popc.b32"] = {counted<u32, popc<u32>>, "ww", PLAIN};
        registry()["popc.b64"] = {counted<u64, popc<u64>>, "wq", PLAIN};
        registry()["clz.b32"] = {counted<u32, clz<u32>>, "ww", PLAIN};
        registry()["clz.b64"] = {counted<u64, clz<u64>>, "wq", PLAIN};
        registry()["brev.b32"] = {one<u32, brev32>, "ww", PLAIN};
        registry()["sad.s32"] = {three<i32, sad>, "wwww", PLAIN};
        registry()["prmt.b32"] = {three<u32, prmt>, "wwww", PLAIN};
        registry()["bfe.u32"] = {bfe<u32>, "wwww", PLAIN};
        registry()["bfe.s32"] = {bfe<i32>, "wwww", PLAIN};
        registry()["bfe.u64"] = {bfe<u64>, "qqww", PLAIN};
        registry()["bfe.s64"] = {bfe<i64>, "qqww", PLAIN};
        registry()["bfi.b32"] = {bfi<u32>, "wwwww", PLAIN};
        registry()["bfi.b64"] = {bfi<u64>, "qqqww", PLAIN};
        registry()["lop3.b32"] = {lop3, "wwwww", PLAIN};
        registry()["shf.l.wrap.b32"] = {funnel<true, true>, "wwww", PLAIN};
        registry()["shf.l.clamp.b32"] = {funnel<true, false>, "wwww", PLAIN};
        registry()["shf.r.wrap.b32"] = {funnel<false, true>, "wwww", PLAIN};
        registry()["shf.r.clamp.b32"] = {funnel<false, false>, "wwww", PLAIN};
        registry()["dp4a.s32.s32"] = {dp4a<i8, i8>, "wwww", PLAIN};
        registry()["dp4a.u32.u32"] = {dp4a<u8, u8>, "wwww", PLAIN};
        registry()["dp4a.s32.u32"] = {dp4a<i8, u8>, "wwww", PLAIN};
        registry()["dp4a.u32.s32"] = {dp4a<u8, i8>, "wwww", PLAIN};
        registry()["and.pred"] = {predicates<and_<u32>>, "ppp", PLAIN};
        registry()["or.pred"] = {predicates<or_<u32>>, "ppp", PLAIN};
        registry()["xor.pred"] = {predicates<xor_<u32>>, "ppp", PLAIN};
        registry()["not.pred"] = {predicate_not, "pp", PLAIN};
        registry()["mov.pred"] = {predicate_move, "pp", PLAIN};
        registry()["pack.b32"] = {pack<32>, "ww*", PLAIN};
        registry()["pack.b64"] = {pack<64>, "qw*", PLAIN};
        registry()["unpack.b32"] = {unpack<32>, "w*", PLAIN};
        registry()["unpack.b64"] = {unpack<64>, "w*q", PLAIN};
    }
} all;

}  // namespace
}  // namespace ptx
