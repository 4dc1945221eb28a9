// y = W x for up to 64 tokens: the kernel that streams the weights, under qkv, o, gate_up, down and head.
//
// Packed weights: [row tile of 16][step of 32 columns][lane 0..31][16 bytes], 16-bit ones [..][step][2][lane][16
// bytes]; each 16 bytes are the lane's A fragments (see fragments()). Every output element is the sum of kSlices
// partial sums, a chain of mma over its slice's steps each, added in ascending order: the same for every number of
// tokens and any grid.
//
// A block owns a run of row tiles; its warp w owns slice w of them, a contiguous part of each tile's steps. The warp
// brings its slice through its own ring of stages in shared memory: lane 0 refills a stage as soon as the warp has used
// it, so the stream stops neither for other warps nor for the sums at the end of a tile. The rings are filled before
// the predecessor has finished; only what depends on activations waits.
#pragma once

#include "norm.cuh"

namespace ull::gpu {

inline constexpr int kLinearThreads = 32 * kSlices;
inline constexpr int kNarrowBytes = 112 * 1024;  // shared memory of a block: two fit on a multiprocessor, so that the
inline constexpr int kWideBytes = 224 * 1024;    // next kernel's blocks can fill their rings; or nearly all of it
inline constexpr int kStagedLimit = 64 * 1024;   // most activations that a narrow block keeps beside its ring
static_assert(kLinearThreads == kNormThreads);

ULL_HOST_DEVICE constexpr int smaller(int a, int b) { return a < b ? a : b; }
ULL_HOST_DEVICE constexpr int larger(int a, int b) { return a > b ? a : b; }

// The layer's shape. kNorms: the input is the residual, normed on the way.
template <int kRows_, int kColumns_, int kBits_, bool kNorms_>
struct LinearShape {
  static constexpr int kRows = kRows_;
  static constexpr int kColumns = kColumns_;
  static constexpr int kBits = kBits_;
  static constexpr bool kNorms = kNorms_;
  static constexpr int kRowTiles = round_up(kRows, kRowUnit) / kRowUnit;
  static constexpr int kSteps = round_up(kColumns, kColumnUnit) / kColumnUnit;
  static constexpr int kStepBytes = kRowUnit * kColumnUnit * kBits / 8;
};

// How a block of a layer handles up to kTokens tokens. Staged: all activations are in shared memory before the first
// step. Else they come through the ring with the weights, and several row tiles at once share them.
template <typename Shape_, int kTokens_>
struct LinearPlan {
  using Shape = Shape_;
  static constexpr int kTokens = kTokens_;
  static constexpr int kGroups = (kTokens + kGroupTokens - 1) / kGroupTokens;
  static constexpr int kStagedStepBytes = kTokens == 1 ? kTokenStepBytes : kGroupBytes;
  static constexpr int kAllStagedBytes = Shape::kSteps * kStagedStepBytes;
  static constexpr bool kStaged =
      kTokens == 1 || (kTokens <= kGroupTokens && (Shape::kNorms || kAllStagedBytes <= kStagedLimit));
  static constexpr bool kNorms = Shape::kNorms && kTokens <= kGroupTokens;
  static constexpr int kStagedBytes = kStaged ? kAllStagedBytes : 0;
  static constexpr bool kNarrow = kTokens <= kGroupTokens && kStagedBytes <= kStagedLimit;
  static constexpr int kBlocks = kNarrow ? 2 : 1;  // on a multiprocessor, this kernel's or a neighbour's

  static constexpr int kTilesAtOnce = kStaged ? 1 : kTokens <= kGroupTokens ? 2 : 4;
  static constexpr int kStageSteps = larger(1, (kStaged ? 4 : kTokens <= 16 ? 2 : 1) * 8 / Shape::kBits);
  static constexpr int kStageTileBytes = kStageSteps * Shape::kStepBytes;
  static constexpr int kStageWeightBytes = kTilesAtOnce * kStageTileBytes;
  static constexpr int kStageBytes = kStageWeightBytes + (kStaged ? 0 : kStageSteps * kGroups * kGroupBytes);
  static constexpr bool kWhole = Shape::kSteps % (kSlices * kStageSteps) == 0;  // slices are whole stages

