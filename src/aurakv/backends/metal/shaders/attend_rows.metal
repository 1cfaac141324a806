// Attention of one query token per sequence, with GROUP ≤ 4 query heads per KV head. One simdgroup per (split, KV head,
// sequence); it reads blocks of 32 tokens and needs no threadgroup memory.
//
// A row of codes belongs to KEY_LANES (VALUE_LANES) neighbouring lanes, each with one unit of 16 channels, so a
// simdgroup takes 32 / KEY_LANES rows that lie side by side. Where a unit is less than 16 bytes neighbours read two units
// of two rows and exchange halves. Each lane keeps its channels of all GROUP queries, and sums of values, in registers: a
// code is turned into its level once for the whole group. Scores end up one token a lane, where scales, masks and
// exponentials cost a 32nd.
//
// With a threshold (N_SKIPS) values are read only of tokens that some query head may give a weight that counts.
//
// queries [kv_heads, rows, padded dim] and bias from `turn_queries`; sums [splits, kv_heads, rows, padded dim] and
// statistics [splits, kv_heads, rows, 2] (maximum, sum of weights) for `merge`.
#define KEY_STEP (32 / KEY_LANES)
#define VALUE_STEP (32 / VALUE_LANES)
#define KEY_HELD ((KEY_UNITS + KEY_LANES - 1) / KEY_LANES)
#define VALUE_HELD ((VALUE_UNITS + VALUE_LANES - 1) / VALUE_LANES)

