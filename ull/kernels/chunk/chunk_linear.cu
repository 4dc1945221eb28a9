// The linear layers of a chunk.
#include "chunk/chunk_linear.cuh"
#include "linear/gate_up.cuh"
#include "linear/layer_shapes.cuh"

namespace ull::gpu {
namespace {

// silu(gate) * up as f16 activations times kMlpScale: see GateUpEpilogue.
struct ActivateChunk {
  ULL_DEVICE static void finish(const ChunkLinearParams& params, int tile, int first_token, int count,
                                const ChunkSums& sums) {
    const int g = arch::lane() / 4, row = tile * kRowUnit + g;
    const float gate_scale = params.scale[row], up_scale = params.scale[row + 8];
    const float gate_bias = params.bias == nullptr ? 0.0F : params.bias[row];
    const float up_bias = params.bias == nullptr ? 0.0F : params.bias[row + 8];
#pragma unroll
    for (int group = 0; group < kChunkGroups; ++group) {
      float y[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        y[i] = activated(scaled(sums[group][i], gate_scale, gate_bias), scaled(sums[group][2 + i], up_scale, up_bias));
      }
      // A lane has column g of tokens 2t, 2t + 1; with its neighbour it makes pairs of columns.
      const bool odd = g % 2 != 0;
      const float received = arch::shuffle_xor(odd ? y[0] : y[1], 4);
      const uint32_t pair = odd ? arch::f32x2_to_f16x2(received, y[1]) : arch::f32x2_to_f16x2(y[0], received);
      const int token = first_token + group * kGroupTokens + 2 * (arch::lane() % 4) + g % 2;
      if (token < count) store(params, tile, token, g / 2 * 2, pair);
    }
  }

  // Two of the tile's columns, and zeros in the last step's padding.
  ULL_DEVICE static void store(const ChunkLinearParams& params, int tile, int token, int column, uint32_t pair) {
    constexpr int kTileColumns = kRowUnit / 2;
    auto* output = static_cast<uint16_t*>(params.output);
    const int first = tile * kTileColumns + column;
    *reinterpret_cast<uint32_t*>(output + chunk_index<kIntermediate>(token, first)) = pair;
    if (tile != GateUp::kRowTiles - 1) return;
    for (int pad = first + kTileColumns; pad < round_up(kIntermediate, kColumnUnit); pad += kTileColumns) {
      *reinterpret_cast<uint32_t*>(output + chunk_index<kIntermediate>(token, pad)) = 0;
    }
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
