// The state of one unit of attention work (rows of queries x a piece of the keys) and the tiles it walks over.
#pragma once
#include "rotate.hpp"
#include "slots.hpp"

namespace {

// Up to TILE tokens whose rows lie at equal distances. Kernels may read 16 bytes past a row of codes: pages have their
// scales there, staged copies spare bytes.
struct Tile {
  const uint8_t *k, *v;
  int64_t k_stride, v_stride;     // bytes between rows
  int64_t pos;                    // of the first token
  int n;
  const uint8_t *soon_k, *soon_v;  // what to bring into the cache during this tile
  alignas(64) float ks[TILE], vs[TILE];  // scales (1 at 16 bits); NaN marks a damaged vector
};

// One way over the keys of a tile in int16. Scores are one pass; large ones are more, which add what rounding took away.
struct Pass {
  const int16_t* q;                // as q16
  const Codec::Fixed& levels;
  const float* unit;               // of the sums of each row; 0: nothing to add
  const float* shift;              // what they are added to, of each row; null: s
};

struct Work;
struct KeyKernel {
  void (*prepare)(Work&);                           // from q
  void (*prepare_rest)(Work&);                      // q_rest; null: there is only one pass
  void (*scores)(Work&, const Tile&, const Pass&);  // s[row][t] = q·k · ks[t] + shift[row] − base[row]
};
struct ValueKernel {
  void (*load)(Work&, Tile&);            // before the softmax: may find damaged vectors; null: nothing to do
  bool (*soften)(Work&, const Tile&);    // softmax of a full tile that all rows see; null or false: row by row
  void (*accumulate)(Work&, const Tile&);  // acc = acc · correction + Σ s[row][t] · v
  void (*finish)(Work&, float* out, int64_t stride);  // acc in natural order
};

struct Work {
  const Attend& a;
  const Group& g;
  const Codec &key, &value;
  int64_t rows, group, dk, dv, k_pad, v_pad;
  float *q, *s, *acc, *kt, *values, *buffer, *part;
  // [rows][k_pad], [rows][TILE], [rows][v_pad], [k_pad][TILE], [TILE][v_pad], [16][k_pad], [rows][part_floats]
  double* q64;                       // [rows][k_pad], for exact scores
  int16_t *q16, *q_rest, *w16;       // 4 copies of [rows][k_pad], twice, and [rows][TILE], for kernels with int16 arithmetic
  uint8_t *stage_k, *stage_v;
  alignas(64) vf sums[ROWS];
  float base[ROWS];  // 0, or close to the largest score so far: what is left of large scores has more digits
  double shift64[ROWS];
  float shift[ROWS], most[ROWS], correction[ROWS];
  float q_factor[ROWS], q_unit[ROWS], rest_unit[ROWS];  // q16 is q · factor; units of sums of q16 and q_rest with levels
  float w_unit[ROWS], w_most[ROWS], w_sum[ROWS];  // of the weights of a tile: factor, largest, sum of magnitudes
  bool weights_fixed = false;  // w16 and w_unit hold the weights of this tile
  int64_t plain_from, plain_to;  // positions that all rows see and that need nothing but a softmax
  bool has_rest = false;       // q_rest and rest_unit are there
  // Expected rounding error of a score of a key of scale 1, in int16 arithmetic, and the share of the levels in it
  float score_error[ROWS], level_error[ROWS], most_error = 0;
  int64_t position[ROWS];
  bool bad_score[ROWS], bad_value[ROWS];