[[max_total_threads_per_threadgroup(128)]]
kernel void attend_rows(device const float* queries, device const float* bias, device const uchar* keys,
                        device const uchar* values, device const int* table, device const int* lengths,
                        device const int* starts, device const int* ends, device float* sums, device float* statistics,
                        constant int* numbers, constant float* factors, uint3 position [[thread_position_in_grid]],
                        uint lane [[thread_index_in_simdgroup]]) {
  int split = int(position.x) / 32, seq = int(position.z), token = starts[seq];
  uint kv_head = position.y;
  if (token < 0 || token >= N_TOKENS || starts[seq + 1] != token + 1) return;  // the whole simdgroup
  int query = ends[seq] - 1, length = lengths[seq];
  int3 blocks = blocks_of(query, query, 0, length, numbers);
  int share = (count_of(blocks) + N_SPLITS - 1) / N_SPLITS, begin = split * share;
  int last = min(count_of(blocks), begin + share);
  ulong row = ulong(kv_head) * uint(N_ROWS) + uint(token) * GROUP;

  float own[GROUP][KEY_HELD * 16], sum[GROUP][VALUE_HELD * 16], highest[GROUP], total[GROUP], offset[GROUP];
  float known[GROUP];  // the logarithm of the sum of all weights is at least this
  UNROLL for (uint h = 0; h < GROUP; ++h) {
    UNROLL for (uint u = 0; u < KEY_HELD; ++u)
      UNROLL for (uint i = 0; i < 16; ++i) {
        uint unit = lane % KEY_LANES + u * KEY_LANES;
        own[h][u * 16 + i] = unit < KEY_UNITS ? queries[(row + h) * KEY_PADDED + unit * 16 + i] : 0.0f;
      }
    UNROLL for (uint i = 0; i < VALUE_HELD * 16; ++i) sum[h][i] = 0.0f;
    highest[h] = known[h] = LOWEST;
    total[h] = 0.0f;
    offset[h] = bias[row + h];
  }
  float key_level = key_own_level(lane), value_level = value_own_level(lane);

  for (int n = first_block(begin, last, numbers); n < last; ++n) {
    int key = key_of(blocks, block_at(n, begin, blocks)) + int(lane), page = -1, slot = key % N_PAGE_SIZE;
    if (key < length && visible(query, key, numbers)) page = page_of(key, seq, table, numbers);

    float score[GROUP];
    UNROLL for (uint h = 0; h < GROUP; ++h) score[h] = 0.0f;
    for (uint step = 0; step < KEY_LANES; step += KEY_TAKEN) {
      ushort which = ushort((step + lane % KEY_TAKEN) * KEY_STEP + lane / KEY_LANES);
      int its_page = simd_shuffle(page, which), its_slot = simd_shuffle(slot, which);
      device const uchar* from = keys;
      if (its_page >= 0) from = key_row(keys, its_page, its_slot, kv_head, numbers);
      float part[KEY_TAKEN][GROUP];
      UNROLL for (uint t = 0; t < KEY_TAKEN; ++t)
        UNROLL for (uint h = 0; h < GROUP; ++h) part[t][h] = 0.0f;
      UNROLL for (uint u = 0; u < KEY_HELD; ++u) {
        uint unit = lane % KEY_LANES + u * KEY_LANES, words[KEY_TAKEN * KEY_WORDS];
        key_fetch_rows(from, its_page >= 0 && unit < KEY_UNITS, unit, lane, words);
        UNROLL for (uint t = 0; t < KEY_TAKEN; ++t)
          UNROLL for (uint i = 0; i < 16; ++i) {
            float level = key_number(words + t * KEY_WORDS, i, key_level);
            UNROLL for (uint h = 0; h < GROUP; ++h) part[t][h] = fma(own[h][u * 16 + i], level, part[t][h]);
          }
      }
      UNROLL for (uint t = 0; t < KEY_TAKEN; ++t)
        UNROLL for (uint h = 0; h < GROUP; ++h) {
          for (uint distance = 1; distance < KEY_LANES; distance *= 2)
            part[t][h] += simd_shuffle_xor(part[t][h], ushort(distance));
          float its_score = simd_shuffle(part[t][h], ushort(lane % KEY_STEP * KEY_LANES));
          if (lane / KEY_STEP == step + t) score[h] = its_score;
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
        UNROLL for (uint i = 0; i < VALUE_HELD * 16; ++i) sum[h][i] *= keep;
      if (N_SKIPS) {
        float least = max(known[h], log_of_sum(top, simd_sum(total[h]))) + factors[1];
        needed = needed || (page >= 0 && !(s < least));
      }
    }
    if (N_SKIPS && !simd_any(needed)) continue;
    if (!needed) UNROLL for (uint h = 0; h < GROUP; ++h) weight[h] = 0.0f;

    for (uint step = 0; step < VALUE_LANES; step += VALUE_TAKEN) {
      ushort which = ushort((step + lane % VALUE_TAKEN) * VALUE_STEP + lane / VALUE_LANES);
      int its_page = simd_shuffle(needed ? page : -1, which), its_slot = simd_shuffle(slot, which);
      device const uchar* from = values;
      if (its_page >= 0) from = value_row(values, its_page, its_slot, kv_head, numbers);
      float its_weight[VALUE_TAKEN][GROUP];
      UNROLL for (uint t = 0; t < VALUE_TAKEN; ++t)
        UNROLL for (uint h = 0; h < GROUP; ++h)
          its_weight[t][h] = simd_shuffle(weight[h], ushort((step + t) * VALUE_STEP + lane / VALUE_LANES));
      UNROLL for (uint u = 0; u < VALUE_HELD; ++u) {
        uint unit = lane % VALUE_LANES + u * VALUE_LANES, words[VALUE_TAKEN * VALUE_WORDS];
        value_fetch_rows(from, its_page >= 0 && unit < VALUE_UNITS, unit, lane, words);
        UNROLL for (uint t = 0; t < VALUE_TAKEN; ++t)
          UNROLL for (uint i = 0; i < 16; ++i) {
            float level = value_number(words + t * VALUE_WORDS, i, value_level);
            UNROLL for (uint h = 0; h < GROUP; ++h)
              sum[h][u * 16 + i] = fma(its_weight[t][h], level, sum[h][u * 16 + i]);
          }
      }
    }
  }

  ulong to = ulong(split) * uint(N_KV_HEADS) * uint(N_ROWS) + row;
  UNROLL for (uint h = 0; h < GROUP; ++h) {
    float whole = simd_sum(total[h]);
    if (lane == 0) {
      statistics[(to + h) * 2] = highest[h];
      statistics[(to + h) * 2 + 1] = whole;
    }
    UNROLL for (uint u = 0; u < VALUE_HELD; ++u)
      UNROLL for (uint i = 0; i < 16; ++i) {
        float x = sum[h][u * 16 + i];
        for (uint distance = VALUE_LANES; distance < 32; distance *= 2) x += simd_shuffle_xor(x, ushort(distance));
        uint unit = lane + u * VALUE_LANES;
        if (lane < VALUE_LANES && unit < VALUE_UNITS) sums[(to + h) * VALUE_PADDED + unit * 16 + i] = x;
      }
  }
}
