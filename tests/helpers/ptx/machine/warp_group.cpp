// Products of warp groups: wgmma.mma_async of 64 rows, of which each warp has 16.
//
// Operands in shared memory are named by descriptors: bits 0-13 the address over 16, 16-29 the leading offset over 16,
// 32-45 the stride over 16, 62-63 the swizzle (1: 128 bytes, 2: 64, 3: 32, 0: none). Where k runs along lines: eight
// rows of a line each, the next eight a stride further. Where the other dimension does: eight of k of a line each, the
// next eight a stride further, more than a line a leading offset further. 16-byte pieces are exchanged by address.
//
// The product is made at once, but what it reads counts as in use until it is waited for.
#include "machine.hpp"

namespace ptx {
namespace {

struct Halves {
    static constexpr int bytes = 2;
    static float get(const u8* p) {
        u16 x;
        std::memcpy(&x, p, 2);
        return half_to_float(x);
    }
};
struct Brains {
    static constexpr int bytes = 2;
    static float get(const u8* p) {
        u16 x;
        std::memcpy(&x, p, 2);
        return brain_to_float(x);
    }
};
struct Tf32 {
    static constexpr int bytes = 4;
    static float get(const u8* p) {
        u32 x;
        std::memcpy(&x, p, 4);
        return as_float(x & ~0x1FFFu);
    }
};
struct Signed {
    static constexpr int bytes = 1;
    static i32 get(const u8* p) { return static_cast<i8>(*p); }
};

struct Described {
    u32 begin, leading, stride;
    u32 line;  // bytes
    u32 exchanged;

