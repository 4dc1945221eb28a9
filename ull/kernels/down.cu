// The MLP's down projection, added to the residual.
#include "rows.cuh"

namespace ull::gpu {

using Down = LinearShape<kHidden, kIntermediate, kWeightBits, false>;
using DownEpilogue = AddRows<static_cast<int>(1.0F / kMlpScale)>;

template <int kTokens>
using Plan = LinearPlan<Down, kTokens>;

ULL_KERNEL(ull_down_1, LinearParams, kLinearThreads, Plan<1>::kBlocks) { linear<Plan<1>, DownEpilogue>(params); }
ULL_KERNEL(ull_down_8, LinearParams, kLinearThreads, Plan<8>::kBlocks) { linear<Plan<8>, DownEpilogue>(params); }
ULL_KERNEL(ull_down_16, LinearParams, kLinearThreads, Plan<16>::kBlocks) { linear<Plan<16>, DownEpilogue>(params); }
ULL_KERNEL(ull_down_32, LinearParams, kLinearThreads, Plan<32>::kBlocks) { linear<Plan<32>, DownEpilogue>(params); }
ULL_KERNEL(ull_down_64, LinearParams, kLinearThreads, Plan<64>::kBlocks) { linear<Plan<64>, DownEpilogue>(params); }

}  // namespace ull::gpu
