// The clients' socket and the backlog behind it: turns, budgets, refusals; and the id of a request that is not decoded.
#include "check.h"
#include "fake_zmq.h"
#include "io/request_id.h"
#include "io/router.h"

namespace {

using namespace std::string_literals;
using ull::Received;
using ull::test::FakeZmq;
using ull::test::Frames;

struct Fixture {
  explicit Fixture(int64_t backlog_bytes = 1 << 20, int64_t max_message = 1024)
      : router(api, &net, {.max_message = max_message, .backlog_bytes = backlog_bytes}) {
    router.open({"fake://clients"});
    api.msg_init(&message.payload);
  }
  ~Fixture() { api.msg_close(&message.payload); }

  void send(const std::string& client, const std::string& payload) { net.send_as(client, {"ull1", payload}); }
  // Takes in all that has been sent.
  void tend() {
    while (net.frames_left() > 0) router.tend();
  }
  // The next message as "client:payload", or "client!reason" and the id; "" if there is none.
  std::string next() {
    if (router.receive(message) != Received::kMessage) return "";
    const auto client = message.client();
    std::string text(client.begin(), client.end());
    if (message.malformed != nullptr) {
      text += std::string("!") + message.malformed;
      return message.has_id ? text + std::to_string(message.id) : text;
    }
    const auto payload = ull::zmq::bytes(api, message.payload);
    return text + ":"s + std::string(payload.begin(), payload.end());
  }

