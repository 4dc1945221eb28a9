// The tensor cores' product and the number formats, for tests/kernels/test_emulator.py.
#include "arch.cuh"
#include "probe.h"

namespace arch = ull::arch;

struct MmaParams {
  const uint16_t* a;  // [count, 16, 16] f16
  const uint16_t* b;  // [count, 16, 8] f16
  float* c;           // [count, 16, 8], added to
  int32_t count;
};

// One warp per block, `count` blocks.
ULL_KERNEL(multiply, MmaParams, 32, 1) {
  arch::wait_for_predecessor();
  const int g = arch::lane() / 4;
  const int t = arch::lane() % 4;
  const uint16_t* a = params.a + arch::block_x() * 256;
  const uint16_t* b = params.b + arch::block_x() * 128;
  float* c = params.c + arch::block_x() * 128;
  const auto pair = [](uint16_t low, uint16_t high) { return static_cast<uint32_t>(high) << 16 | low; };
  const auto row_pair = [&](int row, int k) { return pair(a[row * 16 + k], a[row * 16 + k + 1]); };
  const uint32_t left[4] = {row_pair(g, 2 * t), row_pair(g + 8, 2 * t), row_pair(g, 2 * t + 8),
                            row_pair(g + 8, 2 * t + 8)};
  const auto column_pair = [&](int k) { return pair(b[k * 8 + g], b[(k + 1) * 8 + g]); };
  const uint32_t right[2] = {column_pair(2 * t), column_pair(2 * t + 8)};
  float sum[4] = {c[g * 8 + 2 * t], c[g * 8 + 2 * t + 1], c[(g + 8) * 8 + 2 * t], c[(g + 8) * 8 + 2 * t + 1]};
  arch::mma(sum, left, right);
  c[g * 8 + 2 * t] = sum[0];
  c[g * 8 + 2 * t + 1] = sum[1];
  c[(g + 8) * 8 + 2 * t] = sum[2];
  c[(g + 8) * 8 + 2 * t + 1] = sum[3];
}

struct ConvertParams {
  const float* numbers;  // [count], count even
  uint16_t* f16;         // [count], saturated
  uint16_t* bf16;        // [count]
  uint8_t* e4m3;         // [count]
  float* from_f16;       // [65536]
  float* from_bf16;      // [65536]
  uint16_t* from_e4m3;   // [256] f16
  int32_t count;
};

struct FastParams {
  const float* numbers;  // [count]
  float* exp2;           // [count]
  float* reciprocal;     // [count]
  int32_t count;
};

ULL_KERNEL(convert, ConvertParams, 32, 1) {
  arch::wait_for_predecessor();
  if (arch::thread() != 0) return;
  for (int i = 0; i < params.count; i += 2) {
    const float low = params.numbers[i];
    const float high = params.numbers[i + 1];
    const uint32_t f16 = arch::f32x2_to_f16x2(low, high);
    const uint32_t e4m3 = arch::f32x2_to_e4m3x2(low, high);
    for (int j = 0; j < 2; ++j) {
      params.f16[i + j] = static_cast<uint16_t>(f16 >> (16 * j));
      params.e4m3[i + j] = static_cast<uint8_t>(e4m3 >> (8 * j));
      params.bf16[i + j] = arch::f32_to_bf16(params.numbers[i + j]);
    }
  }
  for (int i = 0; i < 65536; ++i) {
    params.from_f16[i] = arch::f16_to_f32(static_cast<uint16_t>(i));
    params.from_bf16[i] = arch::bf16_to_f32(static_cast<uint16_t>(i));
  }
  for (uint32_t i = 0; i < 256; i += 4) {
    uint32_t pair[2];
    arch::e4m3x4_to_f16x2(i * 0x01010101U + 0x03020100U, pair[0], pair[1]);
    for (int j = 0; j < 4; ++j) params.from_e4m3[i + j] = static_cast<uint16_t>(pair[j / 2] >> (j % 2 * 16));
  }
}

ULL_KERNEL(fast, FastParams, 32, 1) {
  arch::wait_for_predecessor();
  for (int i = arch::thread(); i < params.count; i += 32) {
    params.exp2[i] = arch::fast_exp2(params.numbers[i]);
    params.reciprocal[i] = arch::fast_reciprocal(params.numbers[i]);
  }
}
