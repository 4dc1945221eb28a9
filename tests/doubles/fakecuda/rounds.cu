// Stand-ins for kernels that report to the host, for tests/gpu/test_fakecuda.py.
#include "arch.cuh"
#include "params.h"
#include "probe.h"

namespace arch = ull::arch;

// Tells the host `count`.
ULL_KERNEL(announce, ProbeParams, 32, 1) {
  arch::wait_for_predecessor();
  if (arch::thread() == 0) {
    arch::store_release_system(static_cast<uint64_t*>(params.output), static_cast<uint64_t>(params.count));
  }
}

// Tells the host the first token drawn, where the round's results would begin.
ULL_KERNEL(ull_accept, ull::gpu::AcceptParams, 32, 1) {
  arch::wait_for_predecessor();
  if (arch::thread() == 0) {
    const auto token = static_cast<int64_t>(params.round->drawn[0].token);
    arch::store_release_system(&params.results->sequence, static_cast<uint64_t>(token));
  }
}
