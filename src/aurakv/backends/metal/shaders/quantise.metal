// What encoders of vectors share: a vector from memory, its length, and its codes and scale to memory.
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

#if SIDE_BITS != 16
static inline uint nearest(float x) {  // the number of boundaries strictly below x
  uint code = 0;
  for (uint step = 1u << (SIDE_BITS - 1); step > 0; step /= 2)
    if (x > SIDE_BOUNDARIES[code + step - 1]) code += step;
  return code;
}

// A rotated vector y: its largest coordinate, what to divide by so that squares stay in range, and of y / divisor the
// sum of squares and the root of their mean, or 1 where that is 0.
struct Size {
  float peak, divisor, squares, rms;
  bool damaged;
};

static inline void measure(threadgroup const float* y, uint lane, thread Size& size) {
  float peak = 0.0f, squares = 0.0f;
  bool finite = true;
  for (uint i = lane; i < SIDE_DIM; i += 32) {
    peak = max(peak, abs(y[i]));
    finite = finite && is_finite(y[i]);
  }
  size.peak = simd_max(peak);
  size.damaged = simd_any(!finite);
  size.divisor = size.peak > 0.0f ? size.peak : 1.0f;
  for (uint i = lane; i < SIDE_DIM; i += 32) {
    float unit = y[i] / size.divisor;
    squares += unit * unit;
  }
  size.squares = simd_sum(squares);
  size.rms = precise::sqrt(size.squares / float(SIDE_DIM));
  if (!(size.rms > 0.0f)) size.rms = 1.0f;
}

// Lanes have written the codes and not waited.
static inline void write_codes(threadgroup const uchar* codes, device uchar* row, uint lane) {
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = lane; i < SIDE_DIM / 8; i += 32) {  // eight codes fill as many bytes as a code has bits
    ulong word = 0;
    for (uint j = 0; j < 8; ++j) word |= ulong(codes[8 * i + j]) << (SIDE_BITS * j);
    for (uint j = 0; j < SIDE_BITS; ++j) row[i * SIDE_BITS + j] = uchar(word >> (8 * j));
  }
}

// What levels are multiplied by, from the products of y / divisor with itself, with the levels, and of the levels with
// themselves; and how it is stored.
static inline float nearest_factor(float own, float mixed, float energy) {
  return SIDE_LEAST_SQUARES ? mixed / energy : precise::sqrt(own / energy);
}
static inline void write_scale(device uchar* scale, thread const Size& size, float factor, float energy) {
  factor *= size.peak;
  if (!(energy > 0.0f) || size.peak == 0.0f) factor = 0.0f;
  factor = clamp(factor, -SIDE_LARGEST, SIDE_LARGEST);
  write_number(scale, 0, SIDE_DTYPE, size.damaged ? not_a_number() : factor);
}
#endif
