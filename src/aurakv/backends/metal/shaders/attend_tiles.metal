// Attention of many query rows: several tokens of a sequence, or more than 4 query heads per KV head. A row is token ·
// group + head in the group. One threadgroup of SIMDS simdgroups per (split, KV head, tile of 8·SIMDS rows of one
// sequence). Per block of 32 keys it expands codes once, into `tile` (a chunk of the channels at a time), and each
// simdgroup multiplies its 8 rows with them as 8×8 matrices, in float32.
//
// The sums stay in matrices. When a maximum rises they are multiplied by a diagonal matrix from the left, so nothing
// that is not finite may enter them: 0 · NaN would reach other rows. A row that sees damage is marked, and NaN when it
// is written. With a threshold (N_SKIPS) values are read only of keys that some row may give a weight that counts.
#define CHUNK (KEY_CHUNK > VALUE_CHUNK ? KEY_CHUNK : VALUE_CHUNK)
#define STRIDE (CHUNK + 4)
#define THREADS (SIMDS * 32)

[[max_total_threads_per_threadgroup(THREADS)]]
kernel void attend_tiles(device const float* queries, device const float* bias, device const uchar* keys,
                         device const uchar* values, device const int* table, device const int* lengths,
                         device const int* starts, device const int* ends, device float* sums, device float* statistics,
                         constant int* numbers, constant float* factors, uint3 place [[threadgroup_position_in_grid]],
                         uint index [[thread_index_in_threadgroup]], uint team [[simdgroup_index_in_threadgroup]],
                         uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float tile[BLOCK * STRIDE];
  threadgroup uint4 staged[STAGED];
  threadgroup float scores[SIMDS][8 * BLOCK];
  threadgroup float diagonal[SIMDS][64];
  threadgroup float key_factors[BLOCK];
  threadgroup float value_factors[BLOCK];
  threadgroup int pages[BLOCK];
  threadgroup int slots[BLOCK];
  threadgroup atomic_int bad[BLOCK];
  threadgroup atomic_uint wanted[1];

  int split = int(place.x), seq = 0, ahead = int(place.z), start = 0, tokens = 0, group = N_GROUP;
  uint kv_head = place.y;
  for (; seq < N_SEQS; ++seq) {  // which sequence this tile belongs to
    start = clamp(starts[seq], 0, N_TOKENS);
    tokens = clamp(starts[seq + 1], start, N_TOKENS) - start;
    int tiles = (tokens * group + 8 * SIMDS - 1) / (8 * SIMDS);
    if (ahead < tiles) break;
    ahead -= tiles;
  }
  if (seq == N_SEQS) return;  // the whole threadgroup
  int first_row = ahead * 8 * SIMDS, rows = tokens * group, before = ends[seq] - tokens;
  int lowest = before + first_row / group, highest_query = before + (min(rows, first_row + 8 * SIMDS) - 1) / group;
#if DENSE
  int length = ends[seq], low = length - (lengths[seq + 1] - lengths[seq]);
#else
  int length = lengths[seq], low = 0;
#endif
  int3 blocks = blocks_of(lowest, highest_query, low, length, numbers);
  int share = (count_of(blocks) + N_SPLITS - 1) / N_SPLITS, begin = split * share;
  int last = min(count_of(blocks), begin + share);

  int own_first = first_row + int(team) * 8, own = own_first + int(lane) / 4;  // of the simdgroup, of the lane
  bool active = own < rows;
  int query = before + own / group;
  ulong base = ulong(kv_head) * uint(N_ROWS) + uint(start * group);
  float offset = active ? bias[base + uint(own)] : 0.0f, highest = LOWEST, total = 0.0f;
  float known = LOWEST;  // the logarithm of the sum of all weights is at least this
  bool damaged = false;
  float key_levels[KEY_HOLDS], value_levels[VALUE_HOLDS];
  key_own_levels(lane, key_levels);
  value_own_levels(lane, value_levels);
  simdgroup_float8x8 sum[VALUE_PADDED / 8];
  UNROLL for (uint c = 0; c < VALUE_PADDED / 8; ++c) sum[c] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);

  for (int n = first_block(begin, last, numbers); n < last; ++n) {
    int first_key = key_of(blocks, block_at(n, begin, blocks));
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (index == 0) atomic_store_explicit(&wanted[0], 0u, memory_order_relaxed);
    if (index < BLOCK) {
      int key = first_key + int(index), page = -1, slot = 0;
#if DENSE
      if (key >= low && key < length) {
        slot = lengths[seq] + key - low;
        page = slot >= 0 && slot < N_PAGES ? 0 : -1;
      }
#else
      if (key < length) {
        page = page_of(key, seq, table, numbers);
        slot = key % N_PAGE_SIZE;
      }
#endif
      pages[index] = page;
      slots[index] = slot;
      key_factors[index] = page < 0 ? 0.0f : key_scale(keys, page, slot, kv_head, numbers);
      value_factors[index] = page < 0 || n < begin ? 0.0f : value_scale(values, page, slot, kv_head, numbers);
      atomic_store_explicit(&bad[index], 0, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    simdgroup_float8x8 product[BLOCK / 8];
    UNROLL for (uint k = 0; k < BLOCK / 8; ++k) product[k] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    for (uint chunk = 0; chunk < KEY_CHUNKS; ++chunk) {
#if KEY_STAGED
      if (chunk == 0 || !KEY_WHOLE) key_stage(keys, pages, slots, ~0u, chunk, kv_head, numbers, index, staged);
#endif
      if (chunk > 0 || KEY_STAGED) threadgroup_barrier(mem_flags::mem_threadgroup);
      for (uint from = 0; from < BLOCK * (KEY_CHUNK / KEY_WIDTH); from += THREADS) {
        uint u = from + index, key = u / (KEY_CHUNK / KEY_WIDTH), channel = u % (KEY_CHUNK / KEY_WIDTH) * KEY_WIDTH;
        uint words[KEY_WIDTH / 16 * KEY_WORDS];
        bool inside = u < BLOCK * (KEY_CHUNK / KEY_WIDTH);
        int page = inside ? pages[key] : -1, slot = inside ? slots[key] : 0;
        key_take(keys, page, slot, key, chunk, channel, page >= 0, kv_head, numbers, staged, words);
        UNROLL for (uint i = 0; i < KEY_WIDTH; ++i) {
          float level = key_number(words + i / 16 * KEY_WORDS, i % 16, key_levels);
          if (inside) tile[key * STRIDE + channel + i] = level;
        }
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      UNROLL for (uint d = 0; d < KEY_CHUNK / 8; ++d) {
        simdgroup_float8x8 a, b;
        simdgroup_load(a, queries + (base + uint(own_first)) * KEY_PADDED + chunk * KEY_CHUNK + d * 8, KEY_PADDED);
        UNROLL for (uint k = 0; k < BLOCK / 8; ++k) {
          simdgroup_load(b, tile + k * 8 * STRIDE + d * 8, STRIDE, ulong2(0, 0), true);
          simdgroup_multiply_accumulate(product[k], a, b, product[k]);
        }
      }
    }
    UNROLL for (uint k = 0; k < BLOCK / 8; ++k) simdgroup_store(product[k], scores[team] + k * 8, BLOCK);
    simdgroup_barrier(mem_flags::mem_threadgroup);

    // Softmax: four lanes a row, eight keys each.
    float score[BLOCK / 4], top = highest;
    uint seen = 0, mine = lane / 4 * BLOCK + lane % 4 * (BLOCK / 4);
    UNROLL for (uint i = 0; i < BLOCK / 4; ++i) {
      uint k = lane % 4 * (BLOCK / 4) + i;
      int key = first_key + int(k);
      bool see = active && pages[k] >= 0 && visible(query, key, numbers);
      score[i] = see ? capped(fma(scores[team][mine + i], key_factors[k], offset), factors) : LOWEST;
      seen |= see ? 1u << i : 0u;
      top = max(top, is_nan(score[i]) ? LOWEST : score[i]);
    }
    top = max(top, simd_shuffle_xor(top, 1));
    top = max(top, simd_shuffle_xor(top, 2));
    if (n < begin) {  // only to know of heavy keys elsewhere
      float whole = 0.0f;
      UNROLL for (uint i = 0; i < BLOCK / 4; ++i)
        whole += (seen >> i) & 1u && !is_nan(score[i]) ? exp(score[i] - top) : 0.0f;
      whole += simd_shuffle_xor(whole, 1);
      whole += simd_shuffle_xor(whole, 2);
      known = max(known, log_of_sum(top, whole));
      continue;
    }
    float keep = exp(highest - top);
    total *= keep;
    highest = top;
    UNROLL for (uint i = 0; i < BLOCK / 4; ++i) {
      float p = (seen >> i) & 1u ? exp(score[i] - top) : 0.0f;
      float weight = (seen >> i) & 1u ? p * value_factors[lane % 4 * (BLOCK / 4) + i] : 0.0f;
      total += p;
      damaged = damaged || !is_finite(weight);
      scores[team][mine + i] = is_finite(weight) ? weight : 0.0f;
    }
    bool rises = simd_any(keep != 1.0f);
    if (rises) {
      UNROLL for (uint i = 0; i < 2; ++i) diagonal[team][lane * 2 + i] = lane / 4 == lane % 4 * 2 + i ? keep : 0.0f;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    if (rises) {
      simdgroup_float8x8 d;
      simdgroup_load(d, diagonal[team], 8);
      UNROLL for (uint c = 0; c < VALUE_PADDED / 8; ++c) simdgroup_multiply(sum[c], d, sum[c]);
    }
    uint read = ~0u;  // which keys' values
    if (N_SKIPS) {
      float whole = total + simd_shuffle_xor(total, 1);
      whole += simd_shuffle_xor(whole, 2);
      float least = max(known, log_of_sum(highest, whole)) + factors[1];
      uint need = 0;
      UNROLL for (uint i = 0; i < BLOCK / 4; ++i) {
        uint k = lane % 4 * (BLOCK / 4) + i;
        bool counts = (seen >> i) & 1u && (!(score[i] < least) || !is_finite(value_factors[k]));
        need |= counts ? 1u << k : 0u;
      }
      need = simd_or(need);
      if (lane == 0) atomic_fetch_or_explicit(&wanted[0], need, memory_order_relaxed);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      read = atomic_load_explicit(&wanted[0], memory_order_relaxed);
      if (read == 0) continue;  // the whole threadgroup
    }
    UNROLL for (uint k = 0; k < BLOCK / 8; ++k) simdgroup_load(product[k], scores[team] + k * 8, BLOCK);

    UNROLL for (uint chunk = 0; chunk < VALUE_CHUNKS; ++chunk) {
#if VALUE_STAGED
      if (chunk == 0 || !VALUE_WHOLE) value_stage(values, pages, slots, read, chunk, kv_head, numbers, index, staged);
#endif
      threadgroup_barrier(mem_flags::mem_threadgroup);
      for (uint from = 0; from < BLOCK * (VALUE_CHUNK / VALUE_WIDTH); from += THREADS) {
        uint u = from + index, key = u / (VALUE_CHUNK / VALUE_WIDTH);
        uint channel = u % (VALUE_CHUNK / VALUE_WIDTH) * VALUE_WIDTH, words[VALUE_WIDTH / 16 * VALUE_WORDS];
        bool inside = u < BLOCK * (VALUE_CHUNK / VALUE_WIDTH), whole = true;
        int page = inside ? pages[key] : -1, slot = inside ? slots[key] : 0;
        bool there = page >= 0 && ((read >> key) & 1u) != 0;
        value_take(values, page, slot, key, chunk, channel, there, kv_head, numbers, staged, words);
        UNROLL for (uint i = 0; i < VALUE_WIDTH; ++i) {
          float level = value_number(words + i / 16 * VALUE_WORDS, i % 16, value_levels);
          bool good = VALUE_BITS != 16 || is_finite(level);  // levels are
          whole = whole && good;
          if (inside) tile[key * STRIDE + channel + i] = there && good ? level : 0.0f;
        }
        if (!whole) atomic_store_explicit(&bad[key], 1, memory_order_relaxed);
      }
      threadgroup_barrier(mem_flags::mem_threadgroup);
      UNROLL for (uint c = 0; c < VALUE_CHUNK / 8; ++c)
        UNROLL for (uint k = 0; k < BLOCK / 8; ++k) {
          simdgroup_float8x8 b;
          simdgroup_load(b, tile + k * 8 * STRIDE + c * 8, STRIDE);
          uint to = chunk * (VALUE_CHUNK / 8) + c;
          simdgroup_multiply_accumulate(sum[to], product[k], b, sum[to]);
        }
    }
    UNROLL for (uint i = 0; i < BLOCK / 4; ++i)
      if ((seen >> i) & 1u)
        damaged = damaged || atomic_load_explicit(&bad[lane % 4 * (BLOCK / 4) + i], memory_order_relaxed) != 0;
  }

  total += simd_shuffle_xor(total, 1);
  total += simd_shuffle_xor(total, 2);
  uint harm = damaged ? 1u : 0u;
  harm |= simd_shuffle_xor(harm, 1);
  harm |= simd_shuffle_xor(harm, 2);
  ulong to = ulong(split) * uint(N_KV_HEADS) * uint(N_ROWS) + base + uint(own);
  if (active && lane % 4 == 0) {
    statistics[to * 2] = highest;
    statistics[to * 2 + 1] = total;
  }
  UNROLL for (uint c = 0; c < VALUE_PADDED / 8; ++c) {
    simdgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_store(sum[c], scores[team], 8);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    UNROLL for (uint i = 0; i < 2; ++i) {
      float x = scores[team][lane * 2 + i];  // row lane / 4
      if (active) sums[to * VALUE_PADDED + c * 8 + lane % 4 * 2 + i] = harm ? not_a_number() : x;
    }
  }
}
