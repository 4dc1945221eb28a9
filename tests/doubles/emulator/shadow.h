// Who loaded and stored each word last, for kernels that report it: a race detector after ThreadSanitizer, whose
// compiler pass (g++ -fsanitize=thread) calls the functions in shadow.cpp before every load and store. Two accesses of
// which one is a store, and of which neither has happened before the other (order.h), end the launch with an error that
// names both lines, in whatever order the threads ran. So does
//
// - an access to global or host memory by a thread that has not called wait_for_predecessor(), but to `constants`,
//   which no kernel of the round writes behind begin(), nor the host while its graph may run, and, by load_global() or
//   a bulk copy, to what `earlier` kernels wrote, of which L1 may hold what was there before;
// - a bulk copy from what the predecessor has written without fence_bulk_sources() between the wait and the copy, to
//   where a thread still loads, or has stored without fence_bulk_copies() after it, or a thread of another block has
//   stored;
// - a store to where a bulk copy of the block reads that is still under way: in the order in which the threads ran;
// - a store to memory that the host reads, of which store_release_system() does not tell the host.
//
// Four accesses are kept per word, so that of many threads that load it some are forgotten. Stacks are not watched, nor
// what the predecessor or the host has written in time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "block.h"

namespace ull::emulator {

void begin_shadow(Block& block);
void forget_shadow();  // of the launch before

// A store to shared memory: the last one of its thread in some range.
struct Store {
  Access access;
  uintptr_t address;
};
void find_stores(const void* from, uint32_t bytes, std::vector<Store>& found);
// Of a product that reads where those have stored.
void watch_product(const std::vector<Store>& stores, Site site);

void watch_source(const void* from, uint32_t bytes, Site site);  // of a bulk copy
void watch_target(Block& owner, const void* to, uint32_t bytes, Site site);
// What the host might miss, or nothing.
std::string unpublished();

}  // namespace ull::emulator
