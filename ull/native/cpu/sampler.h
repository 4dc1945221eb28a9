// The one rule of executor/sampling.h: penalties, bias, temperature, top-k, top-p, min-p, then argmax with Gumbel
// noise.
#pragma once

#include <cstdint>
#include <vector>

#include "base/aligned.h"
#include "base/status.h"
#include "cpu/kernels/kernels.h"
#include "executor/executor.h"
#include "executor/sampling.h"
#include "executor/token_counts.h"

namespace ull::cpu {

inline constexpr int kMaxRanks = 32;  // candidates that rank() finds at most

// What makes natural log-probabilities of logits: log-softmax.
struct LogNormaliser {
  float maximum = 0.0F;
  float log_total = 0.0F;  // log of the sum of exp(logit - maximum)
  [[nodiscard]] float logprob(float logit) const noexcept { return logit - maximum - log_total; }
};

class Sampler {
 public:
  // Allocates everything that sample() needs.
  Sampler(const Kernels& kernels, int vocabulary);

  // Draws the token at `position` from logits [vocabulary], which are changed on the way and restored. Fills
  // token.logprob, top_count and top if logprobs are wanted. kExecutorFailed if a logit is not finite, or a bias made
  // none of them so. counts: of the text before `position`, for penalties; null: none apply. mask: the tokens that may
  // be drawn, see TokenConstraint; null: all. Logprobs do not look at it.
  [[nodiscard]] Status sample(float* logits, int32_t position, const Sampling& sampling, RoundToken& token,
                              const TokenCounts* counts = nullptr, const uint32_t* mask = nullptr) noexcept;

  // The `count` likeliest draws at `position`, best first -> tokens [count]; returns how many there are. The first is
  // what sample() would draw from these logits; the others follow by score, those that the filters drop by logit behind
  // them. For drafts: 0 if a logit is not finite.
  [[nodiscard]] int rank(float* logits, int32_t position, const Sampling& sampling, int count, int32_t* tokens,
                         const TokenCounts* counts = nullptr) noexcept;

  // The model's own distribution over logits [vocabulary]: the bits of token.logprob as sample() reports them.
  // kExecutorFailed if a logit is not finite.
  [[nodiscard]] Status normalise(const float* logits, LogNormaliser& normaliser) noexcept;
  // The `count` likeliest tokens of these logits, at most the vocabulary -> top [count], likeliest first, of the same
  // the smaller id first. Returns how many there are.
  int list_likeliest(const float* logits, const LogNormaliser& normaliser, int count, TokenLogprob* top) const noexcept;

  // One logit with penalties and bias, as sample() and rank() see it.
  [[nodiscard]] static float adjusted(float logit, int32_t token, const Sampling& sampling,
                                      const TokenCounts* counts) noexcept;

 private:
  struct Candidate {
    float adjusted;  // (logit - maximum) / temperature, at most 0
    int32_t token;
  };

  [[nodiscard]] LogNormaliser normaliser(const float* logits, float maximum) noexcept;
  // Log-softmax of the raw logits: of `token.token` and of the `count` best.
  void report_logprobs(const float* logits, float maximum, int count, RoundToken& token) noexcept;
  // Applies the penalties to the logits, or takes them back.
  void penalise(float* logits, const Sampling& sampling, const TokenCounts* counts) noexcept;
  void restore_penalised(float* logits, const Sampling& sampling, const TokenCounts* counts) noexcept;
  // False if a biased token is outside the vocabulary.
  [[nodiscard]] bool valid_bias(const Sampling& sampling) const noexcept;
  // Adds the bias to the logits, or takes it back.
  void add_bias(float* logits, const Sampling& sampling) noexcept;
  void remove_bias(float* logits, const Sampling& sampling) noexcept;
  // The logits that the mask allows, and -inf for the others; valid until the next call.
  [[nodiscard]] const float* masked(const float* logits, const uint32_t* mask) noexcept;
  // The first `count` (at most kMaxRanks) indices of values [vocabulary] by value; -inf is never taken.
  [[nodiscard]] int take_best(float* values, int count, int32_t* tokens) noexcept;
  // scores_ = adjusted logit + noise, -inf for what the filters drop.
  void score(const float* logits, float maximum, int32_t position, const Sampling& sampling) noexcept;
  [[nodiscard]] bool filters(const Sampling& sampling) const noexcept;
  int draw(const float* logits, float maximum, int32_t position, const Sampling& sampling) noexcept;
  // Candidates that pass top-k and top-p, the best first if top-p is on.
  void select_candidates(const float* logits, float maximum, float inverse_temperature,
                         const Sampling& sampling) noexcept;
  // Appends every token whose rank bucket is at least `bucket`.
  void collect(const float* logits, float maximum, float inverse_temperature, int bucket) noexcept;
  void keep_best(int count) noexcept;
  void keep_nucleus(float top_p, double total) noexcept;

  const Kernels& kernels_;
  const int vocabulary_;
  std::vector<Candidate> candidates_;   // capacity: vocabulary
  AlignedArray<float> probabilities_;   // [vocabulary] exp(adjusted), unnormalised
  AlignedArray<float> scores_;          // [vocabulary] of rank()
  std::vector<int32_t> bucket_counts_;  // [kBuckets]
  std::vector<double> bucket_masses_;   // [kBuckets]
  std::vector<float> unpenalised_;      // [vocabulary] logits to restore
  std::vector<float> unbiased_;         // [kMaxLogitBias] logits to restore
  std::vector<float> banned_;           // [kMaxRanks] logits to restore
};

}  // namespace ull::cpu
