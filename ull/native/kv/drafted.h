// What drafters have of a sequence in caches of their own.
#pragma once

#include <cstdint>

namespace ull {

// Positions of a sequence that a drafter has in a cache of its own: [from, through), but for `lacking` among them.
struct CachedRange {
  int32_t from = 0;
  int32_t through = 0;
  int32_t lacking = 0;

  void cut(int32_t tokens) noexcept {
    if (through > tokens) through = tokens > 0 ? tokens : 0;
    if (from >= through) begin_at(through);
  }
  // What it holds begins anew.
  void begin_at(int32_t position) noexcept {
    from = position;
    lacking = 0;
  }
};

// What drafters with a cache have of a sequence, in the same pages as the target. The executor reads and writes it; who
// keeps the sequence only cuts it.
struct Drafted {
  int32_t model = 0;  // the draft model: positions [0, model)
  CachedRange eagle;  // entry p knows the token at p + 1 too
  CachedRange dflash;

  // The sequence now ends behind its first `tokens` tokens.
  void cut(int32_t tokens) noexcept {
    if (model > tokens) model = tokens;
    eagle.cut(tokens - 1);
    dflash.cut(tokens);
  }
};

}  // namespace ull
