// int16 kernels for AVX-512 with VNNI and VBMI, every width of codes on the natural bytes.
//
// Scores: a register holds 16 bytes of 4 tokens, one per 128-bit lane; shifts bring a code to the low end of each 16-bit
// place, vpermw looks its level up, vpdpwssd multiplies with the query, which lies in the same order.
// Weighted sums: a register holds the bytes of 2 tokens so interleaved that a 32-bit place has the same coordinate of
// both; vpdpwssd multiplies with a pair of weights. Sums stay in int32 within a tile and go to float32 after it.
#pragma once
#include "fixed.hpp"

namespace {

INLINE __m512i dp(__m512i acc, __m512i a, __m512i b) {
#if defined(__clang__)
  return _mm512_dpwssd_epi32(acc, a, b);
#else  // GCC copies the accumulator around the intrinsic
  asm("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
  return acc;
#endif
}

struct Bytes { alignas(64) uint8_t b[64]; };

struct Words { alignas(64) uint16_t w[32]; };

constexpr Words quarters = [] {
  Words x{};
  for (int i = 0; i < 32; i++) x.w[i] = uint16_t(i / 4);
  return x;
}();

// Codes are looked up by the low bits of 16-bit windows. A window holds PER whole codes, which shifts bring to its low end
// one after the other; vpermw ignores what lies above. At 3, 5 and 6 bits windows start inside a byte: they are moved to
// its low end first. (vpmultishiftqb would do without windows, but shares its pipes with vpdpwssd.) At 8 bits bytes are
// looked up instead.
template <int B> struct Width {
  // keys: 16 bytes of a token are 8 windows
  static constexpr int PER = B == 2 ? 8 : B <= 4 ? 4 : 2, CODES = 8 * PER, STEPS = PER, LOAD = CODES * B / 8;
  // values: BLOCK coordinates of 2 tokens are 16 pairs of windows
  static constexpr int PARTS = B <= 4 ? 4 : 2, BLOCK = 16 * PARTS, BLOCK_BYTES = BLOCK * B / 8;
  static constexpr int SEGMENT = B <= 4 ? MAX_CODED_DIM : KEY_SEGMENT;
  static constexpr bool ALIGNED = B == 2 || B == 4;  // all windows start at a byte

  static constexpr Bytes key_bytes() {
    Bytes x{};
    for (int i = 0; i < 64; i++) x.b[i] = uint8_t(i % 16 / 2 * PER * B / 8 + i % 2);
    return x;
  }
  static constexpr Words key_shift() {
    Words x{};
    for (int i = 0; i < 32; i++) x.w[i] = uint16_t(i % 8 * PER * B % 8);
    return x;
  }
  static constexpr Bytes key_order() {  // which code of a load comes to place i
    Bytes x{};
    for (int i = 0; i < CODES; i++) x.b[i] = uint8_t(B == 8 ? i : i % 8 * PER + i / 8);
    return x;
  }
  static constexpr Bytes value_bytes() {
    Bytes x{};
    for (int i = 0; i < 64; i++) {
      const int at = B == 8 ? i / 2 : i / 4 * PARTS * B / 8 + i % 2, token = B == 8 ? i % 2 : i % 4 / 2;
      x.b[i] = uint8_t((at < 32 ? at : 31) + token * (B == 2 ? 16 : 32));
    }
    return x;
  }
  static constexpr Words value_shift() {
    Words x{};
    for (int i = 0; i < 32; i++) x.w[i] = uint16_t(i / 2 * PARTS * B % 8);
    return x;
  }
  static constexpr Bytes value_order() {  // where coordinate i of a block is accumulated: part · 16 + lane
    Bytes x{};
    for (int part = 0; part < PARTS; part++)
      for (int lane = 0; lane < 16; lane++)
        x.b[B == 8 ? 8 * (lane / 4) + 4 * part + lane % 4 : PARTS * lane + part] = uint8_t(part * 16 + lane);
    return x;
  }
};

// The level table in registers.
template <int B> struct Table {
  __m512i t[B == 8 ? 8 : 2];
  explicit Table(const Codec::Fixed& c) {
    if (B == 8) {
      uint8_t lo[256], hi[256];
      for (int i = 0; i < 256; i++) lo[i] = uint8_t(c.level[i] & 255), hi[i] = uint8_t(uint16_t(c.level[i]) >> 8);
      for (int i = 0; i < 4; i++) t[i % (B == 8 ? 8 : 2)] = load<__m512i>(lo + 64 * i), t[(i + 4) % (B == 8 ? 8 : 2)] = load<__m512i>(hi + 64 * i);
    } else {
      t[0] = load<__m512i>(c.level);  // codes of fewer bits repeat: what lies above them in the index does not matter
      if (B == 6) t[1] = load<__m512i>(c.level + 32);
      if (B <= 3) t[1] = _mm512_permutexvar_epi16(load<__m512i>(quarters.w), t[0]);  // by the upper 3 bits of the index
    }
  }
  // Levels of code s of each window. At 2 and 3 bits every other code is looked up from bit 2 of the index on, which
  // needs no shift of its own, or one by a single bit: vpavgw with ones, which runs on any pipe.
  INLINE __m512i look_up(const Table& x, __m512i z, int s) {
    if constexpr (B <= 3) {
      const __m512i i = s > 1 ? _mm512_srli_epi16(z, 2 * B * (s / 2)) : z;
      if (s % 2 == 0) return _mm512_permutexvar_epi16(i, x.t[0]);
      return _mm512_permutexvar_epi16(B == 2 ? i : _mm512_avg_epu16(i, _mm512_set1_epi16(-1)), x.t[1]);
    } else {
      const __m512i i = s ? _mm512_srli_epi16(z, B * s) : z;
      if constexpr (B == 6) return _mm512_permutex2var_epi16(x.t[0], i, x.t[1]);
      else return _mm512_permutexvar_epi16(i, x.t[0]);
    }
  }
  INLINE void look_up_bytes(const Table& x, __m512i i, __m512i* low, __m512i* high) {  // B = 8
    const __mmask64 upper = _mm512_movepi8_mask(i);
    const __m512i l = _mm512_mask_mov_epi8(_mm512_permutex2var_epi8(x.t[0], i, x.t[1]), upper, _mm512_permutex2var_epi8(x.t[2], i, x.t[3]));
    const __m512i h = _mm512_mask_mov_epi8(_mm512_permutex2var_epi8(x.t[4], i, x.t[5]), upper, _mm512_permutex2var_epi8(x.t[6], i, x.t[7]));
    *low = _mm512_unpacklo_epi8(l, h), *high = _mm512_unpackhi_epi8(l, h);
  }
};

template <int B> Places<4, 8> key_places(const Work& w) {
  typedef Width<B> W;
  static constexpr Bytes order = W::key_order();
  return {order.b, W::CODES, round_up(w.dk, W::CODES), W::SEGMENT};
}
template <int B> void prepare_keys(Work& w) { fix_queries(w, key_places<B>(w)); }
template <int B> void prepare_rest(Work& w) { fix_query_rests(w, key_places<B>(w)); }

// x with the 8-byte places of MASK, which are neighbours, from p on. Unlike an insertion this runs on any pipe; look-ups and
// shifts have only two.
template <int MASK> INLINE __m512i merge(__m512i x, const uint8_t* p) {
  return _mm512_mask_loadu_epi64(x, MASK, p - 8 * __builtin_ctz(MASK));
}
INLINE __m256i load_halves(const uint8_t* a, const uint8_t* b) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(load<__m128i>(a)), load<__m128i>(b), 1);
}

