// Attention of one token that forgets what it has to wait for, for tests/kernels/test_kernel_attention.py.
#include "attention/attention_one.cuh"

namespace ull::gpu {

// It reads qkv before the wait.
ULL_KERNEL(attend_early, AttentionParams, kAttentionThreads, 1) {
  arch::release_dependents();
  AttentionOfOne<false> block(params, {arch::block_x(), arch::grid_x(), arch::block_y()});
  if (block.request()) block.finish();
  arch::wait_for_predecessor();
}

}  // namespace ull::gpu
