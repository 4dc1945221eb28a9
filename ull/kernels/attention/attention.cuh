// Attention of a round: every node over the pages and its own path, or of a block (kBlock) over the pages and all
// nodes, which stand one behind another. See attention_plan.cuh for who does
// what, attention_heads.cuh for the round's own queries, keys and values, and attention_{scores,values,merge}.cuh for
// the steps of a split. While a split is worked on, the next one's keys are on their way into registers as soon as its
// own have been used, and values likewise into shared memory.
//
// Nothing waits for another block: the blocks whose splits reach `base` compute the round's keys and values themselves.
//
// All that earlier rounds and begin() wrote is asked for before the wait for qkv, the first split's keys and values
// among it: no kernel of a round of several nodes writes to the pages but the commit.
#pragma once

#include <cstdint>

#include "arch.cuh"
#include "attention/attention_ahead.cuh"
#include "attention/attention_heads.cuh"
#include "attention/attention_merge.cuh"
#include "attention/attention_plan.cuh"
#include "attention/attention_scores.cuh"
#include "attention/attention_values.cuh"
#include "attention/kv_format.cuh"
#include "model.cuh"

namespace ull::gpu {

// What one block does.
template <int kTile>
struct Attention {
  using Shared = AttentionShared<kTile>;
  static constexpr int kTiles = Shared::kStepTiles;
  // The first split's keys of bf16 become f16 before the wait. A DFlash head's kernel for few entries would spill.
  static constexpr bool kPreparesEarly = !(kBlock && Shared::kNarrow);

  const AttentionParams& params;
  const AttentionPlan& plan;
  const AttentionShare& share;
  float key_scale;

  // Rows [row, rows) of the block's, up to kStepRows, in a split.
  struct Step {
    int split;
    int start;  // the split's first position
    int row;
    int rows;

    // Whether there are rows in the upper or lower half of an m-tile.
    ULL_DEVICE bool has(int tile, int half) const { return row + 16 * tile + 8 * half < rows; }
  };

  ULL_DEVICE const unsigned char* page_keys(uint32_t page) const { return head_of_page(params, share.kv_head, page); }
  ULL_DEVICE const unsigned char* page_values(uint32_t page) const { return page_keys(page) + kKvLayerBytes / 2; }

  // pages: the split's four.
  ULL_DEVICE void load_split_keys(KeyFragment& keys, int split, const arch::Vector4& pages) const {
    if (!plan.in_pages(split * kSplitTokens + arch::warp() * kHalf, kHalf)) return;
    load_keys(keys, page_keys(word_of(pages, arch::warp() / 2)), arch::warp() % 2);
  }

  ULL_DEVICE void prepare_split_keys(KeyFragment& keys, int split) const {
    if (plan.in_pages(split * kSplitTokens + arch::warp() * kHalf, kHalf)) prepare(keys);
  }

  // Threads 0 to 3 ask for a page each, and for nothing where no node looks: `arrived` completes in every split.
  ULL_DEVICE void copy_split_values(int split, const arch::Vector4& pages) const {
    const int page = arch::thread();
    if (page >= kSplitTiles) return;
    arch::Barrier* barrier = arrived() + page;
    if (!plan.in_pages(split * kSplitTokens + page * kPageTokens, kPageTokens)) return arch::barrier_arrive(barrier);
    arch::barrier_arrive_expect(barrier, kKvHeadBytes);
    arch::bulk_copy_stream(arch::shared_memory() + Shared::kValue + page * kKvHeadBytes,
                           page_values(word_of(pages, page)), kKvHeadBytes, barrier);
  }
  ULL_DEVICE arch::Barrier* arrived() const {
    return reinterpret_cast<arch::Barrier*>(arch::shared_memory() + Shared::kArrived);
  }

  // Scores of the warp's 32 positions with the keys in pages, and of all nodes with each other.
  ULL_DEVICE void multiply(ScoreFragment<kTiles>& scores, const KeyFragment& keys, const Step& step) const {
    const int g = arch::lane() / 4;
    const unsigned char* query = arch::shared_memory() + Shared::kQuery + (step.row + g) * Shared::kHeadRow;
    unsigned char* tree_scores = arch::shared_memory() + Shared::kTreeScore + g * Shared::kTreeScoreRow;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if (!step.has(tile, 0)) continue;
      const unsigned char* rows = query + 16 * tile * Shared::kHeadRow;
      if (plan.in_pages(step.start + arch::warp() * kHalf, kHalf)) {
        multiply_keys(scores.score[tile], rows, Shared::kHeadRow, keys, key_scale);
      }
      if (step.start + kSplitTokens > plan.base && 8 * arch::warp() < plan.count) {
        multiply_tree_keys<kTile>(rows, arch::warp(), key_scale, tree_scores + 16 * tile * Shared::kTreeScoreRow);
      }
    }
  }

