// Linear layers for 16 tokens and more: a warp owns row tiles and all tokens, so that the warps of a block share each
// activation that it reads from L2. Layers with few rows are split along K besides: a block (x, y) of the grid takes
// the row tiles of x and kSlices / grid_y slices, and leaves each slice's sums to the kernel that finishes the layer.
#pragma once

#include "rows.cuh"
#include "stream.cuh"

namespace ull::gpu {

inline constexpr int kWideThreads = 32 * kComputeWarps;

// kSplit: see above. Else a block keeps the sums of the slices before, which takes twice the registers.
template <typename Shape_, int kTokens_, bool kSplit_>
struct WidePlan {
  using Shape = Shape_;
  static constexpr int kTokens = kTokens_;
  static constexpr bool kSplit = kSplit_;
  static constexpr int kGroups = kTokens / kGroupTokens;
  static constexpr bool kStageActivations = false;
  static constexpr int kWarpTiles = 2;
  static constexpr int kTileStride = kComputeWarps;
  static constexpr int kPassTiles = kWarpTiles * kTileStride;
  static constexpr int kStageSteps = 16 / Shape::kBits;
  static constexpr int kStageTileBytes = kStageSteps * Shape::kStepBytes;
  static constexpr int kStageBytes = kWarpTiles * kStageTileBytes;
  static constexpr int kTokenStageBytes = kStageSteps * kTokens * kTokenStepBytes;
  static constexpr bool kWhole = Shape::kSteps % (kSlices * kStageSteps) == 0;

  static constexpr int kBlocks = kSplit || kTokens <= 32 ? 2 : 1;
  static constexpr int kBytes = kBlocks == 2 ? kNarrowBytes : kWideBytes;
  static constexpr int kDepth =
      smaller(8, kBytes / (kComputeWarps * (kStageBytes + kBarrierBytes) + kTokenStageBytes + 2 * kBarrierBytes));
  static_assert(kDepth >= 2);

  // Offsets in shared memory; the weights' rings come first.
  static constexpr int kTokensAt = kComputeWarps * kDepth * kStageBytes;
  static constexpr int kBarrierAt = kTokensAt + kDepth * kTokenStageBytes;
  static constexpr int kTokenBarrierAt = kBarrierAt + kComputeWarps * kDepth * kBarrierBytes;
  static_assert(kTokenBarrierAt + 2 * kDepth * kBarrierBytes <= kBytes);
};

// A warp's weights and, in step with them, the block's activations: [step][token][32 columns] a stage. The warps bring
// these in turn: the one whose turn it was refills a stage's place when all have read it, one stage later so that it
// seldom waits.
template <typename Plan>
class WideStream {
 public:
  using Shape = typename Plan::Shape;

  ULL_DEVICE WideStream(const LinearParams& params, unsigned char* shared, int first_slice, int last_slice)
      : weights_(params, shared, arch::warp(), first_slice, last_slice),
        params_(params),
        ring_(shared + Plan::kTokensAt),
        full_(reinterpret_cast<arch::Barrier*>(shared + Plan::kTokenBarrierAt)),
        empty_(full_ + Plan::kDepth) {
    weights_.fill();
    if (arch::thread() == 0) {
#pragma unroll
      for (int i = 0; i < Plan::kDepth; ++i) {
        arch::barrier_init(full_ + i, 1);
        arch::barrier_init(empty_ + i, kComputeWarps);
      }
      arch::fence_barrier_init();
    }
    arch::block_barrier();
  }

  // After the predecessor: the first stages' activations.
  ULL_DEVICE void fill_activations() {
    if (arch::thread() != 0) return;
    Cursor cursor = weights_.start();
    for (int slot = 0; slot < Plan::kDepth && weights_.has(cursor); ++slot) {
      fetch(slot, cursor.step, weights_.steps_at(cursor));
      weights_.advance(cursor);
    }
  }

  ULL_DEVICE void drain() { weights_.drain(); }
  ULL_DEVICE int tiles_at(int tile) const { return weights_.tiles_at(tile); }
  ULL_DEVICE const unsigned char* wait_weights() { return weights_.wait(); }
  ULL_DEVICE const unsigned char* wait_activations() const {
    arch::barrier_wait(full_ + weights_.slot(), weights_.phase());
    return ring_ + weights_.slot() * Plan::kTokenStageBytes;
  }

  // The warp has read the stage.
  ULL_DEVICE void release() {
    arch::warp_barrier();
    const int slot = weights_.slot();
    if (arch::lane() == 0) arch::barrier_arrive(empty_ + slot);
    if (late_steps_ > 0 && turn_ == arch::warp()) {
      const int before = slot == 0 ? Plan::kDepth - 1 : slot - 1;
      arch::barrier_wait(empty_ + before, weights_.phase() ^ (slot == 0 ? 1U : 0U));
      if (arch::lane() == 0) fetch(before, late_step_, late_steps_);
    }
    turn_ = (turn_ + 1) % kComputeWarps;
    late_step_ = weights_.next().step;
    late_steps_ = weights_.has(weights_.next()) ? weights_.steps_at(weights_.next()) : 0;
    weights_.refill();
  }

 private:
  ULL_DEVICE void fetch(int slot, int step, int steps) {
    constexpr int kBytes = Plan::kTokens * kTokenStepBytes;
    arch::barrier_arrive_expect(full_ + slot, static_cast<uint32_t>(steps * kBytes));
    for (int i = 0; i < steps; ++i) {
      arch::bulk_copy_stream(ring_ + slot * Plan::kTokenStageBytes + i * kBytes,
                             static_cast<const unsigned char*>(params_.activations) +
                                 static_cast<int64_t>(step + i) * kActivationStepBytes,
                             kBytes, full_ + slot);
    }
  }

