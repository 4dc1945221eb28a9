// RMSNorm of each token's residual row, where the linear layer behind it does not do that itself; from 16 tokens on
// after what the layer before left to be added.
//
// A token has a cluster of small blocks, which tell each other their warps' sums. So one fits beside a block of the
// layer before and one of the layer behind, whose weights are on their way meanwhile.
#include "linear/rows.cuh"

namespace ull::gpu {

inline constexpr int kNormCluster = 4;                                 // blocks of a token
inline constexpr int kNormBlockThreads = kNormThreads / kNormCluster;  // each has the threads behind its rank's
// As if so many blocks shared a multiprocessor, a thread has 128 registers, or 80: gate_up's and the head's blocks of
// 32 tokens leave no more of a quarter of it beside o's and down's.
template <int kTokens>
inline constexpr int kNormBlocks = kTokens == 32 && kNormVectors <= 4 ? 12 : 8;
template <int kTokens>
inline constexpr int kVectorsAtOnce = kNormVectors <= 4 && kTokens != 32 ? 2 : 1;  // on their way together
inline constexpr int kNormSumBytes = kNormWarps * sizeof(float);

template <int kTokens>
ULL_DEVICE void norm_token(const NormParams& params) {
  arch::release_dependents();
  const int rank = arch::cluster_rank(), thread = rank * kNormBlockThreads + arch::thread();
  auto* sums = reinterpret_cast<float*>(arch::shared_memory());  // of all warps of the cluster
  auto* arrived = reinterpret_cast<arch::Barrier*>(arch::shared_memory() + kNormSumBytes);
  if (arch::thread() == 0) {
    arch::barrier_init(arrived, 1);
    arch::fence_barrier_init();
    arch::barrier_arrive_expect(arrived, kNormSumBytes);
  }
  RowShare weight;
  load_norm_weight(weight, params.norm_weight, thread);
  arch::cluster_start();
  const int token = arch::block_x() / kNormCluster;
  const int count = token_count(params.round);
  arch::wait_for_predecessor();
  if (token >= count) return;  // with the whole cluster
  const KeepTaps<kTokens> keep(params.taps, params.round, count);
  RowShare row;
  if (kTokens > kGroupTokens && params.partial != nullptr) {
    load_finished_row<kTreeTokens, kVectorsAtOnce<kTokens>>(params, row, token, thread);
  } else {
    load_row(row, params.residual + token * kResidualStride, thread);
  }
  const float sum = warp_square_sum(row);
  if (arch::lane() < kNormCluster) arch::store_async_in(arch::lane(), sums + thread / 32, sum, arrived);
  arch::barrier_wait(arrived, 0);
  const float inverse = inverse_rms(sums);
  auto* output = static_cast<uint16_t*>(params.normed);
#pragma unroll
  for (int i = 0; i < kNormVectors; ++i) {
    const int column = row_column(i, thread);
    if (column < round_up(kHidden, kColumnUnit)) {
      const arch::Vector2 four = normed(row.vector[i], weight.vector[i], inverse);
      uint16_t* to = output + round_index<kTokens>(token, column);
      if constexpr (kInCores<kTokens>) {
#pragma unroll
        for (int j = 0; j < 2; ++j) *reinterpret_cast<uint32_t*>(to + j * kPairStride<kTokens>) = four.word[j];
      } else {
        *reinterpret_cast<arch::Vector2*>(to) = four;
      }
      keep(token, column, row.vector[i]);
    }
  }
}

ULL_ROW_CLUSTER_KERNEL(ull_norm_1, NormParams, kNormBlockThreads, kNormBlocks<1>, kNormCluster) {
  norm_token<1>(params);
}
ULL_ROW_CLUSTER_KERNEL(ull_norm_2, NormParams, kNormBlockThreads, kNormBlocks<2>, kNormCluster) {
  norm_token<2>(params);
}
ULL_ROW_CLUSTER_KERNEL(ull_norm_4, NormParams, kNormBlockThreads, kNormBlocks<4>, kNormCluster) {
  norm_token<4>(params);
}
ULL_ROW_CLUSTER_KERNEL(ull_norm_8, NormParams, kNormBlockThreads, kNormBlocks<8>, kNormCluster) {
  norm_token<8>(params);
}
ULL_ROW_CLUSTER_KERNEL(ull_norm_16, NormParams, kNormBlockThreads, kNormBlocks<16>, kNormCluster) {
  norm_token<16>(params);
}
ULL_ROW_CLUSTER_KERNEL(ull_norm_32, NormParams, kNormBlockThreads, kNormBlocks<32>, kNormCluster) {
  norm_token<32>(params);
}
ULL_ROW_CLUSTER_KERNEL(ull_norm_64, NormParams, kNormBlockThreads, kNormBlocks<64>, kNormCluster) {
  norm_token<64>(params);
}

}  // namespace ull::gpu
