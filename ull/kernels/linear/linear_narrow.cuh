// Linear layers for up to 8 tokens: warp w of a block streams slice w of the block's row tiles, each at its own pace,
// and the warps' sums of a row tile meet in shared memory.
#pragma once

#include "linear/rows.cuh"
#include "linear/stream.cuh"

namespace ull::gpu {

inline constexpr int kNarrowThreads = 32 * kComputeWarps;
// Most activations that a block keeps in shared memory. Beside them the ring still has 64 KB of weights, and with the
// next kernel's block twice that are in flight on a multiprocessor; 52 KB of both are what the memory needs (4.3 TB/s
// of 132 multiprocessors and 800 ns, for each of two blocks).
inline constexpr int kStagedLimit = 36 * 1024;
inline constexpr int kHeldSteps = 16;  // most steps whose activations a lane keeps in registers, four for each
static_assert(kNarrowThreads == kNormThreads && kComputeWarps == kSlices);

// Where a block of kTokens has its activations, of all steps:
//
// - Staged: in shared memory before the first step, where they fit. The kernel norms them itself on the way: with few
//   tokens that costs less than another kernel before this one.
// - Held: in registers, read from L2 before the first step, where a warp's slice is short. Each warp needs its slice
//   alone, so the block has everything once and shared memory is the ring's.
// - Streamed: they come through the ring with the weights, and two row tiles at once share them. It is the only way for
//   long slices, and the dearest: L2 delivers them again for every two row tiles.
//
// kLimit: more activations than those are not staged.
template <typename Shape_, int kTokens_, int kLimit = kStagedLimit>
struct NarrowPlan {
  using Shape = Shape_;
  static constexpr int kTokens = kTokens_;
  static_assert(kTokens == 1 || kTokens == 2 || kTokens == 4 || kTokens == kGroupTokens);
  static constexpr int kStepActivationBytes = kTokens * kTokenStepBytes;  // wherever they are
  static constexpr bool kFits = Shape::kSteps * kStepActivationBytes <= kLimit;
  static constexpr bool kNorms = Shape::kNorms && kFits;  // else ull_norm_{tokens} has done it
  static constexpr bool kHeld = !kNorms && kTokens > 1 && Shape::kSliceSteps <= kHeldSteps;
  static constexpr bool kStaged = kFits && !kHeld;
  static constexpr bool kStageActivations = !kStaged && !kHeld;
  static constexpr int kStagedBytes = kStaged ? Shape::kSteps * kStepActivationBytes : 0;
  static constexpr int kBytes = kNarrowBytes;
  static constexpr int kBlocks = 2;  // on a multiprocessor, of this or the next kernel

  static constexpr int kBlockSlices = 1;  // of a warp
  static constexpr int kWarpTiles = kStageActivations ? 2 : 1;
  static constexpr int kTileStride = 1;
  // A stage brings 2 KB of a row tile, or 1 KB where it brings many activations besides.
  static constexpr int kStageSteps = (kStageActivations && kTokens > 2 ? 16 : 32) / Shape::kBits;
  static constexpr int kStageTileBytes = kStageSteps * Shape::kStepBytes;
  static constexpr int kStageBytes =
      kWarpTiles * kStageTileBytes + (kStageActivations ? kStageSteps * kStepActivationBytes : 0);

  static constexpr int kPartialStride = kRowUnit + 4;  // floats of a token's row tile: keeps lanes on their own banks
  static constexpr int kPartialSlice = kTokens * kPartialStride;
  static constexpr int kPartialArea = kSlices * kPartialSlice;  // two of them: one is read while the next is written
  static constexpr int kSumBytes = kNorms ? kTokens * kNormWarps * 4 : 0;

  static constexpr int kRingBytes = kBytes - kStagedBytes - 8 * kPartialArea - kSumBytes - 2 * kBarrierBytes;
  static constexpr int kDepth = smaller(16, kRingBytes / (kComputeWarps * (kStageBytes + kBarrierBytes)));
  // A row tile's mma are one chain, and a stage takes as long as that, unless another row tile's mma stand between. So
  // a pass is over two row tiles, here as where activations are streamed:
  //
  // - Their stages take turns, no larger than before. Two are used at once, so the ring must have more than two pairs:
  //   with four stages half of it would be empty meanwhile.
  // - Kernels with held activations use up to 125 of the 128 registers that two blocks have: no room for more weights.
  // - In the kernel of all layers (another kLimit) the ring goes on from row tile to row tile, one after another.
  static constexpr bool kPairs = kStaged && kLimit == kStagedLimit && kDepth >= 5;
  static constexpr int kPassTiles = kPairs ? 2 : kWarpTiles;
  static constexpr int kBytesInFlight = kComputeWarps * kDepth * kWarpTiles * kStageTileBytes;  // of weights
  static_assert(kLimit > kStagedLimit || kBytesInFlight >= 60 * 1024, "the ring is too small for the memory's latency");

