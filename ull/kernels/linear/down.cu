// The MLP's down projection, added to the residual.
#include "linear/layer_shapes.cuh"
#include "linear/linear_narrow.cuh"
#include "linear/linear_wide.cuh"

namespace ull::gpu {

template <int kTokens>
using Narrow = NarrowPlan<Down, kTokens>;
template <int kTokens>
using Wide = WidePlan<Down, kTokens, true>;

ULL_KERNEL(ull_down_1, LinearParams, kNarrowThreads, Narrow<1>::kBlocks) {
  linear_narrow<Narrow<1>, DownEpilogue>(params);
}
ULL_KERNEL(ull_down_2, LinearParams, kNarrowThreads, Narrow<2>::kBlocks) {
  linear_narrow<Narrow<2>, DownEpilogue>(params);
}
ULL_KERNEL(ull_down_4, LinearParams, kNarrowThreads, Narrow<4>::kBlocks) {
  linear_narrow<Narrow<4>, DownEpilogue>(params);
}
ULL_KERNEL(ull_down_8, LinearParams, kNarrowThreads, Narrow<8>::kBlocks) {
  linear_narrow<Narrow<8>, DownEpilogue>(params);
}
ULL_KERNEL(ull_down_16, LinearParams, Wide<16>::kBoundThreads, Wide<16>::kBlocks) {
  linear_wide<Wide<16>, DownEpilogue>(params);
}
ULL_WIDE_KERNEL(ull_down_32, Wide<32>) { linear_wide<Wide<32>, DownEpilogue>(params); }
ULL_WIDE_KERNEL(ull_down_64, Wide<64>) { linear_wide<Wide<64>, DownEpilogue>(params); }

}  // namespace ull::gpu
