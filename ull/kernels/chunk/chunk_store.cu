// Keys and values of a chunk's tokens: QK norm, rotary embedding and conversion, into the pages. A block has up to 16
// tokens, those whose positions are one aligned 16th after another: x of the grid. Of y the first kValueBlocks bring
// values, whose rows in a page are dimensions: four lanes write 16 neighbouring tokens of one, as whole sectors. The
// others bring keys.
#include "attention/attention_heads.cuh"
#include "chunk/layout.cuh"
#include "linear/norm.cuh"

namespace ull::gpu {
namespace {

constexpr int kStoreTokens = 16;
constexpr int kQuadTokens = 4;  // of a thread that brings values: four tokens of four dimensions
constexpr int kValueThreads = kKvHeads * kHeadDim / 4 * (kStoreTokens / kQuadTokens);
constexpr int kValueBlocks = (kValueThreads + kNormThreads - 1) / kNormThreads;
static_assert(kPageTokens % kStoreTokens == 0);

// Where a key or value head of the page of `position` begins; values come behind the keys.
ULL_DEVICE unsigned char* head_in_page(const ChunkStoreParams& params, int position, int head) {
  return static_cast<unsigned char*>(params.page_pool) + params.layer_offset +
         int64_t{params.pages[position / kPageTokens]} * params.page_bytes + head * kKvHeadBytes;
}

ULL_DEVICE float inverse_scale_of(const ChunkStoreParams& params, int head) {
  return kKvBits == 8 ? arch::reciprocal(params.kv_scale[head]) : 1.0F;
}

// at: of kValueThreads; first: the block's first position, perhaps before the chunk's.
ULL_DEVICE void store_values(const ChunkStoreParams& params, const ChunkExtent& chunk, int first, int at) {
  constexpr int kQuads = kStoreTokens / kQuadTokens;
  if (at >= kValueThreads) return;
  const int column = at / kQuads * 4, head = kKvHeads + column / kHeadDim, dim = column % kHeadDim;
  const int position = first + at % kQuads * kQuadTokens, token = position - chunk.base;
  float v[kQuadTokens][4] = {};
#pragma unroll
  for (int i = 0; i < kQuadTokens; ++i) {
    if (token + i < 0 || token + i >= chunk.count) continue;
    load_floats(v[i], params.qkv + int64_t{token + i} * kQkvWidth + kAttentionWidth + kKvHeads * kHeadDim + column);
  }
  const bool whole = token >= 0 && token + kQuadTokens <= chunk.count;
  if (!whole && (token + kQuadTokens <= 0 || token >= chunk.count)) return;
  const float inverse_scale = inverse_scale_of(params, head);
  unsigned char* to = head_in_page(params, position, head) + (dim * kPageTokens + position % kPageTokens) * kKvBytes;
#pragma unroll
  for (int d = 0; d < 4; ++d) {
    float row[kQuadTokens];
#pragma unroll
    for (int i = 0; i < kQuadTokens; ++i) row[i] = v[i][d] * inverse_scale;
    const StoredQuad stored = to_stored(row);
    unsigned char* quad = to + d * kPageTokens * kKvBytes;
    if (whole) {
      *reinterpret_cast<StoredQuad*>(quad) = stored;
      continue;
    }
#pragma unroll
    for (int i = 0; i < kQuadTokens; ++i) {
      if (token + i < 0 || token + i >= chunk.count) continue;
      const uint32_t word = stored.word[i * kKvBytes / 4] >> (i * kKvBits % 32);
      if constexpr (kKvBits == 16) {
        reinterpret_cast<uint16_t*>(quad)[i] = static_cast<uint16_t>(word);
      } else {
        quad[i] = static_cast<unsigned char>(word);
      }
    }
  }
}

// at: of the threads for the block's tokens, kHeadLanes for each head of each.
ULL_DEVICE void store_keys(const ChunkStoreParams& params, const ChunkExtent& chunk, int first, int at) {
  const int part = at % kHeadLanes, head = at / kHeadLanes % kKvHeads;
  const int position = first + at / (kHeadLanes * kKvHeads), token = position - chunk.base;
  const bool present = token >= 0 && token < chunk.count && position < first + kStoreTokens;
  const bool active = present && part < kHeadParts;
  HeadPart x{};
  if (active) x = load_head(params.qkv + int64_t{token} * kQkvWidth + kAttentionWidth + head * kHeadDim, part);
  if constexpr (kQkNorm) {
    const float sum = square_sum(x);
    if (active) normalise_head(x, sum, load_head(params.k_norm, part));
  }
  if (!active) return;
  rotate_head(x, load_turn(params.rope + int64_t{position} * kHeadDim, part));
  const float inverse_scale = inverse_scale_of(params, head);
  unsigned char* to = head_in_page(params, position, head) + position % kPageTokens * kHeadDim * kKvBytes;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = (half == 0 ? x.low : x.high)[i] * inverse_scale;
    *reinterpret_cast<StoredQuad*>(to + (half * (kHeadDim / 2) + 4 * part) * kKvBytes) = to_stored(v);
  }
}

}  // namespace

ULL_KERNEL(ull_chunk_store, ChunkStoreParams, kNormThreads, 2) {
  arch::release_dependents();
  const ChunkExtent chunk = chunk_extent(params.chunk);
  arch::wait_for_predecessor();
  const int first = (chunk.base / kStoreTokens + arch::block_x()) * kStoreTokens;
  if (first >= chunk.base + chunk.count) return;
  const int at = arch::block_y() * kNormThreads + arch::thread();
  if (arch::block_y() < kValueBlocks) {
    store_values(params, chunk, first, at);
  } else {
    store_keys(params, chunk, first, at - kValueBlocks * kNormThreads);
  }
}

}  // namespace ull::gpu
