// From the logits of ull_head_scan_1 to the draw that ull_head_1 and the sampler would have made, bit for bit:
// ull_head_bounds finds what is certain of the best rows, ull_head_rescore computes the exact logits of all rows that
// may still be the best, as ull_head_1 computes them, and its last block draws from those and ends the round as
// ull_accept does. However many they are, up to all rows: only the time depends on it. Greedy draws and plain sampling
// of one node; what needs all logits exact (logprobs, top-k, top-p, min-p, biases, penalties) is for the other graph.
#include "head_scan/head_rescore.cuh"
#include "linear/rows.cuh"
#include "round/accept.cuh"

namespace ull::gpu::rescore {
namespace {

static_assert(kNormThreads == kThreads && kComputeWarps == kWarps && kSlices == kWarps);
static_assert(kHeadBits == 16);

using Head = LinearShape<kVocabulary, kHidden, 16, true>;

// ---- bounds --------------------------------------------------------------------------------------------------------

struct BoundsShared {
  uint64_t largest[2][kWarps];
  float square_sums[kWarps];  // of the residual, for the norm
  float normed_sums[kWarps];  // of what it became
};
static_assert(sizeof(BoundsShared) == 192);  // ull/gpu/geometry/head_scan.py

ULL_DEVICE float square(uint32_t pair, float sum) {
  const float low = arch::f16_to_f32(static_cast<uint16_t>(pair));
  const float high = arch::f16_to_f32(static_cast<uint16_t>(pair >> 16));
  return ::fmaf(high, high, ::fmaf(low, low, sum));
}

// Norms the residual as ull_head_1 does; one block leaves it for ull_head_rescore. -> |x|, rounded up.
ULL_DEVICE float norm_residual(BoundsShared& shared, const HeadScanParams& params, const RowShare& weight) {
  float sum = 0.0F;
  norm_rows<1>(
      weight, 1, shared.square_sums, [&](RowShare& row, int) { load_row(row, params.residual); },
      [&](int, int column, arch::Vector2 four) {
        sum = square(four.word[1], square(four.word[0], sum));
        if (arch::block_x() == 0) {
          auto* normed = static_cast<uint16_t*>(params.normed);
          *reinterpret_cast<arch::Vector2*>(normed + activation_index(0, column)) = four;
        }
      });
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) sum += arch::shuffle_xor(sum, mask);
  if (arch::lane() == 0) shared.normed_sums[arch::warp()] = sum;
  arch::block_barrier();
  float total = shared.normed_sums[0];
#pragma unroll
  for (int i = 1; i < kWarps; ++i) total += shared.normed_sums[i];
  return total > 0.0F ? arch::reciprocal(arch::reciprocal_sqrt(total)) * kNormSlack : total;  // 0 and NaN stay
}

// ---- rescore -------------------------------------------------------------------------------------------------------

struct RescoreShared {
  uint64_t largest[2][kWarps];
  float partial[kSlices][kRowUnit];  // the slices' sums of 16 candidates
  int32_t rows[kPassRows];           // candidates of a pass
  float exact[kPassRows];
  uint32_t count;
  uint32_t first;  // their place in the list
  uint32_t last_block;
  uint32_t padding;
};
static_assert(sizeof(RescoreShared) == 8848 &&
              sizeof(accept::Shared) <= sizeof(RescoreShared));  // ull/gpu/geometry/head_scan.py

inline constexpr int kAtOnce = 4;  // steps of two candidates whose weights a lane has on the way

// This lane's 16 bytes of a row's step, for mma j: the row's pairs of columns are words h and 2 + h, the other two
// belong to the row eight places away.
ULL_DEVICE arch::Vector4 load_row_step(const void* weights, int row, int step, int j) {
  const int64_t block = static_cast<int64_t>(row / kRowUnit) * Head::kSteps + step;
  const int at = j * 512 + (row % 8 * 4 + arch::lane() % 4) * 16;
  return arch::load_stream(static_cast<const unsigned char*>(weights) + block * Head::kStepBytes + at);
}

// The exact logits of candidates `first` .. first + 15 of the pass. Each has a row of one mma tile; where in the tile a
// row stands, and beside which others, does not change its sum. Slices, steps and sums are ull_head_1's.
ULL_DEVICE void rescore_tile(RescoreShared& shared, const HeadScanParams& params, const unsigned char* staged,
                             int first, int count) {
  const int g = arch::lane() / 4, t = arch::lane() % 4;
  const int low_row = shared.rows[smaller(first + g, count - 1)];
  const int high_row = shared.rows[smaller(first + g + 8, count - 1)];
  const bool low_half = low_row % kRowUnit >= 8, high_half = high_row % kRowUnit >= 8;
  const int end = Head::slice_begin(arch::warp() + 1);
  float sums[4] = {};
  for (int step = Head::slice_begin(arch::warp()); step < end; step += kAtOnce) {
    arch::Vector4 low[kAtOnce][2], high[kAtOnce][2];
#pragma unroll
    for (int s = 0; s < kAtOnce; ++s) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        low[s][j] = {};
        high[s][j] = {};
        if (step + s < end) {
          low[s][j] = load_row_step(params.weights, low_row, step + s, j);
          high[s][j] = load_row_step(params.weights, high_row, step + s, j);
        }
      }
    }
#pragma unroll
    for (int s = 0; s < kAtOnce; ++s) {
      if (step + s < end) {
        const arch::Vector4 activations = arch::load_shared(staged + (step + s) * kTokenStepBytes + t * 16);
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const arch::Vector4& one = low[s][j];
          const arch::Vector4& other = high[s][j];
          const uint32_t a[4] = {low_half ? one.word[1] : one.word[0], high_half ? other.word[1] : other.word[0],
                                 low_half ? one.word[3] : one.word[2], high_half ? other.word[3] : other.word[2]};
          const uint32_t b[2] = {activations.word[2 * j], activations.word[2 * j + 1]};
          arch::mma(sums, a, b);
        }
      }
    }
  }
  if (t == 0) {
    shared.partial[arch::warp()][g] = sums[0];
    shared.partial[arch::warp()][g + 8] = sums[2];
  }
  arch::block_barrier();
  const int me = arch::thread();
  if (me < kRowUnit && first + me < count) {
    float total = shared.partial[0][me];
#pragma unroll
    for (int slice = 1; slice < kSlices; ++slice) total += shared.partial[slice][me];
    shared.exact[first + me] = scaled(total, params.scale[shared.rows[first + me]], 0.0F);
  }
  arch::block_barrier();
}

