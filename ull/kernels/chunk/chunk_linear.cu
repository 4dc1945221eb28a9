// The linear layers of a chunk.
#include "chunk/chunk_linear.cuh"
#include "linear/gate_up.cuh"
#include "linear/layer_shapes.cuh"

namespace ull::gpu {
namespace {

// silu(gate) * up as f16 activations times kMlpScale. A warpgroup's four row tiles are one step of its tokens, which
// lies in memory as it does in shared memory: put together there, where the ring was, they are stored as whole sectors.
struct ActivateChunk {
  static constexpr bool kTogether = true;
  static constexpr bool kWhole = GateUp::kRowTiles % (kChunkCluster * kChunkTiles) == 0;  // every warp has a row tile

  ULL_DEVICE static void finish(const ChunkLinearParams& params, const BlockShare& share, int count,
                                const ChunkSums& sums) {
    constexpr int kSteps = round_up(kIntermediate, kColumnUnit) / kColumnUnit;
    static_assert(4 * kGateUpColumns == kColumnUnit);
    const int warpgroup = arch::warp() / 4, tile = share.own_tile(), step = tile / 4;
    unsigned char* staged = arch::shared_memory() + warpgroup * kChunkStepBytes;
    GateUpScale scale{};
    if (kWhole || tile < GateUp::kRowTiles) scale = load_gate_up_scale(params, tile, arch::lane() / 4);
    arch::named_barrier(1, 128 * share.warpgroups);  // nobody multiplies any more
    // A tile's pairs are one word of each row of 16 bytes: in quarter q word t ^ q, so that lanes meet in no bank.
    const int quarter = pair_column() / 2, word = arch::warp() % 4 ^ quarter;
    auto* own = reinterpret_cast<uint32_t*>(staged + quarter * kQuarterBytes + pair_token() * 16) + word;
    if (kWhole || tile < GateUp::kRowTiles) {
      activate_pairs(scale, sums, [&](int group, uint32_t pair) { own[group * kCoreBytes / 4] = pair; });
    } else {  // padding
      for (int group = 0; group < kChunkGroups; ++group) own[group * kCoreBytes / 4] = 0;
    }
    arch::named_barrier(2 + warpgroup, 128);
    const int token = arch::thread() % 128;
    if (step >= kSteps || share.first_token + token >= count) return;
    auto* output = static_cast<uint16_t*>(params.output) +
                   chunk_index<kIntermediate>(share.first_token + token, step * kColumnUnit);
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const arch::Vector4 row = arch::load_shared(staged + q * kQuarterBytes + token * 16);
      arch::store_global(output + q * kQuarterBytes / 2,
                         {{row.word[q], row.word[1 ^ q], row.word[2 ^ q], row.word[3 ^ q]}});
    }
  }
};
static_assert(kChunkTile == 128, "a thread of a warpgroup stores a token");

}  // namespace

ULL_CLUSTER_KERNEL(ull_chunk_qkv, ChunkLinearParams, kChunkThreads, kChunkCluster) {
  chunk_linear<Qkv, StoreChunkRows<kQkvWidth>>(params);
}
ULL_CLUSTER_KERNEL(ull_chunk_o, ChunkLinearParams, kChunkThreads, kChunkCluster) {
  chunk_linear<Output, AddChunkRows<1>, true>(params);
}
ULL_CLUSTER_KERNEL(ull_chunk_gate_up, ChunkLinearParams, kChunkThreads, kChunkCluster) {
  chunk_linear<GateUp, ActivateChunk>(params);
}
ULL_CLUSTER_KERNEL(ull_chunk_down, ChunkLinearParams, kChunkThreads, kChunkCluster) {
  chunk_linear<Down, AddChunkRows<static_cast<int>(1.0F / kMlpScale)>, true>(params);
}

}  // namespace ull::gpu
