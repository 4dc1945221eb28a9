// Linear layers for 16 tokens and more: a warp owns row tiles and all tokens, so that the warps of a block share each
// activation that it reads from L2. Layers with few rows are split along K besides: each part of the slices has as many
// blocks as the grid has for it, and they leave each slice's sums to the kernel that finishes the layer. Blocks that
// are left over have nothing to multiply. They wait like the others, so that the layer before lies on every
// multiprocessor when the next one's blocks come: no two of those find room on one (ull/gpu/geometry/linear.py says
// why).
//
// Where the chip has products of warpgroups (kInCores), the four warps of one multiply together: each its own row
// tiles, turned to f16 in registers, by activations that the tensor cores read from the ring themselves, once for all
// four. So a warp loads none of them, and what bounds 64 tokens otherwise, shared memory and instructions, does so no
// more. Sums and their bits are the same (docs/gpu.md says why), and so is what follows from them.
//
// Of 32 tokens and more two neighbouring blocks are a cluster then, and each brings half of the activations to both:
// those of 64 are half as many bytes as the weights, and all of these come from L2, which has little more to give than
// the memory behind it. The two keep step, also where one has fewer row tiles.
#pragma once

#include "linear/rows.cuh"
#include "linear/stream.cuh"

namespace ull::gpu {

inline constexpr int kWideThreads = 32 * kComputeWarps;

// The most parts of K that leave a block's row tiles within one pass, on an H200.
ULL_HOST_DEVICE constexpr int parts_of(int row_tiles, int pass_tiles) {
  constexpr int kMultiprocessors = 132;
  int parts = kSlices;
  while (parts > 1 && row_tiles * parts > pass_tiles * kMultiprocessors) parts /= 2;
  return parts;
}

// kSplit: see above. Else a block keeps the sums of the slices before, which takes twice the registers.
template <typename Shape_, int kTokens_, bool kSplit_>
struct WidePlan {
  using Shape = Shape_;
  static constexpr int kTokens = kTokens_;
  static constexpr bool kSplit = kSplit_;
  static constexpr int kGroups = kTokens / kGroupTokens;
  static constexpr bool kStageActivations = false;
  static constexpr int kWarpTiles = 2;
  static constexpr bool kPairs = false;
  static constexpr int kTileStride = kComputeWarps;
  static constexpr int kPassTiles = kWarpTiles * kTileStride;
  static constexpr int kParts = kSplit ? parts_of(Shape::kRowTiles, kPassTiles) : 1;  // of the slices
  static constexpr int kBlockSlices = kSlices / kParts;
  static constexpr int kStageSteps = 16 / Shape::kBits;
  static constexpr int kStageTileBytes = kStageSteps * Shape::kStepBytes;
  static constexpr int kStageBytes = kWarpTiles * kStageTileBytes;
  static constexpr bool kTogether = kInCores<kTokens>;                 // by warpgroups
  static constexpr int kCluster = kTogether && kTokens >= 32 ? 2 : 1;  // blocks that share the activations
  static constexpr int kTokenBytes = kTokens * kTokenStepBytes;        // of a step's activations
  static constexpr int kTokenStageBytes = kStageSteps * kTokenBytes;

  // Sums of 64 tokens, or two sets of 32, leave no room for a second block of 256 threads with 128 registers each. They
  // get 168 (as if 384 threads shared them), and small kernels still fit beside; two sets of 64 take all there are.
  static constexpr int kSets = (kSplit ? 1 : 2) * kTokens / 16;
  static constexpr int kBlocks = kSets <= 2 ? 2 : 1;
  static constexpr int kBoundThreads = kSets == 4 ? 384 : kWideThreads;
  // The rows' scales come while they are multiplied, but where a norm's block would find no registers beside this one.
  static constexpr bool kScalesEarly = !kSplit && kSets <= 2;
  static constexpr int kBytes = kSets <= 4 ? kBesideNormBytes : kWideBytes;
  static constexpr int kDepth =
      smaller(8, kBytes / (kComputeWarps * (kStageBytes + kBarrierBytes) + kTokenStageBytes + 2 * kBarrierBytes));
  static_assert(kDepth >= 2 && kDepth <= kComputeWarps);

