// Logits of one token from the FP8 copy of the lm_head: half the bytes of ull_head_1's, and each within a known
// distance of what that would have said. head_rescore.cu finds with them what ull_head_1 and the sampler would draw.
#include "linear/linear_narrow.cuh"

namespace ull::gpu {

using HeadScan = NarrowPlan<LinearShape<kVocabulary, kHidden, 8, true>, 1>;

ULL_KERNEL(ull_head_scan_1, LinearParams, kNarrowThreads, HeadScan::kBlocks) {
  linear_narrow<HeadScan, StoreRows<kVocabulary>>(params);
}

}  // namespace ull::gpu
