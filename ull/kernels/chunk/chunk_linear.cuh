// y = W x of a chunk: a block computes 128 rows for 128 tokens at a time, by two warpgroups of 64 rows each; a third
// brings weights and activations through a ring of stages. A block does so for one task after another, and while two
// warpgroups finish one, the third already brings the next one's: on an H100 a layer's blocks spent a third of their
// time at the beginnings and ends of tasks when each of these had a block of its own. Grid: y = blocks, of clusters.
//
// Two blocks of rows for the same tokens are a cluster: each brings half of every stage's activations, to both. A
// block's stage of 128 columns is then 16 KiB of FP8 weights and 16 KiB of activations from L2, whose bandwidth bounds
// these kernels, instead of 32 KiB of activations. The last rows may leave a block without any, which does what the
// other needs of it and stores nothing.
//
// Every output is what the kernels for a round make of it, bit for bit: the sum of its slices in ascending order, each
// a chain of products of 16 columns over the slice's steps (linear.cuh). The products are the warpgroup's instead of a
// warp's; docs/gpu.md says why both add alike.
#pragma once

#include "chunk/layout.cuh"
#include "linear/rows.cuh"

namespace ull::gpu {

inline constexpr int kWarpgroups = 2;
inline constexpr int kChunkThreads = 128 * kWarpgroups + 128;  // a warpgroup brings what the others multiply,
inline constexpr int kBringRegisters = 24;                     // and gives them registers
inline constexpr int kMultiplyRegisters = 240;
inline constexpr int kChunkTiles = 4 * kWarpgroups;  // row tiles of a block, one for each warp
inline constexpr int kChunkGroups = kChunkTile / kGroupTokens;
inline constexpr int kChunkCluster = 2;  // blocks of rows

template <typename Shape_>
struct ChunkPlan {
  using Shape = Shape_;

  // Steps of a stage: the most that divide every slice, so that all stages are whole.
  ULL_HOST_DEVICE static constexpr int stage_steps() {
    for (int steps = 4; steps > 1; steps /= 2) {
      bool divides = true;
      for (int slice = 0; slice < kSlices; ++slice) {
        divides = divides && (Shape::slice_begin(slice + 1) - Shape::slice_begin(slice)) % steps == 0;
      }
      if (divides) return steps;
    }
    return 1;
  }

  static constexpr int kStageSteps = stage_steps();
  static constexpr int kHalves = kStageSteps > 1 ? 2 : 1;  // parts of a stage: one is turned to f16, one multiplied
  static constexpr int kHalfSteps = kStageSteps / kHalves;
  static constexpr int kStages = Shape::kSteps / kStageSteps;
  static constexpr int kTileStageBytes = kStageSteps * Shape::kStepBytes;  // weights of a row tile
  static constexpr int kTokenStageBytes = kStageSteps * kChunkStepBytes;
  static constexpr int kShareBytes = kTokenStageBytes / kChunkCluster;  // of them, that a block of the cluster brings
  static constexpr int kStageBytes = kTokenStageBytes + kChunkTiles * kTileStageBytes;
  static constexpr int kDepth = smaller(8, kWideBytes / (kStageBytes + 2 * kBarrierBytes));
  static_assert(Shape::kSteps % kStageSteps == 0 && kDepth >= 2);
  static_assert(kTokenStageBytes % (16 * kChunkCluster) == 0);

  static constexpr int kWeightsAt = kDepth * kTokenStageBytes;  // offsets in shared memory; activations come first
  static constexpr int kBarriersAt = kDepth * kStageBytes;
};

// What a cluster has to do: a task is two blocks of rows for a tile of tokens. Clusters that run together have the same
// rows, for different tokens, so they read the same weights.
struct ChunkTasks {
  int tiles;  // of tokens
  int count;  // of the cluster's tasks

  ULL_DEVICE static ChunkTasks of(int tokens, int row_tiles) {
    constexpr int kTaskRows = kChunkCluster * kChunkTiles;  // in row tiles
    const int tiles = (tokens + kChunkTile - 1) / kChunkTile;
    const int left = tiles * ((row_tiles + kTaskRows - 1) / kTaskRows) - first();
    return {tiles, left > 0 ? (left + clusters() - 1) / clusters() : 0};
  }
  ULL_DEVICE int token(int task) const { return (first() + task * clusters()) % tiles * kChunkTile; }  // the first
  ULL_DEVICE int row_tile(int task) const {  // the block's first
    return ((first() + task * clusters()) / tiles * kChunkCluster + arch::cluster_rank()) * kChunkTiles;
  }

