// The unit of the KV cache.
#pragma once

#include <climits>

namespace ull {

inline constexpr int kPageTokens = 64;  // tokens per KV page

// Tokens that so many pages hold, as far as an int does.
[[nodiscard]] constexpr int tokens_in(int pages) noexcept {
  return pages > INT_MAX / kPageTokens ? INT_MAX : pages * kPageTokens;
}
// Pages that hold `tokens` tokens.
[[nodiscard]] constexpr int pages_for(int tokens) noexcept { return (tokens + kPageTokens - 1) / kPageTokens; }

}  // namespace ull
