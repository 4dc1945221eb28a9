// The linear layers of a chunk.
#include "chunk/chunk_linear.cuh"
#include "linear/gate_up.cuh"
#include "linear/layer_shapes.cuh"

namespace ull::gpu {
namespace {

// silu(gate) * up as f16 activations times kMlpScale: see GateUpEpilogue.
class ActivateChunk {
 public:
  ULL_DEVICE explicit ActivateChunk(const ChunkLinearParams& params) : params_(params) {}

  ULL_DEVICE void begin(const ChunkOutput& output) {
    const int g = arch::lane() / 4, row = output.tile * kRowUnit + g;
    token_ = output.first_token + 2 * (arch::lane() % 4) + g % 2;
    column_ = output.tile * kTileColumns + g / 2 * 2;
    count_ = output.count;
    if (count_ == 0) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      scale_[i] = params_.scale[row + 8 * i];
      bias_[i] = params_.bias == nullptr ? 0.0F : params_.bias[row + 8 * i];
    }
    if constexpr (kIntermediate % kColumnUnit != 0) {
      if (output.tile == GateUp::kRowTiles - 1) store_padding();
    }
  }

  ULL_DEVICE void finish(int group, const float (&sums)[4]) const {
    float y[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      y[i] = activated(scaled(sums[i], scale_[0], bias_[0]), scaled(sums[2 + i], scale_[1], bias_[1]));
    }
    // A lane has column g of tokens 2t, 2t + 1; with its neighbour it makes pairs of columns.
    const bool odd = arch::lane() / 4 % 2 != 0;
    const float received = arch::shuffle_xor(odd ? y[0] : y[1], 4);
    const uint32_t pair = arch::f32x2_to_f16x2(odd ? received : y[0], odd ? y[1] : received);
    const int token = token_ + group * kGroupTokens;
    if (token < count_) store(token, column_, pair);
  }

 private:
  static constexpr int kTileColumns = kRowUnit / 2;
  const ChunkLinearParams& params_;
  float scale_[2] = {};  // of the gate's row and of the up's
  float bias_[2] = {};
  int token_ = 0;
  int column_ = 0;
  int count_ = 0;

  // Zeros behind the tile's columns, to the end of their step.
  ULL_DEVICE void store_padding() const {
    for (int token = token_; token < count_ && token < token_ + kChunkTile; token += kGroupTokens) {
      for (int column = column_ + kTileColumns; column < round_up(kIntermediate, kColumnUnit); column += kTileColumns) {
        store(token, column, 0);
      }
    }
  }

  // Two columns.
  ULL_DEVICE void store(int token, int column, uint32_t pair) const {
    auto* output = static_cast<uint16_t*>(params_.output);
    *reinterpret_cast<uint32_t*>(output + chunk_index<kIntermediate>(token, column)) = pair;
  }
};

}  // namespace

ULL_CLUSTER_KERNEL(ull_chunk_qkv, ChunkLinearParams, kChunkThreads, kChunkCluster) {
  chunk_linear<Qkv, StoreChunkRows<kQkvWidth>>(params);
}
ULL_CLUSTER_KERNEL(ull_chunk_o, ChunkLinearParams, kChunkThreads, kChunkCluster) {
  chunk_linear<Output, AddChunkRows<1>>(params);
}
ULL_CLUSTER_KERNEL(ull_chunk_gate_up, ChunkLinearParams, kChunkThreads, kChunkCluster) {
  chunk_linear<GateUp, ActivateChunk>(params);
}
ULL_CLUSTER_KERNEL(ull_chunk_down, ChunkLinearParams, kChunkThreads, kChunkCluster) {
  chunk_linear<Down, AddChunkRows<static_cast<int>(1.0F / kMlpScale)>>(params);
}

}  // namespace ull::gpu
