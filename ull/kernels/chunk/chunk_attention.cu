// Attention of a chunk's tokens over the pages, which hold the keys and values of all of them: see
// chunk_attention_plan.cuh for who does what, attention/tile_bring.cuh for the warpgroup that brings tiles, and
// attention/tile_rows.cuh and chunk_attention_rows.cuh for the steps of those that multiply. Grid: x = blocks of 128
// rows, y = kv heads.
#include "attention/tile_bring.cuh"
#include "chunk/chunk_attention_plan.cuh"
#include "chunk/chunk_attention_rows.cuh"

namespace ull::gpu {
namespace {

// The block's tiles [first, end) are none of this warpgroup's.
ULL_DEVICE void pass_tiles(const ChunkRing& ring, int first, int end) {
#pragma unroll 1
  for (int item = 2 * first; item < 2 * end; ++item) {
    ring.wait(item);
    ring.release(item);
  }
}

// A warpgroup's tiles [first, end) of the block's -> outputs and their statistics. origin: the block's first tile.
//
// A tile's values are multiplied together with the next one's keys, while the other warpgroup weighs. Until these
// products have been waited for no branch is taken: among products in flight one would have the assembler wait for each
// of them.
ULL_DEVICE void multiply_tiles(ChunkRows& rows, const ChunkRing& ring, int origin, int first, int end,
                               RowOutputs& outputs, LaneStatistics& statistics) {
  RowQueries queries;
  rows.prepare_queries();
  ChunkRows::load_queries(queries);
  arch::warp_barrier();  // the lanes keep other things there from now on
  TileScores scores;
  trace::mark(trace::kFirstUsed);
  ring.wait(2 * first);
  arch::warpgroup_fence();
  multiply_tile_keys(scores, queries, ring.slot(2 * first));
  arch::warpgroup_commit();
  arch::warpgroup_wait<0>(scores);
  ring.release(2 * first);
  ChunkRows::begin_split(outputs, statistics);
#pragma unroll 1
  for (int tile = first; tile < end; ++tile) {
    const bool is_last = tile + 1 == end;
    TileWeights weights;
    rows.choose(scores, (origin + tile) * kPageTokens);
    rows.weigh(weights, outputs, statistics, scores);
    // Of what is behind the last tile nobody looks at the scores. Where the keys are, the values have come before.
    const int values = 2 * tile + 1, keys = is_last ? values : values + 1;
    ring.wait(keys);
    arch::warpgroup_fence();
    multiply_tile_keys(scores, queries, ring.slot(keys));
    multiply_tile_values(outputs, weights, ring.slot(values));
    arch::warpgroup_commit();
    arch::warpgroup_wait<0>(scores);
#pragma unroll
    for (auto& piece : outputs) arch::warpgroup_wait<0>(piece);
    ring.release(values);
    if (!is_last) ring.release(keys);
    if (is_last || (origin + tile + 1) % kSplitTiles == 0) {
      rows.merge_split(outputs, statistics, (origin + tile) / kSplitTiles, is_last);
      if (!is_last) ChunkRows::begin_split(outputs, statistics);
    }
  }
  trace::mark(trace::kLastUsed);
}

}  // namespace

ULL_KERNEL(ull_chunk_attention, ChunkAttentionParams, kChunkAttentionThreads, 1) {
  arch::release_dependents();
  const ChunkRing ring(arch::shared_memory());
  const ChunkExtent chunk = chunk_extent(params.chunk);
  arch::wait_for_predecessor();
  ChunkShare share;
  if (!make_chunk_share(share, chunk, params.window)) return;
  if (arch::warp() >= 4 * kRowWarpgroups) {
    arch::give_registers_up<kTileRegisters>();
    const int first = share.first_tile(share.row), end = share.end_tile(share.row, kBlockRows);
    bring_tiles<true>(params, share.kv_head, first, end, chunk, ring);
    return;
  }
  arch::want_registers<kRowRegisters>();
  const int warp = arch::shuffle(arch::warp(), 0);  // so the compiler sees that all lanes have the same addresses
  const int row = share.row + warp / 4 * kWarpgroupRows, origin = share.first_tile(share.row);
  const int first = share.first_tile(row) - origin, end = share.end_tile(row, kWarpgroupRows) - origin;
  pass_tiles(ring, 0, first);
  if (first < end) {
    ChunkRows rows(params, share, row + arch::warp() % 4 * 16, (origin + first) / kSplitTiles);
    RowOutputs outputs;
    LaneStatistics statistics;
    multiply_tiles(rows, ring, origin, first, end, outputs, statistics);
    rows.store(outputs, statistics);
  }
  pass_tiles(ring, end, share.end_tile(share.row, kBlockRows) - origin);
}

}  // namespace ull::gpu
