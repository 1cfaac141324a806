// The rotation R = H · diag(s) / √D of 16 vectors at once, lane = vector: tile[d] holds coordinate d of all of them.
#pragma once
#include "simd.hpp"

namespace {

// a[i][j] <-> a[j][i] of 16 x 16 floats: four rounds of zipping the first half with the second.
INLINE void transpose16(v16* a) {
#if defined(__AVX512F__)
  v16 b[16];
  const i16 lo = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
  const i16 hi = {8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
#define ZIP(to, from)                                                                          \
  _Pragma("GCC unroll 8") for (int i = 0; i < 8; i++) {                                        \
    to[2 * i] = (v16)_mm512_permutex2var_ps((__m512)from[i], (__m512i)lo, (__m512)from[i + 8]); \
    to[2 * i + 1] = (v16)_mm512_permutex2var_ps((__m512)from[i], (__m512i)hi, (__m512)from[i + 8]); \
  }
  ZIP(b, a) ZIP(a, b) ZIP(b, a) ZIP(a, b)
#undef ZIP
#else
  float t[16][16];
  memcpy(t, a, sizeof t);
  for (int i = 0; i < 16; i++) for (int j = 0; j < 16; j++) ((float*)a)[i * 16 + j] = t[j][i];
#endif
}

// Rows [count][dim] of floats (with this stride) into a tile; missing rows are zero.
INLINE void to_tile(const float* rows, int64_t stride, int64_t count, int64_t dim, v16* tile) {
  for (int64_t d = 0; d < dim; d += 16) {
    for (int i = 0; i < LANES; i++) {
      if (i < count && d + 16 <= dim) tile[d + i] = load<v16>(rows + i * stride + d);
      else { float x[16] = {}; if (i < count) memcpy(x, rows + i * stride + d, 4 * (dim - d)); tile[d + i] = load<v16>(x); }
    }
    transpose16(tile + d);
  }
}
INLINE void from_tile(v16* tile, int64_t stride, int64_t count, int64_t dim, float* rows) {
  for (int64_t d = 0; d < dim; d += 16) {
    transpose16(tile + d);
    for (int i = 0; i < count; i++) {
      if (d + 16 <= dim) store(rows + i * stride + d, tile[d + i]);
      else memcpy(rows + i * stride + d, &tile[d + i], 4 * (dim - d));
    }
  }
}

// tile = H tile, or Hᵀ tile; H is Sylvester ⊗ Paley of order `base`.
template <class V> inline void hadamard(const Codec& c, V* __restrict a, bool transposed) {
  const int64_t n = c.dim, m = c.base;
  if (m > 1) {
    V t[36];
    for (int64_t b = 0; b < n; b += m) {
      for (int64_t i = 0; i < m; i++) t[i] = a[b + i];
      for (int64_t i = 0; i < m; i++) {
        V s = {};
        for (int64_t j = 0; j < m; j++) s += t[j] * (transposed ? c.paley[j * m + i] : c.paley[i * m + j]);
        a[b + i] = s;
      }
    }
  }
  int64_t h = m;
  for (; 4 * h <= n; h *= 4)  // two doublings at once: half the memory traffic
    for (int64_t i = 0; i < n; i += 4 * h)
      for (int64_t j = i; j < i + h; j++) {
        const V p = a[j] + a[j + h], q = a[j] - a[j + h], r = a[j + 2 * h] + a[j + 3 * h], s = a[j + 2 * h] - a[j + 3 * h];
        a[j] = p + r, a[j + h] = q + s, a[j + 2 * h] = p - r, a[j + 3 * h] = q - s;
      }
  for (; h < n; h *= 2)
    for (int64_t i = 0; i < n; i += 2 * h)
      for (int64_t j = i; j < i + h; j++) {
        const V p = a[j], q = a[j + h];
        a[j] = p + q, a[j + h] = p - q;
      }
}
INLINE void rotate(const Codec& c, v16* tile) {
  if (!c.base) return;
  for (int64_t d = 0; d < c.dim; d++) tile[d] *= c.sign[d];
  hadamard(c, tile, false);
}
INLINE void unrotate(const Codec& c, v16* tile) {
  if (!c.base) return;
  hadamard(c, tile, true);
  for (int64_t d = 0; d < c.dim; d++) tile[d] *= c.sign[d];
}

// One vector in double.
inline void rotate(const Codec& c, double* x) {
  if (!c.base) return;
  const double unit = 1 / sqrt(double(c.dim));
  for (int64_t d = 0; d < c.dim; d++) x[d] *= c.sign[d] > 0 ? unit : -unit;
  hadamard(c, x, false);
}

// x = H x for one vector of 2^k coordinates; up to ALONE of them are faster one by one, with the same bits.
#if defined(__AVX512F__)
constexpr int64_t ALONE = INT64_MAX;
INLINE void hadamard_row(const Codec& c, float* x) {  // 16 lanes along it
  const int64_t dim = c.dim;
  static const int32_t near[4][16] = {{1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14},
                                      {2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13},
                                      {4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11},
                                      {8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}};
  for (int64_t d = 0; d < dim; d += 16) {
    __m512 v = _mm512_loadu_ps(x + d);
#pragma GCC unroll 4
    for (int s = 0; s < 4; s++) {
      const __mmask16 upper = __mmask16(s == 0 ? 0xaaaa : s == 1 ? 0xcccc : s == 2 ? 0xf0f0 : 0xff00);
      const __m512 other = _mm512_permutexvar_ps(_mm512_loadu_si512(near[s]), v);
      v = _mm512_mask_sub_ps(_mm512_add_ps(v, other), upper, other, v);
    }
    _mm512_storeu_ps(x + d, v);
  }
  for (int64_t h = 16; h < dim; h *= 2)
    for (int64_t i = 0; i < dim; i += 2 * h)
      for (int64_t j = i; j < i + h; j += 16) {
        const __m512 p = _mm512_loadu_ps(x + j), q = _mm512_loadu_ps(x + j + h);
        _mm512_storeu_ps(x + j, _mm512_add_ps(p, q)), _mm512_storeu_ps(x + j + h, _mm512_sub_ps(p, q));
      }
}
#else
constexpr int64_t ALONE = 8;
INLINE void hadamard_row(const Codec& c, float* x) { hadamard(c, x, false); }  // H of 2^k is symmetric
#endif

// rows = R rows (or Rᵀ rows) in place, [count][stride] floats; nothing at 16 bits and where the caller rotates.
inline void rotate_rows(const Codec& c, float* rows, int64_t stride, int64_t count, bool inverse) {
  if (c.bits == 16 || !c.base) return;
  if (c.base == 1 && count <= ALONE) {
    for (int64_t r = 0; r < count; r++) {
      float* x = rows + r * stride;
      if (!inverse) for (int64_t d = 0; d < c.dim; d++) x[d] *= c.sign[d];
      hadamard_row(c, x);
      if (inverse) for (int64_t d = 0; d < c.dim; d++) x[d] *= c.sign[d];
    }
    return;
  }
  alignas(64) v16 tile[MAX_CODED_DIM];
  for (int64_t r = 0; r < count; r += LANES) {
    const int64_t n = count - r < LANES ? count - r : LANES;
    to_tile(rows + r * stride, stride, n, c.dim, tile);
    inverse ? unrotate(c, tile) : rotate(c, tile);
    from_tile(tile, stride, n, c.dim, rows + r * stride);
  }
}

}  // namespace
