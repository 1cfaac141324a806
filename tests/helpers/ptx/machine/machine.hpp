// What a running kernel is made of: instructions, warps with their registers, shared memory that knows its state.
//
// A register is a slot of 32 lanes: 32 words (16-bit registers have the lower halves), 32 double words, or one word of
// 32 predicate bits. Immediates and special registers are slots, too, filled when a warp starts.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace ptx {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i8 = int8_t;
using i16 = int16_t;
using i32 = int32_t;
using i64 = int64_t;

constexpr int LANES = 32;
constexpr u32 ALL = ~0u;
constexpr u32 POISON = 0xFFFDFFFD;       // NaN as float32, float16 and bfloat16
constexpr u64 SHARED_WINDOW = 1ull << 56;  // generic addresses of other spaces than global
constexpr u64 PARAM_WINDOW = 2ull << 56;
constexpr u64 LOCAL_WINDOW = 3ull << 56;
constexpr u32 SHARED_BEGIN = 1024;       // what lies before belongs to the system
constexpr u64 WINDOW = 0xFFull << 56;

struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

std::string text(const char* format, ...);

struct Warp;
struct Instruction;
using Handler = void (*)(Warp&, const Instruction&, u32 mask);

enum Kind { PLAIN, BRANCH, EXIT, MEET, SWITCH };  // MEET: lanes of the member mask must come together first

struct Instruction {
    Handler run;
    const i32* slots;  // byte offsets of operands in the register file
    const i64* extra;  // numbers that are no operands
    i32 count;         // of slots
    i32 kind;
    i32 guard;  // slot of a predicate, or -1
    i32 negated;
    i32 target;   // of a branch
    i32 members;  // MEET: slot of the member mask, or -1 for all lanes
    i32 line;
};

// How an instruction is written in PTX, what runs it, and its operands: w 32 bits or fewer, q 64 bits, p predicate,
// * more of the one before.
struct Entry {
    Handler run;
    const char* operands;
    int kind;
};
std::map<std::string, Entry>& registry();
struct Add {
    Add(const char* name, const char* operands, Handler run, int kind = PLAIN) { registry()[name] = {run, operands, kind}; }
};

struct Range {
    u64 begin, end;
    i32 writable;
    i32 number;  // of the parameter
};

struct TensorMap {
    u64 address;
    u64 parameter;  // where it lies among the parameters
    i32 rank, swizzle, element, nan;
    i64 shape[5], strides[5], box[5];  // innermost first; strides in bytes
};

enum State : u8 { EMPTY, READY, COMING };  // of a byte of shared memory

// When warps last touched each piece of shared memory, in their own time: who orders after whom is known by clocks.
struct Touches {
    std::vector<u8> writer;
    std::vector<u32> written, read;  // read: [piece, warp]
};

struct Copy {  // into shared memory, under way
    u32 to;
    u64 from;  // 0 bytes of source are zeros
    u32 bytes, source;
    u32 warp, lane;
};

struct BulkCopy {
    u32 to, bytes, barrier;
    u64 from;
    const TensorMap* map;  // nullptr: plain bytes
    i64 at[5];
    u32 warp;
    std::vector<u32> clock;  // of the warp when it started
};

struct Arrivals {  // an mbarrier
    i64 expected, pending, bytes;
    u32 phase;
    std::vector<u32> clock, done;  // of those that arrived; of the last phase that ended
};

struct Barrier {
    u32 arrived = 0;
    std::vector<u32> clock;
    std::vector<int> waiting;
};

struct Program {
    std::vector<Instruction> code;
    std::vector<i32> slots;
    std::vector<i64> extra;
    std::vector<i64> constants;  // slot, bytes, value
    std::vector<i64> specials;   // slot, which
    i32 registers = 0;           // bytes
    i32 local = 0;               // bytes of a thread
    u32 piece = 4;               // bytes that are watched together: 1 where some access is smaller
};

struct Launch {
    const Program* program;
    u32 grid[3];
    i32 threads, shared;  // where shared memory ends
    const u8* parameters;
    i64 parameter_bytes;
    std::vector<Range> ranges;
    std::vector<TensorMap> maps;
    bool races;
    u64 most;  // instructions of a program
    u64 executed = 0;
};

