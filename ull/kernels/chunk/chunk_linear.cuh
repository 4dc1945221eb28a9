// y = W x of a chunk: a block computes 128 rows for 128 tokens, by two warpgroups of 64 rows each; a third brings
// weights and activations through a ring of stages. Blocks that run together read the same weights (block_share).
//
// Two blocks of rows for the same tokens are a cluster: each brings half of every stage's activations, to both. A
// block's stage of 128 columns is then 16 KiB of FP8 weights and 16 KiB of activations from L2, whose bandwidth bounds
// these kernels, instead of 32 KiB of activations. The last cluster may have a block without rows, which does what the
// other needs of it and stores nothing.
//
// Every output is what the kernels for a round make of it, bit for bit: the sum of its slices in ascending order, each
// a chain of products of 16 columns over the slice's steps (linear.cuh). The products are the warpgroup's instead of a
// warp's; docs/gpu.md says why both add alike.
//
// Of o and down the rows alone do not fill the chip when a chunk has one tile of tokens: there each cluster takes a
// part of the slices, whose sums stay apart until the next norm adds them.
//
// Where the last blocks would leave half of the chip idle or more, blocks of 64 rows take their place, twice as many,
// in which one warpgroup multiplies (ChunkLinearParams::whole). Not so where prompts are read fast.
//
// The sums are others where a bundle's prompts are read fast: there weights and activations are multiplied as the e4m3
// that they are stored as, 32 columns by a product. Every stage's sum is added to the total in f32, since those of e4m3
// products keep few bits. An output depends on neither its place nor what else the chunk holds.
#pragma once

#include "chunk/fast_activations.cuh"
#include "linear/rows.cuh"

namespace ull::gpu {

inline constexpr int kWarpgroups = 2;
inline constexpr int kChunkThreads = 128 * kWarpgroups + 128;  // a warpgroup brings what the others multiply,
inline constexpr int kBringRegisters = 40;                     // and gives them registers
inline constexpr int kMultiplyRegisters = 232;
inline constexpr int kChunkTiles = 4 * kWarpgroups;  // row tiles of a block, one for each warp
inline constexpr int kChunkGroups = kChunkTile / kGroupTokens;
inline constexpr int kChunkCluster = 2;  // blocks of rows
static_assert(kSlices % kChunkParts == 0 && kWarpgroups == 2);

// What a block multiplies.
struct BlockShare {
  int first_tile, warpgroups;  // its row tiles, four for each warpgroup that multiplies
  int first_token;
  int first, end;  // slices
  bool apart;      // their sums are left in `partial`
  bool idle;       // nothing, with its whole cluster
  ULL_DEVICE int own_tile() const { return first_tile + arch::warp(); }
};

// The grid's first clusters, in the order in which they begin, have all the work: the same rows for all columns (tiles
// of tokens, or parts of the slices), then the next rows.
template <typename Shape>
ULL_DEVICE BlockShare block_share(const ChunkLinearParams& params, int count, bool may_split) {
  const int last_part = larger(count - 1, 0) / kChunkTile, whole = params.whole[last_part];
  const bool apart = may_split && params.partial != nullptr && last_part == 0;
  const int columns = apart ? kChunkParts : last_part + 1;
  const int cluster = arch::block_x() + arch::grid_x() * (arch::block_y() / kChunkCluster);
  const int row_cluster = cluster / columns, column = cluster - row_cluster * columns;
  const int warpgroups = row_cluster < whole ? kWarpgroups : kWarpgroups / 2;
  const int cluster_tile =
      kChunkCluster * 4 * (kWarpgroups * smaller(row_cluster, whole) + larger(row_cluster - whole, 0));
  constexpr int kPart = kSlices / kChunkParts;
  return {.first_tile = cluster_tile + 4 * warpgroups * arch::cluster_rank(),
          .warpgroups = warpgroups,
          .first_token = apart ? 0 : column * kChunkTile,
          .first = apart ? column * kPart : 0,
          .end = apart ? (column + 1) * kPart : kSlices,
          .apart = apart,
          .idle = count < 1 || cluster_tile >= Shape::kRowTiles};
}

template <typename Shape_>
struct ChunkPlan {
  using Shape = Shape_;

