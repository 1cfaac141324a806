// Barriers and copies that run beside the program. A copy happens as late as it may: when somebody waits for it. Until
// then its bytes may be neither read nor written.
#include "machine.hpp"

namespace ptx {

void join(std::vector<u32>& into, const std::vector<u32>& other) {
    if (into.size() < other.size()) into.resize(other.size(), 0);
    for (size_t k = 0; k < other.size(); k++)
        if (other[k] > into[k]) into[k] = other[k];
}
std::vector<u32>& tick(Warp& w) {
    w.clock[w.number]++;
    return w.clock;
}

namespace {

u64 address_of(Warp& w, i32 slot, i64 wide, i64 offset, int lane) {
    u64 address = wide ? w.doubles(slot)[lane] + offset : static_cast<u32>(w.words(slot)[lane] + offset);
    return address & ~WINDOW;
}

// cp.async. slots: to, from, bytes of the source. extra: wide to, offset, offset of from, bytes, is there a third slot
void copy(Warp& w, const Instruction& i, u32 m) {
    for (int l = 0; l < LANES; l++) {
        if (!(m >> l & 1)) continue;
        u32 bytes = static_cast<u32>(i.extra[3]), source = i.extra[4] ? w.words(i.slots[2])[l] : bytes;
        u64 to = address_of(w, i.slots[0], i.extra[0], i.extra[1], l), from = w.doubles(i.slots[1])[l] + i.extra[2];
        if (source > bytes) throw Error(text("lane %d: a copy of %u bytes has %u of source", l, bytes, source));
        if (from % bytes)
            throw Error(text("lane %d: global address %#llx is not aligned to %u bytes", l, static_cast<unsigned long long>(from), bytes));
        shared_at(w, to, bytes, true, l);
        for (u32 k = 0; k < bytes; k++) w.block->state[to + k] = COMING;
        w.open[l].push_back({static_cast<u32>(to), from, bytes, source, static_cast<u32>(w.number), static_cast<u32>(l)});
    }
}
void land(Warp& w, const Copy& c) {
    std::memset(w.block->state.data() + c.to, READY, c.bytes);
    u8* to = shared_at(w, c.to, c.bytes, true, static_cast<int>(c.lane));
    std::memset(to, 0, c.bytes);
    std::memset(w.block->unfenced.data() + c.to, 0, c.bytes);  // Triton, like others, has no fence behind these copies
    for (u32 done = 0; done < c.source;) {  // pieces that are aligned to their size
        u32 n = 16;
        while (n > c.source - done || (c.from + done) % n) n /= 2;
        std::memcpy(to + done, global_at(w, c.from + done, n, false, static_cast<int>(c.lane)), n);
        done += n;
    }
}
void commit(Warp& w, const Instruction&, u32 m) {
    for (int l = 0; l < LANES; l++)
        if (m >> l & 1) w.groups[l].push_back(std::move(w.open[l])), w.open[l].clear();
}
void wait(Warp& w, const Instruction& i, u32 m) {  // extra: groups that may remain; all: those that are not committed, too
    for (int l = 0; l < LANES; l++) {
        if (!(m >> l & 1)) continue;
        while (static_cast<i64>(w.groups[l].size()) > i.extra[0]) {
            for (const Copy& c : w.groups[l].front()) land(w, c);
            w.groups[l].pop_front();
        }
        if (i.extra[1]) {
            for (const Copy& c : w.open[l]) land(w, c);
            w.open[l].clear();
        }
    }
}

Arrivals& mbarrier_at(Warp& w, u64 address) {
    auto found = w.block->mbarriers.find(static_cast<u32>(address));
    if (found == w.block->mbarriers.end()) throw Error(text("no mbarrier was initialised at shared %lld", static_cast<long long>(address)));
    return found->second;
}
void settle(Block& b, Arrivals& a) {
    if (a.pending == 0 && a.bytes == 0) {
        a.phase++, a.pending = a.expected;
        a.done = a.clock;
        b.changes++;
    }
}
// slots: address, count. extra: wide, offset
void init(Warp& w, const Instruction& i, u32 m) {
    for (int l = 0; l < LANES; l++) {
        if (!(m >> l & 1)) continue;
        u64 address = address_of(w, i.slots[0], i.extra[0], i.extra[1], l);
        std::memset(shared_at(w, address, 8, true, l), 0, 8);
        i64 count = w.words(i.slots[1])[l];
        w.block->mbarriers[static_cast<u32>(address)] = {count, count, 0, 0, {}, {}};
    }
}
void invalidate(Warp& w, const Instruction& i, u32 m) {
    for (int l = 0; l < LANES; l++)
        if (m >> l & 1) {
            u64 address = address_of(w, i.slots[0], i.extra[0], i.extra[1], l);
            mbarrier_at(w, address);
            w.block->mbarriers.erase(static_cast<u32>(address));
        }
}
// slots: address, arrivals, bytes that are to come
void arrive(Warp& w, const Instruction& i, u32 m) {
    for (int l = 0; l < LANES; l++) {
        if (!(m >> l & 1)) continue;
        Arrivals& a = mbarrier_at(w, address_of(w, i.slots[0], i.extra[0], i.extra[1], l));
        i64 count = w.words(i.slots[1])[l];
        if (count > a.pending) throw Error(text("lane %d: %lld arrive at an mbarrier that waits for %lld", l, static_cast<long long>(count), static_cast<long long>(a.pending)));
        a.bytes += w.words(i.slots[2])[l];
        join(a.clock, w.clock);
        a.pending -= count;
        settle(*w.block, a);
    }
    tick(w);
    w.block->changes++;
}
// slots: predicate, address, parity. Bulk copies that arrive here happen when a warp asks for the second time: who does not
// ask again has not waited.
void try_wait(Warp& w, const Instruction& i, u32 m) {
    u32 done = 0;
    for (int l = 0; l < LANES; l++) {
        if (!(m >> l & 1)) continue;
        u64 address = address_of(w, i.slots[1], i.extra[0], i.extra[1], l);
        if (w.tried == static_cast<i64>(address)) finish_copies(*w.block, static_cast<u32>(address));
        Arrivals& a = mbarrier_at(w, address);
        if ((a.phase & 1) != (w.words(i.slots[2])[l] & 1)) {
            done |= 1u << l;
            join(w.clock, a.done);
        }
    }
    w.put_predicate(i.slots[0], done, m);
    w.yields = done != m;
    w.tried = w.yields ? static_cast<i64>(address_of(w, i.slots[1], i.extra[0], i.extra[1], __builtin_ctz(m & ~done))) : -1;
}

const TensorMap& map_at(Warp& w, u64 address) {
    if ((address & WINDOW) == PARAM_WINDOW)
        for (const TensorMap& map : w.block->launch.maps)
            if (map.parameter == (address & ~WINDOW)) return map;
    throw Error(text("there is no tensor map at %#llx", static_cast<unsigned long long>(address)));
}
void start(Warp& w, BulkCopy c, int lane) {
    Block& b = *w.block;
    if (c.to < SHARED_BEGIN || c.to + c.bytes > b.memory.size()) throw Error(text("lane %d: a copy of %u bytes to shared %u", lane, c.bytes, c.to));
    for (u32 at = c.to; at < c.to + c.bytes; at++)
        if (b.state[at] == COMING) throw Error(text("lane %d: two copies to shared byte %u at a time", lane, at));
    for (u32 at = c.to; at < c.to + c.bytes; at += 16) shared_at(w, at, 16, true, lane);  // who else reads it is told
    std::memset(b.state.data() + c.to, COMING, c.bytes);
    mbarrier_at(w, c.barrier);
    c.warp = w.number;
    b.bulk.push_back(std::move(c));
}
// slots: to, map, barrier, coordinates. extra: wide to, offset, wide barrier, offset, rank
void copy_tensor(Warp& w, const Instruction& i, u32 m) {
    for (int l = 0; l < LANES; l++) {
        if (!(m >> l & 1)) continue;
        BulkCopy c{};
        c.map = &map_at(w, w.doubles(i.slots[1])[l]);
        c.to = static_cast<u32>(address_of(w, i.slots[0], i.extra[0], i.extra[1], l));
        c.barrier = static_cast<u32>(address_of(w, i.slots[2], i.extra[2], i.extra[3], l));
        if (c.map->rank != i.extra[4]) throw Error(text("a tensor map of %d dimensions, %d coordinates", c.map->rank, static_cast<int>(i.extra[4])));
        c.bytes = c.map->element;
        for (int d = 0; d < c.map->rank; d++) {
            c.bytes *= static_cast<u32>(c.map->box[d]);
            c.at[d] = static_cast<i32>(w.words(i.slots[3 + d])[l]);
        }
        u32 align = c.map->swizzle == 3 ? 1024 : c.map->swizzle == 2 ? 512 : c.map->swizzle == 1 ? 256 : 128;
        if (c.to % align) throw Error(text("a tensor goes to shared %u, which is not aligned to %u bytes", c.to, align));
        start(w, std::move(c), l);
    }
}
// slots: to, from, bytes, barrier. extra: wide to, offset, offset of from, wide barrier, offset
void copy_bulk(Warp& w, const Instruction& i, u32 m) {
    for (int l = 0; l < LANES; l++) {
        if (!(m >> l & 1)) continue;
        BulkCopy c{};
        c.to = static_cast<u32>(address_of(w, i.slots[0], i.extra[0], i.extra[1], l));
        c.from = w.doubles(i.slots[1])[l] + i.extra[2];
        c.bytes = w.words(i.slots[2])[l];
        c.barrier = static_cast<u32>(address_of(w, i.slots[3], i.extra[3], i.extra[4], l));
        if (c.to % 16 || c.from % 16 || c.bytes % 16) throw Error(text("lane %d: a bulk copy is not of whole 16 bytes", l));
        start(w, std::move(c), l);
    }
}

u32 swizzled(u32 address, int mode) {
    u32 bits = mode == 3 ? 7 : mode == 2 ? 3 : mode == 1 ? 1 : 0;
    return address ^ (address >> 7 & bits) << 4;
}
void fetch(Block& b, const BulkCopy& c) {
    Warp& w = b.warps[c.warp];
    std::memset(b.state.data() + c.to, READY, c.bytes);
    std::memset(b.unfenced.data() + c.to, 0, c.bytes);
    if (!c.map) {
        for (u32 k = 0; k < c.bytes; k += 16)
            std::memcpy(b.memory.data() + c.to + k, global_at(w, c.from + k, 16, false, 0), 16);
        return;
    }
    const TensorMap& map = *c.map;
    i64 at[5] = {};
    for (u32 done = 0; done < c.bytes; done += map.element) {
        u64 from = map.address;
        bool inside = true;
        for (int d = 0; d < map.rank; d++) {
            i64 x = c.at[d] + at[d];
            inside = inside && x >= 0 && x < map.shape[d];
            from += x * map.strides[d];
        }
        u8* to = b.memory.data() + swizzled(c.to + done, map.swizzle);
        if (inside)
            std::memcpy(to, global_at(w, from, map.element, false, 0), map.element);
        else
            std::memset(to, map.nan ? 0xFF : 0, map.element);
        for (int d = 0; d < map.rank && ++at[d] == map.box[d]; d++) at[d] = 0;
    }
}

// slots: number, threads (0: all)
void sync(Warp& w, const Instruction& i, u32 m) {
    u32 id = w.words(i.slots[0])[__builtin_ctz(m)], threads = w.words(i.slots[1])[__builtin_ctz(m)];
    if (id > 15) throw Error(text("barrier %u of 16", id));
    Block& b = *w.block;
    Barrier& barrier = b.barriers[id];
    u32 expected = threads;
    if (!threads)
        for (Warp& other : b.warps) expected += other.state == DONE ? 0 : LANES;
    barrier.arrived += LANES;
    b.changes++;
    join(barrier.clock, w.clock);
    bool waits = i.extra[0];
    if (waits) barrier.waiting.push_back(w.number), w.state = WAITING;
    if (barrier.arrived > expected) throw Error(text("%u threads are at barrier %u, which %u meet at", barrier.arrived, id, expected));
    tick(w);
    if (barrier.arrived < expected) return;
    for (int number : barrier.waiting) {
        join(b.warps[number].clock, barrier.clock);
        b.warps[number].state = RUNNING;
    }
    barrier = Barrier();
}

struct All {
    All() {
        auto& all = registry();
        all["cp.async"] = {copy, "?", PLAIN};
        all["cp.async.commit_group"] = {commit, "", PLAIN};
        all["cp.async.wait_group"] = {wait, "", PLAIN};
        all["mbarrier.init"] = {init, "?", PLAIN};
        all["mbarrier.inval"] = {invalidate, "?", PLAIN};
        all["mbarrier.arrive"] = {arrive, "?", PLAIN};
        all["mbarrier.wait"] = {try_wait, "?", PLAIN};
        all["cp.async.bulk.tensor"] = {copy_tensor, "?", PLAIN};
        all["cp.async.bulk"] = {copy_bulk, "?", PLAIN};
        all["bar.sync"] = {sync, "ww", MEET};
    }
} all;

}  // namespace

void finish_copies(Block& b, u32 barrier) {
    for (auto c = b.bulk.begin(); c != b.bulk.end();) {
        if (c->barrier != barrier) {
            ++c;
            continue;
        }
        fetch(b, *c);
        auto found = b.mbarriers.find(barrier);
        if (found == b.mbarriers.end()) throw Error(text("the mbarrier of a copy at shared %u is gone", barrier));
        found->second.bytes -= c->bytes;
        settle(b, found->second);
        c = b.bulk.erase(c);
    }
}

}  // namespace ptx
