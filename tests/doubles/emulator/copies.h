// What the emulator asks of mbarriers and bulk copies (copies.cpp); kernels: thread.h.
#pragma once

#include "block.h"

namespace ull::emulator {

// A bulk copy of the block whose end nobody has waited for; null if there is none.
const Site* unfinished_copy();

}  // namespace ull::emulator
