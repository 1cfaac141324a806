// Attention of one group of query rows over one piece of the keys: online softmax tile by tile, then the merge of the
// pieces in fixed order. Kernels for scores and weighted sums are chosen per side.
#pragma once
#include "floats.hpp"

namespace {

// Each instruction-set file says which kernels it has for a width; null: the float kernels.
const KeyKernel* int16_key(const Codec& c);
const ValueKernel* int16_value(const Codec& c);

constexpr float SCORE_ERROR = 5e-4f;

INLINE float largest_scale(const float* ks, int n) {
  vf most = {};
  for (int i = 0; i < n; i += VL) most = vmax(vabs(load<vf>(ks + i)), most);
  return largest(most);
}

INLINE float largest_visible_scale(const Work& w, int64_t r, const Tile& t) {
  int64_t begin[4], end[4];
  const int64_t p = w.position[r], spans = visible_spans(w.a, p, p, t.pos, t.pos + t.n, begin, end);
  float most = 0;
  for (int64_t i = 0; i < spans; i++)
    for (int64_t j = begin[i] - t.pos; j < end[i] - t.pos; j++) most = fabsf(t.ks[j]) > most ? fabsf(t.ks[j]) : most;
  return most;
}

// Adds what rounding to int16 took from the scores of rows where it would show in the weights (large scores): the rest of
// the query times levels and, if their share alone would show, too, the query times the rest of the levels. (The product of
// the rests is below float32.) Only what a row sees has a say, and other rows add zeros: a row comes out the same whatever
// rows share its pass.
inline void add_rests(Work& w, const Tile& t, const KeyKernel& keys, float most) {
  float query_unit[ROWS], level_unit[ROWS];
  bool queries = false, levels = false;
  for (int64_t r = 0; r < w.rows; r++) {
    query_unit[r] = level_unit[r] = 0;
    if (!(w.score_error[r] * most > SCORE_ERROR)) continue;
    const float seen = largest_visible_scale(w, r, t);
    if (!(w.score_error[r] * seen > SCORE_ERROR)) continue;
    if (!w.has_rest) keys.prepare_rest(w), w.has_rest = true;
    query_unit[r] = w.rest_unit[r], queries = true;
    if (!(w.level_error[r] * seen > SCORE_ERROR)) continue;
    level_unit[r] = w.q_unit[r] / w.key.keys.unit * w.key.key_rest.unit, levels = true;
  }
  if (queries) keys.scores(w, t, {w.q_rest, w.key.keys, query_unit, nullptr});
  if (levels) keys.scores(w, t, {w.q16, w.key.key_rest, level_unit, nullptr});
}

inline void score(Work& w, const Tile& t, const KeyKernel& keys) {
  keys.scores(w, t, {w.q16, w.key.keys, w.q_unit, w.shift});
  const float most = w.most_error > 0 ? largest_scale(t.ks, int(round_up(t.n, VL))) : 0;
  if (w.most_error * most > SCORE_ERROR) add_rests(w, t, keys, most);
}

// Scores that are not finite, of tokens this row sees: they damage the row. Others are hidden later.
inline void find_bad_scores(Work& w, int64_t r, const int64_t* begin, const int64_t* end, int64_t spans) {
  float* s = w.s + r * TILE;
  for (int64_t i = 0; i < spans; i++)
    for (int64_t j = begin[i]; j < end[i]; j++)
      if (!isfinite(s[j])) w.bad_score[r] = true, s[j] = -INFINITY;
}

// Tokens of a tile whose values are damaged. Their scales become 0; so do those behind the last token.
struct Damaged {
  int at[TILE], count = 0;
  explicit Damaged(Tile& t) {
    const int full = int(round_up(t.n, 16));
    for (int i = t.n; i < full; i++) t.ks[i] = t.vs[i] = 0;
    vf check = {};
    for (int i = 0; i < full; i += VL) check += load<vf>(t.vs + i) * 0.f;
    if (!all_finite(check))
      for (int i = 0; i < t.n; i++) if (!isfinite(t.vs[i])) at[count++] = i, t.vs[i] = 0;
  }
};

// The scores of a row as its softmax takes them: capped, and −inf where it sees nothing. Notes damage, and returns the largest.
inline float visible_scores(Work& w, int64_t r, const Tile& t, const Damaged& bad) {
  float* s = w.s + r * TILE;
  const int n = t.n, full = int(round_up(n, VL));
  int64_t begin[4], end[4];
  const int64_t p = w.position[r];
  int64_t spans = visible_spans(w.a, p, p, t.pos, t.pos + n, begin, end);
  for (int64_t i = 0; i < spans; i++) begin[i] -= t.pos, end[i] -= t.pos;
  vf check = {}, top = splat(-INFINITY);
  for (int i = 0; i < full; i += VL) {
    const vf x = load<vf>(s + i);
    check += x * 0.f, top = vmax(x, top);
  }
  const bool plain = all_finite(check) && spans == 1 && begin[0] == 0 && end[0] == full && !(w.a.softcap > 0);
  if (!all_finite(check)) find_bad_scores(w, r, begin, end, spans);
  for (int b = 0; b < bad.count; b++)
    for (int64_t i = 0; i < spans; i++) w.bad_value[r] |= begin[i] <= bad.at[b] && bad.at[b] < end[i];
  if (w.a.softcap > 0) {
    const float cap = float(w.a.softcap);
    for (int i = 0; i < full; i += VL) {
      const vf x = load<vf>(s + i);  // -inf marks what find_bad_scores took out
      store(s + i, x > splat(-INFINITY) ? soft_cap(x, cap) * LOG2E : x);
    }
  }
  if (!(spans == 1 && begin[0] == 0 && end[0] == full)) {  // hide what this row does not see
    int64_t at = 0;
    for (int64_t i = 0; i <= spans; i++) {
      for (const int64_t stop = i < spans ? begin[i] : full; at < stop; at++) s[at] = -INFINITY;
      if (i < spans) at = end[i];
    }
  }
  if (!plain) {
    top = splat(-INFINITY);
    for (int i = 0; i < full; i += VL) top = vmax(load<vf>(s + i), top);
  }
  return largest(top) + w.base[r];
}

// The row's largest score becomes `most`, and its sums count from there.
INLINE void raise_most(Work& w, int64_t r, float most) {
  w.correction[r] = most == w.most[r] ? 1 : exp2_neg(splat(w.most[r] - most))[0];
  w.most[r] = most;
}

// s[r] becomes weights times value scales.
inline void soften(Work& w, int64_t r, const Tile& t, const Damaged& bad) {
  float* s = w.s + r * TILE;
  const int full = int(round_up(t.n, VL));
  const float tile_most = visible_scores(w, r, t, bad), most = tile_most > w.most[r] ? tile_most : w.most[r];
  if (most == -INFINITY) {
    w.correction[r] = 1, w.w_most[r] = w.w_sum[r] = 0;
    memset(s, 0, 4 * full);
    return;
  }
  raise_most(w, r, most);
  vf added = {}, w_most = {}, w_sum = {};
  for (int i = 0; i < full; i += VL) {
    const vf e = exp2_neg(load<vf>(s + i) + (w.base[r] - most)), x = e * load<vf>(t.vs + i), a = vabs(x);
    added += e, w_sum += a, w_most = vmax(w_most, a);
    store(s + i, x);
  }
  w.sums[r] = w.sums[r] * w.correction[r] + added;
  w.w_most[r] = largest(w_most), w.w_sum[r] = sum(w_sum);
}

inline void attend_tile(Work& w, Tile& t, const KeyKernel& keys, const ValueKernel& values) {
  if (values.load) values.load(w, t);
  const Damaged bad(t);
  score(w, t, keys);
  const bool plain = values.soften && t.n == TILE && !bad.count && w.plain_from <= t.pos && t.pos + TILE <= w.plain_to;
  w.weights_fixed = plain && values.soften(w, t);
  if (!w.weights_fixed) for (int64_t r = 0; r < w.rows; r++) soften(w, r, t, bad);
  values.accumulate(w, t);
}

// A unit of work with its memory and the kernels of both sides.
struct Piece {
  Work w;
  const KeyKernel* keys;
  const ValueKernel* values;

