// The weights of all layers as one stream per warp: the stages of qkv, o, gate_up and down of every layer, one behind
// the other, through one ring in shared memory. So while a block waits for the others after a step, or computes
// attention, the next linear layers' weights are on their way; the ring is never emptied between two of them.
#pragma once

#include "linear/gate_up.cuh"
#include "linear/layer_shapes.cuh"
#include "linear/linear_narrow.cuh"

namespace ull::gpu {

// Activations are staged, however many: the ring is another one than the single kernels'.
template <typename Shape>
using LayerPlan = NarrowPlan<Shape, 1, kNarrowBytes>;

inline constexpr int kStageBytes = LayerPlan<Qkv>::kStageBytes;  // the same for every shape

// Where a warp's stream has come to: [row tile][stage] of its slice of a linear layer, then of the next.
class LayerCursor {
 public:
  ULL_DEVICE explicit LayerCursor(const LayerParams* layers) : layers_(layers), next_weights_(weights_of(0)) {
    enter();
  }

  struct Stage {
    const unsigned char* weights;
    int bytes;  // perhaps none: slices of short rows differ
  };

  ULL_DEVICE bool is_at_end() const { return tiles_ == 0; }

  ULL_DEVICE Stage take() {
    const Stage stage{slice_ + offset_, larger(0, smaller(kStageBytes, slice_bytes_ - offset_))};
    offset_ += kStageBytes;
    if (offset_ == stage_bytes_) {
      offset_ = 0;
      slice_ += tile_bytes_;
      --tiles_;
      if (tiles_ == 0) enter();
    }
    return stage;
  }

 private:
  static constexpr int kLinears = kLayers * kLayerLinears;

  ULL_DEVICE const void* weights_of(int linear) const {
    if (linear >= kLinears) return nullptr;
    return layers_[linear / kLayerLinears].linears[linear % kLayerLinears].weights;
  }

  // Goes on to the next linear layer in which the block has row tiles. Its address was asked for one layer ahead.
  ULL_DEVICE void enter() {
    for (; tiles_ == 0 && linear_ < kLinears; ++linear_) {
      const auto* weights = static_cast<const unsigned char*>(next_weights_);
      next_weights_ = weights_of(linear_ + 1);
      switch (linear_ % kLayerLinears) {
        case kQkvLinear:
          begin<Qkv>(weights);
          break;
        case kOutputLinear:
          begin<Output>(weights);
          break;
        case kGateUpLinear:
          begin<GateUp>(weights);
          break;
        default:
          begin<Down>(weights);
      }
    }
  }

  template <typename Shape>
  ULL_DEVICE void begin(const unsigned char* weights) {
    using Plan = LayerPlan<Shape>;
    static_assert(Plan::kStageBytes == kStageBytes && Plan::kStaged);
    const int slice = Plan::first_slice();
    const int first_tile = Shape::first_tile();
    tiles_ = Shape::last_tile() - first_tile;
    tile_bytes_ = Shape::kSteps * Shape::kStepBytes;
    slice_bytes_ = (Shape::slice_begin(slice + 1) - Shape::slice_begin(slice)) * Shape::kStepBytes;
    stage_bytes_ = Stages<Plan>::kSliceStages * kStageBytes;
    slice_ = weights + static_cast<int64_t>(first_tile) * tile_bytes_ + Shape::slice_begin(slice) * Shape::kStepBytes;
  }

  const LayerParams* layers_;
  const void* next_weights_;
  int linear_ = 0;  // the next to enter: 4 * layer + which
  const unsigned char* slice_ = nullptr;
  int tiles_ = 0;  // still to come
  int tile_bytes_ = 0;
  int slice_bytes_ = 0;
  int stage_bytes_ = 0;  // of the slice's stages, were all full
  int offset_ = 0;       // in the slice
};

// A warp's ring of kDepth stages at ring + warp * kDepth * kStageBytes; its barriers at full + warp * kDepth.
template <int kDepth>
class LayerRing {
 public:
  ULL_DEVICE LayerRing(const LayerParams* layers, unsigned char* ring, arch::Barrier* full)
      : cursor_(layers), ring_(ring + arch::warp() * kDepth * kStageBytes), full_(full + arch::warp() * kDepth) {
    arch::remark_ring<kComputeWarps, kDepth, kStageBytes>();
    if (arch::lane() == 0) {
#pragma unroll
      for (int i = 0; i < kDepth; ++i) arch::barrier_init(full_ + i, 1);
      arch::fence_barrier_init();
    }
    arch::warp_barrier();
    for (int i = 0; i < kDepth; ++i) fetch();
  }

  // Starts the copy of the next stage, into the place of the oldest one, which all lanes have read.
  ULL_DEVICE void fetch() {
    if (cursor_.is_at_end()) return;
    const LayerCursor::Stage stage = cursor_.take();
    if (arch::lane() == 0) {
      const int slot = fetched_ % kDepth;
      arch::barrier_arrive_expect(full_ + slot, static_cast<uint32_t>(stage.bytes));
      if (stage.bytes > 0) {
        arch::bulk_copy_stream(ring_ + slot * kStageBytes, stage.weights, static_cast<uint32_t>(stage.bytes),
                               full_ + slot);
      }
    }
    ++fetched_;
  }

  // Has L2 fetch what comes behind the ring: kBytes of the block's weights.
  template <int kBytes>
  ULL_DEVICE void fetch_ahead() const {
    constexpr int kStages = kBytes / (kComputeWarps * kStageBytes);
    if (kStages == 0) return;
    LayerCursor ahead = cursor_;
#pragma unroll 1
    for (int i = 0; i < kStages && !ahead.is_at_end(); ++i) {
      const LayerCursor::Stage stage = ahead.take();
      if (arch::lane() == 0 && stage.bytes > 0) {
        arch::bulk_prefetch_stream(stage.weights, static_cast<uint32_t>(stage.bytes));
      }
    }
  }

  // A stage of the linear layer under way, once it has arrived.
  ULL_DEVICE const unsigned char* wait(int stage) const {
    const int number = used_ + stage;
    arch::barrier_wait(full_ + number % kDepth, number / kDepth % 2);
    return ring_ + number % kDepth * kStageBytes;
  }

  // The linear layer under way had so many stages, and all are used.
  ULL_DEVICE void finish(int stages) { used_ += stages; }

  // Waits for all that is under way: a block must not end before its copies have.
  ULL_DEVICE void drain() const {
    for (int stage = 0; stage < fetched_ - used_; ++stage) wait(stage);
  }

 private:
  LayerCursor cursor_;
  unsigned char* ring_;
  arch::Barrier* full_;
  int fetched_ = 0;  // stages
  int used_ = 0;
};

// One linear layer's part of the ring: what multiply_tiles() takes for a Stream.
template <typename Plan, typename Ring>
class LayerStream : public Stages<Plan> {
 public:
  static constexpr bool kInLoop = true;

  ULL_DEVICE explicit LayerStream(Ring& ring) : ring_(ring) {}

  ULL_DEVICE const unsigned char* wait(int stage) const { return ring_.wait(stage); }
  ULL_DEVICE void refill(int) const { ring_.fetch(); }

 private:
  Ring& ring_;
};

}  // namespace ull::gpu
