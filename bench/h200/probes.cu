// What the chip's own parts take that the engine is made of, each by itself: launches that overlap, the grid barrier,
// the weights' stream, the placing of blocks and the timers. Not part of the engine. Every kernel leaves something
// behind that says whether it did what it is timed for.
#include "linear/linear_narrow.cuh"

namespace ull::gpu {
namespace {

struct LinkParams {
  uint32_t* count;  // one more for each kernel of a chain; null: nothing is read or written
};

struct BarrierParams {
  uint32_t* arrivals;     // 0 before it
  arch::Vector4* passed;  // [2][blocks] what each block hands to the next one; null: nothing
  uint32_t* sums;         // [blocks] of what it was handed
  int32_t count;          // barriers
};

struct WeightsParams {
  const void* weights;
  uint32_t* sums;  // [blocks][kComputeWarps] of the words that a warp has read
};

struct Place {
  uint64_t ns;  // when the block was there
  uint64_t ticks;
  uint64_t multiprocessor;
};

struct PlaceParams {
  Place* places;  // [blocks]
};

struct TimerParams {
  uint64_t* samples;  // [count][2] nanoseconds, ticks
  int32_t count;
};

struct ProductsParams {
  float* sums;     // [blocks][threads] of a thread's 64 accumulators
  int32_t count;   // times that kProducts are multiplied
  int32_t random;  // 1: operands are random; 0: they are ones
};

constexpr int kProducts = 8;  // of 64 x 128 x 16 each, a group

constexpr int kHidden8b = 4096;  // FP8 row tiles of 64 KB, as qkv, o and gate_up of an 8B model have
constexpr uint32_t kNeverSum = 0x9E3779B9U;

// Reads the weights as linear_narrow() does, by its Stream.
template <int kRows>
ULL_DEVICE void read_weights(const WeightsParams& params) {
  using Plan = NarrowPlan<LinearShape<kRows, kHidden8b, 8, true>, 1>;
  static_assert(Plan::kStageBytes == 2048 && Plan::kDepth == 6);
  arch::release_dependents();
  LinearParams linear{};
  linear.weights = params.weights;
  const Stream<Plan> stream(linear, arch::shared_memory());
  stream.fill();
  arch::wait_for_predecessor();
  uint32_t sum = 0;
  for (int stage = 0; stage < stream.stages(); ++stage) {
    const unsigned char* place = stream.wait(stage);
#pragma unroll
    for (int i = 0; i < Plan::kStageBytes / 512; ++i) {
      const arch::Vector4 v = arch::load_shared(place + i * 512 + arch::lane() * 16);
      sum += v.word[0] + v.word[1] + v.word[2] + v.word[3];
    }
    arch::warp_barrier();
    // The branch waits for the loads: bulk copies do not.
    if (arch::ballot(sum == kNeverSum) != 0xFFFFFFFFU) stream.refill(stage);
  }
  for (int mask = 16; mask > 0; mask /= 2) sum += arch::shuffle_xor(sum, mask);
  if (arch::lane() == 0) params.sums[arch::block_x() * kComputeWarps + arch::warp()] = sum;
}

}  // namespace

// A link of a chain.
ULL_KERNEL(ull_probe_link, LinkParams, 256, 2) {
  arch::release_dependents();
  arch::wait_for_predecessor();
  if (params.count != nullptr && arch::block_x() == 0 && arch::thread() == 0) *params.count += 1;
}

// Grid barriers one behind the other, each as a step of the layers' one kernel ends and the next one begins.
ULL_GRID_KERNEL(ull_probe_barrier, BarrierParams, 256) {
  arch::release_dependents();
  arch::wait_for_predecessor();
  const int blocks = arch::grid_x();
  const int from = (arch::block_x() + 1) % blocks;
  uint32_t expected = 0;
  uint32_t sum = 0;
#pragma unroll 1
  for (int i = 0; i < params.count; ++i) {
    const bool passes = params.passed != nullptr && arch::thread() == 0;
    const int half = i % 2 * blocks;
    if (passes)
      arch::store_global(params.passed + half + arch::block_x(),
                         {{static_cast<uint32_t>(i * blocks + arch::block_x())}});
    arch::fence_bulk_copies();
    arch::block_barrier();
    if (arch::thread() == 0) arch::arrive_device(params.arrivals);
    expected += static_cast<uint32_t>(blocks);
    if (arch::thread() == 0) {
      arch::await_device(params.arrivals, expected);
      arch::fence_device();
    }
    arch::block_barrier();
    if (passes) sum += arch::load_global(params.passed + half + from).word[0];
  }
  if (arch::thread() == 0) params.sums[arch::block_x()] = sum;
}

ULL_KERNEL(ull_probe_weights, WeightsParams, kNarrowThreads, 2) { read_weights<1 << 20>(params); }
ULL_KERNEL(ull_probe_few_weights, WeightsParams, kNarrowThreads, 2) { read_weights<16 * 21>(params); }

#if ULL_WARPGROUP_MMA
// A word of an operand, f16 or, fast, e4m3: ones, or random numbers of at least a half and less than one, of any sign.
// Of f16 a weight has as many bits as an e4m3.
template <bool kFast>
ULL_DEVICE uint32_t operand(int32_t random, bool is_weight, int index) {
  if (random == 0) return kFast ? 0x38383838 : 0x3C003C00;
  uint32_t noise = (static_cast<uint32_t>(index) + 1) * 0x9E3779B1U;
  noise = (noise ^ noise >> 15) * 0x85EBCA77U;
  noise ^= noise >> 13;
  if constexpr (kFast) return (noise & 0x87878787) | 0x30303030;
  return (noise & (is_weight ? 0x83808380U : 0x83FF83FFU)) | 0x38003800;
}

// Products of two warpgroups one behind another, as the linear layers of a prompt's chunk have them, and nothing else:
// the most that they could reach. Operands of ones cost little power, random ones about what weights and activations
// cost.
template <bool kFast>
ULL_DEVICE void multiply_operands(const ProductsParams& params) {
  arch::release_dependents();
  unsigned char* shared = arch::shared_memory();  // [kProducts][2][128 columns][16 bytes]
  for (int i = arch::thread(); i < kProducts * 1024; i += 256) {
    reinterpret_cast<uint32_t*>(shared)[i] = operand<kFast>(params.random, false, i);
  }
  arch::fence_bulk_copies();
  arch::block_barrier();
  arch::wait_for_predecessor();
  uint32_t a[kProducts][4];
#pragma unroll
  for (int i = 0; i < 4 * kProducts; ++i) {
    a[i / 4][i % 4] = operand<kFast>(params.random, true, 4 * kProducts * arch::thread() + i);
  }
  const uint64_t b = arch::core_matrices(shared, 2048, 128);
  float sums[16][4] = {};
#pragma unroll 1
  for (int i = 0; i < params.count; ++i) {
    arch::warpgroup_fence();
#pragma unroll
    for (int k = 0; k < kProducts; ++k) {
      if constexpr (kFast) {
        arch::warpgroup_mma_e4m3(sums, a[k], b + static_cast<uint64_t>(k * 4096 / 16));
      } else {
        arch::warpgroup_mma(sums, a[k], b + static_cast<uint64_t>(k * 4096 / 16));
      }
    }
    arch::warpgroup_commit();
    arch::warpgroup_wait<1>(sums);
  }
  arch::warpgroup_wait<0>(sums);
  float sum = 0.0F;
#pragma unroll
  for (int i = 0; i < 64; ++i) sum += sums[i / 4][i % 4];
  params.sums[arch::block_x() * 256 + arch::thread()] = sum;
}
ULL_KERNEL(ull_probe_products, ProductsParams, 256, 1) { multiply_operands<false>(params); }
ULL_KERNEL(ull_probe_fast_products, ProductsParams, 256, 1) { multiply_operands<true>(params); }
#endif

// Where a grid's blocks come to run, and when.
ULL_KERNEL(ull_probe_place, PlaceParams, 256, 2) {
  arch::release_dependents();
  const Place place{arch::timer_ns(), arch::clock_ticks(), static_cast<uint64_t>(arch::multiprocessor())};
  arch::wait_for_predecessor();
  if (arch::thread() == 0) params.places[arch::block_y() * arch::grid_x() + arch::block_x()] = place;
}

// One thread reads both timers over and over.
ULL_KERNEL(ull_probe_timer, TimerParams, 32, 1) {
  arch::wait_for_predecessor();
  if (arch::thread() != 0) return;
#pragma unroll 1
  for (int i = 0; i < params.count; ++i) {
    params.samples[2 * i] = arch::timer_ns();
    params.samples[2 * i + 1] = arch::clock_ticks();
  }
}

}  // namespace ull::gpu
