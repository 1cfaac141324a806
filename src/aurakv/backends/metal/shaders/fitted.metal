// Vectors to fitted codes (format.md, section 1.3) in float32, one simdgroup per vector.
// fit is [heads, dim (dim + 1) / 2] in float16: row i is A_i0, A_i1, ... up to the diagonal, where d_i stands. Equal
// weights have none. The constants:
//   FIT_SCALES, TRIED   the scales, times the root mean square of a vector, and how many
//   FIT_LONGEST         how many times as long as the nearest multiple of the levels a vector becomes at most
//   WEIGHTED            whether there is a fit to read; if not, A and d are ones
//   AT_ONCE             how many scales the lanes of a simdgroup try at a time: 8 or 4
//   TEAMS               simdgroups of a threadgroup, as the launcher has them
// Lane l tries scale l % AT_ONCE and sums part l / AT_ONCE of a row of A: of every PARTS quads of coordinates one.
#define PARTS (32 / AT_ONCE)

#if WEIGHTED
#define KEPT ((SIDE_DIM / 4 + PARTS - 1) / PARTS * 32)  // quads of levels, for all scales at once
static inline device const half* row_of(device const half* fit, uint i) { return fit + i * (i + 1) / 2; }

// z = A y takes the place of y, the last row first; y[i] is of lane i % 32 alone. Gives y'Gy.
static inline float aim(threadgroup float* y, device const half* fit, thread const Size& size, uint lane) {
  float own = 0.0f;
  for (uint rows = SIDE_DIM; rows > 0; --rows) {
    uint i = rows - 1;
    device const half* row = row_of(fit, i);
    float sum = 0.0f;
    for (uint j = lane; j < i; j += 32) sum += float(row[j]) * y[j];
    sum = simd_sum(sum);
    if (lane == i % 32) {
      float z = y[i] + sum;
      own += float(row[i]) * z * z;
      y[i] = z;
    }
  }
  return simd_sum(own);
}

// Where the level of coordinate i is: lanes read quads side by side, and none that of another until a barrier.
static inline uint kept_at(uint i, uint turn) {
  uint quad = i / 4;
  return 4 * (quad / PARTS * 32 + quad % PARTS * AT_ONCE + turn) + i % 4;
}

// Rounds y with the scale of this lane; alike in all parts. With r = y - scale l these are r'Gr, r'Gl and l'Gl.
static inline float3 round_all(threadgroup const float* z, threadgroup float4* kept, device const half* fit,
                               float scale, uint lane) {
  uint part = lane / AT_ONCE;
  float inverse = 1.0f / scale, rest = 0.0f, mixed = 0.0f, energy = 0.0f;
  for (uint n = lane; n < KEPT; n += 32) kept[n] = float4(0.0f);
  for (uint i = 0; i < SIDE_DIM; ++i) {
    device const half* row = row_of(fit, i);
    float made = 0.0f;
    for (uint j = 4 * part, n = lane; j < i; j += 4 * PARTS, n += 32) {
      // In the last quad A_ii and numbers of the next row may follow; their levels are still 0.
      float4 four = float4(float(row[j]), float(row[j + 1]), float(row[j + 2]), float(row[j + 3]));
      made += dot(four, kept[n]);
    }
    UNROLL for (uint distance = AT_ONCE; distance < 32; distance *= 2)
      made += simd_shuffle_xor(made, ushort(distance));
    float cost = float(row[i]), chosen = SIDE_TABLE[nearest(z[i] * inverse - made)], got = made + chosen;
    if (i / 4 % PARTS == part) ((threadgroup float*)kept)[kept_at(i, lane % AT_ONCE)] = chosen;
    float error = z[i] - scale * got;
    rest += cost * error * error;
    mixed += cost * error * got;
    energy += cost * got * got;
  }
  return float3(rest, mixed, energy);
}

// After a barrier. A level lies between its boundaries, so that its code is found again.
static inline uint code_at(threadgroup const float* z, threadgroup const float4* kept, uint i, uint turn,
                           float scale) {
  return nearest(((threadgroup const float*)kept)[kept_at(i, turn)]);
}
#else
#define KEPT 1
static inline float aim(threadgroup float* y, device const half* fit, thread const Size& size, uint lane) {
  return size.squares;
}

static inline float3 round_all(threadgroup const float* y, threadgroup float4* kept, device const half* fit,
                               float scale, uint lane) {
  float inverse = 1.0f / scale, rest = 0.0f, mixed = 0.0f, energy = 0.0f;
  for (uint i = lane / AT_ONCE; i < SIDE_DIM; i += PARTS) {
    float chosen = SIDE_TABLE[nearest(y[i] * inverse)], error = y[i] - scale * chosen;
    rest += error * error;
    mixed += error * chosen;
    energy += chosen * chosen;
  }
  UNROLL for (uint distance = AT_ONCE; distance < 32; distance *= 2) {
    rest += simd_shuffle_xor(rest, ushort(distance));
    mixed += simd_shuffle_xor(mixed, ushort(distance));
    energy += simd_shuffle_xor(energy, ushort(distance));
  }
  return float3(rest, mixed, energy);
}

