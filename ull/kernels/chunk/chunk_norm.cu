// RMSNorm of a chunk's tokens, by the plan of all norms, of few tokens after what the layer before left to be added.
// One block per token; or one for the last token alone, whose residual a round then draws from.
#include "chunk/fast_activations.cuh"
#include "linear/rows.cuh"

namespace ull::gpu {
namespace {

constexpr int kNormBlocks = kNormVectors <= 4 ? 4 : 2;  // on a multiprocessor: all of a chunk at once

// What becomes of a token's normed f16: activations as they are, or e4m3 in the unit of the largest one.
class NormedToken {
 public:
  ULL_DEVICE NormedToken(const ChunkNormParams& params, int token) : params_(params), token_(token) {}

  // Four columns of the thread's.
  ULL_DEVICE void take(int column, const arch::Vector2& four) {
    if (params_.normed == nullptr) return;
    if constexpr (kFastPrefill) {
      kept(column) = four;
#pragma unroll
      for (int i = 0; i < 2; ++i) peak_ = larger_peak_of_pair(peak_, four.word[i]);
    } else {
      auto* output = static_cast<uint16_t*>(params_.normed);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        *reinterpret_cast<uint32_t*>(output + chunk_index<kHidden>(token_, column + 2 * i)) = four.word[i];
      }
    }
  }

  // By all threads, when each has taken what it has.
  ULL_DEVICE void finish() {
    if constexpr (kFastPrefill) {
      if (params_.normed == nullptr) return;
      const float scale = token_scale_of(block_peak()), inverse = arch::reciprocal(scale);
      auto* output = static_cast<unsigned char*>(params_.normed);
#pragma unroll
      for (int i = 0; i < kNormVectors; ++i) {
        const int column = row_column(i);
        if (column >= round_up(kHidden, kColumnUnit)) continue;
        const arch::Vector2 four = kept(column);
        *reinterpret_cast<uint32_t*>(output + fast_chunk_index<kHidden>(token_, column)) =
            quantised_four(four.word[0], four.word[1], inverse);
      }
      if (arch::thread() == 0) params_.token_scale[token_] = scale;
    }
  }

 private:
  // Shared memory: the norm's sums, the warps' peaks, then (fast) the row.
  static constexpr int kPeaksAt = 64, kRowAt = 128;
  static_assert(kNormWarps * sizeof(float) <= kPeaksAt && kPeaksAt + kNormWarps * sizeof(uint32_t) <= kRowAt);

  ULL_DEVICE static arch::Vector2& kept(int column) {
    return reinterpret_cast<arch::Vector2*>(arch::shared_memory() + kRowAt)[column / 4];
  }
  ULL_DEVICE uint32_t block_peak() const {
    uint32_t peak = peak_;
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) peak = larger_peak(peak, arch::shuffle_xor(peak, mask));
    auto* peaks = reinterpret_cast<uint32_t*>(arch::shared_memory() + kPeaksAt);
    if (arch::lane() == 0) peaks[arch::warp()] = peak;
    arch::block_barrier();
#pragma unroll
    for (int warp = 0; warp < kNormWarps; ++warp) peak = larger_peak(peak, peaks[warp]);
    return peak;
  }

  const ChunkNormParams& params_;
  int token_;
  uint32_t peak_ = 0;
};

}  // namespace

ULL_KERNEL(ull_chunk_norm, ChunkNormParams, kNormThreads, kNormBlocks) {
  arch::release_dependents();
  RowShare weight;
  load_norm_weight(weight, params.norm_weight);
  const ChunkExtent chunk = chunk_extent(params.chunk);
  arch::wait_for_predecessor();
  const bool alone = arch::grid_x() == 1, draws = params.last != nullptr;
  const int last = chunk.count - 1, token = alone ? last : arch::block_x();
  if (token < 0 || token >= chunk.count) return;
  NormedToken normed_token(params, token);
  norm_rows<1>(
      weight, 1, reinterpret_cast<float*>(arch::shared_memory()),
      [&](RowShare& row, int) {
        if (!kFastPrefill && params.partial != nullptr && chunk.count <= kChunkTile) {
          load_finished_row<kChunkTile>(params, row, token);
        } else {
          load_row(row, params.residual + int64_t{token} * kResidualStride);
        }
      },
      [&](int, int column, const arch::Vector2& four) { normed_token.take(column, four); },
      [&](int, int column, const arch::Vector4& four) {
        if (draws && token == last && column < kHidden) arch::store_global(params.last + column, four);
        if constexpr (kTaps > 0) {
          if (params.taps == nullptr || column >= kHidden) return;
          const int64_t slot = (chunk.base + token) % kTapSlots;
          arch::store_global(params.taps + slot * (kTaps * kResidualStride) + column, four);
        }
      });
  normed_token.finish();
}
static_assert(kChunkTokens <= kTapSlots, "a chunk's positions have slots of their own");

}  // namespace ull::gpu