  static constexpr int kPartialStride = kRowUnit + 4;  // floats of a token's row tile: keeps lanes on their own banks
  static constexpr int kPartialSlice = kTokens * kPartialStride;
  static constexpr int kPartialBytes = kSlices * kPartialSlice * 4;  // twice: one is read while the next is written
  static constexpr int kSumBytes = kNorms ? kTokens * kNormWarps * 4 : 0;

  static constexpr int kBytes = kNarrow ? kNarrowBytes : kWideBytes;
  static constexpr int kRingBytes = kBytes - kStagedBytes - 2 * kPartialBytes - kSumBytes;
  static constexpr int kDepth =
      smaller(16, kRingBytes / (kSlices * (kStageBytes + static_cast<int>(sizeof(arch::Barrier)))));
  static_assert(kDepth >= 2, "the layer does not fit into shared memory");

  // Offsets in shared memory.
  static constexpr int kStagedAt = kSlices * kDepth * kStageBytes;
  static constexpr int kPartialAt = kStagedAt + kStagedBytes;
  static constexpr int kSumAt = kPartialAt + 2 * kPartialBytes;
  static constexpr int kBarrierAt = kSumAt + kSumBytes;
  static_assert(kBarrierAt + kSlices * kDepth * static_cast<int>(sizeof(arch::Barrier)) <= kBytes);
};

// A stage's place in the warp's stream: the first row tile of a pass, and a step of the slice.
struct Cursor {
  int tile;
  int step;
};

// One warp's stream: its slice of the block's row tiles.
template <typename Plan>
class Stream {
 public:
  using Shape = typename Plan::Shape;

  ULL_DEVICE Stream(const LinearParams& params, unsigned char* shared)
      : weights_(static_cast<const unsigned char*>(params.weights)),
        activations_(static_cast<const unsigned char*>(params.activations)),
        ring_(shared + arch::warp() * Plan::kDepth * Plan::kStageBytes),
        full_(reinterpret_cast<arch::Barrier*>(shared + Plan::kBarrierAt) + arch::warp() * Plan::kDepth),
        begin_(arch::warp() * Shape::kSteps / kSlices),
        end_((arch::warp() + 1) * Shape::kSteps / kSlices),
        last_tile_((arch::block_x() + 1) * Shape::kRowTiles / arch::grid_x()) {
    fetched_ = {first_tile(), begin_};
    if (begin_ == end_) fetched_.tile = last_tile_;
    if (arch::lane() == 0) {
#pragma unroll
      for (int i = 0; i < Plan::kDepth; ++i) arch::barrier_init(full_ + i, 1);
      arch::fence_barrier_init();
    }
    arch::warp_barrier();
  }

  ULL_DEVICE static int first_tile() { return arch::block_x() * Shape::kRowTiles / arch::grid_x(); }
  ULL_DEVICE int last_tile() const { return last_tile_; }
  ULL_DEVICE int begin() const { return begin_; }
  ULL_DEVICE int end() const { return end_; }

  // Fills the ring with weights; activations have to wait.
  ULL_DEVICE void fill() {
    for (int slot = 0; slot < Plan::kDepth; ++slot) {
      fetch_weights(slot, fetched_);
      advance(fetched_);
    }
  }

  // The activations of the stages that fill() began.
  ULL_DEVICE void fill_activations() {
    if constexpr (!Plan::kStaged) {
      Cursor cursor{begin_ == end_ ? last_tile_ : first_tile(), begin_};
      for (int slot = 0; slot < Plan::kDepth; ++slot) {
        fetch_activations(slot, cursor);
        advance(cursor);
      }
    }
  }

