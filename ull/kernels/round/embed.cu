// The tokens' rows of the embedding table become the residual. Grid: (parts of a row, tokens).
#include "model.cuh"

namespace ull::gpu {
namespace {

constexpr int kThreads = 256;
constexpr int kPiece = 8;  // elements of a 16-byte load
static_assert(kHidden % kPiece == 0);

}  // namespace

ULL_KERNEL(ull_embed, EmbedParams, kThreads, 1) {
  arch::release_dependents();
  arch::wait_for_predecessor();
  const int node = arch::block_y();
  if (node >= params.round->count) return;
  const int64_t token = params.round->tokens[node];
  const auto* row = static_cast<const uint16_t*>(params.table) + token * kHidden;
  float* residual = params.residual + node * kHidden;
  for (int i = (arch::block_x() * kThreads + arch::thread()) * kPiece; i < kHidden;
       i += arch::grid_x() * kThreads * kPiece) {
    const arch::Vector4 pairs = arch::load_stream(row + i);
    for (int half = 0; half < 2; ++half) {
      const uint32_t first = pairs.word[2 * half], second = pairs.word[2 * half + 1];
      arch::store_global(residual + i + 4 * half,
                         {{first << 16, first & 0xFFFF0000U, second << 16, second & 0xFFFF0000U}});  // bf16 -> f32
    }
  }
}

}  // namespace ull::gpu
