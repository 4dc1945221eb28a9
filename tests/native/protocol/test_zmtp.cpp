// ZeroMQ's wire protocol (ZMTP 3.1, https://rfc.zeromq.org/spec/37/) step by step, without a socket. Over sockets it is
// in test_zmtp_server.cpp.
#include "protocol/zmtp.h"

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "check.h"
#include "io/input.h"
#include "zmtp_bytes.h"

namespace {

using namespace std::string_literals;
using namespace ull::test;
using Kind = ull::Step::Kind;

// One connection, its bytes received as the server does.
class Exchange {
 public:
  explicit Exchange(int64_t max_message = 1000) : zmtp_(max_message), longest_(std::max<size_t>(2048, max_message)) {}

  // Says what has happened since it began.
  const Events& give(std::string_view text) {
    while (!unfit) {
      const std::span<const uint8_t> input = input_.bytes();
      const ull::Step step = zmtp_.step(state, input);
      note(step);
      if (step.kind == Kind::kUnfit) break;
      CHECK(step.consumed <= input.size());
      if (step.kind == Kind::kMore) {
        CHECK(step.wanted > input.size() - step.consumed);
        CHECK(step.wanted <= longest_ + 9);
      }
      input_.drop(step.consumed);
      if (step.kind != Kind::kMore) continue;
      input_.want(step.wanted);
      if (text.empty()) break;
      text.remove_prefix(receive(text));
    }
    return events;
  }

  Events events;
  bool unfit = false;
  ull::ProtocolState state;

 private:
  size_t receive(std::string_view text) {
    if (state.throwing) {  // it is not kept
      const size_t size = std::min(text.size(), state.left);
      CHECK(size > 0);
      state.left -= size;
      return size;
    }
    const std::span<uint8_t> room = input_.room();
    const size_t size = std::min(text.size(), room.size());
    CHECK(size > 0);
    std::copy_n(text.begin(), size, room.begin());
    input_.add(size);
    return size;
  }

  void note(const ull::Step& step) {
    const std::string id = step.has_id ? " of " + std::to_string(step.id) : "";
    if (step.kind == Kind::kOpened) events.emplace_back("opened");
    if (step.kind == Kind::kAnswer) events.push_back("answer " + text_of(step.payload));
    if (step.kind == Kind::kUnfit) {
      unfit = true;
      events.emplace_back("unfit");
    }
    if (step.kind != Kind::kMessage) return;
    CHECK(step.malformed == nullptr || step.payload.empty());
    CHECK(step.malformed != nullptr || !step.has_id);
    events.push_back(step.malformed == nullptr ? "message " + text_of(step.payload) : step.malformed + id);
  }

