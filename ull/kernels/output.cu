// The attention's output projection, added to the residual.
#include "rows.cuh"

namespace ull::gpu {

using Output = LinearShape<kHidden, kAttentionWidth, kWeightBits, false>;
using OutputEpilogue = AddRows<1>;

template <int kTokens>
using Plan = LinearPlan<Output, kTokens>;

ULL_KERNEL(ull_o_1, LinearParams, kLinearThreads, Plan<1>::kBlocks) { linear<Plan<1>, OutputEpilogue>(params); }
ULL_KERNEL(ull_o_8, LinearParams, kLinearThreads, Plan<8>::kBlocks) { linear<Plan<8>, OutputEpilogue>(params); }
ULL_KERNEL(ull_o_16, LinearParams, kLinearThreads, Plan<16>::kBlocks) { linear<Plan<16>, OutputEpilogue>(params); }
ULL_KERNEL(ull_o_32, LinearParams, kLinearThreads, Plan<32>::kBlocks) { linear<Plan<32>, OutputEpilogue>(params); }
ULL_KERNEL(ull_o_64, LinearParams, kLinearThreads, Plan<64>::kBlocks) { linear<Plan<64>, OutputEpilogue>(params); }

}  // namespace ull::gpu
