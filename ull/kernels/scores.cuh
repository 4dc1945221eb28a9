// Logits as numbers that can be compared and reduced: what the sampler's kernels and the head's epilogue share.
#pragma once

#include "model.cuh"

namespace ull::gpu::sample {

// Orders as floats do; -0 and +0 are one.
ULL_DEVICE uint32_t ordered(float value) {
  const uint32_t bits = value == 0.0F ? 0U : arch::float_bits(value);
  return (bits & 0x80000000U) != 0 ? ~bits : bits | 0x80000000U;
}
ULL_DEVICE float unordered(uint32_t key) {
  return arch::bits_float((key & 0x80000000U) != 0 ? key & 0x7FFFFFFFU : ~key);
}
// The larger is the better: by value, then by smaller token id. Never 0.
ULL_DEVICE uint64_t packed(float value, int token) {
  return (static_cast<uint64_t>(ordered(value)) << 32) | ~static_cast<uint32_t>(token);
}
ULL_DEVICE int token_of(uint64_t pack) { return static_cast<int>(~static_cast<uint32_t>(pack)); }
ULL_DEVICE float value_of(uint64_t pack) { return unordered(static_cast<uint32_t>(pack >> 32)); }

struct Larger {
  ULL_DEVICE uint64_t operator()(uint64_t a, uint64_t b) const { return a > b ? a : b; }
};
// Of a raw logit: what ScanPart's `maximum` and, above it, `poisoned` are the largest of.
ULL_DEVICE uint64_t maximum_of(float raw) {
  constexpr uint64_t kPoison = uint64_t{1} << 32;
  return raw - raw == 0.0F ? ordered(raw) : kPoison;
}

struct alignas(16) ScanPart {  // of a slice of the vocabulary, or of what a block of the head has computed
  uint64_t best;               // biased logits: packed(value, token); 0: the slice is empty
  uint32_t maximum;            // raw logits: ordered(value)
  uint32_t poisoned;           // 1: a raw logit is not finite
};

}  // namespace ull::gpu::sample