  const ull::Zmtp zmtp_;
  const size_t longest_;
  ull::Input input_;
};

Events said(const std::string& stream, int64_t max_message = 1000) { return Exchange(max_message).give(stream); }

// After a handshake: what a connection says to these bytes.
Events answers(const std::string& stream, int64_t max_message = 1000) {
  Events events = said(kHandshake + stream, max_message);
  CHECK(!events.empty() && events.front() == "opened");
  if (!events.empty()) events.erase(events.begin());
  return events;
}

// Many bytes, given piece by piece: how many were taken before the connection was found unfit; all of them if not.
size_t taken_of(Exchange& exchange, const std::string& piece, size_t pieces) {
  for (size_t i = 0; i < pieces; ++i) {
    if (exchange.give(piece).back() == "unfit") return (i + 1) * piece.size();
  }
  return pieces * piece.size();
}

std::string readable(const Events& events) {
  std::string text = "[";
  for (const std::string& event : events) {
    text += text.size() > 1 ? ", " : "";
    for (const char byte : event.substr(0, 60)) text += byte >= ' ' && byte <= '~' ? byte : '.';
    if (event.size() > 60) text += "... (" + std::to_string(event.size()) + ")";
  }
  return text + "]";
}

#define CHECK_EVENTS(events, ...)                        \
  do {                                                   \
    const Events got_ = events, expected_ = __VA_ARGS__; \
    CHECK_EQ(readable(got_), readable(expected_));       \
    CHECK(got_ == expected_);                            \
  } while (false)

// Everything that a client may say, and some that it may not.
const std::string kAll = greeting() + ready("DEALER", property("Identity", "me")) + message("one") + ping("") +
                         frame(kMore, "ull1") + ping("0123456789abcdef") + command("SUBSCRIBE", "x") +
                         frame(0, std::string(300, '2')) + frame(0, "alone") + frame(kMore, "ull2") + frame(0, "x") +
                         frame(kMore, "ull1") + frame(kMore, "x") + ping("in") + frame(0, "y") + frame(kMore, "ull1") +
                         frame(0, kRequest + std::string(400, 'l')) + message("") + long_frame(kMore, "ull1") +
                         long_frame(0, "last") + frame(kCommand, name("ERROR") + name("why"));
const Events kAllEvents = {"opened",
                           "message one",
                           "answer " + pong(""),
                           "answer " + pong("0123456789abcdef"),
                           "message " + std::string(300, '2'),
                           "bad_frame",
                           "bad_version",
                           "answer " + pong("in"),
                           "bad_frame",
                           "too_long of 42",
                           "message ",
                           "message last",
                           "unfit"};

TEST(an_exchange_is_understood_in_one_piece) { CHECK_EVENTS(said(kAll, 300), kAllEvents); }

TEST(an_exchange_is_understood_byte_by_byte) {
  Exchange exchange(300);
  for (const char byte : kAll) (void)exchange.give({&byte, 1});
  CHECK_EVENTS(exchange.events, kAllEvents);
}

TEST(an_exchange_is_understood_wherever_it_is_cut) {
  for (size_t cut = 0; cut <= kAll.size(); ++cut) {
    Exchange exchange(300);
    (void)exchange.give(std::string_view(kAll).substr(0, cut));
    CHECK_EVENTS(exchange.give(std::string_view(kAll).substr(cut)), kAllEvents);
  }
}

TEST(every_event_comes_with_its_last_byte) {
  const std::string stream = kHandshake + message("one") + ping("x") + frame(0, "alone");
  const std::vector<size_t> ends = {kHandshake.size(), kHandshake.size() + message("one").size(),
                                    kHandshake.size() + (message("one") + ping("x")).size(), stream.size()};
  for (size_t i = 0; i < ends.size(); ++i) {
    CHECK_EQ(said(stream.substr(0, ends[i] - 1)).size(), i);
    CHECK_EQ(said(stream.substr(0, ends[i])).size(), i + 1);
  }
}

TEST(peers_of_version_3_and_later_fit_and_those_of_3_1_are_pinged) {
  for (const auto& [major, minor, pings] :
       {std::tuple(3, 0, false), {3, 1, true}, {3, 2, true}, {4, 0, true}, {9, 0, true}, {255, 255, true}}) {
    Exchange exchange;
    CHECK_EVENTS(exchange.give(greeting(major, minor) + ready("DEALER") + message("x")), {"opened", "message x"});
    CHECK_EQ(exchange.state.pings, pings);
  }
}

TEST(a_greeting_may_have_any_filler) {
  std::string filled = greeting();
  for (size_t i = 1; i <= 8; ++i) filled[i] = 'p';  // padding of the signature: older peers write a length there
  for (size_t i = 32; i < 64; ++i) filled[i] = 'f';
  CHECK_EVENTS(said(filled + ready("DEALER")), {"opened"});
}

// Not waited for: a peer of another kind may never send 64 bytes.
TEST(a_wrong_greeting_is_refused_with_its_first_wrong_byte) {
  const auto refused = [](const std::string& text, size_t at) {
    CHECK_EVENTS(said(text.substr(0, at)), {});
    CHECK_EVENTS(said(text.substr(0, at + 1)), {"unfit"});
    CHECK_EVENTS(said(text), {"unfit"});
    Exchange slow;
    for (const char byte : text) (void)slow.give({&byte, 1});
    CHECK_EVENTS(slow.events, {"unfit"});
  };
  refused("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", 0);
  refused("ull1\0\0\0\0"s, 0);
  refused("\x01\x00"s, 0);                  // ZMTP 1: an anonymous identity
  refused("\x16\x03\x01\x02\x00\x01"s, 0);  // TLS
  refused("\xff\0\0\0\0\0\0\0\1\x7e"s, 9);
  refused("\xff\0\0\0\0\0\0\0\1\0"s, 9);
  for (const int major : {0, 1, 2}) refused(greeting(major, 1), 10);
  refused(greeting(3, 1, "PLAIN"), 12);
  refused(greeting(3, 0, "CURVE"), 12);
  refused(greeting(3, 1, "GSSAPI"), 12);
  refused(greeting(3, 1, "NULLS"), 16);
  refused(greeting(3, 1, "null"), 12);
  refused(greeting(3, 1, "NUL"), 15);
  refused(greeting(3, 1, "NULL"s + std::string(15, '\0') + "x"), 31);
}

TEST(who_fits_a_router_is_let_in) {
  const auto shake = [](const std::string& text) { return readable(said(greeting() + text)); };
  for (const char* type : {"DEALER", "REQ", "ROUTER"}) CHECK_EQ(shake(ready(type)), "[opened]");
  for (const char* type :
       {"PUB", "SUB", "PAIR", "REP", "PUSH", "PULL", "dealer", "Dealer", "DEALER2", "DEALE", "RE", ""}) {
    CHECK_EQ(shake(ready(type)), "[unfit]");
  }
  CHECK_EQ(shake(ready("DEALER\0"s)), "[unfit]");
  CHECK_EQ(shake(command("READY", "")), "[unfit]");
  CHECK_EQ(shake(command("READY", property("Identity", "me"))), "[unfit]");
  for (const char* key : {"SOCKET-TYPE", "socket-type", "sOCKET-tYPE"}) {
    CHECK_EQ(shake(command("READY", property(key, "REQ"))), "[opened]");
  }
  for (const char* key : {"Socket_Type", "Socket-Typ", "Socket-Types", "Socket"}) {
    CHECK_EQ(shake(command("READY", property(key, "REQ"))), "[unfit]");
  }
  CHECK_EQ(shake(command("READY", property("Identity", "") + property("X-Any", std::string(500, 'x')) +
                                      property("Socket-Type", "DEALER"))),
           "[opened]");
}

TEST(an_identity_may_have_255_bytes) {
  for (const char* key : {"Identity", "IDENTITY", "identity"}) {
    CHECK_EVENTS(said(greeting() + ready("DEALER", property(key, std::string(255, 'i')))), {"opened"});
    CHECK_EVENTS(said(greeting() + ready("DEALER", property(key, std::string(256, 'i')))), {"unfit"});
  }
  CHECK_EVENTS(said(greeting() + ready("DEALER", property("Identity2", std::string(256, 'i')))), {"opened"});
}

TEST(properties_that_are_cut_or_lie_about_their_length_are_refused) {
  const std::string whole = property("Socket-Type", "DEALER") + property("Identity", "me");
  const size_t first = property("Socket-Type", "DEALER").size();
  for (size_t cut = 0; cut <= whole.size(); ++cut) {
    CHECK_EQ(readable(said(greeting() + command("READY", whole.substr(0, cut)))),
             cut == first || cut == whole.size() ? "[opened]" : "[unfit]");
  }
  const std::string type = property("Socket-Type", "DEALER");
  for (const uint32_t size : {3U, 5U, 0x01000002U, 0x7fffffffU, 0x80000000U, 0xffffffffU}) {
    CHECK_EVENTS(said(greeting() + command("READY", type + name("Identity") + big_endian(size, 4) + "me")), {"unfit"});
  }
  CHECK_EVENTS(said(greeting() + command("READY", type + "\xff" + "Identity")), {"unfit"});
  CHECK_EVENTS(said(greeting() + frame(kCommand, "")), {"unfit"});
  CHECK_EVENTS(said(greeting() + frame(kCommand, "\6READY")), {"unfit"});
  CHECK_EVENTS(said(greeting() + frame(kCommand, "\4READY" + type)), {"unfit"});
}

TEST(a_ready_may_have_the_long_format_and_some_length) {
  const std::string body = name("READY") + property("Socket-Type", "DEALER");
  CHECK_EVENTS(said(greeting() + long_frame(kCommand, body) + message("x")), {"opened", "message x"});
  const auto of = [&](size_t size) {
    const size_t rest = size - body.size() - property("X", "").size();
    return frame(kCommand, body + property("X", std::string(rest, 'x')));
  };
  for (const size_t size : {size_t{254}, size_t{255}, size_t{256}, size_t{2048}}) {
    CHECK_EVENTS(said(greeting() + of(size) + message("x")), {"opened", "message x"});
  }
  CHECK_EVENTS(said(greeting() + of(2049)), {"unfit"});
  for (const uint64_t size : {uint64_t{2049}, uint64_t{1} << 32, uint64_t{1} << 63, UINT64_MAX}) {
    CHECK_EVENTS(said(greeting() + header(kCommand | kLong, size)), {"unfit"});  // known without its body
  }
}

TEST(what_is_no_ready_ends_the_handshake) {
  for (const std::string& first :
       {message("x"), frame(0, ""), frame(0, "\5READY" + property("Socket-Type", "DEALER")), ping(""), pong(""),
        command("ERROR", name("no")), command("ready", property("Socket-Type", "DEALER")), command("HELLO", ""),
        frame(kCommand | kMore, "\5READY" + property("Socket-Type", "DEALER")), frame(8, ""), frame(0x84, "")}) {
    CHECK_EVENTS(said(greeting() + first), {"unfit"});
    CHECK_EVENTS(said(greeting() + first.substr(0, 2)),
                 first.size() == 2 || (first[0] & ~kLong) != kCommand ? Events{"unfit"} : Events{});
  }
}

TEST(messages_of_every_size_up_to_the_longest_are_whole) {
  constexpr size_t kLongest = 3 * kMiB;
  for (const size_t size : {size_t{0}, size_t{1}, size_t{255}, size_t{256}, size_t{65'536}, kLongest - 1, kLongest}) {
    const std::string payload(size, static_cast<char>('a' + size % 26));
    CHECK_EVENTS(answers(message(payload) + message("after"), kLongest), {"message " + payload, "message after"});
    CHECK_EVENTS(answers(long_frame(kMore, "ull1") + long_frame(0, payload) + message("after"), kLongest),
                 {"message " + payload, "message after"});
  }
  CHECK_EVENTS(answers(message(std::string(kLongest + 1, 'x')) + message("after"), kLongest),
               {"too_long", "message after"});
}

TEST(a_message_of_another_number_of_frames_is_a_bad_frame) {
  for (const std::string& first : {"ull1"s, ""s, "ull2"s, std::string(300, 'x')}) {
    CHECK_EVENTS(answers(frame(0, first) + message("after")), {"bad_frame", "message after"});
  }
  for (const size_t count : {3, 4, 1000}) {
    for (const std::string& first : {"ull1"s, ""s, "ull2"s}) {
      std::string frames = frame(kMore, first);
      for (size_t i = 2; i < count; ++i) frames += frame(kMore, i % 2 == 0 ? "ull1" : "");
      CHECK_EVENTS(answers(frames + frame(0, kRequest) + message("after")), {"bad_frame", "message after"});
    }
  }
  // Too long or not: the first thing that is wrong is said.
  CHECK_EVENTS(
      answers(frame(kMore, "ull1") + frame(kMore, std::string(2000, 'x')) + frame(0, kRequest) + message("after")),
      {"bad_frame", "message after"});
}

TEST(a_message_of_another_version_is_told_so) {
  for (const std::string& version : {"ull2"s, "ULL1"s, ""s, "ull1\0"s, "ull"s, std::string(300, 'v')}) {
    for (const std::string& payload : {""s, "x"s, kRequest + std::string(5000, 'x')}) {
      CHECK_EVENTS(answers(frame(kMore, version) + frame(0, payload) + message("after")),
                   {"bad_version", "message after"});
      CHECK_EVENTS(answers(long_frame(kMore, version) + long_frame(0, payload)), {"bad_version"});
    }
  }
}

// Nothing of a malformed message is left for the next.
TEST(every_message_is_judged_by_itself) {
  const std::vector<std::pair<std::string, std::string>> messages = {
      {message("good"), "message good"},
      {frame(0, "ull1"), "bad_frame"},
      {frame(kMore, "ull2") + frame(0, "x"), "bad_version"},
      {frame(kMore, "") + frame(0, "x"), "bad_version"},
      {frame(kMore, "ull1") + frame(kMore, "") + frame(0, ""), "bad_frame"},
      {message(kRequest + std::string(1000, 'x')), "too_long of 42"},
      {message(std::string(1001, 'x')), "too_long"}};
  for (const auto& [first, one] : messages) {
    for (const auto& [second, two] : messages) {
      for (const auto& [third, three] : messages) {
        CHECK_EVENTS(answers(first + second + third), {one, two, three});
      }
    }
  }
}

TEST(the_id_of_a_message_that_is_too_long_is_looked_for_at_its_beginning) {
  const auto refused = [](const std::string& head, size_t size) {
    return readable(answers(message(head + std::string(size - head.size(), 'x')) + message("after")));
  };
  for (const size_t size : {1001, 2047, 2048, 2049, 4096, 100'000}) {
    CHECK_EQ(refused(kRequest, size), "[too_long of 42, message after]");
    CHECK_EQ(refused("", size), "[too_long, message after]");
  }
  const auto behind = [](size_t size) {
    return "\x82\xa1p\xda" + big_endian(size, 2) + std::string(size, 'p') + "\xa2id\x07";
  };
  CHECK_EQ(refused(behind(2048 - 10), 100'000), "[too_long of 7, message after]");  // its last byte is the 2048th
  CHECK_EQ(refused(behind(2048 - 9), 100'000), "[too_long, message after]");
}

TEST(a_frame_that_is_too_long_even_to_be_thrown_away_ends_the_connection) {
  const auto limit = static_cast<uint64_t>(ull::kLongestRefused);
  for (const std::string& before :
       {""s, frame(kMore, "ull1"), frame(kMore, "ull2"), frame(kMore, "ull1") + frame(kMore, "")}) {
    for (const int more : {0, int{kMore}}) {
      CHECK_EVENTS(answers(before + header(kLong | more, limit)), {});
      for (const uint64_t size :
           {limit + 1, uint64_t{1} << 32, uint64_t{1} << 63, (uint64_t{1} << 63) - 1, UINT64_MAX}) {
        CHECK_EVENTS(answers(before + header(kLong | more, size)), {"unfit"});
      }
    }
  }
  const int64_t longer = 20 * int64_t{kMiB};  // where a message may be longer than that
  CHECK_EVENTS(answers(frame(kMore, "ull1") + header(kLong, longer), longer), {});
  CHECK_EVENTS(answers(frame(kMore, "ull1") + header(kLong, longer + 1), longer), {"unfit"});
}

TEST(a_message_as_long_as_can_be_thrown_away_is_refused) {
  CHECK_EVENTS(answers(message(kRequest + std::string(ull::kLongestRefused - kRequest.size(), 'x')) + message("after")),
               {"too_long of 42", "message after"});
}

TEST(a_message_of_frames_without_end_ends_the_connection) {
  for (const size_t size : {size_t{0}, size_t{1}, size_t{255}, size_t{1000}, size_t{60'000}, size_t{5 * kMiB}}) {
    std::string piece = frame(kMore, std::string(size, 'x'));
    while (piece.size() < 60'000) piece += piece;
    Exchange exchange;
    (void)exchange.give(kHandshake + frame(kMore, "ull1"));
    const size_t taken = taken_of(exchange, piece, 40 * kMiB / piece.size());
    CHECK(exchange.unfit);
    CHECK(taken >= ull::kLongestRefused);
    CHECK(taken <= ull::kLongestRefused + 2 * piece.size() + 4096);
  }
  // Those that end are counted one by one.
  Exchange exchange;
  (void)exchange.give(kHandshake);
  std::string piece;
  for (int i = 0; i < 200; ++i) piece += frame(kMore, "") + frame(kMore, std::string(300, 'x')) + frame(0, "");
  CHECK_EQ(taken_of(exchange, piece, 40 * kMiB / piece.size()), 40 * kMiB / piece.size() * piece.size());
  CHECK(!exchange.unfit);
}

TEST(reserved_flags_end_the_connection) {
  for (int flags = 0; flags < 256; ++flags) {
    const bool valid = flags < 8 && (flags & (kMore | kCommand)) != (kMore | kCommand);
    const std::string any = header(flags, 4) + "\3any";
    CHECK_EQ(answers(any) == Events{"unfit"}, !valid);
    CHECK_EQ(answers(any.substr(0, 2)) == Events{"unfit"}, !valid);  // whatever follows
    CHECK_EQ(answers(frame(kMore, "ull1") + any) == Events{"unfit"}, !valid);
  }
}

TEST(pings_are_answered_with_their_context) {
  for (const size_t size : {0, 1, 15, 16, 17, 300, 2041}) {
    const std::string context = std::string(
                                    "\0\xff"
                                    "0123456789abcdefgh",
                                    20)
                                    .substr(0, size) +
                                std::string(size > 20 ? size - 20 : 0, 'c');
    const std::string answer = "answer " + pong(context.substr(0, 16));
    CHECK_EVENTS(answers(ping(context) + message("after")), {answer, "message after"});
    CHECK_EVENTS(answers(ping(context, "\xff\xff")), {answer});
    CHECK_EVENTS(answers(frame(kMore, "ull1") + ping(context) + ping("2") + frame(0, "x")),
                 {answer, "answer " + pong("2"), "message x"});
    CHECK_EVENTS(answers(frame(kMore, "ull2") + ping(context) + frame(0, "x")), {answer, "bad_version"});
    CHECK_EVENTS(answers(frame(kMore, "ull1") + frame(kMore, "") + ping(context) + frame(0, "x")),
                 {answer, "bad_frame"});
    CHECK_EVENTS(answers(long_frame(kCommand, "\4PING\0\0"s + context)), {answer});
  }
  CHECK_EVENTS(answers(ping("", "")), {"unfit"});
  CHECK_EVENTS(answers(ping("", "\1")), {"unfit"});
}

TEST(other_commands_are_ignored) {
  for (const std::string& ignored : {pong(""), pong("context"), command("SUBSCRIBE", "topic"), command("CANCEL", ""),
                                     command("ping", ""), command("PIN", ""), command("PINGS", ""), command("", "x"),
                                     ready("PUB"), command("X", std::string(2046, 'x'))}) {
    CHECK_EVENTS(answers(ignored + message("x") + ignored + frame(kMore, "ull1") + ignored + frame(0, "y") +
                         frame(kMore, "ull1") + frame(kMore, "ull1") + ignored + frame(0, "z") + ignored),
                 {"message x", "message y", "bad_frame"});
  }
}

TEST(commands_that_are_none_end_the_connection) {
  CHECK_EVENTS(answers(command("ERROR", name("why")) + message("x")), {"unfit"});
  CHECK_EVENTS(answers(frame(kCommand, "")), {"unfit"});
  CHECK_EVENTS(answers(frame(kCommand, "\5PING")), {"unfit"});
  CHECK_EVENTS(answers(frame(kCommand, "\xffPING")), {"unfit"});
  CHECK_EVENTS(answers(command("X", std::string(2047, 'x'))), {"unfit"});
  for (const uint64_t size : {uint64_t{2049}, uint64_t{1} << 63, UINT64_MAX}) {
    CHECK_EVENTS(answers(header(kCommand | kLong, size)), {"unfit"});
    CHECK_EVENTS(answers(frame(kMore, "ull1") + header(kCommand | kLong, size)), {"unfit"});
  }
}

TEST(what_is_sent_is_framed_by_the_rfc) {
  const ull::Zmtp zmtp(1000);
  CHECK_EQ(kTheirs.size(), 107U);
  CHECK(text_of(zmtp.greeting()) == kTheirs);
  ull::ProtocolState state;
  CHECK(text_of(zmtp.ping(state)) == ping(""));
  for (const uint64_t size :
       {uint64_t{0}, uint64_t{1}, uint64_t{255}, uint64_t{256}, uint64_t{65'536}, uint64_t{0x0102030405060708}}) {
    ull::Protocol::Header bytes;
    const std::string expected = frame(kMore, "ull1") + header(size > 255 ? kLong : 0, size);
    REQUIRE(zmtp.pack_header(size, bytes) == expected.size());
    CHECK(text_of(std::span(bytes).first(expected.size())) == expected);
  }
}

// What is understood does not depend on how bytes arrive; damaged or not, no more is taken than there is.
TEST(random_streams_are_understood_however_they_are_cut) {
  RandomStreams random(11);
  for (int round = 0; round < 3000; ++round) {
    Events expected;
    std::string stream = random.stream(expected);
    if (round % 3 != 0) {
      random.damage(stream);
      expected = said(stream, 500);
    }
    Exchange exchange(500);
    for (size_t at = 0; at < stream.size();) {
      const size_t size = 1 + random.below(random.below(4) == 0 ? 3000 : 40);
      (void)exchange.give(std::string_view(stream).substr(at, size));
      at += size;
    }
    CHECK_EVENTS(exchange.events, expected);
  }
}

}  // namespace
