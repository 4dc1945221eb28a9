// What waits for clients: order, the end of patience, budgets, and who is kept waiting for whom.
#include <map>
#include <set>
#include <string>
#include <vector>

#include "check.h"
#include "io/outbox.h"

namespace {

using Kind = ull::Outbox::Kind;

constexpr int64_t kMs = 1'000'000;

std::span<const uint8_t> bytes(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

// Clients with as much room as the test says.
class ScriptedClients final : public ull::Sender {
 public:
  ull::Sent send(std::span<const uint8_t> identity, std::span<const uint8_t> payload) noexcept override {
    const std::string client(identity.begin(), identity.end());
    ++tries;
    if (gone.count(client) > 0) return ull::Sent::kGone;
    if (room[client] == 0) return ull::Sent::kBlocked;
    --room[client];
    got[client].emplace_back(payload.begin(), payload.end());
    return ull::Sent::kOk;
  }

  std::map<std::string, int> room;
  std::map<std::string, std::vector<std::string>> got;
  std::set<std::string> gone;
  int tries = 0;
};

struct Fixture {
  explicit Fixture(const ull::Outbox::Limits& limits = {}) : outbox(clients, limits) {}

  void post(const std::string& client, const std::string& text, Kind kind = Kind::kReply) {
    outbox.post(kind, bytes(client), bytes(text), now);
  }
  ull::Sent send(const std::string& client, const std::string& text) { return outbox.send(bytes(client), bytes(text)); }
  // Lets time pass, with every retry that falls due.
  void pass(int64_t duration_ns) {
    const int64_t end = now + duration_ns;
    while (outbox.due_ns() <= end) {
      now = std::max(now, outbox.due_ns());
      outbox.retry(now);
    }
    now = end;
  }

  ScriptedClients clients;
  ull::Outbox outbox;
  int64_t now = 1'000 * kMs;
};

TEST(what_a_client_takes_at_once_waits_for_nothing) {
  Fixture f;
  f.clients.room["a"] = 2;
  f.post("a", "1");
  f.post("a", "2");
  CHECK(f.clients.got["a"] == std::vector<std::string>({"1", "2"}));
  CHECK_EQ(f.outbox.waiting(), 0U);
  CHECK_EQ(f.outbox.due_ns(), INT64_MAX);
  CHECK_EQ(f.outbox.counts(Kind::kReply).sent, 2U);
}

TEST(one_clients_messages_keep_their_order) {
  Fixture f;
  f.post("a", "1");
  f.post("a", "2", Kind::kDone);
  f.clients.room["a"] = 1;
  f.post("a", "3");                                    // there is room, but others came first
  CHECK(f.send("a", "token") == ull::Sent::kBlocked);  // ... also for what its sender keeps
  CHECK(f.clients.got["a"].empty());
  f.clients.room["b"] = 1;
  f.post("b", "other");  // nobody else is held up
  CHECK_EQ(f.clients.got["b"].size(), 1U);
  f.pass(kMs);
  CHECK(f.clients.got["a"] == std::vector<std::string>({"1"}));
  f.clients.room["a"] = 9;
  f.pass(kMs);
  CHECK(f.clients.got["a"] == std::vector<std::string>({"1", "2", "3"}));
  CHECK(f.send("a", "token") == ull::Sent::kOk);
  CHECK_EQ(f.outbox.counts(Kind::kReply).sent, 3U);
  CHECK_EQ(f.outbox.counts(Kind::kDone).sent, 1U);
}

TEST(a_stalled_client_gets_everything_when_it_reads_again) {
  Fixture f({.stall_ns = 250 * kMs, .waiting_bytes = 1000});
  for (int i = 0; i < 8; ++i) f.post("a", std::to_string(i), Kind::kDone);
  CHECK(!f.outbox.room());  // others are kept waiting
  CHECK(!f.outbox.delivered());
  f.pass(249 * kMs);
  CHECK(!f.outbox.room());
  f.pass(kMs);  // but not for longer
  CHECK(f.outbox.room());
  CHECK(f.outbox.delivered());
  const int tries = f.clients.tries;
  f.pass(60'000 * kMs);
  CHECK(f.clients.tries - tries <= 60'000 / 50 + 1);
  f.clients.room["a"] = 100;
  f.pass(50 * kMs);
  CHECK_EQ(f.clients.got["a"].size(), 8U);
  CHECK_EQ(f.clients.got["a"].back(), "7");
  CHECK_EQ(f.outbox.counts(Kind::kDone).sent, 8U);
  CHECK_EQ(f.outbox.waiting(), 0U);
  f.clients.room["a"] = 0;  // its next stall begins anew
  for (int i = 0; i < 8; ++i) f.post("a", "again");
  CHECK(!f.outbox.room());
}

// One message every now and then is no progress: the oldest one's age decides.
TEST(a_client_that_reads_too_slowly_keeps_nobody_waiting) {
  Fixture f({.stall_ns = 250 * kMs, .waiting_bytes = 1000});
  for (int i = 0; i < 20; ++i) f.post("a", std::to_string(i));
  for (int i = 0; i < 5; ++i) {
    f.clients.room["a"] = 1;
    f.pass(100 * kMs);
  }
  CHECK(f.outbox.room());
  CHECK_EQ(f.clients.got["a"].size(), 5U);
  CHECK_EQ(f.outbox.waiting(), 15U);
}

TEST(what_a_client_leaves_is_bounded_and_what_is_dropped_is_counted) {
  const size_t cost = ull::Outbox::kLetterCost + 1;
  Fixture f({.stall_ns = kMs, .waiting_bytes = 100 * cost, .stalled_bytes = 4 * cost, .all_stalled_bytes = 6 * cost});
  for (int i = 0; i < 6; ++i) f.post("a", std::to_string(i));
  f.pass(2 * kMs);
  CHECK_EQ(f.outbox.waiting(), 4U);  // the oldest are kept
  CHECK_EQ(f.outbox.counts(Kind::kReply).dropped, 2U);
  f.post("a", "x", Kind::kDone);
  CHECK_EQ(f.outbox.counts(Kind::kDone).dropped, 1U);
  for (int i = 0; i < 3; ++i) f.post("b", std::to_string(i));
  f.pass(2 * kMs);
  CHECK_EQ(f.outbox.waiting(), 6U);  // all of them together
  f.post("b", "x");
  CHECK_EQ(f.outbox.waiting(), 6U);
  f.clients.room["a"] = f.clients.room["b"] = 100;
  f.pass(50 * kMs);
  CHECK(f.clients.got["a"] == std::vector<std::string>({"0", "1", "2", "3"}));
  CHECK(f.clients.got["b"] == std::vector<std::string>({"0", "1"}));
  CHECK_EQ(f.outbox.counts(Kind::kReply).dropped, 4U);
}

TEST(what_waits_for_a_client_that_goes_away_is_given_up) {
  Fixture f;
  f.post("a", "1");
  f.post("a", "2", Kind::kDone);
  f.clients.gone.insert("a");
  f.pass(kMs);
  CHECK_EQ(f.outbox.waiting(), 0U);
  CHECK(f.outbox.delivered());
  CHECK_EQ(f.outbox.counts(Kind::kReply).dropped, 1U);
  CHECK_EQ(f.outbox.counts(Kind::kDone).dropped, 1U);
  f.post("a", "3");
  CHECK_EQ(f.outbox.counts(Kind::kReply).dropped, 2U);
}

TEST(a_thousand_blocked_clients_are_tried_in_turns) {
  Fixture f({.stall_ns = kMs});
  for (int i = 0; i < 1000; ++i) f.post(std::to_string(i), "x");
  f.pass(100 * kMs);
  const int tries = f.clients.tries;
  f.now += 1'000 * kMs;
  f.outbox.retry(f.now);
  CHECK(f.clients.tries - tries <= 64);  // the rest waits for the next cycle
  for (int i = 0; i < 1000; ++i) f.clients.room[std::to_string(i)] = 1;
  f.pass(200 * kMs);
  CHECK_EQ(f.outbox.counts(Kind::kReply).sent, 1000U);
}

}  // namespace
