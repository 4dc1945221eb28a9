// Activations as an FP8 linear sees them: rounded to E4M3 times a scale, and taken back to float.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "cpu/tap.h"

namespace ull::cpu {

inline constexpr float kLargestE4m3 = 448.0F;

// The nearest E4M3 value, ties to even, saturating at +-448; NaN stays NaN.
[[nodiscard]] inline float round_to_e4m3(float value) noexcept {
  constexpr uint32_t kSmallestNormal = 127 - 6;  // exponents with float's bias; below, the grid stays the same
  const float magnitude = std::min(std::fabs(value), kLargestE4m3);
  const uint32_t exponent = std::max(std::bit_cast<uint32_t>(magnitude) >> 23, kSmallestNormal);
  // 3 bits of mantissa: multiples of 2^(exponent - 3), which is the last bit of a float 23 powers above.
  const float shift = 1.5F * std::bit_cast<float>((exponent - 3 + 23) << 23);
  return std::copysign((magnitude + shift) - shift, value);
}

class FakeQuantiser final : public Tap {
 public:
  // scales: by name, see linear_names(). Throws std::invalid_argument naming those that are unknown or not positive.
  FakeQuantiser(const std::map<std::string, float>& scales, int layers);
  // Every linear's input but the lm_head's, each token's in a scale of its own: its largest becomes 448.
  explicit FakeQuantiser(int layers);

  void take(int linear, int member, float* x, int count, int stride, float factor) noexcept override;

 private:
  static constexpr float kOfToken = -1.0F;

  std::vector<float> scales_;  // [linears] 0: the input stays as it is; kOfToken: each token has its own
};

}  // namespace ull::cpu
