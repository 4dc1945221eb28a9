// What the kernels that rank a head's candidates by the rule that will accept them share, where a token of the head's
// may be one of the target's by another number: the target's State, text and noise go by that. As ull_medusa_rank:
// logit, penalties and bias over the temperature, plus the noise of the token's position; at temperature 0 without.
#pragma once

#include "sampling/sample.cuh"

namespace ull::gpu::sample {

// How a token's logit is changed: as stage_adjustment() and adjust_quad(), for one token after another.
struct Request {
  const uint32_t* text_counts;
  Shared& shared;
  bool adjusts;

  ULL_DEVICE float adjusted(float logit, int token) const {
    if (!adjusts) return logit;
    const Adjustment& adjustment = shared.adjustment;
    if (adjustment.penalises) {
      uint32_t added = 0;
      for (int i = 0; i < adjustment.way_count; ++i) added += shared.way[i] == token ? 1 : 0;
      logit = penalised(shared, logit, text_counts[token], added);
    }
    for (int i = 0; i < adjustment.bias_count; ++i) {
      if (shared.biases[i].token == token) logit += shared.biases[i].bias;
    }
    return logit;
  }
};

// Ranks a row of logits, this block its slice of it: true for the last of the row's blocks to come here, which has told
// `drawn` the candidates. index: of the row among those of the launch. params: EagleRankParams, or what has the same
// names.
template <bool kMapped, typename Params>
ULL_DEVICE bool rank_row(const Params& params, const Request& request, const Wish& wish, const float* row, int index,
                         EmittedToken& drawn) {
  Shared& shared = request.shared;
  Scratch& scratch = *static_cast<Scratch*>(params.scratch);
  const int slices = arch::grid_x();
  const Slice slice = slice_of(arch::block_x(), slices);
  best_of(shared, kMedusaRanks, scratch.alternatives[index * slices + arch::block_x()], [&](auto visit) {
#pragma unroll 1
    for (int own = slice.first + arch::thread(); own < slice.last; own += kThreads) {
      const int token = kMapped ? params.names[own] : own;
      const float logit = request.adjusted(row[own], token);
      const float score =
          wish.sampled ? logit * wish.inverse_temperature + gumbel_of(wish.seed, wish.position, token) : logit;
      visit(packed(score, token));
    }
  });
  if (!is_last_block(shared, params.counters + index)) return false;
  merge_lists(shared, scratch, index, slices, kMedusaRanks);
  constexpr int kCount = kMedusaRanks < kVocabulary ? kMedusaRanks : kVocabulary;
  if (arch::thread() < kCount) {
    const uint64_t item = shared.sorted[arch::thread()];
    drawn.top[arch::thread()] = {token_of(item), value_of(item)};
  }
  if (arch::thread() == 0) {
    drawn.token = token_of(shared.sorted[0]);
    drawn.top_count = kCount;
  }
  return true;
}

}  // namespace ull::gpu::sample