// Whether a row may have the largest logit, or the largest score.
ULL_DEVICE bool may_win(const Interval& row, uint32_t least_logit, uint32_t least_score, const sample::Wish& wish,
                        int token) {
  if (!row.known || ordered(row.high) >= least_logit) return true;
  if (!wish.sampled) return false;
  constexpr float kMostNoise = 17.0F;
  if (is_far(row.high, wish.inverse_temperature)) return true;
  if (ordered(possible_score(row.high, wish.inverse_temperature, kMostNoise)) < least_score) return false;
  const float noise = sample::gumbel_of(wish.seed, wish.position, token);
  return ordered(possible_score(row.high, wish.inverse_temperature, noise)) >= least_score;
}

// Lists the candidates among the four rows that this thread looks at in a pass.
ULL_DEVICE void choose(RescoreShared& shared, const HeadScanParams& params, int pass, float norm, uint32_t least_logit,
                       uint32_t least_score, const sample::Wish& wish) {
  constexpr int kGranuleThreads = kGranule / 4;
  const int granule = (pass * kPassGranules + arch::thread() / kGranuleThreads) * arch::grid_x() + arch::block_x();
  const int row = granule * kGranule + arch::thread() % kGranuleThreads * 4;
  if (granule >= kGranules || row >= kVocabulary) return;
  const arch::Vector4 scanned = arch::load_global(params.logits + row);
  const arch::Vector4 bound = *reinterpret_cast<const arch::Vector4*>(params.bound + row);
#pragma unroll 1
  for (int j = 0; j < 4 && row + j < kVocabulary; ++j) {
    const uint32_t logit = j == 0   ? scanned.word[0]
                           : j == 1 ? scanned.word[1]
                           : j == 2 ? scanned.word[2]
                                    : scanned.word[3];
    const uint32_t most = j == 0 ? bound.word[0] : j == 1 ? bound.word[1] : j == 2 ? bound.word[2] : bound.word[3];
    const Interval exact = interval(arch::bits_float(logit), arch::bits_float(most), norm);
    if (may_win(exact, least_logit, least_score, wish, row + j)) {
      shared.rows[arch::atomic_add(&shared.count, 1U)] = row + j;
    }
  }
}

