// Numbers in memory. A dtype is a constant of the source: 0 float32, 1 float16, 2 bfloat16. bfloat16 is read and
// written as 16 bits, so that no version of Metal is too old for it. Infinity and NaN are told by their bits: fast math
// may not.

#define UNROLL _Pragma("clang loop unroll(full)")  // arrays that are indexed by loops stay in registers
#define LOWEST (-3.0e38f)  // below every score, finite

static inline bool is_finite(float x) { return (as_type<uint>(x) & 0x7f800000u) != 0x7f800000u; }
static inline bool is_nan(float x) { return (as_type<uint>(x) & 0x7fffffffu) > 0x7f800000u; }
static inline float not_a_number() { return as_type<float>(0x7fc00000u); }
static inline float infinity() { return as_type<float>(0x7f800000u); }

static inline float read_number(device const uchar* from, ulong i, uint dtype) {
  if (dtype == 0) return ((device const float*)from)[i];
  if (dtype == 1) return float(((device const half*)from)[i]);
  return as_type<float>(uint(((device const ushort*)from)[i]) << 16);
}

static inline ushort bfloat_bits(float x) {  // to nearest, ties to even
  uint bits = as_type<uint>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return ushort((bits >> 16) | 64u);
  return ushort((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

static inline void write_number(device uchar* to, ulong i, uint dtype, float x) {
  if (dtype == 0) ((device float*)to)[i] = x;
  else if (dtype == 1) ((device half*)to)[i] = half(x);
  else ((device ushort*)to)[i] = bfloat_bits(x);
}
