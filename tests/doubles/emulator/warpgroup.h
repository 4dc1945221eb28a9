// Products of warpgroups, as arch::warpgroup_mma() begins them: wgmma of the PTX ISA, whose rules are errors here.
//
// - All 128 threads of a warpgroup come to the same operations in the same order; a thread may run ahead of the others,
//   and only warpgroup_wait() makes the lanes of a warp meet. On the chip the four warps do not wait for each other
//   either, so that a product of a warp is in flight until that warp has waited.
// - A product is computed when it is waited for, by what mma() computes. From its beginning until then its accumulators
//   are poisoned: a kernel that reads them early has NaN for a sum. Their values come back when warpgroup_wait() is
//   called with them. A kernel that changes them, the registers of a, or b in shared memory before that, has changed
//   the product's operands on the chip, or not: the launch ends.
// - Products that nobody has committed or waited for when their thread ends, and products that no warpgroup_fence()
//   precedes since the last warpgroup_commit(), end it too.
//
// Where kernels report their loads and stores (shadow.h), so do accesses to registers between the fence and the product
// that reads or writes them, or while it is in flight; stores to b that no fence_bulk_copies() has followed; and stores
// and bulk copies to b that do not come after the wait, in whatever order the threads ran.
#pragma once

#include <string>

#include "block.h"

namespace ull::emulator {

// Of a warp whose lanes have all come to warpgroup_wait(): each brings the address of c in `value`, and in b how many
// groups of products may be pending and how many groups of columns c has.
void finish_products(const Operand (&operands)[kWarpLanes], Site site);
// By a thread that ends.
void end_products();

// The product that reads these bytes of that block's shared memory, and may still do so when the thread that runs, of
// this block or another one of its cluster, writes them; or nothing.
std::string product_that_reads(const Block& owner, const void* shared, uint64_t bytes);
// The product in flight that reads or writes these registers (bytes of the stack) of the thread that runs, where it may
// not access them; or nothing. Keeps in mind what is accessed behind a fence.
std::string product_of_registers(const void* address, uint64_t bytes, bool stores);

}  // namespace ull::emulator
