// Loads, stores, atomics and addresses; what a lane may touch.
#include "machine.hpp"

namespace ptx {
namespace {

const char* SPACES[] = {"generic", "global", "shared", "local", "parameter"};

void watch(Warp& w, u32 address, u32 bytes, bool write, int lane, const u8* fresh) {
    Touches& t = w.block->touches;
    u32 now = w.clock[w.number], warps = w.block->warp_count, piece = w.block->launch.program->piece;
    for (u32 at = address / piece; at < (address + bytes) / piece; at++) {
        u8 writer = t.writer[at];
        if (writer != 0xFF && writer != w.number && t.written[at] > w.clock[writer]) {
            bool same = fresh && !std::memcmp(fresh + at * piece - address, &w.block->memory[at * piece], piece);
            if (!same)
                throw Error(text("race: lane %d of warp %d %s shared byte %u, which warp %d wrote and no barrier orders", lane,
                                 w.number, write ? "writes" : "reads", at * piece, writer));
        }
        if (write) {
            for (u32 v = 0; v < warps; v++)
                if (static_cast<int>(v) != w.number && t.read[at * warps + v] > w.clock[v])
                    throw Error(text("race: lane %d of warp %d writes shared byte %u, which warp %u read and no barrier orders",
                                     lane, w.number, at * piece, v));
            t.writer[at] = static_cast<u8>(w.number);
            t.written[at] = now;
        } else {
            t.read[at * warps + w.number] = now;
        }
    }
}

bool all_ready(const State* s, u32 bytes) {
    if (bytes % 4) return false;  // byte by byte
    u32 found = 0;
    for (u32 k = 0; k < bytes; k += 4) {
        u32 four;
        std::memcpy(&four, s + k, 4);
        found |= four ^ 0x01010101u * READY;
    }
    return !found;
}

u64 address_of(Warp& w, i32 slot, bool wide, i64 offset, int lane) {
    return wide ? w.doubles(slot)[lane] + offset : static_cast<u32>(w.words(slot)[lane] + offset);
}

// slots: registers, then the address. extra: space, bytes of an element, elements, signed, wide address, offset, wide
// registers
void load(Warp& w, const Instruction& i, u32 m) {
    i64 space = i.extra[0], bytes = i.extra[1], n = i.extra[2];
    u64 found[8][LANES];
    for (int l = 0; l < LANES; l++) {
        if (!(m >> l & 1)) continue;
        u64 address = address_of(w, i.slots[n], i.extra[4], i.extra[5], l);
        const u8* p = memory_at(w, static_cast<int>(space), address, static_cast<u32>(bytes * n), false, l);
        for (int k = 0; k < n; k++) {
            u64 x = 0;
            std::memcpy(&x, p + k * bytes, bytes);
            if (i.extra[3] && bytes < 8) x = static_cast<u64>(static_cast<i64>(x << (64 - 8 * bytes)) >> (64 - 8 * bytes));
            found[k][l] = x;
        }
    }
    for (int k = 0; k < n; k++) {
        if (i.extra[6]) {
            w.put(i.slots[k], found[k], m);
        } else {
            u32 r[LANES];
            for (int l = 0; l < LANES; l++) r[l] = static_cast<u32>(found[k][l]);
            w.put(i.slots[k], r, m);
        }
    }
}

void store(Warp& w, const Instruction& i, u32 m) {
    i64 space = i.extra[0], bytes = i.extra[1], n = i.extra[2];
    for (int l = 0; l < LANES; l++) {
        if (!(m >> l & 1)) continue;
        u64 address = address_of(w, i.slots[n], i.extra[4], i.extra[5], l);
        u8 fresh[64];
        for (int k = 0; k < n; k++) {
            u64 x = i.extra[6] ? w.doubles(i.slots[k])[l] : w.words(i.slots[k])[l];
            std::memcpy(fresh + k * bytes, &x, bytes);
        }
        u8* p = memory_at(w, static_cast<int>(space), address, static_cast<u32>(bytes * n), true, l, fresh);
        std::memcpy(p, fresh, bytes * n);
    }
}

enum Update { ADD, AND, OR, XOR, MIN, MAX, EXCH, CAS, INC, DEC };

template <class T, int HOW> T updated(T old, T b, T c) {
    switch (HOW) {
        case ADD: return static_cast<T>(old + b);
        case MIN: return b < old ? b : old;
        case MAX: return b > old ? b : old;
        case EXCH: return b;
        case CAS: return old == b ? c : old;
        default: break;
    }
    if constexpr (std::is_integral_v<T>) {
        if (HOW == AND) return old & b;
        if (HOW == OR) return old | b;
        if (HOW == XOR) return old ^ b;
        if (HOW == INC) return old >= b ? 0 : old + 1;
        if (HOW == DEC) return old == 0 || old > b ? b : old - 1;
    }
    return old;
}
// slots: old value, address, b, c. extra: space, wide address, offset, whether the old value is wanted
template <class T, int HOW> void atomic(Warp& w, const Instruction& i, u32 m) {
    for (int l = 0; l < LANES; l++) {
        if (!(m >> l & 1)) continue;
        u64 address = address_of(w, i.slots[1], i.extra[1], i.extra[2], l);
        int space = static_cast<int>(i.extra[0]);
        memory_at(w, space, address, sizeof(T), false, l);
        u8* p = memory_at(w, space, address, sizeof(T), true, l);
        T old, b, c{};
        std::memcpy(&old, p, sizeof(T));
        auto take = [&](i32 slot, T& x) {
            std::memcpy(&x, sizeof(T) == 8 ? static_cast<void*>(w.doubles(slot) + l) : static_cast<void*>(w.words(slot) + l), sizeof(T));
        };
        take(i.slots[2], b);
        if (HOW == CAS) take(i.slots[3], c);
        T fresh = updated<T, HOW>(old, b, c);
        std::memcpy(p, &fresh, sizeof(T));
        w.block->changes++;
        if (!i.extra[3]) continue;
        if (sizeof(T) == 8)
            std::memcpy(w.doubles(i.slots[0]) + l, &old, sizeof(T));
        else
            std::memcpy(w.words(i.slots[0]) + l, &old, sizeof(T));
    }
}

void to_generic(Warp& w, const Instruction& i, u32 m) {  // extra: window
    u64 r[LANES];
    for (int l = 0; l < LANES; l++) r[l] = w.doubles(i.slots[1])[l] | static_cast<u64>(i.extra[0]);
    w.put(i.slots[0], r, m);
}
void from_generic(Warp& w, const Instruction& i, u32 m) {
    u64 r[LANES];
    for (int l = 0; l < LANES; l++) {
        r[l] = w.doubles(i.slots[1])[l];
        if ((m >> l & 1) && (r[l] & WINDOW) != static_cast<u64>(i.extra[0]))
            throw Error(text("lane %d: address %#llx is not in that space", l, static_cast<unsigned long long>(r[l])));
        r[l] &= ~WINDOW;
    }
    w.put(i.slots[0], r, m);
}

void nothing(Warp&, const Instruction&, u32) {}

template <class T> void atomics(const std::string& t, bool integral) {
    const char* all = sizeof(T) == 8 ? "qwqq" : "wwww";
    std::string three = std::string(all, 3);
    auto put = [&](const char* name, Handler h, bool cas = false) {
        registry()["atom." + std::string(name) + "." + t] = {h, strdup((cas ? std::string(all) : three).c_str()), PLAIN};
    };
    put("add", atomic<T, ADD>), put("min", atomic<T, MIN>), put("max", atomic<T, MAX>);
    put("exch", atomic<T, EXCH>), put("cas", atomic<T, CAS>, true);
    if (!integral) return;
    put("and", atomic<T, AND>), put("or", atomic<T, OR>), put("xor", atomic<T, XOR>);
    put("inc", atomic<T, INC>), put("dec", atomic<T, DEC>);
}

struct All {
    All() {
        registry()["ld"] = {load, "?", PLAIN};
        registry()["st"] = {store, "?", PLAIN};
        registry()["cvta"] = {to_generic, "qq", PLAIN};
        registry()["cvta.to"] = {from_generic, "qq", PLAIN};
        registry()["nothing"] = {nothing, "", PLAIN};
        atomics<u32>("u32", true), atomics<i32>("s32", true), atomics<u32>("b32", true);
        atomics<u64>("u64", true), atomics<i64>("s64", true), atomics<u64>("b64", true);
        atomics<float>("f32", false);
    }
} all;

}  // namespace

u8* global_at(Warp& w, u64 address, u32 bytes, bool write, int lane) {
    const auto& ranges = w.block->launch.ranges;  // by begin
    if (address % bytes)
        throw Error(text("lane %d: global address %#llx is not aligned to %u bytes", lane,
                         static_cast<unsigned long long>(address), bytes));
    size_t low = 0, high = ranges.size();
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (ranges[middle].begin <= address)
            low = middle + 1;
        else
            high = middle;
    }
    for (size_t k = low; k-- > 0;) {  // tensors may overlap: views of one storage
        const Range& r = ranges[k];
        if (address + bytes <= r.end && (!write || r.writable)) return reinterpret_cast<u8*>(address);
        if (k + 64 < low) break;
    }
    std::string near;
    for (const Range& r : ranges)
        if (address + bytes > r.begin - 4096 && address < r.end + 4096)
            near += text("; parameter %d has %lld bytes, this is at %lld", r.number, static_cast<long long>(r.end - r.begin),
                         static_cast<long long>(address - r.begin));
    throw Error(text("lane %d %s %u bytes at global %#llx, where no tensor of the launch is", lane, write ? "writes" : "reads",
                     bytes, static_cast<unsigned long long>(address)) + near);
}