 private:
  ULL_DEVICE static int first() { return arch::block_y() / kChunkCluster; }
  ULL_DEVICE static int clusters() { return arch::grid_y() / kChunkCluster; }
};

// The ring: [stage][activations], then [stage][row tile][weights], and two barriers for each stage. A slot is filled
// anew when it is empty in all blocks of the cluster, since each brings a part of its activations to all: `empty`
// counts the warps of all blocks, `full` what comes to the own one. Stages are counted through all tasks.
template <typename Plan>
class ChunkRing {
 public:
  using Shape = typename Plan::Shape;

  // By all threads of the cluster; the barriers are ready when it returns.
  ULL_DEVICE ChunkRing(unsigned char* shared, const ChunkTasks& tasks)
      : shared_(shared),
        full_(reinterpret_cast<arch::Barrier*>(shared + Plan::kBarriersAt)),
        empty_(full_ + Plan::kDepth),
        tasks_(tasks) {
    if (arch::thread() == 0) {
#pragma unroll
      for (int i = 0; i < Plan::kDepth; ++i) {
        arch::barrier_init(full_ + i, 1);
        arch::barrier_init(empty_ + i, kChunkCluster * 4 * kWarpgroups);
      }
      arch::fence_barrier_init();
    }
    arch::cluster_barrier();
  }

  ULL_DEVICE int stages() const { return tasks_.count * Plan::kStages; }

  // ---- by one thread: brings stages --------------------------------------------------------------------------------

  // Announces a stage and brings its weights, of the block's row tiles.
  ULL_DEVICE void bring_weights(const ChunkLinearParams& params, int stage) const {
    const int slot = stage % Plan::kDepth, first = tasks_.row_tile(stage / Plan::kStages);
    const int tiles = larger(smaller(kChunkTiles, Shape::kRowTiles - first), 0);
    arch::barrier_wait(empty_ + slot, (stage / Plan::kDepth + 1) % 2);  // at once the first time round
    arch::barrier_arrive_expect(full_ + slot,
                                static_cast<uint32_t>(Plan::kTokenStageBytes + tiles * Plan::kTileStageBytes));
    const auto* weights =
        static_cast<const unsigned char*>(params.weights) +
        (int64_t{first} * Shape::kSteps + stage % Plan::kStages * Plan::kStageSteps) * Shape::kStepBytes;
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      arch::bulk_copy(weights_at(slot, tile), weights + int64_t{tile} * Shape::kSteps * Shape::kStepBytes,
                      Plan::kTileStageBytes, full_ + slot);
    }
  }
  // Brings the block's share of an announced stage's activations, to all blocks of the cluster.
  ULL_DEVICE void bring_activations(const ChunkLinearParams& params, int stage) const {
    const int slot = stage % Plan::kDepth, share = arch::cluster_rank() * Plan::kShareBytes;
    const int tile = tasks_.token(stage / Plan::kStages) / kChunkTile;
    const auto* activations =
        static_cast<const unsigned char*>(params.activations) +
        (int64_t{tile} * Shape::kSteps + stage % Plan::kStages * Plan::kStageSteps) * kChunkStepBytes;
    arch::bulk_copy_multicast(tokens_at(slot) + share, activations + share, Plan::kShareBytes, full_ + slot,
                              (1U << kChunkCluster) - 1);
  }

  // ---- by the warps that multiply ----------------------------------------------------------------------------------

  ULL_DEVICE void wait(int stage) const { arch::barrier_wait(full_ + stage % Plan::kDepth, stage / Plan::kDepth % 2); }
  // The warp and its warpgroup's products have read the stage, which it tells each block of the cluster if the slot is
  // filled anew: so every arrival is waited for, and a block may end when its own work is done. Of the stage before the
  // first there is nothing to say. No branch stands here: among products in flight one would have the assembler wait
  // for each of them.
  ULL_DEVICE void release(int stage) const {
    const auto refilled = static_cast<uint32_t>(larger(stages() - Plan::kDepth, 0));
    arch::warp_barrier();
    const int rank = arch::lane();
    const bool tells = (rank < kChunkCluster) & (static_cast<uint32_t>(stage) < refilled);
    arch::barrier_arrive_in(rank, empty_ + stage % Plan::kDepth, tells);
  }
  ULL_DEVICE unsigned char* tokens_at(int slot) const { return shared_ + slot * Plan::kTokenStageBytes; }
  ULL_DEVICE unsigned char* weights_at(int slot, int tile) const {
    return shared_ + Plan::kWeightsAt + (slot * kChunkTiles + tile) * Plan::kTileStageBytes;
  }