  // Waits for all that fill() began: a block must not end before its copies have.
  ULL_DEVICE void drain() {
    Cursor cursor{begin_ == end_ ? last_tile_ : first_tile(), begin_};
    for (int slot = 0; slot < Plan::kDepth; ++slot) {
      if (cursor.tile < last_tile_) arch::barrier_wait(full_ + slot, 0);
      advance(cursor);
    }
  }

  // The next stage, once it has arrived.
  ULL_DEVICE const unsigned char* wait() {
    arch::barrier_wait(full_ + slot_, phase_);
    return ring_ + slot_ * Plan::kStageBytes;
  }

  // The warp has read the stage: its place takes the next one of the stream.
  ULL_DEVICE void release() {
    arch::warp_barrier();
    fetch_weights(slot_, fetched_);
    if constexpr (!Plan::kStaged) fetch_activations(slot_, fetched_);
    advance(fetched_);
    if (++slot_ == Plan::kDepth) {
      slot_ = 0;
      phase_ ^= 1;
    }
  }

 private:
  ULL_DEVICE void advance(Cursor& cursor) const {
    cursor.step += Plan::kStageSteps;
    if (cursor.step >= end_) {
      cursor.step = begin_;
      cursor.tile += Plan::kTilesAtOnce;
    }
  }

  ULL_DEVICE int steps_at(const Cursor& cursor) const {
    return Plan::kWhole ? Plan::kStageSteps : smaller(Plan::kStageSteps, end_ - cursor.step);
  }

  ULL_DEVICE void fetch_weights(int slot, const Cursor& cursor) {
    if (cursor.tile >= last_tile_) return;
    const int steps = steps_at(cursor);
    const int tiles = smaller(Plan::kTilesAtOnce, last_tile_ - cursor.tile);
    const auto bytes = static_cast<uint32_t>(steps * Shape::kStepBytes);
    if (arch::lane() == 0) {
      const uint32_t activations = Plan::kStaged ? 0 : static_cast<uint32_t>(steps * Plan::kGroups * kGroupBytes);
      arch::barrier_arrive_expect(full_ + slot, static_cast<uint32_t>(tiles) * bytes + activations);
      const int64_t first = static_cast<int64_t>(cursor.tile) * Shape::kSteps + cursor.step;
      for (int i = 0; i < tiles; ++i) {
        arch::bulk_copy_stream(ring_ + slot * Plan::kStageBytes + i * Plan::kStageTileBytes,
                               weights_ + (first + static_cast<int64_t>(i) * Shape::kSteps) * Shape::kStepBytes, bytes,
                               full_ + slot);
      }
    }
  }

  ULL_DEVICE void fetch_activations(int slot, const Cursor& cursor) {
    if (cursor.tile >= last_tile_ || arch::lane() != 0) return;
    for (int i = 0; i < steps_at(cursor); ++i) {
      arch::bulk_copy_stream(
          ring_ + slot * Plan::kStageBytes + Plan::kStageWeightBytes + i * Plan::kGroups * kGroupBytes,
          activations_ + static_cast<int64_t>(cursor.step + i) * kActivationStepBytes, Plan::kGroups * kGroupBytes,
          full_ + slot);
    }
  }

  const unsigned char* weights_;
  const unsigned char* activations_;
  unsigned char* ring_;
  arch::Barrier* full_;
  int begin_;  // the slice's steps
  int end_;
  int last_tile_;
  int slot_ = 0;
  uint32_t phase_ = 0;
  Cursor fetched_;
};

// A lane's share of one step of a row tile. 8 bit: for mma j = 0, 1 the bytes are (row g: columns k, k + 1), (row g +
// 8: the same), (row g: k + 2, k + 3), (row g + 8: the same) with k = 8t + 4j; 16 bit: the same order, mma j's at 512 *
// j.
template <int kBits>
struct Weights {
  uint32_t word[kBits / 2];

  ULL_DEVICE void load(const unsigned char* step) {
#pragma unroll
    for (int j = 0; j < kBits / 8; ++j) {
      const arch::Vector4 v = arch::load_shared(step + j * 512 + arch::lane() * 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) word[4 * j + i] = v.word[i];
    }
  }

