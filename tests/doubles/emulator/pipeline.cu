// A ring of shared-memory buffers that bulk copies fill, and accesses outside what a block may touch, for
// tests/kernels/test_emulator.py.
#include "arch.cuh"
#include "probe.h"

namespace arch = ull::arch;

inline constexpr int kStages = 3;
inline constexpr int kStageBytes = 1024;

// Warp 0 streams `count` stages of 256 int32 through a ring, the other warps (256 threads) each sum their column.
// Faults: 1 consumers do not wait for the copy; 2 the producer does not wait for the consumers; 3 fewer bytes are
// announced than come; 4 a misaligned source; 5 the barriers are not initialised; 6 a copy past the end; 7 a barrier is
// initialised twice; 8 a barrier is invalidated while it is waited for; 9 copies that nobody waits for.
ULL_KERNEL(stream, ProbeParams, 288, 1) {
  unsigned char* stages = arch::shared_memory();
  auto* full = reinterpret_cast<arch::Barrier*>(stages + kStages * kStageBytes);
  arch::Barrier* empty = full + kStages;
  if (arch::thread() == 0 && params.fault != 5) {
    for (int i = 0; i < kStages; ++i) {
      arch::barrier_init(&full[i], 1);
      arch::barrier_init(&empty[i], 8);
    }
    arch::fence_barrier_init();
    arch::barrier_invalidate(&empty[0]);
    arch::barrier_init(&empty[0], 8);
    if (params.fault == 7) arch::barrier_init(&full[0], 1);
  }
  arch::block_barrier();
  arch::release_dependents();
  arch::wait_for_predecessor();
  int32_t sum = 0;
  if (arch::warp() == 0) {
    for (int i = 0; i < params.count && arch::lane() == 0; ++i) {
      const int stage = i % kStages;
      const uint32_t parity = static_cast<uint32_t>(i / kStages) & 1U;
      if (params.fault != 2) arch::barrier_wait(&empty[stage], parity ^ 1U);
      arch::barrier_arrive_expect(&full[stage], params.fault == 3 ? kStageBytes / 2 : kStageBytes);
      const auto* source = static_cast<const unsigned char*>(params.input) + i * kStageBytes;
      arch::bulk_copy_stream(stages + stage * kStageBytes + (params.fault == 6 ? 4096 : 0),
                             source + (params.fault == 4 ? 4 : 0), kStageBytes, &full[stage]);
      if (params.fault == 8 && i == kStages) arch::barrier_invalidate(&full[stage]);
    }
    return;
  }
  for (int i = 0; i < params.count; ++i) {
    const int stage = i % kStages;
    if (params.fault != 1) arch::barrier_wait(&full[stage], static_cast<uint32_t>(i / kStages) & 1U);
    sum += reinterpret_cast<const int32_t*>(stages + stage * kStageBytes)[arch::thread() - 32];
    arch::warp_barrier();
    if (arch::lane() == 0) arch::barrier_arrive(&empty[stage]);
  }
  static_cast<int32_t*>(params.output)[arch::thread() - 32] = sum;
  if (params.fault == 9) arch::bulk_copy_stream(stages, params.input, 16, &full[0]);
}

// Copies `count` floats. Faults: 1 writes one float past the block's shared memory; 2 before it; 3 reads far past it;
// 4 reads the input's element `count`; 5 a 16-byte load from an address that is not aligned; 6 very deep recursion.
ULL_DEVICE float deep(int depth) {
  volatile float frame[256];
  frame[depth % 256] = static_cast<float>(depth);
  return depth == 0 ? 0.0F : deep(depth - 1) + frame[depth % 256];
}

ULL_KERNEL(touch, ProbeParams, 32, 1) {
  arch::wait_for_predecessor();
  auto* shared = reinterpret_cast<float*>(arch::shared_memory());
  const auto* input = static_cast<const float*>(params.input);
  auto* output = static_cast<float*>(params.output);
  const int size = params.count;
  for (int i = arch::lane(); i < size; i += 32) shared[i] = input[i];
  arch::block_barrier();
  for (int i = arch::lane(); i < size; i += 32) output[i] = shared[i];
  if (arch::lane() != 7) return;
  if (params.fault == 1) shared[size] = 1.0F;
  if (params.fault == 2) shared[-1] = 1.0F;
  if (params.fault == 3) output[0] = shared[size + 32];
  if (params.fault == 4) output[0] = input[size];
  if (params.fault == 5) output[0] = static_cast<float>(arch::load_shared(shared + 1).word[0]);
  if (params.fault == 6) output[0] = deep(size * 1000);
}

// Asks L2 for `count` bytes of the input, each thread, half of it before the wait. Faults: 1 past the end; 2
// misaligned; 3 no whole vectors.
ULL_KERNEL(ask_ahead, ProbeParams, 32, 1) {
  const auto* input = static_cast<const unsigned char*>(params.input) + 2 * params.count * arch::thread();
  const auto bytes = static_cast<uint32_t>(params.count);
  arch::bulk_prefetch_stream(input, bytes);
  arch::wait_for_predecessor();
  arch::bulk_prefetch_stream(input + bytes + (params.fault == 2 ? 8 : 0),
                             bytes + (params.fault == 1 ? 16 : 0) - (params.fault == 3 ? 8 : 0));
}
