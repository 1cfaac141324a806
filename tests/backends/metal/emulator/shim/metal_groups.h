// What threads of a group do together: simd operations, barriers, atomics, 8×8 matrices spread over a simdgroup.
#pragma once
#include "metal_types.h"

namespace mtl {  // what kernels and glue ask of the emulator
struct alignas(16) Slot { unsigned char bytes[16]; };
struct Ids { uint3 position, group, local, group_size, groups, threads; uint flat, lane, simd; };
const Slot* exchange(const void* value, size_t size, const char* op, int line, void* site);  // all lanes' values
void barrier(int flags, int line, void* site);
void simdgroup_barrier(int flags, int line, void* site);
void atomic_access(void* p, size_t size, bool reads, bool writes, void* site);
struct Array { size_t size, aligned; };  // of threadgroup memory, as a kernel declares it
void* shared_array(const Array* made);
const Ids& ids();
uint lanes();  // in this simdgroup: 32 but for a ragged last one
void out_of_simdgroup(const char* op, uint lane, int line);
uint lane();
template <class T> struct Pick { static T of(uint x, uint, uint) { return T(x); } };
template <> struct Pick<uint2> { static uint2 of(uint x, uint y, uint) { return uint2(x, y); } };
template <> struct Pick<uint3> { static uint3 of(uint x, uint y, uint z) { return uint3(x, y, z); } };
template <class T> __attribute__((no_sanitize("thread"))) inline T at(const Slot* s, uint lane) { T r; std::memcpy(&r, s + lane, sizeof r); return r; }
}  // namespace mtl

