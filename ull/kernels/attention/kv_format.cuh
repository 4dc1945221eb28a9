// How keys and values are stored (bf16, or e4m3 with a scale per head), where they lie in a page, and how 16 stored
// bytes become operands of tensor core products. Stored numbers stay within f16, which is what they are multiplied as.
#pragma once

#include <cstdint>

#include "arch.cuh"
#include "model.cuh"

namespace ull::gpu {

inline constexpr int kKvBytes = kKvBits / 8;                                    // of an element
inline constexpr int kKvHeadBytes = kPageTokens * kHeadDim * kKvBytes;          // keys or values of a head in a page
inline constexpr int64_t kKvLayerBytes = int64_t{2} * kKvHeads * kKvHeadBytes;  // K, then V
inline constexpr float kLargestBf16 = 65280.0F;                                 // the largest bf16 that f16 holds

// Four numbers (already divided by the scale) as they are stored, 8 bytes or 4.
struct alignas(4 * kKvBytes) StoredQuad {
  uint32_t word[kKvBytes];
};

ULL_DEVICE float clamp_to_f16(float value) {  // NaN stays NaN
  return value < -kLargestBf16 ? -kLargestBf16 : value > kLargestBf16 ? kLargestBf16 : value;
}

ULL_DEVICE StoredQuad to_stored(const float (&value)[4]) {
  StoredQuad stored;
  if constexpr (kKvBits == 16) {
    for (int i = 0; i < 2; ++i) {
      const uint32_t low = arch::f32_to_bf16(clamp_to_f16(value[2 * i]));
      const uint32_t high = arch::f32_to_bf16(clamp_to_f16(value[2 * i + 1]));
      stored.word[i] = low | high << 16;
    }
  } else {
    stored.word[0] = arch::f32x2_to_e4m3x2(value[0], value[1]) | arch::f32x2_to_e4m3x2(value[2], value[3]) << 16;
  }
  return stored;
}

// Two stored bf16 -> two f16, to nearest even.
ULL_DEVICE uint32_t bf16x2_to_f16x2(uint32_t pair) {
  return arch::f32x2_to_f16x2(arch::bits_float(pair << 16), arch::bits_float(pair & 0xFFFF0000U));
}

ULL_DEVICE arch::Vector2 to_f16(const StoredQuad& stored) {
  if constexpr (kKvBits == 16) {
    return {{bf16x2_to_f16x2(stored.word[0]), bf16x2_to_f16x2(stored.word[1])}};
  } else {
    arch::Vector2 f16;
    arch::e4m3x4_to_f16x2(stored.word[0], f16.word[0], f16.word[1]);
    return f16;
  }
}

// ---- operands -----------------------------------------------------------------------------------------------------
// A lane's 16 stored bytes are its B operands of 2 (bf16) or 4 (e4m3) products: product m takes elements 4m .. 4m + 3
// as its k of 2t, 2t + 1, 2t + 8, 2t + 9. The four lanes of a column thus cover 32 or 64 elements of k.

inline constexpr int kKvProducts = 32 / kKvBits;
inline constexpr int kValueUnit = 16 * kKvProducts;  // positions that one load of each lane covers

// Keys of odd multiples of 32 dimensions are taken in steps of 32 in either format: e4m3 then wastes half of each load.
inline constexpr bool kHalfKeyLoads = kKvBits == 8 && kHeadDim % 64 != 0;
inline constexpr int kKeyProducts = kHalfKeyLoads ? 2 : kKvProducts;
inline constexpr int kKeyUnit = 16 * kKeyProducts;  // dimensions
inline constexpr int kKeySteps = kHeadDim / kKeyUnit;

// Byte offset of lane t's load of step `step` in a row of keys.
ULL_DEVICE int key_offset(int step, int t) { return kHalfKeyLoads ? 32 * step + 8 * t / 16 * 16 : 64 * step + 16 * t; }

// Turns loaded bf16 into f16 in place. e4m3 is turned where it is used, which takes no more registers.
ULL_DEVICE void prepare(arch::Vector4& loaded) {
  if constexpr (kKvBits == 16) {
    for (uint32_t& word : loaded.word) word = bf16x2_to_f16x2(word);
  }
}

// Operand of product m from a prepared load.
ULL_DEVICE void operand(uint32_t (&b)[2], const arch::Vector4& prepared, int m) {
  if constexpr (kKvBits == 16) {
    b[0] = prepared.word[2 * m];
    b[1] = prepared.word[2 * m + 1];
  } else {
    arch::e4m3x4_to_f16x2(prepared.word[m], b[0], b[1]);
  }
}

ULL_DEVICE void key_operand(uint32_t (&b)[2], const arch::Vector4& prepared, int m, int t) {
  if constexpr (kHalfKeyLoads) {
    arch::e4m3x4_to_f16x2(t % 2 == 0 ? prepared.word[m] : prepared.word[2 + m], b[0], b[1]);
  } else {
    operand(b, prepared, m);
  }
}

// Rows of f16 in shared memory that lanes read 16 bytes at a time, row g by the lanes of column g, `products` operands
// a lane: padded so that the eight lanes of a memory phase touch all banks once.
ULL_HOST_DEVICE constexpr int padded_row_bytes(int elements, int products) {
  const int wanted = products == 2 ? 64 : 16;  // modulo 128
  return (2 * elements - wanted + 127) / 128 * 128 + wanted;
}

// Where lane t's words of product m lie in such a row, `step` counting units of 16 * products elements: the 16 bytes
// hold the words of products m and m + 1, m even.
ULL_DEVICE int row_offset(int products, int step, int t, int m) {
  return 32 * products * step + 8 * products * t + 8 * m;
}

}  // namespace ull::gpu
