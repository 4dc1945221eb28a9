// What the kernels behind the FP8 scan of the lm_head share: the interval in which a row's exact logit lies, and which
// rows' draws cannot be outdone by what is certain of the others.
//
// "Exact" is the f32 that ull_head_1 computes, not the real number. A row's bound (ull_build.head_scan) covers both
// kernels' rounding: |exact - scanned| <= bound * |x|, x the normed activations, |x| their Euclidean norm.
//
// A greedy draw takes the largest logit L. A sampled one takes the largest score: (L - M) / T + noise in single
// precision, M the largest logit. All rows have the same M, so in real numbers L / T + noise orders them as well, and
// single precision moves a score that is in the race (L - M above kHopeless) by less than kScoreError. A row that is
// not cannot win, nor could it there: the best row's score is at least the least noise. So M need not be known to say
// which rows may have the largest score; but it must be exact for the scores themselves, and so every row that may be
// M is scored too.
#pragma once

#include "sampling/sample.cuh"

namespace ull::gpu::rescore {

using sample::kThreads;
using sample::kWarps;
using sample::ordered;
using sample::packed;

inline constexpr int kGranule = 64;                                        // neighbouring rows that one block looks at
inline constexpr int kGranules = (kVocabulary + kGranule - 1) / kGranule;  // dealt out to the blocks in turn
inline constexpr int kPassGranules = 4 * kThreads / kGranule;              // that a block looks at at once
inline constexpr int kPassRows = 4 * kThreads;
inline constexpr float kFar = 0x1.0p126F;          // beyond it sums and products might overflow: nothing is said
inline constexpr float kLeastWidth = 0x1.0p-100F;  // more than a product that underflows can lose
// |x| is computed in single precision: at most 64 additions one after another, and a root.
inline constexpr float kNormSlack = 1.0F + 0x1.0p-14F;
// (L - M) / T of at most 20 + 2^-18 after two roundings, and a sum of at most 37 after a third: 5 * 10^-6.
inline constexpr float kScoreError = 0x1.0p-16F;
// Of |L| / T: rounding of that product and of its sum with the noise, which is below 17; kScoreError has room for that.
inline constexpr float kProductError = 0x1.0p-20F;

// What is certain of a slice's rows: keys as of ordered(); 0: nothing.
struct alignas(16) Certain {
  uint32_t logit;  // some row's exact logit is at least that
  uint32_t score;  // and its L / T + noise, less kScoreError
  uint32_t padding[2];
};

struct ExactLogit {
  int32_t token;
  float logit;
};

// In SampleParams.scratch, in place of the sampler's.
struct Scratch {
  struct alignas(16) {  // counted by the blocks of ull_head_rescore
    uint32_t finished;  // blocks
    uint32_t listed;    // rows with an exact logit
  } counts;
  struct alignas(16) {
    float norm;     // |x|, or a little more
    int32_t parts;  // blocks of ull_head_bounds
  } found;
  Certain certain[sample::kMostBlocks];
  ExactLogit exact[round_up(kVocabulary, 2)];
};
static_assert(sizeof(Scratch) <= sizeof(sample::Scratch));
static_assert(ULL_OFFSETOF(Scratch, exact) == 8224);  // ull/gpu/geometry/head_scan.py: LIST_AT

// Where a row's exact logit lies; `known` false: nowhere in particular.
struct Interval {
  float low;
  float high;
  bool known;
};

ULL_DEVICE Interval interval(float scanned, float bound, float norm) {
  const float width = ::fmaf(bound, norm, kLeastWidth);
  const float low = scanned - width, high = scanned + width;
  return {low, high, low > -kFar && high < kFar};  // false for NaN
}

// L / T + noise, moved by all that single precision may do to it or to the score: down or up.
ULL_DEVICE float certain_score(float logit, float inverse_temperature, float noise) {
  const float product = logit * inverse_temperature;
  const float size = product < 0.0F ? -product : product;
  return product + noise - ::fmaf(size, kProductError, kScoreError);
}
ULL_DEVICE float possible_score(float logit, float inverse_temperature, float noise) {
  const float product = logit * inverse_temperature;
  const float size = product < 0.0F ? -product : product;
  return product + noise + ::fmaf(size, kProductError, kScoreError);
}
ULL_DEVICE bool is_far(float logit, float inverse_temperature) {
  const float product = logit * inverse_temperature;
  return !(product > -kFar && product < kFar);
}

// Two values of each thread become the block's largest, in every thread.
ULL_DEVICE void block_largest(uint64_t (&area)[2][kWarps], uint64_t& first, uint64_t& second) {
  const sample::Larger larger;
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    first = larger(first, arch::shuffle_xor(first, mask));
    second = larger(second, arch::shuffle_xor(second, mask));
  }
  arch::block_barrier();
  if (arch::lane() == 0) {
    area[0][arch::warp()] = first;
    area[1][arch::warp()] = second;
  }
  arch::block_barrier();
  first = area[0][0];
  second = area[1][0];
#pragma unroll
  for (int i = 1; i < kWarps; ++i) {
    first = larger(first, area[0][i]);
    second = larger(second, area[1][i]);
  }
}

}  // namespace ull::gpu::rescore
