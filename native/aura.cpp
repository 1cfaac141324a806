// The C interface: cuts a call into independent pieces by its shapes alone, hands them to the threads of torch, and
// lets the chosen instruction set compute them. Results do not depend on the number of threads.
#include "aura.h"
#include "slots.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

using namespace aura;
#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

const Isa* const ISAS[] = {
#if defined(__x86_64__)
    &isa_avx512, &isa_avx2,
#elif defined(__aarch64__)
    &isa_neon,
#endif
    &isa_generic};
constexpr int ISA_COUNT = sizeof ISAS / sizeof *ISAS;

constexpr int64_t CHUNK = 2048;            // sequences longer than this are cut into pieces of 1,024 tokens or more …
constexpr int64_t PIECES = 16;             // … until a sequence and KV head have this many, or twice as many
constexpr int64_t SERIAL_WORK = 3'000'000; // multiplications below which one thread is faster
constexpr int64_t SPAWN_WORK = 200'000'000;  // the same where threads must be started for the call
constexpr int64_t KEPT_BYTES = 8 << 20;    // weights that are held between two passes, or what keeps the threads busy

struct Job {
  std::atomic<int64_t> next;
  int64_t count;
  void (*piece)(void*, int64_t);
  void* context;
};

void work_on(int64_t, int64_t, void* p) {
  Job& job = *(Job*)p;
  for (int64_t i; (i = job.next.fetch_add(1, std::memory_order_relaxed)) < job.count;) job.piece(job.context, i);
}

// Calls body(i) for i below count, on several threads if the work is worth it.
template <class Body> void for_each(const Threads& threads, int64_t count, int64_t work, Body&& body) {
  Job job{{0}, count, [](void* p, int64_t i) { (*(Body*)p)(i); }, &body};
  const int64_t n = threads.count < count ? threads.count : count;
  if (n <= 1 || work < (threads.parallel_for ? SERIAL_WORK : SPAWN_WORK)) return work_on(0, 1, &job);
  if (threads.parallel_for) {
    threads.parallel_for(0, n, 1, work_on, &job);
    work_on(0, 1, &job);  // whatever a pool that declined has left
    return;
  }
  std::vector<std::thread> own;
  try {
    for (int64_t i = 1; i < n; i++) own.emplace_back(work_on, 0, 1, &job);
  } catch (const std::system_error&) {
  }
  work_on(0, 1, &job);
  for (std::thread& t : own) t.join();
}

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How the keys of a group are cut, from its own sequence alone: no result depends on what else is in a batch. A power of
// two, so that 2 or 4 threads get equal shares of an odd number of heads, too. `groups` are those of the same keys.
int64_t auto_splits(int64_t groups, int64_t visible) {
  int64_t splits = 1;
  while (splits * CHUNK < visible && splits * groups < PIECES) splits *= 2;
  return splits;
}

struct Plan {
  std::vector<Group> groups;
  std::vector<int64_t> first_unit;  // of each group, and one more
  int64_t parts = 0, work = 0;      // rows of partial results; multiplications
};

void find_visible(const Attend& a, int64_t from, int64_t length, Group* g) {
  g->spans = visible_spans(a, g->lowest, g->highest, from, length, g->begin, g->end);
  int64_t last = -1;  // spans begin on the grid of tiles, and those that then overlap are one
  for (int64_t i = 0; i < g->spans; i++) {
    const int64_t grid = g->begin[i] / TILE * TILE, begin = grid < from ? from : grid;
    if (last < 0 || begin > g->end[last]) g->begin[++last] = begin;
    g->end[last] = g->end[i];
  }
  g->spans = last + 1, g->visible = 0;
  for (int64_t i = 0; i < g->spans; i++) g->visible += g->end[i] - g->begin[i];
}

// What the rows of a group do with the keys uncompressed: one part, whose keys are few.
Group group_beside(const Attend& uncompressed, const Group& g) {
  Group to = g;
  find_visible(uncompressed, 0, uncompressed.pages->lengths[g.seq], &to);
  to.chunk = to.visible;
  return to;
}

