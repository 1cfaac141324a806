// New tokens of any format: room for them, and those that already are codes.

// One simdgroup for all sequences: base[seq] becomes the length before the append, or −1; lengths advance.
[[max_total_threads_per_threadgroup(32)]]
kernel void claim(device const int* starts, device const int* table, device int* lengths, device int* overflow,
                  device int* base, constant int* numbers, uint lane [[thread_index_in_simdgroup]]) {
  bool missing = false;
  for (int seq = int(lane); seq < N_SEQS; seq += 32) {
    int a = clamp(starts[seq], 0, N_TOKENS), n = clamp(starts[seq + 1], a, N_TOKENS) - a;
    int before = lengths[seq] - (N_COUNTED ? n : 0), after = before + n;
    int kept = N_RING ? after - (N_WIDTH - N_PINNED) * N_PAGE_SIZE : 0;  // what is below and not pinned is not written
    bool fits = before >= 0 && (N_RING || after <= N_WIDTH * N_PAGE_SIZE);
    for (int page = before / N_PAGE_SIZE; fits && n > 0 && page * N_PAGE_SIZE < after; ++page)
      if (page < N_PINNED || (page + 1) * N_PAGE_SIZE > kept)
        fits = page_of(page * N_PAGE_SIZE, seq, table, numbers) >= 0;
    base[seq] = fits ? before : -1;
    lengths[seq] = fits ? after : before;
    missing = missing || !fits;
  }
  missing = simd_any(missing);
  if (missing && lane == 0) overflow[0] = 1;
}

// Tokens that already are codes: rows and scales are copied.
[[max_total_threads_per_threadgroup(256)]]
kernel void copy_rows(device const uchar* data, device const uchar* scales, device const int* starts,
                      device const int* base,
                      device const int* table, device uchar* pages, constant int* numbers,
                      uint2 at [[thread_position_in_grid]]) {
  int vector = int(at.y), byte = int(at.x), token = vector / N_HEADS, head = vector % N_HEADS;
  int2 slot = new_slot(token, starts, base, table, numbers);
  if (slot.x < 0) return;
  device uchar* piece = pages + (ulong(slot.x) * uint(N_HEADS) + uint(head)) * uint(N_PIECE);
  if (byte < N_ROW) piece[N_CODES + slot.y * N_ROW + byte] = data[ulong(vector) * uint(N_ROW) + uint(byte)];
  else piece[N_SCALES + slot.y * N_SCALE + byte - N_ROW] = scales[ulong(vector) * uint(N_SCALE) + uint(byte - N_ROW)];
}