  // Chooses and masks each row's scores, and leaves their maxima in shared memory.
  ULL_DEVICE void choose(ScoreFragment<kTiles>& scores, const Step& step) const {
    const int g = arch::lane() / 4;
    const int t = arch::lane() % 4;
    const bool reaches_tree = step.start + kSplitTokens > plan.base;
    const bool leaves_window =
        (params.window > 0 && step.start <= plan.last - params.window) || (kMayLack && step.start < plan.first_visible);
    const unsigned char* tree_scores = arch::shared_memory() + Shared::kTreeScore + g * Shared::kTreeScoreRow;
    auto* maxima = reinterpret_cast<float*>(arch::shared_memory() + Shared::kMaximum);
    if (reaches_tree) arch::block_barrier();
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      if (!step.has(tile, 0)) continue;
      if (reaches_tree || leaves_window) {
        choose_scores<kTile>(scores.score[tile], plan, share.row + step.row + 16 * tile + g,
                             step.start + arch::warp() * kHalf + 8 * t, params.window,
                             tree_scores + 16 * tile * Shared::kTreeScoreRow);
      }
      float maximum[2];
      row_maxima(maximum, scores.score[tile]);
      if (t != 0) continue;
      maxima[(16 * tile + g) * kAttentionWarps + arch::warp()] = maximum[0];
      maxima[(16 * tile + g + 8) * kAttentionWarps + arch::warp()] = maximum[1];
    }
  }

  // Probabilities, their sums and the corrections of the running maximum, into shared memory.
  ULL_DEVICE void weigh(const ScoreFragment<kTiles>& scores, const Step& step) const {
    unsigned char* shared = arch::shared_memory();
    const int t = arch::lane() % 4;
    const int warp = arch::warp();
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      if (!step.has(i / 2, i % 2)) continue;
      const int row = 8 * i + arch::lane() / 4;
      const RunningMaximum maximum = running_maximum(shared + Shared::kMaximum + row * 4 * kAttentionWarps);
      const float sum = store_probabilities(
          scores.score[i / 2], i % 2, maximum.now,
          shared + Shared::kProbability + row * Shared::kProbabilityRow + 2 * kHalf * warp + 16 * t);
      if (t != 0) continue;
      reinterpret_cast<float*>(shared + Shared::kSum)[row * kAttentionWarps + warp] = sum;
      if (warp % 2 == 0) {
        reinterpret_cast<float*>(shared + Shared::kCorrection)[row * kSplitTiles + warp / 2] =
            weight(maximum.before, maximum.now);
      }
      if (warp == kAttentionWarps - 1) reinterpret_cast<float*>(shared + Shared::kSplitMaximum)[row] = maximum.now;
    }
  }

  // Weighted sums of the values, of the warp's dimensions.
  ULL_DEVICE void sum_values(SumFragment<kTiles>& sums, const Step& step) const {
    const int g = arch::lane() / 4;
    const unsigned char* values = arch::shared_memory() + Shared::kValue;
    const unsigned char* probabilities = arch::shared_memory() + Shared::kProbability + g * Shared::kProbabilityRow;
    const unsigned char* corrections = arch::shared_memory() + Shared::kCorrection + g * 4 * kSplitTiles;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int i = 0; i < 4 * kValueTiles; ++i) sums.sum[tile][i / 4][i % 4] = 0.0F;
    }
    for (int unit = 0; unit < kValueUnits; ++unit) {
      const int position = step.start + unit * kValueUnit;
      if (position > plan.last || position + kValueUnit <= plan.first_visible) continue;
      const int page = unit / kTileUnits;
      if (step.start + page * kPageTokens < plan.base) {
        arch::barrier_wait(arrived() + page, (step.split - share.first_split) % 2);
      }
      const bool whole = unit % kTileUnits == 0 && position + kPageTokens <= plan.base;
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        if (!step.has(tile, 0)) continue;
        const unsigned char* rows = probabilities + 16 * tile * Shared::kProbabilityRow;
        if (unit % kTileUnits == 0) {
          rescale(sums.sum[tile], corrections + 16 * tile * 4 * kSplitTiles, unit / kTileUnits);
        }
        if (whole) {
          multiply_page<2>(sums.sum[tile], rows, Shared::kProbabilityRow, values, page);
        } else if (position + kValueUnit <= plan.base) {
          multiply_page_values(sums.sum[tile], rows, Shared::kProbabilityRow, values, unit);
        } else {
          multiply_path_values<kTile>(sums.sum[tile], rows, values, plan, share.row + step.row + 16 * tile, unit,
                                      position);
        }
      }
      if (whole) unit += kTileUnits - 1;
    }
  }

  ULL_DEVICE void take(const SumFragment<kTiles>& sums, const Step& step) const {
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      const int step_row = 8 * i + arch::lane() / 4;
      if (step.row + step_row >= step.rows) continue;
      Floats<kLaneDims> own;
#pragma unroll
      for (int d = 0; d < kLaneDims; ++d) {
        own.value[d] = sums.sum[i / 2][d % kValueTiles][2 * (i % 2) + d / kValueTiles];
      }
      take_row<kTile>(params, plan, share, step.split, step.row + step_row, step_row, own);
    }
  }

  // Asks for the first split's keys and values, and prepares the nodes' paths. pages: of the first split.
  ULL_DEVICE void request(KeyFragment& keys, const arch::Vector4& pages) const {
    load_split_keys(keys, share.first_split, pages);
    if (arch::thread() < kSplitTiles) arch::barrier_init(arrived() + arch::thread(), 1);
    arch::fence_barrier_init();
    copy_split_values(share.first_split, pages);
    prepare_paths<kTile>(params.round, plan);
  }

  // Behind the wait and a barrier: prepares the round's own heads.
  ULL_DEVICE void begin() const {
    prepare_heads<kTile>(params, plan, share, share.end_split * kSplitTokens > plan.base);
  }

  // keys: loaded, of the first split; prepared, if kPreparesEarly.
  ULL_DEVICE void run(KeyFragment& keys) const {
#pragma unroll 1
    for (int split = share.first_split; split < share.end_split; ++split) {
      const bool more = split + 1 < share.end_split;
      const arch::Vector4 pages = load_split_pages(params, more ? split + 1 : split);
      Step step{split, split * kSplitTokens, 0, share.rows};
      if (!kPreparesEarly || split > share.first_split) prepare_split_keys(keys, split);
#pragma unroll 1
      for (; step.row < step.rows; step.row += Shared::kStepRows) {
        ScoreFragment<kTiles> scores{};
        multiply(scores, keys, step);
        if (more && step.row + Shared::kStepRows >= step.rows) load_split_keys(keys, split + 1, pages);
        choose(scores, step);
        arch::block_barrier();
        weigh(scores, step);
        arch::block_barrier();
        trace::mark(trace::kLastUsed);
        if (arch::warp() >= kValueWarps) continue;
        SumFragment<kTiles> sums;
        sum_values(sums, step);
        take(sums, step);
      }
      if (!more) break;
      arch::block_barrier();  // nobody reads this split's values any more
      copy_split_values(split + 1, pages);
    }
    if (plan.splits() == 1) return;
    if (is_last_lane<kTile>(params, plan, share)) merge_part<kTile>(params, plan, share);
  }
};

