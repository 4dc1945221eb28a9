// Which request comes next: priorities, deadlines, clients' turns, and that nothing waits for ever.
#include <memory>
#include <string_view>
#include <vector>

#include "check.h"
#include "engine/schedule.h"

namespace {

using ull::Priority;
using ull::RequestSlot;
using ull::Schedule;
using ull::SlotState;

constexpr int64_t kAging = 1000;
constexpr auto kAny = [](uint32_t) { return true; };

class Requests {
 public:
  RequestSlot& add(Priority priority, std::string_view client = "client", int64_t deadline_ns = 0) {
    auto& slot = slots_.emplace_back(std::make_unique<RequestSlot>());
    std::copy(client.begin(), client.end(), slot->identity.begin());
    slot->identity_size = static_cast<uint8_t>(client.size());
    slot->priority = priority;
    slot->deadline_ns = deadline_ns;
    return *slot;
  }
  void push(Schedule& schedule, Priority priority, std::string_view client = "client", int64_t deadline_ns = 0,
            int64_t now = 1) {
    const RequestSlot& slot = add(priority, client, deadline_ns);
    schedule.push(static_cast<uint32_t>(slots_.size() - 1), slot, now);
  }

 private:
  std::vector<std::unique_ptr<RequestSlot>> slots_;
};

// Serves all that waits, one to its end after the other; their slots in that order.
std::vector<uint32_t> serve_all(Schedule& schedule, int64_t now = 1) {
  std::vector<uint32_t> order;
  while (const auto next = schedule.choose(now, kAny)) {
    order.push_back(schedule.begin(*next, now));
    schedule.end(*next);
  }
  return order;
}

TEST(priorities_come_in_order) {
  Schedule schedule(8, kAging);
  Requests requests;
  requests.push(schedule, Priority::kBatch);
  requests.push(schedule, Priority::kInteractive);
  requests.push(schedule, Priority::kRealtime);
  requests.push(schedule, Priority::kInteractive);
  CHECK(serve_all(schedule) == std::vector<uint32_t>({2, 1, 3, 0}));
}

TEST(the_earliest_deadline_comes_first_and_none_last) {
  Schedule schedule(16, kAging);
  Requests requests;
  const int64_t deadlines[] = {0, 900, 300, 500, 0, 100, 300};
  for (const int64_t deadline : deadlines) requests.push(schedule, Priority::kInteractive, "client", deadline);
  CHECK(serve_all(schedule) == std::vector<uint32_t>({5, 2, 6, 3, 1, 0, 4}));
  // Of clients too, as long as each has one that waits.
  for (const auto& [client, deadline] : {std::pair{"a", 0}, {"b", 700}, {"c", 200}}) {
    requests.push(schedule, Priority::kInteractive, client, deadline);
  }
  CHECK(serve_all(schedule) == std::vector<uint32_t>({9, 8, 7}));
}

TEST(a_burst_of_one_client_lets_others_in) {
  Schedule schedule(32, kAging);
  Requests requests;
  for (int i = 0; i < 5; ++i) requests.push(schedule, Priority::kInteractive, "many", 100 + i);
  requests.push(schedule, Priority::kInteractive, "one", 0);
  requests.push(schedule, Priority::kInteractive, "other", 5000);
  const auto order = serve_all(schedule);
  CHECK(order == std::vector<uint32_t>({0, 6, 5, 1, 2, 3, 4}));
}

TEST(a_more_urgent_request_comes_between_and_the_first_goes_on) {
  Schedule schedule(8, kAging);
  Requests requests;
  requests.push(schedule, Priority::kBatch);
  CHECK(schedule.choose(1, kAny) == Priority::kBatch);
  CHECK_EQ(schedule.begin(Priority::kBatch, 1), 0U);
  CHECK(!schedule.changed(2));
  requests.push(schedule, Priority::kRealtime, "client", 0, 3);
  CHECK(schedule.changed(3));
  CHECK(schedule.choose(3, kAny) == Priority::kRealtime);
  schedule.suspend(3);
  CHECK(schedule.suspended(Priority::kBatch));
  CHECK_EQ(schedule.begin(Priority::kRealtime, 3), 1U);
  requests.push(schedule, Priority::kBatch, "client", 0, 4);  // does not begin beside the other
  requests.push(schedule, Priority::kInteractive, "client", 0, 4);
  CHECK(schedule.choose(4, kAny) == Priority::kRealtime);
  schedule.end(Priority::kRealtime);
  CHECK(schedule.choose(5, kAny) == Priority::kInteractive);
  CHECK_EQ(schedule.begin(Priority::kInteractive, 5), 3U);
  schedule.end(Priority::kInteractive);
  CHECK(schedule.choose(6, kAny) == Priority::kBatch);
  CHECK(schedule.begun(Priority::kBatch));
  schedule.resume(Priority::kBatch, 6);
  schedule.end(Priority::kBatch);
  CHECK(serve_all(schedule) == std::vector<uint32_t>({2}));
}

TEST(nothing_begins_for_which_there_is_no_room) {
  Schedule schedule(8, kAging);
  Requests requests;
  requests.push(schedule, Priority::kBatch);
  CHECK_EQ(schedule.begin(Priority::kBatch, 1), 0U);
  requests.push(schedule, Priority::kRealtime);
  const auto none = [](uint32_t) { return false; };
  CHECK(schedule.choose(1, none) == Priority::kBatch);
  schedule.end(Priority::kBatch);
  CHECK(schedule.choose(1, none) == Priority::kRealtime);  // alone it may always
}

// Urgent requests without end: what waits is served for a slice whenever it has risen to the front.
TEST(nothing_starves) {
  Schedule schedule(64, kAging);
  Requests requests;
  requests.push(schedule, Priority::kBatch, "patient", 0, 0);
  int64_t served = 0, waited = 0, longest = 0;
  bool any = false;
  Priority working = Priority::kRealtime;
  for (int64_t now = 0; now < 40 * kAging; now += 10) {
    if (now % 20 == 0) requests.push(schedule, Priority::kRealtime, "urgent", 0, now);
    if (any && working == Priority::kRealtime) {  // done after one step
      schedule.end(working);
      any = false;
    }
    const Priority next = schedule.choose(now, kAny).value_or(Priority::kInteractive);
    if (!any || next != working) {
      if (any) schedule.suspend(now);
      if (schedule.begun(next)) {
        schedule.resume(next, now);
      } else {
        (void)schedule.begin(next, now);
      }
      working = next;
      any = true;
    }
    const bool patient = working == Priority::kBatch;
    served += patient ? 10 : 0;
    waited = patient ? 0 : waited + 10;
    longest = std::max(longest, waited);
  }
  CHECK(served > 0);
  CHECK(longest <= 4 * kAging);
}

TEST(a_risen_request_gives_way_again_after_its_slice) {
  Schedule schedule(64, kAging);
  Requests requests;
  requests.push(schedule, Priority::kBatch, "patient", 0, 0);
  const int64_t late = 3 * kAging + 1;
  requests.push(schedule, Priority::kRealtime, "urgent", 0, late);
  CHECK(schedule.choose(late, kAny) == Priority::kBatch);
  (void)schedule.begin(Priority::kBatch, late);
  CHECK(schedule.choose(late + kAging / 20 - 1, kAny) == Priority::kBatch);
  CHECK(schedule.changed(late + kAging / 20));
  CHECK(schedule.choose(late + kAging / 20, kAny) == Priority::kRealtime);
}

TEST(transitions_are_those_that_there_are) {
  using enum SlotState;
  const SlotState all[] = {kFree, kQueued, kPrefilling, kRunning, kSuspended, kHeld, kEnded};
  const std::vector<std::pair<SlotState, SlotState>> there_are = {{kFree, kQueued},
                                                                  {kQueued, kPrefilling},
                                                                  {kQueued, kEnded},
                                                                  {kPrefilling, kRunning},
                                                                  {kPrefilling, kSuspended},
                                                                  {kPrefilling, kHeld},
                                                                  {kPrefilling, kEnded},
                                                                  {kRunning, kSuspended},
                                                                  {kRunning, kHeld},
                                                                  {kRunning, kEnded},
                                                                  {kSuspended, kPrefilling},
                                                                  {kSuspended, kEnded},
                                                                  {kHeld, kFree},
                                                                  {kEnded, kFree}};
  for (const SlotState from : all) {
    for (const SlotState to : all) {
      const bool expected = std::ranges::find(there_are, std::pair{from, to}) != there_are.end();
      CHECK_EQ(ull::may_follow(from, to), expected);
    }
  }
}

}  // namespace
