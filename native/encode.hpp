// Encoding, lane = vector: subtract the offset, rotate, quantise, scale and pack 16 vectors at once; and the operations
// on stored rows outside of pages: decode, scores, values.
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

// Codes of a rotated tile as the words of the bit-stream, lane = vector, and the scales.
template <int B> void quantise(const Codec& c, const v16* tile, i16* words, float* scales) {
  const int64_t dim = c.dim;
  const Quantiser<B> table(c);
  v16 peak = {}, check = {};
  for (int64_t d = 0; d < dim; d++) {
    const v16 a = (v16)((i16)tile[d] & 0x7fffffff);
    peak = a > peak ? a : peak;
    check += tile[d] * 0.f;
  }
  const i16 exponent = 254 - ((i16)peak >> 23);
  const v16 factor = (v16)((exponent > 1 ? exponent : exponent - exponent + 1) << 23);  // a power of two: exact
  v16 squares = {};
  for (int64_t d = 0; d < dim; d++) { const v16 u = tile[d] * factor; squares += u * u; }
  v16 rms, inverse;
  for (int l = 0; l < 16; l++) rms[l] = sqrtf(squares[l] / float(dim));
  inverse = factor * (rms > 0 ? 1.f / rms : rms);
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
    float scale = c.lsq ? dot[l] * rms[l] / energy[l] : sqrtf(squares[l] / energy[l]);
    scale = energy[l] > 0 && peak[l] > 0 ? scale / factor[l] : 0;
    const float most = c.dtype == F16 ? 65504.f : 3.402823466e38f;
    scale = scale > most ? most : scale < -most ? -most : scale;
    scales[l] = check[l] == 0 ? scale : NAN;
  }
}

// 16 (or fewer) float rows [count][pad], offset already taken off, to rows of codes and scales anywhere.
inline void encode_tile(const Codec& c, const float* rows, int64_t pad, int count, uint8_t* const* to, void* const* scale_to) {
  alignas(64) v16 tile[MAX_CODED_DIM];
  alignas(64) i16 words[MAX_CODED_DIM / 4 + 16];
  float scales[16];
  to_tile(rows, pad, count, c.dim, tile);
  rotate(c, tile);
  switch (c.bits) {
    case 2: quantise<2>(c, tile, words, scales); break;
    case 3: quantise<3>(c, tile, words, scales); break;
    case 4: quantise<4>(c, tile, words, scales); break;
    case 5: quantise<5>(c, tile, words, scales); break;
    case 6: quantise<6>(c, tile, words, scales); break;
    default: quantise<8>(c, tile, words, scales);
  }
  for (int64_t b = 0; b < c.row_bytes; b += 64) {
    transpose16((v16*)words + b / 4);
    const int64_t n = c.row_bytes - b < 64 ? c.row_bytes - b : 64;
    for (int i = 0; i < count; i++) if (to[i]) memcpy(to[i] + b, words + b / 4 + i, n);
  }
  for (int i = 0; i < count; i++) if (to[i]) store_float(scale_to[i], c.dtype, 0, scales[i]);
}

// Vectors [first, first + count) of x [n, heads, dim], count at most 16; each becomes x · factor − offset
inline void encode_rows(const Codec& c, const uint8_t* x, int64_t dtype, int64_t token, int64_t head, int64_t heads,
                        const float* factor, const float* offset, int64_t first, int64_t count, uint8_t* const* to, void* const* scale_to) {
  static thread_local Scratch scratch;
  const int64_t pad = round_up(c.dim, 16);
  float* rows = (float*)scratch.need(16 * pad * 4);
  for (int64_t i = 0; i < count; i++) {
    const int64_t t = (first + i) / heads, h = (first + i) % heads;
    if (!to[i]) { memset(rows + i * pad, 0, 4 * c.dim); continue; }
    load_floats(x + (t * token + h * head) * size_of(dtype), dtype, c.dim, rows + i * pad);
    if (factor) for (int64_t d = 0; d < c.dim; d++) rows[i * pad + d] *= factor[h * c.dim + d];
    if (offset) for (int64_t d = 0; d < c.dim; d++) rows[i * pad + d] -= offset[h * c.dim + d];
    if (c.bits == 16) store_floats(to[i], c.dtype, c.dim, rows + i * pad);
  }
  if (c.bits != 16) encode_tile(c, rows, pad, int(count), to, scale_to);
}

