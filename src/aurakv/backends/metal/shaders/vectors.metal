// Codes to vectors, scores and weighted sums, for codes that are not in pages.

// out = x̂, or R x̂ when N_ROTATED; then the offset comes rotated, too.
[[max_total_threads_per_threadgroup(128)]]
kernel void decode(device const uchar* data, device const uchar* scales, device const float* offset, device uchar* out,
                   constant int* numbers, uint position [[thread_position_in_grid]],
                   uint team [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float y[4][SIDE_PADDED];
  uint vector = position / 32, head = vector % uint(N_HEADS);
  float mine[SIDE_HOLDS], scale = SIDE_BITS == 16 ? 1.0f : read_number(scales, vector, SIDE_DTYPE);
  side_own_levels(lane, mine);
  for (uint first = 0; first < SIDE_UNITS; first += 32) {
    uint unit = first + lane, words[SIDE_WORDS];
    for (uint i = 0; i < SIDE_WORDS; ++i) words[i] = 0;
    if (unit < SIDE_UNITS) side_fetch(data + ulong(vector) * SIDE_ROW, unit, words);
    for (uint i = 0; i < 16; ++i) {
      float level = side_number(words, i, mine);
      if (unit < SIDE_UNITS) y[team][unit * 16 + i] = level * scale;
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  if (!N_ROTATED) side_rotate_back(y[team], lane);
  for (uint i = lane; i < SIDE_DIM; i += 32) {
    float value = y[team][i];
    if (N_HAS_OFFSET) value += offset[head * SIDE_DIM + i];
    write_number(out, ulong(vector) * SIDE_DIM + i, OUT_DTYPE, value);
  }
}

// q·k̂ [tokens, heads, n] of turned queries with n stored keys [n, kv_heads]. One simdgroup per key.
[[max_total_threads_per_threadgroup(128)]]
kernel void scores(device const float* queries, device const float* bias, device const uchar* data,
                   device const uchar* scales, device uchar* out, constant int* numbers,
                   uint position [[thread_position_in_grid]], uint team [[simdgroup_index_in_threadgroup]],
                   uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float y[4][SIDE_PADDED];
  uint vector = position / 32, kv_heads = uint(N_KV_HEADS), key = vector / kv_heads, kv_head = vector % kv_heads;
  uint group = uint(N_GROUP), heads = group * kv_heads;
  float mine[SIDE_HOLDS], scale = SIDE_BITS == 16 ? 1.0f : read_number(scales, vector, SIDE_DTYPE);
  side_own_levels(lane, mine);
  for (uint first = 0; first < SIDE_UNITS; first += 32) {
    uint unit = first + lane, words[SIDE_WORDS];
    for (uint i = 0; i < SIDE_WORDS; ++i) words[i] = 0;
    if (unit < SIDE_UNITS) side_fetch(data + ulong(vector) * SIDE_ROW, unit, words);
    for (uint i = 0; i < 16; ++i) {
      float level = side_number(words, i, mine);
      if (unit < SIDE_UNITS) y[team][unit * 16 + i] = level;
    }
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (uint row = 0; row < uint(N_TOKENS) * group; ++row) {
    ulong from = ulong(kv_head) * uint(N_ROWS) + row;
    float sum = 0.0f;
    for (uint i = lane; i < SIDE_DIM; i += 32) sum += queries[from * SIDE_PADDED + i] * y[team][i];
    sum = simd_sum(sum) * scale + bias[from];
    ulong to = (ulong(row / group) * heads + kv_head * group + row % group) * uint(N_KEYS) + key;
    if (lane == 0) write_number(out, to, OUT_DTYPE, sum);
  }
}

// Σ w·v̂ [tokens, heads, dim] over weights [tokens, heads, n] that are not below the threshold. One simdgroup per
// (token, head), whose lanes read rows side by side as in attend_rows.metal.
#define HELD ((SIDE_UNITS + SIDE_LANES - 1) / SIDE_LANES)
[[max_total_threads_per_threadgroup(128)]]
kernel void values(device const uchar* weights, device const uchar* data, device const uchar* scales,
                   device const float* offset, device uchar* out, constant int* numbers, constant float* factors,
                   uint position [[thread_position_in_grid]], uint team [[simdgroup_index_in_threadgroup]],
                   uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float y[4][SIDE_PADDED];
  uint vector = position / 32, kv_heads = uint(N_KV_HEADS), kv_head = vector % uint(N_HEADS) / uint(N_GROUP);
  uint count = uint(N_KEYS);
  float mine[SIDE_HOLDS], total = 0.0f, sum[HELD * 16];
  side_own_levels(lane, mine);
  for (uint i = 0; i < HELD * 16; ++i) sum[i] = 0.0f;
  for (uint first = 0; first < count; first += 32 / SIDE_LANES) {
    uint key = first + lane / SIDE_LANES;
    float weight = key < count ? read_number(weights, ulong(vector) * count + key, OUT_DTYPE) : 0.0f;
    bool keep = key < count && !(weight < factors[0]);
    ulong stored = ulong(key) * kv_heads + kv_head;
    if (!keep) weight = 0.0f;
    if (lane % SIDE_LANES == 0) total += weight;
    if (keep && SIDE_BITS != 16) weight *= read_number(scales, stored, SIDE_DTYPE);
    for (uint u = 0; u < HELD; ++u) {
      uint unit = lane % SIDE_LANES + u * SIDE_LANES, words[SIDE_WORDS];
      for (uint i = 0; i < SIDE_WORDS; ++i) words[i] = 0;
      if (keep && unit < SIDE_UNITS) side_fetch(data + stored * SIDE_ROW, unit, words);
      for (uint i = 0; i < 16; ++i) sum[u * 16 + i] = fma(weight, side_number(words, i, mine), sum[u * 16 + i]);
    }
  }
  total = simd_sum(total);
  bool whole = true;
  for (uint u = 0; u < HELD; ++u)
    for (uint i = 0; i < 16; ++i) {
      float x = sum[u * 16 + i];
      for (uint distance = SIDE_LANES; distance < 32; distance *= 2) x += simd_shuffle_xor(x, ushort(distance));
      uint unit = lane + u * SIDE_LANES;
      whole = whole && is_finite(x);
      if (lane < SIDE_LANES && unit < SIDE_UNITS) y[team][unit * 16 + i] = x;
    }
  bool damaged = simd_any(!whole);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  side_rotate_back(y[team], lane);
  for (uint i = lane; i < SIDE_DIM; i += 32) {
    float x = y[team][i];
    if (N_HAS_OFFSET) x += total * offset[kv_head * SIDE_DIM + i];
    write_number(out, ulong(vector) * SIDE_DIM + i, OUT_DTYPE, damaged ? not_a_number() : x);
  }
}
