// What is ordered by what, right and with faults, for tests/kernels/test_emulator_order.py.
#include "arch.cuh"
#include "probe.h"

namespace arch = ull::arch;

// Each block leaves its threads' inputs in output, and the last one sums them all up: output[0] is the sum, output[1]
// counts blocks, the rest are the inputs. Faults: 1 no barrier before the count; 2 no fence before it; 3 none after it;
// 4 the count is read and written, not added to.
ULL_KERNEL(sum_up, ProbeParams, 256, 1) {
  arch::wait_for_predecessor();
  auto* output = static_cast<uint32_t*>(params.output);
  const int me = arch::thread(), threads = arch::threads(), blocks = arch::grid_x();
  auto* last = reinterpret_cast<uint32_t*>(arch::shared_memory());
  const int at = arch::block_x() * threads + me;
  output[2 + at] = static_cast<const uint32_t*>(params.input)[at];
  if (params.fault != 1) arch::block_barrier();
  if (me == 0) {
    if (params.fault != 2) arch::fence_device();
    const uint32_t before = params.fault == 4 ? output[1]++ : arch::atomic_add(&output[1], 1U);
    *last = before + 1 == static_cast<uint32_t>(blocks) ? 1 : 0;
    if (params.fault != 3) arch::fence_device();
  }
  arch::block_barrier();
  if (*last == 0) return;
  for (int i = me; i < blocks * threads; i += threads) arch::atomic_add(&output[0], output[2 + i]);
}

// Puts the inputs into memory that the host reads, behind a number that says they are there. Faults: 1 no barrier
// before the number; 2 one of them is stored after it.
ULL_KERNEL(tell_host, ProbeParams, 64, 1) {
  arch::wait_for_predecessor();
  auto* output = static_cast<uint64_t*>(params.output);
  const auto* input = static_cast<const uint64_t*>(params.input);
  const int me = arch::thread();
  if (params.fault != 2 || me != 0) output[1 + me] = input[me];
  if (params.fault != 1) arch::block_barrier();
  if (me == 0) arch::store_release_system(output, 7);
  if (params.fault == 2 && me == 0) output[1] = input[0];
}

// Reverses the input's 1024 bytes within the block: threads put it where a bulk copy brings it next, and add both up.
// Faults: 1 no fence_bulk_copies(); 2 no barrier between the loads and the copy; 3 no fence_barrier_init(); 4 no
// fence_bulk_sources(); 5 fence_bulk_sources() before the wait; 6 the copy begins before the wait; 7 nobody waits for
// the copy; 8 the barrier is invalidated without it; 9 who
// began the copy stores where it reads.
ULL_KERNEL(stage_twice, ProbeParams, 256, 1) {
  auto* shared = reinterpret_cast<uint32_t*>(arch::shared_memory());
  auto* barrier = reinterpret_cast<arch::Barrier*>(shared + 256);
  const auto* input = static_cast<const uint32_t*>(params.input);
  const int me = arch::thread();
  const auto copy = [&] {
    arch::barrier_arrive_expect(barrier, 1024);
    arch::bulk_copy(shared, input, 1024, barrier);
  };
  if (me == 0) {
    arch::barrier_init(barrier, 1);
    if (params.fault != 3) arch::fence_barrier_init();
    if (params.fault == 5) arch::fence_bulk_sources();
    if (params.fault == 6) copy();
  }
  arch::block_barrier();
  arch::wait_for_predecessor();
  if (me == 0 && params.fault != 4 && params.fault != 5) arch::fence_bulk_sources();
  shared[me] = input[255 - me];
  if (params.fault != 1) arch::fence_bulk_copies();
  arch::block_barrier();
  const uint32_t reversed = shared[me ^ 1];
  if (params.fault != 2) arch::block_barrier();
  if (me == 0) copy();
  if (params.fault == 9 && me == 0) const_cast<uint32_t*>(input)[0] = 0;
  if (params.fault < 7 || params.fault == 9) arch::barrier_wait(barrier, 0);
  if (params.fault < 7 || params.fault == 9) static_cast<uint32_t*>(params.output)[me] = reversed + shared[me];
  if (params.fault == 8 && me == 0) arch::barrier_invalidate(barrier);
}

// output[i] = input[i ^ 1] within each warp, through shared memory. Faults: 1 a shuffle instead of the barrier; 2 a
// named barrier that the other warps meet at.
ULL_KERNEL(swap_lanes, ProbeParams, 64, 1) {
  arch::wait_for_predecessor();
  auto* shared = reinterpret_cast<uint32_t*>(arch::shared_memory());
  const int me = arch::thread();
  shared[me] = static_cast<const uint32_t*>(params.input)[me];
  if (params.fault == 0) arch::warp_barrier();
  if (params.fault == 1) arch::shuffle(shared[me], 0);
  if (params.fault == 2) arch::named_barrier(1 + arch::warp(), 32);
  if (params.fault == 3 && arch::warp() == 0) arch::named_barrier(1, 32);
  static_cast<uint32_t*>(params.output)[me] = shared[me ^ 1];
}

// Threads hand a number on by an mbarrier at which all arrive. Fault 1: they do not wait.
ULL_KERNEL(hand_on, ProbeParams, 64, 1) {
  auto* shared = reinterpret_cast<uint32_t*>(arch::shared_memory());
  auto* barrier = reinterpret_cast<arch::Barrier*>(shared + 64);
  const int me = arch::thread();
  if (me == 0) arch::barrier_init(barrier, 64);
  arch::block_barrier();
  arch::wait_for_predecessor();
  shared[me] = static_cast<const uint32_t*>(params.input)[me];
  arch::barrier_arrive(barrier);
  if (params.fault != 1) arch::barrier_wait(barrier, 0);
  static_cast<uint32_t*>(params.output)[me] = shared[(me + 33) % 64];
}

