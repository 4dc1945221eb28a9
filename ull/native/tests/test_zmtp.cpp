// ZeroMQ's wire protocol (ZMTP 3.1, https://rfc.zeromq.org/spec/37/) as the server speaks it: step by step without a
// socket, and then against raw sockets. Bytes are written here by the RFC, not with the code under test.
#include "io/zmtp.h"

#include <arpa/inet.h>
#include <malloc.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "check.h"
#include "fake_zmq.h"
#include "io/input.h"
#include "io/server.h"

namespace {

std::atomic<int64_t> allocated{0};  // bytes that are not given back

void* count_new(size_t size) {
  void* const memory = std::malloc(size);
  if (memory != nullptr) allocated += static_cast<int64_t>(malloc_usable_size(memory));
  return memory;
}

void count_delete(void* memory) {
  if (memory != nullptr) allocated -= static_cast<int64_t>(malloc_usable_size(memory));
  std::free(memory);
}

}  // namespace

void* operator new(size_t size) {
  if (void* const memory = count_new(size)) return memory;
  throw std::bad_alloc();
}
void* operator new(size_t size, const std::nothrow_t&) noexcept { return count_new(size); }
void* operator new[](size_t size) { return operator new(size); }
void* operator new[](size_t size, const std::nothrow_t&) noexcept { return count_new(size); }
void operator delete(void* memory) noexcept { count_delete(memory); }
void operator delete(void* memory, size_t) noexcept { count_delete(memory); }
void operator delete[](void* memory) noexcept { count_delete(memory); }
void operator delete[](void* memory, size_t) noexcept { count_delete(memory); }