  // Offsets in shared memory; the ring comes first.
  static constexpr int kStagedAt = kComputeWarps * kDepth * kStageBytes;
  static constexpr int kPartialAt = kStagedAt + kStagedBytes;
  static constexpr int kSumAt = kPartialAt + 8 * kPartialArea;
  static constexpr int kBarrierAt = kSumAt + kSumBytes;
  static constexpr int kEmptyAt = kBarrierAt + kComputeWarps * kDepth * kBarrierBytes;
  static_assert(kEmptyAt + 2 * kBarrierBytes <= kBytes);

  ULL_DEVICE static int row_blocks() { return arch::grid_x(); }
  ULL_DEVICE static int row_block() { return arch::block_x(); }
  ULL_DEVICE static int warp_tile() { return 0; }
  ULL_DEVICE static int first_slice() { return arch::warp(); }
  // Where a lane's operands begin in the activations of a step. Lanes of tokens that are not there take another's: they
  // only reach columns of the product that nobody reads.
  ULL_DEVICE static int lane_offset() { return arch::lane() % (4 * kTokens) * 16; }
};

// A warp's activations in registers: this lane's operands of its slice's steps.
template <typename Plan>
struct HeldActivations {
  arch::Vector4 step[Stages<Plan>::kSliceStages * Plan::kStageSteps];

  ULL_DEVICE void load(const LinearParams& params) {
    const int slice = Plan::first_slice();
    const int first = Plan::Shape::slice_begin(slice);
    const int steps = Plan::Shape::slice_begin(slice + 1) - first;
    const auto* address = static_cast<const unsigned char*>(params.activations) +
                          static_cast<int64_t>(first) * kActivationStepBytes + Plan::lane_offset();
#pragma unroll
    for (int s = 0; s < Stages<Plan>::kSliceStages * Plan::kStageSteps; ++s) {
      step[s] = {};
      if (s < steps) step[s] = arch::load_global(address + s * kActivationStepBytes);
    }
  }
};

// sums += stages `stage` and on of kTiles row tiles, of each the same `steps` steps. Their activations are here
// already: operand(s) is this lane's of step s. All is in registers before the first mma; then the row tiles' mma take
// turns, each its own chain. The stages are refilled behind the last one: only what has been used is certain to have
// been loaded, and bulk copies do not wait for loads.
template <typename Plan, int kTiles, typename Source, typename Operand>
ULL_DEVICE void multiply_weights(float (&sums)[Plan::kPassTiles][1][4], const Source& stream, int stage, int steps,
                                 const Operand& operand) {
  constexpr int kSteps = Plan::kStageSteps;
  arch::Vector4 activations[kSteps];
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    activations[s] = {};  // behind a short stage stand the next slice's, or what is not activations at all
    if (stream.kWhole || s < steps) activations[s] = operand(s);
  }
  Weights<Plan::Shape::kBits> weights[kSteps][kTiles];
#pragma unroll
  for (int r = 0; r < kTiles; ++r) {
    const unsigned char* place = stream.wait(stage + r);
#pragma unroll
    for (int s = 0; s < kSteps; ++s) weights[s][r].load(place + s * Plan::Shape::kStepBytes);
  }
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    if (stream.kWhole || s < steps) multiply_in_turn(sums, weights[s], activations[s]);
  }
  arch::warp_barrier();
#pragma unroll
  for (int r = 0; r < kTiles; ++r) stream.refill(stage + r);
}

// sums += a stage that brings its activations.
template <typename Plan>
ULL_DEVICE void multiply_streamed(float (&sums)[Plan::kWarpTiles][1][4], const Stream<Plan>& stream, int stage) {
  const unsigned char* place = stream.wait(stage);
  const unsigned char* operands = place + Plan::kWarpTiles * Plan::kStageTileBytes + Plan::lane_offset();
#pragma unroll
  for (int s = 0; s < Plan::kStageSteps; ++s) {
    if (stream.kWhole || s < stream.steps(stage)) {
      const arch::Vector4 activations[1] = {arch::load_shared(operands + s * Plan::kStepActivationBytes)};
#pragma unroll
      for (int r = 0; r < Plan::kWarpTiles; ++r) {
        if (r < stream.tiles(stage)) {
          Weights<Plan::Shape::kBits> weights;
          weights.load(place + r * Plan::kStageTileBytes + s * Plan::Shape::kStepBytes);
          multiply_step(sums[r], weights, activations);
        }
      }
    }
  }
  arch::warp_barrier();
  stream.refill(stage);
}

