#include "shadow.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <unordered_map>

#include "cluster.h"
#include "order.h"
#include "warpgroup.h"

extern "C" __attribute__((visibility("hidden"))) char __ehdr_start;  // the library's first and last byte
extern "C" __attribute__((visibility("hidden"))) char _end;

namespace ull::emulator {

namespace {

constexpr uintptr_t kPage = 4096;  // bytes of global memory
constexpr size_t kPageWords = kPage / 4;

std::unordered_map<uintptr_t, std::unique_ptr<Word[]>> pages;  // of global memory that was accessed
std::vector<std::unique_ptr<Word[]>> spare_pages;              // cleared
struct {
  uintptr_t number;
  Word* words;
} recent_pages[256];

std::vector<View> publications;  // what the host may know by a store_release_system()

uint32_t place_of(const void* instruction) {
  return static_cast<uint32_t>(static_cast<const char*>(instruction) - &__ehdr_start);
}

bool lies_in(const void* address, const void* start, uint64_t bytes) {
  return static_cast<uint64_t>(static_cast<const char*>(address) - static_cast<const char*>(start)) < bytes;
}

bool lies_in(const void* address, const std::vector<Region>& regions) {
  return std::any_of(regions.begin(), regions.end(),
                     [&](const Region& region) { return lies_in(address, region.address, region.bytes); });
}

bool is_shared(const void* address) { return lies_in(address, block->shared, grid.shared_bytes); }

Word* find_page(uintptr_t number) {
  auto& recent = recent_pages[number % 256];
  if (recent.words != nullptr && recent.number == number) return recent.words;
  const auto page = pages.find(number);
  if (page == pages.end()) return nullptr;
  recent = {number, page->second.get()};
  return recent.words;
}

Word& global_word(uintptr_t address) {
  Word* words = find_page(address / kPage);
  if (words == nullptr) {
    auto& page = pages[address / kPage];
    if (spare_pages.empty()) {
      page = std::make_unique<Word[]>(kPageWords);
    } else {
      page = std::move(spare_pages.back());
      spare_pages.pop_back();
    }
    words = page.get();
  }
  return words[address % kPage / 4];
}

// The shadow of the word at `address`; in global memory one that is there, or null.
Word* existing_word(uintptr_t address) {
  if (is_shared(reinterpret_cast<const void*>(address))) {
    return &block->shadow[(address - reinterpret_cast<uintptr_t>(block->shared)) / 4];
  }
  Word* words = find_page(address / kPage);
  return words == nullptr ? nullptr : words + address % kPage / 4;
}

// The places in the message become file:line in tests/rigs/kernels/emulation.py.
std::string told(const Access& access, const char* action) {
  char text[200];
  snprintf(text, sizeof(text), "%s by thread %d of block (%d, %d) at {+0x%x}", action, access.thread,
           access.block % grid.grid_x, access.block / grid.grid_x, access.place);
  return text;
}

const char* action_of(const Access& access) {
  return access.is_atomic ? "the atomic" : access.stores ? "the store" : "the load";
}

std::string where(uintptr_t address) {
  const auto* pointer = reinterpret_cast<const unsigned char*>(address);
  if (is_shared(pointer)) return place_in(*block, pointer);
  char text[60];
  snprintf(text, sizeof(text), "%p", static_cast<const void*>(pointer));
  return text;
}

bool is_before_now(const Access& access) { return has_happened(access.block, access.thread, access.clock); }

bool is_by_me(const Access& access, const Access& mine) {
  return access.thread == mine.thread && access.block == mine.block;
}

// Checks `mine` against what is known of the word, and keeps it there.
void watch_word(Word& word, const Access& mine, uintptr_t address) {
  Access* place = nullptr;  // for `mine`
  for (Access& old : word.access) {
    if (old.clock == 0) {
      if (place == nullptr) place = &old;
      continue;
    }
    const bool covers = (old.bytes & ~mine.bytes) == 0 && (mine.stores || !old.stores);
    if (is_by_me(old, mine)) {
      if (old.clock == mine.clock && (mine.bytes & ~old.bytes) == 0 && (old.stores || !mine.stores) &&
          old.is_atomic == mine.is_atomic) {
        return;
      }
    } else if (!is_before_now(old)) {
      const bool conflicts = (old.bytes & mine.bytes) != 0 && (old.stores || mine.stores);
      if (conflicts && !(old.is_atomic && mine.is_atomic)) {
        fail("a race at %s: %s, and %s: neither happens before the other", where(address).c_str(),
             told(mine, action_of(mine)).c_str(), told(old, action_of(old)).c_str());
      }
      // Who has added to a counter after another did comes after it, there if nowhere else.
      if (!(old.is_atomic && mine.is_atomic)) continue;
    }
    if (!covers) continue;
    if (place == nullptr) {
      place = &old;
    } else {
      old.clock = 0;
    }
  }
  if (place == nullptr) {
    Access* loads = std::find_if(std::begin(word.access), std::end(word.access),
                                 [](const Access& access) { return !access.stores; });
    place = loads != std::end(word.access) ? loads : &word.access[mine.clock % 4];
  }
  *place = mine;
}

Access access_now(bool stores, bool is_atomic, const void* instruction) {
  Access access{};
  access.clock = my_clock();
  access.block = block->number;
  access.thread = static_cast<uint16_t>(self->index);
  access.stores = stores;
  access.is_atomic = is_atomic;
  access.place = place_of(instruction);
  return access;
}

void require_wait(const void* address, const Access& access, bool past_l1) {
  if (my_order().waited || lies_in(address, grid.constants)) return;
  if (lies_in(address, grid.earlier)) {
    if (past_l1) return;
    fail("%s before wait_for_predecessor(), at %p, of what an earlier kernel wrote, but not by load_global()",
         told(access, action_of(access)).c_str(), address);
  }
  fail("%s before wait_for_predecessor(), at %p, which is no constant", told(access, action_of(access)).c_str(),
       address);
}

// Of a store to global memory: a bulk copy may read its source until somebody has waited for it.
void require_copied(const void* address, uint64_t bytes, const Access& access) {
  const auto* first = static_cast<const unsigned char*>(address);
  for (const BulkCopy& copy : block->copies) {
    if (first >= copy.global + copy.bytes || first + bytes <= copy.global) continue;
    fail("a race at %p: %s, where a bulk copy that is under way reads", address,
         told(access, action_of(access)).c_str());
  }
}

// Of a store to shared memory: products may read it until they have been waited for.
void require_read(const void* address, uint64_t bytes, const Access& access) {
  const std::string product = product_that_reads(*block, address, bytes);
  if (product.empty()) return;
  fail("a race at %s: %s, and %s", where(reinterpret_cast<uintptr_t>(address)).c_str(),
       told(access, action_of(access)).c_str(), product.c_str());
}

void watch_registers(const void* address, uint64_t bytes, const Access& access) {
  const std::string product = product_of_registers(address, bytes, access.stores != 0);
  if (product.empty()) return;
  fail("%s, of %s, which is in flight", told(access, action_of(access)).c_str(), product.c_str());
}

void watch(const void* address, uint64_t bytes, Access access, bool past_l1 = false) {
  const bool shared = is_shared(address);
  if (!shared) {
    if (lies_in(address, self->fiber.stack, self->fiber.bytes)) return watch_registers(address, bytes, access);
    if (lies_in(address, grid.params, grid.params_bytes) ||
        lies_in(address, &__ehdr_start, static_cast<uint64_t>(&_end - &__ehdr_start))) {
      return;
    }
    require_wait(address, access, past_l1);
    if (access.stores) require_copied(address, bytes, access);
  } else if (access.stores) {
    require_read(address, bytes, access);
  }
  const auto first = reinterpret_cast<uintptr_t>(address);
  for (uintptr_t at = first & ~uintptr_t{3}; at < first + bytes; at += 4) {
    uint32_t mask = 0xF;
    if (at < first) mask &= 0xFU << (first - at);
    if (at + 4 > first + bytes) mask &= 0xFU >> (at + 4 - first - bytes);
    access.bytes = static_cast<uint16_t>(mask & 0xF);
    Word& word = shared ? block->shadow[(at - reinterpret_cast<uintptr_t>(block->shared)) / 4] : global_word(at);
    watch_word(word, access, at);
  }
}

void watch_plain(const void* address, uint64_t bytes, bool stores, const void* instruction) {
  if (self != nullptr) watch(address, bytes, access_now(stores, false, instruction));
}

}  // namespace

void begin_shadow(Block& block) {
  if (!reports) return;
  block.shadow.resize((grid.shared_bytes + 3) / 4);
  memset(static_cast<void*>(block.shadow.data()), 0, block.shadow.size() * sizeof(Word));
}

void forget_shadow() {
  for (auto& [number, words] : pages) {
    memset(static_cast<void*>(words.get()), 0, kPageWords * sizeof(Word));
    spare_pages.push_back(std::move(words));
  }
  pages.clear();
  memset(recent_pages, 0, sizeof(recent_pages));
  publications.clear();
}

void watch_atomic(const void* address, uint32_t bytes, const void* instruction) {
  if (!reports) return;
  watch(address, bytes, access_now(true, true, instruction));
  if (!is_shared(address)) atomic_order(address);
}

void watch_past_l1(const void* address, uint32_t bytes, const void* instruction) {
  if (reports) watch(address, bytes, access_now(false, false, instruction), true);
}

void find_stores(const void* from, uint32_t bytes, std::vector<Store>& found) {
  const auto first = reinterpret_cast<uintptr_t>(from);
  for (uintptr_t at = first; at < first + bytes; at += 4) {
    for (const Access& access : existing_word(at)->access) {
      if (access.clock == 0 || !access.stores) continue;
      const auto same = std::find_if(found.begin(), found.end(),
                                     [&](const Store& store) { return store.access.thread == access.thread; });
      if (same == found.end()) {
        found.push_back({access, at});
      } else if (same->access.clock < access.clock) {
        *same = {access, at};
      }
    }
  }
}

void watch_product(const std::vector<Store>& stores, Site site) {
  for (const auto& [access, address] : stores) {
    if (!is_before_now(access)) {
      fail_at(site, "a race at %s: a product reads it, and %s has not happened before it", where(address).c_str(),
              told(access, "the store").c_str());
    }
    if (!is_proxied(access.thread, access.clock)) {
      fail_at(site, "a product reads %s without fence_bulk_copies() after %s", where(address).c_str(),
              told(access, "the store").c_str());
    }
  }
}

void watch_source(const void* from, uint32_t bytes, Site site) {
  if (!reports) return;
  const bool written = lies_in(from, grid.written);
  if (!my_order().waited && !lies_in(from, grid.constants) && !lies_in(from, grid.earlier)) {
    fail_at(site, "a bulk copy from %p before wait_for_predecessor(), which is no constant", from);
  }
  if (written && !my_order().sources_fenced) {
    fail_at(site, "a bulk copy of what the predecessor has written, without fence_bulk_sources() after the wait");
  }
  const auto first = reinterpret_cast<uintptr_t>(from);
  for (uintptr_t at = first; at < first + bytes; at += 4) {
    const Word* word = existing_word(at);
    if (word == nullptr) {
      at |= kPage - 4;
      continue;
    }
    for (const Access& access : word->access) {
      if (access.clock == 0 || !access.stores) continue;
      fail_at(site, "a bulk copy of what this launch has written, which the emulator cannot follow: %s",
              told(access, "the store").c_str());
    }
  }
}

void watch_target(Block& owner, const void* to, uint32_t bytes, Site site) {
  if (!reports) return;
  const auto first = reinterpret_cast<uintptr_t>(to);
  for (uintptr_t at = first; at < first + bytes; at += 4) {
    Word& word = owner.shadow[(at - reinterpret_cast<uintptr_t>(owner.shared)) / 4];
    for (const Access& access : word.access) {
      if (access.clock == 0) continue;
      if (!has_ended(access.block, access.thread, access.clock)) {
        fail_at(site, "a race at %s: a bulk copy there has begun, and %s has not happened before it",
                place_in(owner, reinterpret_cast<const void*>(at)).c_str(), told(access, action_of(access)).c_str());
      }
      if (!access.stores) continue;
      if (&owner != block) {
        fail_at(site, "a bulk copy to %s, where that block has stored, which the emulator cannot follow: %s",
                place_in(owner, reinterpret_cast<const void*>(at)).c_str(), told(access, action_of(access)).c_str());
      }
      if (!is_proxied(access.thread, access.clock)) {
        fail_at(site, "a bulk copy to %s without fence_bulk_copies() after %s",
                place_in(owner, reinterpret_cast<const void*>(at)).c_str(), told(access, action_of(access)).c_str());
      }
    }
    word = {};
  }
}

void publish(uint64_t* address, uint64_t value) {
  __atomic_store_n(address, value, __ATOMIC_RELEASE);
  if (!reports) return;
  publications.push_back(everything_seen());
  release_order(address);
}

uint64_t read_from_host(const uint64_t* address) {
  if (reports && !my_order().waited && !lies_in(address, grid.constants)) {
    fail("reads host memory before wait_for_predecessor(), at %p, which is no constant",
         static_cast<const void*>(address));
  }
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}

std::string unpublished() {
  for (const View& publication : publications) {
    for (const Region& region : grid.host_reads) {
      const auto first = reinterpret_cast<uintptr_t>(region.address);
      for (uintptr_t at = first; at < first + region.bytes; at += 4) {
        Word* words = find_page(at / kPage);
        if (words == nullptr) {
          at |= kPage - 4;
          continue;
        }
        for (const Access& access : words[at % kPage / 4].access) {
          if (access.clock == 0 || !access.stores) continue;
          if (holds(publication, access.block, access.thread, access.clock)) continue;
          return std::string(grid.kernel) + ": " + told(access, action_of(access)) +
                 ", in memory that the host reads, has not happened before store_release_system()";
        }
      }
    }
  }
  return {};
}

}  // namespace ull::emulator