  // Offsets in shared memory; the weights' rings come first.
  static constexpr int kTokensAt = kComputeWarps * kDepth * kStageBytes;
  static constexpr int kBarrierAt = kTokensAt + kDepth * kTokenStageBytes;
  static constexpr int kTokenBarrierAt = kBarrierAt + kComputeWarps * kDepth * kBarrierBytes;
  static_assert(kTokenBarrierAt + 2 * kDepth * kBarrierBytes <= kBytes);

  ULL_DEVICE static int row_blocks() {
    const int blocks = arch::grid_x() / kParts / kCluster * kCluster;
    return kSplit ? smaller(blocks, round_up(Shape::kRowTiles, kCluster)) : blocks;
  }
  ULL_DEVICE static int row_block() { return kSplit ? arch::block_x() % row_blocks() : arch::block_x(); }
  ULL_DEVICE static int part() { return kSplit ? arch::block_x() / row_blocks() : 0; }
  ULL_DEVICE static int warp_tile() { return arch::warp(); }
  ULL_DEVICE static int first_slice() { return part() * kBlockSlices; }
};

// A warp's weights and, in step with them, the block's activations: [step][token][32 columns] a stage, or as
// core_index() has them.
template <typename Plan>
class WideStream {
 public:
  using Shape = typename Plan::Shape;

  ULL_DEVICE WideStream(const LinearParams& params, unsigned char* shared)
      : weights_(params, shared),
        params_(params),
        ring_(shared + Plan::kTokensAt),
        full_(reinterpret_cast<arch::Barrier*>(shared + Plan::kTokenBarrierAt)),
        empty_(full_ + Plan::kDepth) {
    weights_.fill();
    if (arch::thread() == 0) {
#pragma unroll
      for (int i = 0; i < Plan::kDepth; ++i) {
        arch::barrier_init(full_ + i, 1);
        arch::barrier_init(empty_ + i, Plan::kCluster * kComputeWarps);
      }
      arch::fence_barrier_init();
    }
    if constexpr (Plan::kCluster > 1) {
      arch::cluster_start();
    } else {
      arch::block_barrier();
    }
  }

  // After the predecessor: the activations of all stages in the ring but the last, which the first release() brings.
  ULL_DEVICE void fill_activations() const {
    if (arch::lane() == 0) arch::fence_bulk_sources();
    if (arch::thread() != 0) return;
    for (int stage = 0; stage < smaller(Plan::kDepth - 1, weights_.stages()); ++stage) fetch(stage);
  }

  ULL_DEVICE const Stream<Plan>& weights() const { return weights_; }

  // A stage's activations, once they have arrived.
  ULL_DEVICE const unsigned char* wait(int stage) const {
    arch::barrier_wait(full_ + stage % Plan::kDepth, stage / Plan::kDepth % 2);
    return ring_ + stage % Plan::kDepth * Plan::kTokenStageBytes;
  }

  // The warp has read the stage, which it tells the block; or each block of the cluster, if the slot is filled anew: so
  // every arrival is waited for, and a block may end when its own work is done. The stage before it, which the others
  // have most likely read as well, is refilled with activations, by the warp that has its place's number.
  ULL_DEVICE void release(int stage) const {
    arch::warp_barrier();
    if constexpr (Plan::kCluster > 1) {
      const bool tells = arch::lane() < Plan::kCluster && stage + Plan::kDepth < weights_.stages();
      arch::barrier_arrive_in(arch::lane() % Plan::kCluster, empty_ + stage % Plan::kDepth, tells);
    } else if (arch::lane() == 0) {
      arch::barrier_arrive(empty_ + stage % Plan::kDepth);
    }
    weights_.refill(stage);
    const int next = stage + Plan::kDepth - 1;
    if (next % Plan::kDepth == arch::warp() && next < weights_.stages()) {
      arch::barrier_wait(empty_ + next % Plan::kDepth, (next / Plan::kDepth + 1) % 2);  // at once the first time round
      if (arch::lane() == 0) fetch(next);
    }
  }

