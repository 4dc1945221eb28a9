// A warp's stream of weights: its row tiles' steps come through a ring of stages in shared memory by bulk copies that
// lane 0 starts. A stage is refilled as soon as the warp has used it, so no other warp is waited for. The ring is
// filled before the predecessor has finished: nothing writes weights.
//
// Plan says: Shape; kWarpTiles row tiles at once, kTileStride apart, pass after pass kPassTiles further; kStageSteps
// steps a stage; kGroups and kStageActivations: whether a stage also brings the activations of its steps; kDepth
// stages.
#pragma once

#include "linear.cuh"

namespace ull::gpu {

// A stage's place in the stream: the block's first row tile of a pass, and a step of a slice.
struct Cursor {
  int tile;
  int slice;
  int step;
};

template <typename Plan>
class Stream {
 public:
  using Shape = typename Plan::Shape;

  // Of the block's row tiles from `first_tile` in each pass, for slices `first_slice` .. `last_slice` - 1.
  ULL_DEVICE Stream(const LinearParams& params, unsigned char* shared, int first_tile, int first_slice, int last_slice)
      : params_(params),
        ring_(shared + arch::warp() * Plan::kDepth * Plan::kStageBytes),
        full_(reinterpret_cast<arch::Barrier*>(shared + Plan::kBarrierAt) + arch::warp() * Plan::kDepth),
        first_tile_(first_tile),
        last_tile_(Shape::last_tile()),
        first_slice_(first_slice),
        last_slice_(last_slice) {
    next_ = start();
    if (arch::lane() == 0) {
#pragma unroll
      for (int i = 0; i < Plan::kDepth; ++i) arch::barrier_init(full_ + i, 1);
      arch::fence_barrier_init();
    }
    arch::warp_barrier();
  }

  // The pass's row tiles that are this warp's; perhaps none.
  ULL_DEVICE int tiles_at(int tile) const {
    const int tiles = (last_tile_ - tile - first_tile_ + Plan::kTileStride - 1) / Plan::kTileStride;
    return larger(0, smaller(Plan::kWarpTiles, tiles));
  }

  ULL_DEVICE bool has(const Cursor& cursor) const { return cursor.tile < last_tile_; }

  ULL_DEVICE static int steps_at(const Cursor& cursor) {
    if (Plan::kWhole) return Plan::kStageSteps;
    return smaller(Plan::kStageSteps, Shape::slice_begin(cursor.slice + 1) - cursor.step);
  }

  ULL_DEVICE Cursor start() const {
    Cursor cursor{Shape::first_tile(), first_slice_, Shape::slice_begin(first_slice_)};
    settle(cursor);
    return cursor;
  }

  ULL_DEVICE void advance(Cursor& cursor) const {
    cursor.step += Plan::kStageSteps;
    settle(cursor);
  }

  // Fills the ring with weights; activations have to wait.
  ULL_DEVICE void fill() {
    for (int slot = 0; slot < Plan::kDepth; ++slot) {
      fetch_weights(slot);
      advance(next_);
    }
  }

  // The activations of the stages that fill() began.
  ULL_DEVICE void fill_activations() {
    if constexpr (Plan::kStageActivations) {
      Cursor cursor = start();
      for (int slot = 0; slot < Plan::kDepth; ++slot) {
        fetch_activations(slot, cursor);
        advance(cursor);
      }
    }
  }

  // Waits for all that fill() began: a block must not end before its copies have.
  ULL_DEVICE void drain() {
    Cursor cursor = start();
    for (int slot = 0; slot < Plan::kDepth; ++slot) {
      if (has(cursor)) arch::barrier_wait(full_ + slot, 0);
      advance(cursor);
    }
  }

  // The next stage, once it has arrived: [tile][step][...], then the activations [step][group][...].
  ULL_DEVICE const unsigned char* wait() {
    arch::barrier_wait(full_ + slot_, phase_);
    return ring_ + slot_ * Plan::kStageBytes;
  }

  // All lanes have read the stage: its place takes the next one of the stream.
  ULL_DEVICE void refill() {
    fetch_weights(slot_);
    if constexpr (Plan::kStageActivations) fetch_activations(slot_, next_);
    advance(next_);
    if (++slot_ == Plan::kDepth) {
      slot_ = 0;
      phase_ ^= 1;
    }
  }

  // Where the warp is in its ring, and the stage that comes there next.
  ULL_DEVICE int slot() const { return slot_; }
  ULL_DEVICE uint32_t phase() const { return phase_; }
  ULL_DEVICE const Cursor& next() const { return next_; }

 private:
  // To the first step at or after the cursor: some slices of a short row are empty.
  ULL_DEVICE void settle(Cursor& cursor) const {
    if constexpr (Plan::kWhole) {  // slices are whole stages: where they end does not matter
      if (cursor.step == Shape::slice_begin(last_slice_)) {
        cursor.step = Shape::slice_begin(first_slice_);
        cursor.tile += Plan::kPassTiles;
      }
    } else {
      while (has(cursor) && cursor.step >= Shape::slice_begin(cursor.slice + 1)) {
        if (++cursor.slice == last_slice_) {
          cursor.slice = first_slice_;
          cursor.tile += Plan::kPassTiles;
        }
        cursor.step = Shape::slice_begin(cursor.slice);
      }
    }
  }

  // The next stage's weights.
  ULL_DEVICE void fetch_weights(int slot) {
    if (!has(next_) || arch::lane() != 0) return;
    const int steps = steps_at(next_);
    const int tiles = tiles_at(next_.tile);
    const int activations = Plan::kStageActivations ? steps * Plan::kGroups * kGroupBytes : 0;
    const int bytes = steps * Shape::kStepBytes;
    arch::barrier_arrive_expect(full_ + slot, static_cast<uint32_t>(tiles * bytes + activations));
    const int64_t first = static_cast<int64_t>(next_.tile + first_tile_) * Shape::kSteps + next_.step;
    for (int i = 0; i < tiles; ++i) {
      const int64_t step = first + static_cast<int64_t>(i) * Plan::kTileStride * Shape::kSteps;
      arch::bulk_copy_stream(ring_ + slot * Plan::kStageBytes + i * Plan::kStageTileBytes,
                             static_cast<const unsigned char*>(params_.weights) + step * Shape::kStepBytes,
                             static_cast<uint32_t>(bytes), full_ + slot);
    }
  }

  ULL_DEVICE void fetch_activations(int slot, const Cursor& cursor) {
    if (!has(cursor) || arch::lane() != 0) return;
    unsigned char* stage = ring_ + slot * Plan::kStageBytes + Plan::kWarpTiles * Plan::kStageTileBytes;
    for (int i = 0; i < steps_at(cursor); ++i) {
      arch::bulk_copy_stream(stage + i * Plan::kGroups * kGroupBytes,
                             static_cast<const unsigned char*>(params_.activations) +
                                 static_cast<int64_t>(cursor.step + i) * kActivationStepBytes,
                             Plan::kGroups * kGroupBytes, full_ + slot);
    }
  }

  const LinearParams& params_;
  unsigned char* ring_;
  arch::Barrier* full_;
  int first_tile_;
  int last_tile_;
  int first_slice_;
  int last_slice_;
  int slot_ = 0;
  uint32_t phase_ = 0;
  Cursor next_;  // to be fetched
};

}  // namespace ull::gpu