  // Mma j's A operand.
  ULL_DEVICE void operand(int j, uint32_t (&a)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i] = kBits == 8 ? arch::e4m3x2_to_f16x2(word[2 * j + i / 2] >> (i % 2 * 16)) : word[(4 * j + i) % (kBits / 2)];
    }
  }
};

// sums += one step of a row tile, for every group of tokens.
template <int kBits, int kGroups>
ULL_DEVICE void multiply_step(float (&sums)[kGroups][4], const Weights<kBits>& weights,
                              const arch::Vector4 (&activations)[kGroups]) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    uint32_t a[4];
    weights.operand(j, a);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const uint32_t b[2] = {activations[group].word[2 * j], activations[group].word[2 * j + 1]};
      arch::mma(sums[group], a, b);
    }
  }
}

// sums += the stream's next stage, whose activations are staged: `operands` is this lane's of the first step. All is
// in registers before the first mma, so that the stage is free again at once.
template <typename Plan>
ULL_DEVICE void multiply_staged(float (&sums)[1][4], Stream<Plan>& stream, int steps, const unsigned char* operands) {
  constexpr int kSteps = Plan::kStageSteps;
  arch::Vector4 activations[kSteps][1];
#pragma unroll
  for (int s = 0; s < kSteps; ++s) activations[s][0] = arch::load_shared(operands + s * Plan::kStagedStepBytes);
  Weights<Plan::Shape::kBits> weights[kSteps];
  const unsigned char* stage = stream.wait();
#pragma unroll
  for (int s = 0; s < kSteps; ++s) weights[s].load(stage + s * Plan::Shape::kStepBytes);
  stream.release();
#pragma unroll
  for (int s = 0; s < kSteps; ++s) {
    if (Plan::kWhole || s < steps) multiply_step(sums, weights[s], activations[s]);
  }
}

// sums += the stream's next stage, which brings activations and the weights of `tiles` row tiles.
template <typename Plan>
ULL_DEVICE void multiply_streamed(float (&sums)[Plan::kTilesAtOnce][Plan::kGroups][4], Stream<Plan>& stream, int steps,
                                  int tiles) {
  const unsigned char* stage = stream.wait();
#pragma unroll
  for (int s = 0; s < Plan::kStageSteps; ++s) {
    if (Plan::kWhole || s < steps) {
      const unsigned char* operands = stage + Plan::kStageWeightBytes + s * Plan::kGroups * kGroupBytes;
      arch::Vector4 activations[Plan::kGroups];
#pragma unroll
      for (int group = 0; group < Plan::kGroups; ++group) {
        activations[group] = arch::load_shared(operands + group * kGroupBytes + arch::lane() * 16);
      }
#pragma unroll
      for (int r = 0; r < Plan::kTilesAtOnce; ++r) {
        if (r < tiles) {
          Weights<Plan::Shape::kBits> weights;
          weights.load(stage + r * Plan::kStageTileBytes + s * Plan::Shape::kStepBytes);
          multiply_step(sums[r], weights, activations);
        }
      }
    }
  }
  stream.release();
}

// Writes this warp's partial sums of one row tile: [token][16 rows and padding].
template <typename Plan>
ULL_DEVICE void store_partial(float* partial, const float (&sums)[Plan::kGroups][4]) {
  const int g = arch::lane() / 4;
  const int t = arch::lane() % 4;
  float* slice = partial + arch::warp() * Plan::kPartialSlice;
#pragma unroll
  for (int group = 0; group < Plan::kGroups; ++group) {
    float* at = slice + (group * kGroupTokens + 2 * t) * Plan::kPartialStride + g;
    if (Plan::kTokens > 1 || t == 0) {
      at[0] = sums[group][0];
      at[8] = sums[group][2];
    }
    if (Plan::kTokens > 1) {
      at[Plan::kPartialStride] = sums[group][1];
      at[Plan::kPartialStride + 8] = sums[group][3];
    }
  }
}

