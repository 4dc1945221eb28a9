// RMSNorm of each token's residual row, for tiles of 16 tokens and more. One block per token.
#include "norm.cuh"

namespace ull::gpu {

ULL_DEVICE void norm_token(const NormParams& params) {
  arch::release_dependents();
  RowShare weight;
  load_norm_weight(weight, params.norm_weight);
  arch::wait_for_predecessor();
  const int token = arch::block_x();
  if (token >= token_count(params.round)) return;
  auto* sums = reinterpret_cast<float*>(arch::shared_memory());
  auto* output = static_cast<uint16_t*>(params.normed);
  norm_rows<1>(params.residual + token * kResidualStride, weight, 1, sums, [&](int, int column, arch::Vector2 four) {
    *reinterpret_cast<arch::Vector2*>(output + activation_index(token, column)) = four;
  });
}

ULL_KERNEL(ull_norm_16, NormParams, kNormThreads, 2) { norm_token(params); }
ULL_KERNEL(ull_norm_32, NormParams, kNormThreads, 2) { norm_token(params); }
ULL_KERNEL(ull_norm_64, NormParams, kNormThreads, 2) { norm_token(params); }

}  // namespace ull::gpu