Plan plan(const Attend& a, const Attend& uncompressed) {
  const int64_t kv_heads = a.pages ? a.pages->kv_heads : a.dense->kv_heads, group = a.heads / kv_heads;
  const int64_t dims = a.pages ? a.pages->key->dim + a.pages->value->dim : a.dense->key->dim + a.dense->value->dim;
  Plan p;
  for (int64_t seq = 0; seq < a.seqs; seq++) {
    const int64_t queries = a.starts[seq + 1] - a.starts[seq], base = a.ends[seq] - queries;
    const int64_t length = a.pages ? a.pages->lengths[seq] : a.ends[seq];
    const int64_t from = a.pages ? 0 : a.ends[seq] - (a.dense->starts[seq + 1] - a.dense->starts[seq]);
    for (int64_t head = 0; head < kv_heads; head++)
      for (int64_t first = 0; first < queries * group; first += ROWS) {
        Group g{};
        g.seq = seq, g.kv_head = head, g.first = first;
        g.rows = queries * group - first < ROWS ? queries * group - first : ROWS;
        g.lowest = base + first / group, g.highest = base + (first + g.rows - 1) / group;
        find_visible(a, from, length, &g);
        g.uncompressed = a.uncompressed && group_beside(uncompressed, g).visible;
        p.groups.push_back(g);
      }
  }
  p.first_unit.push_back(0);
  for (Group& g : p.groups) {
    const int64_t rows = (a.starts[g.seq + 1] - a.starts[g.seq]) * group;
    int64_t splits = a.splits ? a.splits : auto_splits(divide_up(rows, ROWS), g.visible);
    g.chunk = g.visible ? divide_up(g.visible, splits) : 0;
    if (!a.splits) g.chunk = divide_up(g.chunk, 64) * 64;
    g.splits = (g.visible ? divide_up(g.visible, g.chunk) : 1) + g.uncompressed;
    g.part = p.parts;
    if (g.splits > 1 || a.threshold > 0) p.parts += g.splits * g.rows;
    p.first_unit.push_back(p.first_unit.back() + g.splits);
    p.work += g.visible * dims * (g.rows + 4) + g.rows * 2000;
  }
  return p;
}

// A table on a grid becomes exact with small numbers, which leaves most room to queries and weights; others get the
// multiple from low to high that rounds best.
void fix_levels(const float* levels, int count, int low, int high, Codec::Fixed* to) {  // fmax here breaks GCC 12 for ARM
  double most = 0, best = 1e9;
  for (int i = 0; i < count; i++) most = std::max(most, double(std::fabs(levels[i])));
  auto error = [&](int m) {
    double worst = 0;
    for (int i = 0; i < count && worst < best; i++) {
      const double x = levels[i] / most * m;
      worst = std::max(worst, std::fabs(x - std::rint(x)) / m);
    }
    return worst;
  };
  int multiple = 1;
  bool exact = most == 0;
  for (int m = 1; m <= 1024 && !exact; m++) if (error(m) < 2e-7) multiple = m, exact = true;
  for (int m = low; m <= high && !exact; m++) { const double e = error(m); if (e < best) best = e, multiple = m; }
  to->unit = float(most / multiple), to->most = multiple, to->exact = exact;
  for (int i = 0; i < 256; i++)
    to->level[i] = most > 0 ? int16_t(std::rint(levels[i & (count - 1)] / most * multiple)) : 0;
}

// What is left of the levels, as int16 no larger than theirs: queries that fit the levels fit these, too.
void fix_rest(const float* levels, int count, const Codec::Fixed& fixed, Codec::Fixed* to) {
  double rest[256], most = 0;
  for (int i = 0; i < 256; i++) rest[i] = fixed.exact ? 0 : levels[i & (count - 1)] - double(fixed.level[i]) * fixed.unit;
  for (double x : rest) most = std::max(most, std::fabs(x));
  to->unit = float(most / fixed.most), to->most = fixed.most, to->exact = 0;
  for (int i = 0; i < 256; i++) to->level[i] = most > 0 ? int16_t(std::rint(rest[i] / most * fixed.most)) : 0;
}

}  // namespace

