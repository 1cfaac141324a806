// int16 kernels for AVX2, 4 bits on the natural bytes; other widths use the float kernels.
//
// Levels are looked up as two planes of bytes (vpshufb) and zipped to int16; vpmaddwd multiplies and adds pairs.
// Scores: a register holds 16 bytes of 2 tokens, one per 128-bit lane. Weighted sums: bytes of 2 tokens are zipped, so
// that a 32-bit place has the same coordinate of both. Sums stay in int32 within a tile.
#pragma once
#include "fixed.hpp"

namespace {

#define UNROLL _Pragma("GCC unroll 16")
constexpr int BLOCK_ROWS = 4;

INLINE __m256i dp(__m256i acc, __m256i a, __m256i b) { return _mm256_add_epi32(acc, _mm256_madd_epi16(a, b)); }

struct Planes {
  __m256i low, high;
  explicit Planes(const Codec::Fixed& c) {
    uint8_t a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = uint8_t(c.level[i] & 255), b[i] = uint8_t(uint16_t(c.level[i]) >> 8);
    low = _mm256_broadcastsi128_si256(load<__m128i>(a)), high = _mm256_broadcastsi128_si256(load<__m128i>(b));
  }
  // levels of the low (odd: high) nibbles, of the first and the last 8 bytes of each lane
  INLINE void look_up(const Planes& p, __m256i z, bool odd, __m256i* first, __m256i* last) {
    const __m256i i = _mm256_and_si256(odd ? _mm256_srli_epi16(z, 4) : z, _mm256_set1_epi8(15));
    const __m256i a = _mm256_shuffle_epi8(p.low, i), b = _mm256_shuffle_epi8(p.high, i);
    *first = _mm256_unpacklo_epi8(a, b), *last = _mm256_unpackhi_epi8(a, b);
  }
};

void prepare_keys(Work& w) {
  uint8_t order[32];  // of 32 codes: even 0 … 14, even 16 … 30, odd 1 … 15, odd 17 … 31
  for (int i = 0; i < 32; i++) order[i] = uint8_t(i % 16 * 2 + i / 16);
  fix_queries<2, BLOCK_ROWS>(w, order, 32, round_up(w.dk, 32), MAX_CODED_DIM);
}

// s of R rows with 8 tokens
template <int R>
INLINE void score8(const Work& w, const Planes& table, int64_t row, const int16_t* q, const uint8_t* p, int64_t stride,
                   int64_t loads, const uint8_t* ahead, int64_t ahead_lines, const float* ks, float* s) {
  __m256 f[R][4];
  UNROLL for (int n = 0; n < 4; n += 2) {
    __m256i acc[R][2];
    UNROLL for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = _mm256_setzero_si256();
    const uint8_t* at = p + 2 * n * stride;
    for (int64_t l = 0; l < loads; l++, at += 16) {
      for (int64_t i = 0; i < ahead_lines; i++, ahead += 64) _mm_prefetch((const char*)ahead, _MM_HINT_T0);
      __m256i z[2];
      UNROLL for (int m = 0; m < 2; m++)
        z[m] = _mm256_inserti128_si256(_mm256_castsi128_si256(load<__m128i>(at + 2 * m * stride)), load<__m128i>(at + (2 * m + 1) * stride), 1);
      UNROLL for (int odd = 0; odd < 2; odd++) {
        __m256i v[2][2];
        UNROLL for (int m = 0; m < 2; m++) Planes::look_up(table, z[m], odd, &v[m][0], &v[m][1]);
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int h = 0; h < 2; h++) {
          const __m256i x = load<__m256i>(q + ((l * 4 + odd * 2 + h) * R + r) * 16);
          UNROLL for (int m = 0; m < 2; m++) acc[r][m] = dp(acc[r][m], v[m][h], x);
        }
      }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int m = 0; m < 2; m++) f[r][n + m] = _mm256_cvtepi32_ps(acc[r][m]);
  }
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  UNROLL for (int r = 0; r < R; r++) {
    const __m256 a = _mm256_add_ps(_mm256_unpacklo_ps(f[r][0], f[r][1]), _mm256_unpackhi_ps(f[r][0], f[r][1]));
    const __m256 b = _mm256_add_ps(_mm256_unpacklo_ps(f[r][2], f[r][3]), _mm256_unpackhi_ps(f[r][2], f[r][3]));
    const __m256d c = _mm256_castps_pd(a), d = _mm256_castps_pd(b);
    const __m256 sum = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(c, d)), _mm256_castpd_ps(_mm256_unpackhi_pd(c, d)));
    const __m256 dots = _mm256_mul_ps(_mm256_permutevar8x32_ps(sum, order), _mm256_set1_ps(w.q_unit[row + r]));
    _mm256_storeu_ps(s + r * TILE, _mm256_fmadd_ps(dots, _mm256_loadu_ps(ks), _mm256_set1_ps(w.shift[row + r])));
  }
}

template <int R> void score_rows(Work& w, const Tile& t, int64_t row, const Planes& table) {
  const int64_t loads = (w.dk + 31) / 32;
  const int16_t* q = w.q16 + row * loads * 32 * 2;
  const int64_t lines = row ? 0 : (8 * t.v_stride / 64 + 2 * loads - 1) / (2 * loads);
  int i = 0;
  for (; i + 8 <= t.n; i += 8)
    score8<R>(w, table, row, q, t.k + i * t.k_stride, t.k_stride, loads, t.soon_v + i * t.v_stride, lines, t.ks + i, w.s + row * TILE + i);
  if (i < t.n) {
    alignas(32) uint8_t rest[8 * MAX_CODED_DIM / 2 + 32];
    const int64_t bytes = w.key.row_bytes;
    for (int j = 0; j < t.n - i; j++) memcpy(rest + j * bytes, t.k + (i + j) * t.k_stride, bytes);
    memset(rest + (t.n - i) * bytes, 0, (8 - t.n + i) * bytes + 32);
    score8<R>(w, table, row, q, rest, bytes, loads, rest, 0, t.ks + i, w.s + row * TILE + i);
  }
}

