// Queries, keys and values of the normed residual, in f32, with bias.
#include "rows.cuh"

namespace ull::gpu {

using Qkv = LinearShape<kQkvWidth, kHidden, kWeightBits, true>;
using QkvEpilogue = StoreRows<kQkvWidth>;

template <int kTokens>
using Plan = LinearPlan<Qkv, kTokens>;

ULL_KERNEL(ull_qkv_1, LinearParams, kLinearThreads, Plan<1>::kBlocks) { linear<Plan<1>, QkvEpilogue>(params); }
ULL_KERNEL(ull_qkv_8, LinearParams, kLinearThreads, Plan<8>::kBlocks) { linear<Plan<8>, QkvEpilogue>(params); }
ULL_KERNEL(ull_qkv_16, LinearParams, kLinearThreads, Plan<16>::kBlocks) { linear<Plan<16>, QkvEpilogue>(params); }
ULL_KERNEL(ull_qkv_32, LinearParams, kLinearThreads, Plan<32>::kBlocks) { linear<Plan<32>, QkvEpilogue>(params); }
ULL_KERNEL(ull_qkv_64, LinearParams, kLinearThreads, Plan<64>::kBlocks) { linear<Plan<64>, QkvEpilogue>(params); }

}  // namespace ull::gpu
