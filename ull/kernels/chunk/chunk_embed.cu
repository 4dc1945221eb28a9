// The rows of the embedding table of a chunk's tokens become its residual. Grid: (parts of a row, tokens).
#include "chunk/layout.cuh"
#include "linear/norm.cuh"

namespace ull::gpu {
namespace {

constexpr int kPiece = 8;  // bf16 of a 16-byte load
static_assert(kHidden % kPiece == 0);

}  // namespace

ULL_KERNEL(ull_chunk_embed, ChunkEmbedParams, kNormThreads, 2) {
  arch::release_dependents();
  arch::wait_for_predecessor();
  const int index = arch::block_y();
  if (index >= chunk_extent(params.chunk).count) return;
  const int64_t token = params.chunk->tokens[index];
  const auto* row = static_cast<const uint16_t*>(params.table) + token * kHidden;
  float* residual = params.residual + int64_t{index} * kResidualStride;
  for (int i = (arch::block_x() * kNormThreads + arch::thread()) * kPiece; i < kHidden;
       i += arch::grid_x() * kNormThreads * kPiece) {
    const arch::Vector4 pairs = arch::load_stream(row + i);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t first = pairs.word[2 * half], second = pairs.word[2 * half + 1];
      arch::store_global(residual + i + 4 * half,
                         {{first << 16, first & 0xFFFF0000U, second << 16, second & 0xFFFF0000U}});  // bf16 -> f32
    }
  }
}

}  // namespace ull::gpu
