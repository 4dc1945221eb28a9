// Ranks what an EAGLE-3 head says of the tokens behind the last entries of a pass. An entry stands one position before
// the node that it is made of, and predicts the one behind that.
#include "sampling/candidates.cuh"

namespace ull::gpu::sample {
namespace {

inline constexpr bool kMapped = ULL_EAGLE_MAPPED != 0;

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
  const int index = arch::block_y();
  Round* round = params.round;
  const int ranked = round->max_tokens < round->count ? round->max_tokens : round->count;
  if (index >= ranked) return;
  const int entry = round->count - ranked + index;
  Shared& shared = *reinterpret_cast<Shared*>(arch::shared_memory());
  Wish wish = wish_of(round, params.state, entry);
  ++wish.position;
  const bool adjusts = stage_adjustment<false>(shared, round, params.state, entry);
  if (adjusts) stage_way(shared, round, params.state, entry);
  const Request request{params.text_counts, shared, adjusts};
  const float* row = params.logits + static_cast<int64_t>(entry) * kLogitRow;
  EmittedToken& drawn = round->drawn[entry];
  if (!rank_row<kMapped>(params, request, wish, row, index, drawn) || arch::thread() != 0) return;
  drawn.logprob = 0.0F;
  drawn.node = entry;
}

}  // namespace ull::gpu::sample
