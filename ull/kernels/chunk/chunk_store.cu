// Keys and values of a chunk's tokens: QK norm, rotary embedding and conversion, into the pages. Grid: x = tokens; y:
// so that there are kHeadLanes threads for each key and value.
#include "attention/attention_heads.cuh"
#include "chunk/layout.cuh"
#include "linear/norm.cuh"

namespace ull::gpu {

ULL_KERNEL(ull_chunk_store, ChunkStoreParams, kNormThreads, 2) {
  arch::release_dependents();
  const ChunkExtent chunk = chunk_extent(params.chunk);
  arch::wait_for_predecessor();
  const int token = arch::block_x();
  if (token >= chunk.count) return;
  const int at = arch::block_y() * kNormThreads + arch::thread();
  const int head = at / kHeadLanes, part = at % kHeadLanes, position = chunk.base + token;
  const bool active = head < 2 * kKvHeads && part < kHeadParts, is_value = head >= kKvHeads;
  HeadPart x{};
  if (active) x = load_head(params.qkv + int64_t{token} * kQkvWidth + kAttentionWidth + head * kHeadDim, part);
  if constexpr (kQkNorm) {
    const float sum = square_sum(x);
    if (active && !is_value) normalise_head(x, sum, load_head(params.k_norm, part));
  }
  if (!active) return;
  if (!is_value) rotate_head(x, load_turn(params.rope + int64_t{position} * kHeadDim, part));
  const float inverse_scale = kKvBits == 8 ? arch::reciprocal(params.kv_scale[head]) : 1.0F;
  unsigned char* to = static_cast<unsigned char*>(params.page_pool) + params.layer_offset +
                      int64_t{params.pages[position / kPageTokens]} * params.page_bytes + head * kKvHeadBytes;
  const int slot = position % kPageTokens;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int dim = half * (kHeadDim / 2) + 4 * part;
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = (half == 0 ? x.low : x.high)[i] * inverse_scale;
    const StoredQuad stored = to_stored(v);
    if (!is_value) {
      *reinterpret_cast<StoredQuad*>(to + (slot * kHeadDim + dim) * kKvBytes) = stored;
      continue;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      unsigned char* element = to + ((dim + i) * kPageTokens + slot) * kKvBytes;
      const uint32_t word = stored.word[i * kKvBytes / 4] >> (i * kKvBits % 32);
      if constexpr (kKvBits == 16) {
        *reinterpret_cast<uint16_t*>(element) = static_cast<uint16_t>(word);
      } else {
        *element = static_cast<unsigned char>(word);
      }
    }
  }
}

}  // namespace ull::gpu