u8* shared_at(Warp& w, u64 address, u32 bytes, bool write, int lane, const u8* fresh) {
    Block& b = *w.block;
    if (address < SHARED_BEGIN || address + bytes > b.memory.size())
        throw Error(text("lane %d %s %u bytes at shared %lld; there are %lld from %u on", lane, write ? "writes" : "reads", bytes,
                         static_cast<long long>(address), static_cast<long long>(b.memory.size() - SHARED_BEGIN), SHARED_BEGIN));
    if (address % bytes)
        throw Error(text("lane %d: shared address %lld is not aligned to %u bytes", lane, static_cast<long long>(address), bytes));
    if (!write && all_ready(&b.state[address], bytes)) {
        if (!b.touches.writer.empty()) watch(w, static_cast<u32>(address), bytes, write, lane, fresh);
        return b.memory.data() + address;
    }
    for (u32 k = 0; k < bytes; k++) {
        State& s = b.state[address + k];
        if (s == COMING)
            throw Error(text("lane %d %s shared byte %lld, which a copy under way is to fill", lane, write ? "writes" : "reads",
                             static_cast<long long>(address + k)));
        if (write && b.busy[(address + k) / 16])
            throw Error(text("lane %d writes shared byte %lld, which a product under way reads", lane, static_cast<long long>(address + k)));
        if (write) s = READY, b.unfenced[address + k] = 1;  // what nothing has written reads as NaN
    }
    if (!b.touches.writer.empty()) watch(w, static_cast<u32>(address), bytes, write, lane, fresh);
    return b.memory.data() + address;
}

u8* memory_at(Warp& w, int space, u64 address, u32 bytes, bool write, int lane, const u8* fresh) {
    if (space == GENERIC) {
        u64 window = address & WINDOW;
        space = window == SHARED_WINDOW ? SHARED : window == PARAM_WINDOW ? PARAM : window == LOCAL_WINDOW ? LOCAL : GLOBAL;
        if (space != GLOBAL) address &= ~WINDOW;
    }
    if (space == GLOBAL) return global_at(w, address, bytes, write, lane);
    if (space == SHARED) return shared_at(w, address, bytes, write, lane, fresh);
    u64 end = space == LOCAL ? w.block->launch.program->local : w.block->launch.parameter_bytes;
    if (address + bytes > end || (space == PARAM && write))
        throw Error(text("lane %d: %u bytes at %s %lld of %lld", lane, bytes, SPACES[space], static_cast<long long>(address),
                         static_cast<long long>(end)));
    if (space == LOCAL) return w.local.data() + lane * end + address;
    return const_cast<u8*>(w.block->launch.parameters) + address;
}

}  // namespace ptx
