// A request's sampling parameters, validated by the control plane. The one rule: the token at position p
// is argmax(adjusted_logits + G), G = Gumbel noise keyed by (seed, p, token id); at temperature 0, G = 0.
// Order: penalties (repetition, frequency, presence), bias, temperature, top-k, top-p (of what top-k left), min-p; a
// smaller token id wins a tie. Penalties depend on the text up to the token before: a draft's node has a text of its
// own.
#pragma once

#include <cstdint>

namespace ull {

inline constexpr int kMaxLogitBias = 1024;
inline constexpr float kLeastRepetitionPenalty = 0.01F;
inline constexpr float kMostRepetitionPenalty = 100.0F;
inline constexpr float kMostPenalty = 2.0F;  // of frequency and presence, either way

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
  float repetition_penalty = 1.0F;  // of tokens in prompt and completion: divides a logit above 0, multiplies others
  float frequency_penalty = 0.0F;   // subtracted for each time that the completion holds the token
  float presence_penalty = 0.0F;    // subtracted if the completion holds the token

  [[nodiscard]] bool penalises() const noexcept {
    return repetition_penalty != 1.0F || frequency_penalty != 0.0F || presence_penalty != 0.0F;
  }
  // The logit of a token that the text holds, `generated` times in the completion.
  [[nodiscard]] float penalised(float logit, int generated) const noexcept {
    logit = logit > 0.0F ? logit / repetition_penalty : logit * repetition_penalty;
    if (generated == 0) return logit;
    const float frequency = frequency_penalty * static_cast<float>(generated);
    logit -= frequency;
    return logit - presence_penalty;
  }
};

}  // namespace ull
