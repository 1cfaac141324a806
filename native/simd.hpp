// Portable vectors (GCC and Clang vector extensions) and number formats. Included inside each instruction-set file,
// where everything stays in an anonymous namespace: shared copies would let the linker mix instruction sets.
#pragma once
#include <math.h>
#include <string.h>

#include "aura.h"

#define INLINE static inline __attribute__((always_inline))

namespace {
using namespace aura;

#if defined(__AVX512F__)
constexpr int VL = 16;
#elif defined(__AVX2__)
constexpr int VL = 8;
#else
constexpr int VL = 4;
#endif
typedef float vf __attribute__((vector_size(4 * VL)));
typedef int32_t vi __attribute__((vector_size(4 * VL)));
typedef float v16 __attribute__((vector_size(64)));
typedef int32_t i16 __attribute__((vector_size(64)));

constexpr float LOG2E = 1.4426950408889634f;

template <class V> INLINE V load(const void* p) { V x; memcpy(&x, p, sizeof x); return x; }
template <class V> INLINE void store(void* p, V x) { memcpy(p, &x, sizeof x); }
INLINE vf splat(float x) { return x - (vf){}; }
INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }
INLINE vf vabs(vf a) { return (vf)((vi)a & 0x7fffffff); }
// Halves, quarters, … are combined, so that the order does not depend on the compiler.
INLINE float sum(vf x) {
#if defined(__AVX512F__)  // in the order of reduce4 (int16_avx512.hpp)
  __m512 y = (__m512)x;
  y = _mm512_add_ps(y, _mm512_permute_ps(y, 0x4e));
  y = _mm512_add_ps(y, _mm512_permute_ps(y, 0xb1));
  y = _mm512_add_ps(y, _mm512_shuffle_f32x4(y, y, 0x4e));
  return _mm512_cvtss_f32(_mm512_add_ps(y, _mm512_shuffle_f32x4(y, y, 0xb1)));
#elif defined(__AVX2__)
  __m128 y = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
#else
  return (x[0] + x[2]) + (x[1] + x[3]);
#endif
}
INLINE float largest(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#elif defined(__AVX2__)
  __m128 y = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
#else
  const float a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
  return a > b ? a : b;
#endif
}
// Whether a sum of x · 0 met a number that is not finite.
INLINE bool all_finite(vf zeros) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)zeros, _mm512_setzero_ps(), _CMP_NEQ_UQ) == 0;
#else
  return sum(zeros) == 0;
#endif
}

// 2^x for x <= 0 (relative error 2e-7) and exactly 0 for x = -inf. Callers take NaN out first.
INLINE vf exp2_neg(vf x) {
#if defined(__AVX512F__)
  const __m512 y = _mm512_max_ps((__m512)x, _mm512_set1_ps(-200.f)), n = _mm512_roundscale_ps(y, 8);
  const vf f = (vf)_mm512_sub_ps(y, n);
#else
  const vf low = splat(-126.f);
  const vf y = vmax(x, low);
  const vf magic = splat(12582912.f);  // 1.5·2^23: adding it rounds to whole numbers
  const vf t = y + magic, f = y - (t - magic);
#endif
  vf p = splat(1.3333558e-3f);
  p = p * f + splat(9.6181291e-3f);
  p = p * f + splat(5.5504109e-2f);
  p = p * f + splat(2.4022651e-1f);
  p = p * f + splat(6.9314718e-1f);
  p = p * f + splat(1.f);
#if defined(__AVX512F__)
  return (vf)_mm512_scalef_ps((__m512)p, n);
#else
  p = (vf)((vi)p + ((vi)t << 23));
  return x >= low ? p : (vf){};
#endif
}

// c·tanh(s/c)
INLINE vf soft_cap(vf s, float cap) {
  const vf x = s / cap, a = vabs(x), e = exp2_neg(a * (-2 * LOG2E)), z = x * x;
  const vf far = (vf)((vi)((1.f - e) / (1.f + e)) | ((vi)x & (int32_t)0x80000000));
  vf p = splat(-5.70498872745e-3f);  // near 0 the quotient would lose digits
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  return (a < splat(0.625f) ? p * z * x + x : far) * cap;
}