    explicit Described(u64 d) {
        begin = (d & 0x3FFF) << 4, leading = (d >> 16 & 0x3FFF) << 4, stride = (d >> 32 & 0x3FFF) << 4;
        int mode = d >> 62;
        line = mode == 1 ? 128 : mode == 2 ? 64 : mode == 3 ? 32 : 16;
        exchanged = mode == 1 ? 7 : mode == 2 ? 3 : mode == 3 ? 1 : 0;
        if (d >> 49 & 7) throw Error("a matrix descriptor with a base offset");
    }
    u32 place(u32 address) const { return address ^ (address >> 7 & exchanged) << 4; }
    // Of 16 bytes along k, from byte `at` of row `row` on
    u32 along_k(u32 row, u32 at) const {
        if (line == 16) return begin + row / 8 * stride + at / 16 * leading + row % 8 * 16;
        return place(begin + row / 8 * stride + row % 8 * line + at);
    }
    // Of 16 bytes along the other dimension, from byte `at` on, of number k
    u32 across_k(u32 k, u32 at) const {
        if (line == 16) return begin + at / 16 * stride + k / 8 * leading + k % 8 * 16;
        return place(begin + at / line * leading + k / 8 * stride + k % 8 * line + at % line);
    }
};

const u8* use(Warp& w, u32 address) {
    Block& b = *w.block;
    const u8* p = shared_at(w, address, 16, false, 0);
    u64 open[2];
    std::memcpy(open, &b.unfenced[address], 16);
    for (u32 at = address; at < address + 16 && (open[0] | open[1]); at++)
        if (b.unfenced[at]) throw Error(text("a product reads shared byte %u, which no fence has shown to its proxy", at));
    b.busy[address / 16]++;
    w.products.back().push_back(address);
    return p;
}

// slots: d, a registers or a descriptor, b descriptor, predicate. extra: columns, a in registers, a and b transposed,
// a and b negated
template <class T, class Number, class Sum, class Result> void multiply(Warp& w, const Instruction& i, u32 m) {
    if (m != ALL) throw Error("not all lanes of the warp take part in a product");
    constexpr int K = 32 / T::bytes, EACH = 4 / T::bytes, PIECE = 16 / T::bytes;
    int n = static_cast<int>(i.extra[0]), results = n / 2;
    bool registers = i.extra[1], a_across = i.extra[2], b_across = i.extra[3];
    int b_slot = results + (registers ? 4 : 1);
    if (w.products.empty()) w.products.emplace_back();
    static thread_local std::vector<Number> b;
    b.resize(K * n);
    Number a[16][K];
    int first = 16 * (w.number % 4);
    if (registers) {
        for (int r = 0; r < 4; r++) {
            auto x = w.words(i.slots[results + r]);
            for (int l = 0; l < LANES; l++)
                for (int j = 0; j < EACH; j++)
                    a[l / 4 + 8 * (r & 1)][(r >> 1) * 4 * EACH + l % 4 * EACH + j] = T::get(reinterpret_cast<const u8*>(&x[l]) + T::bytes * j);
        }
    } else {
        Described d(w.doubles(i.slots[results])[0]);
        if (a_across)
            for (int k = 0; k < K; k++)
                for (int piece = 0; piece < 16 / PIECE; piece++) {
                    const u8* p = use(w, d.across_k(k, T::bytes * (first + piece * PIECE)));
                    for (int j = 0; j < PIECE; j++) a[piece * PIECE + j][k] = T::get(p + T::bytes * j);
                }
        else
            for (int row = 0; row < 16; row++)
                for (int piece = 0; piece < 2; piece++) {
                    const u8* p = use(w, d.along_k(first + row, 16 * piece));
                    for (int j = 0; j < PIECE; j++) a[row][piece * PIECE + j] = T::get(p + T::bytes * j);
                }
    }
    Described d(w.doubles(i.slots[b_slot])[0]);
    if (b_across)
        for (int k = 0; k < K; k++)
            for (int piece = 0; piece < n / PIECE; piece++) {
                const u8* p = use(w, d.across_k(k, T::bytes * piece * PIECE));
                for (int j = 0; j < PIECE; j++) b[k * n + piece * PIECE + j] = T::get(p + T::bytes * j);
            }
    else
        for (int column = 0; column < n; column++)
            for (int piece = 0; piece < 2; piece++) {
                const u8* p = use(w, d.along_k(column, 16 * piece));
                for (int j = 0; j < PIECE; j++) b[(piece * PIECE + j) * n + column] = T::get(p + T::bytes * j);
            }
    bool adds = w.predicate(i.slots[b_slot + 1]) & 1;
    Number sign = (i.extra[4] ? -1 : 1) * (i.extra[5] ? -1 : 1);
    static thread_local std::vector<Sum> sum;
    sum.assign(16 * n, 0);
    for (int row = 0; row < 16; row++)
        for (int k = 0; k < K; k++) {
            Number x = a[row][k] * sign;
            for (int c = 0; c < n; c++) sum[row * n + c] += static_cast<Sum>(x * b[k * n + c]);
        }
    for (int r = 0; r < results; r++) {
        u32 x[LANES];
        auto c = w.words(i.slots[r]);
        for (int l = 0; l < LANES; l++) {
            Result start{};
            if (adds) std::memcpy(&start, &c[l], 4);
            Result y = static_cast<Result>(sum[(l / 4 + 8 * (r >> 1 & 1)) * n + 8 * (r / 4) + 2 * (l % 4) + (r & 1)] + static_cast<Sum>(start));
            std::memcpy(&x[l], &y, 4);
        }
        w.put(i.slots[r], x, m);
    }
}

void commit(Warp& w, const Instruction&, u32) {
    if (w.products.empty()) w.products.emplace_back();
    w.products.emplace_back();
}
void wait(Warp& w, const Instruction& i, u32) {  // extra: groups that may remain; the last one is not committed
    while (static_cast<i64>(w.products.size()) - 1 > i.extra[0]) {
        for (u32 address : w.products.front()) w.block->busy[address / 16]--;
        w.products.pop_front();
    }
}
void show(Warp& w, const Instruction&, u32) { std::fill(w.block->unfenced.begin(), w.block->unfenced.end(), 0); }

struct All {
    All() {
        auto& all = registry();
        all["wgmma.f32.f16.f16"] = {multiply<Halves, float, double, float>, "?", MEET};
        all["wgmma.f32.bf16.bf16"] = {multiply<Brains, float, double, float>, "?", MEET};
        all["wgmma.f32.tf32.tf32"] = {multiply<Tf32, float, double, float>, "?", MEET};
        all["wgmma.s32.s8.s8"] = {multiply<Signed, i32, i64, i32>, "?", MEET};
        all["wgmma.commit_group"] = {commit, "", MEET};
        all["wgmma.wait_group"] = {wait, "", MEET};
        all["fence.proxy.async"] = {show, "", PLAIN};
    }
} all;

}  // namespace
}  // namespace ptx