  // Steps of a stage: the most that divide every slice, so that all stages are whole. Fast, there are no slices.
  ULL_HOST_DEVICE static constexpr int stage_steps() {
    for (int steps = 4; steps > 1; steps /= 2) {
      bool divides = Shape::kSteps % steps == 0;
      for (int slice = 0; slice < kSlices && !kFastPrefill; ++slice) {
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
  static constexpr int kTokensStepBytes = kFastPrefill ? kFastStepBytes : kChunkStepBytes;
  static constexpr int kTokenStageBytes = kStageSteps * kTokensStepBytes;
  static constexpr int kShareBytes = kTokenStageBytes / kChunkCluster;  // of them, that a block of the cluster brings
  static constexpr int kStageBytes = kTokenStageBytes + kChunkTiles * kTileStageBytes;
  static constexpr int kDepth = smaller(8, kWideBytes / (kStageBytes + 2 * kBarrierBytes));
  static_assert(Shape::kSteps % kStageSteps == 0 && kDepth >= 2);
  static_assert(kTokenStageBytes % (16 * kChunkCluster) == 0);

  static constexpr int kWeightsAt = kDepth * kTokenStageBytes;  // offsets in shared memory; activations come first
  static constexpr int kBarriersAt = kDepth * kStageBytes;
};

// The ring: [stage][activations], then [stage][row tile][weights], and two barriers for each stage. A slot is filled
// anew when it is empty in all blocks of the cluster, since each brings a part of its activations to all: `empty`
// counts the warps of all blocks, `full` what comes to the own one.
template <typename Plan>
class ChunkRing {
 public:
  using Shape = typename Plan::Shape;

  // Stages count from the share's first one.
  ULL_DEVICE ChunkRing(unsigned char* shared, const BlockShare& share)
      : shared_(shared),
        first_tile_(share.first_tile),
        tiles_(larger(smaller(4 * share.warpgroups, Shape::kRowTiles - share.first_tile), 0)),
        begin_(share.apart ? stage_of(share.first) : 0),
        stages_((share.apart ? stage_of(share.end) : Plan::kStages) - begin_),
        full_(reinterpret_cast<arch::Barrier*>(shared + Plan::kBarriersAt)),
        empty_(full_ + Plan::kDepth) {}

  // By all threads of the cluster; the barriers are ready when it returns.
  ULL_DEVICE void start(const BlockShare& share) const {
    if (arch::thread() == 0) {
#pragma unroll
      for (int i = 0; i < Plan::kDepth; ++i) {
        arch::barrier_init(full_ + i, 1);
        arch::barrier_init(empty_ + i, kChunkCluster * 4 * share.warpgroups);
      }
      arch::fence_barrier_init();
    }
    arch::cluster_start();
  }

  ULL_DEVICE int stages() const { return stages_; }
  // The stage behind that slice.
  ULL_DEVICE int end_of(int slice) const { return stage_of(slice + 1) - begin_; }

  // ---- by one thread of each of the four warps that bring stages: a copy takes one some 70 cycles to issue ---------

  // Whether this one has anything to bring. Nobody waits for one that has not: if it waited for a slot to become empty,
  // the ring could go round twice meanwhile, and it would wait for ever.
  ULL_DEVICE bool has_share() const {
    const int own = arch::warp() % 4;
    return own == 0 || own == 3 || own < tiles_;
  }
  // Brings weights of a stage, of every fourth of the block's row tiles. The first thread announces it: what others
  // have brought by then counts.
  ULL_DEVICE void bring_weights(const ChunkLinearParams& params, int stage) const {
    const int slot = stage % Plan::kDepth, own = arch::warp() % 4;
    arch::barrier_wait(empty_ + slot, (stage / Plan::kDepth + 1) % 2);  // at once the first time round
    if (own == 0) {
      arch::barrier_arrive_expect(full_ + slot,
                                  static_cast<uint32_t>(Plan::kTokenStageBytes + tiles_ * Plan::kTileStageBytes));
    }
    const auto* weights =
        static_cast<const unsigned char*>(params.weights) +
        (int64_t{first_tile_} * Shape::kSteps + (begin_ + stage) * Plan::kStageSteps) * Shape::kStepBytes;
#pragma unroll 1
    for (int tile = own; tile < tiles_; tile += 4) {
      arch::bulk_copy(weights_at(slot, tile), weights + int64_t{tile} * Shape::kSteps * Shape::kStepBytes,
                      Plan::kTileStageBytes, full_ + slot);
    }
  }
  // By the last thread: the block's share of a stage's activations, to all blocks of the cluster.
  ULL_DEVICE void bring_activations(const ChunkLinearParams& params, int first_token, int stage) const {
    if (arch::warp() % 4 != 3) return;
    const int slot = stage % Plan::kDepth, at = arch::cluster_rank() * Plan::kShareBytes;
    const auto* activations =
        static_cast<const unsigned char*>(params.activations) +
        (int64_t{first_token / kChunkTile} * Shape::kSteps + (begin_ + stage) * Plan::kStageSteps) *
            Plan::kTokensStepBytes;
    arch::bulk_copy_multicast(tokens_at(slot) + at, activations + at, Plan::kShareBytes, full_ + slot,
                              (1U << kChunkCluster) - 1);
  }

  // ---- by the warps that multiply ----------------------------------------------------------------------------------

  ULL_DEVICE void wait(int stage) const { arch::barrier_wait(full_ + stage % Plan::kDepth, stage / Plan::kDepth % 2); }
  // The warp and its warpgroup's products have read the stage, which it tells each block of the cluster if the slot is
  // filled anew: so every arrival is waited for, and a block may end when its own work is done. Of the stage before the
  // first there is nothing to say. No branch stands here: among products in flight one would have the assembler wait
  // for each of them.
  ULL_DEVICE void release(int stage) const {
    const auto refilled = static_cast<uint32_t>(larger(stages_ - Plan::kDepth, 0));
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
  ULL_DEVICE static int stage_of(int slice) { return Shape::slice_begin(slice) / Plan::kStageSteps; }

  unsigned char* shared_;
  int first_tile_, tiles_;
  int begin_, stages_;
  arch::Barrier* full_;
  arch::Barrier* empty_;
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

// The sums of the warp's row tile for the block's tokens, slice by slice: take(slice, sums).
template <typename Plan, typename Take>
ULL_DEVICE void multiply_chunk(const ChunkRing<Plan>& ring, const BlockShare& share, const Take& take) {
  uint32_t a[Plan::kHalves][Plan::kHalfSteps][2][4];
  int stage = 0;
  if constexpr (trace::kStamps) ring.wait(stage);
  trace::mark(trace::kFirstUsed);
#pragma unroll 1
  for (int slice = share.first; slice < share.end; ++slice) {
    ChunkSums sums;
#pragma unroll
    for (int i = 0; i < 4 * kChunkGroups; ++i) sums[i / 4][i % 4] = 0.0F;
    const int end = ring.end_of(slice);
#pragma unroll 1
    for (; stage < end; ++stage) {
      const int slot = stage % Plan::kDepth;
      ring.wait(stage);
#pragma unroll
      for (int half = 0; half < Plan::kHalves; ++half) {
        // Then the part before the last one has been multiplied: its registers are free, and behind the last part of a
        // stage the stage before.
        arch::warpgroup_wait<Plan::kHalves - 1>(sums);
        if (half == Plan::kHalves - 1) ring.release(stage - 1);
        multiply_half<Plan>(sums, a[half], ring.weights_at(slot, arch::warp()), ring.tokens_at(slot), half);
      }
    }
    arch::warpgroup_wait<0>(sums);
    take(slice, sums);
  }
  trace::mark(trace::kLastUsed);
}

// A slice's sums of the warp's row tile, for the next norm: as SliceSums reads them.
template <typename Shape>
ULL_DEVICE void leave_apart(const ChunkLinearParams& params, int tile, int count, int slice, const ChunkSums& sums) {
  if (tile >= Shape::kRowTiles) return;
  float* partial = params.partial + int64_t{slice} * kChunkTile * Shape::kPaddedRows + tile * kRowUnit + quad_row();
#pragma unroll
  for (int group = 0; group < kChunkGroups; ++group) {
    const Four four = quad(sums[group]);
    const int token = group * kGroupTokens + quad_token();
    store_four_if(token < count, partial + token * Shape::kPaddedRows, four);
  }
}

// ---- e4m3 by e4m3 ---------------------------------------------------------------------------------------------------

// A stage's weights as operands a: the rows' bytes, which lie in pairs of columns.
template <typename Plan>
ULL_DEVICE void load_fast_operands(uint32_t (&a)[Plan::kStageSteps][4], const unsigned char* weights) {
#pragma unroll
  for (int s = 0; s < Plan::kStageSteps; ++s) {
    const arch::Vector4 v = arch::load_shared(weights + s * Plan::Shape::kStepBytes + arch::lane() * 16);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      a[s][2 * half] = arch::low_halves(v.word[2 * half], v.word[2 * half + 1]);
      a[s][2 * half + 1] = arch::high_halves(v.word[2 * half], v.word[2 * half + 1]);
    }
  }
}

// The warp's row tile for the block's tokens -> totals, in the tokens' units. While one warpgroup adds up a stage, the
// other one's products run.
template <typename Plan>
ULL_DEVICE void multiply_chunk_fast(const ChunkRing<Plan>& ring, ChunkSums& totals) {
  uint32_t a[Plan::kStageSteps][4];
#pragma unroll
  for (int i = 0; i < 4 * kChunkGroups; ++i) totals[i / 4][i % 4] = 0.0F;
  ring.wait(0);
  trace::mark(trace::kFirstUsed);
  load_fast_operands<Plan>(a, ring.weights_at(0, arch::warp()));
#pragma unroll 1
  for (int stage = 0; stage < Plan::kStages; ++stage) {
    const uint64_t first = arch::core_matrices(ring.tokens_at(stage % Plan::kDepth), kFastHalfBytes, kCoreBytes);
    ChunkSums sums;
    arch::warpgroup_fence();
    arch::warpgroup_mma_e4m3<arch::kBegins>(sums, a[0], first);
#pragma unroll
    for (int s = 1; s < Plan::kStageSteps; ++s) {
      arch::warpgroup_mma_e4m3(sums, a[s], first + static_cast<uint64_t>(s * kFastStepBytes / 16));
    }
    arch::warpgroup_commit();
    arch::warpgroup_wait<0>(sums);
    ring.release(stage);
    if (stage + 1 < Plan::kStages) {
      ring.wait(stage + 1);
      load_fast_operands<Plan>(a, ring.weights_at((stage + 1) % Plan::kDepth, arch::warp()));
    }
#pragma unroll
    for (int i = 0; i < 4 * kChunkGroups; ++i) totals[i / 4][i % 4] += sums[i / 4][i % 4];
  }
  trace::mark(trace::kLastUsed);
}

// Takes sums out of their tokens' units.
ULL_DEVICE void scale_tokens(ChunkSums& sums, const float* token_scale) {
  const int pair = arch::lane() % 4;
#pragma unroll
  for (int group = 0; group < kChunkGroups; ++group) {
    const arch::Vector4 four = arch::load_global(token_scale + group * kGroupTokens + pair / 2 * 4);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float scale = arch::bits_float(pair % 2 == 0 ? four.word[i] : four.word[2 + i]);
      sums[group][i] *= scale;
      sums[group][2 + i] *= scale;
    }
  }
}

// The kernel. Epilogue: finish(params, share, count, sums) of a warp's row tile, which there may not be if the epilogue
// is kTogether: then all warps that multiply call it. kMaySplit: see above.
template <typename Shape, typename Epilogue, bool kMaySplit = false>
ULL_DEVICE void chunk_linear(const ChunkLinearParams& params) {
  using Plan = ChunkPlan<Shape>;
  arch::release_dependents();
  const int count = chunk_extent(params.chunk).count;
  const BlockShare share = block_share<Shape>(params, count, kMaySplit && !kFastPrefill);
  const ChunkRing<Plan> ring(arch::shared_memory(), share);
  const int first_token = share.first_token, early = smaller(Plan::kDepth, ring.stages());
  const bool brings = arch::warp() >= 4 * kWarpgroups && arch::lane() == 0 && ring.has_share();
  if (!share.idle) {
    ring.start(share);
    for (int stage = 0; stage < early && brings; ++stage) ring.bring_weights(params, stage);
  }
  arch::wait_for_predecessor();
  if (share.idle) return;
  if (arch::warp() >= 4 * kWarpgroups) {
    arch::give_registers_up<kBringRegisters>();
    if (!brings) return;
    arch::fence_bulk_sources();
    for (int stage = 0; stage < early; ++stage) ring.bring_activations(params, first_token, stage);
    for (int stage = early; stage < ring.stages(); ++stage) {
      ring.bring_weights(params, stage);
      ring.bring_activations(params, first_token, stage);
    }
    return;
  }
  arch::want_registers<kMultiplyRegisters>();
  if (arch::warp() >= 4 * share.warpgroups) return;
  const int tile = share.own_tile();
  ChunkSums totals;
  if constexpr (kFastPrefill) {
    multiply_chunk_fast<Plan>(ring, totals);
    scale_tokens(totals, params.token_scale + first_token);
  } else {
#pragma unroll
    for (int i = 0; i < 4 * kChunkGroups; ++i) totals[i / 4][i % 4] = -0.0F;  // which changes no bit of what is added
    multiply_chunk<Plan>(ring, share, [&](int slice, const ChunkSums& sums) {
      if (share.apart) return leave_apart<Shape>(params, tile, count, slice, sums);
#pragma unroll
      for (int i = 0; i < 4 * kChunkGroups; ++i) totals[i / 4][i % 4] += sums[i / 4][i % 4];
    });
  }
  if (share.apart || (!Epilogue::kTogether && tile >= Shape::kRowTiles)) return;
  Epilogue::finish(params, share, count, totals);
}

// ---- epilogues ------------------------------------------------------------------------------------------------------

// f32 [kChunkTokens, kStride]. The activations are in units of 1 / kUnit.
template <int kStride, int kUnit = 1>
struct StoreChunkRows {
  static constexpr bool kTogether = false;

  ULL_DEVICE static void finish(const ChunkLinearParams& params, const BlockShare& share, int count,
                                const ChunkSums& sums) {
    const int row = share.own_tile() * kRowUnit + quad_row();
    const RowScale rows = load_row_scale(params.scale, params.bias, row);
    const int token = share.first_token + quad_token();
    float* output = static_cast<float*>(params.output) + int64_t{token} * kStride + row;
#pragma unroll
    for (int group = 0; group < kChunkGroups; ++group) {
      const Four four = scaled(quad(sums[group]), rows, kUnit);
      store_four_if(token + group * kGroupTokens < count, output + group * kGroupTokens * kStride, four);
    }
  }
};

// Added to the f32 residual [kChunkTokens, H]. The activations are in units of 1 / kUnit.
template <int kUnit>
struct AddChunkRows {
  static constexpr bool kTogether = false;

  ULL_DEVICE static void finish(const ChunkLinearParams& params, const BlockShare& share, int count,
                                const ChunkSums& sums) {
    const int row = share.own_tile() * kRowUnit + quad_row();
    const RowScale rows = load_row_scale(params.scale, params.bias, row);
    const int token = share.first_token + quad_token();
    float* residual = static_cast<float*>(params.output) + int64_t{token} * kResidualStride + row;
    constexpr int kBatch = kChunkGroups / 2;  // groups whose residual is on its way together
#pragma unroll
    for (int first = 0; first < kChunkGroups; first += kBatch) {
      arch::Vector4 before[kBatch] = {};
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int group = first + i;
        if (token + group * kGroupTokens >= count) continue;
        before[i] = arch::load_global(residual + group * kGroupTokens * kResidualStride);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int group = first + i;
        const Four sum = added(load_four(before[i]), scaled(quad(sums[group]), rows, kUnit));
        const bool stores = token + group * kGroupTokens < count;
        store_four_if(stores, residual + group * kGroupTokens * kResidualStride, sum);
      }
    }
  }
};

}  // namespace ull::gpu
