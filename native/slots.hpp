// The slot rule: where the tokens of a sequence lie in its page table.
#pragma once
#include "aura.h"

namespace {

// The table entry of page number `page` of a sequence: pinned entries stay, the others of a ring are taken in turn.
inline int64_t table_entry(const aura::Pages& p, int64_t page) {
  if (page < p.width || page < p.pinned) return page;  // spares a division where nothing wraps
  return p.pinned + (page - p.pinned) % (p.width > p.pinned ? p.width - p.pinned : 1);
}

}  // namespace
