// What the emulator knows of a block's memory besides the bytes: see order.h for clocks, shadow.h for accesses,
// copies.h for mbarriers.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "thread.h"

namespace ull::emulator {

using Row = std::vector<uint32_t>;                       // by thread of a block
using View = std::map<int, std::shared_ptr<const Row>>;  // by block number

// What a release hands to whoever acquires it: an mbarrier's or a named_arrive()'s, within a block.
struct Handover {
  Row seen;
  Row proxied;
  View foreign;  // what they had acquired of other blocks: what has happened before passes on
  View loaded;   // by other blocks of the cluster: loads alone, see order.h
};

// A block's clocks.
struct Order {
  struct OfThread {
    std::shared_ptr<const View> foreign;  // what it has acquired of other blocks; null: nothing
    std::shared_ptr<const View> fenced;   // all that came before its last fence_device(), of its own block too
    View acquired;                        // by atomics since then
    View loaded;                          // of what other blocks of the cluster did, which loads have happened before
    bool waited;                          // has called wait_for_predecessor()
    bool sources_fenced;                  // and fence_bulk_sources() after that
  };

  std::vector<uint32_t> seen;  // [thread][thread]
  std::vector<uint32_t>
      proxied;  // the same of stores that fence_bulk_copies() followed; empty before the first of them
  std::vector<OfThread> thread;

  uint32_t* row(std::vector<uint32_t>& rows, int index) {
    return rows.data() + static_cast<size_t>(index) * thread.size();
  }
};

struct Access {
  uint32_t clock;  // my_clock(); 0: none
  uint16_t block;  // its number, modulo 2^16
  uint16_t thread : 10;
  uint16_t bytes : 4;  // of the word, as a mask
  uint16_t stores : 1;
  uint16_t is_atomic : 1;
  uint32_t place;  // of the instruction, in the library
};

struct Word {
  Access access[4];
};

// What is known of an mbarrier besides its own 64 bits.
struct Mbarrier {
  int initialiser;         // thread
  bool fenced;             // it has called fence_barrier_init() since then: bulk copies see the barrier
  uint32_t meetings;       // of the cluster until then: behind the next one its other blocks see the barrier
  uint32_t phase;          // counted from 1
  uint32_t copied;         // the last phase that a bulk copy completes on; 0: none
  uint32_t waited_for;     // the last one that a thread has seen completed
  Site site;               // of the last bulk copy
  uint32_t reached;        // the last phase that another block of the cluster has arrived in; 0: none
  uint32_t reached_after;  // meetings of the cluster until then
  Site reached_site;
  Handover arrived;    // in this phase and before
  Handover completed;  // before this phase
};

}  // namespace ull::emulator
