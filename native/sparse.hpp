// Attention with a threshold: a tile of values is read only where some row gives one of them a weight that counts. Which
// weights count is known when all scores are, so there are two passes over a group: the first keeps weights, the second
// reads values. A row drops a tile by its own weights alone, whatever rows share its pass.
#pragma once
#include "attend.hpp"

namespace {

// One tile of the first pass, and behind it [rows] × 2 and [rows][round_up(n, 16)] floats: the row's largest score so far,
// the largest of this tile, weights that count from the former.
struct KeptTile {
  int64_t pos, n;
  int64_t padded() const { return round_up(n, 16); }
  const float* numbers() const { return (const float*)(this + 1); }
  const KeptTile* next(int64_t rows) const { return (const KeptTile*)(numbers() + rows * (2 + padded())); }
};

// The first pass: weights of a part of the keys to `kept`, which ends with an empty tile, and sums to `part`.
inline void weigh_piece(const Attend& a, const Group& g, int64_t split, uint8_t* kept, float* part) {
  Piece piece(a, g);
  Work& w = piece.w;
  KeptTile* to = (KeptTile*)kept;
  piece.each_tile(split, [&](Tile& t) {
    if (w.value.bits == 16) piece.values->load(w, t);  // damage is in the vectors themselves
    const Damaged bad(t);
    t.soon_v = t.soon_k, t.v_stride = t.k_stride;  // what comes into the cache meanwhile are keys
    score(w, t, *piece.keys);
    *to = {t.pos, t.n};
    float *most = (float*)(to + 1), *top = most + w.rows, *weights = top + w.rows;
    for (int64_t r = 0; r < w.rows; r++, weights += to->padded()) {
      const float* s = w.s + r * TILE;
      top[r] = visible_scores(w, r, t, bad);
      if (top[r] > w.most[r]) raise_most(w, r, top[r]), w.sums[r] *= w.correction[r];
      most[r] = w.most[r];
      if (most[r] == -INFINITY) { memset(weights, 0, 4 * to->padded()); continue; }
      const float less = w.base[r] - most[r];
      vf added = {};
      for (int i = 0; i < int(round_up(t.n, VL)); i += VL) {
        const vf e = exp2_neg(load<vf>(s + i) + less);
        added += e;
        store(weights + i, e);
      }
      w.sums[r] += added;
    }
    to = (KeptTile*)to->next(w.rows);
  });
  *to = {0, 0};
  piece.put_sums(part);
}

// Below which score the weight of a row among all keys is below the threshold. (A learned sink has no value: beside it, all
// that is left may be small.)
inline float lowest_score(const Work& w, int64_t r, const float* parts) {
  const int64_t stride = part_floats(w.dv);
  float most = -INFINITY, total = 0;
  for (int64_t s = 0; s < w.g.splits; s++) {
    const float top = parts[(s * w.rows + r) * stride + w.dv];
    most = top > most ? top : most;
  }
  if (most == -INFINITY) return most;
  for (int64_t s = 0; s < w.g.splits; s++) {
    const float* p = parts + (s * w.rows + r) * stride + w.dv;
    if (p[0] > -INFINITY) total += exp2f(p[0] - most) * p[1];
  }
  return most + log2f(float(w.a.threshold) * total);
}

// The second pass: the values of one part, with the sums of all `parts` of the group.
inline void attend_kept(const Attend& a, const Group& g, const uint8_t* kept, const float* parts, float* part) {
  Piece piece(a, g);
  Work& w = piece.w;
  const int64_t stride = part_floats(w.dv);
  float lowest[ROWS], factor[ROWS];
  for (int64_t r = 0; r < w.rows; r++)
    lowest[r] = lowest_score(w, r, parts), w.most[r] = part[r * stride + w.dv], w.correction[r] = 1;
  alignas(64) Tile t;
  for (const KeptTile* tile = (const KeptTile*)kept; tile->n; tile = tile->next(w.rows)) {
    const float *most = tile->numbers(), *top = most + w.rows, *weights = top + w.rows;
    bool counts = false;
    for (int64_t r = 0; r < w.rows; r++) {
      const bool drops = top[r] == -INFINITY || top[r] < lowest[r];
      factor[r] = drops ? 0 : most[r] == w.most[r] ? 1 : exp2_neg(splat(most[r] - w.most[r]))[0];
      counts |= !drops;
    }
    if (!counts) continue;
    fetch(w, t, tile->pos, tile->n);
    t.soon_k = t.v + t.n * t.v_stride;  // the next values, where tiles follow each other
    if (piece.values->load) piece.values->load(w, t);
    const Damaged bad(t);
    for (int64_t r = 0; r < w.rows; r++, weights += tile->padded()) {
      vf added = {}, w_most = {}, w_sum = {};
      for (int i = 0; i < int(round_up(t.n, VL)); i += VL) {
        const vf e = load<vf>(weights + i) * factor[r], x = e * load<vf>(t.vs + i), size = vabs(x);
        added += e, w_sum += size, w_most = vmax(w_most, size);
        store(w.s + r * TILE + i, x);
      }
      w.sums[r] += added;
      w.w_most[r] = largest(w_most), w.w_sum[r] = sum(w_sum);
    }
    piece.values->accumulate(w, t);
  }
  piece.values->finish(w, part, stride);
  for (int64_t r = 0; r < w.rows; r++) part[r * stride + w.dv + 2] = sum(w.sums[r]);
}

}  // namespace