// visit(token, exact logit) for this thread's share of the list.
template <typename Visit>
ULL_DEVICE void each_exact(const Scratch& scratch, int count, Visit visit) {
  for (int i = 2 * arch::thread(); i < count; i += 2 * kThreads) {
    const arch::Vector4 two = arch::load_global(scratch.exact + i);
    visit(static_cast<int>(two.word[0]), arch::bits_float(two.word[1]));
    if (i + 1 < count) visit(static_cast<int>(two.word[2]), arch::bits_float(two.word[3]));
  }
}

// The sampler's draw, from those rows that can have a say in it.
ULL_DEVICE void draw(RescoreShared& shared, const Scratch& scratch, const sample::Wish& wish, EmittedToken& drawn) {
  const int count = static_cast<int>(arch::load_global(&scratch.counts).word[1]);
  const sample::Larger larger;
  uint64_t maximum = 0, best = 0;
  each_exact(scratch, count, [&](int token, float logit) {
    maximum = larger(maximum, sample::maximum_of(logit));
    best = larger(best, packed(logit, token));
  });
  block_largest(shared.largest, maximum, best);
  const bool valid = (maximum >> 32) == 0;
  if (valid && wish.sampled) {
    const float most = sample::unordered(static_cast<uint32_t>(maximum));
    uint64_t score = 0, unused = 0;
    each_exact(scratch, count, [&](int token, float logit) {
      const float adjusted = (logit - most) * wish.inverse_temperature;
      if (!(adjusted >= sample::kHopeless)) return;
      score = larger(score, packed(adjusted + sample::gumbel_of(wish.seed, wish.position, token), token));
    });
    block_largest(shared.largest, score, unused);
    best = score;
  }
  if (arch::thread() == 0) {
    drawn.token = valid ? sample::token_of(best) : -1;
    drawn.logprob = 0.0F;
    drawn.top_count = 0;
    drawn.node = 0;
  }
}

}  // namespace

