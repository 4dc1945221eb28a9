// Pseudo-random weights of a benchmark bundle, made where they are used: 16 bytes from one Philox call, so what stands
// at an address depends on seed and offset alone. Values are spread evenly over [-amplitude, amplitude].
#include "arch.cuh"
#include "base/philox.h"
#include "params.h"

namespace ull::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kBytes = 16;  // of a Philox call

// The `bits` lowest bits as a number in (-1, 1), symmetric about 0.
template <int kBits>
ULL_DEVICE float spread(uint32_t bits) {
  constexpr float kScale = 2.0F / static_cast<float>(1U << kBits);
  const uint32_t low = bits & ((1U << kBits) - 1U);
  return (static_cast<float>(low) + 0.5F) * kScale - 1.0F;
}

ULL_DEVICE uint32_t four_e4m3(uint32_t bits, float amplitude) {
  const uint32_t low = arch::f32x2_to_e4m3x2(spread<8>(bits) * amplitude, spread<8>(bits >> 8) * amplitude);
  const uint32_t high = arch::f32x2_to_e4m3x2(spread<8>(bits >> 16) * amplitude, spread<8>(bits >> 24) * amplitude);
  return (low & 0xFFFFU) | (high << 16);
}

// format: FillParams::format
ULL_DEVICE uint32_t word_of(uint32_t bits, int32_t format, float amplitude) {
  if (format == 0) return four_e4m3(bits, amplitude);
  if (format == 3) return arch::float_bits(spread<23>(bits >> 9) * amplitude);
  const float low = spread<16>(bits) * amplitude, high = spread<16>(bits >> 16) * amplitude;
  if (format == 1) return arch::f32x2_to_f16x2(low, high);
  return static_cast<uint32_t>(arch::f32_to_bf16(low)) | (static_cast<uint32_t>(arch::f32_to_bf16(high)) << 16);
}

}  // namespace

ULL_KERNEL(ull_fill, FillParams, kThreads, 1) {
  arch::wait_for_predecessor();
  auto* output = static_cast<uint8_t*>(params.output);
  const int64_t step = static_cast<int64_t>(arch::grid_x()) * kThreads * kBytes;
  int64_t at = (static_cast<int64_t>(arch::block_x()) * kThreads + arch::thread()) * kBytes;
  for (; at < params.bytes; at += step) {
    const uint64_t counter = static_cast<uint64_t>(at) / kBytes;
    const PhiloxWords random =
        philox4x32({{static_cast<uint32_t>(counter), static_cast<uint32_t>(counter >> 32), 0, 0}},
                   static_cast<uint32_t>(params.seed), static_cast<uint32_t>(params.seed >> 32));
    arch::Vector4 value;
#pragma unroll
    for (int i = 0; i < 4; ++i) value.word[i] = word_of(random.word[i], params.format, params.amplitude);
    if (at + kBytes <= params.bytes) {
      arch::store_global(output + at, value);
      continue;
    }
#pragma unroll
    for (int i = 0; i < kBytes; ++i) {
      if (at + i < params.bytes) output[at + i] = static_cast<uint8_t>(value.word[i / 4] >> (i % 4 * 8));
    }
  }
}

}  // namespace ull::gpu
