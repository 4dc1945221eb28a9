// Linear layers for up to 8 tokens: warp w of a block streams slice w of the block's row tiles, each at its own pace,
// and the warps' sums of a row tile meet in shared memory.
#pragma once

#include "rows.cuh"
#include "stream.cuh"

namespace ull::gpu {

inline constexpr int kNarrowThreads = 32 * kComputeWarps;
inline constexpr int kStagedLimit =
    64 * 1024;  // most activations that a block keeps beside its ring, if it has a choice
static_assert(kNarrowThreads == kNormThreads && kComputeWarps == kSlices);

// Staged: all activations are in shared memory before the first step. Else they come through the ring with the weights,
// and two row tiles at once share them.
template <typename Shape_, int kTokens_>
struct NarrowPlan {
  using Shape = Shape_;
  static constexpr int kTokens = kTokens_;
  static_assert(kTokens == 1 || kTokens == kGroupTokens);
  static constexpr int kStagedStepBytes = kTokens * kTokenStepBytes;
  static constexpr bool kStaged = kTokens == 1 || Shape::kNorms || Shape::kSteps * kStagedStepBytes <= kStagedLimit;
  static constexpr int kStagedBytes = kStaged ? Shape::kSteps * kStagedStepBytes : 0;
  static constexpr int kBytes = kStagedBytes <= kStagedLimit ? kNarrowBytes : kWideBytes;
  static constexpr int kBlocks =
      kStagedBytes <= kStagedLimit ? 2 : 1;  // on a multiprocessor, of this or the next kernel

  static constexpr int kGroups = 1;
  static constexpr int kBlockSlices = 1;  // of a warp
  static constexpr bool kStageActivations = !kStaged;
  static constexpr int kWarpTiles = kStaged ? 1 : 2;
  static constexpr int kTileStride = 1;
  static constexpr int kPassTiles = kWarpTiles;
  static constexpr int kStageSteps = (kStaged ? 32 : 16) / Shape::kBits;
  static constexpr int kStageTileBytes = kStageSteps * Shape::kStepBytes;
  static constexpr int kStageBytes = kWarpTiles * kStageTileBytes + (kStaged ? 0 : kStageSteps * kGroupBytes);

  static constexpr int kPartialStride = kRowUnit + 4;  // floats of a token's row tile: keeps lanes on their own banks
  static constexpr int kPartialSlice = kTokens * kPartialStride;
  static constexpr int kPartialArea = kSlices * kPartialSlice;  // two of them: one is read while the next is written
  static constexpr int kSumBytes = Shape::kNorms ? kTokens * kNormWarps * 4 : 0;

  static constexpr int kRingBytes = kBytes - kStagedBytes - 8 * kPartialArea - kSumBytes;
  static constexpr int kDepth = smaller(16, kRingBytes / (kComputeWarps * (kStageBytes + kBarrierBytes)));
  static_assert(kDepth >= 2, "the layer does not fit into shared memory");

  // Offsets in shared memory; the ring comes first.
  static constexpr int kStagedAt = kComputeWarps * kDepth * kStageBytes;
  static constexpr int kPartialAt = kStagedAt + kStagedBytes;
  static constexpr int kSumAt = kPartialAt + 8 * kPartialArea;
  static constexpr int kBarrierAt = kSumAt + kSumBytes;
  static_assert(kBarrierAt + kComputeWarps * kDepth * kBarrierBytes <= kBytes);

  ULL_DEVICE static int warp_tile() { return 0; }
  ULL_DEVICE static int first_slice() { return arch::warp(); }
};

// sums += a stage whose activations are staged: `operands` is this lane's of the first step. All is in registers before
// the first mma. The stage is refilled behind the last one: only what has been used is certain to have been loaded, and
// bulk copies do not wait for loads.
template <typename Plan, typename Source>
ULL_DEVICE void multiply_staged(float (&sums)[1][4], const Source& stream, int stage, const unsigned char* operands) {
  constexpr int kSteps = Plan::kStageSteps;
  arch::Vector4 activations[kSteps][1];
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    activations[s][0] = {};  // behind a short stage stand the next slice's, or what is not activations at all
    if (stream.kWhole || s < stream.steps(stage)) {
      activations[s][0] = arch::load_shared(operands + s * Plan::kStagedStepBytes);
    }
  }
  Weights<Plan::Shape::kBits> weights[kSteps];
  const unsigned char* place = stream.wait(stage);
#pragma unroll
  for (int s = 0; s < kSteps; ++s) weights[s].load(place + s * Plan::Shape::kStepBytes);
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    if (stream.kWhole || s < stream.steps(stage)) multiply_step(sums, weights[s], activations[s]);
  }
  arch::warp_barrier();
  stream.refill(stage);
}

