// Running a kernel: lanes of a warp that part and meet again, warps of a block in turn, blocks one after the other.
#include "machine.hpp"

#include <algorithm>
#include <climits>
#include <cstdarg>
#include <cstdio>

namespace ptx {

std::string text(const char* format, ...) {
    char line[512];
    va_list given;
    va_start(given, format);
    std::vsnprintf(line, sizeof line, format, given);
    va_end(given);
    return line;
}

std::map<std::string, Entry>& registry() {
    static std::map<std::string, Entry> all;
    return all;
}

namespace {

constexpr u64 TURN = 50000;      // instructions of a warp before the next one
constexpr int MOST_ROUNDS = 64;  // in which nothing happens that a warp could wait for

enum Special { TID_X, TID_Y, TID_Z, NTID_X, NTID_Y, NTID_Z, CTAID_X, CTAID_Y, CTAID_Z, NCTAID_X, NCTAID_Y, NCTAID_Z, LANEID,
               WARPID, NWARPID, LANEMASK_LT, LANEMASK_LE, LANEMASK_GT, LANEMASK_GE, LANEMASK_EQ, SMID };

u32 special(const Block& b, const Warp& w, i64 which, int lane) {
    u32 bit = 1u << lane;
    switch (which) {
        case TID_X: return 32 * w.number + lane;
        case TID_Y: case TID_Z: return 0;
        case NTID_X: return b.launch.threads;
        case NTID_Y: case NTID_Z: return 1;
        case CTAID_X: case CTAID_Y: case CTAID_Z: return b.index[which - CTAID_X];
        case NCTAID_X: case NCTAID_Y: case NCTAID_Z: return b.launch.grid[which - NCTAID_X];
        case LANEID: return lane;
        case WARPID: return w.number;
        case NWARPID: return b.warp_count;
        case LANEMASK_LT: return bit - 1;
        case LANEMASK_LE: return bit | (bit - 1);
        case LANEMASK_GT: return ~(bit | (bit - 1));
        case LANEMASK_GE: return ~(bit - 1);
        case LANEMASK_EQ: return bit;
        default: return 0;
    }
}

void prepare(Block& b, Warp& w, int number) {
    const Program& p = *b.launch.program;
    w.block = &b, w.number = number;
    w.file.resize(p.registers);
    u32* words = w.words(0);
    std::fill(words, words + p.registers / 4, POISON);
    w.local.assign(static_cast<size_t>(p.local) * LANES, 0xFD);
    w.open.resize(LANES), w.groups.resize(LANES);
    w.clock.assign(b.warp_count, 0), w.clock[number] = 1;
    for (size_t k = 0; k < p.constants.size(); k += 3) {
        i32 slot = static_cast<i32>(p.constants[k]);
        if (p.constants[k + 1] == 1) w.predicate(slot) = p.constants[k + 2] ? ALL : 0;
        for (int l = 0; l < LANES; l++) {
            if (p.constants[k + 1] == 4) w.words(slot)[l] = static_cast<u32>(p.constants[k + 2]);
            if (p.constants[k + 1] == 8) w.doubles(slot)[l] = static_cast<u64>(p.constants[k + 2]);
        }
    }
    for (size_t k = 0; k < p.specials.size(); k += 2)
        for (int l = 0; l < LANES; l++) w.words(static_cast<i32>(p.specials[k]))[l] = special(b, w, p.specials[k + 1], l);
}

// Go on with the lanes that are furthest behind; those at the same place go together.
int choose(Warp& w) {
    auto& all = w.others;
    for (size_t a = 0; a < all.size(); a++)
        for (size_t c = a + 1; c < all.size();) {
            if (all[a].pc == all[c].pc) {
                all[a].mask |= all[c].mask, all[a].blocked = false;
                all.erase(all.begin() + static_cast<long>(c));
            } else {
                c++;
            }
        }
    int best = -1;
    for (size_t a = 0; a < all.size(); a++)
        if (!all[a].blocked && (best < 0 || all[a].pc < all[best].pc)) best = static_cast<int>(a);
    if (best < 0) throw Error("lanes wait for others that never come here");
    w.pc = all[best].pc, w.mask = all[best].mask;
    all.erase(all.begin() + best);
    int next = INT_MAX;
    for (const Group& g : all)
        if (g.pc > w.pc) next = std::min(next, g.pc);
    return next;
}

void run(Warp& w) {
    const Instruction* code = w.block->launch.program->code.data();
    u64 executed = 0, turn = w.block->warp_count > 1 ? TURN : ~0ull;
    w.yields = false;
    w.others.push_back({w.pc, w.mask, false});
    int next = choose(w);
    auto again = [&] {
        w.others.push_back({w.pc, w.mask, false});
        next = choose(w);
    };
    u64& total = w.block->launch.executed;
    u64 limit = w.block->launch.most;
    while (executed < turn) {
        if (w.pc >= next) again();
        const Instruction& i = code[w.pc];
        w.at = &i;
        executed++, total++;
        if (total > limit) throw Error("the program does not end");
        u32 m = w.mask;
        if (i.guard >= 0) m &= i.negated ? ~w.predicate(i.guard) : w.predicate(i.guard);
        switch (i.kind) {
            case PLAIN:
                w.pc++;
                if (m) i.run(w, i, m);
                if (w.yields) return;
                break;
            case BRANCH:
                if (m == w.mask) {
                    w.pc = i.target;
                } else if (!m) {
                    w.pc++;
                    break;
                } else {
                    w.others.push_back({i.target, m, false});
                    w.mask &= ~m, w.pc++;
                }
                if (!w.others.empty()) again();
                break;
            case EXIT:
                w.alive &= ~m, w.mask &= ~m, w.pc++;
                if (!w.alive) {
                    w.state = DONE, w.block->changes++;
                    return;
                }
                if (!w.mask) next = choose(w);
                break;
            case SWITCH:  // extra: number of places, then the places
                if (w.mask & ~m) w.others.push_back({w.pc + 1, w.mask & ~m, false});
                for (int l = 0; l < LANES; l++) {
                    if (!(m >> l & 1)) continue;
                    u32 which = w.words(i.slots[0])[l];
                    if (which >= i.extra[0]) throw Error(text("lane %d: place %u of %lld to go to", l, which, static_cast<long long>(i.extra[0])));
                    w.others.push_back({static_cast<int>(i.extra[1 + which]), 1u << l, false});
                }
                next = choose(w);
                break;
            default: {  // MEET
                if (!m) {
                    w.pc++;
                    break;
                }
                u32 members = i.members < 0 ? ALL : w.words(i.members)[__builtin_ctz(m)];
                u32 missing = members & w.alive & ~m;
                if (!missing) {
                    if (m & ~members) throw Error("a lane takes part that is not in the member mask");
                    w.pc++;
                    i.run(w, i, m);
                    if (w.state != RUNNING) return;
                    break;
                }
                if (missing & w.mask) throw Error(text("lanes %#x take no part in what waits for them", missing & w.mask));
                w.others.push_back({w.pc, w.mask, true});
                next = choose(w);
            }
        }
    }
}

void run(Block& b) {
    for (int k = 0; k < b.warp_count; k++) prepare(b, b.warps[k], k);
    int idle = 0;
    for (;;) {
        u64 before = b.changes, ended = 0;
        bool ran = false;
        for (Warp& w : b.warps) {
            if (w.state == RUNNING) {
                b.running = &w;
                run(w);
                ran = ran || !w.yields;
            }
            ended += w.state == DONE;
        }
        if (ended == b.warps.size()) break;
        idle = b.changes == before && !ran ? idle + 1 : 0;
        if (idle > MOST_ROUNDS) {
            std::string where;
            for (Warp& w : b.warps)
                if (w.state != DONE) where += text(" %d (line %d)", w.number, w.at->line);
            throw Error("no warp can go on:" + where);
        }
    }
    if (!b.bulk.empty()) throw Error(text("the program ends while %d copies to its shared memory are under way", static_cast<int>(b.bulk.size())));
}

}  // namespace
}  // namespace ptx