INLINE __m512i load_rows(const uint8_t* p, int64_t stride) {  // 16 bytes of 4 tokens
  const __m512i low = _mm512_castsi256_si512(load_halves(p, p + stride));
  return merge<0xc0>(merge<0x30>(low, p + 2 * stride), p + 3 * stride);
}

// Sums of R rows with tokens n, n + 4, n + 8 and n + 12 from p on, n < N, 4 partial sums a token: in this order score16
// finds the tokens one after the other.
template <int B, int R, int N>
INLINE void dot(const Table<B>& table, const int16_t* q, const uint8_t* p, int64_t stride, int64_t loads,
                Ahead& ahead, __m512 (*out)[4], int at) {
  typedef Width<B> W;
  static constexpr Bytes bytes = W::key_bytes();
  static constexpr Words shift = W::key_shift();
  __m512i acc[R][N];
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int n = 0; n < N; n++) acc[r][n] = _mm512_setzero_si512();
  for (int64_t l = 0; l < loads; l++) {
    if (W::SEGMENT < MAX_CODED_DIM && l && l % (W::SEGMENT / W::CODES) == 0)  // to float32 before int32 could overflow
      UNROLL for (int r = 0; r < R; r++) UNROLL for (int n = 0; n < N; n++) {
        const __m512 sum = _mm512_cvtepi32_ps(acc[r][n]);
        out[r][at + n] = l == W::SEGMENT / W::CODES ? sum : _mm512_add_ps(out[r][at + n], sum);
        acc[r][n] = _mm512_setzero_si512();
      }
    Ahead::take(ahead);
    __m512i z[N];
    UNROLL for (int n = 0; n < N; n++) {
      z[n] = load_rows(p + l * W::LOAD + n * stride, 4 * stride);
      if constexpr (!W::ALIGNED && B != 8)
        z[n] = _mm512_srlv_epi16(_mm512_shuffle_epi8(z[n], load<__m512i>(bytes.b)), load<__m512i>(shift.w));
    }
    UNROLL for (int s = 0; s < W::STEPS; s++) {
      __m512i v[N];
      UNROLL for (int n = 0; n < N; n++) {
        if constexpr (B == 8) {
          __m512i low, high;
          Table<B>::look_up_bytes(table, z[n], &low, &high);
          v[n] = s ? high : low;
        } else {
          v[n] = Table<B>::look_up(table, z[n], s);
        }
      }
      UNROLL for (int r = 0; r < R; r++) {
        const __m512i x = load<__m512i>(q + ((l * W::STEPS + s) * R + r) * 32);
        UNROLL for (int n = 0; n < N; n++) acc[r][n] = dp(acc[r][n], v[n], x);
      }
    }
  }
  const bool first = W::SEGMENT == MAX_CODED_DIM || loads <= W::SEGMENT / W::CODES;
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int n = 0; n < N; n++) {
    const __m512 sum = _mm512_cvtepi32_ps(acc[r][n]);
    out[r][at + n] = first ? sum : _mm512_add_ps(out[r][at + n], sum);
  }
}

