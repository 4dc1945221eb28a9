// The linear layers of a chunk.
#include "chunk/chunk_linear.cuh"
#include "linear/gate_up.cuh"
#include "linear/layer_shapes.cuh"

namespace ull::gpu {
namespace {

// silu(gate) * up as f16 activations times kMlpScale.
struct ActivateChunk {
  ULL_DEVICE static void finish(const ChunkLinearParams& params, int tile, int first_token, int count,
                                const ChunkSums& sums) {
    store_activations<chunk_index<kIntermediate>>(params, tile, first_token, count, sums);
  }
};

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
