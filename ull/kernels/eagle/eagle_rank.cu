// Ranks what an EAGLE-3 head says of the tokens behind the last entries of a pass, by the rule that will accept them:
// as ull_medusa_rank, but a token of the head's is one of the target's by another number, and the target's State, text
// and noise go by that. An entry stands one position before the node that it is made of, and predicts the one behind
// that.
#include "sampling/sample.cuh"

namespace ull::gpu::sample {
namespace {

inline constexpr bool kMapped = ULL_EAGLE_MAPPED != 0;

// How a token's logit is changed: as stage_adjustment() and adjust_quad(), for one token after another.
struct Request {
  const EagleRankParams& params;
  Shared& shared;
  bool adjusts;

  ULL_DEVICE float adjusted(float logit, int token) const {
    if (!adjusts) return logit;
    const Adjustment& adjustment = shared.adjustment;
    if (adjustment.penalises) {
      uint32_t added = 0;
      for (int i = 0; i < adjustment.way_count; ++i) added += shared.way[i] == token ? 1 : 0;
      logit = penalised(shared, logit, params.text_counts[token], added);
    }
    for (int i = 0; i < adjustment.bias_count; ++i) {
      if (shared.biases[i].token == token) logit += shared.biases[i].bias;
    }
    return logit;
  }
};

// The tokens on an entry's way that the target's counts lack: those at positions from State::counted on. An entry's
// token stands at the position behind the entry.
ULL_DEVICE void stage_way(Shared& shared, const Round* round, const State* state, int entry) {
  const int depth = round->depths[entry], me = arch::thread();
  const int missing = state->counted - (round->base + 1);
  const int first = missing > 0 ? missing : 0;
  const int count = state->sampling.penalises != 0 && depth >= first ? depth + 1 - first : 0;
  if (me < count) shared.way[me] = round->tokens[round->path[entry][first + me]];
  if (me == 0) shared.adjustment.way_count = count;
  arch::block_barrier();
}

}  // namespace

ULL_KERNEL(ull_eagle_rank, EagleRankParams, kThreads, 2) {
  arch::release_dependents();
  arch::wait_for_predecessor();
  const int index = arch::block_y(), slices = arch::grid_x();
  Round* round = params.round;
  const int ranked = round->max_tokens < round->count ? round->max_tokens : round->count;
  if (index >= ranked) return;
  const int entry = round->count - ranked + index;
  Shared& shared = *reinterpret_cast<Shared*>(arch::shared_memory());
  Scratch& scratch = *static_cast<Scratch*>(params.scratch);
  Wish wish = wish_of(round, params.state, entry);
  ++wish.position;
  const bool adjusts = stage_adjustment<false>(shared, round, params.state, entry);
  if (adjusts) stage_way(shared, round, params.state, entry);
  const Request request{params, shared, adjusts};

  const float* row = params.logits + static_cast<int64_t>(entry) * kLogitRow;
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
  if (!is_last_block(shared, params.counters + index)) return;
  merge_lists(shared, scratch, index, slices, kMedusaRanks);
  EmittedToken& drawn = round->drawn[entry];
  constexpr int kCount = kMedusaRanks < kVocabulary ? kMedusaRanks : kVocabulary;
  if (arch::thread() < kCount) {
    const uint64_t item = shared.sorted[arch::thread()];
    drawn.top[arch::thread()] = {token_of(item), value_of(item)};
  }
  if (arch::thread() == 0) {
    drawn.token = token_of(shared.sorted[0]);
    drawn.logprob = 0.0F;
    drawn.top_count = kCount;
    drawn.node = entry;
  }
}

}  // namespace ull::gpu::sample
