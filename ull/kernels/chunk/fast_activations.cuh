// Activations as e4m3, each token's in a unit of its own: the largest of them becomes 448.
#pragma once

#include "chunk/layout.cuh"
#include "linear/linear.cuh"

namespace ull::gpu {

inline constexpr float kLargestE4m3 = 448.0F;

// The largest magnitude so far, as bits of an f32: those of what is no number are above all others.
ULL_DEVICE uint32_t larger_peak(uint32_t peak, float value) {
  const uint32_t magnitude = arch::float_bits(value) & 0x7FFFFFFFU;
  return magnitude > peak ? magnitude : peak;
}
ULL_DEVICE uint32_t larger_peak(uint32_t a, uint32_t b) { return a > b ? a : b; }

ULL_DEVICE float low_value(uint32_t f16_pair) { return arch::f16_to_f32(static_cast<uint16_t>(f16_pair)); }
ULL_DEVICE float high_value(uint32_t f16_pair) { return arch::f16_to_f32(static_cast<uint16_t>(f16_pair >> 16)); }
ULL_DEVICE uint32_t larger_peak_of_pair(uint32_t peak, uint32_t f16_pair) {
  return larger_peak(larger_peak(peak, low_value(f16_pair)), high_value(f16_pair));
}

// What a token's e4m3 are to be multiplied by; 1 where all its activations are 0.
ULL_DEVICE float token_scale_of(uint32_t peak) {
  return peak == 0 ? 1.0F : arch::divide(arch::bits_float(peak), kLargestE4m3);
}

// Two pairs of f16 -> four e4m3.
ULL_DEVICE uint32_t quantised_four(uint32_t first, uint32_t second, float inverse) {
  return arch::f32x2_to_e4m3x2(low_value(first) * inverse, high_value(first) * inverse) |
         arch::f32x2_to_e4m3x2(low_value(second) * inverse, high_value(second) * inverse) << 16;
}

}  // namespace ull::gpu