#define EACH_ROW_COUNT(call) \
  switch (rows) {            \
    case 1: call(1); break;  \
    case 2: call(2); break;  \
    case 3: call(3); break;  \
    default: call(4);        \
  }

void fast_scores(Work& w, const Tile& t) {
  const Planes table(w.key.keys);
  for (int64_t row = 0; row < w.rows; row += BLOCK_ROWS) {
    const int64_t rows = w.rows - row;
#define CALL(R) score_rows<R>(w, t, row, table)
    EACH_ROW_COUNT(CALL)
#undef CALL
  }
}

// acc of R rows for 16 of the 64 coordinates of a block: half of the bytes of each lane, low or high nibbles
template <int R>
INLINE void add_block(const Work& w, const Planes& table, const Tile& t, int64_t row, int64_t block, bool whole, bool last,
                      bool odd, const uint8_t* ahead, int64_t ahead_lines) {
  const uint8_t* p = t.v + block * 32;
  const int64_t stride = t.v_stride;
  const int32_t* weights = (const int32_t*)(w.w16 + row * TILE);
  const int n = t.n;
  __m256i acc[R][2];
  UNROLL for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = _mm256_setzero_si256();
  for (int i = 0; i < n; i += 2, p += 2 * stride) {
    for (int64_t l = 0; l < ahead_lines; l++, ahead += 64) _mm_prefetch((const char*)ahead, _MM_HINT_T0);
    const uint8_t* next = i + 1 < n ? p + stride : p;
    const __m256i a = whole ? load<__m256i>(p) : _mm256_zextsi128_si256(load<__m128i>(p));
    const __m256i b = whole ? load<__m256i>(next) : _mm256_zextsi128_si256(load<__m128i>(next));
    __m256i v[2];
    Planes::look_up(table, last ? _mm256_unpackhi_epi8(a, b) : _mm256_unpacklo_epi8(a, b), odd, &v[0], &v[1]);
    UNROLL for (int r = 0; r < R; r++) {
      const __m256i x = _mm256_set1_epi32(weights[r * (TILE / 2) + unsigned(i) / 2]);
      UNROLL for (int h = 0; h < 2; h++) acc[r][h] = dp(acc[r][h], v[h], x);
    }
  }
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int h = 0; h < 2; h++) {
    float* o = w.acc + (row + r) * w.v_pad + block * 64 + last * 32 + odd * 16 + h * 8;
    const __m256 old = _mm256_mul_ps(_mm256_loadu_ps(o), _mm256_set1_ps(w.correction[row + r]));
    _mm256_storeu_ps(o, _mm256_fmadd_ps(_mm256_cvtepi32_ps(acc[r][h]), _mm256_set1_ps(w.w_unit[row + r]), old));
  }
}

template <int R> void add_rows(Work& w, const Tile& t, int64_t row, const Planes& table) {
  const int64_t blocks = (w.dv + 63) / 64;
  const int64_t lines = row ? 0 : (2 * w.key.row_bytes + 64 * blocks - 1) / (64 * blocks);
  for (int64_t b = 0; b < blocks; b++) {
    const uint8_t* ahead = t.soon_k + b * lines * 64 * ((t.n + 1) / 2);
    if (w.value.row_bytes - b * 32 > 16) {
      add_block<R>(w, table, t, row, b, true, false, false, ahead, lines);
      add_block<R>(w, table, t, row, b, true, false, true, ahead, 0);
      add_block<R>(w, table, t, row, b, true, true, false, ahead, 0);
      add_block<R>(w, table, t, row, b, true, true, true, ahead, 0);
    } else {
      for (int part = 0; part < 4; part++) add_block<R>(w, table, t, row, b, false, part / 2, part % 2, ahead, 0);
    }
  }
}

void fast_accumulate(Work& w, const Tile& t) {
  const Planes table(w.value.values);
  fix_weights(w, t);
  for (int64_t row = 0; row < w.rows; row += BLOCK_ROWS) {
    const int64_t rows = w.rows - row;
#define CALL(R) add_rows<R>(w, t, row, table)
    EACH_ROW_COUNT(CALL)
#undef CALL
  }
}

void fast_finish(Work& w, float* out, int64_t stride) {
  for (int64_t r = 0; r < w.rows; r++)
    for (int64_t d = 0; d < w.dv; d++) {
      const int64_t byte = d % 64 / 2, last = byte % 16 / 8, at = byte / 16 * 4 + byte % 4, half = byte % 8 / 4;
      out[r * stride + d] = w.acc[r * w.v_pad + d / 64 * 64 + last * 32 + d % 2 * 16 + half * 8 + at];
    }
}

const KeyKernel* fast_key(const Codec& c) {
  static const KeyKernel kernel = {prepare_keys, fast_scores};
  return c.bits == 4 ? &kernel : nullptr;
}
const ValueKernel* fast_value(const Codec& c) {
  static const ValueKernel kernel = {nullptr, nullptr, fast_accumulate, fast_finish};
  return c.bits == 4 ? &kernel : nullptr;
}

}  // namespace
