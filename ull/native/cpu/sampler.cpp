#include "cpu/sampler.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "base/float_math.h"
#include "base/gumbel.h"

namespace ull::cpu {
namespace {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
constexpr float kMostInverseTemperature = 1e30F;  // a temperature below 1e-30 is as good as greedy

// Buckets by the leading bits of `adjusted` (<= 0): sign dropped, 8 exponent and 4 mantissa bits, so bucket 0 holds
// the smallest values and a bucket is at most 1/16 wide relative to its values.
constexpr int kBucketBits = 12;
constexpr int kBuckets = 1 << kBucketBits;

int bucket_of(float adjusted) {
  const uint32_t magnitude = std::bit_cast<uint32_t>(adjusted) & 0x7FFFFFFFU;
  return kBuckets - 1 - static_cast<int>(magnitude >> (31 - kBucketBits));
}

// In lanes, which do not wait for one another; their order is the same on every machine.
double sum_of(const float* values, int count) {
  constexpr int kSums = 8;
  double sums[kSums] = {};
  int i = 0;
  for (; i + kSums <= count; i += kSums) {
    for (int lane = 0; lane < kSums; ++lane) sums[lane] += static_cast<double>(values[i + lane]);
  }
  for (; i < count; ++i) sums[0] += static_cast<double>(values[i]);
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

}  // namespace

Sampler::Sampler(const Kernels& kernels, int vocabulary)
    : kernels_(kernels),
      vocabulary_(vocabulary),
      probabilities_(static_cast<size_t>(vocabulary)),
      scores_(static_cast<size_t>(vocabulary)),
      bucket_counts_(kBuckets),
      bucket_masses_(kBuckets),
      unpenalised_(static_cast<size_t>(vocabulary)),
      unbiased_(kMaxLogitBias),
      banned_(kMaxRanks) {
  candidates_.reserve(static_cast<size_t>(vocabulary));
}

Status Sampler::sample(float* logits, int32_t position, const Sampling& sampling, RoundToken& token,
                       const TokenCounts* counts, const uint32_t* mask) noexcept {
  float raw_maximum = 0.0F;
  if (!kernels_.scan(logits, vocabulary_, &raw_maximum) || !valid_bias(sampling)) return Status::kExecutorFailed;

  penalise(logits, sampling, counts);
  add_bias(logits, sampling);
  const float* drawn = mask != nullptr ? masked(logits, mask) : logits;
  int chosen = kernels_.argmax(drawn, vocabulary_);
  if (sampling.temperature > 0.0F && chosen >= 0) chosen = draw(drawn, drawn[chosen], position, sampling);
  remove_bias(logits, sampling);
  restore_penalised(logits, sampling, counts);
  if (chosen < 0 || chosen >= vocabulary_) return Status::kExecutorFailed;  // every token is banned

  token.token = chosen;
  token.top_count = 0;
  token.logprob = 0.0F;
  if (sampling.top_logprobs >= 0) report_logprobs(logits, raw_maximum, sampling.top_logprobs, token);
  return Status::kOk;
}

int Sampler::rank(float* logits, int32_t position, const Sampling& sampling, int count, int32_t* tokens,
                  const TokenCounts* counts) noexcept {
  float maximum = 0.0F;
  if (!kernels_.scan(logits, vocabulary_, &maximum) || !valid_bias(sampling)) return 0;
  penalise(logits, sampling, counts);
  add_bias(logits, sampling);
  count = std::min({count, kMaxRanks, vocabulary_});
  int found = 0;
  if (const int best = kernels_.argmax(logits, vocabulary_); sampling.temperature > 0.0F && best >= 0) {
    score(logits, logits[best], position, sampling);
    found = take_best(scores_.data(), count, tokens);
  }
  // Greedy, or the filters left too few: by logit.
  for (int i = 0; i < found; ++i) {
    banned_[static_cast<size_t>(i)] = logits[tokens[i]];
    logits[tokens[i]] = kMinusInfinity;
  }
  const int rest = take_best(logits, count - found, tokens + found);
  for (int i = found - 1; i >= 0; --i) logits[tokens[i]] = banned_[static_cast<size_t>(i)];
  remove_bias(logits, sampling);
  restore_penalised(logits, sampling, counts);
  return found + rest;
}

float Sampler::adjusted(float logit, int32_t token, const Sampling& sampling, const TokenCounts* counts) noexcept {
  if (counts != nullptr && sampling.penalises() && counts->holds(token)) {
    logit = sampling.penalised(logit, counts->generated(token));
  }
  for (int i = 0; i < sampling.bias_count; ++i) {
    if (sampling.bias[i].token == token) logit += sampling.bias[i].bias;
  }
  return logit;
}

void Sampler::penalise(float* logits, const Sampling& sampling, const TokenCounts* counts) noexcept {
  if (counts == nullptr || !sampling.penalises()) return;
  size_t kept = 0;
  for (int i = 0; i < counts->size(); ++i) {
    const int32_t token = counts->token(i);
    if (token >= vocabulary_) continue;  // a draft model may know fewer
    unpenalised_[kept++] = logits[token];
    logits[token] = sampling.penalised(logits[token], counts->generated(token));
  }
}

void Sampler::restore_penalised(float* logits, const Sampling& sampling, const TokenCounts* counts) noexcept {
  if (counts == nullptr || !sampling.penalises()) return;
  size_t kept = 0;
  for (int i = 0; i < counts->size(); ++i) {
    if (counts->token(i) < vocabulary_) logits[counts->token(i)] = unpenalised_[kept++];
  }
}

const float* Sampler::masked(const float* logits, const uint32_t* mask) noexcept {
  for (int i = 0; i < vocabulary_; ++i) {
    scores_[static_cast<size_t>(i)] = (mask[i / 32] >> (i % 32) & 1U) != 0 ? logits[i] : kMinusInfinity;
  }
  return scores_.data();
}

int Sampler::take_best(float* values, int count, int32_t* tokens) noexcept {
  float taken[kMaxRanks];
  int found = 0;
  for (; found < count; ++found) {
    const int best = kernels_.argmax(values, vocabulary_);
    if (best < 0 || best >= vocabulary_ || values[best] == kMinusInfinity) break;
    tokens[found] = best;
    taken[found] = values[best];
    values[best] = kMinusInfinity;
  }
  for (int i = 0; i < found; ++i) values[tokens[i]] = taken[i];
  return found;
}

void Sampler::score(const float* logits, float maximum, int32_t position, const Sampling& sampling) noexcept {
  const float inverse_temperature = std::min(1.0F / sampling.temperature, kMostInverseTemperature);
  if (!filters(sampling)) {
    kernels_.gumbel_scores(logits, vocabulary_, maximum, inverse_temperature, sampling.seed, position, scores_.data());
    return;
  }
  std::fill_n(scores_.data(), scores_.size(), kMinusInfinity);
  select_candidates(logits, maximum, inverse_temperature, sampling);
  for (const Candidate& candidate : candidates_) {
    if (sampling.min_p > 0.0F && exp_lanes<ScalarMath>(candidate.adjusted) < sampling.min_p) continue;
    scores_[static_cast<size_t>(candidate.token)] =
        candidate.adjusted + gumbel(sampling.seed, position, candidate.token);
  }
}

bool Sampler::filters(const Sampling& sampling) const noexcept {
  return (sampling.top_k > 0 && sampling.top_k < vocabulary_) || sampling.top_p < 1.0F || sampling.min_p > 0.0F;
}

bool Sampler::valid_bias(const Sampling& sampling) const noexcept {
  for (int i = 0; i < sampling.bias_count; ++i) {
    const int32_t biased = sampling.bias[i].token;
    if (biased < 0 || biased >= vocabulary_ || i >= kMaxLogitBias) return false;
  }
  return true;
}

void Sampler::add_bias(float* logits, const Sampling& sampling) noexcept {
  for (int i = 0; i < sampling.bias_count; ++i) {
    float& logit = logits[sampling.bias[i].token];
    unbiased_[static_cast<size_t>(i)] = logit;
    logit += sampling.bias[i].bias;
  }
}

void Sampler::remove_bias(float* logits, const Sampling& sampling) noexcept {
  for (int i = sampling.bias_count - 1; i >= 0; --i) {
    logits[sampling.bias[i].token] = unbiased_[static_cast<size_t>(i)];
  }
}

LogNormaliser Sampler::normaliser(const float* logits, float maximum) noexcept {
  kernels_.exponentials(logits, vocabulary_, maximum, 1.0F, probabilities_.data());
  return {maximum, log_lanes<ScalarMath>(static_cast<float>(sum_of(probabilities_.data(), vocabulary_)))};
}

Status Sampler::normalise(const float* logits, LogNormaliser& out) noexcept {
  float maximum = 0.0F;
  if (!kernels_.scan(logits, vocabulary_, &maximum)) return Status::kExecutorFailed;
  out = normaliser(logits, maximum);
  return Status::kOk;
}

void Sampler::report_logprobs(const float* logits, float maximum, int count, RoundToken& token) noexcept {
  const LogNormaliser normalised = normaliser(logits, maximum);
  token.logprob = normalised.logprob(logits[token.token]);
  token.top_count = list_likeliest(logits, normalised, std::min(count, kMaxTopLogprobs), token.top);
}

int Sampler::list_likeliest(const float* logits, const LogNormaliser& normaliser, int count,
                            TokenLogprob* top) const noexcept {
  const int wanted = std::min(count, vocabulary_);
  int held = 0;  // top[0, held) is sorted: larger logit, then smaller id
  for (int i = 0; i < vocabulary_ && wanted > 0; ++i) {
    if (held == wanted && !(logits[i] > top[held - 1].logprob)) continue;
    int at = held < wanted ? held++ : held - 1;
    for (; at > 0 && top[at - 1].logprob < logits[i]; --at) top[at] = top[at - 1];
    top[at] = {i, logits[i]};
  }
  for (int i = 0; i < held; ++i) top[i].logprob = normaliser.logprob(top[i].logprob);
  return held;
}

int Sampler::draw(const float* logits, float maximum, int32_t position, const Sampling& sampling) noexcept {
  const float inverse_temperature = std::min(1.0F / sampling.temperature, kMostInverseTemperature);
  if (!filters(sampling)) {
    return kernels_.gumbel_argmax(logits, vocabulary_, maximum, inverse_temperature, sampling.seed, position);
  }
  select_candidates(logits, maximum, inverse_temperature, sampling);
  int best = -1;
  float best_score = kMinusInfinity;
  for (const Candidate& candidate : candidates_) {
    // min-p: relative to the most probable token, whose adjusted logit is 0.
    if (sampling.min_p > 0.0F && exp_lanes<ScalarMath>(candidate.adjusted) < sampling.min_p) continue;
    const float score = candidate.adjusted + gumbel(sampling.seed, position, candidate.token);
    if (score > best_score || (score == best_score && candidate.token < best)) {
      best = candidate.token;
      best_score = score;
    }
  }
  return best;
}

void Sampler::select_candidates(const float* logits, float maximum, float inverse_temperature,
                                const Sampling& sampling) noexcept {
  const bool top_k = sampling.top_k > 0 && sampling.top_k < vocabulary_;
  const bool top_p = sampling.top_p < 1.0F;
  candidates_.clear();
  if (!top_k && !top_p) {  // min-p alone: a cut on the adjusted logit, a little below the exact one
    const float cut = (sampling.min_p < 1e-30F ? -80.0F : log_lanes<ScalarMath>(sampling.min_p)) - 0.01F;
    for (int i = 0; i < vocabulary_; ++i) {
      const float adjusted = (logits[i] - maximum) * inverse_temperature;
      if (adjusted >= cut) candidates_.push_back({adjusted, i});
    }
    return;
  }
  kernels_.exponentials(logits, vocabulary_, maximum, inverse_temperature, probabilities_.data());
  std::fill(bucket_counts_.begin(), bucket_counts_.end(), 0);
  std::fill(bucket_masses_.begin(), bucket_masses_.end(), 0.0);
  double total = 0.0;
  for (int i = 0; i < vocabulary_; ++i) {
    const size_t bucket = static_cast<size_t>(bucket_of((logits[i] - maximum) * inverse_temperature));
    const double mass = static_cast<double>(probabilities_[static_cast<size_t>(i)]);
    ++bucket_counts_[bucket];
    bucket_masses_[bucket] += mass;
    total += mass;
  }
  // The lowest bucket that can hold a survivor. Masses are summed in another order than keep_nucleus does, hence the
  // margin.
  const double wanted_mass = static_cast<double>(sampling.top_p) * total * (1.0 + 1e-9);
  int bucket = kBuckets;
  int64_t count = 0;
  double mass = 0.0;
  while (bucket > 0) {
    --bucket;
    count += bucket_counts_[static_cast<size_t>(bucket)];
    mass += bucket_masses_[static_cast<size_t>(bucket)];
    if (top_k && count >= sampling.top_k) break;
    if (!top_k && mass >= wanted_mass) break;
  }
  collect(logits, maximum, inverse_temperature, bucket);
  if (top_k) {
    keep_best(sampling.top_k);
    total = 0.0;
  }
  if (top_p) keep_nucleus(sampling.top_p, total);
}

void Sampler::collect(const float* logits, float maximum, float inverse_temperature, int bucket) noexcept {
  for (int i = 0; i < vocabulary_; ++i) {
    const float adjusted = (logits[i] - maximum) * inverse_temperature;
    if (bucket_of(adjusted) >= bucket) candidates_.push_back({adjusted, i});
  }
}

void Sampler::keep_best(int count) noexcept {
  const auto better = [](const Candidate& a, const Candidate& b) {
    return a.adjusted > b.adjusted || (a.adjusted == b.adjusted && a.token < b.token);
  };
  if (count >= static_cast<int>(candidates_.size())) return;
  std::nth_element(candidates_.begin(), candidates_.begin() + count, candidates_.end(), better);
  candidates_.resize(static_cast<size_t>(count));
}

// Keeps the smallest set whose probability reaches top_p, best first. total: the mass of all tokens that top-p looks
// at; 0: of the candidates.
void Sampler::keep_nucleus(float top_p, double total) noexcept {
  std::sort(candidates_.begin(), candidates_.end(), [](const Candidate& a, const Candidate& b) {
    return a.adjusted > b.adjusted || (a.adjusted == b.adjusted && a.token < b.token);
  });
  const auto mass_of = [&](const Candidate& candidate) {
    return static_cast<double>(probabilities_[static_cast<size_t>(candidate.token)]);
  };
  if (total == 0.0) {
    for (const Candidate& candidate : candidates_) total += mass_of(candidate);
  }
  const double wanted = static_cast<double>(top_p) * total;
  double mass = 0.0;
  size_t kept = 0;
  while (kept < candidates_.size() && mass < wanted) mass += mass_of(candidates_[kept++]);
  candidates_.resize(std::max<size_t>(kept, 1));
}

}  // namespace ull::cpu
