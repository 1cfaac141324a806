// Kernels with float32 arithmetic for every width: decode a tile once (keys transposed), then multiply. They are the
// exact mode, the way of vectors stored at 16 bits, and everything on machines without special kernels.
#pragma once
#include "work.hpp"

namespace {

template <int B> INLINE void decode_codes(const Codec& c, const uint8_t* p, float* out) {
  const uint8_t* end = p + c.row_bytes;
  for (int64_t d = 0; d < c.dim; d += 8, p += B) {
    uint64_t word = 0;
    if (end - p >= 8) memcpy(&word, p, 8);  // one load; a copy of 3 bytes is put together in memory
    else memcpy(&word, p, B);
    for (int i = 0; i < 8; i++) out[d + i] = c.levels[(word >> (B * i)) & ((1 << B) - 1)];
  }
}

#if defined(__AVX512F__)
// 16 codes at once: pdep spreads them to bytes
template <int B> INLINE void decode_fast(const Codec& c, const uint8_t* p, float* out) {
  constexpr uint64_t mask = 0x0101010101010101ull * ((1 << B) - 1);
  for (int64_t d = 0; d < c.dim; d += 16, p += 2 * B) {
    uint64_t low = 0, high = 0;
    memcpy(&low, p, B), memcpy(&high, p + B, B);
    const __m128i bytes = _mm_set_epi64x(int64_t(_pdep_u64(high, mask)), int64_t(_pdep_u64(low, mask)));
    const __m512i i = _mm512_cvtepu8_epi32(bytes);
    __m512 x;
    if (B <= 4) x = _mm512_permutexvar_ps(i, _mm512_loadu_ps(c.levels));
    else if (B == 5) x = _mm512_permutex2var_ps(_mm512_loadu_ps(c.levels), i, _mm512_loadu_ps(c.levels + 16));
    else x = _mm512_i32gather_ps(i, c.levels, 4);
    _mm512_storeu_ps(out + d, x);
  }
}
#define decode_codes decode_fast
#endif

// The levels of a stored row (or at 16 bits the numbers themselves), without its scale.
inline void decode_row(const Codec& c, const uint8_t* p, float* out) {
  switch (c.bits) {
    case 2: return decode_codes<2>(c, p, out);
    case 3: return decode_codes<3>(c, p, out);
    case 4: return decode_codes<4>(c, p, out);
    case 5: return decode_codes<5>(c, p, out);
    case 6: return decode_codes<6>(c, p, out);
    case 8: return decode_codes<8>(c, p, out);
    default: return load_floats(p, c.dtype, c.dim, out);
  }
}

// Tokens [0, n) as kt[d][t], 16 by 16; t up to the next multiple of 16 is filled with zeros.
inline void decode_transposed(const Codec& c, const uint8_t* rows, int64_t stride, int n, float* kt, float* buffer) {
  const int64_t pad = round_up(c.dim, 16);
  for (int t = 0; t < n; t += 16) {
    const int count = n - t < 16 ? n - t : 16;
    for (int i = 0; i < count; i++) {
      decode_row(c, rows + (t + i) * stride, buffer + i * pad);
      for (int64_t d = c.dim; d < pad; d++) buffer[i * pad + d] = 0;
    }
    for (int64_t d = 0; d < pad; d += 16) {
      v16 block[16];
      for (int i = 0; i < 16; i++) block[i] = i < count ? load<v16>(buffer + i * pad + d) : (v16){};
      transpose16(block);
      for (int i = 0; i < 16; i++) store(kt + (d + i) * TILE + t, block[i]);
    }
  }
}

// s[r][t] = (Σ_d q[r][d] · kt[d][t]) · ks[t] + shift[r] for R rows and 2·VL tokens
template <int R> INLINE void score_block(const float* q, int64_t stride, const float* kt, int64_t dim, const float* ks,
                                         const float* shift, float* s) {
  vf total[R][2] = {};
  for (int64_t from = 0; from < dim; from += 16) {  // sums of sums: fewer roundings on the way of each product
    const int64_t to = dim - from < 16 ? dim : from + 16;
    vf acc[R][2] = {};
    for (int64_t d = from; d < to; d++) {
      const vf k0 = load<vf>(kt + d * TILE), k1 = load<vf>(kt + d * TILE + VL);
      for (int r = 0; r < R; r++) {
        const float x = q[r * stride + d];
        acc[r][0] += k0 * x, acc[r][1] += k1 * x;
      }
    }
    for (int r = 0; r < R; r++) total[r][0] += acc[r][0], total[r][1] += acc[r][1];
  }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < 2; i++) store(s + r * TILE + i * VL, total[r][i] * load<vf>(ks + i * VL) + shift[r]);
}

