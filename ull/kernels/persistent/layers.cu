// All layers of a round of one token in one launch: one block per multiprocessor stays for the whole loop, and waits
// for what its next step reads of others' (layer_steps.cuh). Every output is computed as in the kernels of the single
// steps, bit for bit.
//
// Shared memory: what the step under way needs, attention or a linear layer; then the ring that carries every layer's
// weights, which goes on through all waiting (layer_ring.cuh); then two layers' parameters.
#include "attention/attention_one.cuh"
#include "linear/gate_up.cuh"
#include "linear/layer_shapes.cuh"
#include "linear/linear_narrow.cuh"
#include "persistent/layer_ring.cuh"
#include "persistent/layer_steps.cuh"

namespace ull::gpu {
namespace {

constexpr int kThreads = kNarrowThreads;
static_assert(kThreads == kAttentionThreads);

// What a linear layer keeps beside the ring: activations, then two areas of sums, then the norm's.
template <typename Plan>
struct LinearArea {
  static constexpr int kPartialAt = round_up(Plan::kStagedBytes, 16);
  static constexpr int kSumAt = kPartialAt + 8 * Plan::kPartialArea;
  static constexpr int kBytes = kSumAt + Plan::kSumBytes;
};

template <typename Shape>
constexpr int kLinearBytes = LinearArea<LayerPlan<Shape>>::kBytes;

constexpr int kStepBytes = round_up(
    larger(larger(larger(kLinearBytes<Qkv>, kLinearBytes<Output>), larger(kLinearBytes<GateUp>, kLinearBytes<Down>)),
           AttentionShared<1>::kLoopBytes),
    128);
constexpr int kParamsBytes = 2 * static_cast<int>(sizeof(LayerParams));
constexpr int kDepth = smaller(
    16, (kWideBytes - kStepBytes - kParamsBytes - 2 * kBarrierBytes) / (kComputeWarps * (kStageBytes + kBarrierBytes)));
static_assert(kDepth >= 2, "the layers do not fit into shared memory");
// Llama 8B and 70B have 10 stages beside bf16 pages (160 KB in flight; attention needs most beside the ring), and 8B
// has 11 beside FP8 pages, where 70B's staged activations of down are in the way of more than 10.
static_assert(kHeadDim > 128 || kGroup > 8 || kIntermediate > 28672 || kDepth >= 10, "the ring is too short");

constexpr int kRingAt = kStepBytes;
constexpr int kParamsAt = kRingAt + kComputeWarps * kDepth * kStageBytes;
constexpr int kBarrierAt = kParamsAt + kParamsBytes;
constexpr int kEmptyAt = kBarrierAt + kComputeWarps * kDepth * kBarrierBytes;
static_assert(kEmptyAt + 2 * kBarrierBytes <= kWideBytes);

using Ring = LayerRing<kDepth>;

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

// wait: until the step's input is there, with the whole block, or with each warp for its own slice. A block without row
// tiles must not look at the input: see layer_steps.cuh.
template <typename Shape, typename Epilogue, typename Wait>
ULL_DEVICE void linear_step(const LinearParams& params, Ring& ring, SumAreas& areas, const Wait& wait) {
  using Plan = LayerPlan<Shape>;
  using Area = LinearArea<Plan>;
  unsigned char* shared = arch::shared_memory();
  const LayerStream<Plan, Ring> stream(ring);
  RowShare norm_weight;
  if constexpr (Plan::kNorms) load_norm_weight(norm_weight, params.norm_weight);
  wait();
  if (stream.stages() == 0) return;
  if constexpr (Plan::kNorms) {
    stage_activations<Plan>(params, 1, 1, shared, reinterpret_cast<float*>(shared + Area::kSumAt), norm_weight);
    arch::block_barrier();
  } else {
    stage_slice<Plan>(params, shared);
    arch::warp_barrier();
  }
  multiply_tiles<Plan, Epilogue>(params, stream, 1, shared, reinterpret_cast<float*>(shared + Area::kPartialAt), areas);
  ring.finish(stream.stages());
}

// Blocks that share a kv head.
ULL_DEVICE int attention_blocks() { return larger(1, arch::grid_x() / kKvHeads); }

// The kv heads' blocks are dealt out to the grid's, as many rounds as it takes. What the pages hold is on its way while
// a block waits for its kv head's part of qkv.
ULL_DEVICE void attention_step(const AttentionParams& params, const LayerSteps& steps) {
  const int blocks = attention_blocks();
#pragma unroll 1
  for (int i = arch::block_x(); i < blocks * kKvHeads; i += arch::grid_x()) {
    const int kv_head = i / blocks;
    AttentionOfOne<true> block(params, {i % blocks, blocks, kv_head});
    if (block.request()) {
      steps.wait_for_qkv(kv_head);
      block.finish();
      arch::fence_bulk_copies();
      arch::block_barrier();
      block.end();
    }
    steps.finish_attention(kv_head);
  }
}

}  // namespace

ULL_GRID_KERNEL(ull_layers_1, LayersParams, kThreads) {
  arch::release_dependents();
  unsigned char* shared = arch::shared_memory();
  Ring ring(params.layers, shared + kRingAt, reinterpret_cast<arch::Barrier*>(shared + kBarrierAt));
  SumAreas areas =
      make_areas<LayerPlan<GateUp>, GateUpEpilogue>(shared + kEmptyAt);  // one warp finishes a tile of each
  load_params(params.layers, 0);
  arch::wait_for_predecessor();
  if (token_count(params.round) == 0) {
    ring.drain();
    return;
  }
  arch::block_barrier();
#pragma unroll 1
  for (int layer = 0; layer < kLayers; ++layer) {
    const LayerParams& own = *layer_params(layer);
    const LayerSteps steps(params.arrivals, layer);
    linear_step<Qkv, QkvEpilogue>(own.linears[kQkvLinear], ring, areas, [&] { steps.wait_for_down(); });
    steps.finish_qkv();
    ring.fetch_ahead<kAheadBytes>();  // attention takes longer than the ring has weights for; no other wait does
    load_params(params.layers, layer + 1);
    attention_step(own.attention, steps);
    linear_step<Output, OutputEpilogue>(own.linears[kOutputLinear], ring, areas,
                                        [&] { steps.wait_for_attention(attention_blocks()); });
    steps.finish_output();
    linear_step<GateUp, GateUpEpilogue>(own.linears[kGateUpLinear], ring, areas, [&] { steps.wait_for_output(); });
    steps.finish_gate_up();
    linear_step<Down, DownEpilogue>(own.linears[kDownLinear], ring, areas, [&] { steps.wait_for_gate_up(); });
    steps.finish_down();
  }
}

}  // namespace ull::gpu
