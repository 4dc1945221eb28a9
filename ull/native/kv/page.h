// The unit of the KV cache.
#pragma once

namespace ull {

inline constexpr int kPageTokens = 64;  // tokens per KV page

// Pages that hold `tokens` tokens.
[[nodiscard]] constexpr int pages_for(int tokens) noexcept { return (tokens + kPageTokens - 1) / kPageTokens; }

}  // namespace ull
