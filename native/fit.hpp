// Fitted codes (src/aurakv/format/fit.py): coordinates are rounded one after the other, and each makes up for the errors
// of those before it. A lane is one of the SCALES that are tried, so that 16 lanes take two vectors of a head at once.
#pragma once
#include "quantise.hpp"

namespace {

constexpr int SCALES = 8;
constexpr float LONGEST = 2;  // times the nearest multiple of the levels
constexpr float SCALE[SCALES] = {0.76f, 0.82f, 0.88f, 0.94f, 1.0f, 1.06f, 1.12f, 1.2f};
constexpr int BLOCK = 8;  // rows of A that share what they read of the levels

// The fit of one head as float32: rows of A, `stride` floats apart, and d. Equal weights have no rows.
struct Split {
  const float *lower, *cost;
  int64_t stride;
};

inline Split split_fit(const Fit& f, int64_t head, int64_t dim) {
  if (!f.size) return {nullptr, nullptr, 0};
  static thread_local Scratch scratch;
  const int64_t stride = round_up(dim, 16);
  float *lower = (float*)scratch.need((dim * stride + dim) * 4), *cost = lower + dim * stride;
  const uint16_t* from = f.data + head * f.size;
  for (int64_t i = 0; i < dim; i++) {
    load_floats((const uint8_t*)from, F16, i + 1, lower + i * stride);
    from += i + 1;
    cost[i] = lower[i * stride + i];
    for (int64_t j = i; j < stride; j++) lower[i * stride + j] = 0;
  }
  return {lower, cost, stride};
}

// z = A y, y with zeros up to the stride
INLINE void multiply(const Split& s, const float* y, int64_t dim, float* z) {
  for (int64_t i = 0; i < dim; i += 16) {
    v16 sums[16], total = load<v16>(y + i);
    for (int r = 0; r < 16; r++) {
      sums[r] = (v16){};
      for (int64_t j = 0; j < i + r; j += 16) sums[r] += load<v16>(s.lower + (i + r) * s.stride + j) * load<v16>(y + j);
    }
    transpose16(sums);
    for (int r = 0; r < 16; r++) total += sums[r];
    store(z + i, total);
  }
}

// Up to two vectors y of one head, each with 1 / rms (0 for zero vectors). codes[i] has the codes of all lanes. Gives for
// each vector the lane that fits best and the products y'Gy, y'Gl and l'Gl.
struct Fitted {
  int lane;
  float own, mixed, energy;
};
template <int B>
void fit_pair(const Codec& c, const Quantiser<B>& table, const Split& s, const float* const* y, const float* inverse, int count,
              i16* codes, Fitted* best) {
  const int64_t dim = c.dim;
  alignas(64) float z[2][MAX_CODED_DIM];
  alignas(64) v16 level[MAX_CODED_DIM];
  v16 unit = {};
  i16 second = {};
  for (int v = 0; v < 2; v++) {
    const float* from = y[v < count ? v : 0];
    if (s.lower) multiply(s, from, dim, z[v]);
    else memcpy(z[v], from, 4 * dim);
    for (int i = 0; i < SCALES; i++) unit[v * SCALES + i] = inverse[v < count ? v : 0] / SCALE[i];
  }
  for (int l = SCALES; l < 2 * SCALES; l++) second[l] = -1;
  v16 mixed = {}, energy = {};
  float own[2] = {};
  for (int64_t i = 0; i < dim; i += BLOCK) {
    v16 aim[BLOCK];
    for (int r = 0; r < BLOCK; r++) aim[r] = second ? v16{} + z[1][i + r] : v16{} + z[0][i + r];
    v16 made[BLOCK] = {};
    if (s.lower) {
      const float* row = s.lower + i * s.stride;
      for (int64_t j = 0; j < i; j++) {
        const v16 l = level[j];
        for (int r = 0; r < BLOCK; r++) made[r] += row[r * s.stride + j] * l;
      }
    }
    for (int r = 0; r < BLOCK; r++) {
      if (s.lower) for (int e = 0; e < r; e++) made[r] += s.lower[(i + r) * s.stride + i + e] * level[i + e];
      const v16 wanted = aim[r] * unit, x = wanted - made[r];
      Quantiser<B>::find(table, x, codes[i + r], level[i + r]);
      const v16 got = made[r] + level[i + r];  // (A l)_i
      const float cost = s.lower ? s.cost[i + r] : 1.f;
      mixed += cost * aim[r] * got;
      energy += cost * got * got;
      for (int v = 0; v < 2; v++) own[v] += cost * z[v][i + r] * z[v][i + r];
    }
  }
  for (int v = 0; v < count; v++) {
    float most = -1;
    for (int i = 0; i < SCALES; i++) {
      const int lane = v * SCALES + i;
      const float fits = energy[lane] > 0 ? mixed[lane] * mixed[lane] / energy[lane] : 0;
      if (fits > most) most = fits, best[v] = {lane, own[v], mixed[lane], energy[lane]};
    }
    if (most < 0) best[v] = {v * SCALES, own[v], mixed[v * SCALES], energy[v * SCALES]};  // NaN
  }
}

// As `quantise`, of vectors [first, first + count) whose heads follow each other.
template <int B>
void quantise_fitted(const Codec& c, const Fit& f, const v16* tile, int64_t first, int64_t heads, int count, i16* words, float* scales) {
  const int64_t dim = c.dim;
  const Quantiser<B> table(c);
  const Norms norms = measure(c, tile);
  alignas(64) float y[2][MAX_CODED_DIM] = {};
  alignas(64) i16 codes[MAX_CODED_DIM];
  const float* rows[2] = {y[0], y[1]};
  for (int64_t i = 0; i < (dim * B + 31) / 32; i++) words[i] = (i16){};
  for (int l = 0; l < 16; l++) scales[l] = 0;
  for (int64_t h = 0; h < heads && h < count; h++) {
    const Split s = split_fit(f, (first + h) % heads, dim);
    for (int64_t at = h; at < count; at += 2 * heads) {
      const int lanes[2] = {int(at), int(at + heads)}, both = at + heads < count ? 2 : 1;
      float inverse[2];
      Fitted best[2];
      for (int v = 0; v < both; v++) {
        const int l = lanes[v];
        for (int64_t d = 0; d < dim; d++) y[v][d] = tile[d][l] * norms.factor[l];
        inverse[v] = norms.rms[l] > 0 ? 1.f / norms.rms[l] : 0.f;
      }
      fit_pair<B>(c, table, s, rows, inverse, both, codes, best);
      for (int v = 0; v < both; v++) {
        const int l = lanes[v], lane = best[v].lane;
        for (int64_t d = 0; d < dim; d++) {
          const int32_t code = codes[d][lane];
          const int bit = int(d * B % 32);
          words[d * B / 32][l] |= int32_t(uint32_t(code) << bit);
          if (bit + B > 32) words[d * B / 32 + 1][l] |= code >> (32 - bit);
        }
        const float fits = best[v].mixed * best[v].mixed / best[v].energy;
        const float scale = best[v].mixed / best[v].energy * (best[v].own < LONGEST * fits ? best[v].own / fits : LONGEST);
        scales[l] = finished(c, norms, l, scale, best[v].energy);
      }
    }
  }
}

}  // namespace
