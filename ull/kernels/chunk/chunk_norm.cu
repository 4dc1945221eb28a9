// RMSNorm of a chunk's tokens, by the plan of all norms. One block per token.
#include "chunk/layout.cuh"
#include "linear/norm.cuh"

namespace ull::gpu {

ULL_KERNEL(ull_chunk_norm, ChunkNormParams, kNormThreads, 2) {
  arch::release_dependents();
  RowShare weight;
  load_norm_weight(weight, params.norm_weight);
  const ChunkExtent chunk = chunk_extent(params.chunk);
  arch::wait_for_predecessor();
  const int token = arch::block_x();
  if (token >= chunk.count) return;
  auto* sums = reinterpret_cast<float*>(arch::shared_memory());
  auto* output = static_cast<uint16_t*>(params.normed);
  norm_rows<1>(
      weight, 1, sums, [&](RowShare& row, int) { load_row(row, params.residual + int64_t{token} * kResidualStride); },
      [&](int, int column, arch::Vector2 four) {
        if (output == nullptr) return;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          *reinterpret_cast<uint32_t*>(output + chunk_index<kHidden>(token, column + 2 * i)) = four.word[i];
        }
      },
      [&](int, int column, const arch::Vector4& four) {
        if constexpr (kTaps > 0) {
          if (params.taps == nullptr || column >= kHidden) return;
          const int64_t slot = (chunk.base + token) % kTapSlots;
          arch::store_global(params.taps + slot * (kTaps * kResidualStride) + column, four);
        }
      });
}
static_assert(kChunkTokens <= kTapSlots, "a chunk's positions have slots of their own");

}  // namespace ull::gpu