 private:
  unsigned char* shared_;
  arch::Barrier* full_;
  arch::Barrier* empty_;
  ChunkTasks tasks_;
};

// A warp's sums of its row tile, as mma() has them: [group of eight tokens].
using ChunkSums = float[kChunkGroups][4];

// sums += part `half` of a stage. `a`: where its weights are turned to f16; the products read them from there until
// they have been waited for.
template <typename Plan>
ULL_DEVICE void multiply_half(ChunkSums& sums, uint32_t (&a)[Plan::kHalfSteps][2][4], const unsigned char* weights,
                              const unsigned char* tokens, int half) {
#pragma unroll
  for (int s = 0; s < Plan::kHalfSteps; ++s) {
    Weights<Plan::Shape::kBits> raw;
    raw.load(weights + (half * Plan::kHalfSteps + s) * Plan::Shape::kStepBytes);
#pragma unroll
    for (int j = 0; j < 2; ++j) raw.operand(j, a[s][j]);
  }
  const uint64_t first = arch::core_matrices(tokens, kQuarterBytes, kCoreBytes);
  arch::warpgroup_fence();
#pragma unroll
  for (int s = 0; s < Plan::kHalfSteps; ++s) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int offset = (half * Plan::kHalfSteps + s) * kChunkStepBytes + 2 * j * kQuarterBytes;
      arch::warpgroup_mma(sums, a[s][j], first + static_cast<uint64_t>(offset / 16));
    }
  }
  arch::warpgroup_commit();
}

// sums += a stage. behind(half): what is done while part `half` is multiplied; no branch may stand in it.
template <typename Plan, typename Behind>
ULL_DEVICE void multiply_stage(const ChunkRing<Plan>& ring, int stage, ChunkSums& sums,
                               uint32_t (&a)[Plan::kHalves][Plan::kHalfSteps][2][4], const Behind& behind) {
  const int slot = stage % Plan::kDepth;
  ring.wait(stage);
#pragma unroll
  for (int half = 0; half < Plan::kHalves; ++half) {
    // Then the part before the last one has been multiplied: its registers are free, and behind the last part of a
    // stage the stage before.
    arch::warpgroup_wait<Plan::kHalves - 1>(sums);
    if (half == Plan::kHalves - 1) ring.release(stage - 1);
    multiply_half<Plan>(sums, a[half], ring.weights_at(slot, arch::warp()), ring.tokens_at(slot), half);
    behind(half);
  }
}

// The warp's row tile for a tile of tokens, by the task's stages from `stage` on -> totals. finish(group): does what is
// left to do with what the totals held of the task before, while this one's first slice is multiplied.
template <typename Plan, typename Finish>
ULL_DEVICE void multiply_chunk(const ChunkRing<Plan>& ring, int stage, ChunkSums& totals, const Finish& finish) {
  using Shape = typename Plan::Shape;
  constexpr int kFinishing = smaller(4, Shape::slice_begin(1) / Plan::kStageSteps);  // stages; a slice may have none
  constexpr int kGroups = (kChunkGroups - 1) / larger(kFinishing * Plan::kHalves, 1) + 1;  // behind each half
  uint32_t a[Plan::kHalves][Plan::kHalfSteps][2][4];
  const int first_stage = stage;
  const auto nothing = [](int) {};
#pragma unroll 1
  for (int slice = 0; slice < kSlices; ++slice) {
    ChunkSums sums;
#pragma unroll
    for (int i = 0; i < 4 * kChunkGroups; ++i) sums[i / 4][i % 4] = 0.0F;
    if (slice == 0) {
#pragma unroll
      for (int i = 0; i < kFinishing; ++i) {
        multiply_stage(ring, stage++, sums, a, [&](int half) {
#pragma unroll
          for (int group = 0; group < kGroups; ++group) {
            const int next = (i * Plan::kHalves + half) * kGroups + group;
            if (next < kChunkGroups) finish(next);
          }
        });
      }
      if constexpr (kFinishing == 0) {
#pragma unroll
        for (int group = 0; group < kChunkGroups; ++group) finish(group);
      }
    }
    const int end = first_stage + Shape::slice_begin(slice + 1) / Plan::kStageSteps;
#pragma unroll 1
    for (; stage < end; ++stage) multiply_stage(ring, stage, sums, a, nothing);
    arch::warpgroup_wait<0>(sums);
#pragma unroll
    for (int i = 0; i < 4 * kChunkGroups; ++i) {
      const float sum = sums[i / 4][i % 4];
      totals[i / 4][i % 4] = slice == 0 ? sum : totals[i / 4][i % 4] + sum;
    }
  }
}