// ---- what g++ -fsanitize=thread calls -------------------------------------------------------------------------------

#define ULL_HOOK extern "C" __attribute__((visibility("hidden"))) void
#define ULL_PLAIN(bytes)                                                            \
  ULL_HOOK __tsan_read##bytes(void* address) {                                      \
    ull::emulator::watch_plain(address, bytes, false, __builtin_return_address(0)); \
  }                                                                                 \
  ULL_HOOK __tsan_write##bytes(void* address) {                                     \
    ull::emulator::watch_plain(address, bytes, true, __builtin_return_address(0));  \
  }                                                                                 \
  ULL_HOOK __tsan_unaligned_read##bytes(void* address) {                            \
    ull::emulator::watch_plain(address, bytes, false, __builtin_return_address(0)); \
  }                                                                                 \
  ULL_HOOK __tsan_unaligned_write##bytes(void* address) {                           \
    ull::emulator::watch_plain(address, bytes, true, __builtin_return_address(0));  \
  }

ULL_PLAIN(1)
ULL_PLAIN(2)
ULL_PLAIN(4)
ULL_PLAIN(8)
ULL_PLAIN(16)
ULL_HOOK __tsan_read_range(void* address, uint64_t bytes) {
  ull::emulator::watch_plain(address, bytes, false, __builtin_return_address(0));
}
ULL_HOOK __tsan_write_range(void* address, uint64_t bytes) {
  ull::emulator::watch_plain(address, bytes, true, __builtin_return_address(0));
}
ULL_HOOK __tsan_func_entry(void*) {}
ULL_HOOK __tsan_func_exit() {}
ULL_HOOK __tsan_init() { ull::emulator::reports = true; }