 private:
  ULL_DEVICE void fetch(int stage) const {
    constexpr int kStride = Plan::kTogether ? Plan::kTokenBytes : kActivationStepBytes;  // of steps in memory
    const int slot = stage % Plan::kDepth;
    const int steps = weights_.steps(stage);
    const auto* activations =
        static_cast<const unsigned char*>(params_.activations) + static_cast<int64_t>(weights_.step(stage)) * kStride;
    unsigned char* target = ring_ + slot * Plan::kTokenStageBytes;
    const auto bytes = static_cast<uint32_t>(steps * Plan::kTokenBytes);
    arch::barrier_arrive_expect(full_ + slot, bytes);
    if constexpr (Plan::kCluster > 1) {  // the block's share, to all
      constexpr uint32_t kAll = (1U << Plan::kCluster) - 1;
      const uint32_t share = bytes / Plan::kCluster, at = static_cast<uint32_t>(arch::cluster_rank()) * share;
      if (Stream<Plan>::kWhole || steps > 0) {
        arch::bulk_copy_multicast(target + at, activations + at, share, full_ + slot, kAll);
      }
    } else if constexpr (Plan::kTogether) {
      if (Stream<Plan>::kWhole || steps > 0) arch::bulk_copy(target, activations, bytes, full_ + slot);
    } else {
#pragma unroll
      for (int i = 0; i < Plan::kStageSteps; ++i) {
        if (i >= steps) break;
        arch::bulk_copy(target + i * Plan::kTokenBytes, activations + i * kStride, Plan::kTokenBytes, full_ + slot);
      }
    }
  }