// sums += a stage that brings its activations.
template <typename Plan>
ULL_DEVICE void multiply_streamed(float (&sums)[Plan::kWarpTiles][1][4], const Stream<Plan>& stream, int stage) {
  const unsigned char* place = stream.wait(stage);
  const unsigned char* operands = place + Plan::kWarpTiles * Plan::kStageTileBytes + arch::lane() * 16;
#pragma unroll
  for (int s = 0; s < Plan::kStageSteps; ++s) {
    if (stream.kWhole || s < stream.steps(stage)) {
      const arch::Vector4 activations[1] = {arch::load_shared(operands + s * kGroupBytes)};
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

// Writes this warp's sums of one row tile: [token][16 rows and padding].
template <typename Plan>
ULL_DEVICE void store_partial(float* partial, const float (&sums)[4]) {
  const int g = arch::lane() / 4;
  const int t = arch::lane() % 4;
  float* at = partial + arch::warp() * Plan::kPartialSlice + 2 * t * Plan::kPartialStride + g;
  if (Plan::kTokens > 1 || t == 0) {
    at[0] = sums[0];
    at[8] = sums[2];
  }
  if (Plan::kTokens > 1) {
    at[Plan::kPartialStride] = sums[1];
    at[Plan::kPartialStride + 8] = sums[3];
  }
}

// The slices' sums, in ascending order, for rows `row` .. row + 3 of a token.
template <typename Plan>
ULL_DEVICE Four sum_slices(const float* partial, int token, int row) {
  Four total{};
#pragma unroll
  for (int slice = 0; slice < kSlices; ++slice) {
    const arch::Vector4 v =
        arch::load_shared(partial + slice * Plan::kPartialSlice + token * Plan::kPartialStride + row);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = arch::bits_float(v.word[i]);
      total.value[i] = slice == 0 ? x : total.value[i] + x;
    }
  }
  return total;
}

// The activations of all steps: [step][token 0..7][32 columns], or [step][32 columns] for one token. Rows beyond
// `count` stay as they are: they only reach columns of the product that nobody reads.
template <typename Plan>
ULL_DEVICE void stage_activations(const LinearParams& params, int count, unsigned char* staged, float* sums,
                                  const RowShare& norm_weight) {
  if constexpr (Plan::Shape::kNorms) {
    constexpr int kRowsAtOnce = larger(1, smaller(Plan::kTokens, 16 / kNormVectors));
    norm_rows<kRowsAtOnce>(
        norm_weight, count, sums,
        [&](RowShare& row, int token) { load_row(row, params.residual + token * kResidualStride); },
        [&](int token, int column, arch::Vector2 four) {
          *reinterpret_cast<arch::Vector2*>(staged + column / kColumnUnit * Plan::kStagedStepBytes +
                                            token * kTokenStepBytes + column % kColumnUnit * 2) = four;
        });
  } else {
    constexpr int kVectors = Plan::kStagedBytes / 16;
    constexpr int kStepVectors = Plan::kStagedStepBytes / 16;
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
  static_assert(Plan::kTokens == 1 && !Shape::kNorms);
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

// The block's row tiles, one after another, as `stream` (a Stream, or what does as well) brings their weights.
// Epilogue: kItems threads of a token finish one row tile; `load` brings what an item needs besides the sums (early: it
// may take long), `finish` does the rest.
template <typename Plan, typename Epilogue, typename Source>
ULL_DEVICE void multiply_tiles(const LinearParams& params, const Source& stream, int count, const unsigned char* staged,
                               float* partial) {
  const int lane = Plan::kTokens == 1 ? arch::lane() % 4 : arch::lane();
  const int token = arch::thread() / Epilogue::kItems;
  const int item = arch::thread() % Epilogue::kItems;
  const bool finishes = token < smaller(count, Plan::kTokens);
  int turn = 0;
  for (int first = 0; first < stream.stages(); first += stream.kPassStages) {
    const int tile = stream.tile(first);
    const int tiles = stream.tiles(first);
    typename Epilogue::Operands operands[Plan::kWarpTiles];
#pragma unroll
    for (int r = 0; r < Plan::kWarpTiles; ++r) {
      if constexpr (Source::kInLoop) operands[r] = {};
      if (finishes && r < tiles) operands[r] = Epilogue::load(params, tile + r, token, item);
    }
    float sums[Plan::kWarpTiles][1][4] = {};
    for (int stage = first; stage < first + stream.kPassStages; ++stage) {
      if constexpr (Plan::kStaged) {
        const unsigned char* step = staged + stream.step(stage) * Plan::kStagedStepBytes;
        multiply_staged<Plan>(sums[0], stream, stage, step + lane * 16);
      } else {
        multiply_streamed(sums, stream, stage);
      }
    }
#pragma unroll
    for (int r = 0; r < Plan::kWarpTiles; ++r) {
      if (r < tiles) {
        float* area = partial + turn * Plan::kPartialArea;
        store_partial<Plan>(area, sums[r][0]);
        arch::block_barrier();
        if (finishes) {
          const auto sum = [&](int row) { return sum_slices<Plan>(area, token, row); };
          Epilogue::finish(params, operands[r], tile + r, token, item, sum);
        }
        turn ^= 1;
      }
    }
  }
}

// The kernel. kAhead: see ahead.cuh.
template <typename Plan, typename Epilogue, int kAhead = kAheadOfLongBytes>
ULL_DEVICE void linear_narrow(const LinearParams& params) {
  using Shape = typename Plan::Shape;
  unsigned char* shared = arch::shared_memory();
  unsigned char* staged = shared + Plan::kStagedAt;
  auto* partial = reinterpret_cast<float*>(shared + Plan::kPartialAt);
  arch::release_dependents();
  Stream<Plan> stream(params, shared);
  stream.fill();
  stream.template fetch_ahead<kAhead>();
  RowShare norm_weight;
  if constexpr (Shape::kNorms) load_norm_weight(norm_weight, params.norm_weight);

  arch::wait_for_predecessor();
  const int count = token_count(params.round);
  stream.fill_activations();
  if constexpr (Plan::kStaged) {
    // One token is there whatever `count` says: its loads need not wait for that answer.
    const int rows = Plan::kTokens == 1 ? 1 : count;
    stage_activations<Plan>(params, rows, staged, reinterpret_cast<float*>(shared + Plan::kSumAt), norm_weight);
    arch::block_barrier();
  }
  if (count == 0) {
    stream.drain();
    return;
  }

  multiply_tiles<Plan, Epilogue>(params, stream, count, staged, partial);
}

}  // namespace ull::gpu