ULL_KERNEL(ull_head_bounds, HeadScanParams, kThreads, 2) {
  arch::release_dependents();
  BoundsShared& shared = *reinterpret_cast<BoundsShared*>(arch::shared_memory());
  RowShare norm_weight;
  load_norm_weight(norm_weight, params.norm_weight);
  arch::wait_for_predecessor();
  if (!sample::is_drawn(params.round, 0)) return;
  const sample::Wish wish = sample::wish_of(params.round, params.state, 0);
  const float norm = norm_residual(shared, params, norm_weight);

  const sample::Slice slice = sample::slice_of(arch::block_x(), arch::grid_x());
  uint64_t logit = 0, score = 0;
  const sample::Larger larger;
  for (int row = slice.first + 4 * arch::thread(); row < slice.last; row += 4 * kThreads) {
    const arch::Vector4 scanned = arch::load_global(params.logits + row);
    const arch::Vector4 bound = *reinterpret_cast<const arch::Vector4*>(params.bound + row);
    float noise[4] = {};
    if (wish.sampled) sample::gumbel_quad(wish.seed, wish.position, row / 4, noise);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const Interval exact = interval(arch::bits_float(scanned.word[j]), arch::bits_float(bound.word[j]), norm);
      if (row + j >= slice.last || !exact.known) continue;
      logit = larger(logit, ordered(exact.low));
      if (wish.sampled && !is_far(exact.low, wish.inverse_temperature)) {
        score = larger(score, ordered(certain_score(exact.low, wish.inverse_temperature, noise[j])));
      }
    }
  }
  block_largest(shared.largest, logit, score);
  if (arch::thread() == 0) {
    Scratch& scratch = *static_cast<Scratch*>(params.scratch);
    scratch.certain[arch::block_x()] = {static_cast<uint32_t>(logit), static_cast<uint32_t>(score), {}};
    if (arch::block_x() == 0) {
      scratch.counts = {};
      scratch.found = {norm, arch::grid_x()};
    }
  }
}

ULL_KERNEL(ull_head_rescore, HeadScanParams, kThreads, 2) {
  arch::release_dependents();
  unsigned char* staged = arch::shared_memory();
  RescoreShared& shared = *reinterpret_cast<RescoreShared*>(staged + Head::kSteps * kTokenStepBytes);
  arch::wait_for_predecessor();
  if (!sample::is_drawn(params.round, 0)) {  // skipped: there is nothing but the end
    if (arch::block_x() == 0) {
      accept::end_round<kThreads>(params.accept, *reinterpret_cast<accept::Shared*>(&shared));
    }
    return;
  }
  const sample::Wish wish = sample::wish_of(params.round, params.state, 0);
  Scratch& scratch = *static_cast<Scratch*>(params.scratch);

  const arch::Vector4 found = arch::load_global(&scratch.found);
  const float norm = arch::bits_float(found.word[0]);
  const int slices = static_cast<int>(found.word[1]);
  for (int i = arch::thread(); i < Head::kSteps * kTokenStepBytes / 16; i += kThreads) {
    const auto* normed = static_cast<const unsigned char*>(params.normed);
    const arch::Vector4 v = arch::load_global(normed + static_cast<int64_t>(i / 4) * kActivationStepBytes + i % 4 * 16);
    arch::store_shared(staged + i * 16, v);
  }
  uint64_t logit = 0, score = 0;
  for (int i = arch::thread(); i < slices; i += kThreads) {
    const arch::Vector4 part = arch::load_global(&scratch.certain[i]);
    logit = sample::Larger()(logit, part.word[0]);
    score = sample::Larger()(score, part.word[1]);
  }
  block_largest(shared.largest, logit, score);

  for (int pass = 0; pass * kPassGranules * arch::grid_x() + arch::block_x() < kGranules; ++pass) {
    if (arch::thread() == 0) shared.count = 0;
    arch::block_barrier();
    choose(shared, params, pass, norm, static_cast<uint32_t>(logit), static_cast<uint32_t>(score), wish);
    arch::block_barrier();
    const int count = static_cast<int>(shared.count);
    if (arch::thread() == 0 && count > 0) shared.first = arch::atomic_add(&scratch.counts.listed, shared.count);
    for (int first = 0; first < count; first += kRowUnit) rescore_tile(shared, params, staged, first, count);
    for (int i = arch::thread(); i < count; i += kThreads) {
      scratch.exact[shared.first + static_cast<uint32_t>(i)] = {shared.rows[i], shared.exact[i]};
    }
    arch::block_barrier();
  }
  if (!sample::is_last_block(shared, &scratch.counts.finished)) return;
  draw(shared, scratch, wish, params.round->drawn[0]);
  arch::block_barrier();
  accept::end_round<kThreads>(params.accept, *reinterpret_cast<accept::Shared*>(&shared));
}

}  // namespace ull::gpu::rescore
