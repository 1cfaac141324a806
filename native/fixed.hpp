// What the kernels with int16 arithmetic share: queries and weights as int16 with a factor per row, so scaled that no
// int32 sum can overflow. Levels are int16 in units of Codec::unit.
#pragma once
#include "work.hpp"

namespace {

constexpr float INT_LIMIT = 2.147e9f;

inline int32_t most_level(const Codec& c) {
  int32_t most = 1;
  for (int i = 0; i < (1 << c.bits); i++) { const int32_t x = c.fixed[i] < 0 ? -c.fixed[i] : c.fixed[i]; most = x > most ? x : most; }
  return most;
}

// Coordinate order[i] of each query goes to place i; places with equal (i % 8) / 2 are added up in one int32.
// A block of up to 8 rows is [places / 8][rows of the block][8].
inline void fix_queries(Work& w, const int16_t* order, int64_t places) {
  const float room = INT_LIMIT / float(most_level(w.key)) - float(places) / 8 - 2;
  for (int64_t r = 0; r < w.rows; r++) {
    const float* q = w.q + r * w.k_pad;
    const int64_t block = r / 8 * 8, rows = w.rows - block < 8 ? w.rows - block : 8;
    int16_t* to = w.q16 + block * places + (r - block) * 8;
    float most = 0, sums[4] = {}, check = 0;
    alignas(64) float x[MAX_CODED_DIM];
    for (int64_t i = 0; i < places; i++) x[i] = q[order[i]];  // beyond dim: zeros
    for (int64_t i = 0; i < places; i++) {
      const float a = fabsf(x[i]);
      most = a > most ? a : most, check += x[i] * 0.f;
    }
    for (int64_t i = 0; i < places; i += 8)
      for (int j = 0; j < 4; j++) sums[j] += fabsf(x[i + 2 * j]) + fabsf(x[i + 2 * j + 1]);
    float largest = sums[0];
    for (int j = 1; j < 4; j++) largest = sums[j] > largest ? sums[j] : largest;
    float factor = largest > 0 ? room / largest : 0;
    if (most > 0 && 32766.f / most < factor) factor = 32766.f / most;
    const bool fine = check == 0 && isfinite(factor);
    w.q_unit[r] = check != 0 || check != check ? NAN : fine && factor > 0 ? w.key.unit / factor : 0;
    if (!fine) factor = 0;
    for (int64_t i = 0; i < places; i += 8)
      for (int j = 0; j < 8; j++) to[i * rows + j] = int16_t(lrintf(x[i + j] * factor));
  }
}

// Weights s[r][t] as int16 pairs w16[r][t], zero beyond n, and w_unit.
inline void fix_weights(Work& w, const Tile& t, int32_t most_level) {
  const int full = int(round_up(t.n, VL));
  const float room = INT_LIMIT / float(most_level) - float(TILE) / 2 - 2;
  for (int64_t r = 0; r < w.rows; r++) {
    const float* s = w.s + r * TILE;
    vf most = {}, total = {};
    for (int i = 0; i < full; i += VL) { const vf a = vabs(load<vf>(s + i)); most = vmax(most, a), total += a; }
    const float m = largest(most);
    float factor = m > 0 ? 32766.f / m : 0;
    const float bound = m > 0 ? room / sum(total) : 0;
    factor = bound < factor ? bound : factor;
    if (!(factor < 3e38f)) factor = 0;  // weights below the range of float32
    w.w_unit[r] = factor > 0 ? w.value.unit / factor : 0;
    int16_t* to = w.w16 + r * TILE;
    for (int i = 0; i < full; i += VL) {
#if defined(__AVX512F__)
      const __m512i x = _mm512_cvtps_epi32((__m512)(load<vf>(s + i) * factor));
      store(to + i, _mm512_cvtepi32_epi16(x));
#elif defined(__AVX2__)
      const __m256i x = _mm256_cvtps_epi32((__m256)(load<vf>(s + i) * factor));
      store(to + i, _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)));
#endif
    }
    to[t.n] = 0;  // a pair may have one token only
  }
}

}  // namespace
