// What happened before what, for kernels that report their loads and stores (see shadow.h): vector clocks over the
// threads of a launch, after the memory consistency model of the PTX ISA (its chapter of that name).
//
// - Each thread counts its releases. A row holds, for every thread of a block, up to which of its releases all that it
//   did has happened before the row's owner; a view holds rows of several blocks.
// - block_barrier(), named_barrier() and warp_barrier() order all threads that meet; named_arrive() is a release to
//   those that wait. Shuffles, ballot and mma order nothing: "do not imply a memory barrier" (CUDA programming guide).
// - An mbarrier's arrivals are releases, and waits for a phase acquire what had arrived.
// - An atomic on global memory is relaxed: it releases what came before the thread's last fence_device(), and what it
//   acquires counts from the thread's next one. So does what await_device() has seen; arrive_device() is a release.
// - cluster_barrier() orders all threads that meet, cluster_start() none. An arrival on another block's mbarrier is a
// release of the block's
//   scope, as in arch.cuh: who waits for it knows that loads of shared memory, and products, have ended. Of stores it
//   knows nothing, and it passes nothing on.
// - Nothing else passes from block to block: what another block has stored may be seen in any order, or never.
// - The async proxy: a bulk copy to where a thread has stored needs that thread's store, then a fence_bulk_copies(),
//   before it. Loads only need to have happened; and what a bulk copy has brought, its mbarrier's waiters may load.
//   Where threads of another block have stored, none may go.
#pragma once

#include <cstdint>
#include <vector>

#include "block.h"

namespace ull::emulator {

// Whether the library's kernels report what they access: they were compiled for it.
extern bool reports;

void begin_order(Block& block);
Order::OfThread& my_order();
uint32_t my_clock();
uint32_t clock_of(int thread);  // of the block

// Of the block; arrived: what threads that do not wait have released to them.
void threads_meet(const std::vector<int>& threads, const Handover& arrived);
void blocks_meet(const std::vector<Thread*>& threads);  // of the cluster
void hand_over(Handover& to);
void hand_loads_over(Handover& to);  // to another block
void take_over(const Handover& from);
void atomic_order(const void* address);
void release_order(const void* address);
void await_order(const void* address);  // a relaxed load

// Whether what the thread of that block did up to that release has happened before what this thread does now.
bool has_happened(int block_number, int thread, uint32_t clock);
// The same of loads of shared memory and of products.
bool has_ended(int block_number, int thread, uint32_t clock);
// Of a store of this block: and a fence_bulk_copies() after it.
bool is_proxied(int thread, uint32_t clock);
// All that has happened before what this thread does now.
View everything_seen();
bool holds(const View& view, int block_number, int thread, uint32_t clock);

void forget_order();  // of the launch before

}  // namespace ull::emulator