// s of R rows with 16 tokens
template <int B, int R>
INLINE void score16(const Pass& pass, const Table<B>& table, int64_t row, const int16_t* q, const uint8_t* p, int64_t stride,
                    int64_t loads, Ahead ahead, const float* ks, float* s) {
  constexpr int N = R <= 4 ? 4 : 2;
  __m512 f[R][4];
  UNROLL for (int n = 0; n < 4; n += N)
    dot<B, R, N>(table, q, p + n * stride, stride, loads, ahead, f, n);
  UNROLL for (int r = 0; r < R; r++) {
    const __m512 a = _mm512_add_ps(_mm512_unpacklo_ps(f[r][0], f[r][1]), _mm512_unpackhi_ps(f[r][0], f[r][1]));
    const __m512 b = _mm512_add_ps(_mm512_unpacklo_ps(f[r][2], f[r][3]), _mm512_unpackhi_ps(f[r][2], f[r][3]));
    const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
    const __m512 sum = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)), _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
    const __m512 dots = _mm512_mul_ps(sum, _mm512_set1_ps(pass.unit[row + r]));
    const __m512 old = pass.shift ? _mm512_set1_ps(pass.shift[row + r]) : _mm512_loadu_ps(s + r * TILE);
    _mm512_storeu_ps(s + r * TILE, _mm512_fmadd_ps(dots, _mm512_loadu_ps(ks), old));
  }
}

template <int B, int R> void score_rows(Work& w, const Tile& t, const Pass& pass, int64_t row, const Table<B>& table) {
  typedef Width<B> W;
  const int64_t loads = (w.dk + W::CODES - 1) / W::CODES;
  const int16_t* q = pass.q + row * loads * W::CODES * 4;
  // while the keys are scored, values come into the cache
  constexpr int PASSES = R <= 4 ? 1 : 2;
  const int64_t step = row || !pass.shift ? 0 : (16 * t.v_stride + loads * PASSES - 1) / (loads * PASSES);
  int i = 0;
  for (; i + 16 <= t.n; i += 16)
    score16<B, R>(pass, table, row, q, t.k + i * t.k_stride, t.k_stride, loads, {t.soon_v + i * t.v_stride, step}, t.ks + i,
                  w.s + row * TILE + i);
  if (i < t.n) {
    const LastKeys<16> last(w, t, i);
    score16<B, R>(pass, table, row, q, last.rows, w.key.row_bytes, loads, {last.rows, 0}, t.ks + i, w.s + row * TILE + i);
  }
}

template <int B> void int16_scores(Work& w, const Tile& t, const Pass& pass) {
  const Table<B> table(pass.levels);
  each_block<8>(w.rows, [&](int64_t row, auto count) {
    constexpr int R = decltype(count)::value;
    if (!adds_nothing(pass, row, R)) score_rows<B, R>(w, t, pass, row, table);
  });
}