EXPORT int64_t aura_version() { return AURA_VERSION; }
EXPORT int64_t aura_isa_count() { return ISA_COUNT; }
EXPORT const char* aura_isa_name(int64_t i) { return ISAS[i]->name; }
EXPORT int64_t aura_isa_supported(int64_t i) { return ISAS[i]->supported(); }

// A codec that lives until the process ends. numbers: dim, bits, dtype, lsq, base.
EXPORT const Codec* aura_codec(const int64_t* numbers, const float* levels, const float* bounds, const float* sign,
                               const float* paley) {
  Codec* c = new Codec();
  c->dim = numbers[0], c->bits = numbers[1], c->dtype = numbers[2], c->lsq = numbers[3], c->base = numbers[4];
  const int64_t item = c->dtype == F32 ? 4 : 2;
  c->row_bytes = c->bits == 16 ? c->dim * item : c->dim * c->bits / 8;
  c->scale_bytes = c->bits == 16 ? 0 : item;
  if (c->bits == 16) return c;
  const int count = 1 << c->bits;
  std::memcpy(c->levels, levels, 4 * count);
  for (int i = 0; i < 256; i++) c->bounds[i] = i < count - 1 ? bounds[i] : INFINITY;
  for (int i = count; i < 256; i++) c->levels[i] = 0;
  if (c->base) std::memcpy(c->sign, sign, 4 * c->dim), std::memcpy(c->paley, paley, 4 * c->base * c->base);
  fix_levels(c->levels, count, c->bits > 4 ? 24576 : 12288, c->bits > 4 ? 32767 : 16383, &c->keys);
  fix_rest(c->levels, count, c->keys, &c->key_rest);
  fix_levels(c->levels, count, 10240, 14336, &c->values);
  return c;
}

// The most that any lengths within the capacity need.
EXPORT int64_t aura_attend_workspace(int64_t seqs, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t capacity,
                                     int64_t value_dim, int64_t splits) {
  const int64_t most = splits ? splits : auto_splits(1, capacity), pieces = 2 * PIECES * ROWS * seqs * kv_heads;
  int64_t rows = most > 1 ? tokens * heads * most : 0;
  if (!splits && rows > pieces) rows = pieces;
  return 4 * rows * part_floats(value_dim);
}

// A part of a group in two passes (sparse.hpp).
struct Unit {
  const Attend* call;
  Group group;                  // as this call sees it
  int64_t split, kept, part;    // where its weights and its partial result begin
  int64_t number;               // of its group
};

// With a threshold: some groups at a time, as many as have room for their weights.
static void attend_sparse(int64_t isa, const Attend& a, const Attend& uncompressed, const Plan& p, int64_t stride) {
  static thread_local std::vector<uint64_t> memory;  // stays from call to call
  std::vector<float> parts(p.parts * stride);
  const int64_t count = int64_t(p.groups.size());
  for (int64_t first = 0, next = 0; first < count; first = next) {
    std::vector<Unit> units;
    int64_t bytes = 0;
    for (; next < count && (bytes < KEPT_BYTES || int64_t(units.size()) < 4 * a.threads.count); next++) {
      const Group& g = p.groups[next];
      for (int64_t s = 0; s < g.splits; s++) {
        const int64_t part = (g.part + s * g.rows) * stride;
        if (g.uncompressed && s == g.splits - 1)
          units.push_back({&uncompressed, group_beside(uncompressed, g), 0, bytes, part, next - first});
        else
          units.push_back({&a, g, s, bytes, part, next - first});
        bytes += divide_up(kept_bytes(units.back().group), 64) * 64;
      }
    }
    if (int64_t(memory.size()) < bytes / 8) memory.resize(bytes / 8);
    uint8_t* const kept = (uint8_t*)memory.data();
    std::vector<std::atomic<int64_t>> left(next - first);
    for (int64_t i = first; i < next; i++) left[i - first] = p.groups[i].splits;
    for_each(a.threads, int64_t(units.size()), p.work, [&](int64_t i) {
      const Unit& u = units[i];
      ISAS[isa]->weigh(*u.call, u.group, u.split, kept + u.kept, parts.data() + u.part);
    });
    for_each(a.threads, int64_t(units.size()), p.work, [&](int64_t i) {
      const Unit& u = units[i];
      const Group& g = p.groups[first + u.number];
      const float* group_parts = parts.data() + g.part * stride;
      ISAS[isa]->attend_kept(*u.call, u.group, kept + u.kept, group_parts, parts.data() + u.part);
      if (left[u.number].fetch_sub(1, std::memory_order_acq_rel) == 1) ISAS[isa]->finish(a, g, group_parts);
    });
  }
}

