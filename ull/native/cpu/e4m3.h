// Rounding to E4M3, the 8-bit float of weights, of a GPU's activations and of its FP8 pages.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

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

}  // namespace ull::cpu
