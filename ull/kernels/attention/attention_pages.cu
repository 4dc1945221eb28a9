// Attention of a round's nodes over what lies in the pages, where products are warpgroups' and the cache is long: all
// splits before the one that holds the round's first node (page_splits() in attention_plan.cuh), which are nearly all
// there is to read. ull_attention_{16,32,64} takes the others behind it, in which nodes see each other, and merges.
//
// A block has 64 rows of a kv head and some splits, one after another. One warpgroup multiplies, another brings the
// tiles (tile_bring.cuh, tile_rows.cuh), as in a chunk: each result is what the other kernel would make of the split,
// bit for bit, and lies where that one would have left it. Two blocks share a multiprocessor: while one weighs, the
// other multiplies.
//
// Grid: x = parts of 64 rows by lanes of splits, y = kv heads. Blocks that a round leaves nothing for return at once.
#include "attention/tile_bring.cuh"
#include "attention/tile_rows.cuh"
#include "attention/tiles.cuh"

namespace ull::gpu {
namespace {

inline constexpr int kPageThreads = 256;
inline constexpr int kPageBlocks = 2;              // on a multiprocessor
inline constexpr int kBringingRegisters = 88;      // of a thread that brings tiles
inline constexpr int kMultiplyingRegisters = 168;  // of one that multiplies
static_assert(kBringingRegisters + kMultiplyingRegisters <= 256, "what a launch of that many threads and blocks has");
static_assert(kPageRows == kWarpgroupRows);

// Shared memory: the ring's slots, then each warp's queries, then the barriers.
inline constexpr int kPageBarriersAt = kRingBytes + 4 * kQueryBytes;
using PageRing = TileRing<1, kPageBarriersAt>;

struct PageShare {
  const Round* round;
  int base;
  int window;
  int kv_head;
  int rows;  // of the kv head
  int row;   // the block's first one
  int first_tile;
  int first_split;
  int end_split;
  int first_of_all;  // the first split that is looked at

  // Of a row's node; rows beyond the last one look at what that one does.
  ULL_DEVICE int position(int at) const { return base + round->depths[smaller(at, rows - 1) / kGroup]; }
  // At least the largest of 16 rows from row `at` on.
  ULL_DEVICE int last_position(int) const { return base + kTreeTokens - 1; }
  ULL_DEVICE int first_visible(int at) const { return first_seen(at, window); }  // from position `at`
  ULL_DEVICE int span_first(int split) const { return first_of_span(split, first_of_all); }
  // Whether all splits of that one's span are the block's.
  ULL_DEVICE bool has_span(int split) const {
    return span_first(split) >= first_split && split / kSpanSplits * kSpanSplits + kSpanSplits <= end_split;
  }
};

// Reads what begin wrote, before this kernel waits: see Rounds.opening() in ull/gpu/rounds.py. False: there is nothing
// for this block.
ULL_DEVICE bool make_page_share(PageShare& share, const AttentionParams& params) {
  const int base = word_of_round(params.round, ULL_OFFSETOF(Round, base));
  const int rows = token_count(params.round) * kGroup, blocks = arch::grid_x();
  const int first_visible = first_seen(base, params.window);
  const int first_of_all = first_visible / kSplitTokens;
  const PageSplits splits = page_splits(blocks, rows, first_of_all, base);
  const int parts = page_parts(rows);
  if (splits.end == first_of_all) return false;
  const int lane = arch::block_x() / parts;
  const int first = first_of_all + lane * splits.per_lane;
  share.round = params.round;
  share.base = base;
  share.window = params.window;
  share.kv_head = arch::block_y();
  share.rows = rows;
  share.row = (arch::block_x() - lane * parts) * kPageRows;
  share.first_split = first;
  share.end_split = smaller(first + splits.per_lane, splits.end);
  share.first_tile = larger(first * kSplitTiles, first_visible / kPageTokens);
  share.first_of_all = first_of_all;
  return first < splits.end;
}

class PageRows : public TileRows<AttentionParams, PageShare, kQueryBytes> {
 public:
  using TileRows::TileRows;

