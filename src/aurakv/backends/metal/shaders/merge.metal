// Partial results to the result: weighted by their exponentials, rotated back, the offset added, in the dtype of the
// queries. The first N_SPLITS come from codes, N_MORE_SPLITS behind them from vectors, which are not rotated and have
// no offset. One simdgroup per (token, query head). Side: the values.

// Σ of the parts first … last − 1 in channel i, where the maximum of all is `top`.
static inline float sum_of(device const float* sums, device const float* statistics, ulong row, ulong step,
                           uint first, uint last, uint i, float top) {
  float x = 0.0f;
  for (uint s = first; s < last; ++s) {
    ulong from = s * step + row;
    x += sums[from * SIDE_PADDED + i] * exp(statistics[from * 2] - top);
  }
  return x;
}

[[max_total_threads_per_threadgroup(128)]]
kernel void merge(device const float* sums, device const float* statistics, device const int* starts,
                  device const float* logits, device const float* offset, device uchar* out, device float* lse,
                  constant int* numbers, uint position [[thread_position_in_grid]],
                  uint team [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float y[4][SIDE_DIM];
  uint vector = position / 32, token = vector / uint(N_HEADS), head = vector % uint(N_HEADS), group = uint(N_GROUP);
  uint kv_head = head / group, splits = uint(N_SPLITS), all = splits + uint(N_MORE_SPLITS);
  ulong row = ulong(kv_head) * uint(N_ROWS) + token * group + head % group;
  ulong step = ulong(uint(N_KV_HEADS)) * uint(N_ROWS);
  if (sequence_of(int(token), starts, numbers) < 0) splits = all = 0;  // a row of nobody: nothing was written

  float top = LOWEST, total = 0.0f, from_codes = 0.0f;
  for (uint s = 0; s < all; ++s) top = max(top, statistics[(s * step + row) * 2]);
  float logit = N_HAS_LOGITS ? logits[head] : -infinity();
  if (is_finite(logit)) top = max(top, logit);
  for (uint s = 0; s < all; ++s) {
    total += statistics[(s * step + row) * 2 + 1] * exp(statistics[(s * step + row) * 2] - top);
    if (s + 1 == splits) from_codes = total;
  }
  if (is_finite(logit)) total += exp(logit - top);  // a sink's value is 0
  bool endless = as_type<uint>(logit) == as_type<uint>(infinity()) && !is_nan(total);  // it outweighs every key
  float inverse = endless || total == 0.0f ? 0.0f : 1.0f / total;

  bool whole = true;
  for (uint i = lane; i < SIDE_DIM; i += 32) {
    float x = sum_of(sums, statistics, row, step, 0, splits, i, top) * inverse;
    whole = whole && is_finite(x);
    y[team][i] = x;
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  side_rotate_back(y[team], lane);
  for (uint i = lane; i < SIDE_DIM; i += 32) {
    float x = y[team][i] + sum_of(sums, statistics, row, step, splits, all, i, top) * inverse;
    if (N_HAS_OFFSET) x += offset[kv_head * SIDE_DIM + i] * (from_codes * inverse);
    whole = whole && is_finite(x);
    y[team][i] = x;
  }
  bool damaged = simd_any(!whole);
  for (uint i = lane; i < SIDE_DIM; i += 32)
    write_number(out, ulong(vector) * SIDE_DIM + i, OUT_DTYPE, damaged ? not_a_number() : y[team][i]);
  if (lane == 0) lse[vector] = endless ? infinity() : total == 0.0f ? -infinity() : top + precise::log(total);
}