  Work(const Attend& a, const Group& g)
      : a(a), g(g), key(a.pages ? *a.pages->key : *a.dense->key), value(a.pages ? *a.pages->value : *a.dense->value) {
    rows = g.rows, group = a.heads / (a.pages ? a.pages->kv_heads : a.dense->kv_heads);
    dk = key.dim, dv = value.dim, k_pad = round_up(dk, 64), v_pad = round_up(dv, 64);
  }
  void carve(Arena& m) {
    q = m.take<float>(rows * k_pad);
    s = m.take<float>(rows * TILE);
    acc = m.take<float>(rows * v_pad);
    kt = m.take<float>(k_pad * TILE);
    values = m.take<float>(TILE * v_pad);
    buffer = m.take<float>(16 * k_pad);
    q64 = m.take<double>(double_scores() ? rows * k_pad : 0);
    q16 = m.take<int16_t>(rows * k_pad * 4);
    q_rest = m.take<int16_t>(rows * k_pad * 4);
    w16 = m.take<int16_t>(round_up(rows, 8) * TILE);
    part = m.take<float>(rows * part_floats(dv));
    stage_k = m.take<uint8_t>(TILE * key.row_bytes + 64);
    stage_v = m.take<uint8_t>(TILE * value.row_bytes + 64);
  }
  bool double_scores() const { return a.float32 && key.bits != 16; }
  int64_t token(int64_t row) const { return a.starts[g.seq] + (g.first + row) / group; }
  int64_t head(int64_t row) const { return g.kv_head * group + (g.first + row) % group; }
};

// The queries as rotated float32, times the factor of the scores, and what the key offset adds to their scores.
inline void load_queries(Work& w) {
  const Attend& a = w.a;
  const double scale = a.scale * (a.softcap > 0 ? 1.0 : 1.4426950408889634);
  const float* offset = a.pages && a.pages->key_offset ? a.pages->key_offset + w.g.kv_head * w.dk : nullptr;
  const float* key_scale = a.key_scale ? a.key_scale + w.g.kv_head * w.dk : nullptr;
  for (int64_t r = 0; r < w.rows; r++) {
    float* q = w.q + r * w.k_pad;
    const int64_t at = w.token(r) * a.q_token + w.head(r) * a.q_head;
    load_floats((const char*)a.q + at * size_of(a.dtype), a.dtype, w.dk, q);
    if (key_scale) for (int64_t d = 0; d < w.dk; d++) q[d] /= key_scale[d];
    if (w.double_scores()) {
      double *x = w.q64 + r * w.k_pad, shift = 0;
      for (int64_t d = 0; d < w.dk; d++) x[d] = q[d] * scale;
      if (offset) for (int64_t d = 0; d < w.dk; d++) shift += x[d] * offset[d];
      w.shift64[r] = shift;
      rotate(w.key, x);
    }
    for (int64_t d = 0; d < w.dk; d++) q[d] *= float(scale);
    float shift = 0;
    if (offset) for (int64_t d = 0; d < w.dk; d++) shift += q[d] * offset[d];
    w.shift[r] = shift, w.base[r] = 0;
    w.position[r] = a.ends[w.g.seq] - a.starts[w.g.seq + 1] + w.token(r);
  }
  w.plain_from = a.first, w.plain_to = a.causal ? w.g.lowest + 1 : INT64_MAX;
  if (a.window && w.g.highest - a.window + 1 > w.plain_from) w.plain_from = w.g.highest - a.window + 1;
  if (a.recent && w.g.lowest - a.recent + 1 < w.plain_to) w.plain_to = w.g.lowest - a.recent + 1;
  if (a.only_uncompressed || a.softcap > 0) w.plain_to = 0;
  rotate_rows(w.key, w.q, w.k_pad, w.rows, false);
  for (int64_t r = 0; r < w.rows; r++)
    for (int64_t d = w.dk; d < w.k_pad; d++) w.q[r * w.k_pad + d] = 0;
}

// Where the token at a position lies and how many follow it without a gap.
struct Run { const uint8_t *k, *v, *k_scale, *v_scale; int64_t left; };

INLINE Run locate(const Work& w, int64_t pos) {
  const Group& g = w.g;
  if (!w.a.pages) {
    const Dense& d = *w.a.dense;
    const int64_t row = pos + d.starts[g.seq + 1] - w.a.ends[g.seq];
    const int64_t ks = size_of(w.key.dtype), vs = size_of(w.value.dtype);
    return {d.k + (row * d.k_token + g.kv_head * d.k_head) * ks, d.v + (row * d.v_token + g.kv_head * d.v_head) * vs,
            nullptr, nullptr, INT64_MAX};
  }
  const Pages& p = *w.a.pages;
  const int64_t page = pos / p.page_size, row = pos - page * p.page_size, entry = table_entry(p, page);
  const int64_t index = entry < p.width ? p.table[g.seq * p.width + entry] : -1;
  if (index < 0 || index >= p.num_pages) return {nullptr, nullptr, nullptr, nullptr, p.page_size - row};
  const uint8_t* piece = p.data + (index * p.kv_heads + g.kv_head) * p.head_bytes;
  return {piece + row * w.key.row_bytes, piece + p.value_codes + row * w.value.row_bytes,
          piece + p.key_scales + row * w.key.scale_bytes, piece + p.value_scales + row * w.value.scale_bytes,
          p.page_size - row};
}

INLINE void load_scales(const Codec& c, const uint8_t* from, bool missing, int n, float* out) {
  if (missing) for (int i = 0; i < n; i++) out[i] = NAN;
  else if (c.bits == 16) for (int i = 0; i < n; i++) out[i] = 1.f;
  else load_floats(from, c.dtype, n, out);
}

// Brings the scales of a tile into the cache one tile ahead: they lie apart from its codes.
INLINE void prefetch_scales(const Work& w, const Run& run) {
  for (int64_t i = 0; i < TILE * w.key.scale_bytes; i += 64) __builtin_prefetch(run.k_scale + i);
  for (int64_t i = 0; i < TILE * w.value.scale_bytes; i += 64) __builtin_prefetch(run.v_scale + i);
}

// The next tile from `pos` on, at most `left` tokens. Small pages are copied together; a missing page reads as damaged.
// Where tiles end depends on positions alone: a row comes out the same whatever rows share its pass.
inline void fetch(Work& w, Tile& t, int64_t pos, int64_t left) {
  const int64_t grid = TILE - pos % TILE, limit = left < grid ? left : grid;
  Run run = locate(w, pos);
  t.pos = pos;
  t.k_stride = w.a.pages ? w.key.row_bytes : w.a.dense->k_token * size_of(w.key.dtype);
  t.v_stride = w.a.pages ? w.value.row_bytes : w.a.dense->v_token * size_of(w.value.dtype);
  if (run.k && (run.left >= 32 || run.left >= limit)) {
    t.n = int(run.left < limit ? run.left : limit), t.k = run.k, t.v = run.v;
    load_scales(w.key, run.k_scale, false, t.n, t.ks);
    load_scales(w.value, run.v_scale, false, t.n, t.vs);
    // One after the other from one page, half a tile ahead is enough; pages lie anywhere and take another tile.
    t.soon_k = run.k, t.soon_v = run.v;
    if (left > t.n) {
      const int64_t n = t.n;
      if (n < run.left) {
        run = {run.k + n * t.k_stride, run.v, run.k_scale + n * w.key.scale_bytes, run.v_scale + n * w.value.scale_bytes, 0};
        t.soon_k = run.k, prefetch_scales(w, run);
      } else {
        run = locate(w, pos + n);
        if (run.k) t.soon_k = run.k, t.soon_v = run.v, prefetch_scales(w, run);
        if (left > 2 * n) run = locate(w, pos + 2 * n);
        if (run.k) t.soon_k = run.k;
      }
    }
    return;
  }
  int64_t n = 0;
  while (true) {
    const int64_t take = run.left < limit - n ? run.left : limit - n;
    uint8_t *k = w.stage_k + n * w.key.row_bytes, *v = w.stage_v + n * w.value.row_bytes;
    if (run.k) memcpy(k, run.k, take * w.key.row_bytes), memcpy(v, run.v, take * w.value.row_bytes);
    else memset(k, 0, take * w.key.row_bytes), memset(v, 0, take * w.value.row_bytes);
    load_scales(w.key, run.k_scale, !run.k, int(take), t.ks + n);
    load_scales(w.value, run.v_scale, !run.k, int(take), t.vs + n);
    n += take;
    if (n == limit || n >= TILE / 2) break;
    run = locate(w, pos + n);
  }
  t.n = int(n), t.k = w.stage_k, t.v = w.stage_v;
  t.soon_k = left > n ? locate(w, pos + n).k : nullptr, t.soon_v = t.v;
  if (!t.soon_k) t.soon_k = t.k;
}

}  // namespace