  // Takes a split: into the span that lies in memory if that is all the block's, else into a place of its own there.
  ULL_DEVICE void take(RowOutputs& outputs, LaneStatistics& split, int number) {
    int slot = number;
    if (share_.has_span(number)) {
      slot = share_.span_first(number);
      if (number != slot) merge_before(outputs, split, slot);
#pragma unroll
      for (int r = 0; r < 2; ++r) span_[r] = split[r];
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (!has_row(r)) continue;
      float* to = output(slot, r);
#pragma unroll
      for (int group = 0; group < kDimGroups; ++group) {
        const float (&own)[4] = outputs[group / kPieceGroups][group % kPieceGroups];
        *reinterpret_cast<Floats<2>*>(to + 8 * group) = {{own[2 * r], own[2 * r + 1]}};
      }
      if (arch::lane() % 4 != 0) continue;
      *reinterpret_cast<RowStatistics*>(partial_statistics(params_, partial(slot, r))) = split[r];
    }
  }

 private:
  LaneStatistics span_;  // the one under way

  ULL_DEVICE bool has_row(int r) const { return row(r) < share_.rows; }
  ULL_DEVICE size_t partial(int split, int r) const { return partial_row(params_, share_.kv_head, split, row(r)); }
  // Two of the lane's dimensions, eight behind one another.
  ULL_DEVICE float* output(int split, int r) const {
    return partial_output(params_, partial(split, r)) + 2 * (arch::lane() % 4);
  }

  // outputs = what the lane has left in the slot of the span, merged with `outputs`.
  ULL_DEVICE void merge_before(RowOutputs& outputs, LaneStatistics& split, int slot) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const MergeWeights weights = merge(span_[r], split[r]);
      split[r] = span_[r];
      if (!has_row(r)) continue;
      const float* from = output(slot, r);
#pragma unroll
      for (int group = 0; group < kDimGroups; ++group) {
        float (&own)[4] = outputs[group / kPieceGroups][group % kPieceGroups];
        const auto before = *reinterpret_cast<const Floats<2>*>(from + 8 * group);
#pragma unroll
        for (int i = 0; i < 2; ++i) own[2 * r + i] = merged(weights, before.value[i], own[2 * r + i]);
      }
    }
  }
};

// The warpgroup's tiles. Queries come from shared memory again for every tile: registers are what lets two blocks share
// a multiprocessor.
ULL_DEVICE void multiply(PageRows& rows, const PageRing& ring, int first, int end) {
  RowOutputs outputs;
  LaneStatistics statistics;
  PageRows::begin_split(outputs, statistics);
#pragma unroll 1
  for (int tile = first; tile < end; ++tile) {
    const int keys = 2 * (tile - first), values = keys + 1;
    TileScores scores;
    {
      RowQueries queries;
      PageRows::load_queries(queries);
      ring.wait(keys);
      arch::warpgroup_fence();
      multiply_tile_keys(scores, queries, ring.slot(keys));
      arch::warpgroup_commit();
      arch::warpgroup_wait<0>(scores);
      ring.release(keys);
    }
    TileWeights weights;
    rows.choose(scores, tile * kPageTokens);
    rows.weigh(weights, outputs, statistics, scores);
    ring.wait(values);
    arch::warpgroup_fence();
    multiply_tile_values(outputs, weights, ring.slot(values));
    arch::warpgroup_commit();
#pragma unroll
    for (auto& piece : outputs) arch::warpgroup_wait<0>(piece);
    ring.release(values);
    if ((tile + 1) % kSplitTiles != 0) continue;
    rows.take(outputs, statistics, tile / kSplitTiles);
    PageRows::begin_split(outputs, statistics);
  }
}

}  // namespace

ULL_KERNEL(ull_attention_pages, AttentionParams, kPageThreads, kPageBlocks) {
  arch::release_dependents();
  const PageRing ring(arch::shared_memory());
  PageShare share;
  const bool has_rows = make_page_share(share, params);
  if (has_rows && arch::warp() >= 4) {  // no kernel of this round writes what these read
    arch::give_registers_up<kBringingRegisters>();
    bring_tiles<false>(params, share.kv_head, share.first_tile, kSplitTiles * share.end_split, {}, ring);
    return;
  }
  arch::wait_for_predecessor();
  if (!has_rows) return;
  arch::want_registers<kMultiplyingRegisters>();
  PageRows rows(params, share, share.row + arch::warp() * 16);
  rows.prepare_queries();
  trace::mark(trace::kFirstUsed);
  multiply(rows, ring, share.first_tile, kSplitTiles * share.end_split);
  trace::mark(trace::kLastUsed);
}

}  // namespace ull::gpu
