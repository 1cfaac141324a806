// What lanes of a warp do together: shuffles, votes, sums, matrices of 8 × 8.
#include "machine.hpp"

namespace ptx {
namespace {

enum Way { UP, DOWN, BFLY, IDX };

// slots: d, p, a, b, c, members
template <int WAY> void shuffle(Warp& w, const Instruction& i, u32 m) {
    auto a = w.words(i.slots[2]), b = w.words(i.slots[3]), c = w.words(i.slots[4]);
    u32 r[LANES], inside = 0;
    for (int l = 0; l < LANES; l++) {
        if (!(m >> l & 1)) continue;
        int by = b[l] & 31, clamp = c[l] & 31, segment = c[l] >> 8 & 31;
        int last = (l & segment) | (clamp & ~segment), first = l & segment, from;
        bool good;
        if (WAY == UP)
            from = l - by, good = from >= last;
        else if (WAY == DOWN)
            from = l + by, good = from <= last;
        else if (WAY == BFLY)
            from = l ^ by, good = from <= last;
        else
            from = first | (by & ~segment), good = from <= last;
        if (!good) from = l;
        if (!(m >> from & 1)) throw Error(text("lane %d asks for a value of lane %d, which takes no part", l, from));
        r[l] = a[from];
        inside |= static_cast<u32>(good) << l;
    }
    w.put(i.slots[0], r, m);
    w.put_predicate(i.slots[1], inside, m);
}

enum Vote { ANY, EVERY, UNI };
template <int HOW> void vote(Warp& w, const Instruction& i, u32 m) {  // d, a, members
    u32 p = (w.predicate(i.slots[1]) ^ (i.extra[0] ? ALL : 0)) & m;
    bool r = HOW == ANY ? p != 0 : HOW == EVERY ? p == m : p == 0 || p == m;
    w.put_predicate(i.slots[0], r ? ALL : 0, m);
}
void fill(Warp& w, i32 slot, u32 x, u32 m) {
    u32 r[LANES];
    for (u32& y : r) y = x;
    w.put(slot, r, m);
}
void ballot(Warp& w, const Instruction& i, u32 m) {
    fill(w, i.slots[0], (w.predicate(i.slots[1]) ^ (i.extra[0] ? ALL : 0)) & m, m);
}
void activemask(Warp& w, const Instruction& i, u32 m) { fill(w, i.slots[0], m, m); }
void match_any(Warp& w, const Instruction& i, u32 m) {  // d, a, members
    auto a = w.words(i.slots[1]);
    u32 r[LANES] = {};
    for (int l = 0; l < LANES; l++)
        for (int k = 0; k < LANES; k++) r[l] |= static_cast<u32>((m >> k & 1) && a[k] == a[l]) << k;
    w.put(i.slots[0], r, m);
}
void elect(Warp& w, const Instruction& i, u32 m) {  // d, p, members
    fill(w, i.slots[0], __builtin_ctz(m), m);
    w.put_predicate(i.slots[1], m & -m, m);
}

template <class T, int HOW> void redux(Warp& w, const Instruction& i, u32 m) {
    auto a = w.words(i.slots[1]);
    bool first = true;
    T x{};
    for (int l = 0; l < LANES; l++) {
        if (!(m >> l & 1)) continue;
        T y = static_cast<T>(a[l]);
        if (first)
            x = y;
        else
            x = HOW == 0 ? static_cast<T>(static_cast<u32>(x) + static_cast<u32>(y))
                : HOW == 1 ? (y < x ? y : x)
                : HOW == 2 ? (y > x ? y : x)
                : HOW == 3 ? static_cast<T>(x & y)
                : HOW == 4 ? static_cast<T>(x | y)
                           : static_cast<T>(x ^ y);
        first = false;
    }
    fill(w, i.slots[0], static_cast<u32>(x), m);
}

u64 row_address(Warp& w, const Instruction& i, int slot, int lane) {
    return i.extra[2] ? w.doubles(i.slots[slot])[lane] + i.extra[3] : static_cast<u32>(w.words(i.slots[slot])[lane] + i.extra[3]);
}
void whole_warp(u32 m) {
    if (m != ALL) throw Error("not all lanes of the warp take part");
}
// slots: registers, address. extra: matrices, transposed, wide address, offset. Lane 8i + r names row r of matrix i;
// lane 4g + c gets columns 2c and 2c + 1 of row g, or of column g.
void load_matrices(Warp& w, const Instruction& i, u32 m) {
    whole_warp(m);
    int n = static_cast<int>(i.extra[0]);
    for (int k = 0; k < n; k++) {
        u16 matrix[8][8];
        for (int r = 0; r < 8; r++) {
            u64 address = row_address(w, i, n, 8 * k + r) & ~WINDOW;
            std::memcpy(matrix[r], shared_at(w, address, 16, false, 8 * k + r), 16);
        }
        u32 x[LANES];
        for (int l = 0; l < LANES; l++) {
            int g = l / 4, c = l % 4;
            u32 low = i.extra[1] ? matrix[2 * c][g] : matrix[g][2 * c], high = i.extra[1] ? matrix[2 * c + 1][g] : matrix[g][2 * c + 1];
            x[l] = low | high << 16;
        }
        w.put(i.slots[k], x, m);
    }
}
void store_matrices(Warp& w, const Instruction& i, u32 m) {
    whole_warp(m);
    int n = static_cast<int>(i.extra[0]);
    for (int k = 0; k < n; k++) {
        u16 matrix[8][8];
        auto x = w.words(i.slots[k]);
        for (int l = 0; l < LANES; l++)
            for (int h = 0; h < 2; h++) {
                int g = l / 4, c = 2 * (l % 4) + h;
                (i.extra[1] ? matrix[c][g] : matrix[g][c]) = static_cast<u16>(x[l] >> 16 * h);
            }
        for (int r = 0; r < 8; r++) {
            u64 address = row_address(w, i, n, 8 * k + r) & ~WINDOW;
            const u8* fresh = reinterpret_cast<const u8*>(matrix[r]);
            std::memcpy(shared_at(w, address, 16, true, 8 * k + r, fresh), fresh, 16);
        }
    }
}
void transpose(Warp& w, const Instruction& i, u32 m) {
    whole_warp(m);
    auto a = w.words(i.slots[1]);
    u32 r[LANES];
    for (int l = 0; l < LANES; l++) {
        int g = l / 4, c = 2 * (l % 4);
        auto at = [&](int row, int column) { return a[4 * row + column / 2] >> 16 * (column % 2) & 0xFFFF; };
        r[l] = at(c, g) | at(c + 1, g) << 16;
    }
    w.put(i.slots[0], r, m);
}
void meet(Warp&, const Instruction&, u32) {}

struct All {
    All() {
        auto& all = registry();
        all["shfl.sync.up.b32"] = {shuffle<UP>, "wpwwww", MEET};
        all["shfl.sync.down.b32"] = {shuffle<DOWN>, "wpwwww", MEET};
        all["shfl.sync.bfly.b32"] = {shuffle<BFLY>, "wpwwww", MEET};
        all["shfl.sync.idx.b32"] = {shuffle<IDX>, "wpwwww", MEET};
        all["vote.sync.any.pred"] = {vote<ANY>, "ppw", MEET};
        all["vote.sync.all.pred"] = {vote<EVERY>, "ppw", MEET};
        all["vote.sync.uni.pred"] = {vote<UNI>, "ppw", MEET};
        all["vote.sync.ballot.b32"] = {ballot, "wpw", MEET};
        all["activemask.b32"] = {activemask, "w", PLAIN};
        all["match.any.sync.b32"] = {match_any, "www", MEET};
        all["elect.sync"] = {elect, "wpw", MEET};
        all["redux.sync.add.s32"] = {redux<i32, 0>, "www", MEET}, all["redux.sync.add.u32"] = {redux<u32, 0>, "www", MEET};
        all["redux.sync.min.s32"] = {redux<i32, 1>, "www", MEET}, all["redux.sync.min.u32"] = {redux<u32, 1>, "www", MEET};
        all["redux.sync.max.s32"] = {redux<i32, 2>, "www", MEET}, all["redux.sync.max.u32"] = {redux<u32, 2>, "www", MEET};
        all["redux.sync.and.b32"] = {redux<u32, 3>, "www", MEET}, all["redux.sync.or.b32"] = {redux<u32, 4>, "www", MEET};
        all["redux.sync.xor.b32"] = {redux<u32, 5>, "www", MEET};
        all["ldmatrix"] = {load_matrices, "?", MEET};
        all["stmatrix"] = {store_matrices, "?", MEET};
        all["movmatrix"] = {transpose, "ww", MEET};
        all["bar.warp.sync"] = {meet, "w", MEET};
    }
} all;

}  // namespace
}  // namespace ptx
