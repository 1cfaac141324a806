// int16 kernels for AVX2, every width of codes on the natural bytes.
//
// Codes are brought to bytes; their levels are looked up as two planes of bytes (vpshufb) and zipped to int16; vpmaddwd
// multiplies and adds pairs. Scores: the two 128-bit lanes of a register have codes of two tokens. Weighted sums: the bytes
// of two tokens are zipped, so that a 32-bit place has the same coordinate of both. Sums stay in int32 within a tile and go
// to float32 after it; those of wide keys go sooner, which leaves more bits to the query.
#pragma once
#include "fixed.hpp"

namespace {

constexpr int BLOCK_ROWS = 4;

INLINE __m256i dp(__m256i acc, __m256i a, __m256i b) { return _mm256_add_epi32(acc, _mm256_madd_epi16(a, b)); }

// How codes come to bytes. A lane holds LANE codes; at 4 bits their bytes have two codes each, taken out as two PARTS.
template <int B> struct Width {
  static constexpr int PARTS = B == 4 ? 2 : 1, LANE = 16 * PARTS, LANE_BYTES = LANE * B / 8;
  static constexpr int SEGMENT = B <= 4 ? MAX_CODED_DIM : KEY_SEGMENT;
  static constexpr int code(int part, int byte) { return PARTS * byte + part; }  // which code of a lane

  struct Bytes { alignas(32) uint8_t b[32]; };
  struct Words { alignas(32) uint32_t w[8]; };
  static constexpr Bytes window() {  // a 32-bit place gets the bytes of 4 codes
    Bytes x{};
    for (int i = 0; i < 32; i++) x.b[i] = uint8_t(i % 16 / 4 * B / 2 + i % 4);
    return x;
  }
  static constexpr Words shift() {  // where they begin in them
    Words x{};
    for (int i = 0; i < 8; i++) x.w[i] = uint32_t(i % 4 * B % 2 * 4);
    return x;
  }
  static constexpr Bytes key_order() {  // which code of a lane comes to place i
    Bytes x{};
    for (int i = 0; i < LANE; i++) x.b[i] = uint8_t(code(i / 16, i % 16));
    return x;
  }
  // LANE codes from a on and LANE from b on, but at 4 bits two in a byte; up to 16 bytes behind them are read
  INLINE __m256i load_lanes(const uint8_t* a, const uint8_t* b) {
    __m256i x = _mm256_inserti128_si256(_mm256_castsi128_si256(load<__m128i>(a)), load<__m128i>(b), 1);
    if constexpr (B == 4 || B == 8) return x;
    static constexpr Bytes bytes = window();
    static constexpr Words by = shift();
    constexpr int mask = (1 << B) - 1;
    x = _mm256_shuffle_epi8(x, load<__m256i>(bytes.b));
    if constexpr (B % 2) x = _mm256_srlv_epi32(x, load<__m256i>(by.w));
    x = _mm256_blend_epi16(x, _mm256_slli_epi32(x, 16 - 2 * B), 0xaa);  // 2 codes in each 16 bits
    return _mm256_or_si256(_mm256_and_si256(x, _mm256_set1_epi16(mask)),
                           _mm256_and_si256(_mm256_slli_epi16(x, 8 - B), _mm256_set1_epi16(short(mask << 8))));
  }
  INLINE __m256i part(__m256i x, int p) {
    if constexpr (B != 4) return x;
    return _mm256_and_si256(p ? _mm256_srli_epi16(x, 4) : x, _mm256_set1_epi8(15));
  }
};

// The level table, 16 levels in a register. At 8 bits only the positive half: such tables have to be symmetric.
template <int B> struct Planes {
  static constexpr int BITS = B == 8 ? 7 : B, N = BITS <= 4 ? 1 : 1 << (BITS - 4);
  __m256i low[N], high[N];
  explicit Planes(const Codec::Fixed& c) {
    for (int t = 0; t < N; t++) {
      uint8_t a[16], b[16];
      for (int i = 0; i < 16; i++) {
        const uint16_t level = uint16_t(c.level[(B == 8 ? 128 : 0) + 16 * t + i]);
        a[i] = uint8_t(level & 255), b[i] = uint8_t(level >> 8);
      }
      low[t] = _mm256_broadcastsi128_si256(load<__m128i>(a)), high[t] = _mm256_broadcastsi128_si256(load<__m128i>(b));
    }
  }
  static bool fit(const Codec::Fixed& c) {
    bool symmetric = true;
    for (int i = 0; i < 128; i++) symmetric &= c.level[i] == -c.level[255 - i];
    return B < 8 || symmetric;
  }
  // One of COUNT tables; bits[i] has bit 4 + i of the codes on top of each byte.
  template <int FROM, int COUNT> INLINE __m256i pick(const __m256i* plane, __m256i index, const __m256i* bits) {
    if constexpr (COUNT == 1) {
      return _mm256_shuffle_epi8(plane[FROM], index);
    } else {
      constexpr int HALF = COUNT / 2;
      return _mm256_blendv_epi8(pick<FROM, HALF>(plane, index, bits), pick<FROM + HALF, HALF>(plane, index, bits),
                                bits[__builtin_ctz(HALF)]);
    }
  }
  // levels of the first and of the last 8 bytes of each lane
  INLINE void look_up(const Planes& x, __m256i codes, __m256i* first, __m256i* last) {
    __m256i below{}, bits[3];
    if constexpr (B == 8) {
      below = _mm256_cmpgt_epi8(codes, _mm256_set1_epi8(-1));  // codes of the negative half
      codes = _mm256_and_si256(_mm256_xor_si256(codes, below), _mm256_set1_epi8(127));
    }
    UNROLL for (int b = 4; b < BITS; b++) bits[b - 4] = _mm256_slli_epi16(codes, 7 - b);
    const __m256i a = pick<0, N>(x.low, codes, bits), b = pick<0, N>(x.high, codes, bits);
    *first = _mm256_unpacklo_epi8(a, b), *last = _mm256_unpackhi_epi8(a, b);
    if constexpr (B == 8) {
      const __m256i s = _mm256_unpacklo_epi8(below, below), t = _mm256_unpackhi_epi8(below, below);
      *first = _mm256_sub_epi16(_mm256_xor_si256(*first, s), s), *last = _mm256_sub_epi16(_mm256_xor_si256(*last, t), t);
    }
  }
};

template <int B> Places<2, BLOCK_ROWS> key_places(const Work& w) {
  typedef Width<B> W;
  static constexpr typename W::Bytes order = W::key_order();
  return {order.b, W::LANE, round_up(w.dk, 32), W::SEGMENT};
}
template <int B> void prepare_keys(Work& w) { fix_queries(w, key_places<B>(w)); }
template <int B> void prepare_rest(Work& w) { fix_query_rests(w, key_places<B>(w)); }

// Sums of R rows with 4 tokens, two in a register, 4 partial sums each
template <int B, int R>
INLINE void dot4(const Planes<B>& planes, const int16_t* q, const uint8_t* p, int64_t stride, int64_t loads, Ahead& ahead,
                 __m256 (*out)[4], int at) {
  typedef Width<B> W;
  constexpr int64_t SEGMENT = W::SEGMENT / W::LANE;
  for (int64_t from = 0; from < loads; from += SEGMENT) {
    const int64_t to = loads - from < SEGMENT ? loads : from + SEGMENT;
    __m256i acc[R][2];
    UNROLL for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = _mm256_setzero_si256();
    for (int64_t l = from; l < to; l++) {
      Ahead::take(ahead);
      __m256i z[2];
      UNROLL for (int m = 0; m < 2; m++) z[m] = W::load_lanes(p + l * W::LANE_BYTES + 2 * m * stride, p + l * W::LANE_BYTES + (2 * m + 1) * stride);
      UNROLL for (int part = 0; part < W::PARTS; part++) {
        __m256i v[2][2];
        UNROLL for (int m = 0; m < 2; m++) Planes<B>::look_up(planes, W::part(z[m], part), &v[m][0], &v[m][1]);
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int h = 0; h < 2; h++) {
          const __m256i x = load<__m256i>(q + (((l * W::PARTS + part) * 2 + h) * R + r) * 16);
          UNROLL for (int m = 0; m < 2; m++) acc[r][m] = dp(acc[r][m], v[m][h], x);
        }
      }
    }
    UNROLL for (int r = 0; r < R; r++) UNROLL for (int m = 0; m < 2; m++) {
      const __m256 sum = _mm256_cvtepi32_ps(acc[r][m]);
      out[r][at + m] = from ? _mm256_add_ps(out[r][at + m], sum) : sum;
    }
  }
}

