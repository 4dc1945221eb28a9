// Queries, keys and values of the normed residual, in f32, with bias.
#include "linear/layer_shapes.cuh"
#include "linear/linear_narrow.cuh"
#include "linear/linear_wide.cuh"

namespace ull::gpu {

template <int kTokens>
using Narrow = NarrowPlan<Qkv, kTokens>;
template <int kTokens>
using Wide = WidePlan<Qkv, kTokens, true>;

ULL_KERNEL(ull_qkv_1, LinearParams, kNarrowThreads, Narrow<1>::kBlocks) {
  linear_narrow<Narrow<1>, QkvEpilogue>(params);
}
ULL_KERNEL(ull_qkv_2, LinearParams, kNarrowThreads, Narrow<2>::kBlocks) {
  linear_narrow<Narrow<2>, QkvEpilogue>(params);
}
ULL_KERNEL(ull_qkv_4, LinearParams, kNarrowThreads, Narrow<4>::kBlocks) {
  linear_narrow<Narrow<4>, QkvEpilogue>(params);
}
ULL_KERNEL(ull_qkv_8, LinearParams, kNarrowThreads, Narrow<8>::kBlocks) {
  linear_narrow<Narrow<8>, QkvEpilogue>(params);
}
ULL_KERNEL(ull_qkv_16, LinearParams, Wide<16>::kBoundThreads, Wide<16>::kBlocks) {
  linear_wide<Wide<16>, QkvEpilogue>(params);
}
ULL_WIDE_KERNEL(ull_qkv_32, Wide<32>) { linear_wide<Wide<32>, QkvEpilogue>(params); }
ULL_WIDE_KERNEL(ull_qkv_64, Wide<64>) { linear_wide<Wide<64>, QkvEpilogue>(params); }

// One thread per four rows of a token.
ULL_DEVICE void qkv_sum(const LinearParams& params) {
  arch::release_dependents();
  const int token = arch::block_x();
  const int row = 4 * (arch::block_y() * kNormThreads + arch::thread());
  const int count = token_count(params.round);
  arch::wait_for_predecessor();
  if (token >= count || row >= Qkv::kPaddedRows) return;
  SliceSums sums;
  sums.load<Qkv::kPaddedRows>(params.partial, token, row);
  const int item = row % kRowUnit / 4;
  QkvEpilogue::finish(params, load_row_scale(params.scale, params.bias, row), row / kRowUnit, token, item,
                      [&](int) { return sums.total(); });
}

ULL_KERNEL(ull_qkv_sum_16, LinearParams, kNormThreads, 4) { qkv_sum(params); }
ULL_KERNEL(ull_qkv_sum_32, LinearParams, kNormThreads, 4) { qkv_sum(params); }
ULL_KERNEL(ull_qkv_sum_64, LinearParams, kNormThreads, 4) { qkv_sum(params); }

}  // namespace ull::gpu
