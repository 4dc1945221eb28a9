// Ranks what a DFlash head says of the tokens behind the root: of a block by its own logits, of nodes by those of the
// entry for their depth with the Markov term of their token. Penalties are those of the text so far.
#include "dflash/dflash.cuh"
#include "sampling/candidates.cuh"

namespace ull::gpu::sample {
namespace {

// The tokens of the text that the target's counts lack: at positions from State::counted up to the root's.
ULL_DEVICE void stage_text(Shared& shared, const DflashRankParams& params) {
  const int counted = params.state->counted, missing = params.round->base + 1 - counted, me = arch::thread();
  const int most = missing < kTreeTokens ? missing : kTreeTokens;
  const int count = params.state->sampling.penalises != 0 && most > 0 ? most : 0;
  if (me < count) shared.way[me] = params.text[counted + me];
  if (me == 0) shared.adjustment.way_count = count;
  arch::block_barrier();
}

}  // namespace

ULL_KERNEL(ull_dflash_rank, DflashRankParams, kThreads, 2) {
  arch::release_dependents();
  arch::wait_for_predecessor();
  const int index = arch::block_y();
  Round* round = params.round;
  const Ranked ranked(round);
  if (index >= ranked.count) return;
  Shared& shared = *reinterpret_cast<Shared*>(arch::shared_memory());
  const int depth = ranked.depth(round, index), entry = Ranked::entry(depth);
  Wish wish = wish_of(round, params.state, 0);
  wish.position = round->base + depth;
  const bool adjusts = stage_adjustment<false>(shared, round, params.state, 0);
  if (adjusts) stage_text(shared, params);
  const Request request{params.text_counts, shared, adjusts};
  const float* row = params.logits + static_cast<int64_t>(ranked.block ? entry : index) * kLogitRow;
  EmittedToken& drawn = round->drawn[ranked.first + index];
  if (!rank_row<kMapped>(params, request, wish, row, index, drawn) || arch::thread() != 0) return;
  if constexpr (!kMarkov && !kConfident) drawn.logprob = 1.0F;  // else ull_dflash_nodes has said it
  drawn.node = ranked.block ? entry : ranked.first + index;
}

}  // namespace ull::gpu::sample
