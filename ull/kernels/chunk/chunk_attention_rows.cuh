// What a warp does for its 16 rows of a chunk's attention behind each split: it merges splits and spans, or leaves them
// to be merged with those of other blocks, and stores the outputs in the end. Between splits a lane keeps what it has
// of its rows in shared memory that no other lane looks at.
#pragma once

#include "attention/tile_rows.cuh"
#include "chunk/chunk_attention_plan.cuh"

namespace ull::gpu {

// What a warp keeps outputs and statistics of: the span under way, and all spans before it.
inline constexpr int kSpanSet = 0;
inline constexpr int kTotalSet = 1;

class ChunkRows : public TileRows<ChunkAttentionParams, ChunkShare, kKeptSets * kSetBytes> {
 public:
  ULL_DEVICE ChunkRows(const ChunkAttentionParams& params, const ChunkShare& share)
      : TileRows(params, share, share.row + arch::warp() * 16),
        span_first_(share.lane_first(share.lane)),
        is_late_(first_of_span(span_first_, share.first_split) < span_first_),
        result_(share.lanes > 1 ? results(share.lane) : nullptr) {}

  // Whether the rows have several lanes, which leave what they have.
  ULL_DEVICE bool leaves() const { return result_ != nullptr; }

  // Takes a split: into its span, if all of that before it is the warp's, and a span that is at its end into what came
  // before; of several lanes what is at its end is left in memory. ends: it is the last one of the lane that the rows
  // look at. Of a single lane `outputs` and `split` are then of all.
  ULL_DEVICE void take_split(RowOutputs& outputs, LaneStatistics& split, int number, bool ends) {
    const bool ends_span = number % kSpanSplits == kSpanSplits - 1;
    if (!is_late_) {
      merge_kept(outputs, split, kSpanSet, number == span_first_);
      if (!ends_span && !ends) return store_quads(kept_quads(kSpanSet), outputs, split);
    }
    span_first_ = number + 1;
    if (result_ == nullptr) return take_span(outputs, split, ends);
    is_late_ = is_late_ && !ends_span;
    store_quads(result_, outputs, split);
    result_ += kResultStride;
  }

  // Behind a lane's last split, of several lanes: true for the last of the warps that have these rows, which has
  // `outputs` and `total` of all then.
  ULL_DEVICE bool merge_lanes(RowOutputs& outputs, LaneStatistics& total) {
    if (row_ >= share_.rows || !is_last_lane()) return false;
    ChunkResults result(share_);
    const Quad* from = results(result.lane());
    Quad ahead[kAhead], statistics = load_quad(from + 32 * kDimGroups);
#pragma unroll
    for (int group = 0; group < kAhead; ++group) ahead[group] = load_quad(from + 32 * group);
    begin_split(outputs, total);
#pragma unroll 1
    while (true) {
      const int end = result.end();
      result.next();
      const bool is_last = !result.exists();  // behind it nobody looks at what is loaded
      const Quad* next = is_last ? from : results(result.lane()) + result.number() * kResultStride;
      LaneStatistics own;
      statistics_of(own, statistics);
      statistics = load_quad(next + 32 * kDimGroups);
      MergeWeights weights[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) weights[r] = merge(total[r], own[r]);
#pragma unroll
      for (int group = 0; group < kDimGroups; ++group) {
        float (&all)[4] = outputs[group / kPieceGroups][group % kPieceGroups];
        Quad& quad = ahead[group % kAhead];
#pragma unroll
        for (int i = 0; i < 4; ++i) all[i] = merged(weights[i / 2], all[i], quad.value[i]);
        const int later = group + kAhead;
        quad = load_quad(later < kDimGroups ? from + 32 * later : next + 32 * (later - kDimGroups));
      }
      from = next;
      if (!is_last && end % kSpanSplits != 0) continue;
      take_span(outputs, total, is_last);
      if (is_last) return true;
      begin_split(outputs, total);
    }
  }

