// The attention's output projection, added to the residual.
#include "linear/layer_shapes.cuh"
#include "linear/linear_narrow.cuh"
#include "linear/linear_wide.cuh"

namespace ull::gpu {

template <int kTokens>
using Narrow = NarrowPlan<Output, kTokens>;
template <int kTokens>
using Wide = WidePlan<Output, kTokens, true>;

ULL_KERNEL(ull_o_1, LinearParams, kNarrowThreads, Narrow<1>::kBlocks) {
  linear_narrow<Narrow<1>, OutputEpilogue, kAheadBytes>(params);
}
ULL_KERNEL(ull_o_2, LinearParams, kNarrowThreads, Narrow<2>::kBlocks) {
  linear_narrow<Narrow<2>, OutputEpilogue, kAheadBytes>(params);
}
ULL_KERNEL(ull_o_4, LinearParams, kNarrowThreads, Narrow<4>::kBlocks) {
  linear_narrow<Narrow<4>, OutputEpilogue, kAheadBytes>(params);
}
ULL_KERNEL(ull_o_8, LinearParams, kNarrowThreads, Narrow<8>::kBlocks) {
  linear_narrow<Narrow<8>, OutputEpilogue, kAheadBytes>(params);
}
ULL_KERNEL(ull_o_16, LinearParams, Wide<16>::kBoundThreads, Wide<16>::kBlocks) {
  linear_wide<Wide<16>, OutputEpilogue, kAheadBytes>(params);
}
ULL_WIDE_KERNEL(ull_o_32, Wide<32>) { linear_wide<Wide<32>, OutputEpilogue, kAheadBytes>(params); }
ULL_WIDE_KERNEL(ull_o_64, Wide<64>) { linear_wide<Wide<64>, OutputEpilogue, kAheadBytes>(params); }

}  // namespace ull::gpu
