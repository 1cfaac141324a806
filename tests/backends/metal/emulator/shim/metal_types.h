// Scalars, vectors and mathematics of Metal for g++. A vector's copy is written out, as one access of its size: g++ does
// not watch the load of a plain struct that is passed by value.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;
constexpr half operator""h(long double x) { return half(float(x)); }
#define MTL_QUIET __attribute__((no_sanitize("thread"), noinline))
#define MTL_INLINE __attribute__((always_inline)) inline

namespace mtl {
template <size_t Bytes, size_t Aligned> struct Wide { static const bool known = false; };
#define MTL_WIDE(BYTES, T) \
  template <size_t Aligned> struct Wide<BYTES, Aligned> { static const bool known = true; typedef T __attribute__((may_alias, aligned(Aligned))) type; };
MTL_WIDE(2, ushort) MTL_WIDE(4, uint) MTL_WIDE(8, ulong) MTL_WIDE(16, unsigned __int128)
template <size_t Aligned, class T, int N, bool = (N != 3) && Wide<sizeof(T) * N, Aligned>::known> struct Copy {
  static MTL_INLINE void go(T* to, const T* from) { for (int i = 0; i < N; ++i) to[i] = from[i]; }
};
template <size_t Aligned, class T, int N> struct Copy<Aligned, T, N, true> {
  typedef typename Wide<sizeof(T) * N, Aligned>::type All;
  static MTL_INLINE void go(T* to, const T* from) { *(All*)to = *(const All*)from; }
};
}  // namespace mtl