// sums += a pass of kTiles row tiles, which begins with stage `first`. activations: where they are staged, or the held
// ones.
template <typename Plan, int kTiles, typename Source, typename Activations>
ULL_DEVICE void multiply_pass(float (&sums)[Plan::kPassTiles][1][4], const Source& stream, int first,
                              const Activations& activations) {
  if constexpr (Plan::kStageActivations) {
    for (int stage = first; stage < first + stream.kPassStages; ++stage) multiply_streamed(sums, stream, stage);
  } else {
    const int first_step = Plan::Shape::slice_begin(Plan::first_slice());
    if constexpr (Plan::kHeld) {
#pragma unroll
      for (int i = 0; i < stream.kSliceStages; ++i) {
        const int stage = first + i * kTiles;
        const int steps = stream.steps_from(stage, first_step + i * Plan::kStageSteps);
        multiply_weights<Plan, kTiles>(sums, stream, stage, steps,
                                       [&](int s) { return activations.step[i * Plan::kStageSteps + s]; });
      }
    } else {
      const unsigned char* operands = activations + first_step * Plan::kStepActivationBytes + Plan::lane_offset();
      for (int i = 0; i < stream.kSliceStages; ++i) {
        const int stage = first + i * kTiles;
        const int steps = stream.steps_from(stage, first_step + i * Plan::kStageSteps);
        const unsigned char* place = operands + i * Plan::kStageSteps * Plan::kStepActivationBytes;
        multiply_weights<Plan, kTiles>(sums, stream, stage, steps, [&](int s) {
          return arch::load_shared(place + s * Plan::kStepActivationBytes);
        });
      }
    }
  }
}

// Writes this warp's sums of one row tile: [token][16 rows and padding].
template <typename Plan>
ULL_DEVICE void store_partial(float* partial, const float (&sums)[4]) {
  const int g = arch::lane() / 4;
  const int t = arch::lane() % 4;
  float* at = partial + arch::warp() * Plan::kPartialSlice + 2 * t * Plan::kPartialStride + g;
  if (2 * t < Plan::kTokens) {
    at[0] = sums[0];
    at[8] = sums[2];
  }
  if (2 * t + 1 < Plan::kTokens) {
    at[Plan::kPartialStride] = sums[1];
    at[Plan::kPartialStride + 8] = sums[3];
  }
}

// A token's sums of a row tile: its slices', added in ascending order.
template <typename Plan>
class TokenSums {
 public:
  ULL_DEVICE TokenSums(const float* partial, int token) : partial_(partial + token * Plan::kPartialStride) {}

  // Of rows `row` .. row + 3.
  ULL_DEVICE Four operator()(int row) const {
    Four total{};
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      const Four part = load_four(arch::load_shared(partial_ + slice * Plan::kPartialSlice + row));
      total = slice == 0 ? part : added(total, part);
    }
    return total;
  }

  // Of one row.
  ULL_DEVICE float one(int row) const {
    float total = partial_[row];
#pragma unroll
    for (int slice = 1; slice < kSlices; ++slice) total += partial_[slice * Plan::kPartialSlice + row];
    return total;
  }

 private:
  const float* partial_;
};