// Four consecutive rows of one token.
struct Four {
  float value[4];
};

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
  if constexpr (Plan::kNorms) {
    constexpr int kRowsAtOnce = larger(1, smaller(Plan::kTokens, 16 / kNormVectors));
    norm_rows<kRowsAtOnce>(params.residual, norm_weight, count, sums, [&](int token, int column, arch::Vector2 four) {
      *reinterpret_cast<arch::Vector2*>(staged + column / kColumnUnit * Plan::kStagedStepBytes +
                                        token * kTokenStepBytes + column % kColumnUnit * 2) = four;
    });
  } else {
    constexpr int kVectors = Plan::kStagedBytes / 16;
    constexpr int kStepVectors = Plan::kStagedStepBytes / 16;
    constexpr int kAtOnce = smaller(8, (kVectors + kLinearThreads - 1) / kLinearThreads);
    const auto* activations = static_cast<const unsigned char*>(params.activations);
    for (int first = arch::thread(); first < kVectors; first += kAtOnce * kLinearThreads) {
      arch::Vector4 v[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int index = first + i * kLinearThreads;
        v[i] = {};
        if (index < kVectors && index % kStepVectors < 4 * count) {
          v[i] = arch::load_global(activations + static_cast<int64_t>(index / kStepVectors) * kActivationStepBytes +
                                   index % kStepVectors * 16);
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int index = first + i * kLinearThreads;
        if (index < kVectors) arch::store_shared(staged + index * 16, v[i]);
      }
    }
  }
}

// The kernel. Epilogue: kItems threads of a token finish one row tile; `load` brings what the item needs besides the
// sums (early, it may take long), `store` finishes it.
template <typename Plan, typename Epilogue>
ULL_DEVICE void linear(const LinearParams& params) {
  unsigned char* shared = arch::shared_memory();
  unsigned char* staged = shared + Plan::kStagedAt;
  auto* partial = reinterpret_cast<float*>(shared + Plan::kPartialAt);
  arch::release_dependents();
  Stream<Plan> stream(params, shared);
  stream.fill();
  RowShare norm_weight;
  if constexpr (Plan::kNorms) load_norm_weight(norm_weight, params.norm_weight);

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

  const int lane = Plan::kTokens == 1 ? arch::lane() % 4 : arch::lane();
  const int token = arch::thread() / Epilogue::kItems;
  const int item = arch::thread() % Epilogue::kItems;
  const bool finishes = token < smaller(count, Plan::kTokens);
  int turn = 0;
  for (int tile = stream.first_tile(); tile < stream.last_tile(); tile += Plan::kTilesAtOnce) {
    const int tiles = smaller(Plan::kTilesAtOnce, stream.last_tile() - tile);
    typename Epilogue::Operands operands;
    if (Plan::kTilesAtOnce == 1 && finishes) operands = Epilogue::load(params, tile, token, item);
    float sums[Plan::kTilesAtOnce][Plan::kGroups][4] = {};
    for (int step = stream.begin(); step < stream.end(); step += Plan::kStageSteps) {
      if constexpr (Plan::kStaged) {
        multiply_staged(sums[0], stream, stream.end() - step, staged + step * Plan::kStagedStepBytes + lane * 16);
      } else {
        multiply_streamed(sums, stream, stream.end() - step, tiles);
      }
    }
#pragma unroll
    for (int r = 0; r < Plan::kTilesAtOnce; ++r) {
      if (r < tiles) {
        if (Plan::kTilesAtOnce > 1 && finishes) operands = Epilogue::load(params, tile + r, token, item);
        float* area = partial + turn * kSlices * Plan::kPartialSlice;
        store_partial<Plan>(area, sums[r]);
        arch::block_barrier();
        if (finishes) Epilogue::template store<Plan>(params, operands, area, tile + r, token, item);
        turn ^= 1;
      }
    }
  }
}

}  // namespace ull::gpu