static void attend_all(int64_t isa, const Attend& a) {
  Attend uncompressed = a;
  uncompressed.pages = a.uncompressed, uncompressed.only_uncompressed = 1;
  const Plan p = plan(a, uncompressed);
  const int64_t stride = part_floats(a.pages ? a.pages->value->dim : a.dense->value->dim);
  if (a.threshold > 0) return attend_sparse(isa, a, uncompressed, p, stride);
  std::vector<float> own;
  float* parts = a.workspace;
  if (!parts && p.parts) own.resize(p.parts * stride), parts = own.data();
  std::vector<std::atomic<int64_t>> left(p.groups.size());
  for (size_t i = 0; i < p.groups.size(); i++) left[i] = p.groups[i].splits;
  std::vector<int32_t> group_of(p.first_unit.back());
  for (size_t i = 0; i < p.groups.size(); i++)
    for (int64_t u = p.first_unit[i]; u < p.first_unit[i + 1]; u++) group_of[u] = int32_t(i);
  for_each(a.threads, p.first_unit.back(), p.work, [&](int64_t unit) {
    const int64_t i = group_of[unit], split = unit - p.first_unit[i];
    const Group& g = p.groups[i];
    if (g.splits == 1) return ISAS[isa]->attend(a, g, 0, nullptr);
    float* group_parts = parts + g.part * stride;
    float* part = group_parts + split * g.rows * stride;
    if (g.uncompressed && split == g.splits - 1) ISAS[isa]->attend(uncompressed, group_beside(uncompressed, g), 0, part);
    else ISAS[isa]->attend(a, g, split, part);
    if (left[i].fetch_sub(1, std::memory_order_acq_rel) == 1) ISAS[isa]->finish(a, g, group_parts);
  });
}

static int64_t fit_work(const Fit& f, const Codec& c) { return f.size < 0 ? 0 : c.dim * 200 + f.size * 60; }

// All vectors in tiles, `batch` tiles a task. Fitted ones take long: few of them are divided among all threads.
template <class Body> static void in_tiles(const Threads& threads, int64_t vectors, int64_t batch, bool fitted, int64_t work, Body&& body) {
  int64_t lanes = LANES;
  if (fitted) batch = 1, lanes = divide_up(vectors, threads.count > 1 ? threads.count : 1);
  if (lanes > LANES) lanes = LANES;
  if (lanes < 1) return;
  const int64_t tiles = divide_up(vectors, lanes);
  for_each(threads, divide_up(tiles, batch), work, [&](int64_t i) {
    for (int64_t t = i * batch; t < (i + 1) * batch && t < tiles; t++)
      body(t * lanes, vectors - t * lanes < lanes ? vectors - t * lanes : lanes);
  });
}

EXPORT void aura_encode(int64_t isa, const Encode* call) {
  const int64_t vectors = call->n * call->heads;
  const int64_t work = vectors * (call->codec->dim * 30 + fit_work(call->fit, *call->codec));
  in_tiles(call->threads, vectors, 16, call->fit.size >= 0, work,
           [&](int64_t first, int64_t count) { ISAS[isa]->encode(*call, first, count); });
}