// The activations of all steps: [step][token][32 columns]. Rows beyond `count` stay as they are: they only reach
// columns of the product that nobody reads. `there`: how many tokens really are; where the layer is tapped, the last
// block, which has row tiles whatever the grid, keeps their rows.
template <typename Plan>
ULL_DEVICE void stage_activations(const LinearParams& params, int count, int there, unsigned char* staged, float* sums,
                                  const RowShare& norm_weight) {
  if constexpr (Plan::kNorms) {
    const bool keeps = arch::block_x() == arch::grid_x() - 1;
    const KeepTaps<Plan::kTokens> keep(keeps ? params.taps : nullptr, params.round, there);
    constexpr int kRowsAtOnce = larger(1, smaller(Plan::kTokens, 16 / kNormVectors));
    norm_rows<kRowsAtOnce>(
        norm_weight, count, sums,
        [&](RowShare& row, int token) { load_row(row, params.residual + token * kResidualStride); },
        [&](int token, int column, arch::Vector2 four) {
          *reinterpret_cast<arch::Vector2*>(staged + column / kColumnUnit * Plan::kStepActivationBytes +
                                            token * kTokenStepBytes + column % kColumnUnit * 2) = four;
        },
        keep);
  } else {
    constexpr int kVectors = Plan::kStagedBytes / 16;
    constexpr int kStepVectors = Plan::kStepActivationBytes / 16;
    constexpr int kAtOnce = smaller(8, (kVectors + kNarrowThreads - 1) / kNarrowThreads);
    const auto* activations = static_cast<const unsigned char*>(params.activations);
    for (int first = arch::thread(); first < kVectors; first += kAtOnce * kNarrowThreads) {
      arch::Vector4 v[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int index = first + i * kNarrowThreads;
        v[i] = {};
        if (index < kVectors && index % kStepVectors < 4 * count) {
          v[i] = arch::load_global(activations + static_cast<int64_t>(index / kStepVectors) * kActivationStepBytes +
                                   index % kStepVectors * 16);
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int index = first + i * kNarrowThreads;
        if (index < kVectors) arch::store_shared(staged + index * 16, v[i]);
      }
    }
  }
}

// The same of a layer without norm by each warp for its own slice, which nobody else reads: of one token.
template <typename Plan>
ULL_DEVICE void stage_slice(const LinearParams& params, unsigned char* staged) {
  using Shape = typename Plan::Shape;
  static_assert(Plan::kTokens == 1 && !Plan::kNorms);
  constexpr int kStepVectors = kTokenStepBytes / 16;
  constexpr int kVectors = Shape::kSliceSteps * kStepVectors;
  constexpr int kAtOnce = smaller(8, (kVectors + 31) / 32);
  const int begin = Shape::slice_begin(arch::warp()) * kStepVectors;
  const int end = Shape::slice_begin(arch::warp() + 1) * kStepVectors;
  const auto* activations = static_cast<const unsigned char*>(params.activations);
  for (int first = begin + arch::lane(); first < end; first += kAtOnce * 32) {
    arch::Vector4 v[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int index = first + i * 32;
      v[i] = {};
      if (index < end) {
        v[i] = arch::load_global(activations + static_cast<int64_t>(index / kStepVectors) * kActivationStepBytes +
                                 index % kStepVectors * 16);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int index = first + i * 32;
      if (index < end) arch::store_shared(staged + index * 16, v[i]);
    }
  }
}

// Where the slices' sums of row tiles meet, one tile after another, of as many layers as the kernel has. They lie in
// two areas in turn. Some of the block's warps finish a tile, others the next, so that none falls behind the others;
// the rest only arrive at the area's named barrier and go on. Before a warp writes to an area again it waits at its
// mbarrier, until the finishing ones have read it.
class SumAreas {
 public:
  // empty: two barriers, which one thread has initialised for as many arrivals as warps finish a tile.
  ULL_DEVICE explicit SumAreas(arch::Barrier* empty) : empty_(empty) {}

  ULL_DEVICE int tile() const { return tile_; }  // the one under way, counted from 0
  ULL_DEVICE int area() const { return tile_ % 2; }

  ULL_DEVICE void wait_until_empty() const {
    if (tile_ >= 2) arch::barrier_wait(empty_ + area(), (tile_ / 2 + 1) % 2);
  }
  ULL_DEVICE void wait_until_full() const { arch::named_barrier(kFirstBarrier + area(), kNarrowThreads); }
  ULL_DEVICE void has_written() const { arch::named_arrive(kFirstBarrier + area(), kNarrowThreads); }
  ULL_DEVICE void has_read() const {
    arch::warp_barrier();
    if (arch::lane() == 0) arch::barrier_arrive(empty_ + area());
  }
  ULL_DEVICE void next_tile() { ++tile_; }

 private:
  static constexpr int kFirstBarrier = 1;
  arch::Barrier* empty_;
  int tile_ = 0;
};

// The threads that finish a row tile: kItems for each token.
template <typename Plan, typename Epilogue>
struct Finishers {
  static constexpr int kItems = Epilogue::kItems;
  static constexpr int kWarps = (Plan::kTokens * kItems + 31) / 32;
  static_assert(kComputeWarps % kWarps == 0);

  ULL_DEVICE static bool has_warp(int tile) { return arch::warp() / kWarps == tile % (kComputeWarps / kWarps); }
  ULL_DEVICE static int index() { return arch::warp() % kWarps * 32 + arch::lane(); }
  ULL_DEVICE static int token() { return index() / kItems; }
  ULL_DEVICE static int item() { return index() % kItems; }
};

// The block's row tiles, one after another, as `stream` (a Stream, or what does as well) brings their weights.
// Epilogue: kItems threads of a token finish one row tile; `load` brings what an item needs besides the sums (early: it
// may take long), `finish` does the rest. `finish_block`, if it has one, ends what it has gathered, in every thread.
template <typename Plan, typename Epilogue, typename Source, typename Activations>
ULL_DEVICE void multiply_tiles(const LinearParams& params, const Source& stream, int count,
                               const Activations& activations, float* partial, SumAreas& areas) {
  using Who = Finishers<Plan, Epilogue>;
  const bool has_token = Who::token() < smaller(count, Plan::kTokens);
  Epilogue epilogue;
  for (int first = 0; first < stream.stages(); first += stream.kPassStages) {
    const int tile = stream.tile(first);
    const int tiles = Plan::kPairs ? (stream.is_paired(first) ? 2 : 1) : stream.tiles(first);
    typename Epilogue::Operands operands[Plan::kPassTiles];
#pragma unroll
    for (int r = 0; r < Plan::kPassTiles; ++r) {
      if constexpr (Source::kInLoop) operands[r] = {};
      if (has_token && r < tiles && Who::has_warp(areas.tile() + r)) {
        operands[r] = Epilogue::load(params, tile + r, Who::token(), Who::item());
      }
    }
    float sums[Plan::kPassTiles][1][4] = {};
    if (!Plan::kPairs || tiles == 1) {
      multiply_pass<Plan, 1>(sums, stream, first, activations);
    } else {
      multiply_pass<Plan, Plan::kPassTiles>(sums, stream, first, activations);
    }
#pragma unroll
    for (int r = 0; r < Plan::kPassTiles; ++r) {
      if (r < tiles) {
        float* area = partial + areas.area() * Plan::kPartialArea;
        areas.wait_until_empty();
        store_partial<Plan>(area, sums[r][0]);
        if (Who::has_warp(areas.tile())) {
          areas.wait_until_full();
          if (has_token) {
            const TokenSums<Plan> sum(area, Who::token());
            epilogue.finish(params, operands[r], tile + r, Who::token(), Who::item(), sum);
          }
          areas.has_read();
        } else {
          areas.has_written();
        }
        areas.next_tile();
      }
    }
  }
  if constexpr (requires { epilogue.finish_block(params, partial); }) epilogue.finish_block(params, partial);
}

// The areas' barriers, at `empty`: by every thread, before a barrier of the block.
template <typename Plan, typename Epilogue>
ULL_DEVICE SumAreas make_areas(unsigned char* empty) {
  auto* barriers = reinterpret_cast<arch::Barrier*>(empty);
  if (arch::thread() < 2) arch::barrier_init(barriers + arch::thread(), Finishers<Plan, Epilogue>::kWarps);
  return SumAreas(barriers);
}

// The kernel. kAhead: see ahead.cuh.
template <typename Plan, typename Epilogue, int kAhead = kAheadOfLongBytes>
ULL_DEVICE void linear_narrow(const LinearParams& params) {
  unsigned char* shared = arch::shared_memory();
  unsigned char* staged = shared + Plan::kStagedAt;
  auto* partial = reinterpret_cast<float*>(shared + Plan::kPartialAt);
  arch::release_dependents();
  Stream<Plan> stream(params, shared);
  stream.fill();
  stream.template fetch_ahead<kAhead>();
  SumAreas areas = make_areas<Plan, Epilogue>(shared + Plan::kEmptyAt);
  RowShare norm_weight;
  if constexpr (Plan::kNorms) load_norm_weight(norm_weight, params.norm_weight);

  if constexpr (!Plan::kStaged) arch::block_barrier();  // of what is staged there is one below
  arch::wait_for_predecessor();
  if constexpr (Plan::kHeld) {
    HeldActivations<Plan> held;
    held.load(params);
    const int count = token_count(params.round);
    if (count == 0) return stream.drain();
    multiply_tiles<Plan, Epilogue>(params, stream, count, held, partial, areas);
  } else {
    const int count = token_count(params.round);
    stream.fill_activations();
    if constexpr (Plan::kStaged) {
      // One token is there whatever `count` says: its loads need not wait for that answer.
      const int rows = Plan::kTokens == 1 ? 1 : count;
      stage_activations<Plan>(params, rows, count, staged, reinterpret_cast<float*>(shared + Plan::kSumAt),
                              norm_weight);
      arch::block_barrier();
    }
    if (count == 0) return stream.drain();
    multiply_tiles<Plan, Epilogue>(params, stream, count, staged, partial, areas);
  }
}

}  // namespace ull::gpu