  FakeZmq net;
  ull::zmq::Api api = FakeZmq::api();
  ull::Router router;
  ull::Incoming message;
};

TEST(a_message_that_need_not_wait_is_not_kept) {
  Fixture f;
  f.send("a", "1");
  CHECK_EQ(f.next(), "a:1");
  CHECK_EQ(f.next(), "");
  CHECK_EQ(f.router.backlog().cost(), 0U);
}

TEST(clients_that_wait_take_turns) {
  Fixture f;
  for (int i = 0; i < 500; ++i) f.send("flood", std::to_string(i));
  f.send("b", "x");
  f.send("c", "y");
  f.send("b", "z");
  f.tend();
  CHECK(f.router.backlog().cost() >= 503 * ull::Backlog::kMessageCost);
  for (const char* expected : {"flood:0", "b:x", "c:y", "flood:1", "b:z", "flood:2"}) CHECK_EQ(f.next(), expected);
  f.send("c", "late");  // behind those who wait, not behind all that they have sent
  CHECK_EQ(f.next(), "flood:3");
  CHECK_EQ(f.next(), "c:late");
  for (int i = 4; i < 500; ++i) REQUIRE(f.next() == "flood:"s + std::to_string(i));
  CHECK_EQ(f.next(), "");
  CHECK(f.router.backlog().empty());
  CHECK_EQ(f.router.backlog().cost(), 0U);
}

TEST(what_is_malformed_keeps_its_place) {
  Fixture f;
  f.send("a", "1");
  f.net.send_as("a", {"ull2", "x"});
  f.net.send_as("a", Frames(1000, "ull1"));
  f.net.send_as("a", {});
  f.send("a", "2");
  f.tend();
  for (const char* expected : {"a:1", "a!bad_version", "a!bad_frame", "a!bad_frame", "a:2", ""}) {
    CHECK_EQ(f.next(), expected);
  }
}

TEST(nobody_holds_more_than_is_free) {
  constexpr size_t kCost = ull::Backlog::kMessageCost + 1000;
  Fixture f(8 * kCost);
  const std::string body(998, 'x');
  for (int i = 0; i < 20; ++i)
    f.send("a",
           "\x81"
           "\xa2id" +
               std::string(1, static_cast<char>(i)) + body.substr(3));
  for (int i = 0; i < 20; ++i) f.send("b", body);
  f.send("c", body);
  f.tend();
  CHECK_EQ(f.router.backlog().counts().refused + f.router.backlog().counts().dropped, 34U);
  CHECK(f.router.backlog().cost() <= 8 * kCost + 8 * kCost / 4);
  int kept_a = 0;
  int kept_b = 0;
  std::vector<std::string> refused;
  bool c = false;
  for (std::string got = f.next(); !got.empty(); got = f.next()) {
    kept_a += got[0] == 'a' && got[1] == ':' ? 1 : 0;
    kept_b += got[0] == 'b' && got[1] == ':' ? 1 : 0;
    c = c || (got[0] == 'c' && got[1] == ':');
    if (got[0] == 'a' && got[1] == '!') refused.push_back(got);
  }
  CHECK_EQ(kept_a, 4);  // half of it; the next one gets half of what is left
  CHECK_EQ(kept_b, 2);
  CHECK(c);
  REQUIRE(!refused.empty());
  CHECK_EQ(refused.front(), "a!busy4");  // told by the request's own id, in its turn
  CHECK_EQ(f.router.backlog().cost(), 0U);
}

TEST(what_a_client_that_has_gone_had_sent_is_forgotten) {
  Fixture f(1 << 16);
  for (int i = 0; i < 300; ++i) f.send("gone", std::to_string(i));  // refusals among them
  f.send("b", "x");
  f.tend();
  f.net.set_gone("gone");
  const std::string client = "gone";
  const std::span<const uint8_t> identity{reinterpret_cast<const uint8_t*>(client.data()), client.size()};
  CHECK(f.router.send(identity, {}) == ull::Sent::kGone);
  CHECK_EQ(f.next(), "b:x");
  CHECK_EQ(f.next(), "");
  CHECK_EQ(f.router.backlog().cost(), 0U);
  CHECK(f.router.send(identity, {}) == ull::Sent::kGone);
}

TEST(refusals_are_bounded_too) {
  Fixture f(4096 + 512);
  const std::string body(1000, 'x');
  for (int i = 0; i < 100; ++i) f.send("a", body);
  f.tend();
  CHECK(f.router.backlog().counts().dropped > 0U);
  const uint64_t refused = f.router.backlog().counts().refused;
  const uint64_t dropped = f.router.backlog().counts().dropped;
  uint64_t answered = 0;
  while (!f.next().empty()) ++answered;
  CHECK_EQ(answered + dropped, 100U);
  CHECK(answered > refused);
  f.send("a", body);  // forgotten
  f.tend();
  CHECK_EQ(f.next(), "a:"s + body);
}

TEST(a_message_that_is_too_long_is_refused_by_its_id) {
  Fixture f;
  const auto request = [](char id, size_t size) { return "\x81\xa2id"s + id + std::string(size - 5, 'x'); };
  f.send("a", request(7, 1025));
  CHECK_EQ(f.next(), "a!too_long7");
  f.send("a", request(7, 1024));
  CHECK_EQ(f.next(), "a:" + request(7, 1024));
  f.send("a", std::string(1025, 'x'));  // behind others, too
  f.send("b", request(8, 3000));
  f.tend();
  CHECK(f.router.backlog().cost() < 1025U);
  CHECK_EQ(f.next(), "a!too_long");
  CHECK_EQ(f.next(), "b!too_long8");
  CHECK_EQ(f.router.backlog().counts().refused, 0U);
  CHECK_EQ(f.net.client_options()[ull::zmq::kMaxMessageSize], 16 * 1024 * 1024);
}

TEST(two_of_the_longest_messages_always_find_room) {
  Fixture f(1, 5000);
  f.send("a", std::string(5000, 'x'));
  f.send("b", std::string(4000, 'x'));
  f.tend();
  CHECK_EQ(f.next().substr(0, 3), "a:x");
  CHECK_EQ(f.next().substr(0, 2), "b:");
}

TEST(a_name_belongs_to_the_newest_unless_its_stream_runs) {
  Fixture f;
  CHECK_EQ(f.net.client_options()[ull::zmq::kRouterHandover], 1);
  f.router.keep_named_clients(true);
  CHECK_EQ(f.net.client_options()[ull::zmq::kRouterHandover], 0);
  f.router.keep_named_clients(false);
  CHECK_EQ(f.net.client_options()[ull::zmq::kRouterHandover], 1);
}

TEST(the_id_of_a_request) {
  const auto find = [](const std::string& payload) -> std::string {
    uint64_t id = 0;
    const bool found = ull::find_request_id({reinterpret_cast<const uint8_t*>(payload.data()), payload.size()}, id);
    return found ? std::to_string(id) : "none";
  };
  CHECK_EQ(find("\x81\xa2id\x07"s), "7");
  CHECK_EQ(find("\x81\xa2id\xcc\xff"s), "255");
  CHECK_EQ(find("\x81\xa2id\xcd\x01\x02"s), "258");
  CHECK_EQ(find("\x81\xa2id\xce\x01\x00\x00\x00"s), "16777216");
  CHECK_EQ(find("\x81\xa2id\xcf\x80\x00\x00\x00\x00\x00\x00\x01"s), "9223372036854775809");
  CHECK_EQ(find("\x82\xa4type\xa8generate\xa2id\x05"s), "5");
  CHECK_EQ(find("\xde\x00\x02\xa1x\xc0\xa2id\x05"s), "5");
  // Past every kind of value.
  for (const std::string& value : {"\xc0"s,
                                   "\xc3"s,
                                   "\xff"s,
                                   "\xd0\x80"s,
                                   "\xd3\x01\x02\x03\x04\x05\x06\x07\x08"s,
                                   "\xca\x01\x02\x03\x04"s,
                                   "\xcb\x01\x02\x03\x04\x05\x06\x07\x08"s,
                                   "\xd9\x03"
                                   "abc"s,
                                   "\xda\x00\x01"
                                   "a"s,
                                   "\xdb\x00\x00\x00\x01"
                                   "a"s,
                                   "\xc4\x02"
                                   "ab"s,
                                   "\xc5\x00\x01"
                                   "a"s,
                                   "\xc6\x00\x00\x00\x01"
                                   "a"s,
                                   "\xd4\x01\x02"s,
                                   "\xd5\x01\x02\x03"s,
                                   "\xc7\x02\x01\x02\x03"s,
                                   "\xc8\x00\x01\x01\x02"s,
                                   "\x93\x01\x02\x93\x01\x02\x03"s,
                                   "\x82\x01\x02\x03\x91\x04"s,
                                   "\xdc\x00\x02\x01\x02"s,
                                   "\xdd\x00\x00\x00\x01\x01"s,
                                   "\xde\x00\x01\x01\x02"s,
                                   "\xdf\x00\x00\x00\x01\x01\x02"s,
                                   "\xd8"s + std::string(17, 'x'),
                                   "\x90"s,
                                   "\x80"s}) {
    CHECK_EQ(find("\x82\xa1x"s + value + "\xa2id\x2a"), "42");
  }
  for (const std::string& payload :
       {""s, "\x80"s, "\x07"s, "\x91\x01"s, "\x81\xa2id"s, "\x81\xa2id\xcf\x01"s, "\x81\xa2id\xff"s,
        "\x81\xa2id\xa1"
        "7"s,
        "\x81\xa2id\xca\x01\x02\x03\x04"s, "\x81\xa3idd\x07"s, "\xdf\xff\xff\xff\xff"s,
        "\x82\xa1x\xdd\xff\xff\xff\xff"s, "\x82\x91\x01\x01\xa2id\x01"s, "\x82\xa1x\xc6\xff\xff\xff\xff\xa2id\x01"s}) {
    CHECK_EQ(find(payload), "none");
  }
  // The search has an end.
  CHECK_EQ(find("\x82\xa1x\xdc\xff\xff"s + std::string(65535, '\x01') + "\xa2id\x01"), "none");
}

}  // namespace
