// The plain C structures that cross the border to Python and between the instruction-set files.
// Every field has 8 bytes, so that Python can build them with struct.pack. Strides count elements.
#pragma once
#include <stdint.h>

namespace aura {

constexpr int AURA_VERSION = 6;  // raise with every change of a structure below; backends/native/abi.py has the same
constexpr int MAX_CODED_DIM = 1024;
constexpr int ROWS = 64;          // query rows (query x head of a group) that share one pass over the keys
constexpr int TILE = 64;          // tokens whose scores are held at once
constexpr int KEY_SEGMENT = 32;   // codes of wide keys whose products are added up in int32
constexpr int LANES = 16;         // vectors that are rotated together

typedef void (*RangeFn)(int64_t begin, int64_t end, void* context);
typedef int32_t (*ParallelFor)(int64_t begin, int64_t end, int64_t grain, RangeFn fn, void* context);  // torch_parallel_for

enum Dtype : int64_t { F32 = 0, F16 = 1, BF16 = 2 };

// One side of a format. Built once from Python (aura_codec) and shared by all threads.
struct Codec {
  int64_t dim, bits, dtype;       // dtype of the scale; at 16 bits of the vector
  int64_t row_bytes, scale_bytes;
  int64_t lsq;                    // scale rule: 0 is l2
  int64_t base;                   // m of dim = m·2^k; 0: the caller rotates
  float levels[256], bounds[256]; // bounds beyond 2^bits - 2 are +inf
  float sign[MAX_CODED_DIM];      // ±1/√dim
  float paley[36 * 36];
  struct Fixed {                  // levels as int16: level ≈ level[code] · unit, |level| <= most
    float unit;
    int32_t most;
    int64_t exact;
    int16_t level[256];           // repeats after 2^bits
  } keys, values, key_rest;       // key_rest: what rounding took from the levels of `keys`, in units of its own
};

// How vectors of one side are rounded: size numbers a KV head in float16, 0 for equal weights; −1: to the nearest levels.
struct Fit {
  const uint16_t* data;
  int64_t size;
};

struct Pages {
  const Codec *key, *value;
  uint8_t* data;
  const int32_t* table;
  int32_t *lengths, *overflow;
  const float *key_offset, *value_offset;  // [kv_heads, dim] or null
  int64_t num_pages, kv_heads, seqs, width, page_size, pinned, ring;
  int64_t head_bytes, key_scales, value_codes, value_scales;  // size of a piece and offsets in it
  Fit key_fit, value_fit;
};

struct Dense {                    // uncompressed keys and values [tokens, kv_heads, dim]
  const Codec *key, *value;       // of 16 bits
  const uint8_t *k, *v;
  int64_t k_token, k_head, v_token, v_head;
  const int32_t* starts;
  int64_t kv_heads;
};

struct Threads {
  int64_t count;
  ParallelFor parallel_for;       // null: own threads
};

struct Attend {
  const Pages* pages;             // null: dense
  const Dense* dense;
  const Pages* uncompressed;            // null, or where the keys that `first` and `recent` name lie uncompressed: seen, too
  const void* q;
  int64_t dtype, q_token, q_head;
  void* out;                      // [tokens, heads, value dim] in dtype
  float* lse;                     // [tokens, heads]
  const int32_t *starts, *ends;
  int64_t tokens, heads, seqs;
  const float* sink;              // [heads] or null
  const float* key_scale;           // null, or [kv_heads, key dim]: queries are divided by it
  double scale;
  int64_t causal, window, sinks;  // window 0: none
  double softcap;                 // 0: none
  int64_t first, recent, only_uncompressed;
  double threshold;
  int64_t splits;                 // 0: from the shapes
  int64_t float32;                // float32 arithmetic
  float* workspace;               // null, or aura_attend_workspace() bytes
  Threads threads;
};

struct Encode {                   // x [n, heads, dim] -> codes [n, heads, row_bytes] and scales [n, heads]
  const Codec* codec;
  const uint8_t* x;
  int64_t dtype, n, heads, token, head;
  const float* offset;
  uint8_t* codes;
  void* scales;
  Fit fit;
  Threads threads;
};

struct Append {                   // vectors k, v or codes with scales, [tokens, kv_heads, …]
  const Pages *pages, *uncompressed;    // uncompressed: null, or uncompressed pages that a step fills, too
  const uint8_t *k, *v;
  int64_t k_dtype, v_dtype, k_token, k_head, v_token, v_head;
  const uint8_t *k_scales, *v_scales;  // only with codes
  const float* key_scale;           // null, or [kv_heads, key dim]: keys are multiplied by it
  int64_t coded;                  // k and v are codes (contiguous)
  const int32_t* starts;
  int64_t tokens;
  Threads threads;
};

struct Decode {                   // codes [n, heads, row_bytes] -> [n, heads, dim]
  const Codec* codec;
  const uint8_t* codes;
  const uint8_t* scales;
  int64_t n, heads;
  const float* offset;
  int64_t rotated, dtype;
  void* out;
  Threads threads;
};

struct Scores {                   // q [tokens, heads, dim] x codes [n, kv_heads] -> [tokens, heads, n]
  const Codec* codec;
  const uint8_t* codes;
  const uint8_t* scales;
  int64_t n, kv_heads;
  const float* offset;
  const void* q;
  int64_t dtype, tokens, heads, q_token, q_head;
  void* out;
  Threads threads;
};

struct Values {                   // weights [tokens, heads, n] x codes [n, kv_heads] -> [tokens, heads, dim]
  const Codec* codec;
  const uint8_t* codes;
  const uint8_t* scales;
  int64_t n, kv_heads;
  const float* offset;
  const void* weights;
  int64_t dtype, tokens, heads, w_token, w_head, w_key;
  double threshold;
  void* out;
  Threads threads;
};

// Rows `first … first + rows - 1` of the (query, head of the group) pairs of one sequence and KV head.
struct Group {
  int64_t seq, kv_head, first, rows;
  int64_t lowest, highest;        // positions of its queries
  int64_t begin[4], end[4];       // ascending spans of key positions that hold all that its queries see
  int64_t spans, visible;         // how many spans; their total length
  int64_t splits, chunk;          // parts and tokens of each; a part more if keys uncompressed are seen
  int64_t part;                   // index of its first partial result in the workspace
  int64_t uncompressed;                 // 1: the last part is of the keys uncompressed
};

// A partial result of a row: [value | largest score, sum of weights, sum of those whose values count, damage]
constexpr int64_t part_floats(int64_t value_dim) { return value_dim + 4; }

// What the first of two passes over a part leaves for the second, at most: tiles end at pages, but two in a row have TILE tokens.
inline int64_t kept_bytes(const Group& g) {
  const int64_t tiles = 2 * (g.chunk / TILE + 8);
  return tiles * (16 + 8 * g.rows) + 4 * g.rows * (g.chunk + 16 * tiles);
}

// What an instruction set provides; each runs one piece of independent work.
struct Isa {
  const char* name;
  bool (*supported)();
  void (*attend)(const Attend& a, const Group& g, int64_t split, float* part);  // part null: finish at once
  void (*weigh)(const Attend& a, const Group& g, int64_t split, uint8_t* kept, float* part);  // with a threshold
  void (*attend_kept)(const Attend& a, const Group& g, const uint8_t* kept, const float* parts, float* part);
  void (*finish)(const Attend& a, const Group& g, const float* parts);
  void (*encode)(const Encode& a, int64_t first, int64_t count);
  void (*append)(const Append& a, const int64_t* slots, int64_t first, int64_t count);
  void (*decode)(const Decode& a, int64_t first, int64_t count);
  void (*scores)(const Scores& a, int64_t kv_head, int64_t first, int64_t count);
  void (*values)(const Values& a, int64_t kv_head, int64_t first, int64_t count);
};

extern const Isa isa_generic;
#if defined(__x86_64__)
extern const Isa isa_avx2, isa_avx512;
#elif defined(__aarch64__)
extern const Isa isa_neon;
#endif

// What a query at a position sees, or the hull of what several see: at most 4 ascending spans below `length`.
inline int64_t visible_spans(const Attend& a, int64_t lowest, int64_t highest, int64_t from, int64_t length,
                             int64_t* begin, int64_t* end) {
  const int64_t stop = a.causal && highest + 1 < length ? highest + 1 : length;
  int64_t b[2] = {0, 0}, e[2] = {stop, 0}, n = 1, count = 0;
  if (a.window) {
    int64_t start = lowest - a.window + 1;
    if (start < 0) start = 0;
    e[0] = a.sinks < start ? a.sinks : start;
    if (e[0] > stop) e[0] = stop;
    b[1] = start, e[1] = stop, n = 2;
  }
  auto add = [&](int64_t lo, int64_t hi) {
    if (lo < from) lo = from;
    if (hi > lo) begin[count] = lo, end[count++] = hi;
  };
  auto overlap = [&](int i, int64_t lo, int64_t hi) { add(b[i] > lo ? b[i] : lo, e[i] < hi ? e[i] : hi); };
  for (int i = 0; i < n; i++) {
    if (a.only_uncompressed) {
      overlap(i, 0, a.first);
      const int64_t near = lowest - a.recent + 1;
      if (a.recent) overlap(i, near > a.first ? near : a.first, stop);
    } else {
      overlap(i, a.first, a.recent ? highest - a.recent + 1 : stop);
    }
  }
  return count;
}

}  // namespace aura
