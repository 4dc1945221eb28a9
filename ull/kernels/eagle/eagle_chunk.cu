// What an EAGLE-3 head keeps of a chunk of a prompt: its layer's keys and values, which ull_chunk_store puts into the
// pages. They need nothing behind its qkv, of which the queries' rows are left out.
#include "chunk/chunk_linear.cuh"
#include "eagle/eagle.cuh"

namespace ull::gpu {

ULL_KERNEL(ull_eagle_chunk_taps, ChunkTapsParams, kNormThreads, 2) {
  read_chunk_taps<kTargetHidden, kRead, kTapNorm>(params);
}

ULL_CLUSTER_KERNEL(ull_eagle_chunk_fc, ChunkLinearParams, kChunkThreads, kChunkCluster) {
  chunk_linear<Fc, StoreChunkRows<kResidualStride, kTapsUnit>>(params);
}

// As ull_eagle_input, of entries that all have taps, and whose residual nobody reads.
ULL_KERNEL(ull_eagle_chunk_input, ChunkEagleInputParams, kNormThreads, 2) {
  arch::release_dependents();
  RowShare weight;
  load_norm_weight(weight, params.embedding_norm);
  const int count = chunk_extent(params.chunk).count;
  arch::wait_for_predecessor();
  const int token = arch::block_x();
  if (token >= count) return;
  auto* sums = reinterpret_cast<float*>(arch::shared_memory());
  const ChunkRow<2 * kHidden> input{params.input, token};
  RowShare row;
  load_embedding(row, params.table, params.chunk->tokens[token]);
  normalise(row, weight, sums);
  store_input(input, 0, row);
  load_row(row, params.states + int64_t{token} * kResidualStride);
  load_norm_weight(weight, params.hidden_norm);
  normalise(row, weight, sums);
  store_input(input, kHidden, row);
}

ULL_CLUSTER_KERNEL(ull_eagle_chunk_kv, ChunkLinearParams, kChunkThreads, kChunkCluster) {
  chunk_linear<KvLinear<2 * kHidden>, StoreChunkRows<kQkvWidth>>(params);
}

}  // namespace ull::gpu
