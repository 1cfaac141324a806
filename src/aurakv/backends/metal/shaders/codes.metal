// Stored vectors of one side: units of 16 channels, from memory to numbers. The launcher writes `key_` or `value_` for
// `side_` and puts the constants in front:
//   SIDE_BITS, SIDE_DIM, SIDE_ROW   bits of a code, channels, bytes of a row
//   SIDE_DTYPE                      of the scale; at 16 bits of the vector
//   SIDE_LEVELS                     how a code becomes its level: by shuffle or by arithmetic
//   SIDE_TABLE                      the levels in constant memory, for lanes to take theirs from
//   SIDE_HOLDS, SIDE_MIRRORED       how many levels a lane keeps for shuffles; whether these are the positive half
// A unit is 2·bits bytes and starts at a multiple of the size of the words that it is read by.
#define SIDE_UNITS ((SIDE_DIM + 15) / 16)
#define SIDE_PADDED (SIDE_UNITS * 16)

#if SIDE_BITS == 16
#define SIDE_WORDS (SIDE_DTYPE == 0 ? 16 : 8)
#else
#define SIDE_WORDS ((SIDE_BITS + 1) / 2)
#endif

// The words of a unit; at 16 bits channels behind the last one are 0.
static inline void side_fetch(device const uchar* row, uint unit, thread uint* words) {
#if SIDE_BITS == 16 && SIDE_DIM % 16 == 0
  device const uint4* from = (device const uint4*)row + unit * (SIDE_WORDS / 4);
  UNROLL for (uint i = 0; i < SIDE_WORDS / 4; ++i) {
    uint4 four = from[i];
    UNROLL for (uint j = 0; j < 4; ++j) words[4 * i + j] = four[j];
  }
#elif SIDE_BITS == 16
  UNROLL for (uint i = 0; i < 16; ++i) {
    if (unit * 16 + i >= SIDE_DIM) continue;
    if (SIDE_DTYPE == 0) words[i] = ((device const uint*)row)[unit * 16 + i];
    else words[i / 2] |= uint(((device const ushort*)row)[unit * 16 + i]) << (16 * (i % 2));
  }
#elif SIDE_BITS == 8
  uint4 four = ((device const uint4*)row)[unit];
  UNROLL for (uint j = 0; j < 4; ++j) words[j] = four[j];
#elif SIDE_BITS == 4
  uint2 two = ((device const uint2*)row)[unit];
  words[0] = two.x;
  words[1] = two.y;
#elif SIDE_BITS % 2 == 0
  UNROLL for (uint i = 0; i < SIDE_WORDS; ++i) words[i] = ((device const uint*)row)[unit * SIDE_WORDS + i];
#else
  UNROLL for (uint i = 0; i < SIDE_BITS; ++i)
    words[i / 2] |= uint(((device const ushort*)row)[unit * SIDE_BITS + i]) << (16 * (i % 2));
#endif
}

#if SIDE_BITS != 16
// The words of a unit, or of a share of one, from threadgroup memory, where it may begin in the middle of a word.
static inline void side_unstage(threadgroup const uint4* staged, uint byte, uint count, thread uint* words) {
  threadgroup const uint* from = (threadgroup const uint*)staged + byte / 4;
  uint shift = byte % 4 * 8, last = (byte + count * SIDE_BITS / 8 - 1) / 4 - byte / 4;
  UNROLL for (uint i = 0; i < SIDE_WORDS; ++i) {
    if (i * 32 >= count * SIDE_BITS) continue;
    words[i] = from[i] >> shift;
    if (shift != 0 && i < last) words[i] |= from[i + 1] << (32 - shift);
  }
}
#endif

#if SIDE_BITS == 16
static inline float side_number(thread const uint* words, uint i, thread const float* mine) {
  if (SIDE_DTYPE == 0) return as_type<float>(words[i]);
  uint bits = (words[i / 2] >> (16 * (i % 2))) & 0xffffu;
  return SIDE_DTYPE == 1 ? float(as_type<half>(ushort(bits))) : as_type<float>(bits << 16);
}
#else
static inline uint side_code(thread const uint* words, uint i) {
  uint bit = i * SIDE_BITS, code = words[bit / 32] >> (bit % 32);
  if (bit % 32 + SIDE_BITS > 32) code |= words[bit / 32 + 1] << (32 - bit % 32);
  return code & ((1u << SIDE_BITS) - 1u);
}

static inline float side_level(uint code, thread const float* mine) {
#if SIDE_LEVELS == BY_SHUFFLE  // every lane must be here
  bool upper = (code >> (SIDE_BITS - 1)) != 0;
  uint at = SIDE_MIRRORED ? (upper ? code : ~code) & ((1u << (SIDE_BITS - 1)) - 1u) : code;
  float level = simd_shuffle(mine[0], ushort(at & 31u));
  UNROLL for (uint r = 1; r < SIDE_HOLDS; ++r) {
    float other = simd_shuffle(mine[r], ushort(at & 31u));
    level = at / 32 == r ? other : level;
  }
  return SIDE_MIRRORED && !upper ? -level : level;
#elif SIDE_LEVELS == BY_UNIFORM
  return SIDE_A * (float(code) - (float(1u << SIDE_BITS) - 1.0f) * 0.5f);
#elif SIDE_LEVELS == BY_CUBIC
  float x = float(code) - (float(1u << SIDE_BITS) - 1.0f) * 0.5f;
  return SIDE_A * x * (1.0f + SIDE_B * x * x);
#elif SIDE_LEVELS == BY_POLY7  // each step is rounded to half once, as format.md says
  half x = half(float(2 * code + 1) * (1.0f / float(1u << SIDE_BITS)) - 1.0f);
  half s = x * x;
  half w = fma(s, fma(s, half(SIDE_D), half(SIDE_C)), half(SIDE_B));
  return SIDE_A * float(fma(s * x, w, x));
#endif
}

static inline float side_number(thread const uint* words, uint i, thread const float* mine) {
  return side_level(side_code(words, i), mine);
}
#endif

// What a lane keeps of the levels for shuffles, SIDE_HOLDS numbers.
static inline void side_own_levels(uint lane, thread float* mine) {
#if SIDE_BITS != 16 && SIDE_LEVELS == BY_SHUFFLE
  UNROLL for (uint r = 0; r < SIDE_HOLDS; ++r)
    mine[r] = SIDE_TABLE[(SIDE_MIRRORED << (SIDE_BITS - 1)) + r * 32 + (lane & ((1u << SIDE_BITS) - 1u))];
#else
  mine[0] = 0.0f;
#endif
}