inline void encode_range(const Encode& a, int64_t first, int64_t count) {
  uint8_t* to[16];
  void* scale_to[16];
  for (int64_t i = 0; i < count; i++) {
    to[i] = a.codes + (first + i) * a.codec->row_bytes;
    scale_to[i] = (uint8_t*)a.scales + (first + i) * a.codec->scale_bytes;
  }
  encode_rows(*a.codec, a.x, a.dtype, a.token, a.head, a.heads, nullptr, a.offset, first, count, to, scale_to);
}

// Tokens and heads [first, first + count) into their slots (page · page_size + row, or −1: not kept).
inline void append_range(const Append& a, const int64_t* slots, int64_t first, int64_t count) {
  const Pages& p = *a.pages;
  for (int side = 0; side < 2; side++) {
    const Codec& c = side ? *p.value : *p.key;
    const int64_t codes_at = side ? p.value_codes : 0, scales_at = side ? p.value_scales : p.key_scales;
    uint8_t* to[16];
    void* scale_to[16];
    for (int64_t i = 0; i < count; i++) {
      const int64_t t = (first + i) / p.kv_heads, h = (first + i) % p.kv_heads, slot = slots[t];
      to[i] = nullptr, scale_to[i] = nullptr;
      if (slot < 0) continue;
      uint8_t* piece = p.data + (slot / p.page_size * p.kv_heads + h) * p.head_bytes;
      to[i] = piece + codes_at + slot % p.page_size * c.row_bytes;
      scale_to[i] = piece + scales_at + slot % p.page_size * c.scale_bytes;
      if (a.coded) {
        memcpy(to[i], (side ? a.v : a.k) + (first + i) * c.row_bytes, c.row_bytes);
        if (c.scale_bytes) memcpy(scale_to[i], (side ? a.v_scales : a.k_scales) + (first + i) * c.scale_bytes, c.scale_bytes);
      }
    }
    if (a.coded) continue;
    encode_rows(c, side ? a.v : a.k, side ? a.v_dtype : a.k_dtype, side ? a.v_token : a.k_token,
                side ? a.v_head : a.k_head, p.kv_heads, side ? nullptr : a.key_scale,
                side ? p.value_offset : p.key_offset, first, count, to, scale_to);
  }
}

// Rows of codes as scaled vectors in the rotated domain; offsets are the caller's.
inline float load_scale(const Codec& c, const uint8_t* scales, int64_t i) {
  return c.bits == 16 ? 1.f : load_float(scales, c.dtype, i);
}

inline void decode_range(const Decode& a, int64_t first, int64_t count) {
  const Codec& c = *a.codec;
  const int64_t pad = round_up(c.dim, 16);
  static thread_local Scratch scratch;
  float* rows = (float*)scratch.need(17 * pad * 4);
  float* offset = rows + 16 * pad;
  for (int64_t i = 0; i < count; i++) {
    float* row = rows + i * pad;
    decode_row(c, a.codes + (first + i) * c.row_bytes, row);
    const float scale = load_scale(c, a.scales, first + i);
    if (c.bits != 16) for (int64_t d = 0; d < c.dim; d++) row[d] *= scale;
  }
  if (!a.rotated) rotate_rows(c, rows, pad, count, true);
  for (int64_t i = 0; i < count; i++) {
    if (a.offset) {
      memcpy(offset, a.offset + (first + i) % a.heads * c.dim, 4 * c.dim);
      if (a.rotated) rotate_rows(c, offset, pad, 1, false);
      for (int64_t d = 0; d < c.dim; d++) rows[i * pad + d] += offset[d];
    }
    store_floats((char*)a.out + (first + i) * c.dim * size_of(a.dtype), a.dtype, c.dim, rows + i * pad);
  }
}