INLINE float from_bits(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
INLINE uint32_t to_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
INLINE float bf16_float(uint16_t h) { return from_bits(uint32_t(h) << 16); }
INLINE uint16_t float_bf16(float f) {
  const uint32_t u = to_bits(f);
  return f != f ? 0x7fc0 : uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
INLINE float half_float(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  const uint32_t sign = uint32_t(h & 0x8000) << 16, rest = h & 0x7fff;
  if (rest >= 0x7c00) return from_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  const float magnitude = from_bits(rest << 13) * 5.192296858534828e33f;  // 2^112, exact also for subnormals
  return from_bits(sign | to_bits(magnitude));
#endif
}
INLINE uint16_t float_half(float f) {
#if defined(__F16C__)
  return uint16_t(_cvtss_sh(f, 0));
#else
  const uint32_t u = to_bits(f), sign = (u >> 16) & 0x8000, a = u & 0x7fffffff;
  if (a > 0x7f800000) return uint16_t(sign | 0x7e00);
  if (a >= 0x477ff000) return uint16_t(sign | 0x7c00);  // rounds to infinity
  if (a < 0x38800000) return uint16_t(sign | (to_bits(from_bits(a) + 0.5f) - to_bits(0.5f)));  // subnormal: unit 2^-24
  return uint16_t(sign | ((a - 0x38000000 + 0xfff + ((a >> 13) & 1)) >> 13));
#endif
}

INLINE float load_float(const void* p, int64_t dtype, int64_t i) {
  if (dtype == F32) return ((const float*)p)[i];
  const uint16_t h = ((const uint16_t*)p)[i];
  return dtype == F16 ? half_float(h) : bf16_float(h);
}
INLINE void store_float(void* p, int64_t dtype, int64_t i, float x) {
  if (dtype == F32) ((float*)p)[i] = x;
  else ((uint16_t*)p)[i] = dtype == F16 ? float_half(x) : float_bf16(x);
}
// n numbers of any dtype from p, contiguous
INLINE void load_floats(const void* p, int64_t dtype, int64_t n, float* out) {
  if (dtype == F32) memcpy(out, p, 4 * n);
  else if (dtype == BF16) for (int64_t i = 0; i < n; i++) out[i] = bf16_float(((const uint16_t*)p)[i]);
  else {
    int64_t i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= n; i += 16) _mm512_storeu_ps(out + i, _mm512_cvtph_ps(load<__m256i>((const uint16_t*)p + i)));
#elif defined(__F16C__)
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(out + i, _mm256_cvtph_ps(load<__m128i>((const uint16_t*)p + i)));
#endif
    for (; i < n; i++) out[i] = half_float(((const uint16_t*)p)[i]);
  }
}
INLINE void store_floats(void* p, int64_t dtype, int64_t n, const float* x) {
  if (dtype == F32) memcpy(p, x, 4 * n);
  else if (dtype == BF16) for (int64_t i = 0; i < n; i++) ((uint16_t*)p)[i] = float_bf16(x[i]);
  else for (int64_t i = 0; i < n; i++) ((uint16_t*)p)[i] = float_half(x[i]);
}
INLINE int64_t size_of(int64_t dtype) { return dtype == F32 ? 4 : 2; }
INLINE int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Memory that a thread keeps between calls.
struct Scratch {
  uint8_t* memory = nullptr;
  size_t size = 0;
  ~Scratch() { ::operator delete(memory, std::align_val_t(64)); }
  uint8_t* need(size_t bytes) {
    if (bytes > size) {
      ::operator delete(memory, std::align_val_t(64));
      size = bytes + bytes / 4;
      memory = (uint8_t*)::operator new(size, std::align_val_t(64));
    }
    return memory;
  }
};
// Hands out aligned arrays from one scratch: first a dry run that only adds up, then the real one.
struct Arena {
  uint8_t* base;
  size_t used = 0;
  template <class T> T* take(int64_t n) {
    T* p = base ? (T*)(base + used) : nullptr;
    used += round_up(n * int64_t(sizeof(T)), 64);
    return p;
  }
};

}  // namespace