  Stream<Plan> weights_;
  const LinearParams& params_;
  unsigned char* ring_;
  arch::Barrier* full_;
  arch::Barrier* empty_;
  int turn_ = 0;
  int late_step_ = 0;  // the activations that the stage before makes room for
  int late_steps_ = 0;
};

// A warp's accumulators.
template <typename Plan>
struct Sums {
  float value[Plan::kWarpTiles][Plan::kGroups][4];

  // += other, or = other.
  ULL_DEVICE void add(const Sums& other, bool first) {
#pragma unroll
    for (int r = 0; r < Plan::kWarpTiles; ++r) {
#pragma unroll
      for (int group = 0; group < Plan::kGroups; ++group) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float x = other.value[r][group][i];
          value[r][group][i] = first ? x : value[r][group][i] + x;
        }
      }
    }
  }
};

// sums += one stage of kTiles row tiles.
template <typename Plan, int kTiles>
ULL_DEVICE void multiply_stage(Sums<Plan>& sums, const unsigned char* weights, const unsigned char* tokens, int steps) {
#pragma unroll 1
  for (int s = 0; s < Plan::kStageSteps; ++s) {
    if (Plan::kWhole || s < steps) {
      uint32_t a[kTiles][2][4];
#pragma unroll
      for (int r = 0; r < kTiles; ++r) {
        Weights<Plan::Shape::kBits> raw;
        raw.load(weights + r * Plan::kStageTileBytes + s * Plan::Shape::kStepBytes);
        raw.operand(0, a[r][0]);
        raw.operand(1, a[r][1]);
      }
#pragma unroll
      for (int group = 0; group < Plan::kGroups; ++group) {
        const arch::Vector4 b =
            arch::load_shared(tokens + (s * Plan::kGroups + group) * kGroupBytes + arch::lane() * 16);
        const uint32_t low[2] = {b.word[0], b.word[1]};
        const uint32_t high[2] = {b.word[2], b.word[3]};
#pragma unroll
        for (int r = 0; r < kTiles; ++r) arch::mma(sums.value[r][group], a[r][0], low);
#pragma unroll
        for (int r = 0; r < kTiles; ++r) arch::mma(sums.value[r][group], a[r][1], high);
      }
    }
  }
}

// sums = one slice of the pass's row tiles.
template <typename Plan>
ULL_DEVICE void multiply_slice(Sums<Plan>& sums, WideStream<Plan>& stream, int slice, int tiles) {
  using Shape = typename Plan::Shape;
  sums = {};
  const int last = Shape::slice_begin(slice + 1);
  for (int step = Shape::slice_begin(slice); step < last; step += Plan::kStageSteps) {
    const unsigned char* weights = stream.wait_weights();
    const unsigned char* tokens = stream.wait_activations();
    if (tiles == Plan::kWarpTiles) {
      multiply_stage<Plan, Plan::kWarpTiles>(sums, weights, tokens, last - step);
    } else if (tiles == 1) {
      multiply_stage<Plan, 1>(sums, weights, tokens, last - step);
    }
    stream.release();
  }
}

// One slice's sums of a row tile: [slice][token][rows] f32.
template <typename Plan>
ULL_DEVICE void store_slice(const LinearParams& params, int slice, int tile, int count,
                            const float (&sums)[Plan::kGroups][4]) {
  constexpr int kRows = Plan::Shape::kPaddedRows;
  const int row = tile * kRowUnit + quad_row();
  float* address = params.partial + static_cast<int64_t>(slice * kTreeTokens + quad_token()) * kRows + row;
#pragma unroll
  for (int group = 0; group < Plan::kGroups; ++group) {
    const Four four = quad(sums[group]);
    if (group * kGroupTokens + quad_token() < count) store_four(address + group * kGroupTokens * kRows, four);
  }
}

// The kernel. Epilogue: finish_tile(params, tile, count, sums) of a row tile's groups; unused by split layers.
template <typename Plan, typename Epilogue>
ULL_DEVICE void linear_wide(const LinearParams& params) {
  using Shape = typename Plan::Shape;
  const int slices = kSlices / arch::grid_y();
  const int first_slice = arch::block_y() * slices;
  arch::release_dependents();
  WideStream<Plan> stream(params, arch::shared_memory(), first_slice, first_slice + slices);
  arch::wait_for_predecessor();
  const int count = token_count(params.round);
  if (count == 0) {
    stream.drain();
    return;
  }
  stream.fill_activations();

  for (int pass = Shape::first_tile(); pass < Shape::last_tile(); pass += Plan::kPassTiles) {
    const int tile = pass + arch::warp();
    const int tiles = stream.tiles_at(pass);
    Sums<Plan> totals;
    for (int slice = first_slice; slice < first_slice + slices; ++slice) {
      Sums<Plan> sums;
      multiply_slice<Plan>(sums, stream, slice, tiles);
      if constexpr (Plan::kSplit) {
#pragma unroll
        for (int r = 0; r < Plan::kWarpTiles; ++r) {
          if (r < tiles) store_slice<Plan>(params, slice, tile + r * Plan::kTileStride, count, sums.value[r]);
        }
      } else {
        totals.add(sums, slice == 0);
      }
    }
    if constexpr (!Plan::kSplit) {
#pragma unroll
      for (int r = 0; r < Plan::kWarpTiles; ++r) {
        if (r < tiles) Epilogue::finish_tile(params, tile + r * Plan::kTileStride, count, totals.value[r]);
      }
    }
  }
}

}  // namespace ull::gpu
