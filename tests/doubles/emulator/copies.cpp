// mbarriers and the bulk copies that complete on them.
//
// An mbarrier's 64 bits: [63:48] kMagic, [47] phase, [46:35] arrivals per phase, [34:23] arrivals still to come,
// [22:0] bytes still to come (signed: a copy may complete before its bytes were announced).
#include "copies.h"

#include <cstring>

#include "cluster.h"
#include "order.h"
#include "shadow.h"
#include "warpgroup.h"

namespace ull::emulator {

namespace {

constexpr uint64_t kMagic = 0xBA22;
constexpr int kMostArrivals = 4095;
constexpr uint32_t kMostBytes = (1U << 20) - 1;  // PTX: the range of tx-count

struct Fields {
  uint32_t phase, arrivals, to_come;
  int32_t bytes;
};

uint64_t packed(const Fields& f) {
  return kMagic << 48 | static_cast<uint64_t>(f.phase) << 47 | static_cast<uint64_t>(f.arrivals) << 35 |
         static_cast<uint64_t>(f.to_come) << 23 | (static_cast<uint32_t>(f.bytes) & 0x7FFFFFU);
}

void check_address(const Block& owner, const uint64_t* barrier, Site site) {
  const auto offset = reinterpret_cast<const unsigned char*>(barrier) - owner.shared;
  if (offset < 0 || offset + 8 > static_cast<ptrdiff_t>(grid.shared_bytes) || offset % 8 != 0) {
    fail_at(site, "an mbarrier at shared + %td: must be aligned to 8 and within the block's %u bytes", offset,
            grid.shared_bytes);
  }
}

Fields fields_of(const Block& owner, const uint64_t* barrier, Site site) {
  check_address(owner, barrier, site);
  const uint64_t bits = *barrier;
  if (bits >> 48 != kMagic) fail_at(site, "uses an mbarrier that is not initialised, or was overwritten");
  const auto bytes = static_cast<uint32_t>(bits & 0x7FFFFFU);
  return {static_cast<uint32_t>(bits >> 47 & 1U), static_cast<uint32_t>(bits >> 35 & 0xFFFU),
          static_cast<uint32_t>(bits >> 23 & 0xFFFU), static_cast<int32_t>(bytes << 9) >> 9};
}

// Stores the fields, and if that completes the phase begins the next and wakes who waits for it.
void store(Block& owner, uint64_t* barrier, Fields fields) {
  const bool complete = fields.to_come == 0 && fields.bytes == 0;
  if (complete) {
    fields.phase ^= 1U;
    fields.to_come = fields.arrivals;
  }
  *barrier = packed(fields);
  if (!complete) return;
  Mbarrier& known = owner.mbarriers[barrier];
  for (const BulkCopy& copy : owner.copies) {
    if (copy.barrier != barrier || copy.phase != known.phase) continue;
    fail_at(copy.site, "the mbarrier's phase completes without this bulk copy: fewer bytes are announced than come");
  }
  ++known.phase;
  known.completed = known.arrived;
  for (int i = 0; i < grid.threads; ++i) {
    Thread& thread = owner.thread[i];
    if (thread.wait == Wait::kCopies && thread.barrier == barrier) wake(thread);
  }
}

bool is_unfinished(const Mbarrier& known) { return known.waited_for < known.copied; }

void arrive(Block& owner, uint64_t* barrier, uint32_t bytes, Site site) {
  Fields fields = fields_of(owner, barrier, site);
  if (bytes > kMostBytes) fail_at(site, "announces %u bytes, more than %u", bytes, kMostBytes);
  if (fields.to_come == 0) fail_at(site, "arrives once more than the %u times of this phase", fields.arrivals);
  fields.bytes += static_cast<int32_t>(bytes);
  fields.to_come -= 1;
  Mbarrier& known = owner.mbarriers[barrier];
  if (&owner == block) {
    hand_over(known.arrived);
  } else {
    hand_loads_over(known.arrived);
  }
  store(owner, barrier, fields);
}

void require_rank(int rank, const char* what, Site site) {
  if (rank < 0 || rank >= grid.cluster) fail_at(site, "%s in block %d of a cluster of %d", what, rank, grid.cluster);
}

// What the other block has where this one has `mine`.
template <typename T>
T* counterpart(const Block& owner, T* mine) {
  const ptrdiff_t offset = reinterpret_cast<unsigned char*>(mine) - block->shared;
  return reinterpret_cast<T*>(owner.shared + offset);
}

// Of an mbarrier of another block of the cluster, which this thread is about to use.
void require_known(Block& owner, const uint64_t* barrier, Site site) {
  const std::string place = place_in(owner, barrier);
  if (owner.live == 0) fail_at(site, "uses the mbarrier at %s, which has ended", place.c_str());
  const auto known = owner.mbarriers.find(barrier);
  if (known != owner.mbarriers.end() && known->second.fenced && known->second.meetings < block_of_rank(0).meetings) {
    return;
  }
  fail_at(site, "uses the mbarrier at %s, whose initialisation no fence_barrier_init() and cluster_barrier() follow",
          place.c_str());
}

void check_copy(const void* shared, const void* global, uint32_t bytes, Site site) {
  const ptrdiff_t offset = static_cast<const unsigned char*>(shared) - block->shared;
  if (offset < 0 || offset + static_cast<ptrdiff_t>(bytes) > static_cast<ptrdiff_t>(grid.shared_bytes)) {
    fail_at(site, "a bulk copy of %u bytes to shared + %td, outside the block's %u bytes", bytes, offset,
            grid.shared_bytes);
  }
  if (bytes == 0 || bytes % 16 != 0 || offset % 16 != 0 || reinterpret_cast<uintptr_t>(global) % 16 != 0) {
    fail_at(site, "a bulk copy of %u bytes from %p to shared + %td: size and addresses must be multiples of 16", bytes,
            global, offset);
  }
}

// To that block, whose mbarrier counts it.
void begin_copy_to(Block& owner, unsigned char* destination, const void* global, uint32_t bytes, uint64_t* barrier,
                   Site site) {
  if (&owner != block) require_known(owner, barrier, site);
  fields_of(owner, barrier, site);
  Mbarrier& known = owner.mbarriers[barrier];
  if (!known.fenced) {
    fail_at(site, "a bulk copy completes on an mbarrier that fence_barrier_init() has not followed");
  }
  if (const std::string product = product_that_reads(owner, destination, bytes); !product.empty()) {
    fail_at(site, "a race at %s: a bulk copy there has begun, and %s", place_in(owner, destination).c_str(),
            product.c_str());
  }
  known.copied = known.phase;
  known.site = site;
  watch_target(owner, destination, bytes, site);
  memset(destination, 0xFF, bytes);  // from here on the copy may write: whoever reads before it completed reads this
  owner.copies.push_back({destination, static_cast<const unsigned char*>(global), bytes, barrier, known.phase, site});
}

}  // namespace

const Site* unfinished_copy() {
  for (const auto& [address, known] : block->mbarriers) {
    if (is_unfinished(known)) return &known.site;
  }
  return nullptr;
}

const Site* unfinished_arrival() {
  const uint32_t meetings = block_of_rank(0).meetings;
  for (const auto& [address, known] : block->mbarriers) {
    if (known.waited_for < known.reached && known.reached_after == meetings) return &known.reached_site;
  }
  return nullptr;
}

void perform_one_copy() {
  const size_t index = draw() % block->copies.size();
  const BulkCopy copy = block->copies[index];
  block->copies[index] = block->copies.back();
  block->copies.pop_back();
  memcpy(copy.shared, copy.global, copy.bytes);
  block->landed.push_back(copy);
  Fields fields = fields_of(*block, copy.barrier, copy.site);
  fields.bytes -= static_cast<int32_t>(copy.bytes);
  store(*block, copy.barrier, fields);
}

void maybe_perform_copies() {
  while (!block->copies.empty() && (draw() & 7U) == 0) perform_one_copy();
}

void init_mbarrier(uint64_t* barrier, int arrivals, Site site) {
  check_address(*block, barrier, site);
  if (arrivals < 1 || arrivals > kMostArrivals) fail_at(site, "barrier_init for %d arrivals", arrivals);
  if (*barrier >> 48 == kMagic) fail_at(site, "barrier_init of an mbarrier that has not been invalidated");
  const auto count = static_cast<uint32_t>(arrivals);
  *barrier = packed({0, count, count, 0});
  Mbarrier fresh{};
  fresh.initialiser = self->index;
  fresh.phase = 1;
  fresh.site = site;
  block->mbarriers[barrier] = std::move(fresh);
}

void fence_mbarriers() {
  for (auto& [address, known] : block->mbarriers) {
    if (known.fenced || known.initialiser != self->index) continue;
    known.fenced = true;
    known.meetings = block_of_rank(0).meetings;
  }
}

void invalidate_mbarrier(uint64_t* barrier, Site site) {
  fields_of(*block, barrier, site);
  for (int i = 0; i < grid.threads; ++i) {
    const Thread& thread = block->thread[i];
    if (thread.wait == Wait::kCopies && thread.barrier == barrier) {
      fail_at(site, "invalidates an mbarrier that thread %d waits for", i);
    }
  }
  if (is_unfinished(block->mbarriers[barrier])) {
    fail_at(site, "invalidates an mbarrier without having waited for the bulk copy that completes on it");
  }
  block->mbarriers.erase(barrier);
  *barrier = ~uint64_t{0};
}

void arrive_mbarrier(uint64_t* barrier, uint32_t bytes, Site site) {
  arrive(*block, barrier, bytes, site);
  maybe_let_others_run();
}

void arrive_mbarrier_in(int rank, uint64_t* barrier, Site site) {
  require_rank(rank, "arrives", site);
  check_address(*block, barrier, site);
  Block& owner = block_of_rank(rank);
  uint64_t* there = counterpart(owner, barrier);
  if (&owner != block) {
    require_known(owner, there, site);
    Mbarrier& known = owner.mbarriers[there];
    known.reached = known.phase;
    known.reached_after = block_of_rank(0).meetings;
    known.reached_site = site;
  }
  arrive(owner, there, 0, site);
  maybe_let_others_run();
}

void wait_mbarrier(const uint64_t* barrier, uint32_t parity, Site site) {
  if (parity > 1) fail_at(site, "barrier_wait for parity %u", parity);
  if (fields_of(*block, barrier, site).phase != parity) {
    maybe_let_others_run();
  } else {
    self->barrier = barrier;
    self->parity = parity;
    // Woken by the end of the phase; another phase may have begun and ended before this thread runs, as on the chip.
    while (fields_of(*block, barrier, site).phase == parity) suspend(Wait::kCopies, site);
  }
  Mbarrier& known = block->mbarriers[barrier];
  known.waited_for = known.phase - 1;
  std::erase_if(block->landed,
                [&](const BulkCopy& copy) { return copy.barrier == barrier && copy.phase <= known.waited_for; });
  take_over(known.completed);
}

void begin_copy(void* shared, const void* global, uint32_t bytes, uint64_t* barrier, Site site) {
  check_address(*block, barrier, site);
  check_copy(shared, global, bytes, site);
  watch_source(global, bytes, site);
  begin_copy_to(*block, static_cast<unsigned char*>(shared), global, bytes, barrier, site);
  maybe_let_others_run();
}

void begin_multicast(void* shared, const void* global, uint32_t bytes, uint64_t* barrier, uint32_t ranks, Site site) {
  if (ranks == 0 || ranks >> grid.cluster != 0) {
    fail_at(site, "a multicast to the blocks %#x of a cluster of %d", ranks, grid.cluster);
  }
  check_address(*block, barrier, site);
  check_copy(shared, global, bytes, site);
  watch_source(global, bytes, site);
  for (int rank = 0; rank < grid.cluster; ++rank) {
    if ((ranks >> rank & 1U) == 0) continue;
    Block& owner = block_of_rank(rank);
    begin_copy_to(owner, counterpart(owner, static_cast<unsigned char*>(shared)), global, bytes,
                  counterpart(owner, barrier), site);
  }
  maybe_let_others_run();
}

void begin_store_in(int rank, void* shared, uint32_t word, uint64_t* barrier, Site site) {
  require_rank(rank, "stores", site);
  check_address(*block, barrier, site);
  const ptrdiff_t offset = static_cast<unsigned char*>(shared) - block->shared;
  if (offset < 0 || offset + 4 > static_cast<ptrdiff_t>(grid.shared_bytes) || offset % 4 != 0) {
    fail_at(site, "stores at shared + %td: must be a multiple of 4 and within the block's %u bytes", offset,
            grid.shared_bytes);
  }
  Block& owner = block_of_rank(rank);
  const uint32_t* kept = &owner.words.emplace_back(word);
  begin_copy_to(owner, counterpart(owner, static_cast<unsigned char*>(shared)), kept, sizeof(word),
                counterpart(owner, barrier), site);
  maybe_let_others_run();
}

void prefetch(const void* global, uint32_t bytes, Site site) {
  if (bytes == 0 || bytes % 16 != 0 || reinterpret_cast<uintptr_t>(global) % 16 != 0) {
    fail_at(site, "a prefetch of %u bytes from %p: size and address must be multiples of 16", bytes, global);
  }
  const auto* source = static_cast<const volatile unsigned char*>(global);
  for (uint32_t i = 0; i < bytes; i += 16) (void)source[i];
  (void)source[bytes - 1];
  grid.prefetches.push_back({global, bytes, block->number, self->waited ? 1 : 0});
}

}  // namespace ull::emulator
