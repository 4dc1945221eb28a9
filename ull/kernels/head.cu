// Logits of the normed residual, in f32.
#include "linear_narrow.cuh"
#include "linear_wide.cuh"

namespace ull::gpu {

using Head = LinearShape<kVocabulary, kHidden, kHeadBits, true>;
using HeadEpilogue = StoreRows<kVocabulary>;

template <int kTokens>
using Narrow = NarrowPlan<Head, kTokens>;
template <int kTokens>
using Wide = WidePlan<Head, kTokens, false>;

ULL_KERNEL(ull_head_1, LinearParams, kNarrowThreads, Narrow<1>::kBlocks) {
  linear_narrow<Narrow<1>, HeadEpilogue>(params);
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
ULL_KERNEL(ull_head_32, LinearParams, Wide<32>::kBoundThreads, Wide<32>::kBlocks) {
  linear_wide<Wide<32>, HeadEpilogue>(params);
}
ULL_KERNEL(ull_head_64, LinearParams, Wide<64>::kBoundThreads, Wide<64>::kBlocks) {
  linear_wide<Wide<64>, HeadEpilogue>(params);
}

}  // namespace ull::gpu
