// The sampler where two rules meet: who wins a tie, and what comes before what.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "base/gumbel.h"
#include "check.h"
#include "cpu/kernels/kernels.h"
#include "cpu/sampler.h"

using namespace ull;
using namespace ull::cpu;

namespace {

constexpr int kVocabulary = 100;
constexpr int kPosition = 9;

int32_t drawn(const std::vector<float>& logits, const Sampling& sampling, const TokenCounts* counts = nullptr) {
  Sampler sampler(select_kernels("auto"), kVocabulary);
  std::vector<float> scratch = logits;
  RoundToken token{};
  CHECK(sampler.sample(scratch.data(), kPosition, sampling, token, counts) == Status::kOk);
  CHECK(scratch == logits);
  return token.token;
}

std::vector<int32_t> ranked(const std::vector<float>& logits, const Sampling& sampling, int count,
                            const TokenCounts* counts = nullptr) {
  Sampler sampler(select_kernels("auto"), kVocabulary);
  std::vector<float> scratch = logits;
  std::vector<int32_t> tokens(static_cast<size_t>(count));
  CHECK_EQ(sampler.rank(scratch.data(), kPosition, sampling, count, tokens.data(), counts), count);
  CHECK(scratch == logits);
  return tokens;
}

// The logit that, with the noise of a token, adds up to exactly `score`; NaN if no float does.
float logit_for(float score, float noise) {
  float logit = score - noise;
  for (int steps = 0; steps < 8 && logit + noise != score; ++steps) {
    logit = std::nextafter(logit, logit + noise < score ? 1e9F : -1e9F);
  }
  return logit + noise == score ? logit : std::numeric_limits<float>::quiet_NaN();
}

}  // namespace

TEST(the_smaller_id_wins_a_tie_of_logits) {
  std::vector<float> logits(kVocabulary, -1.0F);
  for (const int32_t token : {70, 20, 90}) logits[static_cast<size_t>(token)] = 3.0F;
  CHECK_EQ(drawn(logits, {}), 20);
  CHECK((ranked(logits, {}, 4) == std::vector<int32_t>{20, 70, 90, 0}));
}

// With noise a tie is one of logit and noise together. Filtered draws choose among candidates in no order of their ids.
TEST(the_smaller_id_wins_a_tie_of_scores) {
  int ties = 0;
  for (uint64_t seed = 0; seed < 400; ++seed) {
    const int32_t least = 10, greatest = 80, most_probable = 40;
    const auto noise = [&](int32_t token) { return gumbel(seed, kPosition, token); };
    // Both tokens lie below the most probable one, whose logit is 0, and above it with their noise.
    const float score = std::min(noise(least), noise(greatest)) - 0.5F;
    if (score < noise(most_probable) + 0.5F || score < 0.25F) continue;
    std::vector<float> logits(kVocabulary, -60.0F);
    logits[most_probable] = 0.0F;
    logits[least] = logit_for(score, noise(least));
    logits[greatest] = logit_for(score, noise(greatest));
    if (std::isnan(logits[least]) || std::isnan(logits[greatest])) continue;
    ++ties;
    Sampling sampling;
    sampling.temperature = 1.0F;
    sampling.seed = seed;
    for (const int filter : {0, 1, 2, 3}) {
      sampling.top_k = filter == 1 ? 3 : 0;
      sampling.top_p = filter == 2 ? 0.999999F : 1.0F;
      sampling.min_p = filter == 3 ? 1e-12F : 0.0F;
      CHECK_EQ(drawn(logits, sampling), least);
      CHECK((ranked(logits, sampling, 2) == std::vector<int32_t>{least, greatest}));
    }
  }
  CHECK(ties > 20);
}

TEST(alternatives_of_the_same_probability_are_in_the_order_of_their_ids) {
  std::vector<float> logits(kVocabulary, 0.5F);
  logits[60] = 2.0F;
  Sampler sampler(select_kernels("auto"), kVocabulary);
  Sampling sampling;
  sampling.top_logprobs = 5;
  RoundToken token{};
  REQUIRE(sampler.sample(logits.data(), kPosition, sampling, token) == Status::kOk);
  const std::vector<int32_t> expected{60, 0, 1, 2, 3};
  for (size_t i = 0; i < expected.size(); ++i) CHECK_EQ(token.top[i].token, expected[i]);
}

// A penalty works on the model's logit; the bias is added to what is left of it.
TEST(penalties_come_before_the_bias) {
  TokenCounts counts(kVocabulary, 64);
  const std::vector<int32_t> text{7, 7, 8};
  counts.follow(text.data(), 3, 1);  // 7 is in the prompt, and once behind it
  std::vector<float> logits(kVocabulary, -5.0F);
  logits[7] = 2.0F;
  logits[30] = 3.0F;
  const LogitBias bias{7, 3.0F};
  Sampling sampling;
  sampling.repetition_penalty = 2.0F;
  sampling.bias = &bias;
  sampling.bias_count = 1;
  CHECK_EQ(drawn(logits, sampling, &counts), 7);  // 2 / 2 + 3 = 4, not (2 + 3) / 2
  CHECK_EQ(ranked(logits, sampling, 2, &counts)[0], 7);
  CHECK(Sampler::adjusted(2.0F, 7, sampling, &counts) == 4.0F);
  // The sign that decides between division and multiplication is the model's, too.
  const LogitBias small{7, -1.0F};
  sampling.bias = &small;
  logits[7] = 0.5F;  // 0.25 - 1 = -0.75; the bias first would make it -0.5 * 2 = -1
  logits[30] = -0.8F;
  CHECK_EQ(drawn(logits, sampling, &counts), 7);
  CHECK(Sampler::adjusted(0.5F, 7, sampling, &counts) == -0.75F);
}
