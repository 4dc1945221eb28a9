// The unit of the KV cache.
#pragma once

#include <climits>

namespace ull {

inline constexpr int kPageTokens = 64;  // tokens per KV page

// Pages that hold `tokens` tokens.
// Tokens that so many pages hold, as far as an int does.
[[nodiscard]] constexpr int tokens_in(int pages) noexcept {
  return pages > INT_MAX / kPageTokens ? INT_MAX : pages * kPageTokens;
}
[[nodiscard]] constexpr int pages_for(int tokens) noexcept { return (tokens + kPageTokens - 1) / kPageTokens; }

}  // namespace ull
