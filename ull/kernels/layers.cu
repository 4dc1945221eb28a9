// All layers of a round of one token in one launch: one block per multiprocessor stays for the whole loop, and the
// grid's blocks meet between dependent steps instead of ending. Every output is computed as in the kernels of the
// single steps, bit for bit.
//
// Shared memory: what the step under way needs, attention or a linear layer; then the ring that carries every layer's
// weights, which goes on through all waiting (layer_ring.cuh); then two layers' parameters.
#include "attention.cuh"
#include "gate_up.cuh"
#include "layer_ring.cuh"
#include "layer_shapes.cuh"
#include "linear_narrow.cuh"

namespace ull::gpu {
namespace {

constexpr int kThreads = kNarrowThreads;
static_assert(kThreads == kAttentionThreads);
constexpr int kTile = 8;  // of attention

// What a linear layer keeps beside the ring: activations, then two areas of sums, then the norm's.
template <typename Plan>
struct LinearArea {
  static constexpr int kPartialAt = round_up(Plan::kStagedBytes, 16);
  static constexpr int kSumAt = kPartialAt + 8 * Plan::kPartialArea;
  static constexpr int kBytes = kSumAt + Plan::kSumBytes;
};

template <typename Shape>
constexpr int kLinearBytes = LinearArea<NarrowPlan<Shape, 1>>::kBytes;

constexpr int kStepBytes = round_up(
    larger(larger(larger(kLinearBytes<Qkv>, kLinearBytes<Output>), larger(kLinearBytes<GateUp>, kLinearBytes<Down>)),
           AttentionShared<kTile>::kBytes),
    128);
constexpr int kParamsBytes = 2 * static_cast<int>(sizeof(LayerParams));
constexpr int kDepth =
    smaller(16, (kWideBytes - kStepBytes - kParamsBytes) / (kComputeWarps * (kStageBytes + kBarrierBytes)));
static_assert(kDepth >= 2, "the layers do not fit into shared memory");

constexpr int kRingAt = kStepBytes;
constexpr int kParamsAt = kRingAt + kComputeWarps * kDepth * kStageBytes;
constexpr int kBarrierAt = kParamsAt + kParamsBytes;
static_assert(kBarrierAt + kComputeWarps * kDepth * kBarrierBytes <= kWideBytes);

using Ring = LayerRing<kDepth>;

// Where the grid's blocks meet. Their arrivals are counted in global memory from 0, which ull_begin has put there.
class GridBarrier {
 public:
  ULL_DEVICE explicit GridBarrier(uint32_t* arrivals) : arrivals_(arrivals) {}

  // The block has done its part of a step. Its shared memory is free for what copies the next step starts.
  ULL_DEVICE void arrive() {
    arch::fence_bulk_copies();
    arch::block_barrier();
    if (arch::thread() == 0) arch::arrive_device(arrivals_);
    expected_ += static_cast<uint32_t>(arch::grid_x());
  }

  // All blocks have done the steps before, whose results may be read.
  ULL_DEVICE void wait() const {
    if (expected_ == 0) return;
    if (arch::thread() == 0) arch::await_device(arrivals_, expected_);
    arch::block_barrier();
  }

 private:
  uint32_t* arrivals_;
  uint32_t expected_ = 0;
};

ULL_DEVICE LayerParams* layer_params(int layer) {
  return reinterpret_cast<LayerParams*>(arch::shared_memory() + kParamsAt) + layer % 2;
}

// Brings a layer's parameters into shared memory, for use after the next barrier of the block.
ULL_DEVICE void load_params(const LayerParams* layers, int layer) {
  constexpr int kVectors = sizeof(LayerParams) / 16;
  static_assert(sizeof(LayerParams) % 16 == 0 && kVectors <= kThreads);
  const int vector = arch::thread();
  if (layer >= kLayers || vector >= kVectors) return;
  arch::store_shared(reinterpret_cast<arch::Vector4*>(layer_params(layer)) + vector,
                     arch::load_global(reinterpret_cast<const arch::Vector4*>(layers + layer) + vector));
}

template <typename Shape, typename Epilogue>
ULL_DEVICE void linear_step(const LinearParams& params, Ring& ring, GridBarrier& grid) {
  using Plan = NarrowPlan<Shape, 1>;
  using Area = LinearArea<Plan>;
  unsigned char* shared = arch::shared_memory();
  RowShare norm_weight;
  if constexpr (Shape::kNorms) load_norm_weight(norm_weight, params.norm_weight);
  grid.wait();
  stage_activations<Plan>(params, 1, shared, reinterpret_cast<float*>(shared + Area::kSumAt), norm_weight);
  arch::block_barrier();
  const LayerStream<Plan, Ring> stream(ring);
  multiply_tiles<Plan, Epilogue>(params, stream, 1, shared, reinterpret_cast<float*>(shared + Area::kPartialAt));
  ring.finish(stream.stages());
  grid.arrive();
}

// The kv heads' blocks are dealt out to the grid's, as many rounds as it takes.
ULL_DEVICE void attention_step(const AttentionParams& params, GridBarrier& grid) {
  using Shared = AttentionShared<kTile>;
  constexpr int kLeastBlocks = (kGroup - 1) / Shared::kPartRows + 1;
  const int blocks = larger(kLeastBlocks, arch::grid_x() / kKvHeads);
  grid.wait();
#pragma unroll 1
  for (int i = arch::block_x(); i < blocks * kKvHeads; i += arch::grid_x()) {
    if (!attend_at<kTile, true>(params, {i % blocks, blocks, i / blocks})) continue;
    arch::fence_bulk_copies();
    arch::block_barrier();
    if (arch::thread() < kSplitTiles) {
      arch::barrier_invalidate(reinterpret_cast<arch::Barrier*>(arch::shared_memory() + Shared::kArrived) +
                               arch::thread());
    }
  }
  grid.arrive();
}

}  // namespace

ULL_GRID_KERNEL(ull_layers_1, LayersParams, kThreads) {
  arch::release_dependents();
  unsigned char* shared = arch::shared_memory();
  Ring ring(params.layers, shared + kRingAt, reinterpret_cast<arch::Barrier*>(shared + kBarrierAt));
  load_params(params.layers, 0);
  arch::wait_for_predecessor();
  if (token_count(params.round) == 0) {
    ring.drain();
    return;
  }
  arch::block_barrier();
  GridBarrier grid(params.arrivals);
#pragma unroll 1
  for (int layer = 0; layer < kLayers; ++layer) {
    const LayerParams& own = *layer_params(layer);
    linear_step<Qkv, QkvEpilogue>(own.linears[kQkvLinear], ring, grid);
    ring.fetch_ahead<kAheadBytes>();  // attention takes longer than the ring has weights for; no other wait does
    load_params(params.layers, layer + 1);
    attention_step(own.attention, grid);
    linear_step<Output, OutputEpilogue>(own.linears[kOutputLinear], ring, grid);
    linear_step<GateUp, GateUpEpilogue>(own.linears[kGateUpLinear], ring, grid);
    linear_step<Down, DownEpilogue>(own.linears[kDownLinear], ring, grid);
  }
}

}  // namespace ull::gpu
