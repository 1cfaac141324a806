// Portable C++: any processor. Also what checks the other instruction sets.
#include <new>

#include "simd.hpp"
#include "encode.hpp"
#include "sparse.hpp"

namespace {
const KeyKernel* int16_key(const Codec&) { return nullptr; }
const ValueKernel* int16_value(const Codec&) { return nullptr; }
}  // namespace

const aura::Isa aura::isa_generic = {"generic", [] { return true; }, attend_piece, weigh_piece, attend_kept, finish_group,
                                  encode_range, append_range, decode_range, scores_range, values_range};
