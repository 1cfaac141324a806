// Attention of one query token per sequence, with GROUP ≤ 4 query heads per KV head. One simdgroup per (split, KV head,
// sequence), TEAMS to a threadgroup; it reads blocks of 32 tokens.
//
// A row of codes belongs to KEY_LANES (VALUE_LANES) neighbouring lanes, each with parts of 16 or 8 channels, so a
// simdgroup takes 32 / KEY_LANES rows that lie side by side; rows.metal loads them. Each lane keeps its channels of all
// GROUP queries, and sums of values, in registers: a code is turned into its level once for the whole group.
//
// Scores end up one token a lane, where scales, masks and exponentials cost a 32nd. The lanes of a row sum KEY_LANES rows
// each. As soon as there are two they halve them by a shuffle: a lane keeps one, gives the other away and adds what it is
// given, then halves two of those, until it has one row, the token that it owns.
//
// With a threshold (N_SKIPS) values are read only of tokens that some query head may give a weight that counts.
//
// queries [kv_heads, rows, padded dim] and bias from `turn_queries`; sums [splits, kv_heads, rows, padded dim] and
// statistics [splits, kv_heads, rows, 2] (maximum, sum of weights) for `merge`.
// Of two sums the one that is this lane's, with what the lane at this distance has of it.
static inline float fold(float first, float second, uint lane, uint distance) {
  bool upper = (lane & distance) != 0;
  float other = simd_shuffle_xor(upper ? first : second, ushort(distance));
  return (upper ? second : first) + other;
}

