#include "cluster.h"

#include "order.h"

namespace ull::emulator {

namespace {

// `last`: the thread that came last, if it did not end instead. Threads that meet at cluster_start() are not ordered.
void release_cluster(Thread* last) {
  Block& first = block_of_rank(0);
  first.at_cluster = 0;
  ++first.meetings;
  std::vector<Thread*> met;
  for (int rank = 0; rank < grid.cluster; ++rank) {
    for (int i = 0; i < grid.threads; ++i) {
      Thread& thread = block_of_rank(rank).thread[i];
      if (thread.wait != Wait::kCluster) continue;
      if (thread.meets_in_order) met.push_back(&thread);
      wake(thread);
    }
  }
  if (last != nullptr && last->meets_in_order) met.push_back(last);
  blocks_meet(met);
}

}  // namespace

Block& block_of_rank(int rank, Block& beside) {
  return grid.cluster == 1 ? beside : *grid.blocks[static_cast<size_t>(rank)];
}

int live_in_cluster(Block& beside) {
  int live = 0;
  for (int rank = 0; rank < grid.cluster; ++rank) live += block_of_rank(rank, beside).live;
  return live;
}

void end_in_cluster() {
  const int came = block_of_rank(0).at_cluster;
  if (came != 0 && came == live_in_cluster()) release_cluster(nullptr);
}

std::string place_in(const Block& owner, const void* shared) {
  std::string text = "shared + " + std::to_string(static_cast<const unsigned char*>(shared) - owner.shared);
  if (&owner != block) text += " of block (" + std::to_string(owner.x) + ", " + std::to_string(owner.y) + ")";
  return text;
}

int cluster_rank() { return (grid.in_row ? block->x : block->y) % grid.cluster; }

void meet_cluster(bool in_order, Site site) {
  self->meets_in_order = in_order;
  meet_warp(Collective::kClusterBarrier, site);
  if (++block_of_rank(0).at_cluster < live_in_cluster()) return suspend(Wait::kCluster, site);
  release_cluster(self);
  let_others_run();
}

}  // namespace ull::emulator
