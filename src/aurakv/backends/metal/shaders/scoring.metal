// Which keys a query sees, what becomes of a score, and which blocks of 32 keys a call reads. N_WINDOW is −1 without
// one.

#define BLOCK 32

static inline bool visible(int query, int key, constant int* numbers) {
  bool seen = !N_CAUSAL || key <= query;
  if (N_WINDOW >= 0) seen = seen && (key > query - N_WINDOW || key < N_SINKS);
  bool uncompressed = key < N_FIRST || (N_RECENT > 0 && key > query - N_RECENT);
  return seen && uncompressed == (N_ONLY_UNCOMPRESSED != 0);
}

// A score that is not finite is NaN before the soft cap, which would hide it: infinite keys damage, they are no mask.
static inline float capped(float score, constant float* factors) {
  if (!is_finite(score)) return not_a_number();
  float cap = factors[0];
  return cap > 0.0f ? cap * precise::tanh(score / cap) : score;
}

// Blocks that hold every key that queries at lowest … highest see, of keys low … length − 1: x in front, then those
// from y on to before z. What lies outside is never read.
static inline int3 blocks_of(int lowest, int highest, int low, int length, constant int* numbers) {
  int stop = N_CAUSAL ? min(length, highest + 1) : length, front = 0, start = 0;
  if (N_WINDOW >= 0) {
    front = N_SINKS;
    start = lowest - N_WINDOW + 1;
  }
  if (N_ONLY_UNCOMPRESSED) {
    front = N_FIRST;
    if (N_SINKS > 0) start = 0;  // a recent key that is a sink is seen behind the window, too
    start = N_RECENT > 0 ? max(start, lowest - N_RECENT + 1) : stop;
  } else {
    if (N_RECENT > 0) stop = min(stop, highest - N_RECENT + 1);
    start = max(start, N_FIRST);
  }
  stop = max(stop, 0);
  front = (clamp(front, 0, stop) + BLOCK - 1) / BLOCK;
  int end = (stop + BLOCK - 1) / BLOCK, begin = max(max(start, low), 0) / BLOCK;
  return int3(front, clamp(begin, front, end), end);
}

// How many blocks that is, and the first key of the n-th.
static inline int count_of(int3 blocks) { return blocks.x + blocks.z - blocks.y; }
static inline int key_of(int3 blocks, int n) { return BLOCK * (n < blocks.x ? n : blocks.y + n - blocks.x); }

// With a threshold a split looks at the first and the last block before its own, begin … last − 1: that is where heavy
// keys tend to be. Their weights tell it what cannot count.
static inline int first_block(int begin, int last, constant int* numbers) {
  return begin < last && N_SKIPS ? begin - 2 : begin;
}
static inline int block_at(int n, int begin, int3 blocks) {
  return n >= begin ? n : n == begin - 2 ? 0 : count_of(blocks) - 1;
}

// log Σ exp of scores whose maximum is `top` and whose weights beside it add up to `sum`; LOWEST of none.
static inline float log_of_sum(float top, float sum) { return sum > 0.0f ? top + precise::log(sum) : LOWEST; }

#if DENSE
// Ragged tensors [tokens, kv_heads, dim]: the "page" is the first row of the sequence.
static inline device const uchar* key_row(device const uchar* data, int, int row, uint kv_head, constant int* numbers) {
  return data + (ulong(row) * uint(N_KV_HEADS) + kv_head) * KEY_ROW;
}
static inline device const uchar* value_row(device const uchar* data, int, int row, uint kv_head,
                                            constant int* numbers) {
  return data + (ulong(row) * uint(N_KV_HEADS) + kv_head) * VALUE_ROW;
}
#else
static inline device const uchar* piece_of(device const uchar* data, int page, uint kv_head, constant int* numbers) {
  return data + (ulong(page) * uint(N_KV_HEADS) + kv_head) * uint(N_PIECE);
}
static inline device const uchar* key_row(device const uchar* data, int page, int row, uint kv_head,
                                          constant int* numbers) {
  return piece_of(data, page, kv_head, numbers) + N_KEY_CODES + ulong(row) * KEY_ROW;
}
static inline device const uchar* value_row(device const uchar* data, int page, int row, uint kv_head,
                                            constant int* numbers) {
  return piece_of(data, page, kv_head, numbers) + N_VALUE_CODES + ulong(row) * VALUE_ROW;
}
#endif

// The scales of a slot; 1 at 16 bits.
static inline float key_scale(device const uchar* data, int page, int row, uint kv_head, constant int* numbers) {
#if KEY_BITS == 16
  return 1.0f;
#else
  return read_number(piece_of(data, page, kv_head, numbers) + N_KEY_SCALES, ulong(row), KEY_DTYPE);
#endif
}
static inline float value_scale(device const uchar* data, int page, int row, uint kv_head, constant int* numbers) {
#if VALUE_BITS == 16
  return 1.0f;
#else
  return read_number(piece_of(data, page, kv_head, numbers) + N_VALUE_SCALES, ulong(row), VALUE_DTYPE);
#endif
}
