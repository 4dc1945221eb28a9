// The context of a DFlash head of a chunk of a prompt. ull_chunk_norm stands between fc and the layers, and
// ull_chunk_store puts each layer's keys and values into the pages.
#include "chunk/chunk_linear.cuh"
#include "dflash/dflash.cuh"
#include "linear/head_rows.cuh"

namespace ull::gpu {

ULL_KERNEL(ull_dflash_chunk_taps, ChunkTapsParams, kNormThreads, 2) {
  read_chunk_taps<kTargetHidden, kRead, TapNorm::kNone>(params);
}

ULL_CLUSTER_KERNEL(ull_dflash_chunk_fc, ChunkLinearParams, kChunkThreads, kChunkCluster) {
  chunk_linear<TapsLinear<kTargetHidden, kRead>, StoreChunkRows<kResidualStride, kTapsUnit>>(params);
}

ULL_CLUSTER_KERNEL(ull_dflash_chunk_kv, ChunkLinearParams, kChunkThreads, kChunkCluster) {
  chunk_linear<KvLinear<kHidden>, StoreChunkRows<kQkvWidth>>(params);
}

}  // namespace ull::gpu
