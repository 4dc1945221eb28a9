// What an EAGLE-3 head is, and the rows that its entries are made of.
#pragma once

#include "linear/head_rows.cuh"

namespace ull::gpu {

inline constexpr int kTargetHidden = ULL_EAGLE_TARGET_HIDDEN;
inline constexpr int kRead = ULL_EAGLE_TAPS;  // layers whose taps an entry is made of
inline constexpr auto kTapNorm = static_cast<TapNorm>(ULL_EAGLE_TAP_NORM);
inline constexpr bool kNormBeforeResidual = ULL_EAGLE_NORM_BEFORE_RESIDUAL != 0;
inline constexpr bool kNormOutput = ULL_EAGLE_NORM_OUTPUT != 0;
static_assert(kHidden % kColumnUnit == 0, "parts of a row begin at whole steps");
static_assert(kTaps == 1, "the head keeps its own output");

using Fc = TapsLinear<kTargetHidden, kRead>;

ULL_DEVICE void load_embedding(RowShare& share, const void* table, int32_t token) {
  const auto* row = static_cast<const uint16_t*>(table) + static_cast<int64_t>(token) * kHidden;
#pragma unroll
  for (int i = 0; i < kNormVectors; ++i) {
    share.vector[i] = {};
    if (row_column(i) >= kHidden) continue;
    const auto four = *reinterpret_cast<const uint64_t*>(row + row_column(i));
    const auto low = static_cast<uint32_t>(four), high = static_cast<uint32_t>(four >> 32);
    share.vector[i] = {{low << 16, low & 0xFFFF0000U, high << 16, high & 0xFFFF0000U}};  // bf16 -> f32
  }
}

}  // namespace ull::gpu