static inline uint code_at(threadgroup const float* y, threadgroup const float4* kept, uint i, uint turn,
                           float scale) {
  float inverse = 1.0f / scale;  // as it was rounded before
  return nearest(y[i] * inverse);
}
#endif

// The best codes of y, which is y / divisor already. Gives y'Gy, y'Gl and l'Gl. The largest (y'Gl)^2 / l'Gl leaves the
// least of y'Gy, and that is found as a sum of small squares: at 8 bits the scales differ by less than large sums show.
static inline float3 choose_codes(threadgroup float* y, threadgroup float4* kept, threadgroup uchar* codes,
                                  device const half* fit, thread const Size& size, uint lane) {
  float own = aim(y, fit, size, lane), least = 0.0f, mixed = 0.0f, energy = 0.0f;
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (uint first = 0; first < TRIED; first += AT_ONCE) {
    float scale = size.rms * FIT_SCALES[first + lane % AT_ONCE];
    float3 found = round_all(y, kept, fit, scale, lane);
    float left = found.x - (found.z > 0.0f ? found.y * found.y / found.z : 0.0f), best = simd_min(left);
    ushort turn = ushort(simd_min(left == best ? lane % AT_ONCE : uint(AT_ONCE - 1)));  // the first of equals
    scale = simd_shuffle(scale, turn);
    float its_mixed = simd_shuffle(found.y, turn), its_energy = simd_shuffle(found.z, turn);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    if (first == 0 || best < least) {
      least = best;
      mixed = its_mixed + scale * its_energy;
      energy = its_energy;
      for (uint i = lane; i < SIDE_DIM; i += 32) codes[i] = uchar(code_at(y, kept, i, turn, scale));
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
  return float3(own, mixed, energy);
}

static inline float fitted_factor(float own, float mixed, float energy) {
  float fits = mixed * mixed / energy;
  return mixed / energy * (own < FIT_LONGEST * fits ? own / fits : FIT_LONGEST);
}

static inline void store_fitted(threadgroup float* y, threadgroup float4* kept, threadgroup uchar* codes,
                                device const half* fit, uint head, device uchar* row, device uchar* scale, uint lane) {
  side_rotate(y, lane);
  Size size;
  measure(y, lane, size);
  for (uint i = lane; i < SIDE_DIM; i += 32) y[i] /= size.divisor;
  ulong first = WEIGHTED ? ulong(head) * (SIDE_DIM * (SIDE_DIM + 1) / 2) : 0;
  float3 products = choose_codes(y, kept, codes, fit + first, size, lane);
  write_codes(codes, row, lane);
  if (lane == 0) write_scale(scale, size, fitted_factor(products.x, products.y, products.z), products.z);
}

[[max_total_threads_per_threadgroup(TEAMS * 32)]]
kernel void encode(device const uchar* x, device const float* offset, device const float* factor,
                   device const half* fit, device uchar* data, device uchar* scales, constant int* numbers,
                   uint position [[thread_position_in_grid]], uint team [[simdgroup_index_in_threadgroup]],
                   uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float y[TEAMS][SIDE_DIM];
  threadgroup float4 kept[TEAMS][KEPT];
  threadgroup uchar codes[TEAMS][SIDE_DIM];
  uint vector = position / 32;
  load_vector(x, offset, factor, vector, numbers, y[team], lane);
  store_fitted(y[team], kept[team], codes[team], fit, vector % uint(N_HEADS), data + ulong(vector) * SIDE_ROW,
               scales + ulong(vector) * SIDE_SCALE, lane);
}

[[max_total_threads_per_threadgroup(TEAMS * 32)]]
kernel void append(device const uchar* x, device const float* offset, device const float* factor,
                   device const half* fit, device const int* starts, device const int* base, device const int* table,
                   device uchar* pages, constant int* numbers, uint position [[thread_position_in_grid]],
                   uint team [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float y[TEAMS][SIDE_DIM];
  threadgroup float4 kept[TEAMS][KEPT];
  threadgroup uchar codes[TEAMS][SIDE_DIM];
  uint vector = position / 32, head = vector % uint(N_HEADS);
  int2 slot = new_slot(int(vector) / N_HEADS, starts, base, table, numbers);
  if (slot.x < 0) return;  // the whole simdgroup
  device uchar* piece = pages + (ulong(slot.x) * uint(N_HEADS) + head) * uint(N_PIECE);
  load_vector(x, offset, factor, vector, numbers, y[team], lane);
  store_fitted(y[team], kept[team], codes[team], fit, head, piece + N_CODES + slot.y * SIDE_ROW,
               piece + N_SCALES + slot.y * SIDE_SCALE, lane);
}