// out[query row][first … first + count) of one KV head
inline void scores_range(const Scores& a, int64_t kv_head, int64_t first, int64_t count) {
  const Codec& c = *a.codec;
  const int64_t pad = round_up(c.dim, 16), group = a.heads / a.kv_heads;
  static thread_local Scratch scratch;
  float* buffer = (float*)scratch.need((17 * pad + pad * TILE + 2 * TILE) * 4);
  float *q = buffer + 16 * pad, *kt = q + pad, *ks = kt + pad * TILE, *s = ks + TILE;
  decode_transposed(c, a.codes + (first * a.kv_heads + kv_head) * c.row_bytes, a.kv_heads * c.row_bytes, int(count), kt, buffer);
  for (int64_t i = 0; i < TILE; i++) ks[i] = i < count ? load_scale(c, a.scales, (first + i) * a.kv_heads + kv_head) : 0;
  for (int64_t r = 0; r < a.tokens * group; r++) {
    const int64_t t = r / group, h = kv_head * group + r % group;
    load_floats((const char*)a.q + (t * a.q_token + h * a.q_head) * size_of(a.dtype), a.dtype, c.dim, q);
    float shift = 0;
    if (a.offset) for (int64_t d = 0; d < c.dim; d++) shift += q[d] * a.offset[kv_head * c.dim + d];
    rotate_rows(c, q, pad, 1, false);
    for (int64_t i = 0; i < count; i += 2 * VL) score_block<1>(q, pad, kt + i, c.dim, ks + i, &shift, s + i);
    const int64_t at = (t * a.heads + h) * a.n + first;
    store_floats((char*)a.out + at * size_of(a.dtype), a.dtype, count, s);
  }
}

// Query rows [first, first + count) of one KV head; a value that is not finite damages the rows that keep its weight. A
// value that no row keeps is not read.
inline void values_range(const Values& a, int64_t kv_head, int64_t first, int64_t count) {
  const Codec& c = *a.codec;
  const int64_t pad = round_up(c.dim, 64), group = a.heads / a.kv_heads;
  static thread_local Scratch scratch;
  float* row = (float*)scratch.need((count + 1) * pad * 4 + count * 8);
  float *acc = row + pad, *kept = acc + count * pad, *damage = kept + count;
  memset(acc, 0, count * pad * 4 + count * 8);
  const float threshold = float(a.threshold);
  int64_t weight_at[ROWS];
  float weights[ROWS];
  for (int64_t r = 0; r < count; r++)
    weight_at[r] = (first + r) / group * a.w_token + (kv_head * group + (first + r) % group) * a.w_head;
  for (int64_t i = 0; i < a.n; i++) {
    bool needed = !(threshold > 0);
    for (int64_t r = 0; r < count; r++) {
      weights[r] = load_float(a.weights, a.dtype, weight_at[r] + i * a.w_key);
      needed |= !(weights[r] < threshold);
    }
    if (!needed) continue;
    const int64_t at = i * a.kv_heads + kv_head;
    decode_row(c, a.codes + at * c.row_bytes, row);
    const float scale = load_scale(c, a.scales, at);
    float check = scale * 0.f;
    if (c.bits == 16) for (int64_t d = 0; d < c.dim; d++) check += row[d] * 0.f;
    for (int64_t r = 0; r < count; r++) {
      const float x = weights[r];
      const bool dropped = x < threshold;
      if (!(check == 0) && !(dropped && threshold > 0)) damage[r] = 1;
      if (dropped || !(check == 0)) continue;
      kept[r] += x;
      float* o = acc + r * pad;
      const float weight = x * scale;
      for (int64_t d = 0; d < c.dim; d++) o[d] += weight * row[d];
    }
  }
  rotate_rows(c, acc, pad, count, true);
  for (int64_t r = 0; r < count; r++) {
    const int64_t t = (first + r) / group, h = kv_head * group + (first + r) % group;
    float* o = acc + r * pad;
    for (int64_t d = 0; d < c.dim; d++) {
      if (a.offset) o[d] += kept[r] * a.offset[kv_head * c.dim + d];
      if (damage[r]) o[d] = NAN;
    }
    store_floats((char*)a.out + (t * a.heads + h) * c.dim * size_of(a.dtype), a.dtype, c.dim, o);
  }
}

}  // namespace