  Stream<Plan> weights_;
  const LinearParams& params_;
  unsigned char* ring_;
  arch::Barrier* full_;
  arch::Barrier* empty_;
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
    if (Stream<Plan>::kWhole || s < steps) {
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

// The same by a warpgroup, whose warps have kTiles row tiles at most; this one has `tiles`, perhaps none.
template <typename Plan, int kTiles>
ULL_DEVICE void multiply_stage_together(Sums<Plan>& sums, const unsigned char* weights, int tiles,
                                        const unsigned char* tokens, int steps) {
  using Shape = typename Plan::Shape;
  uint32_t a[Plan::kStageSteps][kTiles][2][4];
#pragma unroll
  for (int s = 0; s < Plan::kStageSteps; ++s) {
#pragma unroll
    for (int r = 0; r < kTiles; ++r) {
      Weights<Shape::kBits> raw{};
      if (r < tiles && (Stream<Plan>::kWhole || s < steps)) {
        raw.load(weights + r * Plan::kStageTileBytes + s * Shape::kStepBytes);
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) raw.operand(j, a[s][r][j]);
    }
  }
  constexpr int kQuarter = Plan::kTokenBytes / 4;
  const uint64_t first = arch::core_matrices(tokens, kQuarter, kCoreBytes);
  arch::warpgroup_fence();
#pragma unroll
  for (int s = 0; s < Plan::kStageSteps; ++s) {
    if (Stream<Plan>::kWhole || s < steps) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint64_t b = first + static_cast<uint64_t>((s * Plan::kTokenBytes + 2 * j * kQuarter) / 16);
#pragma unroll
        for (int r = 0; r < kTiles; ++r) arch::warpgroup_mma(sums.value[r], a[s][r][j], b);
      }
    }
  }
  arch::warpgroup_commit();
#pragma unroll
  for (int r = 0; r < kTiles; ++r) arch::warpgroup_wait<0>(sums.value[r]);
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

// Defines the kernel of a plan for 32 tokens or more: ULL_WIDE_KERNEL(name, Plan) { ... params ... }
#if ULL_WARPGROUP_TREES
#define ULL_WIDE_KERNEL(name, Plan) \
  ULL_ROW_CLUSTER_KERNEL(name, LinearParams, Plan::kBoundThreads, Plan::kBlocks, Plan::kCluster)
#else
#define ULL_WIDE_KERNEL(name, Plan) ULL_KERNEL(name, LinearParams, Plan::kBoundThreads, Plan::kBlocks)
#endif

// The kernel. Epilogue: finish_tile(params, scale, tile, count, sums) of a row tile's groups, where scale is what
// load_tile(params, tile) has loaded; unused by split layers. kAhead: see ahead.cuh.
template <typename Plan, typename Epilogue, int kAhead = kAheadOfLongBytes>
ULL_DEVICE void linear_wide(const LinearParams& params) {
  arch::release_dependents();
  if (Plan::kSplit && Plan::part() >= Plan::kParts) return arch::wait_for_predecessor();
  WideStream<Plan> stream(params, arch::shared_memory());
  const Stream<Plan>& weights = stream.weights();
  weights.template fetch_ahead<kAhead>();
  const int count = token_count(params.round);
  arch::wait_for_predecessor();
  if (count == 0) {
    weights.drain();
    return;
  }
  stream.fill_activations();

  Sums<Plan> totals;
  typename Epilogue::Operands scales[Plan::kWarpTiles];
  for (int stage = 0; stage < weights.stages();) {
    Sums<Plan> sums{};
    const int begin = stage;
    if constexpr (Plan::kScalesEarly) {
#pragma unroll
      for (int r = 0; r < Plan::kWarpTiles; ++r) {
        const bool begins = weights.slice(begin) == 0 && r < weights.tiles(begin);
        if (begins) scales[r] = Epilogue::load_tile(params, weights.tile(begin) + r * Plan::kTileStride);
      }
    }
#pragma unroll 1
    for (; stage < begin + weights.kSliceStages; ++stage) {
      const unsigned char* place = weights.wait(stage);
      const unsigned char* tokens = stream.wait(stage);
      const int tiles = weights.tiles(stage), steps = weights.steps(stage);
      if constexpr (Plan::kTogether) {
        const int most = weights.tiles_from(weights.tile(stage) - arch::warp() % 4);  // the warpgroup's first warp's
        if (most == Plan::kWarpTiles) {
          multiply_stage_together<Plan, Plan::kWarpTiles>(sums, place, tiles, tokens, steps);
        } else if (most == 1) {
          multiply_stage_together<Plan, 1>(sums, place, tiles, tokens, steps);
        }
      } else if (tiles == Plan::kWarpTiles) {
        multiply_stage<Plan, Plan::kWarpTiles>(sums, place, tokens, steps);
      } else if (tiles == 1) {
        multiply_stage<Plan, 1>(sums, place, tokens, steps);
      }
      stream.release(stage);
    }

    const int slice = weights.slice(begin), tiles = weights.tiles(begin);
    // Where registers are few it is loaded again, rather than held in one.
    const int tokens_there = Plan::kBlocks == 2 ? count : token_count(params.round);
    if constexpr (!Plan::kSplit) totals.add(sums, slice == 0);
#pragma unroll
    for (int r = 0; r < Plan::kWarpTiles; ++r) {
      const int tile = weights.tile(begin) + r * Plan::kTileStride;
      if constexpr (Plan::kSplit) {
        if (r < tiles) store_slice<Plan>(params, slice, tile, tokens_there, sums.value[r]);
      } else {
        if (r < tiles && slice == kSlices - 1) {
          if (!Plan::kScalesEarly) scales[r] = Epilogue::load_tile(params, tile);
          Epilogue::finish_tile(params, scales[r], tile, tokens_there, totals.value[r]);
        }
      }
    }
  }
}

}  // namespace ull::gpu
