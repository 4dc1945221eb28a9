// What the emulator knows of clusters of blocks (cluster.cpp); kernels: thread.h. A cluster is `grid.cluster` blocks,
// side by side or one above the other in the grid; where it is 1, each block is one.
//
// The rules of the PTX ISA for what a block does to another one of its cluster are errors here:
//
// - An arrival on another block's mbarrier, or a multicast or a store that completes on it, comes behind a
//   cluster_barrier() that follows its initialisation and its fence_barrier_init().
// - A block ends when no other one touches its shared memory any more: it has waited for every bulk copy that comes to
//   it, and for the phase of every arrival, unless a cluster_barrier() follows the latter.
// - The lanes of a warp come to cluster_barrier() together.
//
// All blocks of a cluster ask for the predecessor's results before any of them gets them: none may wait for what
// another one does behind that.
#pragma once

#include <string>

#include "block.h"

namespace ull::emulator {

Block& block_of_rank(int rank, Block& beside = *block);  // of its cluster
int live_in_cluster(Block& beside = *block);             // threads that have not ended
// By a thread that has ended: those that wait at cluster_barrier() do not wait for it.
void end_in_cluster();
// A place in that block's shared memory, for messages of the block that runs.
std::string place_in(const Block& owner, const void* shared);

}  // namespace ull::emulator
