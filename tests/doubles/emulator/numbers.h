// The number formats of the chip in software, bit for bit: f16, bf16 and e4m3 (OCP FP8: no infinity, 448 the largest,
// 0x7F NaN). Rounding to nearest even, subnormals kept.
#pragma once

#include <bit>
#include <cstdint>

namespace ull::emulator {

// `value` to the nearest multiple of `unit` (a power of two), ties to even, for |value| below 2^22 units: adding
// 1.5 * 2^23 units makes the FPU round there.
constexpr float round_to_unit(float value, float unit) {
  const float magic = 12582912.0F * unit;  // 1.5 * 2^23 units
  return (value + magic) - magic;          // no compiler drops this without -ffast-math
}

constexpr float f16_to_f32(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000U) << 16;
  const uint32_t exponent = (bits >> 10) & 31U;
  const uint32_t mantissa = bits & 1023U;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7F800000U | (mantissa << 13));
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

// Subnormals become 0.
constexpr float normal_or_zero(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return (bits & 0x7F800000U) == 0 ? std::bit_cast<float>(bits & 0x80000000U) : value;
}

// Beyond the range: infinity. NaN: 0x7FFF.
constexpr uint16_t f32_to_f16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000U);
  const uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) return 0x7FFF;
  if (magnitude >= 0x477FF000U) return static_cast<uint16_t>(sign | 0x7C00U);  // 65520, between 65504 and 2^16
  if (magnitude < 0x38800000U) {                                               // below 2^-14: units of 2^-24
    const float rounded = round_to_unit(std::bit_cast<float>(magnitude), 0x1p-24F);
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(rounded * 0x1p24F));
  }
  const uint32_t rounded = magnitude + 0x0FFFU + ((magnitude >> 13) & 1U);  // carries into the exponent as it should
  return static_cast<uint16_t>(sign | ((rounded >> 13) - (112U << 10)));
}

// Beyond the range, infinity included: +-65504. NaN: 0x7FFF.
constexpr uint16_t f32_to_f16_saturating(float value) {
  const uint16_t bits = f32_to_f16(value);
  return (bits & 0x7FFFU) == 0x7C00U ? static_cast<uint16_t>(bits - 1) : bits;
}

constexpr float bf16_to_f32(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

// Beyond the range: infinity. NaN: 0x7FFF.
constexpr uint16_t f32_to_bf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) return 0x7FFF;
  return static_cast<uint16_t>((bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16);
}

constexpr uint16_t e4m3_to_f16(uint8_t bits) {
  const auto sign = static_cast<uint16_t>((bits & 0x80U) << 8);
  const uint32_t exponent = (bits >> 3) & 15U;
  const uint32_t mantissa = bits & 7U;
  if ((bits & 0x7FU) == 0x7FU) return 0x7FFF;
  if (exponent == 0) {  // mantissa * 2^-9, normal in f16
    const uint16_t magnitude = f32_to_f16_saturating(static_cast<float>(mantissa) * 0x1p-9F);
    return static_cast<uint16_t>(sign | magnitude);
  }
  return static_cast<uint16_t>(sign | ((exponent + 8) << 10) | (mantissa << 7));
}

// e4m3_to_f16 of every byte: what the weights' way through the kernels is made of.
struct E4m3Table {
  uint16_t f16[256];
};
inline constexpr E4m3Table kE4m3 = [] {
  E4m3Table table{};
  for (int i = 0; i < 256; ++i) table.f16[i] = e4m3_to_f16(static_cast<uint8_t>(i));
  return table;
}();

// Beyond the range, infinity included: +-448. NaN: 0x7F.
constexpr uint8_t f32_to_e4m3_saturating(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 24) & 0x80U;
  const uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) return 0x7F;
  if (magnitude >= 0x43E00000U) return static_cast<uint8_t>(sign | 0x7EU);  // 448
  if (magnitude < 0x3C800000U) {                                            // below 2^-6: units of 2^-9
    const float rounded = round_to_unit(std::bit_cast<float>(magnitude), 0x1p-9F);
    return static_cast<uint8_t>(sign | static_cast<uint32_t>(rounded * 0x1p9F));
  }
  const uint32_t rounded = magnitude + 0x7FFFFU + ((magnitude >> 20) & 1U);
  return static_cast<uint8_t>(sign | ((rounded >> 20) - (120U << 3)));
}

}  // namespace ull::emulator
