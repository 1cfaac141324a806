// NEON: every 64-bit ARM processor has it.
#if defined(__aarch64__)
#include <arm_neon.h>

#include <new>

#include "simd.hpp"
#include "encode.hpp"
#include "sparse.hpp"
#include "int16_neon.hpp"

const aura::Isa aura::isa_neon = {"neon", [] { return true; }, attend_piece, weigh_piece, attend_kept, finish_group,
                                  encode_range, append_range, decode_range, scores_range, values_range};
#endif
