// int16 kernels for NEON, every width of codes on the natural bytes.
//
// Codes are brought to bytes, 16 at a time in their order; their levels are looked up as two planes of bytes (tbl) and zipped
// to int16; smlal multiplies and adds to int32. Weighted sums look the levels of a block up once for all rows. Sums stay in
// int32 within a tile and go to float32 after it; those of wide keys go sooner, which leaves more bits to the query.
#pragma once
#include "fixed.hpp"

namespace {

constexpr int BLOCK_ROWS = 4;
constexpr int CODES = 16;  // of one look-up
constexpr int BLOCK = 64;  // coordinates of values whose levels are held at once

INLINE int32x4_t dp(int32x4_t acc, int16x8_t a, int16x8_t b) {
  return vmlal_high_s16(vmlal_s16(acc, vget_low_s16(a), vget_low_s16(b)), a, b);
}

template <int B> struct Width {
  static constexpr int BYTES = CODES * B / 8, SEGMENT = B <= 4 ? MAX_CODED_DIM : KEY_SEGMENT;
  struct Bytes { alignas(16) uint8_t b[16]; };
  struct Shifts { alignas(16) int16_t s[8]; };
  static constexpr Bytes window(int from) {  // a 16-bit place gets the bytes of a code
    Bytes x{};
    for (int i = 0; i < 16; i++) x.b[i] = uint8_t((from + i / 2) * B / 8 + i % 2);
    return x;
  }
  static constexpr Shifts shift() {  // where it begins in them; the same for the second 8 codes
    Shifts x{};
    for (int i = 0; i < 8; i++) x.s[i] = int16_t(-(i * B % 8));
    return x;
  }
  // the codes from p on; 16 bytes are read, 8 at 4 bits
  INLINE uint8x16_t codes(const uint8_t* p) {
    if constexpr (B == 8) {
      return vld1q_u8(p);
    } else if constexpr (B == 4) {
      const uint8x8_t x = vld1_u8(p), low = vand_u8(x, vdup_n_u8(15)), high = vshr_n_u8(x, 4);
      return vcombine_u8(vzip1_u8(low, high), vzip2_u8(low, high));
    } else {
      static constexpr Bytes first = window(0), last = window(8);
      static constexpr Shifts by = shift();
      const uint8x16_t x = vld1q_u8(p);
      const int16x8_t s = vld1q_s16(by.s);
      const uint16x8_t a = vshlq_u16(vreinterpretq_u16_u8(vqtbl1q_u8(x, vld1q_u8(first.b))), s);
      const uint16x8_t b = vshlq_u16(vreinterpretq_u16_u8(vqtbl1q_u8(x, vld1q_u8(last.b))), s);
      return vandq_u8(vuzp1q_u8(vreinterpretq_u8_u16(a), vreinterpretq_u8_u16(b)), vdupq_n_u8((1 << B) - 1));
    }
  }
};

// The level table, 16 levels in a register.
template <int B> struct Planes {
  static constexpr int N = B <= 4 ? 1 : 1 << (B - 4);
  uint8x16_t low[N], high[N];
  explicit Planes(const Codec::Fixed& c) {
    for (int t = 0; t < N; t++) {
      uint8_t a[16], b[16];
      for (int i = 0; i < 16; i++) a[i] = uint8_t(c.level[16 * t + i] & 255), b[i] = uint8_t(uint16_t(c.level[16 * t + i]) >> 8);
      low[t] = vld1q_u8(a), high[t] = vld1q_u8(b);
    }
  }
  INLINE uint8x16_t pick(const uint8x16_t* plane, uint8x16_t codes) {
    if constexpr (N == 1) return vqtbl1q_u8(plane[0], codes);
    else if constexpr (N == 2) return vqtbl2q_u8({{plane[0], plane[1]}}, codes);
    else {
      uint8x16_t found = vqtbl4q_u8({{plane[0], plane[1], plane[2], plane[3]}}, codes);
      UNROLL for (int t = 4; t < N; t += 4)  // codes of other parts of the table leave what is there
        found = vqtbx4q_u8(found, {{plane[t], plane[t + 1], plane[t + 2], plane[t + 3]}}, vsubq_u8(codes, vdupq_n_u8(uint8_t(16 * t))));
      return found;
    }
  }
  // levels of the first and of the last 8 codes
  INLINE void look_up(const Planes& x, uint8x16_t codes, int16x8_t* levels) {
    const uint8x16_t a = pick(x.low, codes), b = pick(x.high, codes);
    levels[0] = vreinterpretq_s16_u8(vzip1q_u8(a, b)), levels[1] = vreinterpretq_s16_u8(vzip2q_u8(a, b));
  }
};

template <int B> Places<1, BLOCK_ROWS, 4> key_places(const Work& w) {
  static constexpr uint8_t order[CODES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return {order, CODES, round_up(w.dk, CODES), Width<B>::SEGMENT};
}
template <int B> void prepare_keys(Work& w) { fix_queries(w, key_places<B>(w)); }
template <int B> void prepare_rest(Work& w) { fix_query_rests(w, key_places<B>(w)); }

// s of R rows with 4 tokens
template <int B, int R>
INLINE void score4(const Pass& pass, const Planes<B>& planes, int64_t row, const int16_t* q, const uint8_t* p, int64_t stride,
                   int64_t loads, const float* ks, float* s) {
  typedef Width<B> W;
  constexpr int64_t SEGMENT = W::SEGMENT / CODES;
  float32x4_t sums[R];
  UNROLL for (int r = 0; r < R; r++) sums[r] = vdupq_n_f32(0);
  for (int64_t from = 0; from < loads; from += SEGMENT) {
    const int64_t to = loads - from < SEGMENT ? loads : from + SEGMENT;
    int32x4_t acc[R][4];
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int n = 0; n < 4; n++) acc[r][n] = vdupq_n_s32(0);
    for (int64_t l = from; l < to; l++) {
      int16x8_t v[4][2];
      UNROLL for (int n = 0; n < 4; n++) Planes<B>::look_up(planes, W::codes(p + l * W::BYTES + n * stride), v[n]);
      UNROLL for (int h = 0; h < 2; h++) UNROLL for (int r = 0; r < R; r++) {
        const int16x8_t x = vld1q_s16(q + ((2 * l + h) * R + r) * 8);
        UNROLL for (int n = 0; n < 4; n++) acc[r][n] = dp(acc[r][n], v[n][h], x);
      }
    }
    UNROLL for (int r = 0; r < R; r++) {
      const float32x4_t a = vpaddq_f32(vcvtq_f32_s32(acc[r][0]), vcvtq_f32_s32(acc[r][1]));
      const float32x4_t b = vpaddq_f32(vcvtq_f32_s32(acc[r][2]), vcvtq_f32_s32(acc[r][3]));
      sums[r] = vaddq_f32(sums[r], vpaddq_f32(a, b));
    }
  }
  UNROLL for (int r = 0; r < R; r++) {
    const float32x4_t old = pass.shift ? vdupq_n_f32(pass.shift[row + r]) : vld1q_f32(s + r * TILE);
    vst1q_f32(s + r * TILE, vfmaq_f32(old, vmulq_n_f32(sums[r], pass.unit[row + r]), vld1q_f32(ks)));
  }
}

template <int B, int R> void score_rows(Work& w, const Tile& t, const Pass& pass, int64_t row, const Planes<B>& planes) {
  const int64_t loads = (w.dk + CODES - 1) / CODES;
  const int16_t* q = pass.q + row * loads * CODES;
  int i = 0;
  for (; i + 4 <= t.n; i += 4)
    score4<B, R>(pass, planes, row, q, t.k + i * t.k_stride, t.k_stride, loads, t.ks + i, w.s + row * TILE + i);
  if (i < t.n) {
    const LastKeys<4> last(w, t, i);
    score4<B, R>(pass, planes, row, q, last.rows, w.key.row_bytes, loads, t.ks + i, w.s + row * TILE + i);
  }
}

template <int B> void int16_scores(Work& w, const Tile& t, const Pass& pass) {
  const Planes<B> planes(pass.levels);
  each_block<BLOCK_ROWS>(w.rows, [&](int64_t row, auto count) {
    constexpr int R = decltype(count)::value;
    if (!adds_nothing(pass, row, R)) score_rows<B, R>(w, t, pass, row, planes);
  });
}

// acc of R rows for 16 coordinates, whose levels lie at v, BLOCK apart for each token
template <int R> INLINE void add16(const Work& w, const Tile& t, int64_t row, const int16_t* v, float* to) {
  const int16_t* weights = w.w16 + row * TILE;
  int32x4_t acc[R][4];
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int m = 0; m < 4; m++) acc[r][m] = vdupq_n_s32(0);
  for (int i = 0; i < t.n; i++, v += BLOCK) {
    const int16x8_t a = vld1q_s16(v), b = vld1q_s16(v + 8);
    UNROLL for (int r = 0; r < R; r++) {
      const int16x8_t x = vld1q_dup_s16(weights + r * TILE + i);
      acc[r][0] = vmlal_s16(acc[r][0], vget_low_s16(a), vget_low_s16(x)), acc[r][1] = vmlal_high_s16(acc[r][1], a, x);
      acc[r][2] = vmlal_s16(acc[r][2], vget_low_s16(b), vget_low_s16(x)), acc[r][3] = vmlal_high_s16(acc[r][3], b, x);
    }
  }
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int m = 0; m < 4; m++) {
    float* o = to + r * w.v_pad + 4 * m;
    const float32x4_t old = vmulq_n_f32(vld1q_f32(o), w.correction[row + r]);
    vst1q_f32(o, vfmaq_n_f32(old, vcvtq_f32_s32(acc[r][m]), w.w_unit[row + r]));
  }
}

