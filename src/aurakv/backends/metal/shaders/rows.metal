// Codes of 32 tokens for the lanes of a simdgroup, loaded 16 bytes a lane. A lane owns units of 16 channels, or shares of
// units, which are fewer bytes at most widths. The constants:
//   SIDE_LANES    lanes that have a row together
//   SIDE_SHARES   lanes that share a unit: 1, or 2 with 8 channels each
//   SIDE_TAKEN    as many units as whole pieces of 16 bytes hold. If a row has whole pieces only, the lanes of that many
//                 neighbouring units load them of one row each, and exchange units by shuffles
//   SIDE_STAGED   rows share pieces: those of 32 tokens go through threadgroup memory. SIDE_SPAN tokens have whole pieces,
//                 and lie side by side in a page
//   SIDE_GRAIN    a divisor of all places of rows (spans), so that 32 bits hold one
// Where pages do not hold whole spans SIDE_TAKEN is 1 and nothing is staged: each lane loads a unit, as wide as it is
// aligned.
#define OWNER(token) ((token) % (32 / KEY_LANES) * KEY_LANES + (token) / (32 / KEY_LANES))  // the lane of a token
#define SIDE_STEP (32 / SIDE_LANES)
#define SIDE_CHANNELS (16 / SIDE_SHARES)  // that a lane owns at a time; it has SIDE_HELD times as many
#define SIDE_PARTS (SIDE_UNITS * SIDE_SHARES)
#define SIDE_HELD ((SIDE_PARTS + SIDE_LANES - 1) / SIDE_LANES)
#define SIDE_AT_ONCE (SIDE_STAGED ? 1 : SIDE_TAKEN * SIDE_SHARES)  // rows that lanes load together
#define SIDE_PART_WORDS (SIDE_BITS == 16 ? SIDE_WORDS / SIDE_SHARES : (SIDE_CHANNELS * SIDE_BITS + 31) / 32)
#define ABSENT 0xffffffffu

static inline uint side_place(int page, int slot, uint kv_head, constant int* numbers) {
  ulong piece = (ulong(page) * uint(N_KV_HEADS) + kv_head) * uint(N_PIECE) + uint(N_SIDE_CODES);
  return uint((piece + ulong(slot / SIDE_SPAN * SIDE_SPAN) * SIDE_ROW) / SIDE_GRAIN);
}

// Which of SIDE_AT_ONCE rows a lane loads.
static inline uint side_turn(uint lane) {
  return SIDE_STAGED ? 0u : lane % SIDE_SHARES * SIDE_TAKEN + lane / SIDE_SHARES % SIDE_TAKEN;
}

