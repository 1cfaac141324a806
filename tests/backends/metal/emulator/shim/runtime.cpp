// The emulator: threads are fibers, and every memory access of a kernel is looked at. Kernels are compiled with
// -fsanitize=thread,bounds,alignment,shift-exponent and linked WITHOUT the sanitizers' libraries: the hooks that g++ emits are
// defined here, so that the source keeps raw pointers.
#include "metal_groups.h"

#include <csetjmp>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>
#include <ucontext.h>
#include <vector>
extern "C" char __ehdr_start[] __attribute__((visibility("hidden")));
extern "C" char _DYNAMIC[] __attribute__((visibility("hidden")));  // read-only data lie between the two

namespace mtl {
enum State { READY, SIMD, BARRIER, DONE };
struct Fiber { ucontext_t boot; jmp_buf at; bool started; State state; const char* op; int line; void* site; Ids ids; };
// The last writer and reader of a byte, as 1 + group · WIDTH + thread; MANY + s: several lanes of simdgroup s, MANY + 32:
// several simdgroups, ANY: several groups. Ticks count barriers, subs count simdgroup barriers; and whether it was atomic.
struct Mark { uint writer, wtick, wsub, reader, rtick, rsub; bool watomic, ratomic; };
// Marks are kept by word, in that of its first byte, until an access is no whole word.
struct Region { uintptr_t lo, hi; int index; bool constant; Mark* marks; void* mapped; size_t size; bool by_byte; uint64_t read, written, wide; };
const uint NONE = 0, ANY = ~0u, WIDTH = 2048, MANY = 1024;
// A threadgroup array has a room of its own, so that one too far meets no neighbour; its marks begin at `first`.
struct Room { uintptr_t lo, hi; size_t first; };
enum Access { READ = 1, WRITE = 2, ATOMIC = 4 };
const size_t STACK = 128 << 10, GAP = size_t(1) << 32, ROOM = 128 << 10, ROOMS = 64;
const uint64_t MOST_STEPS = uint64_t(4) << 30;

static std::vector<Fiber> fibers;
static std::vector<Region> regions;
static Region shared;  // all arrays of threadgroup memory, one after the other
static std::vector<Mark> shared_marks;
static std::vector<Room> rooms;
static const Array* declared;
static char* shared_memory;
static Fiber* cur;
static char* stacks;
static jmp_buf sched;
static Slot slots[32][2][32];
static uint parity[32], sub_tg[32], sub_device[32], width[32], tick_tg, tick_device, group_index;
static uint64_t steps, simd_operations, barriers;
static char* message;
static void (*entry)(void**);
static void** arguments;

static void fail(const char* form, ...) {
  va_list v; va_start(v, form); vsnprintf(message, 512, form, v); va_end(v);
  if (cur) _longjmp(sched, 1);
}
static size_t place(void* address) { return (char*)address - __ehdr_start - 1; }
static void count() { if (++steps > MOST_STEPS) fail("endless: more than %lu accesses and simd operations in a launch", (unsigned long)MOST_STEPS); }
static void yield() { if (!_setjmp(cur->at)) _longjmp(sched, 1); }
static void body() { entry(arguments); cur->state = DONE; _longjmp(sched, 1); }
static void resume(Fiber& f) {
  cur = &f;
  if (!_setjmp(sched)) { if (f.started) _longjmp(f.at, 1); f.started = true; setcontext(&f.boot); }
  cur = nullptr;
}
static void stop_at(State state, const char* op, int line, void* site) {
  count(); cur->state = state; cur->op = op; cur->line = line; cur->site = site; yield();
}
const Ids& ids() { return cur->ids; }
uint lane() { return cur->ids.lane; }
uint lanes() { return width[cur->ids.simd]; }
void out_of_simdgroup(const char* op, uint lane, int line) {
  fail("out of range: %s reads lane %u of a simdgroup of %u, thread %u of group %u, at line %d", op, lane, lanes(), cur->ids.flat, group_index, line);
}
const Slot* exchange(const void* v, size_t n, const char* op, int line, void* site) {
  uint s = cur->ids.simd; Slot* out = slots[s][parity[s]];  // two buffers: a lane may be one operation ahead
  std::memcpy(out + cur->ids.lane, v, n);
  stop_at(SIMD, op, line, site);
  return out;
}
static const char* const ORDERED[] = {"nothing", "device", "threadgroup", "both"};  // what a barrier orders, by its flags
static bool orders_device(const char* what) { return what == ORDERED[1] || what == ORDERED[3]; }
static bool orders_threadgroup(const char* what) { return what == ORDERED[2] || what == ORDERED[3]; }
void barrier(int flags, int line, void* site) { stop_at(BARRIER, ORDERED[flags & 3], line, site); }
void simdgroup_barrier(int flags, int line, void* site) { stop_at(SIMD, ORDERED[flags & 3], line, site); }
void* shared_array(const Array* made) { return (void*)rooms[made - declared].lo; }

static uint me() { return 1 + group_index * WIDTH + cur->ids.flat; }
static uint group_of(uint who) { return (who - 1) / WIDTH; }
static uint simd_of(uint who) { who = (who - 1) % WIDTH; return who < MANY ? who / 32 : who - MANY; }
static bool concurrent(uint who, uint tick, uint s, uint now, uint sub) {
  if (who == NONE || who == me()) return false;
  if (who == ANY || group_of(who) != group_index) return true;  // nothing orders two groups
  if (tick != now) return false;
  return simd_of(who) != cur->ids.simd || s == sub;
}
static bool unordered(uint who, uint tick, uint now) {  // may be concurrent with some thread
  return who == ANY || (who != NONE && group_of(who) == group_index && tick == now);
}
static uint joined(uint who) {  // with this thread
  if (who == ANY || group_of(who) != group_index) return ANY;
  return 1 + group_index * WIDTH + MANY + (simd_of(who) == cur->ids.simd ? cur->ids.simd : 32);
}
// The memory, and where its marks are; nullptr: memory that needs no watching.
static Region* find(uintptr_t p, size_t n, bool write, void* ret, size_t& from) {
  uintptr_t stack = uintptr_t(stacks) + (cur - fibers.data()) * STACK, base = uintptr_t(shared_memory);
  if (p >= stack && p + n <= stack + STACK) return nullptr;
  const char* what = write ? "write" : "read";
  if (p >= base && p < base + rooms.size() * ROOM) {
    const Room& x = rooms[(p - base) / ROOM];
    from = x.first + (p - x.lo);
    if (p >= x.lo && p + n <= x.hi) return &shared;
    fail("out of range: %s of %zu bytes at byte %ld of a threadgroup array (%zu bytes), thread %u of group %u, at @%zx", what, n, long(p - x.lo), x.hi - x.lo, cur->ids.flat, group_index, place(ret));
  }
  for (auto& x : regions) if (p >= x.lo && p + n <= x.hi) { from = p - x.lo; return &x; }
  if (p >= uintptr_t(__ehdr_start) && p + n <= uintptr_t(_DYNAMIC) && !write) return nullptr;  // tables in constant memory
  for (auto& x : regions)
    if (p + GAP / 2 >= x.lo && p < x.hi + GAP / 2)
      fail("out of range: %s of %zu bytes at byte %ld of argument %d (%zu bytes), thread %u of group %u, at @%zx", what, n, long(p - x.lo), x.index, x.hi - x.lo, cur->ids.flat, group_index, place(ret));
  fail("out of range: %s of %zu bytes outside every buffer, thread %u of group %u, at @%zx", what, n, cur->ids.flat, group_index, place(ret));
  return nullptr;
}
static void race(const Mark& m, bool of_write, bool write, const Region* r, void* ret) {
  uint o = of_write ? m.writer : m.reader;
  char other[64] = "several threads";
  if (o != ANY && (o - 1) % WIDTH < MANY) snprintf(other, 64, "thread %u of group %u", (o - 1) % WIDTH, group_of(o));
  fail("race: thread %u of group %u %s %s memory that %s %s with no barrier between, at @%zx", cur->ids.flat, group_index,
       write ? "writes" : "reads", r == &shared ? "threadgroup" : "device", other, of_write ? "wrote" : "read", place(ret));
}
static void access(uintptr_t p, size_t n, int kind, void* ret) {
  if (!cur) return;
  count();
  bool write = kind & WRITE, atomic = kind & ATOMIC;
  size_t from = 0;
  Region* r = find(p, n, write, ret, from);
  if (atomic && p % n) fail("misaligned: an address ends in %x, thread %u of group %u, at @%zx", unsigned(p & 15), cur->ids.flat, group_index, place(ret));
  if (!r) return;
  if (kind & READ) r->read += n;
  if (write) r->written += n;
  if (!write && n == 16) r->wide += n;
  if (r->constant && write) fail("read-only: thread %u of group %u writes argument %d, at @%zx", cur->ids.flat, group_index, r->index, place(ret));
  if (r->constant) return;
  bool in_group = r == &shared;
  uint self = me(), now = in_group ? tick_tg : tick_device, s = (in_group ? sub_tg : sub_device)[cur->ids.simd];
  if (!r->by_byte && (from % 4 || n % 4)) {
    for (size_t i = 0; i < r->hi - r->lo; ++i) r->marks[i] = r->marks[i / 4 * 4];
    r->by_byte = true;
  }
  for (size_t i = from; i < from + n; i += r->by_byte ? 1 : 4) {
    Mark& m = r->marks[i];
    if (in_group && kind & READ && m.writer == NONE)
      fail("uninitialised: thread %u of group %u reads threadgroup memory nobody wrote, at @%zx", cur->ids.flat, group_index, place(ret));
    bool w = concurrent(m.writer, m.wtick, m.wsub, now, s), d = concurrent(m.reader, m.rtick, m.rsub, now, s);
    bool writes_race = w && !(atomic && m.watomic), reads_race = write && d && !(atomic && m.ratomic);
    if (writes_race || reads_race) race(m, writes_race, write, r, ret);
    if (write) { m.watomic = atomic && (m.watomic || !unordered(m.writer, m.wtick, now)); m.writer = w ? joined(m.writer) : self; m.wtick = now; m.wsub = s; }
    else { m.ratomic = atomic && (m.ratomic || !unordered(m.reader, m.rtick, now)); m.reader = d ? joined(m.reader) : self; m.rtick = now; m.rsub = s; }
  }
}
void atomic_access(void* p, size_t n, bool reads, bool writes, void* ret) {
  access(uintptr_t(p), n, ATOMIC | (reads ? READ : 0) | (writes ? WRITE : 0), ret);
}

static const char* where(const Fiber& f, char* b) {
  if (f.state == DONE) return "has returned";
  bool fence = orders_device(f.op) || orders_threadgroup(f.op) || f.op == ORDERED[0];
  snprintf(b, 96, "is at %s, line %d", f.state == BARRIER ? "threadgroup_barrier" : fence ? "simdgroup_barrier" : f.op, f.line);
  return b;
}
static void agree(uint from, uint n, State wanted, const char* what) {  // all of them at the same place, or an error
  char a[96], b[96]; uint first = from;
  for (uint t = from; t < from + n; ++t) if (fibers[t].state == wanted) { first = t; break; }
  const Fiber& x = fibers[first];
  for (uint t = from; t < from + n; ++t) {
    const Fiber& y = fibers[t];
    if (y.state != wanted || y.line != x.line || y.site != x.site || strcmp(y.op, x.op))
      return fail("divergence in group %u: %s %u %s, %s %u %s", group_index, what, first - from, where(x, a), what, t - from, where(y, b));
  }
}
static bool run_simdgroup(uint s, uint n, bool backwards) {  // until each lane has returned or waits at a barrier
  uint from = 32 * s; width[s] = n - from < 32 ? n - from : 32;
  for (;;) {
    bool any = false;
    for (uint j = 0; j < width[s]; ++j) {
      Fiber& f = fibers[from + (backwards ? width[s] - 1 - j : j)];
      if (f.state == READY) resume(f);
      if (*message) return false;
      any |= f.state == SIMD;
    }
    if (!any) return true;
    agree(from, width[s], SIMD, "lane");
    if (*message) return false;
    if (orders_threadgroup(fibers[from].op)) ++sub_tg[s];
    if (orders_device(fibers[from].op)) ++sub_device[s];
    parity[s] ^= 1; ++simd_operations;
    for (uint j = 0; j < width[s]; ++j) fibers[from + j].state = READY;
  }
}
static void run_group(uint n, bool backwards) {
  uint simds = (n + 31) / 32;
  for (;;) {
    for (uint k = 0; k < simds; ++k) if (!run_simdgroup(backwards ? simds - 1 - k : k, n, backwards)) return;
    uint done = 0;
    for (uint t = 0; t < n; ++t) done += fibers[t].state == DONE;
    if (done == n) return;
    agree(0, n, BARRIER, "thread");
    if (*message) return;
    ++barriers;
    if (orders_threadgroup(fibers[0].op)) ++tick_tg;
    if (orders_device(fibers[0].op)) ++tick_device;
    for (uint t = 0; t < n; ++t) fibers[t].state = READY;
  }
}
}  // namespace mtl

