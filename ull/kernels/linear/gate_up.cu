// silu(gate) * up of the normed residual.
#include "linear/gate_up.cuh"
#include "linear/linear_narrow.cuh"
#include "linear/linear_wide.cuh"

namespace ull::gpu {

template <int kTokens>
using Narrow = NarrowPlan<GateUp, kTokens>;
template <int kTokens>
using Wide = WidePlan<GateUp, kTokens, false>;

ULL_KERNEL(ull_gate_up_1, LinearParams, kNarrowThreads, Narrow<1>::kBlocks) {
  linear_narrow<Narrow<1>, GateUpEpilogue, kAheadBytes>(params);
}
ULL_KERNEL(ull_gate_up_2, LinearParams, kNarrowThreads, Narrow<2>::kBlocks) {
  linear_narrow<Narrow<2>, GateUpEpilogue, kAheadBytes>(params);
}
ULL_KERNEL(ull_gate_up_4, LinearParams, kNarrowThreads, Narrow<4>::kBlocks) {
  linear_narrow<Narrow<4>, GateUpEpilogue, kAheadBytes>(params);
}
ULL_KERNEL(ull_gate_up_8, LinearParams, kNarrowThreads, Narrow<8>::kBlocks) {
  linear_narrow<Narrow<8>, GateUpEpilogue, kAheadBytes>(params);
}
ULL_KERNEL(ull_gate_up_16, LinearParams, Wide<16>::kBoundThreads, Wide<16>::kBlocks) {
  linear_wide<Wide<16>, GateUpEpilogue, kAheadBytes>(params);
}
ULL_WIDE_KERNEL(ull_gate_up_32, Wide<32>) { linear_wide<Wide<32>, GateUpEpilogue, kAheadBytes>(params); }
ULL_WIDE_KERNEL(ull_gate_up_64, Wide<64>) { linear_wide<Wide<64>, GateUpEpilogue, kAheadBytes>(params); }

}  // namespace ull::gpu
