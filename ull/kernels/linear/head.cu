// Logits of the normed residual, in f32. The kernel for one token also finds what ull_sample_scan would without biases:
// the best logit, the largest and whether all are finite, of each block's rows.
#include "linear/linear_narrow.cuh"
#include "linear/linear_wide.cuh"
#include "scores.cuh"

namespace ull::gpu {

using Head = LinearShape<kVocabulary, kHidden, kHeadBits, true>;
using HeadEpilogue = StoreRows<kVocabulary>;

// Epilogue of one token: the logits, and what is best of them.
struct StoreLogits : HeadEpilogue {
  uint64_t best = 0;     // of this thread's rows: as in ScanPart
  uint64_t maximum = 0;  // ScanPart's two words

  template <typename Sum>
  ULL_DEVICE void finish(const LinearParams& params, const Operands& operands, int tile, int, int item,
                         const Sum& sum) {
    const int row = tile * kRowUnit + 4 * item;
    const Four logits = scaled(sum(4 * item), operands);
    store_four(static_cast<float*>(params.output) + row, logits);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (row + i >= kVocabulary) break;
      best = sample::Larger()(best, sample::packed(logits.value[i], row + i));
      maximum = sample::Larger()(maximum, sample::maximum_of(logits.value[i]));
    }
  }

  // Once the block's row tiles are done; `shared` is no longer needed for their sums.
  ULL_DEVICE void finish_block(const LinearParams& params, float* shared) {
    if (params.maxima == nullptr) return;
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
      best = sample::Larger()(best, arch::shuffle_xor(best, mask));
      maximum = sample::Larger()(maximum, arch::shuffle_xor(maximum, mask));
    }
    auto* warps = reinterpret_cast<uint64_t*>(shared);
    arch::block_barrier();
    if (arch::lane() == 0) {
      warps[2 * arch::warp()] = best;
      warps[2 * arch::warp() + 1] = maximum;
    }
    arch::block_barrier();
    if (arch::thread() != 0) return;
    for (int i = 1; i < kComputeWarps; ++i) {
      best = sample::Larger()(best, warps[2 * i]);
      maximum = sample::Larger()(maximum, warps[2 * i + 1]);
    }
    static_cast<sample::ScanPart*>(params.maxima)[arch::block_x()] = {best, static_cast<uint32_t>(maximum),
                                                                      static_cast<uint32_t>(maximum >> 32)};
  }
};

template <int kTokens>
using Narrow = NarrowPlan<Head, kTokens>;
template <int kTokens>
using Wide = WidePlan<Head, kTokens, false>;

ULL_KERNEL(ull_head_1, LinearParams, kNarrowThreads, Narrow<1>::kBlocks) {
  linear_narrow<Narrow<1>, StoreLogits>(params);
}
ULL_KERNEL(ull_head_2, LinearParams, kNarrowThreads, Narrow<2>::kBlocks) {
  linear_narrow<Narrow<2>, HeadEpilogue>(params);
}
ULL_KERNEL(ull_head_4, LinearParams, kNarrowThreads, Narrow<4>::kBlocks) {
  linear_narrow<Narrow<4>, HeadEpilogue>(params);
}
ULL_KERNEL(ull_head_8, LinearParams, kNarrowThreads, Narrow<8>::kBlocks) {
  linear_narrow<Narrow<8>, HeadEpilogue>(params);
}
ULL_KERNEL(ull_head_16, LinearParams, Wide<16>::kBoundThreads, Wide<16>::kBlocks) {
  linear_wide<Wide<16>, HeadEpilogue>(params);
}
ULL_WIDE_KERNEL(ull_head_32, Wide<32>) { linear_wide<Wide<32>, HeadEpilogue>(params); }
ULL_WIDE_KERNEL(ull_head_64, Wide<64>) { linear_wide<Wide<64>, HeadEpilogue>(params); }

}  // namespace ull::gpu