using namespace mtl;
extern "C" {
void* mtl_alloc(size_t n, size_t offset, int index, int constant) {  // alone in 4 GiB of addresses: a wild index meets no neighbour
  size_t room = (n + offset + 4095) / 4096 * 4096;
  char* p = (char*)mmap(nullptr, GAP + room, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED || (room && mprotect(p + GAP / 2, room, PROT_READ | PROT_WRITE))) return nullptr;
  uintptr_t lo = uintptr_t(p) + GAP / 2 + offset;
  regions.push_back({lo, lo + n, index, bool(constant), constant ? nullptr : (Mark*)calloc(n + 4, sizeof(Mark)), p, GAP + room, false, 0, 0, 0});
  return (void*)lo;
}
// What the last launch did: bytes read and written of an argument, or of threadgroup memory (−1); simd operations, barriers;
// and of the bytes read those that came 16 at a time.
void mtl_counts(int index, uint64_t* out) {
  const Region* r = index < 0 ? &shared : &regions[index];
  out[0] = r->read; out[1] = r->written; out[2] = simd_operations; out[3] = barriers; out[4] = r->wide;
}
void mtl_free_all() { for (auto& r : regions) { munmap(r.mapped, r.size); free(r.marks); } regions.clear(); }
size_t mtl_memory(const Array* begin, const Array* end) {  // bytes of threadgroup memory
  size_t sum = 0;
  for (; begin != end; ++begin) sum += (begin->size + 15) / 16 * 16;
  return sum;
}
static void lay_out(const Array* begin, const Array* end) {  // no better aligned than their types ask for
  declared = begin; rooms.clear();
  if (!shared_memory) shared_memory = (char*)mmap(nullptr, ROOMS * ROOM, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  for (size_t first = 0; begin != end; first += (begin++->size + 15) / 16 * 16) {
    uintptr_t lo = uintptr_t(shared_memory) + rooms.size() * ROOM + ROOM / 2 + begin->aligned;
    rooms.push_back({lo, lo + begin->size, first});
  }
}
void mtl_launch(void (*fn)(void**), void** a, const uint* T, const uint* G, const Array* lo, const Array* hi, int backwards, char* error) {
  entry = fn; arguments = a; message = error; *error = 0; group_index = 0; cur = nullptr;
  steps = simd_operations = barriers = shared.read = shared.written = shared.wide = 0;
  uint most = G[0] * G[1] * G[2];
  if (most > 1024) return fail("a threadgroup of %u threads: at most 1024", most);
  size_t bytes = mtl_memory(lo, hi);
  if (bytes > 32768) return fail("%zu bytes of threadgroup memory: at most 32768", bytes);
  if (size_t(hi - lo) > ROOMS) return fail("%zu threadgroup arrays: at most %zu are emulated", size_t(hi - lo), ROOMS);
  lay_out(lo, hi);
  fibers.resize(1024);
  if (!stacks) stacks = (char*)mmap(nullptr, 1024 * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  uint3 groups((T[0] + G[0] - 1) / G[0], (T[1] + G[1] - 1) / G[1], (T[2] + G[2] - 1) / G[2]);
  for (uint z = 0; z < groups.z; ++z) for (uint y = 0; y < groups.y; ++y) for (uint x = 0; x < groups.x; ++x, ++group_index) {
    for (auto& room : rooms) std::memset((void*)room.lo, 0xff, room.hi - room.lo);  // NaN in every float type
    shared_marks.assign(bytes + 4, Mark{}); ++tick_tg; ++tick_device;
    shared = Region{0, bytes, -1, false, shared_marks.data(), nullptr, 0, false, shared.read, shared.written, shared.wide};
    uint3 at(x, y, z), size; uint n = 1;
    for (int d = 0; d < 3; ++d) { size[d] = metal::min(G[d], T[d] - at[d] * G[d]); n *= size[d]; }  // the last group may be ragged
    for (uint t = 0; t < n; ++t) {
      Fiber& f = fibers[t]; f.started = false; f.state = READY; f.op = ""; f.line = 0; f.site = nullptr;
      uint3 l(t % size.x, t / size.x % size.y, t / size.x / size.y);
      f.ids = {at * uint3(G[0], G[1], G[2]) + l, at, l, size, groups, uint3(T[0], T[1], T[2]), t, t % 32, t / 32};
      getcontext(&f.boot); f.boot.uc_stack.ss_sp = stacks + t * STACK; f.boot.uc_stack.ss_size = STACK; f.boot.uc_link = nullptr;
      makecontext(&f.boot, body, 0);
    }
    run_group(n, backwards);
    if (*message) return;
  }
}
#define HOOK(n)                                                                                   \
  void __tsan_read##n(void* p) { access(uintptr_t(p), n, READ, __builtin_return_address(0)); }   \
  void __tsan_write##n(void* p) { access(uintptr_t(p), n, WRITE, __builtin_return_address(0)); }   \
  void __tsan_unaligned_read##n(void* p) { access(uintptr_t(p), n, READ, __builtin_return_address(0)); } \
  void __tsan_unaligned_write##n(void* p) { access(uintptr_t(p), n, WRITE, __builtin_return_address(0)); }
HOOK(1) HOOK(2) HOOK(4) HOOK(8) HOOK(16)
void __tsan_read_range(void* p, size_t n) { access(uintptr_t(p), n, READ, __builtin_return_address(0)); }
void __tsan_write_range(void* p, size_t n) { access(uintptr_t(p), n, WRITE, __builtin_return_address(0)); }
void __tsan_func_entry(void*) {} void __tsan_func_exit() {} void __tsan_init() {}
struct Place { const char* file; uint line, column; };
void __ubsan_handle_out_of_bounds(Place* at, size_t i) {
  fail("out of range: index %ld of a declared array, thread %u of group %u, at line %u", long(i), cur->ids.flat, group_index, at->line);
}
void __ubsan_handle_shift_out_of_bounds(Place* at, uintptr_t, uintptr_t by) {
  fail("out of range: a shift by %ld, thread %u of group %u, at @%zx", long(by), cur->ids.flat, group_index, place(__builtin_return_address(0)));
}
void __ubsan_handle_type_mismatch_v1(Place* at, uintptr_t p) {
  (void)at; fail("misaligned: an address ends in %x, thread %u of group %u, at @%zx", unsigned(p & 15), cur->ids.flat, group_index, place(__builtin_return_address(0)));
}
}
