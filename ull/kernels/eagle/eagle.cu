// What an EAGLE-3 head (Li et al., arXiv 2503.01840) does before the attention of its one layer. An entry of a pass is
// made of the embedding of the token behind it and of a hidden state: entries before Round::first_draw have the
// target's, its taps through fc, and those behind them what the pass before has left for the entry above. So that
// entries keep their numbers, a pass repeats all of its proposal's; the layer's weights cost the same for one as
// for 64.
#include "eagle/eagle.cuh"
#include "linear/layer_shapes.cuh"
#include "linear/linear_narrow.cuh"
#include "linear/linear_wide.cuh"

namespace ull::gpu {
namespace {

using EagleQkv = LinearShape<kQkvWidth, 2 * kHidden, kWeightBits, false>;

template <int kTokens>
using NarrowFc = NarrowPlan<Fc, kTokens>;
template <int kTokens>
using WideFc = WidePlan<Fc, kTokens, false>;
template <int kTokens>
using NarrowQkv = NarrowPlan<EagleQkv, kTokens>;
template <int kTokens>
using WideQkv = WidePlan<EagleQkv, kTokens, true>;

}  // namespace

// The taps of an entry, one behind another, as f16 activations times kMlpScale, for their range. One block per entry.
ULL_KERNEL(ull_eagle_taps, TapsParams, kNormThreads, 2) { read_taps<kTargetHidden, kRead, kTapNorm>(params); }

// The entries' hidden states from their taps.
ULL_KERNEL(ull_eagle_fc_8, LinearParams, kNarrowThreads, NarrowFc<8>::kBlocks) {
  linear_narrow<NarrowFc<8>, TapsEpilogue>(params);
}
ULL_KERNEL(ull_eagle_fc_64, LinearParams, WideFc<64>::kBoundThreads, WideFc<64>::kBlocks) {
  linear_wide<WideFc<64>, TapsEpilogue>(params);
}

// The layer's input, the normed embedding and the normed hidden state side by side, and the residual. One block per
// entry.
ULL_KERNEL(ull_eagle_input, EagleInputParams, kNormThreads, 2) {
  arch::release_dependents();
  RowShare weight;
  load_norm_weight(weight, params.embedding_norm);
  arch::wait_for_predecessor();
  const Round* round = params.round;
  const int entry = arch::block_x();
  if (entry >= round->count) return;
  auto* sums = reinterpret_cast<float*>(arch::shared_memory());
  const RoundRow input{params.input, entry};
  RowShare row;
  load_embedding(row, params.table, round->tokens[entry]);
  normalise(row, weight, sums);
  store_input(input, 0, row);

  if (entry < round->first_draw) {
    load_row(row, params.states + entry * kResidualStride);
  } else {
    load_row(row, params.outputs + round->path[entry][round->depths[entry] - 1] * kResidualStride);
    if constexpr (kNormOutput) {
      load_norm_weight(weight, params.output_norm);
      normalise(row, weight, sums);
    }
  }
  float* residual = params.residual + entry * kResidualStride;
  const auto keep = [&] {
#pragma unroll
    for (int i = 0; i < kNormVectors; ++i) {
      if (row_column(i) < kHidden) arch::store_global(residual + row_column(i), row.vector[i]);
    }
  };
  if constexpr (!kNormBeforeResidual) keep();
  load_norm_weight(weight, params.hidden_norm);
  normalise(row, weight, sums);
  if constexpr (kNormBeforeResidual) keep();
  store_input(input, kHidden, row);
}

// Queries, keys and values of that; from 16 entries on ull_qkv_sum_* finishes them.
ULL_KERNEL(ull_eagle_qkv_8, LinearParams, kNarrowThreads, NarrowQkv<8>::kBlocks) {
  linear_narrow<NarrowQkv<8>, QkvEpilogue>(params);
}
ULL_KERNEL(ull_eagle_qkv_16, LinearParams, WideQkv<16>::kBoundThreads, WideQkv<16>::kBlocks) {
  linear_wide<WideQkv<16>, QkvEpilogue>(params);
}
ULL_KERNEL(ull_eagle_qkv_32, LinearParams, WideQkv<32>::kBoundThreads, WideQkv<32>::kBlocks) {
  linear_wide<WideQkv<32>, QkvEpilogue>(params);
}
ULL_KERNEL(ull_eagle_qkv_64, LinearParams, WideQkv<64>::kBoundThreads, WideQkv<64>::kBlocks) {
  linear_wide<WideQkv<64>, QkvEpilogue>(params);
}

}  // namespace ull::gpu
