// A warp's stream of weights: its row tiles' steps come through a ring of stages in shared memory by bulk copies that
// lane 0 starts. A stage is refilled as soon as the warp has used it, so no other warp is waited for. The ring is
// filled before the predecessor has finished: nothing writes weights.
//
// Stages are numbered from 0: pass after pass over the block's row tiles, slice after slice, kSliceStages each. Plan
// says: Shape; how many row_blocks() share the row tiles, and which of them row_block() is; slices first_slice() and
// kBlockSlices - 1 more; kWarpTiles row tiles at once, from the warp_tile()th of the pass, kTileStride apart, and the
// next pass kPassTiles further; kStageSteps steps a stage; kStageActivations: whether a stage also brings the
// activations of its steps, kStepActivationBytes each; kDepth stages in the ring.
// kPairs: a pass is over two row tiles whose stages take turns, of each the same steps. Where a share's last pass has
// one row tile only, it has that one's stages only.
#pragma once

#include "linear/ahead.cuh"

namespace ull::gpu {

// Blocks of a cluster, which bring the same activations: Plan::kCluster, if there is such a thing.
template <typename Plan>
ULL_HOST_DEVICE constexpr int cluster_of() {
  if constexpr (requires { Plan::kCluster; }) return Plan::kCluster;
  return 1;
}

// What a warp's stages hold, in a linear layer of this block's share. One whose cluster has more passes has none of its
// row tiles left in the last.
template <typename Plan>
class Stages {
 public:
  using Shape = typename Plan::Shape;
  static constexpr int kSliceStages = (Shape::kSliceSteps + Plan::kStageSteps - 1) / Plan::kStageSteps;
  static constexpr int kCluster = cluster_of<Plan>();
  static constexpr int kTurns = Plan::kPairs ? 2 : 1;
  static constexpr int kPassStages = kTurns * Plan::kBlockSlices * kSliceStages;
  static_assert(!Plan::kPairs || (Plan::kPassTiles == 2 && Plan::kWarpTiles == 1 && Plan::kBlockSlices == 1));
  static constexpr bool kWhole = Shape::kSteps == kSlices * kSliceStages * Plan::kStageSteps;  // all stages are full

  ULL_DEVICE Stages() {
    const int blocks = Plan::row_blocks(), block = Plan::row_block();
    first_tile_ = Shape::first_tile(block, blocks);
    last_tile_ = Shape::first_tile(block + 1, blocks);
    most_tiles_ = last_tile_ - first_tile_;
    if constexpr (kCluster > 1) {  // they keep step
      const int beside = block / kCluster * kCluster;
#pragma unroll
      for (int i = 0; i < kCluster; ++i) {
        const int first = Shape::first_tile(beside + i, blocks);
        most_tiles_ = larger(most_tiles_, Shape::first_tile(beside + i + 1, blocks) - first);
      }
    }
  }

  ULL_DEVICE int stages() const {
    if (Plan::kPairs) return (last_tile_ - first_tile_) * kSliceStages;
    return (most_tiles_ + Plan::kPassTiles - 1) / Plan::kPassTiles * kPassStages;
  }

  // Whether two row tiles take turns in the stage's pass.
  ULL_DEVICE bool is_paired(int stage) const {
    return Plan::kPairs && first_tile_ + stage / kPassStages * Plan::kPassTiles + 1 < last_tile_;
  }

  // Of a stage: the warp's first row tile (the next ones are kTileStride apart) and how many are there, perhaps none.
  ULL_DEVICE int tile(int stage) const {
    const int turn = is_paired(stage) ? stage % 2 : 0;
    return first_tile_ + stage / kPassStages * Plan::kPassTiles + Plan::warp_tile() + turn;
  }
  ULL_DEVICE int tiles(int stage) const { return tiles_from(tile(stage)); }
  // The same of a warp whose first row tile is `tile`.
  ULL_DEVICE int tiles_from(int tile) const {
    const int rest = (last_tile_ - tile + Plan::kTileStride - 1) / Plan::kTileStride;
    return larger(0, smaller(Plan::kWarpTiles, rest));
  }
  // Its slice, first step, and how many steps: perhaps none, slices of short rows differ.
  ULL_DEVICE static int slice(int stage) { return Plan::first_slice() + stage / kSliceStages % Plan::kBlockSlices; }
  ULL_DEVICE static int slice_end(int stage) { return Shape::slice_begin(slice(stage) + 1); }
  ULL_DEVICE int step(int stage) const {
    const int pass_stage = stage % (kTurns * kSliceStages);
    const int index = is_paired(stage) ? pass_stage / 2 : pass_stage;
    return Shape::slice_begin(slice(stage)) + index * Plan::kStageSteps;
  }
  ULL_DEVICE int steps(int stage) const { return steps_from(stage, step(stage)); }
  // The same where the first step is known.
  ULL_DEVICE static int steps_from(int stage, int step) {
    if (kWhole) return Plan::kStageSteps;
    return larger(0, smaller(Plan::kStageSteps, slice_end(stage) - step));
  }

 private:
  int first_tile_;  // the block's
  int last_tile_;
  int most_tiles_;  // of a block of the cluster
};

template <typename Plan>
class Stream : public Stages<Plan> {
 public:
  static constexpr bool kInLoop = false;  // see PartMerge
  using Shape = typename Plan::Shape;
  using Stages<Plan>::kWhole;
  using Stages<Plan>::is_paired;
  using Stages<Plan>::stages;
  using Stages<Plan>::tile;
  using Stages<Plan>::tiles;
  using Stages<Plan>::kPassStages;
  using Stages<Plan>::slice_end;
  using Stages<Plan>::step;
  using Stages<Plan>::steps;
  using Stages<Plan>::steps_from;

