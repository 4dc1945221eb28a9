// Ranks what the Medusa heads propose by the rule that will accept it: logit and bias over the temperature, plus the
// noise of the position that the head speaks of; at temperature 0 the logit and its bias alone. Penalties are those of
// the text so far. Filters are left out: they would take time, and a draft that is wrong costs time, never output.
#include "sampling/sample.cuh"

namespace ull::gpu::sample {

ULL_KERNEL(ull_medusa_rank, MedusaRankParams, kThreads, 2) {
  arch::release_dependents();
  arch::wait_for_predecessor();
  const int head = arch::block_y(), slices = arch::grid_x();
  Round* round = params.round;
  if (head >= round->count) return;
  Shared& shared = *reinterpret_cast<Shared*>(arch::shared_memory());
  Scratch& scratch = *static_cast<Scratch*>(params.scratch);
  const Wish wish = wish_of(round, params.state, head);
  // What a head speaks of stands behind tokens that nobody knows yet: of the text only what is there counts.
  const bool adjusts = stage_adjustment<false>(shared, round, params.state, head);

  const float* row = params.logits + static_cast<int64_t>(head) * kLogitRow;
  const Slice slice = slice_of(arch::block_x(), slices);
  best_of(shared, kMedusaRanks, scratch.alternatives[head * slices + arch::block_x()], [&](auto visit) {
    each_quad(shared, row, slice, load_chunk(row, slice.first, slice.last), adjusts, params.text_counts,
              [&](int token, const float (&)[4], const float (&biased)[4]) {
                float noise[4] = {};
                if (wish.sampled) gumbel_quad(wish.seed, wish.position, token / 4, noise);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                  const float score = wish.sampled ? biased[j] * wish.inverse_temperature + noise[j] : biased[j];
                  if (token + j < slice.last) visit(packed(score, token + j));
                }
              });
  });
  if (!is_last_block(shared, params.counters + head)) return;
  merge_lists(shared, scratch, head, slices, kMedusaRanks);
  EmittedToken& drawn = round->drawn[head];
  constexpr int kCount = kMedusaRanks < kVocabulary ? kMedusaRanks : kVocabulary;
  if (arch::thread() < kCount) {
    const uint64_t item = shared.sorted[arch::thread()];
    drawn.top[arch::thread()] = {token_of(item), value_of(item)};
  }
  if (arch::thread() == 0) {
    drawn.token = token_of(shared.sorted[0]);
    drawn.logprob = 0.0F;
    drawn.top_count = kCount;
    drawn.node = head;
  }
}

}  // namespace ull::gpu::sample