// Row r of 4 in lane r.
struct Add { INLINE __m512 of(__m512 a, __m512 b) { return _mm512_add_ps(a, b); } };
struct Max { INLINE __m512 of(__m512 a, __m512 b) { return _mm512_max_ps(a, b); } };
template <class Op> INLINE __m512 reduce4(const __m512* x) {
  const __m512 a = Op::of(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
  const __m512 b = Op::of(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
  const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
  __m512 y = Op::of(_mm512_castpd_ps(_mm512_unpacklo_pd(c, d)), _mm512_castpd_ps(_mm512_unpackhi_pd(c, d)));
  y = Op::of(y, _mm512_shuffle_f32x4(y, y, 0x4e));
  return Op::of(y, _mm512_shuffle_f32x4(y, y, 0xb1));
}
INLINE __m512 load4(const float* x) { return _mm512_castps128_ps512(_mm_loadu_ps(x)); }
INLINE void store4(float* to, __m512 x) { _mm_storeu_ps(to, _mm512_castps512_ps128(x)); }

// Softmax of up to 4 rows over a full tile, to weights in int16: the rows wait for each other's sums and maxima together.
inline void soften4(Work& w, const Tile& t, int64_t row, int rows) {
  __m512 top[4], most_weight[4], total[4], x[4][4];
  alignas(16) float factors[4];
  UNROLL for (int r = 0; r < 4; r++) {
    const float* s = w.s + (row + (r < rows ? r : 0)) * TILE;
    UNROLL for (int i = 0; i < 4; i++) x[r][i] = _mm512_loadu_ps(s + 16 * i);
    top[r] = _mm512_max_ps(_mm512_max_ps(x[r][0], x[r][1]), _mm512_max_ps(x[r][2], x[r][3]));
  }
  const __m512 old = load4(w.most + row), most = _mm512_max_ps(reduce4<Max>(top), old);
  store4(w.most + row, most);
  store4(w.correction + row, (__m512)exp2_neg((vf)_mm512_sub_ps(old, most)));
  UNROLL for (int r = 0; r < 4; r++) {
    const vf above = splat(w.most[row + r]);
    vf added = {}, sum = {}, largest = {};
    UNROLL for (int i = 0; i < 4; i++) {
      const vf e = exp2_neg((vf)x[r][i] - above), y = e * load<vf>(t.vs + 16 * i), a = vabs(y);
      added += e, sum += a, largest = vmax(largest, a), x[r][i] = (__m512)y;
    }
    if (r < rows) w.sums[row + r] = w.sums[row + r] * w.correction[row + r] + added;
    total[r] = (__m512)sum, most_weight[r] = (__m512)largest;
  }
  const float room = INT_LIMIT / float(w.value.values.most) - float(TILE) / 2 - 2;
  const __m512 peak = _mm512_div_ps(_mm512_set1_ps(32766.f), reduce4<Max>(most_weight));
  const __m512 factor = _mm512_min_ps(peak, _mm512_div_ps(_mm512_set1_ps(room), reduce4<Add>(total)));
  const __mmask16 some = _mm512_cmp_ps_mask(factor, _mm512_set1_ps(3e38f), _CMP_LT_OQ);  // else all weights are 0
  store4(factors, _mm512_maskz_mov_ps(some, factor));
  store4(w.w_unit + row, _mm512_maskz_div_ps(some, _mm512_set1_ps(w.value.values.unit), factor));
  UNROLL for (int r = 0; r < 4; r++)
    if (r < rows) UNROLL for (int i = 0; i < 4; i++) store_int16(w.w16 + (row + r) * TILE + 16 * i, (vf)x[r][i] * factors[r]);
}

bool int16_soften(Work& w, const Tile& t) {
  vf check = {};
  for (int64_t i = 0; i < w.rows * TILE; i += VL) check += load<vf>(w.s + i) * 0.f;
  if (!all_finite(check)) return false;
  for (int64_t row = 0; row < w.rows; row += 4) soften4(w, t, row, int(w.rows - row < 4 ? w.rows - row : 4));
  return true;
}

template <int B> INLINE __m512i load_pair(const uint8_t* a, const uint8_t* b, bool whole) {
  static constexpr Bytes bytes = Width<B>::value_bytes();
  static constexpr Words shift = Width<B>::value_shift();
  __m512i z;
  if constexpr (B == 2)
    z = _mm512_castsi256_si512(load_halves(a, b));
  else if (whole) z = merge<0xf0>(_mm512_castsi256_si512(load<__m256i>(a)), b);
  else z = merge<0x30>(_mm512_zextsi128_si512(load<__m128i>(a)), b);
  z = _mm512_permutexvar_epi8(load<__m512i>(bytes.b), z);
  if constexpr (!Width<B>::ALIGNED && B != 8) z = _mm512_srlv_epi16(z, load<__m512i>(shift.w));
  return z;
}

// acc of R rows for one block of coordinates, parts [FROM, FROM + N). `whole`: the block has more than 16 bytes.
template <int B, int R, int FROM, int N>
INLINE void add_block(const Work& w, const Table<B>& table, const Tile& t, int64_t row, int64_t block, bool whole,
                      Ahead& ahead) {
  typedef Width<B> W;
  const uint8_t* p = t.v + block * W::BLOCK_BYTES;
  const int32_t* weights = (const int32_t*)(w.w16 + row * TILE);
  __m512i acc[R][N];
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int n = 0; n < N; n++) acc[r][n] = _mm512_setzero_si512();
  const int64_t stride = t.v_stride;
  const int n_tokens = t.n;
  for (int i = 0; i < n_tokens; i += 2, p += 2 * stride) {
    Ahead::take(ahead);
    const __m512i z = load_pair<B>(p, i + 1 < n_tokens ? p + stride : p, whole);
    __m512i v[N];
    if constexpr (B == 8) {
      __m512i low, high;
      Table<B>::look_up_bytes(table, z, &low, &high);
      UNROLL for (int n = 0; n < N; n++) v[n] = FROM + n ? high : low;
    } else {
      UNROLL for (int n = 0; n < N; n++) v[n] = Table<B>::look_up(table, z, FROM + n);
    }
    UNROLL for (int r = 0; r < R; r++) {
      const __m512i x = _mm512_set1_epi32(weights[r * (TILE / 2) + unsigned(i) / 2]);
      UNROLL for (int n = 0; n < N; n++) acc[r][n] = dp(acc[r][n], v[n], x);
    }
  }
  UNROLL for (int r = 0; r < R; r++) {
    const __m512 correction = _mm512_set1_ps(w.correction[row + r]), unit = _mm512_set1_ps(w.w_unit[row + r]);
    UNROLL for (int n = 0; n < N; n++) {
      float* o = w.acc + (row + r) * w.v_pad + block * W::BLOCK + (FROM + n) * 16;
      const __m512 old = _mm512_mul_ps(_mm512_loadu_ps(o), correction);
      _mm512_storeu_ps(o, _mm512_fmadd_ps(_mm512_cvtepi32_ps(acc[r][n]), unit, old));
    }
  }
}

template <int B, int R> void add_rows(Work& w, const Tile& t, int64_t row, const Table<B>& table) {
  typedef Width<B> W;
  const int64_t blocks = (w.dv + W::BLOCK - 1) / W::BLOCK;
  // meanwhile keys come into the cache
  Ahead ahead{t.soon_k, row ? 0 : (2 * w.key.row_bytes + blocks - 1) / blocks}, none{t.soon_k, 0};
  for (int64_t b = 0; b < blocks; b++) {
    const bool whole = w.value.row_bytes - b * W::BLOCK_BYTES > 16;
    if constexpr (W::PARTS == 2 || R <= 5) {
      add_block<B, R, 0, W::PARTS>(w, table, t, row, b, whole, ahead);
    } else {
      add_block<B, R, 0, 2>(w, table, t, row, b, whole, ahead);
      add_block<B, R, 2, 2>(w, table, t, row, b, whole, none);
    }
  }
}

template <int B> void int16_accumulate(Work& w, const Tile& t) {
  const Table<B> table(w.value.values);
  if (!w.weights_fixed) fix_weights(w, t);
  each_block<8>(w.rows, [&](int64_t row, auto count) { add_rows<B, decltype(count)::value>(w, t, row, table); });
}

template <int B> void int16_finish(Work& w, float* out, int64_t stride) {
  typedef Width<B> W;
  static constexpr Bytes order = W::value_order();
  for (int64_t r = 0; r < w.rows; r++)
    for (int64_t d = 0; d < w.dv; d += W::BLOCK) {
      const int64_t n = w.dv - d < W::BLOCK ? w.dv - d : W::BLOCK;
      for (int64_t i = 0; i < n; i++) out[r * stride + d + i] = w.acc[r * w.v_pad + d + order.b[i]];
    }
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
    static const ValueKernel k = {nullptr, int16_soften, int16_accumulate<B>, int16_finish<B>};
    return &k;
  });
}

}  // namespace