// s of R rows with 8 tokens
template <int B, int R>
INLINE void score8(const Pass& pass, const Planes<B>& planes, int64_t row, const int16_t* q, const uint8_t* p, int64_t stride,
                   int64_t loads, Ahead ahead, const float* ks, float* s) {
  __m256 f[R][4];
  UNROLL for (int n = 0; n < 4; n += 2) dot4<B, R>(planes, q, p + 2 * n * stride, stride, loads, ahead, f, n);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  UNROLL for (int r = 0; r < R; r++) {
    const __m256 a = _mm256_add_ps(_mm256_unpacklo_ps(f[r][0], f[r][1]), _mm256_unpackhi_ps(f[r][0], f[r][1]));
    const __m256 b = _mm256_add_ps(_mm256_unpacklo_ps(f[r][2], f[r][3]), _mm256_unpackhi_ps(f[r][2], f[r][3]));
    const __m256d c = _mm256_castps_pd(a), d = _mm256_castps_pd(b);
    const __m256 sum = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(c, d)), _mm256_castpd_ps(_mm256_unpackhi_pd(c, d)));
    const __m256 dots = _mm256_mul_ps(_mm256_permutevar8x32_ps(sum, order), _mm256_set1_ps(pass.unit[row + r]));
    const __m256 old = pass.shift ? _mm256_set1_ps(pass.shift[row + r]) : _mm256_loadu_ps(s + r * TILE);
    _mm256_storeu_ps(s + r * TILE, _mm256_fmadd_ps(dots, _mm256_loadu_ps(ks), old));
  }
}