  Piece(const Attend& a, const Group& g) : w(a, g) {
    static thread_local Scratch scratch;
    Arena dry{nullptr};
    w.carve(dry);
    Arena arena{scratch.need(dry.used)};
    w.carve(arena);
    keys = w.key.bits == 16 || a.float32 ? nullptr : int16_key(w.key);
    values = w.value.bits == 16 || a.float32 ? nullptr : int16_value(w.value);
    if (!keys) keys = w.double_scores() ? &double_keys : &float_keys;
    if (!values) values = &float_values;
    memset(w.acc, 0, 4 * w.rows * w.v_pad);
    for (int64_t r = 0; r < round_up(w.rows, 4); r++) w.most[r] = -INFINITY;  // some kernels take 4 rows at once
    for (int64_t r = 0; r < w.rows; r++) w.sums[r] = (vf){}, w.bad_score[r] = w.bad_value[r] = false;
  }

  // Calls body(tile) for the tiles of a part of the keys, with the queries prepared.
  template <class Body> void each_tile(int64_t split, const Body& body) {
    const Group& g = w.g;
    load_queries(w);
    keys->prepare(w);
    int64_t skip = split * g.chunk, left = g.chunk;
    alignas(64) Tile t;
    for (int64_t i = 0; i < g.spans && left > 0; i++) {
      int64_t pos = g.begin[i], size = g.end[i] - g.begin[i];
      if (skip >= size) { skip -= size; continue; }
      pos += skip, size -= skip, skip = 0;
      if (size > left) size = left;
      left -= size;
      while (size > 0) {
        fetch(w, t, pos, size);
        body(t);
        pos += t.n, size -= t.n;
      }
    }
  }

