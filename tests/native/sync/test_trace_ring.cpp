// The ring of records that a thread writes while others copy it.
#include "sync/trace_ring.h"

#include <atomic>
#include <memory>
#include <thread>

#include "check.h"

namespace {

using ull::TraceKind;
using ull::TraceRecord;
using ull::TraceRing;

TraceRecord record(uint64_t number) {
  const auto stamp = static_cast<int64_t>(number);
  return {.begin_ns = stamp,
          .end_ns = stamp * 3,
          .id = number ^ 0x5555,
          .connection = ~number,
          .kind = TraceKind::kRound,
          .tree = static_cast<uint16_t>(number),
          .count = static_cast<uint16_t>(number >> 16)};
}

bool whole(const TraceRecord& found) {
  const auto number = static_cast<uint64_t>(found.begin_ns);
  return found.end_ns == found.begin_ns * 3 && found.id == (number ^ 0x5555) && found.connection == ~number &&
         found.tree == static_cast<uint16_t>(number) && found.count == static_cast<uint16_t>(number >> 16);
}

TEST(what_was_written_is_read_in_pieces) {
  const auto ring = std::make_unique<TraceRing>();
  uint64_t next = 7;
  CHECK(ring->copy(0, 10, next).empty());
  CHECK_EQ(next, 0U);
  for (uint64_t number = 0; number < 25; ++number) ring->push(record(number));
  CHECK_EQ(ring->copy(0, 10, next).size(), 10U);
  CHECK_EQ(next, 10U);
  const auto second = ring->copy(next, 100, next);
  REQUIRE(second.size() == 15U);
  CHECK_EQ(second.front().begin_ns, 10);
  CHECK_EQ(second.back().begin_ns, 24);
  CHECK_EQ(next, 25U);
  CHECK(ring->copy(99, 10, next).empty());  // a number that is not there yet
  CHECK_EQ(next, 25U);
}

TEST(what_was_written_over_is_gone) {
  const auto ring = std::make_unique<TraceRing>();
  const uint64_t all = TraceRing::kRecords + 100;
  for (uint64_t number = 0; number < all; ++number) ring->push(record(number));
  uint64_t next = 0;
  const auto found = ring->copy(0, 10, next);
  // The oldest place may be half written by now, for all that a reader knows.
  REQUIRE(found.size() == 9U);
  CHECK_EQ(found.front().begin_ns, 101);
  CHECK_EQ(next, 110U);
}

TEST(a_reader_never_sees_half_a_record) {
  const auto ring = std::make_unique<TraceRing>();
  std::atomic<bool> done{false};
  std::thread writer([&] {
    for (uint64_t number = 0; number < 400'000; ++number) ring->push(record(number));
    done.store(true);
  });
  uint64_t next = 0;
  int64_t last = -1;
  bool ascending = true, intact = true;
  while (!done.load()) {
    for (const TraceRecord& found : ring->copy(next, 2048, next)) {
      intact = intact && whole(found);
      ascending = ascending && found.begin_ns > last;
      last = found.begin_ns;
    }
  }
  writer.join();
  CHECK(intact);
  CHECK(ascending);
}

}  // namespace
