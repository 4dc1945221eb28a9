// How the activations of T tokens are packed for the kernels: panels of equal width, [panel][k][width]. The columns
// that fill up the last panel hold stale values, whose products nobody reads.
#pragma once

#include <cstddef>

#include "cpu/kernels/kernels.h"

namespace ull::cpu {

struct Panels {
  int tokens;
  int count;  // panels
  int width;  // tokens per panel, at most kMaxPanel

  [[nodiscard]] static constexpr Panels of(int tokens) noexcept {
    const int count = (tokens + kMaxPanel - 1) / kMaxPanel;
    return {tokens, count, (tokens + count - 1) / count};
  }
  // Most columns that up to `tokens` tokens need.
  [[nodiscard]] static constexpr int most_columns(int tokens) noexcept {
    return tokens + tokens / kMaxPanel + kMaxPanel;
  }

  [[nodiscard]] constexpr int columns() const noexcept { return count * width; }
  // Of (token, k = 0) among packed activations of `depth` values per token; consecutive k are `width` apart.
  [[nodiscard]] constexpr size_t offset(int token, int depth) const noexcept {
    return static_cast<size_t>(token / width) * static_cast<size_t>(depth) * static_cast<size_t>(width) +
           static_cast<size_t>(token % width);
  }
};

}  // namespace ull::cpu
