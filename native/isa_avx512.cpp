// AVX-512 with VNNI and VBMI (Ice Lake, Zen 4 and later).
#include <immintrin.h>

#include <new>

#include "simd.hpp"
#include "encode.hpp"
#include "sparse.hpp"
#include "int16_avx512.hpp"

namespace {
bool supported() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("bmi2");
}
}  // namespace

const aura::Isa aura::isa_avx512 = {"avx512", supported, attend_piece, weigh_piece, attend_kept, finish_group,
                                  encode_range, append_range, decode_range, scores_range, values_range};