// Returns 1 if a sequence did not fit (the flag of the pages is set, too).
EXPORT int64_t aura_append(int64_t isa, const Append* call) {
  const Append& a = *call;
  const Pages& p = *a.pages;
  std::vector<int64_t> slots(a.tokens, -1);
  int64_t overflow = 0;
  const int64_t wrap = (p.width - p.pinned) * p.page_size, kept = p.pinned * p.page_size;
  std::vector<int32_t> lengths(p.lengths, p.lengths + p.seqs);
  for (int64_t seq = 0; seq < p.seqs; seq++) {
    const int64_t first = a.starts[seq], count = a.starts[seq + 1] - first, old = lengths[seq], total = old + count;
    if (count <= 0) continue;
    bool fits = old >= 0 && (p.ring || total <= p.width * p.page_size);
    for (int64_t i = 0; i < count && fits; i++) {
      const int64_t pos = old + i;
      if (p.ring && pos >= kept && pos < total - wrap) continue;  // a later token takes this slot
      const int64_t entry = table_entry(p, pos / p.page_size);
      const int64_t index = entry < p.width ? p.table[seq * p.width + entry] : -1;
      fits = index >= 0 && index < p.num_pages;
      slots[first + i] = index * p.page_size + pos % p.page_size;
    }
    if (fits) { lengths[seq] = int32_t(total); continue; }
    overflow = 1;
    for (int64_t i = 0; i < count; i++) slots[first + i] = -1;
  }
  const int64_t vectors = a.tokens * p.kv_heads;
  const bool fitted = !a.coded && (p.key_fit.size >= 0 || p.value_fit.size >= 0);
  const int64_t more = fitted ? fit_work(p.key_fit, *p.key) + fit_work(p.value_fit, *p.value) : 0;
  in_tiles(a.threads, vectors, 8, fitted, vectors * ((p.key->dim + p.value->dim) * 30 + more),
           [&](int64_t first, int64_t count) { ISAS[isa]->append(a, slots.data(), first, count); });
  std::memcpy(p.lengths, lengths.data(), 4 * p.seqs);
  if (overflow) *p.overflow = 1;
  return overflow;
}

// Appends tokens k, v to the pages (if there is an `append`) and attends with queries q. The structures have everything
// else and can be used again.
EXPORT void aura_step(int64_t isa, const Append* append, const Attend* attend, const void* q, const void* k, const void* v,
                      void* out, float* lse, const float* sink, int64_t threads) {
  Attend a = *attend;
  if (append) {
    Append new_tokens = *append;
    new_tokens.k = (const uint8_t*)k, new_tokens.v = (const uint8_t*)v, new_tokens.threads.count = threads;
    aura_append(isa, &new_tokens);
    if (append->uncompressed) new_tokens.pages = append->uncompressed, aura_append(isa, &new_tokens);
  }
  a.q = q, a.out = out, a.lse = lse, a.sink = sink, a.threads.count = threads;
  attend_all(isa, a);
}

EXPORT void aura_decode(int64_t isa, const Decode* call) {
  const int64_t vectors = call->n * call->heads, tiles = divide_up(vectors, LANES), batch = 16;
  for_each(call->threads, divide_up(tiles, batch), vectors * call->codec->dim * 30, [&](int64_t i) {
    for (int64_t t = i * batch; t < (i + 1) * batch && t < tiles; t++)
      ISAS[isa]->decode(*call, t * LANES, vectors - t * LANES < LANES ? vectors - t * LANES : LANES);
  });
}

EXPORT void aura_scores(int64_t isa, const Scores* call) {
  const int64_t blocks = divide_up(call->n, TILE);
  const int64_t work = call->n * call->codec->dim * (call->tokens * call->heads + 16 * call->kv_heads);
  for_each(call->threads, blocks * call->kv_heads, work, [&](int64_t i) {
    const int64_t first = i / call->kv_heads * TILE, left = call->n - first;
    ISAS[isa]->scores(*call, i % call->kv_heads, first, left < TILE ? left : TILE);
  });
}

EXPORT void aura_values(int64_t isa, const Values* call) {
  const int64_t rows = call->tokens * (call->heads / call->kv_heads), blocks = divide_up(rows, ROWS);
  const int64_t work = call->n * call->codec->dim * (call->tokens * call->heads + 16 * call->kv_heads);
  for_each(call->threads, blocks * call->kv_heads, work, [&](int64_t i) {
    const int64_t first = i / call->kv_heads * ROWS, left = rows - first;
    ISAS[isa]->values(*call, i % call->kv_heads, first, left < ROWS ? left : ROWS);
  });
}
