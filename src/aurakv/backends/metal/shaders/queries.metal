// Queries into the rotated domain, one simdgroup per vector.

// Queries x [tokens, heads, dim] to y [kv_heads, rows, padded dim] = R (x / factor) · multiplier, where a row is
// token · group + head in the group, and bias [kv_heads, rows] = (x / factor) · offset · multiplier. Padding is 0.
[[max_total_threads_per_threadgroup(128)]]
kernel void turn_queries(device const uchar* x, device const float* offset, device const float* factor, device float* y,
                         device float* bias, constant int* numbers, constant float* factors,
                   uint position [[thread_position_in_grid]], uint team [[simdgroup_index_in_threadgroup]],
                   uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float work[4][SIDE_DIM];
  uint vector = position / 32, token = vector / uint(N_HEADS), head = vector % uint(N_HEADS), group = uint(N_GROUP);
  uint kv_head = head / group;
  ulong first = ulong(token) * uint(N_STRIDE) + ulong(head) * uint(N_HEAD_STRIDE);
  float product = 0.0f;
  for (uint i = lane; i < SIDE_DIM; i += 32) {
    float value = read_number(x, first + i, IN_DTYPE);
    if (N_HAS_FACTOR) value /= factor[kv_head * SIDE_DIM + i];
    if (N_HAS_OFFSET) product += value * offset[kv_head * SIDE_DIM + i];
    work[team][i] = value * factors[0];
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  product = simd_sum(product);
  side_rotate(work[team], lane);
  ulong row = ulong(kv_head) * uint(N_ROWS) + token * group + head % group;
  for (uint i = lane; i < SIDE_PADDED; i += 32) y[row * SIDE_PADDED + i] = i < SIDE_DIM ? work[team][i] : 0.0f;
  if (lane == 0) bias[row] = product * factors[0];
}
