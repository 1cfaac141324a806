// Quantising a rotated tile, lane = vector: codes as the words of the bit-stream, and scales.
#pragma once
#include "floats.hpp"

namespace {

// index = number of boundaries strictly below x, and the level it stands for
#if defined(__AVX512F__)
// The boundaries as a search tree: level j of the tree has 2^j nodes, at most 128, in registers or at least in L1.
INLINE __m512 tree_node(const float* nodes, int count, __m512i i) {
  if (count <= 16) return _mm512_permutexvar_ps(i, _mm512_loadu_ps(nodes));
  __m512 x = _mm512_permutex2var_ps(_mm512_loadu_ps(nodes), i, _mm512_loadu_ps(nodes + 16));
  for (int at = 32; at < count; at += 32) {
    const __mmask16 here = _mm512_cmpeq_epi32_mask(_mm512_srli_epi32(i, 5), _mm512_set1_epi32(at / 32));
    x = _mm512_mask_mov_ps(x, here, _mm512_permutex2var_ps(_mm512_loadu_ps(nodes + at), i, _mm512_loadu_ps(nodes + at + 16)));
  }
  return x;
}
template <int B> struct Quantiser {
  alignas(64) float tree[B][B == 8 ? 128 : 32];
  const float* levels;
  explicit Quantiser(const Codec& c) : levels(c.levels) {
    for (int j = 0; j < B; j++)
      for (int i = 0; i < (B == 8 ? 128 : 32); i++) {
        const int at = ((i & ((1 << j) - 1)) * 2 + 1) << (B - 1 - j);  // how many codes lie left of this node
        tree[j][i] = c.bounds[at - 1];
      }
  }
  INLINE void find(const Quantiser& q, v16 x, i16& code, v16& level) {
    __m512i i = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int j = 0; j < B; j++) {
      const __mmask16 above = _mm512_cmp_ps_mask((__m512)x, tree_node(q.tree[j], 1 << j, i), _CMP_GT_OQ);
      i = _mm512_add_epi32(i, i);
      i = _mm512_mask_add_epi32(i, above, i, _mm512_set1_epi32(1));
    }
    code = (i16)i;
    if (B <= 6) level = (v16)tree_node(q.levels, 1 << B, i);
    else level = (v16)_mm512_i32gather_ps(i, q.levels, 4);
  }
};
#else
template <int B> struct Quantiser {
  const Codec& c;
  explicit Quantiser(const Codec& c) : c(c) {}
  INLINE void find(const Quantiser& q, v16 x, i16& code, v16& level) {
    if (B <= 4) {
      i16 n = {};
      v16 y = x - x + q.c.levels[0];  // climbs by one gap at each boundary passed, exact enough for sums of squares
      for (int i = 0; i < (1 << B) - 1; i++) n -= x > q.c.bounds[i];
      for (int l = 0; l < 16; l++) y[l] = q.c.levels[n[l]];
      code = n, level = y;
      return;
    }
    for (int l = 0; l < 16; l++) {
      int n = 0;
      for (int half = 1 << (B - 1); half; half >>= 1) n += x[l] > q.c.bounds[n + half - 1] ? half : 0;
      code[l] = n, level[l] = q.c.levels[n];
    }
  }
};
#endif

// What a tile is measured by before it is quantised: its root mean square, after a power of two that keeps squares in range.
struct Norms {
  v16 peak, check, factor, squares, rms;
};
INLINE Norms measure(const Codec& c, const v16* tile) {
  Norms n = {};
  for (int64_t d = 0; d < c.dim; d++) {
    const v16 a = (v16)((i16)tile[d] & 0x7fffffff);
    n.peak = a > n.peak ? a : n.peak;
    n.check += tile[d] * 0.f;
  }
  const i16 exponent = 254 - ((i16)n.peak >> 23);
  n.factor = (v16)((exponent > 1 ? exponent : exponent - exponent + 1) << 23);  // a power of two: exact
  for (int64_t d = 0; d < c.dim; d++) { const v16 u = tile[d] * n.factor; n.squares += u * u; }
  for (int l = 0; l < 16; l++) n.rms[l] = sqrtf(n.squares[l] / float(c.dim));
  return n;
}

// The scale of a lane as it is stored.
INLINE float finished(const Codec& c, const Norms& n, int l, float scale, float energy) {
  scale = energy > 0 && n.peak[l] > 0 ? scale / n.factor[l] : 0;
  const float most = c.dtype == F16 ? 65504.f : 3.402823466e38f;
  scale = scale > most ? most : scale < -most ? -most : scale;
  return n.check[l] == 0 ? scale : NAN;
}

// Each coordinate to its nearest level.
template <int B> void quantise(const Codec& c, const v16* tile, i16* words, float* scales) {
  const int64_t dim = c.dim;
  const Quantiser<B> table(c);
  const Norms n = measure(c, tile);
  const v16 inverse = n.factor * (n.rms > 0 ? 1.f / n.rms : n.rms);
  v16 energy = {}, dot = {};
  for (int64_t i = 0; i < (dim * B + 31) / 32; i++) words[i] = (i16){};
  for (int64_t d = 0; d < dim; d++) {
    i16 code;
    v16 level;
    const v16 x = tile[d] * inverse;
    Quantiser<B>::find(table, x, code, level);
    energy += level * level;
    dot += x * level;
    const int at = int(d * B % 32);
    words[d * B / 32] |= code << at;
    if (at + B > 32) words[d * B / 32 + 1] |= code >> (32 - at);
  }
  for (int l = 0; l < 16; l++) {
    const float scale = c.lsq ? dot[l] * n.rms[l] / energy[l] : sqrtf(n.squares[l] / energy[l]);
    scales[l] = finished(c, n, l, scale, energy[l]);
  }
}

}  // namespace
