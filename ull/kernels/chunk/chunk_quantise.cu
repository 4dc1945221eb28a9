// f16 activations of a chunk as e4m3, with a scale for each token. A block has two tokens, whose bytes are neighbours.
#include "chunk/fast_activations.cuh"

namespace ull::gpu {
namespace {

constexpr int kBlockTokens = 2;
constexpr int kTokenThreads = kNormThreads / kBlockTokens;

// The 16 activations of a token that become a row of a core matrix: half a step's.
struct Half {
  arch::Vector4 pair[2];  // word t of pair[h]: columns 8t + 4 * half + 2h and the next one
};

ULL_DEVICE Half load_half(const unsigned char* tile, int half, int token) {
  Half result;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    result.pair[h] = arch::load_global(tile + int64_t{2 * half + h} * kQuarterBytes + token * 16);
  }
  return result;
}

}  // namespace

ULL_KERNEL(ull_chunk_quantise, ChunkQuantiseParams, kNormThreads, 4) {
  arch::release_dependents();
  const int first = arch::block_x() * kBlockTokens, count = chunk_extent(params.chunk).count;
  arch::wait_for_predecessor();
  if (first >= count) return;
  const int token = first + arch::thread() % kBlockTokens, member = arch::thread() / kBlockTokens;
  const int within = token % kChunkTile, halves = token < count ? 2 * params.steps : 0;
  const int64_t tile = int64_t{token / kChunkTile} * params.steps;
  const auto* from = static_cast<const unsigned char*>(params.activations) + tile * kChunkStepBytes;
  auto* to = static_cast<unsigned char*>(params.quantised) + tile * kFastStepBytes;
  uint32_t peak = 0;
  for (int half = member; half < halves; half += kTokenThreads) {
    const Half values = load_half(from, half, within);
#pragma unroll
    for (int i = 0; i < 8; ++i) peak = larger_peak_of_pair(peak, values.pair[i / 4].word[i % 4]);
  }
#pragma unroll
  for (int mask = 16; mask >= kBlockTokens; mask /= 2) peak = larger_peak(peak, arch::shuffle_xor(peak, mask));
  auto* peaks = reinterpret_cast<uint32_t*>(arch::shared_memory());  // [warps][tokens]
  if (arch::lane() < kBlockTokens) peaks[arch::warp() * kBlockTokens + arch::lane()] = peak;
  arch::block_barrier();
#pragma unroll
  for (int warp = 0; warp < kNormWarps; ++warp) {
    peak = larger_peak(peak, peaks[warp * kBlockTokens + arch::thread() % kBlockTokens]);
  }
  const float scale = token_scale_of(peak), inverse = arch::reciprocal(scale);
  for (int half = member; half < halves; half += kTokenThreads) {
    const Half values = load_half(from, half, within);
    arch::Vector4 row;
#pragma unroll
    for (int i = 0; i < 4; ++i) row.word[i] = quantised_four(values.pair[0].word[i], values.pair[1].word[i], inverse);
    arch::store_global(to + int64_t{half} * kFastHalfBytes + within * 16, row);
  }
  if (member == 0 && token < count) params.token_scale[token] = scale;
}

}  // namespace ull::gpu
