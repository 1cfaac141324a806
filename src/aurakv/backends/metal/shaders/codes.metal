// Stored vectors of one side: units of 16 channels, from memory to numbers. The launcher writes `key_` or `value_` for
// `side_` and puts the constants in front:
//   SIDE_BITS, SIDE_DIM, SIDE_ROW   bits of a code, channels, bytes of a row
//   SIDE_DTYPE                      of the scale; at 16 bits of the vector
//   SIDE_LEVELS                     how a code becomes its level: by shuffle, by arithmetic, from the table
//   SIDE_TABLE                      the levels in constant memory
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

// Below 8 bits two units are read at once where they come in pairs: 16 bytes at 4 bits. Words of the first, then of the
// second.
#define SIDE_TAKEN (SIDE_BITS < 8 && SIDE_UNITS % 2 == 0 ? 2 : 1)
static inline void side_fetch_taken(device const uchar* row, uint unit, thread uint* words) {
#if SIDE_BITS < 8 && (SIDE_DIM + 15) / 16 % 2 == 0
  device const uint* from = (device const uint*)row + unit / 2 * SIDE_BITS;
  uint pair[SIDE_BITS + 1];
  pair[SIDE_BITS] = 0;
#if SIDE_BITS == 4
  uint4 four = *(device const uint4*)from;
  UNROLL for (uint i = 0; i < 4; ++i) pair[i] = four[i];
#elif SIDE_BITS == 2
  uint2 two = *(device const uint2*)from;
  pair[0] = two.x;
  pair[1] = two.y;
#elif SIDE_BITS == 5
  uint4 four = uint4(*(device const packed_uint4*)from);
  UNROLL for (uint i = 0; i < 4; ++i) pair[i] = four[i];
  pair[4] = from[4];
#else
  UNROLL for (uint j = 0; j < SIDE_BITS / 3; ++j) {
    uint3 three = uint3(((device const packed_uint3*)from)[j]);
    UNROLL for (uint i = 0; i < 3; ++i) pair[3 * j + i] = three[i];
  }
#endif
  UNROLL for (uint i = 0; i < SIDE_WORDS; ++i) {
    uint high = pair[i + SIDE_BITS / 2];
    words[i] = pair[i];
    words[SIDE_WORDS + i] = SIDE_BITS % 2 == 0 ? high : high >> 16 | pair[i + SIDE_BITS / 2 + SIDE_BITS % 2] << 16;
  }
#else
  side_fetch(row, unit, words);
#endif
}

// The units of SIDE_TAKEN rows for neighbouring lanes, which own neighbouring units: each lane reads these units of one
// row, if it is there, and they exchange what is not theirs. Every lane must be here.
static inline void side_fetch_rows(device const uchar* row, bool there, uint unit, uint lane, thread uint* words) {
  UNROLL for (uint i = 0; i < SIDE_TAKEN * SIDE_WORDS; ++i) words[i] = 0;
  if (there) side_fetch_taken(row, unit, words);
#if SIDE_BITS < 8 && (SIDE_DIM + 15) / 16 % 2 == 0
  bool odd = (lane & 1u) != 0;
  UNROLL for (uint i = 0; i < SIDE_WORDS; ++i) {
    uint other = simd_shuffle_xor(odd ? words[i] : words[SIDE_WORDS + i], 1);
    if (odd) words[i] = other;
    else words[SIDE_WORDS + i] = other;
  }
#endif
}

#if SIDE_BITS == 16
static inline float side_number(thread const uint* words, uint i, float mine) {
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

static inline float side_level(uint code, float mine) {
#if SIDE_LEVELS == BY_SHUFFLE  // every lane must be here
  return simd_shuffle(mine, ushort(code));
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
#else
  return SIDE_TABLE[code];
#endif
}

static inline float side_number(thread const uint* words, uint i, float mine) { return side_level(side_code(words, i),
                                mine); }
#endif

// What a lane keeps of the levels for shuffles.
static inline float side_own_level(uint lane) {
#if SIDE_BITS != 16 && SIDE_LEVELS == BY_SHUFFLE
  return SIDE_TABLE[lane & ((1u << SIDE_BITS) - 1u)];
#else
  return 0.0f;
#endif
}
