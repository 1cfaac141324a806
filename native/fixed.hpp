// What the kernels with int16 arithmetic share: queries and weights as int16 with a factor per row, scaled so that no
// int32 sum can overflow. Levels are int16 in units of Codec::unit.
#pragma once
#include "work.hpp"

namespace {

#define UNROLL _Pragma("GCC unroll 16")

constexpr float INT_LIMIT = 2.147e9f;

template <int N> struct Count { static constexpr int value = N; };

// Calls body(row, count) for blocks of MOST rows and for what is left, with a Count: kernels have registers for each row.
template <int COUNT, class Body> INLINE void with_count(int64_t rows, const Body& body) {
  if constexpr (COUNT > 1)
    if (rows < COUNT) return with_count<COUNT - 1>(rows, body);
  body(Count<COUNT>());
}
template <int MOST, class Body> INLINE void each_block(int64_t rows, const Body& body) {
  for (int64_t row = 0; row < rows; row += MOST) with_count<MOST>(rows - row, [&](auto count) { body(row, count); });
}

// make(Count<B>) for codes of `bits` bits; nullptr for widths that have none.
template <class Make> inline auto by_width(int64_t bits, const Make& make) -> decltype(make(Count<2>())) {
  switch (bits) {
    case 2: return make(Count<2>());
    case 3: return make(Count<3>());
    case 4: return make(Count<4>());
    case 5: return make(Count<5>());
    case 6: return make(Count<6>());
    case 8: return make(Count<8>());
  }
  return nullptr;
}

// The last tokens of a tile, fewer than GROUP, from number i on: their keys, and zeros for what is missing.
template <int GROUP> struct LastKeys {
  alignas(64) uint8_t rows[GROUP * MAX_CODED_DIM + 64];
  LastKeys(const Work& w, const Tile& t, int i) {
    const int64_t bytes = w.key.row_bytes, held = (t.n - i) * bytes;
    for (int j = 0; j < t.n - i; j++) memcpy(rows + j * bytes, t.k + (i + j) * t.k_stride, bytes);
    memset(rows + held, 0, GROUP * bytes - held + 64);
  }
};

INLINE void store_int16(int16_t* to, vf x) {  // rounded
#if defined(__AVX512F__)
  store(to, _mm512_cvtepi32_epi16(_mm512_cvtps_epi32((__m512)x)));
#elif defined(__AVX2__)
  const __m256i y = _mm256_cvtps_epi32((__m256)x);
  store(to, _mm_packs_epi32(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1)));
#else  // NEON
  vst1_s16(to, vqmovn_s32(vcvtnq_s32_f32((float32x4_t)x)));
#endif
}

// How a query lies in memory: place i has coordinate order[i % codes] of its codes. Within `segment` places, those with equal
// i % 8 and those APART from them are added up in one int32. A block of up to BLOCK rows is [places / 8][rows of the block][COPIES][8]:
// instructions that repeat 16 bytes of memory cost more than the memory.
template <int COPIES, int BLOCK, int APART = 1> struct Places {
  const uint8_t* order;
  int64_t codes, count, segment;

  void arrange(const float* q, float* x) const {
    for (int64_t i = 0; i < count; i += codes)
      for (int64_t j = 0; j < codes; j++) x[i + j] = q[i + order[j]];
  }
  // The largest factor that keeps all places in int16 and all sums in int32; 0 for zeros.
  float factor(const float* x, int32_t most_level) const {
    const float room = INT_LIMIT / float(most_level) - float(segment < count ? segment : count) / 8 - 2;
    float sum = 0;
    for (int64_t from = 0; from < count; from += segment) {
      const int64_t to = count - from < segment ? count : from + segment;
      alignas(64) float part[16] = {};
      for (int64_t i = from; i < to; i += 8)
        for (int j = 0; j < 8; j++) part[j] += fabsf(x[i + j]);
      for (int j = 0; j < 8; j++)
        if (!(j & APART)) sum = part[j] + part[j + APART] > sum ? part[j] + part[j + APART] : sum;
    }
    vf most = {};
    for (int64_t i = 0; i < count; i += VL) most = vmax(vabs(load<vf>(x + i)), most);
    const float peak = largest(most), factor = sum > 0 ? room / sum : 0;
    return peak > 0 && 32766.f / peak < factor ? 32766.f / peak : factor;
  }
  // x · factor as row r; y are its places
  void put(const Work& w, int64_t r, const float* x, float factor, int16_t* y, int16_t* q16) const {
    for (int64_t i = 0; i < count; i += VL) store_int16(y + i, load<vf>(x + i) * factor);
    const int64_t block = r / BLOCK * BLOCK, rows = w.rows - block < BLOCK ? w.rows - block : BLOCK;
    int16_t* to = q16 + (block * count + (r - block) * 8) * COPIES;
    for (int64_t i = 0; i < count; i += 8)
      for (int c = 0; c < COPIES; c++) memcpy(to + i * rows * COPIES + 8 * c, y + i, 16);
  }
};

