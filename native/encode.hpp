// Encoding, lane = vector: subtract the offset, rotate, quantise, scale and pack 16 vectors at once; and the operations
// on stored rows outside of pages: decode, scores, values.
#pragma once
#include "fit.hpp"

namespace {

// 16 (or fewer) float rows [count][pad], offset already taken off, to rows of codes and scales anywhere.
template <int B>
void quantise_either(const Codec& c, const Fit& f, const v16* tile, int64_t first, int64_t heads, int count, i16* words, float* scales) {
  if (f.size < 0) quantise<B>(c, tile, words, scales);
  else quantise_fitted<B>(c, f, tile, first, heads, count, words, scales);
}
inline void encode_tile(const Codec& c, const Fit& f, const float* rows, int64_t pad, int64_t first, int64_t heads, int count,
                        uint8_t* const* to, void* const* scale_to) {
  alignas(64) v16 tile[MAX_CODED_DIM];
  alignas(64) i16 words[MAX_CODED_DIM / 4 + 16];
  float scales[16];
  to_tile(rows, pad, count, c.dim, tile);
  rotate(c, tile);
  switch (c.bits) {
    case 2: quantise_either<2>(c, f, tile, first, heads, count, words, scales); break;
    case 3: quantise_either<3>(c, f, tile, first, heads, count, words, scales); break;
    case 4: quantise_either<4>(c, f, tile, first, heads, count, words, scales); break;
    case 5: quantise_either<5>(c, f, tile, first, heads, count, words, scales); break;
    case 6: quantise_either<6>(c, f, tile, first, heads, count, words, scales); break;
    default: quantise_either<8>(c, f, tile, first, heads, count, words, scales);
  }
  for (int64_t b = 0; b < c.row_bytes; b += 64) {
    transpose16((v16*)words + b / 4);
    const int64_t n = c.row_bytes - b < 64 ? c.row_bytes - b : 64;
    for (int i = 0; i < count; i++) if (to[i]) memcpy(to[i] + b, words + b / 4 + i, n);
  }
  for (int i = 0; i < count; i++) if (to[i]) store_float(scale_to[i], c.dtype, 0, scales[i]);
}

// Vectors [first, first + count) of x [n, heads, dim], count at most 16; each becomes x · factor − offset
inline void encode_rows(const Codec& c, const Fit& f, const uint8_t* x, int64_t dtype, int64_t token, int64_t head, int64_t heads,
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
  if (c.bits != 16) encode_tile(c, f, rows, pad, first, heads, int(count), to, scale_to);
}

inline void encode_range(const Encode& a, int64_t first, int64_t count) {
  uint8_t* to[16];
  void* scale_to[16];
  for (int64_t i = 0; i < count; i++) {
    to[i] = a.codes + (first + i) * a.codec->row_bytes;
    scale_to[i] = (uint8_t*)a.scales + (first + i) * a.codec->scale_bytes;
  }
  encode_rows(*a.codec, a.fit, a.x, a.dtype, a.token, a.head, a.heads, nullptr, a.offset, first, count, to, scale_to);
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
    encode_rows(c, side ? p.value_fit : p.key_fit, side ? a.v : a.k, side ? a.v_dtype : a.k_dtype, side ? a.v_token : a.k_token,
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