// A warp's part of a task, whose totals an epilogue stores: begin(output), then finish(group, four) of each group of
// eight tokens. It computes for all of them and stores for those below `count`: products are in flight meanwhile, and
// with a branch among them the assembler would wait for each.
struct ChunkOutput {
  int tile;         // of rows
  int first_token;  // of the tile of tokens
  int count;        // of the chunk's tokens; 0: nothing is stored
};

// The kernel.
template <typename Shape, typename Epilogue>
ULL_DEVICE void chunk_linear(const ChunkLinearParams& params) {
  using Plan = ChunkPlan<Shape>;
  arch::release_dependents();
  const int count = chunk_extent(params.chunk).count;
  const ChunkTasks tasks = ChunkTasks::of(count, Shape::kRowTiles);
  const ChunkRing<Plan> ring(arch::shared_memory(), tasks);
  const int ahead = smaller(Plan::kDepth, ring.stages());
  const bool brings = arch::thread() == 128 * kWarpgroups;
  if (brings) {
    for (int stage = 0; stage < ahead; ++stage) ring.bring_weights(params, stage);
  }
  arch::wait_for_predecessor();
  if (tasks.count == 0) return;  // with the whole cluster
  if (arch::warp() >= 4 * kWarpgroups) {
    arch::give_registers_up<kBringRegisters>();
    if (!brings) return;
    arch::fence_bulk_sources();
    for (int stage = 0; stage < ahead; ++stage) ring.bring_activations(params, stage);
    for (int stage = ahead; stage < ring.stages(); ++stage) {
      ring.bring_weights(params, stage);
      ring.bring_activations(params, stage);
    }
    return;
  }
  arch::want_registers<kMultiplyRegisters>();
  ChunkSums totals = {};
  Epilogue epilogue(params);
  const auto finish = [&](int group) { epilogue.finish(group, totals[group]); };
#pragma unroll 1
  for (int task = 0; task < tasks.count; ++task) {
    multiply_chunk<Plan>(ring, task * Plan::kStages, totals, finish);
    const int tile = tasks.row_tile(task) + arch::warp();
    epilogue.begin({tile, tasks.token(task), tile < Shape::kRowTiles ? count : 0});
  }
#pragma unroll
  for (int group = 0; group < kChunkGroups; ++group) finish(group);
}

// ---- epilogues ------------------------------------------------------------------------------------------------------

// Rows of f32, of which a lane has four neighbours for a token of each group.
class ChunkRowOutput {
 public:
  // stride: of a token's rows.
  ULL_DEVICE ChunkRowOutput(const ChunkLinearParams& params, int64_t stride) : params_(params), stride_(stride) {}

  ULL_DEVICE void begin(const ChunkOutput& output) {
    const int row = output.tile * kRowUnit + quad_row();
    token_ = output.first_token + quad_token();
    count_ = output.count;
    at_ = static_cast<float*>(params_.output) + token_ * stride_ + row;
    if (count_ != 0) rows_ = load_row_scale(params_.scale, params_.bias, row);
  }

 protected:
  ULL_DEVICE bool stores(int group) const { return token_ + group * kGroupTokens < count_; }
  ULL_DEVICE float* at(int group) const { return at_ + group * kGroupTokens * stride_; }
  RowScale rows_{};

 private:
  const ChunkLinearParams& params_;
  int64_t stride_;
  float* at_ = nullptr;
  int token_ = 0;
  int count_ = 0;
};

// f32 [kChunkTokens, rows rounded up to 16].
template <int kRows>
struct StoreChunkRows : ChunkRowOutput {
  ULL_DEVICE explicit StoreChunkRows(const ChunkLinearParams& params)
      : ChunkRowOutput(params, round_up(kRows, kRowUnit)) {}

  ULL_DEVICE void finish(int group, const float (&sums)[4]) const {
    const Four four = scaled(quad(sums), rows_);
    if (stores(group)) store_four(at(group), four);
  }
};

// Added to the f32 residual [kChunkTokens, H]. The activations are in units of 1 / kUnit.
template <int kUnit>
struct AddChunkRows : ChunkRowOutput {
  ULL_DEVICE explicit AddChunkRows(const ChunkLinearParams& params) : ChunkRowOutput(params, kResidualStride) {}

  ULL_DEVICE void finish(int group, const float (&sums)[4]) const {
    const Four four = scaled(quad(sums), rows_, kUnit);
    arch::Vector4 before{};
    if (stores(group)) before = arch::load_global(at(group));
    const Four sum = added(load_four(before), four);
    if (stores(group)) store_four(at(group), sum);
  }
};

}  // namespace ull::gpu
