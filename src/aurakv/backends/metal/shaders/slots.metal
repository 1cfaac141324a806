// Where tokens lie: the slot rule of format.md, section 2.2. Whatever a table holds, nothing outside the pages is
// named.

// The page of a position, or −1.
static inline int page_of(int position, int seq, device const int* table, constant int* numbers) {
  int page = position / N_PAGE_SIZE, pinned = N_PINNED, turn = max(1, N_WIDTH - pinned);
  if (page >= pinned) page = pinned + (page - pinned) % turn;
  if (position < 0 || page >= N_WIDTH) return -1;
  int found = table[seq * N_WIDTH + page];
  return found < N_PAGES ? found : -1;
}

// The sequence that owns a row, or −1.
static inline int sequence_of(int row, device const int* starts, constant int* numbers) {
  int low = 0, high = N_SEQS;  // starts[low] ≤ row < starts[high], if they rise
  while (high - low > 1) {
    int middle = (low + high) / 2;
    if (starts[middle] <= row) low = middle;
    else high = middle;
  }
  return N_SEQS > 0 && starts[low] <= row && row < starts[low + 1] ? low : -1;
}

// Page and row of a new token, from what `claim` found; page −1 where it is not written.
static inline int2 new_slot(int token, device const int* starts, device const int* base, device const int* table,
                            constant int* numbers) {
  int seq = sequence_of(token, starts, numbers);
  if (seq < 0 || base[seq] < 0) return int2(-1, 0);
  int position = base[seq] + token - starts[seq], after = base[seq] + min(starts[seq + 1], N_TOKENS) - starts[seq];
  int kept = after - (N_WIDTH - N_PINNED) * N_PAGE_SIZE;
  if (N_RING && position >= N_PINNED * N_PAGE_SIZE && position < kept) return int2(-1, 0);
  return int2(page_of(position, seq, table, numbers), position % N_PAGE_SIZE);
}
