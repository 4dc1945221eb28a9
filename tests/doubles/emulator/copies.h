// What the emulator asks of mbarriers and bulk copies (copies.cpp); kernels: thread.h.
#pragma once

#include "block.h"

namespace ull::emulator {

// A bulk copy to the block whose end nobody has waited for; null if there is none.
const Site* unfinished_copy();
// An arrival of another block of the cluster, which might have come when this one had ended: none of its threads has
// waited for that phase of the mbarrier, and no cluster_barrier() has followed. Null if there is none.
const Site* unfinished_arrival();

}  // namespace ull::emulator