template <int B, int R> void score_rows(Work& w, const Tile& t, const Pass& pass, int64_t row, const Planes<B>& planes) {
  const int64_t places = round_up(w.dk, 32), loads = (w.dk + Width<B>::LANE - 1) / Width<B>::LANE;
  const int16_t* q = pass.q + row * places * 2;
  // while the keys are scored, values come into the cache
  const int64_t step = row || !pass.shift ? 0 : (4 * t.v_stride + loads - 1) / loads;
  int i = 0;
  for (; i + 8 <= t.n; i += 8)
    score8<B, R>(pass, planes, row, q, t.k + i * t.k_stride, t.k_stride, loads, {t.soon_v + i * t.v_stride, step}, t.ks + i,
                 w.s + row * TILE + i);
  if (i < t.n) {
    const LastKeys<8> last(w, t, i);
    score8<B, R>(pass, planes, row, q, last.rows, w.key.row_bytes, loads, {last.rows, 0}, t.ks + i, w.s + row * TILE + i);
  }
}

template <int B> void int16_scores(Work& w, const Tile& t, const Pass& pass) {
  const Planes<B> planes(pass.levels);
  each_block<BLOCK_ROWS>(w.rows, [&](int64_t row, auto count) {
    constexpr int R = decltype(count)::value;
    if (!adds_nothing(pass, row, R)) score_rows<B, R>(w, t, pass, row, planes);
  });
}

// A block of values is 2·LANE coordinates, LANE in each lane. Its levels zipped by 2 tokens are [pairs][VECTORS][16]: vector
// (half · PARTS + part) · 2 + last has the codes of bytes 8 · half + 4 · last to 8 · half + 4 · last + 3 of a lane.
template <int B> struct Zipped {
  typedef Width<B> W;
  static constexpr int BLOCK = 2 * W::LANE, VECTORS = BLOCK / 8;
  static constexpr int64_t place(int64_t d) {  // of a coordinate among the sums of its block
    const int64_t lane = d / W::LANE, part = d % W::PARTS, byte = d % W::LANE / W::PARTS;
    return ((byte / 8 * W::PARTS + part) * 2 + byte % 8 / 4) * 8 + lane * 4 + byte % 4;
  }
  INLINE void zip(const Planes<B>& planes, const Tile& t, const uint8_t* p, int64_t left, Ahead& ahead, int16_t* to) {
    const int64_t half = left > W::LANE_BYTES ? W::LANE_BYTES : 0;  // nothing lies behind the first lane
    for (int i = 0; i < t.n; i += 2, p += 2 * t.v_stride, to += VECTORS * 16) {
      Ahead::take(ahead);
      const uint8_t* next = i + 1 < t.n ? p + t.v_stride : p;
      const __m256i a = W::load_lanes(p, p + half), b = W::load_lanes(next, next + half);
      const __m256i z[2] = {_mm256_unpacklo_epi8(a, b), _mm256_unpackhi_epi8(a, b)};
      UNROLL for (int h = 0; h < 2; h++) UNROLL for (int part = 0; part < W::PARTS; part++) {
        __m256i first, last;
        Planes<B>::look_up(planes, W::part(z[h], part), &first, &last);
        store(to + (h * W::PARTS + part) * 32, first), store(to + (h * W::PARTS + part) * 32 + 16, last);
      }
    }
  }
};