namespace metal {
template <class T, int N> struct vec;
#define MTL_VEC(N, SIZE, ARGS, INIT, ...)                                                             \
  template <class T> struct alignas(sizeof(T) * SIZE) vec<T, N> {                                     \
    T __VA_ARGS__;                                                                                    \
    vec() = default;                                                                                  \
    MTL_INLINE vec(const vec& o) { mtl::Copy<sizeof(T) * SIZE, T, N>::go((T*)this, (const T*)&o); }   \
    MTL_INLINE vec& operator=(const vec& o) { mtl::Copy<sizeof(T) * SIZE, T, N>::go((T*)this, (const T*)&o); return *this; } \
    MTL_INLINE vec ARGS : INIT {}                                                                     \
    MTL_INLINE vec(T s) { for (int i = 0; i < N; ++i) (*this)[i] = s; }                               \
    template <class U> MTL_INLINE explicit vec(const vec<U, N>& o) { for (int i = 0; i < N; ++i) (*this)[i] = T(o[i]); } \
    MTL_INLINE T& operator[](int i) { return reinterpret_cast<T*>(this)[i]; }                         \
    MTL_INLINE T operator[](int i) const { return reinterpret_cast<const T*>(this)[i]; }              \
  };
#define MTL_COMMA ,
MTL_VEC(2, 2, (T a, T b), x(a) MTL_COMMA y(b), x, y)
MTL_VEC(3, 4, (T a, T b, T c), x(a) MTL_COMMA y(b) MTL_COMMA z(c), x, y, z)
MTL_VEC(4, 4, (T a, T b, T c, T d), x(a) MTL_COMMA y(b) MTL_COMMA z(c) MTL_COMMA w(d), x, y, z, w)
template <class T, int N> struct packed_vec {  // aligned like one number
  T c[N];
  MTL_INLINE operator vec<T, N>() const { vec<T, N> r; mtl::Copy<sizeof(T), T, N>::go((T*)&r, c); return r; }
};
template <class T> struct same { typedef T type; };
#define MTL_OP(o)                                                                                     \
  template <class T, int N> MTL_INLINE vec<T, N> operator o(const vec<T, N>& a, const vec<T, N>& b) { \
    vec<T, N> r; for (int i = 0; i < N; ++i) r[i] = a[i] o b[i]; return r; }                          \
  template <class T, int N> MTL_INLINE vec<T, N> operator o(const vec<T, N>& a, typename same<T>::type b) { return a o vec<T, N>(b); } \
  template <class T, int N> MTL_INLINE vec<T, N> operator o(typename same<T>::type a, const vec<T, N>& b) { return vec<T, N>(a) o b; } \
  template <class T, int N, class U> MTL_INLINE vec<T, N>& operator o##=(vec<T, N>& a, const U& b) { return a = a o b; }
MTL_OP(+) MTL_OP(-) MTL_OP(*) MTL_OP(/) MTL_OP(&) MTL_OP(|) MTL_OP(<<) MTL_OP(>>)
template <class T, int N> MTL_INLINE T dot(const vec<T, N>& a, const vec<T, N>& b) {
  T s = 0; for (int i = 0; i < N; ++i) s += a[i] * b[i]; return s; }

template <class To, class From> MTL_INLINE To as_type(From x) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size"); To r; std::memcpy(&r, &x, sizeof r); return r; }

#define MTL_MATH(f) inline float f(float x) { return std::f(x); } inline half f(half x) { return half(std::f(float(x))); }
#define MTL_FUNCTIONS                                                                                 \
  MTL_MATH(exp) MTL_MATH(exp2) MTL_MATH(log) MTL_MATH(log2) MTL_MATH(sqrt) MTL_MATH(tanh) MTL_MATH(floor) MTL_MATH(rint) \
  inline float rsqrt(float x) { return 1.0f / std::sqrt(x); }
MTL_FUNCTIONS
namespace precise { MTL_FUNCTIONS }
namespace fast { MTL_FUNCTIONS }
MTL_MATH(fabs)
inline float fma(float a, float b, float c) { return std::fma(a, b, c); }
inline half fma(half a, half b, half c) {  // the product is exact in double; the sum is rounded to odd, then to half
  double p = double(float(a)) * double(float(b)), s = p + double(float(c)), e = p - (s - double(float(c)));
  uint64_t u; std::memcpy(&u, &s, 8);
  if (e != 0 && !(u & 1)) { u += (e > 0) == (s > 0) ? 1 : -1; std::memcpy(&s, &u, 8); }
  return half(s); }
template <class T> MTL_INLINE T abs(T x) { return x < T(0) ? T(-x) : x; }
inline float abs(float x) { return std::fabs(x); }
template <class T> MTL_INLINE T max(T a, T b) { return a < b ? b : a; }
template <class T> MTL_INLINE T min(T a, T b) { return b < a ? b : a; }
inline float max(float a, float b) { return std::fmax(a, b); }  // the number, where one of them is NaN
inline float min(float a, float b) { return std::fmin(a, b); }
template <class T> MTL_INLINE T clamp(T x, T lo, T hi) { return min(max(x, lo), hi); }
template <class T> MTL_INLINE T select(T a, T b, bool c) { return c ? b : a; }
inline bool isnan(float x) { return x != x; }
inline bool isfinite(float x) { return std::isfinite(x); }
inline uint extract_bits(uint x, uint offset, uint bits) { return bits ? (x >> offset) & (~0u >> (32 - bits)) : 0; }
inline uint popcount(uint x) { return uint(__builtin_popcount(x)); }
}  // namespace metal
#define MTL_ALIAS(T) \
  typedef metal::vec<T, 2> T##2; typedef metal::vec<T, 3> T##3; typedef metal::vec<T, 4> T##4;
MTL_ALIAS(uchar) MTL_ALIAS(ushort) MTL_ALIAS(short) MTL_ALIAS(int) MTL_ALIAS(uint) MTL_ALIAS(ulong) MTL_ALIAS(float) MTL_ALIAS(half)
typedef metal::packed_vec<uint, 2> packed_uint2; typedef metal::packed_vec<uint, 3> packed_uint3; typedef metal::packed_vec<uint, 4> packed_uint4;