  // Largest score, sum and damage of each row.
  void put_sums(float* part) const {
    for (int64_t r = 0; r < w.rows; r++) {
      float* p = part + r * part_floats(w.dv) + w.dv;
      p[0] = w.most[r], p[1] = p[2] = sum(w.sums[r]);
      p[3] = w.bad_score[r] ? 2.f : w.bad_value[r] ? 1.f : 0.f;
    }
  }
};

inline void finish_group(const Attend& a, const Group& g, const float* parts);

inline void attend_piece(const Attend& a, const Group& g, int64_t split, float* part) {
  Piece piece(a, g);
  Work& w = piece.w;
  if (!part) part = w.part;
  piece.each_tile(split, [&](Tile& t) { attend_tile(w, t, *piece.keys, *piece.values); });
  piece.values->finish(w, part, part_floats(w.dv));
  piece.put_sums(part);
  if (g.splits == 1) finish_group(a, g, part);
}

// Merge the pieces of a group, add the learned sink, un-rotate, store. What comes from the keys uncompressed is not rotated.
inline void finish_group(const Attend& a, const Group& g, const float* parts) {
  Work w(a, g);
  static thread_local Scratch scratch;
  const int64_t stride = part_floats(w.dv), size = g.rows * stride;
  float *out = (float*)scratch.need(8 * g.rows * w.v_pad), *plain = out + g.rows * w.v_pad;
  const int64_t coded = g.splits - g.uncompressed;
  float unit[ROWS], whole[ROWS];
  for (int64_t r = 0; r < g.rows; r++) {
    const float* first = parts + r * stride;
    const float logit = a.sink ? a.sink[w.head(r)] * LOG2E : -INFINITY;
    float most = logit, damage = 0;
    for (int64_t s = 0; s < g.splits; s++) {
      const float* p = first + s * size + w.dv;
      most = p[0] > most ? p[0] : most;
      damage = p[3] > damage ? p[3] : damage;
    }
    if (logit != logit) damage = 2;
    float* o = out + r * w.v_pad;
    memset(o, 0, 4 * w.dv);
    if (g.uncompressed) memset(plain + r * w.v_pad, 0, 4 * w.dv);
    float total = 0, kept = 0, lse;
    if (most == INFINITY || most == -INFINITY) {  // an infinite sink outweighs all, or nothing is visible
      lse = most;
    } else {
      for (int64_t s = 0; s < g.splits; s++) {
        const float* p = first + s * size;
        if (p[w.dv] == -INFINITY) continue;
        const float c = exp2f(p[w.dv] - most);
        total += c * p[w.dv + 1];
        if (s < coded) kept += c * p[w.dv + 2];
        float* to = s < coded ? o : plain + r * w.v_pad;
        for (int64_t d = 0; d < w.dv; d++) to[d] += c * p[d];
      }
      if (logit != -INFINITY) total += exp2f(logit - most);
      lse = float((double(most) + log2(double(total))) * 0.6931471805599453);
    }
    unit[r] = damage ? NAN : total > 0 ? 1 / total : 0;
    whole[r] = kept * unit[r];
    for (int64_t d = 0; d < w.dv; d++) o[d] *= unit[r];
    if (g.uncompressed) for (int64_t d = 0; d < w.dv; d++) plain[r * w.v_pad + d] *= unit[r];
    a.lse[w.token(r) * a.heads + w.head(r)] = damage == 2 ? NAN : lse;
  }
  rotate_rows(w.value, out, w.v_pad, g.rows, true);
  const float* offset = a.pages && a.pages->value_offset ? a.pages->value_offset + g.kv_head * w.dv : nullptr;
  for (int64_t r = 0; r < g.rows; r++) {
    float* o = out + r * w.v_pad;
    if (offset) for (int64_t d = 0; d < w.dv; d++) o[d] += offset[d] * whole[r];
    if (g.uncompressed) for (int64_t d = 0; d < w.dv; d++) o[d] += plain[r * w.v_pad + d];
    const int64_t at = (w.token(r) * a.heads + w.head(r)) * w.dv;
    store_floats((char*)a.out + at * size_of(a.dtype), a.dtype, w.dv, o);
  }
}

}  // namespace
