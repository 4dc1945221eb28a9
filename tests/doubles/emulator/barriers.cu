// Barriers and warp operations, right and with faults, for tests/kernels/test_emulator.py.
#include "arch.cuh"
#include "probe.h"

namespace arch = ull::arch;

// output[i + 1] = input[i] in each block, through shared memory. Faults: 1 no barrier; 2 the last warp leaves out the
// barrier but waits elsewhere; 3 no wait_for_predecessor; 4 the input is read before it.
ULL_KERNEL(rotate, ProbeParams, 1024, 1) {
  arch::release_dependents();
  const auto* input = static_cast<const int32_t*>(params.input) + arch::block_x() * arch::threads();
  auto* output = static_cast<int32_t*>(params.output) + arch::block_x() * arch::threads();
  auto* shared = reinterpret_cast<int32_t*>(arch::shared_memory());
  const int32_t early = params.fault == 4 ? input[arch::thread()] : 0;
  if (params.fault != 3) arch::wait_for_predecessor();
  shared[arch::thread()] = params.fault == 4 ? early : input[arch::thread()];
  if (params.fault == 2 && arch::warp() == arch::threads() / 32 - 1) {
    arch::named_barrier(1, 64);
  } else if (params.fault != 1) {
    arch::block_barrier();
  }
  const int previous = (arch::thread() + arch::threads() - 1) % arch::threads();
  output[arch::thread()] = shared[previous];
}

// output[i] = sum of the warp's inputs. Faults: 1 lane 3 ends first; 2 odd lanes go another way; 3 lane 5 never comes.
ULL_KERNEL(warp_sum, ProbeParams, 1024, 1) {
  arch::wait_for_predecessor();
  if (params.fault == 1 && arch::lane() == 3) return;
  float value = static_cast<const float*>(params.input)[arch::thread()];
  if (params.fault == 3 && arch::lane() == 5) {
    arch::block_barrier();
  }
  if (params.fault == 2 && arch::lane() % 2 == 1) {
    value = arch::shuffle(value, 0);
  }
  for (int mask = 16; mask > 0; mask /= 2) value += arch::shuffle_xor(value, mask);
  const uint32_t all = arch::ballot(arch::lane() % 3 == 0);
  const double first = arch::shuffle(static_cast<double>(value), 0);
  static_cast<float*>(params.output)[arch::thread()] = all == 0x49249249U ? static_cast<float>(first) : -1.0F;
}

// Within each warp: output[lane] = input[31 - lane], through shared memory. Fault 1: no warp_barrier.
ULL_KERNEL(reverse, ProbeParams, 1024, 1) {
  arch::wait_for_predecessor();
  auto* shared = reinterpret_cast<int32_t*>(arch::shared_memory()) + 32 * arch::warp();
  shared[arch::lane()] = static_cast<const int32_t*>(params.input)[arch::thread()];
  if (params.fault != 1) arch::warp_barrier();
  static_cast<int32_t*>(params.output)[arch::thread()] = shared[31 - arch::lane()];
}

// Warp 0 makes `count` numbers that the other warps sum, one at a time, by two named barriers. Fault 1: the consumers
// do not say that they have read.
ULL_KERNEL(hand_over, ProbeParams, 1024, 1) {
  arch::wait_for_predecessor();
  auto* shared = reinterpret_cast<int32_t*>(arch::shared_memory());
  const bool producer = arch::warp() == 0;
  int32_t sum = 0;
  for (int i = 0; i < params.count; ++i) {
    if (producer && arch::lane() == 0) shared[0] = static_cast<const int32_t*>(params.input)[i];
    arch::named_barrier(1, arch::threads());
    if (!producer) sum += shared[0];
    if (params.fault != 1) arch::named_barrier(2, arch::threads());
  }
  static_cast<int32_t*>(params.output)[arch::thread()] = sum;
}

// Blocks pass numbers round, `count` times: each adds its neighbour's of the round before to its own. output: two sets
// of a number per block in turn, then the arrivals. Faults: 1 nobody waits; 2 block 0 does not arrive; 3 block 0 ends
// without wait_for_predecessor; 4 the input is read before it; 5 no fence behind the wait.
ULL_DEVICE void pass_round(const ProbeParams& params) {
  const auto* input = static_cast<const uint32_t*>(params.input);
  auto* output = static_cast<uint32_t*>(params.output);
  const int me = arch::block_x(), blocks = arch::grid_x();
  uint32_t* arrivals = output + 2 * blocks;
  const uint32_t early = params.fault == 4 ? input[me] : 0;
  if (params.fault == 3 && me == 0) return;
  arch::wait_for_predecessor();
  if (arch::thread() == 0) output[me] = params.fault == 4 ? early : input[me];
  for (int i = 1; i <= params.count; ++i) {
    arch::block_barrier();
    if (arch::thread() == 0) {
      if (params.fault != 2 || me != 0) arch::arrive_device(arrivals);
      if (params.fault != 1) arch::await_device(arrivals, static_cast<uint32_t>(i * blocks));
      if (params.fault != 5) arch::fence_device();
    }
    arch::block_barrier();
    if (arch::thread() == arch::threads() - 1) {
      const uint32_t* before = output + (i - 1) % 2 * blocks;
      output[i % 2 * blocks + me] = before[me] + before[(me + 1) % blocks];
    }
  }
}

ULL_GRID_KERNEL(pass_numbers, ProbeParams, 256) { pass_round(params); }
ULL_KERNEL(pass_apart, ProbeParams, 256, 1) { pass_round(params); }

// output[0] = sum of all inputs, output[1] = largest, by atomics; the last block to finish adds 1000 to output[2].
ULL_KERNEL(reduce, ProbeParams, 1024, 1) {
  arch::wait_for_predecessor();
  auto* output = static_cast<uint32_t*>(params.output);
  const uint32_t value = static_cast<const uint32_t*>(params.input)[arch::block_x() * arch::threads() + arch::thread()];
  if (params.fault == 1) {
    const uint32_t old = output[0];
    arch::warp_barrier();
    output[0] = old + value;
  } else {
    arch::atomic_add(&output[0], value);
  }
  arch::atomic_max(&output[1], value);
  arch::block_barrier();
  arch::fence_device();
  if (arch::thread() == 0 && arch::atomic_add(&output[3], 1U) == static_cast<uint32_t>(arch::grid_x()) - 1) {
    output[2] += 1000;
  }
}
