// A request's sampling parameters, validated by the control plane. The one rule (DESIGN.md): the token at position p
// is argmax(adjusted_logits + G), G = Gumbel noise keyed by (seed, p, token id); at temperature 0, G = 0.
// Order: bias, temperature, top-k, top-p (of what top-k left), min-p; a smaller token id wins a tie.
#pragma once

#include <cstdint>

namespace ull {

inline constexpr int kMaxLogitBias = 1024;

struct LogitBias {
  int32_t token;
  float bias;  // added to the raw logit; -inf bans the token
};

struct Sampling {
  float temperature = 0.0F;  // 0: greedy
  int32_t top_k = 0;         // 0: off
  float top_p = 1.0F;        // (0, 1]; 1: off
  float min_p = 0.0F;        // [0, 1]; 0: off
  uint64_t seed = 0;
  int32_t top_logprobs = -1;  // -1: no logprobs; 0: the chosen token's; n: and n alternatives
  int32_t bias_count = 0;
  const LogitBias* bias = nullptr;  // [bias_count]
};

}  // namespace ull