namespace {

using namespace std::string_literals;
using ull::Sent;
using Kind = ull::Step::Kind;
using Events = std::vector<std::string>;
using Options = ull::Server::Options;

constexpr int64_t kMsNs = 1'000'000;
constexpr size_t kMiB = size_t{1} << 20;
constexpr uint8_t kMore = 1, kLong = 2, kCommand = 4;

// ---- bytes on the wire --------------------------------------------------------------------------------------------

std::string big_endian(uint64_t value, int bytes) {
  std::string text;
  while (bytes-- > 0) text += static_cast<char>(value >> (8 * bytes) & 0xff);
  return text;
}

std::string header(int flags, uint64_t size) {
  return static_cast<char>(flags) + big_endian(size, (flags & kLong) != 0 ? 8 : 1);
}

// In the short format where it fits.
std::string frame(int flags, const std::string& body) {
  return header(body.size() > 255 ? flags | kLong : flags, body.size()) + body;
}
std::string long_frame(int flags, const std::string& body) { return header(flags | kLong, body.size()) + body; }

// The signature's padding is what older peers take for the length of an identity and a byte: that of none.
std::string greeting(int major = 3, int minor = 1, std::string mechanism = "NULL") {
  mechanism.resize(20);
  return "\xff\0\0\0\0\0\0\0\1\x7f"s + static_cast<char>(major) + static_cast<char>(minor) + mechanism + '\0' +
         std::string(31, '\0');
}

std::string name(const std::string& text) { return static_cast<char>(text.size()) + text; }
std::string property(const std::string& key, const std::string& value) {
  return name(key) + big_endian(value.size(), 4) + value;
}
std::string command(const std::string& verb, const std::string& data) { return frame(kCommand, name(verb) + data); }
std::string ready(const std::string& type, const std::string& more = "") {
  return command("READY", property("Socket-Type", type) + more);
}
std::string ping(const std::string& context, const std::string& time_to_live = "\0\0"s) {
  return command("PING", time_to_live + context);
}
std::string pong(const std::string& context) { return command("PONG", context); }
std::string message(const std::string& payload) { return frame(kMore, "ull1") + frame(0, payload); }

const std::string kHandshake = greeting() + ready("DEALER");
const std::string kTheirs = greeting() + command("READY", property("Socket-Type", "ROUTER") + property("Identity", ""));
const std::string kRequest = "\x81\xa2id\x2a";  // {"id": 42}

std::string text_of(std::span<const uint8_t> bytes) { return {bytes.begin(), bytes.end()}; }
std::span<const uint8_t> bytes(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

// ---- without a socket ---------------------------------------------------------------------------------------------

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
  CHECK(text_of(zmtp.ping()) == ping(""));
  for (const uint64_t size :
       {uint64_t{0}, uint64_t{1}, uint64_t{255}, uint64_t{256}, uint64_t{65'536}, uint64_t{0x0102030405060708}}) {
    ull::Protocol::Header bytes;
    const std::string expected = frame(kMore, "ull1") + header(size > 255 ? kLong : 0, size);
    REQUIRE(zmtp.pack_header(size, bytes) == expected.size());
    CHECK(text_of(std::span(bytes).first(expected.size())) == expected);
  }
}

// ---- over sockets -------------------------------------------------------------------------------------------------

const ull::zmq::Api kApi = ull::test::FakeZmq::api();

class Folder {
 public:
  Folder() { CHECK(mkdtemp(name_) != nullptr); }
  ~Folder() {
    unlink(path("zmq").c_str());
    unlink(path("local").c_str());
    rmdir(name_);
  }
  [[nodiscard]] std::string path(const char* file = "") const { return std::string(name_) + "/" + file; }

 private:
  char name_[32] = "/tmp/ull-zmtp-XXXXXX";
};

// A client's end, to `ipc://path` or `tcp://127.0.0.1:port`. It blocks when it sends, not when it receives.
class Client {
 public:
  explicit Client(const std::string& endpoint, const std::string& first = kHandshake) {
    const std::string where = endpoint.substr(6);
    if (endpoint.starts_with("ipc://")) {
      sockaddr_un address{};
      address.sun_family = AF_UNIX;
      where.copy(address.sun_path, where.size());
      fd_ = socket(AF_UNIX, SOCK_STREAM, 0);
      connected_ = connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
    } else {
      sockaddr_in address{};
      address.sin_family = AF_INET;
      address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      address.sin_port = htons(static_cast<uint16_t>(std::stoi(where.substr(where.rfind(':') + 1))));
      fd_ = socket(AF_INET, SOCK_STREAM, 0);
      connected_ = connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
    }
    CHECK(send(first));
  }
  ~Client() { hang_up(); }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  void hang_up() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
  }
  // False once the server has hung up.
  bool send(const std::string& text) {
    for (size_t sent = 0; sent < text.size();) {
      const ssize_t more = ::send(fd_, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
      if (more <= 0) return false;
      sent += static_cast<size_t>(more);
    }
    return true;
  }
  // Looks what has come.
  const std::string& look() {
    char buffer[65'536];
    for (ssize_t got = 1; got > 0 && !ended_;) {
      got = recv(fd_, buffer, sizeof(buffer), MSG_DONTWAIT);
      if (got > 0) received.append(buffer, static_cast<size_t>(got));
      if (got == 0 || (got < 0 && errno == ECONNRESET)) ended_ = true;
    }
    return received;
  }
  // ... but not at more than that.
  void look_at(size_t size) {
    std::string text(size, '\0');
    const ssize_t got = recv(fd_, text.data(), size, MSG_DONTWAIT);
    received.append(text, 0, static_cast<size_t>(std::max<ssize_t>(got, 0)));
  }
  [[nodiscard]] bool ended() {
    (void)look();
    return ended_;
  }
  // Whether something has come that ends like this.
  [[nodiscard]] bool has(const std::string& text) { return look().ends_with(text); }
  // What has come since the last time.
  std::string take() {
    (void)look();
    return std::exchange(received, {});
  }
  [[nodiscard]] bool connected() const { return connected_; }

  std::string received;

 private:
  int fd_ = -1;
  bool connected_ = false;
  bool ended_ = false;
};

struct Received {
  std::string client;
  std::string what;  // the payload, or why there is none
  std::optional<uint64_t> id = {};
};

// The daemon's end, driven by the test as the io thread would.
class Server {
 public:
  explicit Server(Options options = {}) : socket(kApi, here(std::move(options), folder)) {
    kApi.msg_init(&message_.payload);
    socket.open();
  }
  ~Server() { kApi.msg_close(&message_.payload); }

  // One turn of the io thread; waits up to a millisecond for an event if there is nothing to do.
  std::optional<Received> turn() {
    ++turns;
    const bool received = socket.receive(message_);
    for (auto client = socket.gone(); !client.empty(); client = socket.gone()) {
      gone.push_back(text_of(client));
      socket.pop_gone();
    }
    if (!received) {
      if (!socket.ready()) (void)event(1);
      return std::nullopt;
    }
    const std::string payload = text_of(ull::zmq::bytes(kApi, message_.payload));
    CHECK(message_.malformed == nullptr || payload.empty());
    return Received{text_of(message_.client()), message_.malformed == nullptr ? payload : message_.malformed,
                    message_.has_id ? std::optional(message_.id) : std::nullopt};
  }
  Received receive() {
    for (;;) {
      if (std::optional<Received> received = turn()) return *received;
    }
  }
  void until(const std::function<bool()>& condition) {
    while (!condition()) (void)turn();
  }
  // What the io thread does while it takes no messages.
  void tend_for(int64_t ms) {
    for (const int64_t end = ull::monotonic_ns() + ms * kMsNs; ull::monotonic_ns() < end;) {
      socket.tend();
      (void)event(1);
    }
  }
  bool event(int timeout_ms) {
    pollfd item{socket.fd(), POLLIN, 0};
    return poll(&item, 1, timeout_ms) > 0;
  }
  Sent send(const std::string& client, const std::string& payload) {
    return socket.send(bytes(client), bytes(payload));
  }
  [[nodiscard]] std::string at(size_t index = 0) const { return socket.endpoints()[index]; }
  [[nodiscard]] std::string local() const { return "ipc://" + folder.path("local"); }
  [[nodiscard]] uint64_t dropped() const { return socket.counts().dropped; }

  Folder folder;
  ull::Server socket;
  std::vector<std::string> gone;
  size_t turns = 0;

 private:
  static Options here(Options options, const Folder& folder) {
    options.zeromq.insert(options.zeromq.begin(), "ipc://" + folder.path("zmq"));
    options.local = {folder.path("local")};
    return options;
  }

  ull::Incoming message_;
};

const std::string kLocalHello = "ull1\0\0\0\0"s;

TEST(a_connection_is_greeted_at_once) {
  Server server({.zeromq = {"tcp://127.0.0.1:0"}});
  for (size_t i = 0; i < 2; ++i) {
    Client client(server.at(i), "");
    server.until([&] { return client.look().size() >= kTheirs.size(); });
    CHECK(client.take() == kTheirs);
    CHECK(client.send(kHandshake + message("first")));
    CHECK_EQ(server.receive().what, "first");
    CHECK_EQ(client.take(), "");
  }
}

TEST(answers_are_framed_for_their_client) {
  Server server({.zeromq = {"tcp://127.0.0.1:0"}});
  for (size_t i = 0; i < 2; ++i) {
    Client client(server.at(i), kHandshake + message("request"));
    const Received request = server.receive();
    for (const size_t size : {0, 255, 256, 70'000}) {
      const std::string payload(size, 'p');
      CHECK(server.send(request.client, payload) == Sent::kOk);
      server.until([&] { return client.has(message(payload)); });
    }
    CHECK(client.take() == kTheirs + message("") + message(std::string(255, 'p')) + message(std::string(256, 'p')) +
                               message(std::string(70'000, 'p')));
  }
}

TEST(each_connection_is_a_client_whatever_it_calls_itself) {
  Server server;
  const std::string shake = greeting() + ready("DEALER", property("Identity", "same"));
  Client one(server.at(), shake + message("one"));
  const std::string first = server.receive().client;
  Client two(server.at(), shake + message("two"));
  const std::string second = server.receive().client;
  CHECK(first != second);
  for (const std::string& identity : {first, second}) {
    REQUIRE(identity.size() == 10);
    CHECK_EQ(identity.substr(0, 2), "\0Z"s);
  }
  CHECK(server.send(first, "to one") == Sent::kOk);
  CHECK(server.send(second, "to two") == Sent::kOk);
  server.until([&] { return one.has(message("to one")) && two.has(message("to two")); });
  std::string other = first;
  other[1] = 'L';
  CHECK(server.send(other, "x") == Sent::kGone);
  one.hang_up();
  server.until([&] { return !server.gone.empty(); });
  CHECK_EQ(server.gone.front(), first);
  CHECK(server.send(first, "x") == Sent::kGone);
  CHECK(server.send(second, "still here") == Sent::kOk);
}

TEST(malformed_messages_are_told_with_their_client) {
  Server server({.max_message = 1000});
  Client client(server.at(), kHandshake + message("good"));
  const std::string identity = server.receive().client;
  std::thread writer([&] {
    client.send(frame(0, "alone") + frame(kMore, "ull2") + frame(0, "x") +
                message(kRequest + std::string(200'000, 'x')) + message(std::string(1001, 'x')) + message("after"));
  });
  for (const char* what : {"bad_frame", "bad_version", "too_long", "too_long", "after"}) {
    const Received received = server.receive();
    CHECK_EQ(received.client, identity);
    CHECK_EQ(received.what, what);
  }
  writer.join();
  client.send(message(kRequest + std::string(2000, 'x')));
  CHECK(server.receive().id == 42U);
  CHECK_EQ(server.dropped(), 0U);
}

TEST(who_does_not_speak_the_protocol_is_dropped_at_once) {
  Server server({.zeromq = {"tcp://127.0.0.1:0"}, .handshake_ms = 1'000'000});
  uint64_t dropped = 0;
  for (const std::string& text : {"GET / HTTP/1.1\r\n\r\n"s, std::string(5000, '\0'), kLocalHello, greeting(2, 0),
                                  greeting(3, 0, "CURVE").substr(0, 13), greeting() + ready("PUB"),
                                  greeting() + message("x"), kHandshake + "\x08"s + "x"}) {
    for (size_t i = 0; i < 2; ++i) {
      Client client(server.at(i), text);
      ++dropped;
      server.until([&] { return server.dropped() == dropped; });
      server.until([&] { return client.ended(); });
      CHECK(kTheirs.starts_with(client.take().substr(0, 107)));
    }
  }
  CHECK_EQ(server.gone.size(), 2U);  // the last had shaken hands
  CHECK_EQ(server.socket.counts().clients, 0U);
}

TEST(only_clients_that_have_shaken_hands_are_told_as_gone) {
  Server server;
  for (const std::string& text : {""s, greeting(), greeting() + ready("DEALER").substr(0, 20)}) {
    Client client(server.at(), text);
    server.until([&] { return server.socket.counts().clients == 1; });
    client.hang_up();
    server.until([&] { return server.socket.counts().clients == 0; });
  }
  CHECK(server.gone.empty());
  Client client(server.at());
  server.until([&] { return server.socket.counts().clients == 1; });
  for (int i = 0; i < 3; ++i) (void)server.turn();
  client.hang_up();
  server.until([&] { return server.socket.counts().clients == 0; });
  REQUIRE(server.gone.size() == 1);
  CHECK_EQ(server.gone.front().substr(0, 2), "\0Z"s);
  CHECK_EQ(server.dropped(), 0U);
}

TEST(a_place_begins_anew_with_its_next_client) {
  Server server({.max_message = 1000, .max_connections = 1});
  for (const std::string& end :
       {message("").substr(0, 7), frame(kMore, "ull1"), frame(kMore, "ull2"), frame(kMore, "ull1") + frame(kMore, ""),
        message(kRequest + std::string(3000, 'x')).substr(0, 2500),
        frame(kMore, std::string(900, 'x')).substr(0, 500)}) {
    Client client(server.at(), kHandshake + message("first") + end);
    CHECK_EQ(server.receive().what, "first");
    for (int i = 0; i < 3; ++i) CHECK(!server.turn());
    client.hang_up();
    server.until([&] { return server.socket.counts().clients == 0; });
  }
}

constexpr Options kImpatient{.handshake_ms = 50, .ping_ms = 30, .mute_ms = 90};

TEST(a_silent_peer_is_pinged_and_dropped) {
  Server server(kImpatient);
  const int64_t begin_ns = ull::monotonic_ns();
  Client client(server.at());
  server.until([&] { return client.look().size() > kTheirs.size(); });
  CHECK(ull::monotonic_ns() - begin_ns >= 30 * kMsNs);
  server.until([&] { return !server.gone.empty(); });
  CHECK(ull::monotonic_ns() - begin_ns >= 90 * kMsNs);
  CHECK(client.ended());
  CHECK(client.take() == kTheirs + ping(""));  // once
  CHECK_EQ(server.dropped(), 1U);
}

TEST(whatever_a_peer_says_it_lives) {
  Server server(kImpatient);
  // A whole message is one thing, a part of one is another.
  for (const std::string& sign : {pong(""), message("m"), "\1"s, frame(kMore, "ull2")}) {
    Client client(server.at());
    for (int pings = 0; pings < 3; ++pings) {
      server.until([&] { return client.has(ping("")); });
      CHECK(client.take().ends_with(ping("")));
      if (sign == "\1" && pings == 1) {
        CHECK(client.send("\4ull1"));
      } else if (sign == "\1" && pings == 2) {
        CHECK(client.send(frame(0, "")));
      } else {
        CHECK(client.send(sign));
      }
    }
    server.until([&] { return client.has(ping("")); });
    CHECK_EQ(server.dropped(), 0U);
    client.hang_up();
    server.until([&] { return server.socket.counts().clients == 0; });
  }
}

// The daemon was held up, not the peer.
TEST(a_peer_that_has_answered_is_heard_before_it_is_judged) {
  Server server(kImpatient);
  Client client(server.at());
  for (int i = 0; i < 3; ++i) {
    server.until([&] { return client.has(ping("")); });
    (void)client.take();
    CHECK(server.event(-1));  // it is time to drop it
    CHECK(client.send(pong("")));
    for (int turn = 0; turn < 2; ++turn) CHECK(!server.turn());
    CHECK_EQ(server.dropped(), 0U);
  }
}

TEST(a_peer_that_is_told_something_is_not_judged) {
  Server server(kImpatient);
  Client client(server.at(), kHandshake + message("request"));
  const std::string identity = server.receive().client;
  const int64_t begin_ns = ull::monotonic_ns();
  std::string told = kTheirs;
  while (ull::monotonic_ns() - begin_ns < 400 * kMsNs) {
    CHECK(server.send(identity, "token") == Sent::kOk);
    told += message("token");
    CHECK(!server.turn());
    (void)client.look();
  }
  CHECK(client.take() == told);  // nor is it pinged
  CHECK_EQ(server.dropped(), 0U);
  server.until([&] { return server.dropped() == 1; });
  CHECK(client.take() == ping(""));
}

TEST(a_peer_that_has_not_taken_all_that_it_was_told_is_not_judged) {
  Server server(kImpatient);
  Client client(server.at(), kHandshake + message("request"));
  const std::string identity = server.receive().client;
  const std::string large(4 * kMiB, 'l');
  CHECK(server.send(identity, large) == Sent::kOk);
  for (const int64_t begin_ns = ull::monotonic_ns(); ull::monotonic_ns() - begin_ns < 400 * kMsNs;) {
    CHECK(!server.turn());
  }
  CHECK_EQ(server.dropped(), 0U);
  server.until([&] { return client.look().size() >= kTheirs.size() + message(large).size(); });
  CHECK(client.received.starts_with(kTheirs + message(large)));
}

TEST(peers_that_cannot_answer_are_let_be) {
  Server server(kImpatient);
  Client old(server.at(), greeting(3, 0) + ready("DEALER") + message("asks"));
  CHECK_EQ(server.receive().what, "asks");
  Client idle(server.at(), greeting(3, 0) + ready("DEALER"));  // loses nothing: it has asked for nothing
  Client local(server.local(), kLocalHello);
  server.until([&] { return idle.ended(); });
  Client silent(server.at());
  server.until([&] { return silent.ended(); });
  CHECK_EQ(server.dropped(), 2U);
  CHECK(old.take() == kTheirs);
  CHECK(local.take() == kLocalHello);
  CHECK(old.send(message("old")));
  CHECK_EQ(server.receive().what, "old");
  CHECK(local.send("\5\0\0\0local"s));
  CHECK_EQ(server.receive().what, "local");
}

// The io thread takes none while the control plane has no room for more.
TEST(peers_whose_messages_are_not_taken_are_not_judged) {
  Server server(kImpatient);
  Client open(server.at(), kHandshake + message("opened before"));
  CHECK_EQ(server.receive().what, "opened before");
  CHECK(open.send(message("sent before")));
  Client fresh(server.at(), kHandshake + message("shook hands meanwhile"));
  Client local(server.local(), kLocalHello + "\5\0\0\0local"s);
  Client mute(server.at(), "");
  server.tend_for(400);
  CHECK_EQ(server.dropped(), 1U);
  CHECK(mute.ended());
  std::vector<std::string> all;
  for (int i = 0; i < 3; ++i) all.push_back(server.receive().what);
  std::sort(all.begin(), all.end());
  CHECK(all == std::vector<std::string>({"local", "sent before", "shook hands meanwhile"}));
  CHECK(open.take() == kTheirs);
}

TEST(a_handshake_that_dribbles_is_not_waited_for) {
  Server server({.handshake_ms = 50});
  const int64_t begin_ns = ull::monotonic_ns();
  Client client(server.at(), greeting() + header(kCommand | kLong, 2000));
  int64_t sent_ns = begin_ns;
  size_t sent = 0;
  // What has come and was not read is not judged: there are turns without a byte, and not every so many.
  for (size_t turns = 0; server.dropped() == 0; ++turns) {
    (void)server.turn();
    if (turns < 2 + sent % 3 || ull::monotonic_ns() - sent_ns < 3 * kMsNs) continue;
    (void)client.send("r");
    sent_ns = ull::monotonic_ns();
    turns = 0;
    ++sent;
  }
  CHECK(ull::monotonic_ns() - begin_ns >= 50 * kMsNs);
  CHECK(sent < 1000);  // it was not unfit
  CHECK(server.gone.empty());
  CHECK(client.take() == kTheirs);
}

// Every newcomer sets the alarm anew.
TEST(a_crowd_at_the_door_does_not_keep_the_silent_alive) {
  Server server({.max_connections = 8, .handshake_ms = 50, .ping_ms = 30, .mute_ms = 90});
  Client mute(server.at());
  Client half(server.at(), greeting());
  std::vector<std::unique_ptr<Client>> crowd;
  server.until([&] {
    if (crowd.size() >= 4) crowd.clear();
    crowd.push_back(std::make_unique<Client>(server.at(), ""));
    return mute.ended() && half.ended();
  });
  CHECK(mute.take() == kTheirs + ping(""));
}

TEST(a_peer_that_pings_and_never_reads_costs_nothing) {
  for (const size_t door : {0, 1}) {
    Server server({.zeromq = {"tcp://127.0.0.1:0"}});
    Client good(server.at(), kHandshake + message("good"));
    const std::string identity = server.receive().client;
    Client flood(server.at(door));
    std::string pings;
    while (pings.size() < 24'000) pings += ping("0123456789abcdef");
    constexpr int kPieces = 500;  // whose answers are more than the kernel has room for
    std::atomic<int> sent{0};
    std::thread writer([&] {
      while (sent < kPieces && flood.send(pings)) ++sent;
      flood.send(message("done"));
    });
    server.until([&] { return sent >= 10; });
    const int64_t before = allocated;
    while (sent < kPieces - 50) {  // the end is what the kernel holds
      const size_t turns = server.turns;
      CHECK(good.send(message("good")));
      CHECK_EQ(server.receive().what, "good");
      CHECK(server.turns - turns <= 3);
    }
    CHECK(allocated - before < 300'000);
    CHECK_EQ(server.receive().what, "done");
    writer.join();
    size_t seen = 0;
    server.until([&] {  // a ping that finds no room is not answered
      if (flood.look().size() == seen) flood.send(ping("again"));
      seen = flood.received.size();
      return flood.has(pong("again"));
    });
    std::string_view answers = flood.received;
    answers.remove_prefix(kTheirs.size());
    CHECK(answers.size() < pings.size() * kPieces);  // others were left out, and none in part
    for (const std::string& answer : {pong("0123456789abcdef"), pong("again")}) {
      while (answers.starts_with(answer)) answers.remove_prefix(answer.size());
    }
    CHECK_EQ(answers.size(), 0U);
    CHECK_EQ(server.dropped(), 0U);
  }
}

TEST(a_turn_answers_a_bounded_number_of_pings) {
  Server server;
  Client client(server.at());
  server.until([&] { return client.look() == kTheirs; });
  for (int i = 0; i < 3; ++i) (void)server.turn();
  (void)client.take();
  constexpr size_t kPings = 1000;
  std::string pings, pongs;
  for (size_t i = 0; i < kPings; ++i) {
    pings += ping(std::to_string(i));
    pongs += pong(std::to_string(i));
  }
  CHECK(client.send(pings));
  for (size_t before = 0; client.received.size() < pongs.size(); before = client.received.size()) {
    (void)server.turn();
    CHECK((client.look().size() - before) / pong("").size() <= 100);
  }
  CHECK(client.take() == pongs);
}

TEST(an_answer_to_a_ping_does_not_come_amid_a_frame) {
  Server server;
  Client client(server.at(), kHandshake + message("request"));
  const std::string identity = server.receive().client;
  const std::string large(4 * kMiB, 'l');
  CHECK(server.send(identity, large) == Sent::kOk);
  client.look_at(60'000);  // there is room for a little, too little to be an event
  CHECK(client.send(ping("now") + message("after")));
  CHECK_EQ(server.receive().what, "after");
  server.until([&] { return client.look().size() >= kTheirs.size() + message(large).size(); });
  CHECK(client.send(ping("then")));
  server.until([&] { return client.has(pong("then")); });
  CHECK(client.take() == kTheirs + message(large) + pong("then"));
}

TEST(an_endless_message_is_dropped_and_others_are_served) {
  for (const size_t size : {size_t{100}, size_t{60'000}}) {
    Server server({.max_message = 100'000});
    Client good(server.at(), kHandshake + message("good"));
    const std::string identity = server.receive().client;
    Client endless(server.at(), kHandshake + frame(kMore, "ull1"));
    std::string piece;
    while (piece.size() < 60'000) piece += frame(kMore, std::string(size, 'e'));
    std::atomic<bool> ended{false};
    std::thread writer([&] {
      while (endless.send(piece)) {
      }
      ended = true;
    });
    const int64_t before = allocated;
    while (server.dropped() == 0) {
      const size_t turns = server.turns;
      CHECK(good.send(message("good")));
      CHECK_EQ(server.receive().what, "good");
      CHECK(server.turns - turns <= 3);
    }
    CHECK(allocated - before < 300'000);
    writer.join();
    CHECK_EQ(server.gone.size(), 1U);
    CHECK(server.gone.front() != identity);
    CHECK_EQ(server.socket.counts().clients, 1U);
  }
}

TEST(two_million_empty_frames_are_thrown_away_in_turns) {
  Server server;
  Client modest(server.at(), kHandshake + message("modest"));
  (void)server.receive();
  Client flood(server.at());
  constexpr size_t kPieces = 200, kFrames = 10'000;  // in one
  std::string piece;
  for (size_t i = 0; i < kFrames; ++i) piece += frame(kMore, "");
  std::atomic<size_t> sent{0};
  std::thread writer([&] {
    while (sent < kPieces && flood.send(piece)) ++sent;
    flood.send(frame(0, "") + message("after"));
  });
  server.until([&] { return sent >= 2; });
  size_t turns = server.turns;
  const size_t first = turns;
  CHECK(modest.send(message("modest")));
  CHECK_EQ(server.receive().what, "modest");
  CHECK(server.turns - turns <= 3);
  CHECK(sent < kPieces / 2);
  CHECK_EQ(server.receive().what, "bad_frame");
  CHECK_EQ(server.receive().what, "after");
  turns = server.turns - first;
  CHECK(turns * 70'000 > kPieces * kFrames * 2 - 500'000);  // what the kernel held, and what was sent before, set aside
  writer.join();
}

TEST(clients_by_tcp_leave_places_for_others) {
  Server server({.zeromq = {"tcp://127.0.0.1:0"}, .max_connections = 8});
  const auto known = [&] { return server.socket.counts().accepted + server.socket.counts().refused; };
  std::vector<std::unique_ptr<Client>> clients;
  for (uint64_t i = 0; i < 8; ++i) {
    clients.push_back(std::make_unique<Client>(server.at(1), ""));
    server.until([&] { return known() == i + 1; });
  }
  CHECK_EQ(server.socket.counts().accepted, 6U);
  CHECK_EQ(server.socket.counts().refused, 2U);
  server.until([&] { return clients[6]->ended() && clients[7]->ended(); });
  CHECK_EQ(clients[6]->take(), "");
  Client local(server.local(), kLocalHello + "\5\0\0\0local"s);
  CHECK_EQ(server.receive().what, "local");
  Client ipc(server.at(), kHandshake + message("ipc"));
  CHECK_EQ(server.receive().what, "ipc");
  CHECK_EQ(server.socket.counts().local_clients, 1U);
  Client late(server.local(), "");
  server.until([&] { return server.socket.counts().refused == 3; });
  clients.front()->hang_up();
  server.until([&] { return server.socket.counts().clients == 7; });
  Client again(server.at(1), kHandshake + message("again"));
  CHECK_EQ(server.receive().what, "again");
  again.hang_up();
  ipc.hang_up();
  server.until([&] { return server.socket.counts().clients == 6; });
  for (uint64_t i = 0; i < 2; ++i) clients.push_back(std::make_unique<Client>(server.at(1), ""));
  server.until([&] { return server.socket.counts().refused == 4; });
  CHECK_EQ(server.socket.counts().clients, 7U);
}

std::string news(Server& server) {
  ull::Transport::EndpointNews news;
  if (!server.socket.news(news)) return "nothing";
  CHECK_EQ(news.endpoint, server.at());
  const std::string what(news.what);
  CHECK(server.socket.news(news) && news.what == what);  // until it is popped
  server.socket.pop_news();
  return what;
}

TEST(what_becomes_of_an_endpoints_file_is_told_once) {
  Server server;
  const std::string file = server.folder.path("zmq");
  Client before(server.at(), kHandshake + message("before"));
  CHECK_EQ(server.receive().what, "before");
  const auto look = [&] {
    server.socket.look_at_files();
    const std::string what = news(server);
    CHECK_EQ(news(server), "nothing");
    server.socket.look_at_files();
    CHECK_EQ(news(server), "nothing");
    return what;
  };
  CHECK_EQ(look(), "nothing");
  CHECK_EQ(unlink(file.c_str()), 0);
  CHECK_EQ(look(), "bound_again");
  CHECK_EQ(server.socket.counts().bound_again, 1U);
  Client after(server.at(), kHandshake + message("after"));
  CHECK_EQ(server.receive().what, "after");
  CHECK(before.send(message("goes on")));
  CHECK_EQ(server.receive().what, "goes on");

  const std::string moved = server.folder.path("local") + ".moved";
  CHECK_EQ(rename(file.c_str(), moved.c_str()), 0);
  std::fclose(std::fopen(file.c_str(), "w"));
  CHECK_EQ(look(), "foreign");
  CHECK_EQ(server.socket.counts().unreachable, 1U);
  CHECK_EQ(rename(moved.c_str(), file.c_str()), 0);
  CHECK_EQ(look(), "ours");
  CHECK_EQ(server.socket.counts().unreachable, 0U);
  Client third(server.at(), kHandshake + message("third"));
  CHECK_EQ(server.receive().what, "third");
}

TEST(a_folder_that_is_gone_is_told_until_it_is_back) {
  Server server;
  const std::string folder = server.folder.path();
  const std::string moved = folder.substr(0, folder.size() - 1) + "-moved";
  CHECK_EQ(rename(folder.c_str(), moved.c_str()), 0);
  server.socket.look_at_files();
  CHECK_EQ(news(server), "gone");
  CHECK_EQ(news(server), "nothing");
  CHECK_EQ(server.socket.counts().unreachable, 2U);
  CHECK_EQ(mkdir(folder.c_str(), 0700), 0);
  server.socket.look_at_files();
  CHECK_EQ(news(server), "bound_again");
  CHECK_EQ(news(server), "nothing");
  CHECK_EQ(server.socket.counts().unreachable, 0U);
  for (const char* file : {"/zmq", "/local"}) unlink((moved + file).c_str());
  rmdir(moved.c_str());
}

TEST(local_endpoints_are_no_news) {
  Server server;
  CHECK_EQ(unlink(server.folder.path("local").c_str()), 0);
  server.socket.look_at_files();
  CHECK_EQ(news(server), "nothing");
  CHECK_EQ(server.socket.counts().bound_again, 1U);
  Client local(server.local(), kLocalHello + "\5\0\0\0local"s);
  CHECK_EQ(server.receive().what, "local");
  CHECK_EQ(unlink(server.folder.path("local").c_str()), 0);
  CHECK_EQ(unlink(server.folder.path("zmq").c_str()), 0);
  server.socket.look_at_files();
  CHECK_EQ(news(server), "bound_again");
  CHECK_EQ(news(server), "nothing");
}

// ---- at random ----------------------------------------------------------------------------------------------------

class Random {
 public:
  explicit Random(uint32_t seed) : state_(seed) {}
  uint32_t below(size_t limit) {
    state_ = state_ * 6364136223846793005U + 1442695040888963407U;
    return static_cast<uint32_t>((state_ >> 33) % limit);
  }

  // What a client may say, with what the server makes of it; messages are at most 500 bytes long.
  std::string stream(Events& events) {
    std::string text = greeting(3, static_cast<int>(below(3)));
    text += below(2) == 0 ? ready("REQ") : long_frame(kCommand, name("READY") + property("Socket-Type", "DEALER"));
    events = {"opened"};
    for (uint32_t i = below(12); i-- > 0;) {
      const std::string body(below(3) == 0 ? below(500) : below(12), 'b');
      const int format = below(2) == 0 ? 0 : kLong;
      const std::string first = header(kMore | format, 4);
      const auto say = [&](const std::string& bytes, const std::string& event) {
        text += bytes;
        events.push_back(event);
      };
      switch (below(8)) {
        case 0:
          say(frame(0, body), "bad_frame");
          break;
        case 1:
          say(first + "ull0" + frame(0, body), "bad_version");
          break;
        case 2:
          say(first + "ull1" + frame(kMore, body) + frame(0, body), "bad_frame");
          break;
        case 3:
          say(first + "ull1" + frame(0, kRequest + std::string(500 + below(5000), 'l')), "too_long of 42");
          break;
        case 4:
          say(ping(body.substr(0, 16)), "answer " + pong(body.substr(0, 16)));
          break;
        case 5:
          text += command("X", body);
          break;
        default:
          say(first + "ull1" + frame(0, body), "message " + body);
      }
    }
    return text;
  }
  void damage(std::string& text) {
    for (uint32_t i = 1 + below(3); i-- > 0;) text[below(text.size())] ^= static_cast<char>(1 << below(8));
  }

 private:
  uint64_t state_;
};

// What is understood does not depend on how bytes arrive; damaged or not, no more is taken than there is.
TEST(random_streams_are_understood_however_they_are_cut) {
  Random random(11);
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

TEST(good_clients_are_served_among_random_ones) {
  Server server(
      {.zeromq = {"tcp://127.0.0.1:0"}, .max_message = 500, .handshake_ms = 20, .ping_ms = 20, .mute_ms = 60});
  Random random(12);
  Client good(server.at(), greeting(3, 0) + ready("DEALER"));
  std::vector<std::unique_ptr<Client>> bad;
  for (int round = 0; round < 400; ++round) {
    Events events;
    std::string stream = random.stream(events);
    if (random.below(4) != 0) random.damage(stream);
    stream.resize(random.below(stream.size() + 1));
    if (bad.size() >= 20) bad.erase(bad.begin() + random.below(bad.size()));
    bad.push_back(std::make_unique<Client>(server.at(random.below(2)), ""));
    for (size_t at = 0; at < stream.size();) {
      const size_t size = 1 + random.below(stream.size());
      if (!bad.back()->send(stream.substr(at, size))) break;
      at += size;
      if (const auto received = server.turn()) (void)server.send(received->client, "answer");
    }
    CHECK(good.send(message("good")));
    for (std::optional<Received> received; !received || received->what != "good";) {
      received = server.turn();
      if (received) (void)server.send(received->client, "answer");
    }
    server.until([&] { return good.has(message("answer")); });
    (void)good.take();
  }
  bad.clear();
  server.until([&] { return server.socket.counts().clients == 1; });
}

}  // namespace
