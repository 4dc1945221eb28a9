// mbarriers, and the bulk copies that complete on them (copies.cpp).
#pragma once

#include <cstdint>

#include "block.h"

namespace ull::emulator {

void init_mbarrier(uint64_t* barrier, int arrivals, Site site);
void fence_mbarriers();  // that this thread has initialised
void invalidate_mbarrier(uint64_t* barrier, Site site);
void arrive_mbarrier(uint64_t* barrier, uint32_t bytes, Site site);
void wait_mbarrier(const uint64_t* barrier, uint32_t parity, Site site);
void begin_copy(void* shared, const void* global, uint32_t bytes, uint64_t* barrier, Site site);
void prefetch(const void* global, uint32_t bytes, Site site);  // reads it: what cannot be read must not be fetched

// A bulk copy of the block whose end nobody has waited for; null if there is none.
const Site* unfinished_copy();

}  // namespace ull::emulator