// The kernel.
template <int kTile>
ULL_DEVICE void attend(const AttentionParams& params) {
  arch::release_dependents();
  if constexpr (kTile <= kGroupTokens) prefetch_output(params);
  const AttentionPlace place = attention_place();
  // Most blocks begin with the split of their own number: asking for its pages at once saves a trip to memory.
  const int guess = place.x < params.splits ? place.x : 0;
  const arch::Vector4 guessed = load_split_pages(params, guess);
  const AttentionPlan plan = make_plan<kTile>(params.round, params.window, place.blocks, params.page_blocks);
  const int lane = plan.parts <= 1 ? place.x : place.x / plan.parts;  // of a round without nodes there are none
  const AttentionShare share = make_share(plan, place.kv_head, place.x - lane * plan.parts, lane);
  const float key_scale = kKvBits == 8 ? params.kv_scale[place.kv_head] : 1.0F;
  const Attention<kTile> block{params, plan, share, key_scale};
  const bool works = plan.count > 0 && share.splits() > 0;
  auto* work = reinterpret_cast<AttentionWork*>(arch::shared_memory() + AttentionShared<kTile>::kWork);
  KeyFragment keys{};
  if (works) {
    block.request(keys, share.first_split == guess ? guessed : load_split_pages(params, share.first_split));
    if (arch::thread() == 0) *work = {plan, share};
    if (Attention<kTile>::kPreparesEarly) block.prepare_split_keys(keys, share.first_split);
    arch::block_barrier();
  }
  arch::wait_for_predecessor();
  if (!works) {
    if (kTile <= kGroupTokens && plan.count > 0) prefetch_gate_up(params);
    return;
  }
  block.begin();
  arch::block_barrier();
  trace::mark(trace::kFirstUsed);
  Attention<kTile>{params, work->plan, work->share, key_scale}.run(keys);
}

}  // namespace ull::gpu
