// Vectors to codes (format.md, sections 1.1 to 1.5) in float32, one simdgroup per vector.
// x is [tokens, heads, dim] with strides in elements; offset and factor are [heads, dim].

// The vector to encode: (x · factor − offset), in threadgroup memory.
static inline void load_vector(device const uchar* x, device const float* offset, device const float* factor,
                               uint vector,
                               constant int* numbers, threadgroup float* y, uint lane) {
  uint token = vector / uint(N_HEADS), head = vector % uint(N_HEADS);
  ulong first = ulong(token) * uint(N_STRIDE) + ulong(head) * uint(N_HEAD_STRIDE);
  for (uint i = lane; i < SIDE_DIM; i += 32) {
    float value = read_number(x, first + i, IN_DTYPE);
    if (N_HAS_FACTOR) value *= factor[head * SIDE_DIM + i];
    if (N_HAS_OFFSET) value -= offset[head * SIDE_DIM + i];
    y[i] = value;
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

#if SIDE_BITS == 16
static inline void store_vector(threadgroup float* y, threadgroup uchar* codes, device uchar* row,
                                device uchar* scale, uint lane) {
  for (uint i = lane; i < SIDE_DIM; i += 32) write_number(row, i, SIDE_DTYPE, y[i]);
}
#else
static inline uint nearest(float x) {  // the number of boundaries strictly below x
  uint code = 0;
  for (uint step = 1u << (SIDE_BITS - 1); step > 0; step /= 2)
    if (x > SIDE_BOUNDARIES[code + step - 1]) code += step;
  return code;
}

static inline void store_vector(threadgroup float* y, threadgroup uchar* codes, device uchar* row,
                                device uchar* scale, uint lane) {
  side_rotate(y, lane);
  float peak = 0.0f;
  bool finite = true;
  for (uint i = lane; i < SIDE_DIM; i += 32) {
    peak = max(peak, abs(y[i]));
    finite = finite && is_finite(y[i]);
  }
  peak = simd_max(peak);
  bool damaged = simd_any(!finite);
  float divisor = peak > 0.0f ? peak : 1.0f, squares = 0.0f;  // squares of x / peak stay in range
  for (uint i = lane; i < SIDE_DIM; i += 32) {
    float unit = y[i] / divisor;
    squares += unit * unit;
  }
  squares = simd_sum(squares);
  float rms = precise::sqrt(squares / float(SIDE_DIM)), energy = 0.0f, product = 0.0f;
  if (!(rms > 0.0f)) rms = 1.0f;
  for (uint i = lane; i < SIDE_DIM; i += 32) {
    float unit = y[i] / divisor;
    uint code = nearest(unit / rms);
    float level = SIDE_TABLE[code];
    energy += level * level;
    product += unit * level;
    codes[i] = uchar(code);
  }
  energy = simd_sum(energy);
  product = simd_sum(product);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = lane; i < SIDE_DIM / 8; i += 32) {  // eight codes fill as many bytes as a code has bits
    ulong word = 0;
    for (uint j = 0; j < 8; ++j) word |= ulong(codes[8 * i + j]) << (SIDE_BITS * j);
    for (uint j = 0; j < SIDE_BITS; ++j) row[i * SIDE_BITS + j] = uchar(word >> (8 * j));
  }
  if (lane == 0) {
    float factor = peak * (SIDE_LEAST_SQUARES ? product / energy : precise::sqrt(squares / energy));
    if (!(energy > 0.0f) || peak == 0.0f) factor = 0.0f;
    factor = clamp(factor, -SIDE_LARGEST, SIDE_LARGEST);
    write_number(scale, 0, SIDE_DTYPE, damaged ? not_a_number() : factor);
  }
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
