// Logits of the normed residual, in f32.
#include "rows.cuh"

namespace ull::gpu {

using Head = LinearShape<kVocabulary, kHidden, kHeadBits, true>;
using HeadEpilogue = StoreRows<kVocabulary>;

template <int kTokens>
using Plan = LinearPlan<Head, kTokens>;

ULL_KERNEL(ull_head_1, LinearParams, kLinearThreads, Plan<1>::kBlocks) { linear<Plan<1>, HeadEpilogue>(params); }
ULL_KERNEL(ull_head_8, LinearParams, kLinearThreads, Plan<8>::kBlocks) { linear<Plan<8>, HeadEpilogue>(params); }
ULL_KERNEL(ull_head_16, LinearParams, kLinearThreads, Plan<16>::kBlocks) { linear<Plan<16>, HeadEpilogue>(params); }
ULL_KERNEL(ull_head_32, LinearParams, kLinearThreads, Plan<32>::kBlocks) { linear<Plan<32>, HeadEpilogue>(params); }
ULL_KERNEL(ull_head_64, LinearParams, kLinearThreads, Plan<64>::kBlocks) { linear<Plan<64>, HeadEpilogue>(params); }

}  // namespace ull::gpu