struct Block {
    Launch& launch;
    u32 index[3];
    int warp_count;
    std::vector<u8> memory;
    std::vector<State> state;
    Touches touches;            // empty: not watched
    std::vector<u32> busy;      // by 16 bytes: products under way that read them
    std::vector<u8> unfenced;   // by byte: written, and no fence since then shows it to products
    std::map<u32, Arrivals> mbarriers;
    std::deque<BulkCopy> bulk;
    Barrier barriers[16];
    std::vector<Warp> warps;
    const Warp* running = nullptr;
    u64 changes = 0;  // what may let a waiting warp go on

    explicit Block(Launch& l) : launch(l) {}
};

struct Group {  // lanes at one place
    int pc;
    u32 mask;
    bool blocked;
};

constexpr int RUNNING = 0, WAITING = 1, DONE = 2;

struct Warp {
    Block* block = nullptr;
    int number = 0;
    int state = RUNNING;
    bool yields = false;
    std::vector<u8> file;  // registers
    std::vector<u8> local;
    std::vector<Group> others;
    std::vector<std::vector<Copy>> open;               // copies of each lane that are in no group yet
    std::vector<std::deque<std::vector<Copy>>> groups;  // of each lane, oldest first
    std::deque<std::vector<u32>> products;  // addresses of 16 bytes that they read, by group, oldest first
    std::vector<u32> clock;
    u32 alive = ALL, mask = ALL;
    int pc = 0;
    const Instruction* at = nullptr;
    i64 tried = -1;  // the mbarrier that it last asked in vain

    u32* words(i32 slot) { return reinterpret_cast<u32*>(file.data() + slot); }
    u64* doubles(i32 slot) { return reinterpret_cast<u64*>(file.data() + slot); }
    u32& predicate(i32 slot) { return *reinterpret_cast<u32*>(file.data() + slot); }

    void put(i32 slot, const u32* x, u32 m) {
        u32* to = words(slot);
        if (m == ALL) {
            std::memcpy(to, x, 4 * LANES);
            return;
        }
        for (int l = 0; l < LANES; l++) to[l] = m >> l & 1 ? x[l] : to[l];
    }
    void put(i32 slot, const u64* x, u32 m) {
        u64* to = doubles(slot);
        if (m == ALL) {
            std::memcpy(to, x, 8 * LANES);
            return;
        }
        for (int l = 0; l < LANES; l++) to[l] = m >> l & 1 ? x[l] : to[l];
    }
    void put_predicate(i32 slot, u32 bits, u32 m) { predicate(slot) = (predicate(slot) & ~m) | (bits & m); }
};

// Memory, by lane. `bytes` is the size of the whole access, which must be aligned to it. fresh: what will be written,
// where it is known: several warps may write the same.
u8* global_at(Warp&, u64 address, u32 bytes, bool write, int lane);
u8* shared_at(Warp&, u64 address, u32 bytes, bool write, int lane, const u8* fresh = nullptr);
u8* memory_at(Warp&, int space, u64 address, u32 bytes, bool write, int lane, const u8* fresh = nullptr);
enum Space { GENERIC, GLOBAL, SHARED, LOCAL, PARAM };

void join(std::vector<u32>& into, const std::vector<u32>& other);
void finish_copies(Block&, u32 barrier);  // bulk copies that arrive there
std::vector<u32>& tick(Warp&);            // its clock, after a step

// Lanes of a slot as they are
inline float as_float(u32 x) {
    float f;
    std::memcpy(&f, &x, 4);
    return f;
}
inline u32 as_bits(float f) {
    u32 x;
    std::memcpy(&x, &f, 4);
    return x;
}
inline double as_double(u64 x) {
    double f;
    std::memcpy(&f, &x, 8);
    return f;
}
inline u64 as_bits(double f) {
    u64 x;
    std::memcpy(&x, &f, 8);
    return x;
}
inline float half_to_float(u16 x) {
    _Float16 h;
    std::memcpy(&h, &x, 2);
    return static_cast<float>(h);
}
inline float brain_to_float(u16 x) { return as_float(static_cast<u32>(x) << 16); }
u16 float_to_half(float x);    // to nearest even
u16 double_to_half(double x);  // likewise, in one step
u16 float_to_brain(float x);

}  // namespace ptx