namespace metal {
#define MTL_LINE int line = __builtin_LINE()
#define MTL_SITE __builtin_return_address(0)
#define MTL_REDUCE(name, expr)                                                                        \
  template <class T> MTL_QUIET T name(T v, MTL_LINE) {                                                \
    const mtl::Slot* s = mtl::exchange(&v, sizeof v, #name, line, MTL_SITE);                          \
    T a = mtl::at<T>(s, 0);                                                                           \
    for (uint i = 1, n = mtl::lanes(); i < n; ++i) { T b = mtl::at<T>(s, i); a = expr; }              \
    return a;                                                                                         \
  }
MTL_REDUCE(simd_sum, T(a + b)) MTL_REDUCE(simd_max, max(a, b)) MTL_REDUCE(simd_min, min(a, b))  // Apple does not say in which order
MTL_REDUCE(simd_or, T(a | b)) MTL_REDUCE(simd_and, T(a & b))
MTL_QUIET inline bool simd_any(bool v, MTL_LINE) {
  const mtl::Slot* s = mtl::exchange(&v, sizeof v, "simd_any", line, MTL_SITE);
  bool a = false;
  for (uint i = 0, n = mtl::lanes(); i < n; ++i) a = a || mtl::at<bool>(s, i);
  return a;
}
#define MTL_SHUFFLE(name, source)                                                                     \
  template <class T> MTL_QUIET T name(T v, ushort k, MTL_LINE) {                                      \
    const mtl::Slot* s = mtl::exchange(&v, sizeof v, #name, line, MTL_SITE);                          \
    uint from = source;                                                                               \
    if (from >= mtl::lanes()) mtl::out_of_simdgroup(#name, from, line);                               \
    return mtl::at<T>(s, from);                                                                       \
  }
MTL_SHUFFLE(simd_shuffle, k) MTL_SHUFFLE(simd_broadcast, k) MTL_SHUFFLE(simd_shuffle_xor, mtl::ids().lane ^ k)

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
inline mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
MTL_QUIET inline void threadgroup_barrier(mem_flags f, MTL_LINE) { mtl::barrier(int(f), line, MTL_SITE); }
MTL_QUIET inline void simdgroup_barrier(mem_flags f, MTL_LINE) { mtl::simdgroup_barrier(int(f), line, MTL_SITE); }

enum memory_order { memory_order_relaxed };
template <class T> struct atomic_cell { T value; };
typedef atomic_cell<int> atomic_int;
typedef atomic_cell<uint> atomic_uint;
#define MTL_ATOMIC(name, expr)                                                                        \
  template <class T> MTL_QUIET T name(volatile atomic_cell<T>* cell, T v, memory_order) {             \
    mtl::atomic_access((void*)cell, sizeof(T), true, true, MTL_SITE); T old = cell->value; (void)v; cell->value = expr; return old; }
MTL_ATOMIC(atomic_exchange_explicit, v) MTL_ATOMIC(atomic_fetch_add_explicit, old + v) MTL_ATOMIC(atomic_fetch_or_explicit, old | v)
MTL_ATOMIC(atomic_fetch_max_explicit, max(old, v))
template <class T> MTL_QUIET void atomic_store_explicit(volatile atomic_cell<T>* cell, T v, memory_order) {
  mtl::atomic_access((void*)cell, sizeof(T), false, true, MTL_SITE); cell->value = v; }
template <class T> MTL_QUIET T atomic_load_explicit(volatile atomic_cell<T>* cell, memory_order) {
  mtl::atomic_access((void*)cell, sizeof(T), true, false, MTL_SITE); return cell->value; }

// Where the elements of a matrix lie is Apple's secret; here lane l holds row l / 4, columns 2·(l mod 4) and the next.
template <class T, int R, int C> struct simdgroup_matrix {
  static_assert(R == 8 && C == 8, "simdgroup matrices are 8×8");
  T own[2];
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal) {
    uint l = mtl::lane();
    for (uint i = 0; i < 2; ++i) own[i] = l / 4 == l % 4 * 2 + i ? diagonal : T(0);
  }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
template <class T, int R, int C> inline simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T v) {
  simdgroup_matrix<T, R, C> m; m.own[0] = m.own[1] = v; return m; }
template <class T> MTL_INLINE void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const T* from, ulong stride = 8, const ulong2& origin = ulong2(0),
                                                  bool transposed = false, MTL_LINE) {
  mtl::exchange("", 0, "simdgroup_load", line, (void*)from);
  uint l = mtl::lane();
  for (uint i = 0; i < 2; ++i) {
    ulong row = transposed ? l % 4 * 2 + i : l / 4, column = transposed ? l / 4 : l % 4 * 2 + i;
    m.own[i] = from[(origin.y + row) * stride + origin.x + column];
  }
}
template <class T> MTL_INLINE void simdgroup_store(const simdgroup_matrix<T, 8, 8>& m, T* to, ulong stride = 8, const ulong2& origin = ulong2(0),
                                                   bool transposed = false, MTL_LINE) {
  mtl::exchange("", 0, "simdgroup_store", line, (void*)to);
  uint l = mtl::lane();
  for (uint i = 0; i < 2; ++i) {
    ulong row = transposed ? l % 4 * 2 + i : l / 4, column = transposed ? l / 4 : l % 4 * 2 + i;
    to[(origin.y + row) * stride + origin.x + column] = m.own[i];
  }
}
template <class T> MTL_QUIET void simdgroup_multiply_accumulate(simdgroup_matrix<T, 8, 8>& d, const simdgroup_matrix<T, 8, 8>& a,
    const simdgroup_matrix<T, 8, 8>& b, const simdgroup_matrix<T, 8, 8>& c, MTL_LINE) {
  T both[4] = {a.own[0], a.own[1], b.own[0], b.own[1]}, sums[2] = {c.own[0], c.own[1]};
  const mtl::Slot* s = mtl::exchange(both, sizeof both, "simdgroup_multiply_accumulate", line, MTL_SITE);
  uint l = mtl::lane();
  for (uint k = 0; k < 8; ++k) {
    T x, y[2];
    std::memcpy(&x, s[l / 4 * 4 + k / 2].bytes + sizeof(T) * (k % 2), sizeof x);
    std::memcpy(y, s[k * 4 + l % 4].bytes + 2 * sizeof(T), sizeof y);
    for (uint i = 0; i < 2; ++i) sums[i] = fma(x, y[i], sums[i]);
  }
  d.own[0] = sums[0]; d.own[1] = sums[1];
}
template <class T> inline void simdgroup_multiply(simdgroup_matrix<T, 8, 8>& d, const simdgroup_matrix<T, 8, 8>& a, const simdgroup_matrix<T, 8, 8>& b, MTL_LINE) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<T, 8, 8>(T(0)), line); }
}  // namespace metal