// output[tile][lane] = sum of the warps' inputs of the tile: the warps leave theirs in one of two areas in turn, and
// one warp, another for each tile, adds them up while the others go on. Faults: 1 a warp does not arrive; 2 the
// finishing warp waits for half of them; 3 nobody waits until an area has been read; 4 that is said before it has been;
// 5 the finishing warp only arrives, too; 6 a warp arrives twice; 7 the last tile is not waited for.
ULL_KERNEL(sum_tiles, ProbeParams, 128, 1) {
  constexpr int kTiles = 7;
  constexpr int kThreads = 128;
  auto* areas = reinterpret_cast<uint32_t*>(arch::shared_memory());
  auto* empty = reinterpret_cast<arch::Barrier*>(areas + 2 * kThreads);
  const int me = arch::thread(), warp = arch::warp();
  if (me < 2) arch::barrier_init(empty + me, 1);
  arch::block_barrier();
  arch::wait_for_predecessor();
  for (int tile = 0; tile < kTiles; ++tile) {
    uint32_t* area = areas + tile % 2 * kThreads;
    const bool finishes = warp == tile % 4;
    if (tile >= 2 && params.fault != 3) arch::barrier_wait(empty + tile % 2, (tile / 2 - 1) % 2);
    area[me] = static_cast<const uint32_t*>(params.input)[tile * kThreads + me];
    if (!finishes || params.fault == 5 || (params.fault == 7 && tile == kTiles - 1)) {
      if (params.fault != 1 || warp != 3) arch::named_arrive(1 + tile % 2, kThreads);
      if (params.fault == 6 && warp == 3) arch::named_arrive(1 + tile % 2, kThreads);
      if (!finishes) continue;
    } else {
      arch::named_barrier(1 + tile % 2, params.fault == 2 ? kThreads / 2 : kThreads);
    }
    if (params.fault == 4 && arch::lane() == 0) arch::barrier_arrive(empty + tile % 2);
    uint32_t sum = 0;
    for (int i = 0; i < 4; ++i) sum += area[32 * i + arch::lane()];
    static_cast<uint32_t*>(params.output)[tile * 32 + arch::lane()] = sum;
    arch::warp_barrier();
    if (params.fault != 4 && arch::lane() == 0) arch::barrier_arrive(empty + tile % 2);
  }
}

// Block 0 leaves a number in output[1] and counts itself in output[0]; one warp of block 1 waits for that, and tells
// the other, which takes it to output[2], by a named barrier at which it only arrives (count 0) or an mbarrier (count
// 1). Faults: 1 it does not wait; 2 no fence behind the wait; 3 it tells before it has waited.
ULL_GRID_KERNEL(relay, ProbeParams, 64) {
  auto* output = static_cast<uint32_t*>(params.output);
  auto* barrier = reinterpret_cast<arch::Barrier*>(arch::shared_memory());
  if (arch::thread() == 0) arch::barrier_init(barrier, 32);
  arch::block_barrier();
  arch::wait_for_predecessor();
  const auto tell = [&] {
    if (params.count == 0) arch::named_arrive(1, 64);
    if (params.count == 1) arch::barrier_arrive(barrier);
  };
  if (arch::block_x() == 0) {
    if (arch::thread() != 0) return;
    output[1] = static_cast<const uint32_t*>(params.input)[0];
    arch::arrive_device(output);
  } else if (arch::warp() == 1) {
    if (params.fault == 3) tell();
    if (params.fault != 1) arch::await_device(output, 1);
    if (params.fault != 2) arch::fence_device();
    if (params.fault != 3) tell();
  } else {
    if (params.count == 0) arch::named_barrier(1, 64);
    if (params.count == 1) arch::barrier_wait(barrier, 0);
    if (arch::lane() == 0) output[2] = output[1];
  }
}

// A byte of each thread, four to a word. Fault 1: two threads to a byte.
ULL_KERNEL(store_bytes, ProbeParams, 64, 1) {
  arch::wait_for_predecessor();
  const int me = arch::thread();
  static_cast<uint8_t*>(params.output)[params.fault == 1 ? me / 2 : me] = static_cast<uint8_t>(me);
}

// Each thread takes what the first one stored before the cluster met. Fault 1: it met at cluster_start().
ULL_CLUSTER_KERNEL(meet_cluster, ProbeParams, 64, 2) {
  auto* shared = reinterpret_cast<uint32_t*>(arch::shared_memory());
  arch::wait_for_predecessor();
  if (arch::thread() == 0) shared[0] = static_cast<const uint32_t*>(params.input)[0];
  if (params.fault == 1) {
    arch::cluster_start();
  } else {
    arch::cluster_barrier();
  }
  static_cast<uint32_t*>(params.output)[64 * arch::cluster_rank() + arch::thread()] = shared[0];
}

// Adds the first input to each. Faults: 1 thread 40 does not wait, though all others do; 2 the inputs are loaded before
// the wait. 3 is none where the first four inputs are constants, or what an earlier kernel wrote: they come past L1.
ULL_KERNEL(load_early, ProbeParams, 64, 1) {
  const auto* constant = static_cast<const uint32_t*>(params.input);
  const uint32_t first = params.fault == 3 ? arch::load_global(constant).word[0] : constant[0];
  const uint32_t* inputs = constant + 1;
  const int me = arch::thread();
  const uint32_t early = params.fault == 2 ? inputs[me] : 0;
  if (params.fault != 1 || me != 40) arch::wait_for_predecessor();
  arch::block_barrier();
  static_cast<uint32_t*>(params.output)[me] = first + (params.fault == 2 ? early : inputs[me]);
}