  // Stores the rows' outputs: f16 activations.
  ULL_DEVICE void store(const RowOutputs& outputs, const LaneStatistics& total) const {
    auto* output = static_cast<uint16_t*>(params_.output);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int own_row = row(r);
      if (own_row >= share_.rows) continue;
      const int token = own_row / kGroup, head = share_.kv_head * kGroup + own_row % kGroup;
      const float factor = output_factor(params_, share_.kv_head, total[r].sum);
#pragma unroll
      for (int first = 0; first < kDimGroups; first += 4) {  // 32 dimensions, of which a lane has one quarter
        arch::Vector4 eight;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float (&own)[4] = outputs[(first + i) / kPieceGroups][(first + i) % kPieceGroups];
          eight.word[i] = arch::f32x2_to_f16x2(own[2 * r] * factor, own[2 * r + 1] * factor);
        }
        const int column = head * kHeadDim + 8 * first + 2 * (arch::lane() % 4);
        arch::store_global(output + chunk_index<kAttentionWidth>(token, column), eight);
      }
    }
  }

 private:
  static constexpr int kAhead = kDimGroups / 2;  // quads of results that are on their way
  static constexpr int64_t kResultStride = 4 * kRowWarpgroups * kQuads;
  int span_first_;  // the first split of the span under way
  bool is_late_;    // the span under way has splits before those of the lane
  bool is_first_span_ = true;
  Quad* result_;  // where the next one goes; null: there is but one lane

  // Merges a span into those before it. ends: it is the last one.
  ULL_DEVICE void take_span(RowOutputs& outputs, LaneStatistics& span, bool ends) {
    merge_kept(outputs, span, kTotalSet, is_first_span_);
    is_first_span_ = false;
    if (!ends) store_quads(kept_quads(kTotalSet), outputs, span);
  }

  // ---- of several lanes ---------------------------------------------------------------------------------------------

  // A lane's first result of these rows; the others are kResultStride apart.
  ULL_DEVICE Quad* results(int lane) const {
    const int block = share_.kv_head * kMostBlocks + lane * share_.parts() + share_.row / kBlockRows;
    const int64_t number = int64_t{block} * params_.results * kResultStride + arch::warp() * kQuads + arch::lane();
    return reinterpret_cast<Quad*>(params_.partial) + number;
  }

  ULL_DEVICE static Quad load_quad(const Quad* from) {
    const arch::Vector4 loaded = arch::load_global(from);
    Quad quad;
#pragma unroll
    for (int i = 0; i < 4; ++i) quad.value[i] = arch::bits_float(loaded.word[i]);
    return quad;
  }

  // Counts the lane; true for the last one that has these rows. The counter is left at 0 for the next layer.
  ULL_DEVICE bool is_last_lane() const {
    arch::warp_barrier();
    uint32_t last = 0;
    if (arch::lane() == 0) {
      const int part = share_.kv_head * kMostBlocks + share_.row / kBlockRows;
      uint32_t* counter = params_.counters + part * (4 * kRowWarpgroups) + arch::warp();
      arch::fence_device();
      last = arch::atomic_add(counter, 1) + 1 == static_cast<uint32_t>(share_.lanes) ? 1U : 0U;
      if (last != 0) *counter = 0;
      arch::fence_device();
    }
    last = arch::shuffle(last, 0);
    arch::warp_barrier();
    return last != 0;
  }

  // ---- what is kept between splits ----------------------------------------------------------------------------------

  // Where the warp keeps a set.
  ULL_DEVICE static Quad* kept_quads(int set) {
    return reinterpret_cast<Quad*>(own_memory() + set * kSetBytes) + arch::lane();
  }

  // outputs = what is kept in the set, if there is anything, merged with `outputs`.
  ULL_DEVICE void merge_kept(RowOutputs& outputs, LaneStatistics& statistics, int set, bool is_empty) {
    const Quad* kept = kept_quads(set);
    LaneStatistics before = {{kNoMaximum, 0.0F}, {kNoMaximum, 0.0F}};
    if (!is_empty) statistics_of(before, kept[32 * kDimGroups]);
    MergeWeights weights[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      weights[r] = merge(before[r], statistics[r]);
      statistics[r] = before[r];
    }
    const auto merge_all = [&](auto kept_before) {
#pragma unroll
      for (int group = 0; group < kDimGroups; ++group) {
        float (&own)[4] = outputs[group / kPieceGroups][group % kPieceGroups];
        const Quad before = kept_before(group);
#pragma unroll
        for (int i = 0; i < 4; ++i) own[i] = merged(weights[i / 2], before.value[i], own[i]);
      }
    };
    if (is_empty) {
      merge_all([](int) { return Quad{}; });
    } else {
      merge_all([&](int group) { return kept[32 * group]; });
    }
  }

  ULL_DEVICE static void statistics_of(LaneStatistics& statistics, const Quad& quad) {
#pragma unroll
    for (int r = 0; r < 2; ++r) statistics[r] = {quad.value[2 * r], quad.value[2 * r + 1]};
  }

  // A lane's quads: its outputs of each group of dimensions, then their statistics.
  ULL_DEVICE static void store_quads(Quad* to, const RowOutputs& outputs, const LaneStatistics& statistics) {
#pragma unroll
    for (int group = 0; group < kDimGroups; ++group) {
      const float (&own)[4] = outputs[group / kPieceGroups][group % kPieceGroups];
      to[32 * group] = {{own[0], own[1], own[2], own[3]}};
    }
    to[32 * kDimGroups] = {{statistics[0].maximum, statistics[0].sum, statistics[1].maximum, statistics[1].sum}};
  }
};

}  // namespace ull::gpu