// acc of R rows for 2 vectors of the block at v
template <int R, int STRIDE> INLINE void add_two(const Work& w, const Tile& t, int64_t row, const int16_t* v, float* to) {
  const int32_t* weights = (const int32_t*)(w.w16 + row * TILE);
  __m256i acc[R][2];
  UNROLL for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = _mm256_setzero_si256();
  for (int64_t i = 0; i < (t.n + 1) / 2; i++, v += STRIDE) {
    const __m256i a = load<__m256i>(v), b = load<__m256i>(v + 16);
    UNROLL for (int r = 0; r < R; r++) {
      const __m256i x = _mm256_set1_epi32(weights[r * (TILE / 2) + i]);
      acc[r][0] = dp(acc[r][0], a, x), acc[r][1] = dp(acc[r][1], b, x);
    }
  }
  UNROLL for (int r = 0; r < R; r++) UNROLL for (int m = 0; m < 2; m++) {
    float* o = to + r * w.v_pad + m * 8;
    const __m256 old = _mm256_mul_ps(_mm256_loadu_ps(o), _mm256_set1_ps(w.correction[row + r]));
    _mm256_storeu_ps(o, _mm256_fmadd_ps(_mm256_cvtepi32_ps(acc[r][m]), _mm256_set1_ps(w.w_unit[row + r]), old));
  }
}

template <int B> void int16_accumulate(Work& w, const Tile& t) {
  typedef Zipped<B> Z;
  const Planes<B> planes(w.value.values);
  fix_weights(w, t);
  alignas(32) int16_t zipped[TILE * Z::BLOCK];
  const int64_t blocks = (w.dv + Z::BLOCK - 1) / Z::BLOCK, block_bytes = 2 * Width<B>::LANE_BYTES;
  Ahead ahead{t.soon_k, (2 * w.key.row_bytes + blocks - 1) / blocks};  // meanwhile keys come into the cache
  for (int64_t b = 0; b < blocks; b++) {
    Z::zip(planes, t, t.v + b * block_bytes, w.value.row_bytes - b * block_bytes, ahead, zipped);
    each_block<BLOCK_ROWS>(w.rows, [&](int64_t row, auto count) {
      float* to = w.acc + row * w.v_pad + b * Z::BLOCK;
      for (int m = 0; m < Z::VECTORS; m += 2)
        add_two<decltype(count)::value, Z::VECTORS * 16>(w, t, row, zipped + m * 16, to + m * 8);
    });
  }
}

template <int B> void int16_finish(Work& w, float* out, int64_t stride) {
  constexpr int64_t BLOCK = Zipped<B>::BLOCK;
  for (int64_t r = 0; r < w.rows; r++)
    for (int64_t d = 0; d < w.dv; d++)
      out[r * stride + d] = w.acc[r * w.v_pad + d / BLOCK * BLOCK + Zipped<B>::place(d % BLOCK)];
}

const KeyKernel* int16_key(const Codec& c) {
  return by_width(c.bits, [&](auto width) -> const KeyKernel* {
    constexpr int B = decltype(width)::value;
    static const KeyKernel k = {prepare_keys<B>, prepare_rest<B>, int16_scores<B>};
    return Planes<B>::fit(c.keys) && Planes<B>::fit(c.key_rest) ? &k : nullptr;
  });
}
const ValueKernel* int16_value(const Codec& c) {
  return by_width(c.bits, [&](auto width) -> const ValueKernel* {
    constexpr int B = decltype(width)::value;
    static const ValueKernel k = {nullptr, nullptr, int16_accumulate<B>, int16_finish<B>};
    return Planes<B>::fit(c.values) ? &k : nullptr;
  });
}

}  // namespace