using namespace ptx;

extern "C" {

// The operands of an instruction, or null where there is none of this name.
const char* ptx_operands(const char* name, i32* kind) {
    auto found = registry().find(name);
    if (found == registry().end()) return nullptr;
    *kind = found->second.kind;
    return found->second.operands;
}

// table: first slot, slots, first extra, guard, negated, target, members, line of each instruction
void* ptx_program(i32 count, const char* const* names, const i32* table, const i32* slots, i32 slot_count, const i64* extra,
                  i32 extra_count, const i64* constants, i32 constant_count, const i64* specials, i32 special_count, i32 registers,
                  i32 local) {
    auto* p = new Program;
    p->slots.assign(slots, slots + slot_count);
    p->extra.assign(extra, extra + extra_count);
    p->constants.assign(constants, constants + constant_count);
    p->specials.assign(specials, specials + special_count);
    p->registers = registers, p->local = local;
    for (i32 n = 0; n < count; n++) {
        const i32* t = table + 8 * n;
        std::string name = names[n];
        Instruction i{};
        if (name == "bra") {
            i.kind = BRANCH;
        } else if (name == "brx.idx") {
            i.kind = SWITCH;
        } else if (name == "ret") {
            i.kind = EXIT;
        } else {
            const Entry& e = registry().at(name);
            i.run = e.run, i.kind = e.kind;
        }
        i.slots = p->slots.data() + t[0], i.count = t[1], i.extra = p->extra.data() + t[2];
        i.guard = t[3], i.negated = t[4], i.target = t[5], i.members = t[6], i.line = t[7];
        bool shared = (name == "ld" || name == "st") && (i.extra[0] == SHARED || i.extra[0] == GENERIC);
        if (shared && i.extra[1] * i.extra[2] < 4) p->piece = 1;
        p->code.push_back(i);
    }
    return p;
}
void ptx_forget(void* program) { delete static_cast<Program*>(program); }

// 0, or 1 with what went wrong. numbers: where: line, block, warp; then instructions executed
i32 ptx_run(const void* program, const u32* grid, i32 threads, i32 shared, const u8* parameters, i64 parameter_bytes,
            const Range* ranges, i32 range_count, const TensorMap* maps, i32 map_count, i32 races, u64 most, char* error,
            i32 error_bytes, i64* numbers) {
    Launch launch{};
    launch.program = static_cast<const Program*>(program);
    std::copy(grid, grid + 3, launch.grid);
    launch.threads = threads, launch.shared = shared;
    launch.parameters = parameters, launch.parameter_bytes = parameter_bytes;
    launch.ranges.assign(ranges, ranges + range_count), launch.maps.assign(maps, maps + map_count);
    launch.races = races;
    std::sort(launch.ranges.begin(), launch.ranges.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
    for (u32 z = 0; z < grid[2]; z++)
        for (u32 y = 0; y < grid[1]; y++)
            for (u32 x = 0; x < grid[0]; x++) {
                Block b(launch);
                b.index[0] = x, b.index[1] = y, b.index[2] = z;
                b.warp_count = (threads + LANES - 1) / LANES;
                b.memory.assign(shared, 0xFF), b.state.assign(shared, EMPTY);
                b.busy.assign(shared / 16 + 1, 0), b.unfenced.assign(shared, 0);
                b.warps.resize(b.warp_count);
                if (races && b.warp_count > 1) {
                    size_t pieces = shared / launch.program->piece + 1;
                    b.touches.writer.assign(pieces, 0xFF), b.touches.written.assign(pieces, 0);
                    b.touches.read.assign(pieces * b.warp_count, 0);
                }
                launch.most = launch.executed + most;
                try {
                    run(b);
                } catch (const Error& e) {
                    std::snprintf(error, error_bytes, "%s", e.what());
                    numbers[0] = b.running && b.running->at ? b.running->at->line : -1;
                    numbers[1] = x, numbers[2] = y, numbers[3] = z, numbers[4] = b.running ? b.running->number : -1;
                    return 1;
                }
            }
    numbers[0] = static_cast<i64>(launch.executed);
    return 0;
}

}  // extern "C"
