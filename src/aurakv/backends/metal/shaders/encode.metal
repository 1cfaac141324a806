// Vectors to codes (format.md, sections 1.1 to 1.5) in float32, one simdgroup per vector.

#if SIDE_BITS == 16
static inline void store_vector(threadgroup float* y, threadgroup uchar* codes, device uchar* row,
                                device uchar* scale, uint lane) {
  for (uint i = lane; i < SIDE_DIM; i += 32) write_number(row, i, SIDE_DTYPE, y[i]);
}
#else
static inline void store_vector(threadgroup float* y, threadgroup uchar* codes, device uchar* row,
                                device uchar* scale, uint lane) {
  side_rotate(y, lane);
  Size size;
  measure(y, lane, size);
  float energy = 0.0f, product = 0.0f;
  for (uint i = lane; i < SIDE_DIM; i += 32) {
    float unit = y[i] / size.divisor;
    uint code = nearest(unit / size.rms);
    float level = SIDE_TABLE[code];
    energy += level * level;
    product += unit * level;
    codes[i] = uchar(code);
  }
  energy = simd_sum(energy);
  product = simd_sum(product);
  write_codes(codes, row, lane);
  if (lane == 0) write_scale(scale, size, nearest_factor(size.squares, product, energy), energy);
}
#endif

[[max_total_threads_per_threadgroup(128)]]
kernel void encode(device const uchar* x, device const float* offset, device const float* factor, device uchar* data,
                   device uchar* scales, constant int* numbers, uint position [[thread_position_in_grid]],
                   uint team [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float y[4][SIDE_DIM];
  threadgroup uchar codes[4][SIDE_DIM];
  uint vector = position / 32;
  load_vector(x, offset, factor, vector, numbers, y[team], lane);
  store_vector(y[team], codes[team], data + ulong(vector) * SIDE_ROW, scales + ulong(vector) * SIDE_SCALE, lane);
}

[[max_total_threads_per_threadgroup(128)]]
kernel void append(device const uchar* x, device const float* offset, device const float* factor,
                   device const int* starts,
                   device const int* base, device const int* table, device uchar* pages, constant int* numbers,
                   uint position [[thread_position_in_grid]], uint team [[simdgroup_index_in_threadgroup]],
                   uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float y[4][SIDE_DIM];
  threadgroup uchar codes[4][SIDE_DIM];
  uint vector = position / 32;
  int2 slot = new_slot(int(vector) / N_HEADS, starts, base, table, numbers);
  if (slot.x < 0) return;  // the whole simdgroup
  device uchar* piece = pages + (ulong(slot.x) * uint(N_HEADS) + vector % uint(N_HEADS)) * uint(N_PIECE);
  load_vector(x, offset, factor, vector, numbers, y[team], lane);
  store_vector(y[team], codes[team], piece + N_CODES + slot.y * SIDE_ROW, piece + N_SCALES + slot.y * SIDE_SCALE, lane);
}