  ULL_DEVICE Stream(const LinearParams& params, unsigned char* shared)
      : params_(params),
        ring_(shared + arch::warp() * Plan::kDepth * Plan::kStageBytes),
        full_(reinterpret_cast<arch::Barrier*>(shared + Plan::kBarrierAt) + arch::warp() * Plan::kDepth) {
    arch::remark_ring<kComputeWarps, Plan::kDepth, Plan::kWarpTiles * Plan::kStageTileBytes>();
    if (arch::lane() == 0) {
#pragma unroll
      for (int i = 0; i < Plan::kDepth; ++i) arch::barrier_init(full_ + i, 1);
      arch::fence_barrier_init();
    }
    arch::warp_barrier();
  }

  // Fills the ring with weights; activations have to wait.
  ULL_DEVICE void fill() const {
    for (int stage = 0; stage < smaller(Plan::kDepth, stages()); ++stage) fetch_weights(stage);
    trace::mark(trace::kFilled);
  }

  // Has L2 fetch what comes behind the ring: the stages that make up kBytes of the block's weights. Once the block is
  // under way its ring alone keeps more on its way than the memory needs, so this is done once, before the wait.
  template <int kBytes>
  ULL_DEVICE void fetch_ahead() const {
    constexpr int kStages = kBytes / (kComputeWarps * Plan::kWarpTiles * Plan::kStageTileBytes);
    if (kStages == 0 || arch::lane() != 0) return;
    const int end = smaller(Plan::kDepth + kStages, stages());
    const auto* weights = static_cast<const unsigned char*>(params_.weights);
    int stage = Plan::kDepth;
    while (stage < end) {  // pass by pass: what a warp reads of a row tile lies together, unless two take turns
      const int next = Plan::kPairs ? stage + 1 : smaller(end, (stage / kPassStages + 1) * kPassStages);
      const int first = smaller(step(stage), slice_end(stage));
      const int bytes = (smaller(step(next - 1) + Plan::kStageSteps, slice_end(next - 1)) - first) * Shape::kStepBytes;
#pragma unroll
      for (int i = 0; i < Plan::kWarpTiles; ++i) {
        if (i < tiles(stage) && bytes > 0) {
          const int64_t place = (static_cast<int64_t>(tile(stage)) + i * Plan::kTileStride) * Shape::kSteps + first;
          arch::bulk_prefetch_stream(weights + place * Shape::kStepBytes, static_cast<uint32_t>(bytes));
        }
      }
      stage = next;
    }
  }

  // The activations of the stages that fill() began.
  ULL_DEVICE void fill_activations() const {
    if constexpr (Plan::kStageActivations) {
      if (arch::lane() == 0) arch::fence_bulk_sources();
      for (int stage = 0; stage < smaller(Plan::kDepth, stages()); ++stage) fetch_activations(stage);
    }
  }

  // Waits for all that fill() began: a block must not end before its copies have.
  ULL_DEVICE void drain() const {
    for (int stage = 0; stage < smaller(Plan::kDepth, stages()); ++stage) wait(stage);
  }

  // A stage, once it has arrived: [tile][step][...], then the activations [step][group][...].
  ULL_DEVICE const unsigned char* wait(int stage) const {
    arch::barrier_wait(full_ + stage % Plan::kDepth, stage / Plan::kDepth % 2);
    return ring_ + stage % Plan::kDepth * Plan::kStageBytes;
  }

  // All lanes have read the stage: the one that comes to its place is fetched.
  ULL_DEVICE void refill(int stage) const {
    trace::mark_stage(stage);
    const int next = stage + Plan::kDepth;
    if (next < stages()) {
      fetch_weights(next);
      if constexpr (Plan::kStageActivations) fetch_activations(next);
    }
  }

 private:
  ULL_DEVICE void fetch_weights(int stage) const {
    if (arch::lane() != 0) return;
    const int slot = stage % Plan::kDepth;
    const int count = tiles(stage);
    const int first_step = step(stage);
    const int bytes = steps_from(stage, first_step) * Shape::kStepBytes;
    int expected = count * bytes;
    if constexpr (Plan::kStageActivations) expected += steps(stage) * Plan::kStepActivationBytes;
    arch::barrier_arrive_expect(full_ + slot, static_cast<uint32_t>(expected));
    const auto* weights = static_cast<const unsigned char*>(params_.weights);
    const int64_t first = static_cast<int64_t>(tile(stage)) * Shape::kSteps + first_step;
#pragma unroll
    for (int i = 0; i < Plan::kWarpTiles; ++i) {
      if (i < count && (kWhole || bytes > 0)) {
        const int64_t step = first + static_cast<int64_t>(i) * Plan::kTileStride * Shape::kSteps;
        arch::bulk_copy_stream(ring_ + slot * Plan::kStageBytes + i * Plan::kStageTileBytes,
                               weights + step * Shape::kStepBytes, static_cast<uint32_t>(bytes), full_ + slot);
      }
    }
  }

  ULL_DEVICE void fetch_activations(int stage) const {
    if (arch::lane() != 0) return;
    const int slot = stage % Plan::kDepth;
    const auto* activations = static_cast<const unsigned char*>(params_.activations);
    unsigned char* target = ring_ + slot * Plan::kStageBytes + Plan::kWarpTiles * Plan::kStageTileBytes;
#pragma unroll
    for (int i = 0; i < Plan::kStageSteps; ++i) {
      if (i < steps(stage)) {
        arch::bulk_copy(target + i * Plan::kStepActivationBytes,
                        activations + static_cast<int64_t>(step(stage) + i) * kActivationStepBytes,
                        Plan::kStepActivationBytes, full_ + slot);
      }
    }
  }

  const LinearParams& params_;
  unsigned char* ring_;
  arch::Barrier* full_;
};

}  // namespace ull::gpu