[[max_total_threads_per_threadgroup(TEAMS * 32)]]
kernel void attend_rows(device const float* queries, device const float* bias, device const uchar* keys,
                        device const uchar* values, device const int* table, device const int* lengths,
                        device const int* starts, device const int* ends, device float* sums, device float* statistics,
                        constant int* numbers, constant float* factors, uint3 position [[thread_position_in_grid]],
                        uint team [[simdgroup_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup uint4 staged[TEAMS][STAGED];
  int split = int(position.x) / 32, seq = int(position.z), token = starts[seq];
  uint kv_head = position.y;
  if (token < 0 || token >= N_TOKENS || starts[seq + 1] != token + 1) return;  // the whole simdgroup
  int query = ends[seq] - 1, length = lengths[seq];
  int3 blocks = blocks_of(query, query, 0, length, numbers);
  int share = (count_of(blocks) + N_SPLITS - 1) / N_SPLITS, begin = split * share;
  int last = min(count_of(blocks), begin + share);
  ulong row = ulong(kv_head) * uint(N_ROWS) + uint(token) * GROUP;

  float own[GROUP][KEY_HELD * KEY_CHANNELS], sum[GROUP][VALUE_HELD * VALUE_CHANNELS], highest[GROUP], total[GROUP], offset[GROUP];
  float known[GROUP];  // the logarithm of the sum of all weights is at least this
  UNROLL for (uint h = 0; h < GROUP; ++h) {
    UNROLL for (uint u = 0; u < KEY_HELD; ++u)
      UNROLL for (uint i = 0; i < KEY_CHANNELS; ++i) {
        uint part = lane % KEY_LANES + u * KEY_LANES;
        ulong from = (row + h) * KEY_PADDED + part * KEY_CHANNELS + i;
        own[h][u * KEY_CHANNELS + i] = part < KEY_PARTS ? queries[from] : 0.0f;
      }
    UNROLL for (uint i = 0; i < VALUE_HELD * VALUE_CHANNELS; ++i) sum[h][i] = 0.0f;
    highest[h] = known[h] = LOWEST;
    total[h] = 0.0f;
    offset[h] = bias[row + h];
  }
  float key_levels[KEY_HOLDS], value_levels[VALUE_HOLDS];
  key_own_levels(lane, key_levels);
  value_own_levels(lane, value_levels);
  int owned = int(lane % KEY_LANES * KEY_STEP + lane / KEY_LANES);  // of 32 tokens; OWNER(owned) is the lane

  for (int n = first_block(begin, last, numbers); n < last; ++n) {
    int key = key_of(blocks, block_at(n, begin, blocks)) + owned, page = -1, slot = key % N_PAGE_SIZE;
    if (key < length && visible(query, key, numbers)) page = page_of(key, seq, table, numbers);
    uint place = page < 0 ? ABSENT : key_place(page, slot, kv_head, numbers);
    key_stage(keys, place, lane, staged[team]);

    float score[GROUP], waiting[5][GROUP];
    for (uint step = 0; step < KEY_LANES; step += KEY_AT_ONCE) {
      uint loaded = (step + key_turn(lane)) * KEY_STEP + lane / KEY_LANES, words[KEY_HELD][KEY_AT_ONCE * KEY_PART_WORDS];
      uint its_place = KEY_STAGED ? 0u : simd_shuffle(place, ushort(OWNER(loaded)));
      UNROLL for (uint u = 0; u < KEY_HELD; ++u)
        key_take(keys, its_place, loaded, lane % KEY_LANES + u * KEY_LANES, lane, staged[team], words[u]);
      UNROLL for (uint t = 0; t < KEY_AT_ONCE; ++t) {
        UNROLL for (uint h = 0; h < GROUP; ++h) score[h] = 0.0f;
        UNROLL for (uint u = 0; u < KEY_HELD; ++u)
          UNROLL for (uint i = 0; i < KEY_CHANNELS; ++i) {
            float level = key_number(words[u] + t * KEY_PART_WORDS, i, key_levels);
            UNROLL for (uint h = 0; h < GROUP; ++h)
              score[h] = fma(own[h][u * KEY_CHANNELS + i], level, score[h]);
          }
        // A row that is the second of two, or of two pairs and so on, joins the first, which waits; all of it after the
        // last one.
        UNROLL for (uint n = 0; n < 5; ++n) {
          uint d = 1u << n;
          bool due = d < KEY_LANES && ((step + t) & (d - 1)) == d - 1;  // the same in all lanes
          UNROLL for (uint h = 0; h < GROUP; ++h) {
            if (due && ((step + t) & d) != 0) score[h] = fold(waiting[n][h], score[h], lane, d);
            else if (due) waiting[n][h] = score[h];
          }
        }
      }
    }

    float key_factor = page < 0 ? 0.0f : key_scale(keys, page, slot, kv_head, numbers);
    UNROLL for (uint h = 0; h < GROUP; ++h)
      score[h] = page < 0 ? LOWEST : capped(fma(score[h], key_factor, offset[h]), factors);
    if (n < begin) {  // only to know of heavy keys elsewhere
      UNROLL for (uint h = 0; h < GROUP; ++h) {
        bool counts = page >= 0 && !is_nan(score[h]);
        float top = simd_max(counts ? score[h] : LOWEST), whole = simd_sum(counts ? exp(score[h] - top) : 0.0f);
        known[h] = max(known[h], log_of_sum(top, whole));
      }
      continue;
    }

    float value_factor = page < 0 ? 0.0f : value_scale(values, page, slot, kv_head, numbers);
    bool needed = page >= 0 && (!N_SKIPS || !is_finite(value_factor));
    float weight[GROUP];
    UNROLL for (uint h = 0; h < GROUP; ++h) {
      float s = score[h], top = max(highest[h], simd_max(is_nan(s) ? LOWEST : s)), keep = exp(highest[h] - top);
      float p = page < 0 ? 0.0f : exp(s - top);
      total[h] = total[h] * keep + p;
      weight[h] = page < 0 ? 0.0f : p * value_factor;
      highest[h] = top;
      if (keep != 1.0f)
        UNROLL for (uint i = 0; i < VALUE_HELD * VALUE_CHANNELS; ++i) sum[h][i] *= keep;
      if (N_SKIPS) {
        float least = max(known[h], log_of_sum(top, simd_sum(total[h]))) + factors[1];
        needed = needed || (page >= 0 && !(s < least));
      }
    }
    if (N_SKIPS && !simd_any(needed)) continue;
    if (!needed) UNROLL for (uint h = 0; h < GROUP; ++h) weight[h] = 0.0f;

    place = needed ? value_place(page, slot, kv_head, numbers) : ABSENT;
    value_stage(values, place, lane, staged[team]);
    for (uint step = 0; step < VALUE_LANES; step += VALUE_AT_ONCE) {
      uint loaded = (step + value_turn(lane)) * VALUE_STEP + lane / VALUE_LANES;
      uint its_place = VALUE_STAGED ? 0u : simd_shuffle(place, ushort(OWNER(loaded)));
      uint words[VALUE_HELD][VALUE_AT_ONCE * VALUE_PART_WORDS];
      UNROLL for (uint u = 0; u < VALUE_HELD; ++u)
        value_take(values, its_place, loaded, lane % VALUE_LANES + u * VALUE_LANES, lane, staged[team], words[u]);
      UNROLL for (uint t = 0; t < VALUE_AT_ONCE; ++t) {
        uint its = (step + t) * VALUE_STEP + lane / VALUE_LANES;
        float its_weight[GROUP];
        UNROLL for (uint h = 0; h < GROUP; ++h) its_weight[h] = simd_shuffle(weight[h], ushort(OWNER(its)));
        UNROLL for (uint u = 0; u < VALUE_HELD; ++u)
          UNROLL for (uint i = 0; i < VALUE_CHANNELS; ++i) {
            float level = value_number(words[u] + t * VALUE_PART_WORDS, i, value_levels);
            UNROLL for (uint h = 0; h < GROUP; ++h)
              sum[h][u * VALUE_CHANNELS + i] = fma(its_weight[h], level, sum[h][u * VALUE_CHANNELS + i]);
          }
      }
    }
  }

  // Sums of values over the rows side by side: lanes halve the channels that they hold, until one is left.
  ulong to = ulong(split) * uint(N_KV_HEADS) * uint(N_ROWS) + row;
  UNROLL for (uint h = 0; h < GROUP; ++h) {
    float whole = simd_sum(total[h]);
    if (lane == 0) {
      statistics[(to + h) * 2] = highest[h];
      statistics[(to + h) * 2 + 1] = whole;
    }
    UNROLL for (uint u = 0; u < VALUE_HELD; ++u) {
      uint first = 0, held = VALUE_CHANNELS, at = u * VALUE_CHANNELS, part = lane % VALUE_LANES + u * VALUE_LANES;
      bool writes = part < VALUE_PARTS;
      UNROLL for (uint n = 0; n < 5; ++n) {
        uint d = 16 >> n, left = VALUE_CHANNELS / 2 >> n;
        if (d < VALUE_LANES) continue;
        UNROLL for (uint i = 0; i < VALUE_CHANNELS / 2; ++i)
          if (i < left) sum[h][at + i] = fold(sum[h][at + i], sum[h][at + i + left], lane, d);
        if (left == 0) sum[h][at] += simd_shuffle_xor(sum[h][at], ushort(d));
        if ((lane & d) != 0) first += left;
        if ((lane & d) != 0 && left == 0) writes = false;  // two lanes have the same one
        held = max(left, 1u);
      }
      if (writes)
        UNROLL for (uint i = 0; i < VALUE_CHANNELS; ++i)
          if (i < held) sums[(to + h) * VALUE_PADDED + part * VALUE_CHANNELS + first + i] = sum[h][at + i];
    }
  }
}
