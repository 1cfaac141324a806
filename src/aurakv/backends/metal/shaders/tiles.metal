// Codes of a block of 32 keys for the threads of a threadgroup, which expand units of 16 channels, loaded 16 bytes a
// thread. The constants:
//   SIDE_CHUNK    channels that are expanded at a time
//   SIDE_PAIRED   two units are a piece of 16 bytes, and a thread takes both
//   SIDE_STAGED   other units go through threadgroup memory: of every SIDE_SPAN tokens, which have whole pieces together,
//                 SIDE_PART bytes at a time, if SIDE_WHOLE the rows, else the chunk
// Where none is set a thread loads a unit, 16 bytes at 8 and 16 bits, and as wide as it is aligned where pages do not hold
// whole spans.
#define SIDE_CHUNKS (SIDE_PADDED / SIDE_CHUNK)
#define SIDE_WIDTH (SIDE_PAIRED ? 32 : 16)  // channels that a thread takes at once

// `read` has a bit for each key whose codes are wanted. Codes of others are 0 or, beside wanted ones, anything.
#if SIDE_STAGED
static inline void side_stage(device const uchar* data, threadgroup const int* pages, threadgroup const int* slots,
                              uint read, uint chunk, uint kv_head, constant int* numbers, uint index,
                              threadgroup uint4* staged) {
  uint pieces = SIDE_PART / 16, from = SIDE_WHOLE ? 0 : chunk * (SIDE_CHUNK * SIDE_BITS / 128);
  for (uint i = index; i < BLOCK / SIDE_SPAN * pieces; i += SIMDS * 32) {
    uint key = i / pieces * SIDE_SPAN;
    uint4 four = uint4(0u);
    if (pages[key] >= 0 && ((read >> key) & ((1u << SIDE_SPAN) - 1u)) != 0)
      four = ((device const uint4*)side_row(data, pages[key], slots[key], kv_head, numbers))[from + i % pieces];
    staged[i] = four;
  }
}
#endif

static inline void side_take(device const uchar* data, int page, int slot, uint key, uint chunk, uint channel, bool there,
                             uint kv_head, constant int* numbers, threadgroup const uint4* staged, thread uint* words) {
  uint unit = (chunk * SIDE_CHUNK + channel) / 16;
  UNROLL for (uint i = 0; i < SIDE_WIDTH / 16 * SIDE_WORDS; ++i) words[i] = 0;
#if SIDE_STAGED
  if (there)
    side_unstage(staged, key * (SIDE_PART / SIDE_SPAN) + (SIDE_WHOLE ? unit : channel / 16) * (2 * SIDE_BITS), 16, words);
#elif SIDE_PAIRED
  if (there) {
    uint4 four = ((device const uint4*)side_row(data, page, slot, kv_head, numbers))[unit / 2];
    UNROLL for (uint i = 0; i < 4; ++i) words[i] = four[i];
  }
#else
  if (there) side_fetch(side_row(data, page, slot, kv_head, numbers), unit, words);
#endif
}
