// R = H · diag(s) / √D of one side, and its transpose, on a vector in threadgroup memory that belongs to one simdgroup.
// H is the Kronecker product of a Sylvester matrix (sums and differences) and a Paley matrix of order SIDE_ORDER, whose
// rows and columns are bits: set means −1. SIDE_SIGNS are the bits of s.

#if SIDE_ROTATES
static inline bool side_negative(uint i) { return (SIDE_SIGNS[i / 32] >> (i % 32)) & 1u; }

static inline void side_hadamard(threadgroup float* x, uint lane, bool transposed) {
#if SIDE_ORDER > 1
  float sums[(SIDE_DIM + 31) / 32];
  for (uint i = lane, n = 0; i < SIDE_DIM; i += 32, ++n) {
    ulong bits = transposed ? SIDE_PALEY_COLUMNS[i % SIDE_ORDER] : SIDE_PALEY_ROWS[i % SIDE_ORDER];
    float sum = 0.0f;
    for (uint j = 0; j < SIDE_ORDER; ++j) {
      float y = x[i - i % SIDE_ORDER + j];
      sum += (bits >> j) & 1 ? -y : y;
    }
    sums[n] = sum;
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = lane, n = 0; i < SIDE_DIM; i += 32, ++n) x[i] = sums[n];
  simdgroup_barrier(mem_flags::mem_threadgroup);
#endif
  for (uint step = SIDE_ORDER; step < SIDE_DIM; step *= 2) {
    for (uint pair = lane; pair < SIDE_DIM / 2; pair += 32) {
      uint i = pair / step * step * 2 + pair % step;
      float a = x[i], b = x[i + step];
      x[i] = a + b;
      x[i + step] = a - b;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
}
#endif

static inline void side_rotate(threadgroup float* x, uint lane) {  // the caller has written x and waited
#if SIDE_ROTATES
  for (uint i = lane; i < SIDE_DIM; i += 32) x[i] *= side_negative(i) ? -SIDE_ROOT : SIDE_ROOT;
  simdgroup_barrier(mem_flags::mem_threadgroup);
  side_hadamard(x, lane, false);
#endif
}

static inline void side_rotate_back(threadgroup float* x, uint lane) {
#if SIDE_ROTATES
  side_hadamard(x, lane, true);
  for (uint i = lane; i < SIDE_DIM; i += 32) x[i] *= side_negative(i) ? -SIDE_ROOT : SIDE_ROOT;
  simdgroup_barrier(mem_flags::mem_threadgroup);
#endif
}
