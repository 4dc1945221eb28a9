// ull_sample_plain draws the token of a round of one whose request asks for the best score alone: greedy, or with
// temperature, noise and min-p, but without filters that look at all tokens together, biases, penalties and logprobs.
// The head has found the maxima (head.cu), so that one kernel does what ull_sample_scan, ull_sample_draw,
// ull_sample_filter and ull_accept do for any request, bit for bit: the last block ends the round.
#include "round/accept.cuh"
#include "sampling/sample.cuh"

namespace ull::gpu::sample {
namespace {

// Of Shared the part before the biases; behind it accept's.
constexpr int kPlainBytes = ULL_OFFSETOF(Shared, biases);
static_assert(kPlainBytes == 336);  // ull/gpu/geometry/sampling.py

// The best score of this block's slice.
ULL_DEVICE uint64_t best_score(Shared& shared, const float* row, Slice slice, const Loaded& first, float maximum,
                               const Wish& wish) {
  uint64_t best = 0, unused = 0;
  each_quad(shared, row, slice, first, false, nullptr, [&](int token, const float (&raw)[4], const float (&)[4]) {
    float adjusted[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) adjusted[j] = (raw[j] - maximum) * wish.inverse_temperature;
    best = score_quad(best, adjusted, token, slice.last - token, wish);
  });
  block_reduce(shared, best, Larger(), unused, Larger());
  return best;
}

}  // namespace

ULL_KERNEL(ull_sample_plain, PlainParams, kThreads, 2) {
  arch::release_dependents();
  arch::wait_for_predecessor();
  Shared& shared = *reinterpret_cast<Shared*>(arch::shared_memory());
  Round* round = params.sample.round;
  const int slices = arch::grid_x();
  if (is_drawn(round, 0)) {
    const Wish wish = wish_of(round, params.sample.state, 0);
    if (!wish.sampled && arch::block_x() > 0) return;  // greedy: the head knows
    Scratch& scratch = *static_cast<Scratch*>(params.sample.scratch);
    const float* row = params.sample.logits;
    const Slice slice = slice_of(arch::block_x(), slices);
    Loaded first;
    if (wish.sampled) first = load_chunk(row, slice.first, slice.last);
    const Scanned scanned = merge_scans(shared, scratch, 0, params.parts);
    int token = scanned.valid ? scanned.token : -1;
    if (scanned.valid && wish.sampled) {
      uint64_t best = best_score(shared, row, slice, first, scanned.best, wish), unused = 0;
      if (arch::thread() == 0) scratch.draws[arch::block_x()].best = best;
      if (!is_last_block(shared, params.counters)) return;
      best = 0;
      for (int i = arch::thread(); i < slices; i += kThreads) {
        best = Larger()(best, low_half(arch::load_global(&scratch.draws[i])));
      }
      block_reduce(shared, best, Larger(), unused, Larger());
      token = token_of(best);
    } else if (arch::block_x() > 0) {
      return;
    }
    EmittedToken& drawn = round->drawn[0];
    if (arch::thread() == 0) {
      drawn.token = token;
      drawn.logprob = 0.0F;
      drawn.top_count = 0;
      drawn.node = 0;
    }
    arch::block_barrier();
  } else if (arch::block_x() > 0) {
    return;  // skipped, or a prefill: there is nothing but the end
  }
  accept::end_round<kThreads>(params.accept, *reinterpret_cast<accept::Shared*>(arch::shared_memory() + kPlainBytes));
}

}  // namespace ull::gpu::sample