inline void float_scores(Work& w, const Tile& t, const Pass&) {
  decode_transposed(w.key, t.k, t.k_stride, t.n, w.kt, w.buffer);
  for (int i = 0; i < t.n; i += 2 * VL) {
    int64_t r = 0;
    for (; r + 4 <= w.rows; r += 4)
      score_block<4>(w.q + r * w.k_pad, w.k_pad, w.kt + i, w.dk, t.ks + i, w.shift + r, w.s + r * TILE + i);
    for (; r < w.rows; r++)
      score_block<1>(w.q + r * w.k_pad, w.k_pad, w.kt + i, w.dk, t.ks + i, w.shift + r, w.s + r * TILE + i);
  }
}

// The same with products and sums in double: a score of 200 with 24 bits would be off by 1e-5.
inline void double_scores(Work& w, const Tile& t, const Pass&) {
  typedef double vd __attribute__((vector_size(8 * VL)));
  decode_transposed(w.key, t.k, t.k_stride, t.n, w.kt, w.buffer);
  alignas(64) double s[TILE];
  for (int64_t r = 0; r < w.rows; r++) {
    const double* q = w.q64 + r * w.k_pad;
    double most = -INFINITY;
    for (int i = 0; i < t.n; i += VL) {
      vd even = {}, odd = {};
      for (int64_t d = 0; d + 1 < w.dk; d += 2) {
        even += __builtin_convertvector(load<vf>(w.kt + d * TILE + i), vd) * q[d];
        odd += __builtin_convertvector(load<vf>(w.kt + (d + 1) * TILE + i), vd) * q[d + 1];
      }
      store(s + i, (even + odd) * __builtin_convertvector(load<vf>(t.ks + i), vd) + w.shift64[r]);
    }
    for (int i = 0; i < t.n; i++) most = s[i] > most ? s[i] : most;
    const bool new_base = most > w.base[r] || w.most[r] == -INFINITY;
    if (new_base && fabs(most) < 1e30 && !(w.a.softcap > 0)) w.base[r] = float(most);
    const double base = w.base[r];
    for (int i = 0; i < int(round_up(t.n, VL)); i++) w.s[r * TILE + i] = float(s[i] - base);
  }
}

// Values as [t][d]; a row that is not finite becomes zeros and its scale NaN.
inline void load_values(Work& w, Tile& t) {
  for (int i = 0; i < t.n; i++) {
    float* row = w.values + i * w.v_pad;
    decode_row(w.value, t.v + i * t.v_stride, row);
    for (int64_t d = w.dv; d < w.v_pad; d++) row[d] = 0;
    if (w.value.bits < 16) continue;
    vf check = {};
    for (int64_t d = 0; d < w.v_pad; d += VL) check += load<vf>(row + d) * 0.f;
    if (!all_finite(check)) t.vs[i] = NAN, memset(row, 0, 4 * w.v_pad);
  }
}

template <int R> INLINE void value_block(const Work& w, int64_t row, int64_t d, int n) {
  vf acc[R][2];
  for (int r = 0; r < R; r++)
    for (int i = 0; i < 2; i++) acc[r][i] = load<vf>(w.acc + (row + r) * w.v_pad + d + i * VL) * w.correction[row + r];
  for (int t = 0; t < n; t++) {
    const vf v0 = load<vf>(w.values + t * w.v_pad + d), v1 = load<vf>(w.values + t * w.v_pad + d + VL);
    for (int r = 0; r < R; r++) {
      const float x = w.s[(row + r) * TILE + t];
      acc[r][0] += v0 * x, acc[r][1] += v1 * x;
    }
  }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < 2; i++) store(w.acc + (row + r) * w.v_pad + d + i * VL, acc[r][i]);
}

inline void float_accumulate(Work& w, const Tile& t) {
  for (int64_t d = 0; d < w.dv; d += 2 * VL) {
    int64_t r = 0;
    for (; r + 4 <= w.rows; r += 4) value_block<4>(w, r, d, t.n);
    for (; r < w.rows; r++) value_block<1>(w, r, d, t.n);
  }
}

inline void float_finish(Work& w, float* out, int64_t stride) {
  for (int64_t r = 0; r < w.rows; r++) memcpy(out + r * stride, w.acc + r * w.v_pad, 4 * w.dv);
}

const KeyKernel float_keys = {[](Work&) {}, nullptr, float_scores}, double_keys = {[](Work&) {}, nullptr, double_scores};
const ValueKernel float_values = {load_values, nullptr, float_accumulate, float_finish};

}  // namespace