template <int B> void int16_accumulate(Work& w, const Tile& t) {
  const Planes<B> planes(w.value.values);
  fix_weights(w, t);
  alignas(16) int16_t levels[TILE * BLOCK];
  for (int64_t from = 0; from < w.dv; from += BLOCK) {
    const int64_t left = round_up(w.dv - from < BLOCK ? w.dv - from : BLOCK, CODES);
    for (int i = 0; i < t.n; i++)
      for (int64_t d = 0; d < left; d += CODES) {
        int16x8_t v[2];
        Planes<B>::look_up(planes, Width<B>::codes(t.v + i * t.v_stride + (from + d) * B / 8), v);
        vst1q_s16(levels + i * BLOCK + d, v[0]), vst1q_s16(levels + i * BLOCK + d + 8, v[1]);
      }
    each_block<BLOCK_ROWS>(w.rows, [&](int64_t row, auto count) {
      float* to = w.acc + row * w.v_pad + from;
      for (int64_t d = 0; d < left; d += CODES) add16<decltype(count)::value>(w, t, row, levels + d, to + d);
    });
  }
}

inline void int16_finish(Work& w, float* out, int64_t stride) {
  for (int64_t r = 0; r < w.rows; r++) memcpy(out + r * stride, w.acc + r * w.v_pad, 4 * w.dv);
}

const KeyKernel* int16_key(const Codec& c) {
  return by_width(c.bits, [](auto width) -> const KeyKernel* {
    constexpr int B = decltype(width)::value;
    static const KeyKernel k = {prepare_keys<B>, prepare_rest<B>, int16_scores<B>};
    return &k;
  });
}
const ValueKernel* int16_value(const Codec& c) {
  return by_width(c.bits, [](auto width) -> const ValueKernel* {
    constexpr int B = decltype(width)::value;
    static const ValueKernel k = {nullptr, nullptr, int16_accumulate<B>, int16_finish};
    return &k;
  });
}

}  // namespace
