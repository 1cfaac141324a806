// AVX2, FMA and F16C (Haswell, Zen and later).
#include <immintrin.h>

#include <new>

#include "simd.hpp"
#include "encode.hpp"
#include "sparse.hpp"
#include "int16_avx2.hpp"

namespace {
bool supported() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
}
}  // namespace

const aura::Isa aura::isa_avx2 = {"avx2", supported, attend_piece, weigh_piece, attend_kept, finish_group,
                                  encode_range, append_range, decode_range, scores_range, values_range};
