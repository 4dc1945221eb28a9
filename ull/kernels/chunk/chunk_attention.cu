// Attention of a chunk's tokens over the pages, which hold the keys and values of all of them: see
// chunk_attention_plan.cuh for who does what, attention/tile_bring.cuh for the warpgroup that brings tiles, and
// attention/tile_rows.cuh and chunk_attention_rows.cuh for the steps of those that multiply. Grid: as many blocks for
// each kv head as 512 tokens have parts of 128 rows.
#include "attention/tile_bring.cuh"
#include "chunk/chunk_attention_plan.cuh"
#include "chunk/chunk_attention_rows.cuh"

namespace ull::gpu {
namespace {

// The tiles of a block, by the warpgroup for which no rows are left.
ULL_DEVICE void pass_tiles(const ChunkRing& ring, int tiles) {
#pragma unroll 1
  for (int item = 0; item < 2 * tiles; ++item) {
    ring.wait(item);
    ring.release(item);
  }
}

// The block's tiles, from tile `first` on -> outputs and their statistics.
//
// A tile's values are multiplied together with the next one's keys, while the other warpgroup weighs. Until these
// products have been waited for no branch is taken: among products in flight one would have the assembler wait for each
// of them.
ULL_DEVICE void multiply_tiles(ChunkRows& rows, const ChunkRing& ring, int first, int tiles, RowOutputs& outputs,
                               LaneStatistics& statistics) {
  RowQueries queries;
  rows.prepare_queries();
  ChunkRows::load_queries(queries);
  arch::warp_barrier();  // the lanes keep other things there from now on
  TileScores scores;
  trace::mark(trace::kFirstUsed);
  ring.wait(0);
  arch::warpgroup_fence();
  multiply_tile_keys(scores, queries, ring.slot(0));
  arch::warpgroup_commit();
  arch::warpgroup_wait<0>(scores);
  ring.release(0);
  ChunkRows::begin_split(outputs, statistics);
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    const bool is_last = tile + 1 == tiles;
    TileWeights weights;
    rows.choose(scores, (first + tile) * kPageTokens);
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
    if (is_last || (first + tile + 1) % kSplitTiles == 0) {
      rows.take_split(outputs, statistics, (first + tile) / kSplitTiles, is_last);
      if (!is_last) ChunkRows::begin_split(outputs, statistics);
    }
  }
  trace::mark(trace::kLastUsed);
}

}  // namespace

ULL_KERNEL(ull_chunk_attention, ChunkAttentionParams, kChunkAttentionThreads, 1) {
  arch::release_dependents();
  const ChunkRing ring(arch::shared_memory());
  ChunkShare share;
  const bool has_rows = make_chunk_share(share, chunk_extent(params.chunk), params.window, params.blocks);
  const int first = share.first_tile(), tiles = share.end_tile() - first;
  if (has_rows && arch::warp() >= 4 * kRowWarpgroups) {
    arch::give_registers_up<kTileRegisters>();
    bring_tiles<true>(params, share.kv_head, first, first + tiles, share.chunk, ring);
    return;
  }
  arch::wait_for_predecessor();
  if (!has_rows) return;
  arch::want_registers<kRowRegisters>();
  const int warp = arch::shuffle(arch::warp(), 0);  // so the compiler sees that all lanes agree
  if (share.row + warp / 4 * kWarpgroupRows >= share.rows) return pass_tiles(ring, tiles);
  ChunkRows rows(params, share);
  RowOutputs outputs;
  LaneStatistics statistics;
  multiply_tiles(rows, ring, first, tiles, outputs, statistics);
  if (!rows.leaves()) return rows.store(outputs, statistics);
  ChunkShare again;  // what would be in registers all the way, of which there are few
  if (!make_chunk_share(again, chunk_extent(params.chunk), params.window, params.blocks)) return;
  ChunkRows all(params, again);
  if (all.merge_lanes(outputs, statistics)) all.store(outputs, statistics);
}

}  // namespace ull::gpu