// Every lane has the place of its token, or ABSENT: then codes are 0.
#if SIDE_STAGED
static inline void side_stage(device const uchar* data, uint place, uint lane, threadgroup uint4* staged) {
  UNROLL for (uint d = 1; d < SIDE_SPAN; d *= 2) place = min(place, simd_shuffle_xor(place, ushort(OWNER(d))));
  simdgroup_barrier(mem_flags::mem_threadgroup);  // what was staged before is read
  UNROLL for (uint first = 0; first < 2 * SIDE_ROW; first += 32) {
    uint piece = first + lane, span = SIDE_SPAN * SIDE_ROW / 16;
    uint its_place = simd_shuffle(place, ushort(OWNER(min(piece / span * SIDE_SPAN, 31u))));
    if (piece >= 2 * SIDE_ROW) its_place = ABSENT;
    uint4 four = uint4(0u);
    if (its_place != ABSENT) four = ((device const uint4*)data)[ulong(its_place) + piece % span];
    if (piece < 2 * SIDE_ROW) staged[piece] = four;
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

static inline void side_take(device const uchar*, uint, uint token, uint part, uint, threadgroup const uint4* staged,
                             thread uint* words) {
  UNROLL for (uint i = 0; i < SIDE_PART_WORDS; ++i) words[i] = 0;
  uint byte = token * SIDE_ROW + part * (SIDE_CHANNELS * SIDE_BITS / 8);
  if (part < SIDE_PARTS) side_unstage(staged, byte, SIDE_CHANNELS, words);
}
#else
static inline void side_stage(device const uchar*, uint, uint, threadgroup uint4*) {}

// The words of a lane's unit in SIDE_TAKEN rows, of which this lane loads the one at this place.
static inline void side_take_units(device const uchar* data, uint place, uint unit, uint lane, thread uint* words) {
  device const uchar* row = data + ulong(place) * SIDE_GRAIN;
  bool there = place != ABSENT && unit < SIDE_UNITS;
#if SIDE_TAKEN == 1
  UNROLL for (uint i = 0; i < SIDE_WORDS; ++i) words[i] = 0;
  if (there) side_fetch(row, unit, words);
#else
  uint all[SIDE_TAKEN * SIDE_BITS / 2];
  UNROLL for (uint i = 0; i < SIDE_TAKEN * SIDE_BITS / 2; ++i) all[i] = 0;
  if (there) {
    device const uint4* from = (device const uint4*)row + unit / SIDE_TAKEN * (SIDE_TAKEN * SIDE_BITS / 8);
    UNROLL for (uint i = 0; i < SIDE_TAKEN * SIDE_BITS / 8; ++i) {
      uint4 four = from[i];
      UNROLL for (uint j = 0; j < 4; ++j) all[4 * i + j] = four[j];
    }
  }
  // Lanes whose units are d apart exchange halves of 2 d units until each has one unit of all rows.
  UNROLL for (uint d = SIDE_TAKEN / 2; d > SIDE_BITS % 2; d /= 2)
    UNROLL for (uint i = 0; i < SIDE_TAKEN * SIDE_BITS / 4; ++i) {
      uint size = d * SIDE_BITS / 2, low = i / size * size * 2 + i % size, high = low + size;
      bool upper = (unit & d) != 0;
      uint other = simd_shuffle_xor(upper ? all[low] : all[high], ushort(d * SIDE_SHARES));
      if (upper) all[low] = other;
      else all[high] = other;
    }
#if SIDE_BITS % 2 == 0
  UNROLL for (uint i = 0; i < SIDE_TAKEN * SIDE_WORDS; ++i) words[i] = all[i];
#else  // the last halves are no whole words
  UNROLL for (uint t = 0; t < SIDE_TAKEN; t += 2)
    UNROLL for (uint i = 0; i < SIDE_WORDS; ++i) {
      uint at = t * SIDE_BITS / 2 + i, middle = at + SIDE_BITS / 2;
      uint low = all[at], high = all[middle] >> 16;
      if (i + 1 < SIDE_WORDS) high |= all[middle + (i + 1 < SIDE_WORDS)] << 16;
      bool upper = (unit & 1u) != 0;
      uint other = simd_shuffle_xor(upper ? low : high, ushort(SIDE_SHARES));
      words[t * SIDE_WORDS + i] = upper ? other : low;
      words[(t + 1) * SIDE_WORDS + i] = upper ? high : other;
    }
#endif
#endif
}

// The words of a lane's part in SIDE_AT_ONCE rows. Every lane must be here.
static inline void side_take(device const uchar* data, uint place, uint, uint part, uint lane,
                             threadgroup const uint4*, thread uint* words) {
#if SIDE_SHARES == 1
  side_take_units(data, place, part, lane, words);
#else  // the two lanes of a unit have it of different rows: each gives away the half that is not its own
  uint units[SIDE_TAKEN * SIDE_WORDS];
  side_take_units(data, place, part / 2, lane, units);
  UNROLL for (uint t = 0; t < SIDE_TAKEN; ++t)
    UNROLL for (uint i = 0; i < SIDE_PART_WORDS; ++i) {
      uint first = t * SIDE_WORDS, bit = SIDE_BITS == 16 ? SIDE_WORDS * 16 : SIDE_BITS * 8, at = bit / 32 + i;
      uint low = units[first + i], high = units[first + at] >> (bit % 32);
      if (bit % 32 != 0 && at + 1 < SIDE_WORDS) high |= units[first + (at + 1) % SIDE_WORDS] << (32 - bit % 32);
      bool upper = (lane & 1u) != 0;
      uint other = simd_shuffle_xor(upper ? low : high, 1);
      words[t * SIDE_PART_WORDS + i] = upper ? other : low;
      words[(SIDE_TAKEN + t) * SIDE_PART_WORDS + i] = upper ? high : other;
    }
#endif
}
#endif
