// RMSNorm of each token's residual row, where the linear layer behind it does not do that itself; from 16 tokens on
// after what the layer before left to be added. One block per token.
#include "linear/rows.cuh"

namespace ull::gpu {

template <int kTokens>
ULL_DEVICE void norm_token(const NormParams& params) {
  arch::release_dependents();
  RowShare weight;
  load_norm_weight(weight, params.norm_weight);
  arch::wait_for_predecessor();
  const int token = arch::block_x();
  const int count = token_count(params.round);
  if (token >= count) return;
  const KeepTaps<kTokens> keep(params.taps, params.round, count);
  auto* sums = reinterpret_cast<float*>(arch::shared_memory());
  auto* output = static_cast<uint16_t*>(params.normed);
  norm_rows<1>(
      weight, 1, sums,
      [&](RowShare& row, int) {
        if (params.partial != nullptr) {
          load_finished_row<kTreeTokens>(params, row, token);
        } else {
          load_row(row, params.residual + token * kResidualStride);
        }
      },
      [&](int, int column, arch::Vector2 four) {
        uint16_t* to = output + round_index<kTokens>(token, column);
        if constexpr (kInCores<kTokens>) {
#pragma unroll
          for (int i = 0; i < 2; ++i) *reinterpret_cast<uint32_t*>(to + i * kPairStride<kTokens>) = four.word[i];
        } else {
          *reinterpret_cast<arch::Vector2*>(to) = four;
        }
      },
      [&](int, int column, const arch::Vector4& four) { keep(token, column, four); });
}

ULL_KERNEL(ull_norm_1, NormParams, kNormThreads, 2) { norm_token<1>(params); }
ULL_KERNEL(ull_norm_2, NormParams, kNormThreads, 2) { norm_token<2>(params); }
ULL_KERNEL(ull_norm_4, NormParams, kNormThreads, 2) { norm_token<4>(params); }
ULL_KERNEL(ull_norm_8, NormParams, kNormThreads, 2) { norm_token<8>(params); }
ULL_KERNEL(ull_norm_16, NormParams, kNormThreads, 2) { norm_token<16>(params); }
ULL_KERNEL(ull_norm_32, NormParams, kNormThreads, 2) { norm_token<32>(params); }
ULL_KERNEL(ull_norm_64, NormParams, kNormThreads, 2) { norm_token<64>(params); }

}  // namespace ull::gpu