template <class P> inline void fix_queries(Work& w, const P& places) {
  const Codec::Fixed &fixed = w.key.keys, &rest = w.key.key_rest;
  alignas(64) float x[MAX_CODED_DIM];
  alignas(64) int16_t y[MAX_CODED_DIM];
  w.most_error = 0;
  for (int64_t r = 0; r < w.rows; r++) {
    places.arrange(w.q + r * w.k_pad, x);  // zeros beyond dim
    vf check = {}, squares = {};
    for (int64_t i = 0; i < places.count; i += VL) {
      const vf v = load<vf>(x + i);
      check += v * 0.f, squares += v * v;
    }
    float factor = places.factor(x, fixed.most);
    if (!all_finite(check) || !(factor < 3e38f)) factor = 0;
    w.q_factor[r] = factor, w.q_unit[r] = !all_finite(check) ? NAN : factor > 0 ? fixed.unit / factor : 0;
    places.put(w, r, x, factor, y, w.q16);
    // rounding errors are evenly distributed: 1/√3 of the largest, of the levels and of the query
    const float level = float(rest.most) * rest.unit, place = factor > 0 ? 0.5f / factor : 0;
    const float levels = level * level * sum(squares) / 3, queries = place * place * float(w.dk) / 3;
    const float error = sqrtf(levels + queries);
    w.level_error[r] = sqrtf(levels), w.score_error[r] = error, w.most_error = error > w.most_error ? error : w.most_error;
  }
}

// What rounding took from the queries, as q_rest. Only large scores need it.
template <class P> inline void fix_query_rests(Work& w, const P& places) {
  alignas(64) float x[MAX_CODED_DIM];
  alignas(64) int16_t y[MAX_CODED_DIM];
  for (int64_t r = 0; r < w.rows; r++) {
    places.arrange(w.q + r * w.k_pad, x);
    for (int64_t i = 0; i < places.count; i += VL) store_int16(y + i, load<vf>(x + i) * w.q_factor[r]);
    for (int64_t i = 0; i < places.count; i++) x[i] = fmaf(x[i], w.q_factor[r], -float(y[i]));  // exact
    const float factor = w.q_factor[r] > 0 ? places.factor(x, w.key.keys.most) : 0;
    w.rest_unit[r] = factor > 0 ? w.q_unit[r] / factor : 0;
    places.put(w, r, x, factor, y, w.q_rest);
  }
}

INLINE bool adds_nothing(const Pass& pass, int64_t row, int64_t rows) {
  bool nothing = !pass.shift;
  for (int64_t r = row; r < row + rows && nothing; r++) nothing = pass.unit[r] == 0;
  return nothing;
}

#if defined(__AVX2__)
// Brings bytes that are needed soon into L2, a step at a time. (L1 has no room for them uncompressed queries and the tile.)
struct Ahead {
  const uint8_t* at;
  int64_t step;
  INLINE void take(Ahead& a) {
    for (int64_t i = 0; i < a.step; i += 64) _mm_prefetch((const char*)a.at + i, _MM_HINT_T2);
    a.at += a.step;
  }
};
#endif

// Weights s[r][t] as int16 pairs w16[r][t], zero beyond n, and w_unit.
inline void fix_weights(Work& w, const Tile& t) {
  const int full = int(round_up(t.n, VL));
  const float room = INT_LIMIT / float(w.value.values.most) - float(TILE) / 2 - 2;
  for (int64_t r = 0; r < w.rows; r++) {
    const float* s = w.s + r * TILE;
    float factor = w.w_most[r] > 0 ? 32766.f / w.w_most[r] : 0;
    const float bound = w.w_most[r] > 0 ? room / w.w_sum[r] : 0;
    factor = bound < factor ? bound : factor;
    if (!(factor < 3e38f)) factor = 0;  // weights below the range of float32
    w.w_unit[r] = factor > 0 ? w.value.values.unit / factor : 0;
    int16_t* to = w.w16 + r * TILE;
    for (int i = 0; i < full; i += VL) store_int16(to + i, load<vf>(s + i) * factor);
    if (t.n % 2) to[t.n] = 0;  // the last pair has one token only
  }
}

}  // namespace
