// The io thread between clients and a control plane in memory: delivery, slow, full and vanished clients, malformed
// messages, shutdown.
#include <atomic>
#include <cstring>
#include <functional>
#include <map>

#include "engine_fixture.h"
#include "fake_zmq.h"
#include "io/io.h"
#include "msgpack_reader.h"
#include "yields.h"

namespace {
std::atomic<int> io_yields{0};  // how often the io thread has given its core away
}

void on_yield(std::string_view thread) noexcept {
  if (thread == "ull-io") io_yields.fetch_add(1, std::memory_order_relaxed);
}

namespace {

using ull::IoMessage;
using ull::test::FakeZmq;
using ull::test::Frames;
using ull::test::ids;
using ull::test::MsgpackReader;
using ull::test::Value;

std::string letter(IoMessage kind) { return {static_cast<char>(kind)}; }

// What one client got for one request.
struct Received {
  std::string text;
  size_t tokens = 0;
  size_t frames = 0;
  size_t logprobs = 0;
  std::vector<double> prompt_logprobs;
  int dones = 0;
  std::string finish_reason;
  std::string error;            // its code
  std::vector<uint64_t> times;  // of the token frames, ns
};

// The control plane is to tell of the end.
void told(ull::Submission& request) { request.returns_tokens = request.told_by_control = true; }

std::string done_of(uint8_t id) {
  return std::string(
             "\x84\xa4type\xa4"
             "done\xa5"
             "error\xc0\xad"
             "finish_reason\xa4stop\xa2id") +
         static_cast<char>(id);
}

class Daemon {
 public:
  Daemon(ull::ScriptedExecutor::Options script, const ull::IoOptions& options = {},
         ull::EngineOptions engine_options = {}, const std::string& endpoint = "fake://clients")
      : executor(ascii(std::move(script))),
        engine(executor, vocabulary_.path(), engine_options),
        io(engine, FakeZmq::api(), &net, options, net.clients(endpoint)) {
    engine.start();
    io.start();
  }
  ~Daemon() {
    engine.stop();
    io.stop();
  }

  void submit(const std::string& client, uint64_t id, int max_tokens,
              const std::function<void(ull::Submission&)>& edit = {}) {
    static const std::vector<int32_t> prompt = ids("once upon a time there was");
    ull::Submission submission;
    submission.identity = {reinterpret_cast<const uint8_t*>(client.data()), client.size()};
    submission.id = id;
    submission.tokens = prompt;
    submission.max_tokens = max_tokens;
    if (edit) edit(submission);
    (void)engine.submit(submission);
  }

  // Takes what the client can read; true once the request's done frame has come.
  bool read(const std::string& client, uint64_t id) {
    while (auto frames = net.take(client)) {
      CHECK_EQ(frames->size(), 2U);
      CHECK_EQ(frames->front(), "ull1");
      const Value value = MsgpackReader::read(frames->back());
      Received& request = received[{client, value["id"].integer}];
      if (value["type"].text == "done") {
        ++request.dones;
        request.finish_reason = value["finish_reason"].text;
        if (value["error"].members.count("code") > 0) request.error = value["error"]["code"].text;
        continue;
      }
      CHECK_EQ(request.dones, 0);
      if (value["type"].text == "prompt_logprobs") {  // in order, and before every token
        CHECK_EQ(request.frames, 0U);
        CHECK_EQ(value["index"].integer, 1 + request.prompt_logprobs.size());
        CHECK(!value["logprobs"].items.empty());
        for (const Value& each : value["logprobs"].items) request.prompt_logprobs.push_back(each.real);
        continue;
      }
      CHECK_EQ(value["index"].integer, request.tokens);
      request.tokens += value["ids"].items.size();
      request.text += value["text"].text;
      if (value.members.count("logprobs") > 0) request.logprobs += value["logprobs"].items.size();
      ++request.frames;
      request.times.push_back(value["time_ns"].integer);
    }
    return received[{client, id}].dones > 0;
  }

  Received& got(const std::string& client, uint64_t id) { return received[{client, id}]; }

  Received& finish(const std::string& client, uint64_t id) {
    while (!read(client, id)) std::this_thread::yield();
    return received[{client, id}];
  }

  Frames control() {
    for (;;) {
      if (auto frames = net.take_control()) return *frames;
      std::this_thread::yield();
    }
  }

  Value record() {
    const Frames frames = control();
    CHECK_EQ(frames.front(), letter(IoMessage::kEnded));
    return MsgpackReader::read(frames.back());
  }

 private:
  static ull::ScriptedExecutor::Options ascii(ull::ScriptedExecutor::Options script) {
    script.vocabulary = 128;
    return script;
  }
  ull::test::AsciiVocabulary vocabulary_;

 public:
  FakeZmq net;
  ull::ScriptedExecutor executor;
  ull::Engine engine;
  ull::Io io;
  std::map<std::pair<std::string, uint64_t>, Received> received;
};

TEST(tokens_and_done_arrive_in_order) {
  for (const auto idle : {ull::IdleMode::kSpin, ull::IdleMode::kAdaptive}) {
    Daemon daemon({.tokens = ids("abcdefghijklmnopqrstuvwxyz")}, {.idle = idle});
    daemon.submit("client", 5, 30);
    const Received& got = daemon.finish("client", 5);
    CHECK_EQ(got.text, "abcdefghijklmnopqrstuvwxyzabcd");
    CHECK_EQ(got.tokens, 30U);
    CHECK_EQ(got.finish_reason, "length");
    const Value record = daemon.record();
    CHECK_EQ(record["identity"].text, "client");
    CHECK_EQ(record["delivered"].integer, 1U);
    CHECK_EQ(record["client"].text, "ok");
    while (!daemon.engine.drained()) std::this_thread::yield();
  }
}

// What was sent is for those to carry on who may share the core.
TEST(an_io_thread_without_a_core_of_its_own_gives_way) {
  const auto yields = [](const ull::IoOptions& options) {
    const int before = io_yields.load(std::memory_order_relaxed);
    {
      Daemon daemon({.tokens = ids("a")}, options);
      daemon.submit("client", 1, 5);
      daemon.finish("client", 1);
    }
    return io_yields.load(std::memory_order_relaxed) - before;
  };
  CHECK(yields({}) > 0);
  CHECK_EQ(yields({.core = 0}), 0);
  CHECK(yields({.core = 0, .cooperative = true}) > 0);
  CHECK_EQ(yields({.cooperative = false}), 0);
}

TEST(requests_and_replies_pass_through) {
  Daemon daemon({.tokens = ids("a")});
  daemon.net.send_as("client", {"ull1", "payload"});
  const Frames request = daemon.control();
  CHECK_EQ(request.size(), 4U);
  CHECK_EQ(request[0], letter(IoMessage::kRequest));
  CHECK_EQ(request[1], "client");
  CHECK_EQ(request[2], "payload");
  int64_t received = 0;
  REQUIRE(request[3].size() == sizeof(received));
  std::memcpy(&received, request[3].data(), sizeof(received));
  CHECK(received > 0 && received <= ull::monotonic_ns());
  daemon.net.send_as_control({"client", "reply"});
  std::optional<Frames> reply;
  while (!(reply = daemon.net.take("client"))) std::this_thread::yield();
  CHECK(*reply == Frames({"ull1", "reply"}));
}

TEST(malformed_messages_are_named_and_survived) {
  Daemon daemon({.tokens = ids("a")});
  const auto reason = [&](Frames frames) {
    daemon.net.send_as("client", std::move(frames));
    const Frames told = daemon.control();
    CHECK_EQ(told.size(), 3U);
    CHECK_EQ(told[0], letter(IoMessage::kMalformed));
    CHECK_EQ(told[1], "client");
    return told[2];
  };
  CHECK_EQ(reason({}), "bad_frame");
  daemon.net.send_as("client", {"ull1", ""});
  CHECK_EQ(daemon.control()[0], letter(IoMessage::kRequest));
  daemon.net.send_as_control({"lonely frame"});  // not even the control plane is trusted to count
  daemon.net.send_as_control({"client", "one", "too many"});
  daemon.submit("client", 1, 3);
  CHECK_EQ(daemon.finish("client", 1).tokens, 3U);
}

TEST(a_client_that_vanishes_loses_only_its_own_request) {
  Daemon daemon({.tokens = ids("a"), .context = 100'000, .page_count = 2000, .round_ns = 100'000},
                {.client_stall_ms = 60'000});
  daemon.submit("gone", 1, 90'000);
  daemon.submit("other", 1, 5);
  while (daemon.net.waiting("gone") == 0) std::this_thread::yield();
  daemon.net.set_gone("gone");
  CHECK_EQ(daemon.finish("other", 1).tokens, 5U);
  const Value first = daemon.record();
  CHECK_EQ(first["identity"].text, "gone");
  CHECK_EQ(first["finish_reason"].text, "cancelled");
  CHECK_EQ(first["client"].text, "gone");
  CHECK_EQ(first["delivered"].integer, 0U);
  CHECK_EQ(daemon.record()["identity"].text, "other");
  daemon.net.send_as_control({"gone", "reply"});
  daemon.engine.stop();
  daemon.io.stop();
  CHECK_EQ(daemon.io.stats().clients_gone, 1U);
  CHECK_EQ(daemon.io.stats().replies_dropped, 1U);
}

TEST(a_client_that_stops_reading_is_cancelled_and_counted) {
  for (const bool with_logprobs : {false, true}) {
    Daemon daemon({.tokens = ids("a"), .context = 100'000, .page_count = 2000, .round_ns = 20'000},
                  {.client_stall_ms = 20});
    daemon.submit("slow", 1, 90'000, [&](ull::Submission& s) { s.sampling.top_logprobs = with_logprobs ? 3 : -1; });
    daemon.submit("other", 1, 5);
    CHECK_EQ(daemon.finish("other", 1).tokens, 5U);
    CHECK_EQ(daemon.got("other", 1).dones, 1);
    CHECK(daemon.net.waiting("slow") <= 64);
    const Value record = daemon.record();
    CHECK_EQ(record["identity"].text, "slow");
    CHECK_EQ(record["finish_reason"].text, "cancelled");
    CHECK_EQ(record["client"].text, "stalled");
    CHECK_EQ(record["error"]["code"].text, "stalled");
    CHECK_EQ(record["delivered"].integer, 0U);
    CHECK_EQ(daemon.record()["identity"].text, "other");
    while (!daemon.engine.drained()) std::this_thread::yield();  // the slot does not wait for the client
    // When it reads again it hears the end.
    const Received& got = daemon.finish("slow", 1);
    CHECK_EQ(got.finish_reason, "cancelled");
    CHECK_EQ(got.error, "stalled");
    CHECK(got.tokens < record["usage"]["completion_tokens"].integer);
    CHECK_EQ(got.dones, 1);
    daemon.engine.stop();
    daemon.io.stop();
    CHECK_EQ(daemon.io.stats().clients_stalled, 1U);
    CHECK_EQ(daemon.io.stats().dones_dropped, 0U);
    CHECK_EQ(daemon.io.stats().waiting, 0U);
  }
}

TEST(a_done_frame_that_finds_no_room_is_not_lost) {
  for (const int64_t stall_ms : {int64_t{20}, int64_t{60'000}}) {
    Daemon daemon({.tokens = ids("a"), .round_ns = 200'000}, {.client_stall_ms = stall_ms});
    daemon.net.set_room(3);
    daemon.submit("client", 1, 3);  // three frames, if they share none, fill the room
    daemon.net.set_room_of("client", 3);
    while (daemon.engine.stats().counters.length == 0) std::this_thread::yield();
    if (stall_ms == 20) {
      CHECK_EQ(daemon.record()["identity"].text, "client");
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    const Received& got = daemon.finish("client", 1);
    CHECK_EQ(got.tokens, 3U);  // every token had been taken: nothing was cut short
    CHECK_EQ(got.finish_reason, "length");
    CHECK_EQ(got.error, "");
  }
}

TEST(frames_of_a_backlog_carry_their_own_tokens_times) {
  Daemon daemon({.tokens = ids("a"), .round_ns = 20'000}, {.client_stall_ms = 600'000});
  daemon.net.set_room(1);
  daemon.submit("slow", 1, 1000, [](ull::Submission& s) { s.sampling.top_logprobs = 0; });
  while (daemon.engine.stats().counters.length == 0) std::this_thread::yield();
  const Received& got = daemon.finish("slow", 1);
  REQUIRE(got.times.size() >= 4);  // one that was sent at once, and a backlog of 256 tokens a frame
  CHECK(got.times[2] > got.times[1]);
}

TEST(a_client_that_catches_up_loses_nothing) {
  Daemon daemon(
      {.tokens = ids("abcdefghijklmnopqrstuvwxyz"), .tokens_per_round = 2, .context = 60'000, .page_count = 1000},
      {.client_stall_ms = 600'000});
  daemon.net.set_room(2);
  daemon.submit("slow", 1, 50'000);
  daemon.submit("slow", 2, 50'000, [](ull::Submission& s) { s.sampling.top_logprobs = 1; });
  while (daemon.net.waiting("slow") < 2) std::this_thread::yield();
  for (const uint64_t id : {uint64_t{1}, uint64_t{2}}) {
    const Received& got = daemon.finish("slow", id);
    CHECK_EQ(got.tokens, 50'000U);
    CHECK_EQ(got.text.size(), 50'000U);
    CHECK_EQ(got.finish_reason, "length");
    for (size_t i = 0; i < got.text.size(); ++i) REQUIRE(got.text[i] == static_cast<char>('a' + i % 26));
  }
  CHECK_EQ(daemon.got("slow", 2).logprobs, 50'000U);
}

TEST(replies_wait_for_a_full_client) {
  {
    Daemon daemon({.tokens = ids("a")}, {.client_stall_ms = 60'000});
    daemon.net.set_room(2);
    for (int i = 0; i < 4; ++i) daemon.net.send_as_control({"client", "reply " + std::to_string(i)});
    while (daemon.net.waiting("client") < 2) std::this_thread::yield();
    for (int i = 0; i < 4; ++i) {
      std::optional<Frames> reply;
      while (!(reply = daemon.net.take("client"))) std::this_thread::yield();
      CHECK_EQ(reply->back(), "reply " + std::to_string(i));
    }
  }
  // None is dropped, however many they are and however long they wait; others' are not held up for ever.
  Daemon daemon({.tokens = ids("a")}, {.client_stall_ms = 30});
  daemon.net.set_room_of("client", 2);
  constexpr int kReplies = 5000;
  for (int i = 0; i < kReplies; ++i) daemon.net.send_as_control({"client", "reply " + std::to_string(i)});
  daemon.net.send_as_control({"other", "reply"});
  daemon.net.send_as("other", {"ull1", "request"});
  while (!daemon.net.take("other")) std::this_thread::yield();
  CHECK_EQ(daemon.control()[0], letter(IoMessage::kRequest));
  CHECK_EQ(daemon.net.waiting("client"), 2U);
  for (int i = 0; i < kReplies; ++i) {
    std::optional<Frames> reply;
    while (!(reply = daemon.net.take("client"))) std::this_thread::yield();
    REQUIRE(reply->back() == "reply " + std::to_string(i));
  }
  daemon.engine.stop();
  daemon.io.stop();
  CHECK_EQ(daemon.io.stats().replies, static_cast<uint64_t>(kReplies) + 1);
  CHECK_EQ(daemon.io.stats().replies_dropped, 0U);
}

// With the replies of a client that does not read at their limit, nobody's requests are read: nothing may grow.
TEST(requests_wait_while_replies_have_no_room) {
  Daemon daemon({.tokens = ids("a")}, {.client_stall_ms = 600'000});
  daemon.net.set_room_of("client", 0);
  const std::string reply(100'000, 'x');
  for (int i = 0; i < 20; ++i) daemon.net.send_as_control({"client", reply});
  size_t left = 21;
  while (daemon.net.replies_left() != left) {  // until no more are taken
    left = daemon.net.replies_left();
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  for (int i = 0; i < 5; ++i) daemon.net.send_as("other", {"ull1", "request"});
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  CHECK(daemon.net.replies_left() >= 10);
  CHECK(!daemon.net.take_control());
  daemon.submit("other", 1, 3);  // tokens come all the same
  CHECK_EQ(daemon.finish("other", 1).tokens, 3U);
  daemon.net.set_room_of("client", 100);
  int requests = 0;
  while (requests < 5) requests += daemon.control()[0] == letter(IoMessage::kRequest) ? 1 : 0;
  while (daemon.net.waiting("client") < 20) std::this_thread::yield();
}

TEST(a_control_plane_that_is_behind_loses_no_request_and_no_record) {
  Daemon daemon({.tokens = ids("a")});
  daemon.net.set_control_room(1);
  for (int i = 0; i < 20; ++i) daemon.net.send_as("client", {"ull1", std::to_string(i)});
  for (uint64_t id = 1; id <= 5; ++id) daemon.submit("client", id, 3);
  for (uint64_t id = 1; id <= 5; ++id) daemon.finish("client", id);
  CHECK(!daemon.engine.drained());
  int requests = 0;
  int records = 0;
  while (requests + records < 25) {
    const Frames frames = daemon.control();
    if (frames[0] == letter(IoMessage::kRequest)) {
      CHECK_EQ(frames[2], std::to_string(requests++));
    } else {
      ++records;
    }
  }
  CHECK_EQ(records, 5);
  while (!daemon.engine.drained()) std::this_thread::yield();
}

TEST(stop_delivers_what_has_ended) {
  Daemon daemon({.tokens = ids("a"), .round_ns = 200'000});
  daemon.net.set_room(100'000);  // nobody reads while it stops
  for (uint64_t id = 1; id <= 6; ++id) daemon.submit("client", id, 4000);
  while (daemon.net.waiting("client") == 0) std::this_thread::yield();
  daemon.engine.stop();
  daemon.io.stop();
  daemon.io.stop();
  CHECK(daemon.net.closed());
  for (uint64_t id = 1; id <= 6; ++id) {
    CHECK_EQ(daemon.finish("client", id).dones, 1);
    CHECK_EQ(daemon.got("client", id).finish_reason, "cancelled");
    CHECK_EQ(daemon.record()["error"]["code"].text, "draining");
  }
  CHECK_THROWS(daemon.io.start(), std::logic_error);
}

TEST(stop_does_not_wait_for_a_client_that_does_not_read) {
  Daemon daemon({.tokens = ids("a"), .round_ns = 1'000}, {.server = {.linger_ms = 50}, .client_stall_ms = 60'000});
  daemon.net.set_room(1);
  daemon.submit("slow", 1, 4000);
  while (daemon.net.waiting("slow") == 0) std::this_thread::yield();
  daemon.engine.stop();
  daemon.io.stop();
  CHECK(daemon.net.closed());
}

// Between the last look at the ring and the sleep an event may come, whose waker found nobody asleep. An io thread that
// goes to sleep with an event in the ring must have been woken.
TEST(no_event_is_slept_through) {
  Daemon daemon({.tokens = ids("a"), .round_ns = 700'000'000}, {.client_stall_ms = 60'000});
  ull::EngineShared& shared = daemon.engine.shared();
  int looks = 0;  // since the first token was sent; the second look is of a cycle that has found nothing else to do
  std::atomic<bool> held{false};
  int lost = 0;
  daemon.net.before_receive([&] {
    if (held || daemon.net.waiting("client") == 0 || ++looks < 2) return;
    held = true;  // until the second token is in the ring
    while (shared.events.empty()) std::this_thread::yield();
  });
  daemon.net.before_poll([&](int waker) {
    pollfd item{waker, POLLIN, 0};
    if (!shared.events.empty() && ::poll(&item, 1, 300) == 0) ++lost;
  });
  daemon.submit("client", 1, 3);
  const int64_t end = ull::monotonic_ns() + 20'000'000'000;
  while (!held && ull::monotonic_ns() < end) std::this_thread::yield();  // the looks count while a token is unread
  CHECK_EQ(daemon.finish("client", 1).tokens, 3U);
  daemon.engine.stop();
  daemon.io.stop();
  CHECK(held);
  CHECK_EQ(lost, 0);
}

std::span<const uint8_t> name_of(const std::string& client) {
  return {reinterpret_cast<const uint8_t*>(client.data()), client.size()};
}

void hold(ull::Submission& request) { request.hold = true; }

TEST(a_held_answer_comes_when_it_is_committed) {
  for (const auto idle : {ull::IdleMode::kSpin, ull::IdleMode::kAdaptive}) {
    Daemon daemon({.tokens = ids("abcdefghijklmnopqrstuvwxyz")}, {.idle = idle});
    const std::string client = "client";
    daemon.submit(client, 1, 30, hold);
    daemon.submit("other", 1, 5);
    CHECK_EQ(daemon.finish("other", 1).tokens, 5U);  // it had its turn behind the held one, which has ended
    CHECK_EQ(daemon.net.waiting(client), 0U);
    CHECK(!daemon.engine.commit(name_of("other"), 1));  // of which nothing is held
    CHECK(!daemon.engine.commit(name_of(client), 2));
    CHECK(daemon.engine.commit(name_of(client), 1));
    CHECK(!daemon.engine.commit(name_of(client), 1));
    const Received& got = daemon.finish(client, 1);
    CHECK_EQ(got.text, "abcdefghijklmnopqrstuvwxyzabcd");
    CHECK_EQ(got.frames, 1U);
    CHECK_EQ(got.finish_reason, "length");
  }
}

TEST(an_answer_that_is_committed_while_it_is_computed_streams_on) {
  Daemon daemon({.tokens = ids("a"), .round_ns = 1'000'000});
  const std::string client = "client";
  daemon.executor.hold_from(20);
  daemon.submit(client, 1, 60, hold);
  while (daemon.executor.steps() < 20) std::this_thread::yield();
  CHECK_EQ(daemon.net.waiting(client), 0U);
  CHECK(daemon.engine.commit(name_of(client), 1));
  while (daemon.net.waiting(client) == 0) std::this_thread::yield();  // the frame of what was held
  daemon.executor.hold_from(40);
  while (daemon.net.waiting(client) < 2) std::this_thread::yield();  // one of what was computed since
  daemon.executor.let_go();
  const Received& got = daemon.finish(client, 1);
  CHECK_EQ(got.tokens, 60U);
  CHECK(got.frames > 2);
}

TEST(a_held_answer_that_nobody_wants_has_an_end_and_no_tokens) {
  for (const bool computed : {true, false}) {
    Daemon daemon({.tokens = ids("a"), .round_ns = computed ? 0 : 1'000'000});
    const std::string client = "client";
    daemon.submit(client, 1, 60, hold);
    const auto state = [&] { return daemon.engine.shared().slot(0).state.load(); };
    // A machine that stood still meanwhile finds it computed.
    while (state() != ull::SlotState::kHeld && (computed || state() != ull::SlotState::kRunning)) {
      std::this_thread::yield();
    }
    CHECK(daemon.engine.cancel(name_of(client), 1));
    CHECK(!daemon.engine.commit(name_of(client), 1));
    const Received& got = daemon.finish(client, 1);
    CHECK_EQ(got.tokens, 0U);
    CHECK_EQ(got.finish_reason, "cancelled");
    (void)daemon.record();
    while (!daemon.engine.drained()) std::this_thread::yield();
  }
}

TEST(what_is_held_takes_its_client_s_place_and_ends_with_the_daemon) {
  Daemon daemon({.tokens = ids("a")}, {}, {.queue_depth = 8, .client_share = 2});
  for (uint64_t id = 1; id <= 2; ++id) daemon.submit("client", id, 3, hold);
  const auto held = [&](uint32_t slot) {
    return daemon.engine.shared().slot(slot).state.load() == ull::SlotState::kHeld;
  };
  while (!held(0) || !held(1)) std::this_thread::yield();
  CHECK_THROWS(daemon.submit("client", 3, 3), ull::QueueFull);
  daemon.submit("other", 3, 3);
  daemon.finish("other", 3);
  daemon.engine.stop();
  for (uint64_t id = 1; id <= 2; ++id) CHECK_EQ(daemon.finish("client", id).finish_reason, "cancelled");
}

const std::vector<int32_t> kLong(9'000, 'x');  // whose log-probabilities take five frames

void score(ull::Submission& request) {
  request.tokens = kLong;
  request.prompt_logprobs = true;
}

ull::ScriptedExecutor::Options roomy() { return {.tokens = ids("a"), .context = 10'000, .page_count = 400}; }

void check_whole(const Received& got, size_t tokens) {
  CHECK_EQ(got.finish_reason, "length");
  CHECK_EQ(got.tokens, tokens);
  REQUIRE(got.prompt_logprobs.size() == kLong.size() - 1);
  for (const size_t i : {size_t{1}, size_t{64}, size_t{5'000}, kLong.size() - 1}) {
    CHECK_EQ(got.prompt_logprobs[i - 1], ull::ScriptedExecutor::scripted_logprob(std::span(kLong).first(i), kLong[i]));
  }
}

TEST(a_prompt_s_logprobs_come_once_before_every_token_and_the_end) {
  for (const size_t tokens : {0U, 20U}) {
    Daemon daemon(roomy());
    daemon.submit("client", 1, static_cast<int>(tokens), score);
    check_whole(daemon.finish("client", 1), tokens);
    CHECK(!daemon.net.take("client"));
    CHECK_EQ(daemon.record()["delivered"].integer, 1U);
    daemon.io.stop();
    CHECK_EQ(daemon.io.stats().prompt_logprobs_frames, 5U);
    CHECK_EQ(daemon.io.stats().token_frames > 0, tokens > 0);
  }
}

TEST(a_client_that_reads_slowly_gets_a_prompt_s_logprobs_whole) {
  Daemon daemon(roomy(), {.client_stall_ms = 600'000});
  daemon.net.set_room(1);
  daemon.submit("slow", 1, 5, score);
  daemon.submit("slow", 2, 0, score);
  while (daemon.engine.stats().counters.length < 2) std::this_thread::yield();
  CHECK(daemon.net.waiting("slow") <= 1);
  check_whole(daemon.finish("slow", 1), 5);
  check_whole(daemon.finish("slow", 2), 0);
}

// Frames are sent a few at a time, and what is blocked is tried again in between: each request ends once even so.
TEST(a_prompt_s_logprobs_end_once_beside_a_client_that_is_full) {
  Daemon daemon(roomy(), {.client_stall_ms = 600'000});
  daemon.net.set_room_of("full", 1);
  daemon.submit("full", 1, 5, score);
  for (uint64_t id = 1; id <= 20; ++id) {
    daemon.submit("client", id, static_cast<int>(id % 2), score);
    check_whole(daemon.finish("client", id), id % 2);
    CHECK_EQ(daemon.record()["id"].integer, id);
  }
  check_whole(daemon.finish("full", 1), 5);
  CHECK_EQ(daemon.record()["identity"].text, "full");
  CHECK(!daemon.net.take_control());
}

TEST(a_client_that_never_reads_a_prompt_s_logprobs_is_cancelled) {
  Daemon daemon(roomy(), {.client_stall_ms = 20});
  daemon.net.set_room_of("deaf", 2);
  daemon.submit("deaf", 1, 5, score);
  daemon.submit("other", 1, 5, score);
  check_whole(daemon.finish("other", 1), 5);
  for (int i = 0; i < 2; ++i) {
    const Value record = daemon.record();
    if (record["identity"].text == "deaf") CHECK_EQ(record["error"]["code"].text, "stalled");
  }
  while (!daemon.engine.drained()) std::this_thread::yield();  // neither slot waits for it
  daemon.engine.free_ended();
  CHECK(daemon.engine.shared().slot(0).prompt_logprobs == nullptr);
  const Received& got = daemon.finish("deaf", 1);
  CHECK_EQ(got.error, "stalled");
  CHECK_EQ(got.prompt_logprobs.size(), 2U * ull::kMaxFramePromptLogprobs);
  CHECK_EQ(got.tokens, 0U);
}

TEST(a_client_that_vanishes_leaves_a_prompt_s_logprobs_behind) {
  Daemon daemon(roomy(), {.client_stall_ms = 600'000});
  daemon.net.set_room_of("gone", 1);
  daemon.submit("gone", 1, 5, score);
  while (daemon.engine.stats().counters.length == 0) std::this_thread::yield();
  daemon.net.set_gone("gone");
  CHECK_EQ(daemon.record()["client"].text, "gone");
  while (!daemon.engine.drained()) std::this_thread::yield();
}

TEST(a_prompt_s_logprobs_are_held_with_the_answer) {
  for (const bool committed : {true, false}) {
    Daemon daemon(roomy());
    const std::string client = "client";
    daemon.submit(client, 1, 5, [](ull::Submission& request) {
      score(request);
      hold(request);
    });
    while (daemon.engine.shared().slot(0).state.load() != ull::SlotState::kHeld) std::this_thread::yield();
    CHECK_EQ(daemon.net.waiting(client), 0U);
    CHECK(committed ? daemon.engine.commit(name_of(client), 1) : daemon.engine.cancel(name_of(client), 1));
    const Received& got = daemon.finish(client, 1);
    if (committed) {
      check_whole(got, 5);
    } else {
      CHECK_EQ(got.finish_reason, "cancelled");
      CHECK(got.prompt_logprobs.empty());
    }
    (void)daemon.record();
  }
}

// The end is the control plane's to tell, once all that comes before it is out.
TEST(a_prompt_s_logprobs_come_before_an_end_that_the_control_plane_tells) {
  Daemon daemon(roomy(), {.client_stall_ms = 600'000});
  daemon.net.set_room(1);
  daemon.submit("client", 1, 0, [](ull::Submission& request) {
    score(request);
    told(request);
  });
  while (daemon.engine.stats().counters.length == 0) std::this_thread::yield();
  CHECK(!daemon.net.take_control());
  while (daemon.got("client", 1).prompt_logprobs.size() < kLong.size() - 1) (void)daemon.read("client", 1);
  (void)daemon.control();
  daemon.net.send_as_control({"client", done_of(1)});
  CHECK_EQ(daemon.finish("client", 1).dones, 1);
}

TEST(the_control_plane_is_told_the_ids_where_it_wants_them) {
  Daemon daemon({.tokens = ids("abcdefghijklmnopqrstuvwxyz")});
  daemon.submit("client", 1, 5, [](ull::Submission& request) { request.returns_tokens = true; });
  const Frames frames = daemon.control();
  CHECK_EQ(frames.size(), 3U);
  std::vector<int32_t> told(frames[2].size() / sizeof(int32_t));
  std::memcpy(told.data(), frames[2].data(), told.size() * sizeof(int32_t));
  CHECK(told == ids("abcde"));
  daemon.submit("client", 2, 0, [](ull::Submission& request) { request.returns_tokens = true; });
  const Frames none = daemon.control();
  CHECK_EQ(none.size(), 3U);
  CHECK(none[2].empty());
}

// What the control plane tells of an end comes behind all tokens, however slowly their client reads.
TEST(where_the_control_plane_tells_of_the_end_the_io_thread_does_not) {
  for (const size_t room : {size_t{1}, size_t{64}}) {
    Daemon daemon({.tokens = ids("abcdefghijklmnopqrstuvwxyz")}, {.client_stall_ms = 600'000});
    daemon.net.set_room(room);
    daemon.submit("client", 1, 700, told);
    while (daemon.engine.stats().counters.length == 0) std::this_thread::yield();
    if (room == 1) CHECK(!daemon.net.take_control());  // a frame waits, and what else there is
    std::optional<Frames> ended;
    while (!(ended = daemon.net.take_control())) (void)daemon.read("client", 1);
    CHECK_EQ(ended->size(), 3U);
    CHECK_EQ(ended->front(), letter(IoMessage::kEnded));
    CHECK_EQ((*ended)[2].size(), 700 * sizeof(int32_t));
    const Value record = MsgpackReader::read((*ended)[1]);
    CHECK_EQ(record["finish_reason"].text, "length");
    CHECK_EQ(record["client"].text, "ok");
    CHECK_EQ(record["delivered"].integer, 0U);
    while (!daemon.engine.drained()) std::this_thread::yield();  // the slot waits for nobody
    CHECK_EQ(daemon.got("client", 1).dones, 0);
    daemon.net.send_as_control({"client", done_of(1)});
    const Received& got = daemon.finish("client", 1);
    CHECK_EQ(got.tokens, 700U);
    CHECK_EQ(got.text.size(), 700U);
    CHECK_EQ(got.dones, 1);
    daemon.engine.stop();
    daemon.io.stop();
    CHECK_EQ(daemon.io.stats().done_frames, 0U);
    CHECK(!daemon.net.take("client"));
  }
}

TEST(the_control_plane_hears_what_has_become_of_the_client_whom_it_is_to_tell) {
  for (const bool gone : {false, true}) {
    Daemon daemon({.tokens = ids("a"), .context = 100'000, .page_count = 2000, .round_ns = 20'000},
                  {.client_stall_ms = gone ? 60'000 : 20});
    daemon.submit("client", 1, 90'000, told);
    while (daemon.net.waiting("client") == 0) std::this_thread::yield();
    if (gone) daemon.net.set_gone("client");
    const Frames ended = daemon.control();
    CHECK_EQ(ended.size(), 3U);
    const Value record = MsgpackReader::read(ended[1]);
    CHECK_EQ(record["finish_reason"].text, "cancelled");
    CHECK_EQ(record["client"].text, gone ? "gone" : "stalled");
    CHECK_EQ(record["delivered"].integer, 0U);
    while (!daemon.engine.drained()) std::this_thread::yield();
    daemon.net.send_as_control({"client", done_of(1)});
    if (!gone) CHECK_EQ(daemon.finish("client", 1).dones, 1);  // when it reads again
    daemon.engine.stop();
    daemon.io.stop();
    CHECK_EQ(daemon.io.stats().done_frames, 0U);
    CHECK_EQ(daemon.io.stats().replies_dropped, gone ? 1U : 0U);
  }
}

TEST(at_the_daemon_s_end_the_io_thread_tells_of_ends_that_nobody_hears_of) {
  Daemon daemon({.tokens = ids("a"), .context = 100'000, .page_count = 2000, .round_ns = 100'000},
                {.server = {.linger_ms = 50}, .client_stall_ms = 60'000});
  daemon.net.set_control_room(0);
  daemon.submit("client", 1, 90'000, told);
  while (daemon.net.waiting("client") == 0) std::this_thread::yield();
  daemon.engine.stop();
  std::thread stop([&] { daemon.io.stop(); });
  const Received& got = daemon.finish("client", 1);
  stop.join();
  CHECK_EQ(got.finish_reason, "cancelled");
  CHECK_EQ(got.dones, 1);
  CHECK(!daemon.net.take("client"));
}

TEST(halted_it_delivers_what_there_is_and_then_waits_until_it_goes_on) {
  Daemon daemon({.tokens = ids("ab"), .round_ns = 100'000});
  CHECK_THROWS((void)daemon.io.hand_over(), std::logic_error);
  for (uint64_t id = 1; id <= 6; id += 2) {
    daemon.submit("client", id, 3);
    CHECK_EQ(daemon.finish("client", id).dones, 1);
    daemon.io.halt();
    daemon.io.halt();                              // it is
    CHECK(daemon.io.hand_over().clients.empty());  // of a transport that has nothing to hand over
    daemon.submit("client", id + 1, 3);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(!daemon.read("client", id + 1));
    CHECK_EQ(daemon.got("client", id + 1).frames, 0U);
    daemon.io.start();
    CHECK_EQ(daemon.finish("client", id + 1).text, "aba");
  }
}

TEST(halted_it_says_nothing_to_whom_another_has) {
  Daemon daemon({.tokens = {1}});
  daemon.io.halt();
  daemon.io.abandon();
  CHECK_THROWS((void)daemon.io.hand_over(), std::logic_error);
  daemon.io.stop();
  CHECK(!daemon.net.take("client"));
}

TEST(options_and_endpoints_are_checked) {
  CHECK_THROWS(Daemon({.tokens = {1}}, {}, {}, "fake://taken"), std::runtime_error);
  CHECK_THROWS(Daemon({.tokens = {1}}, {.client_stall_ms = 0}), std::invalid_argument);
  Daemon daemon({.tokens = {1}});
  CHECK_EQ(daemon.io.endpoints().size(), 1U);
  CHECK_EQ(daemon.io.endpoints().front(), "fake://clients");
  CHECK_THROWS(ull::zmq::load("/nonexistent/libzmq.so"), std::runtime_error);
}

// Two clients with the same request ids, many requests, some cancelled: exactly one done each.
TEST(storm) {
  Daemon daemon({.tokens = ids("abcdefghijklmnopqrstuvwxyz"), .tokens_per_round = 3, .round_ns = 2'000},
                {.client_stall_ms = 60'000}, {.queue_depth = 16});
  std::map<std::pair<std::string, uint64_t>, size_t> wanted;
  uint32_t state = 9;
  const auto below = [&](uint32_t limit) { return (state = state * 1664525U + 1013904223U) / 65536 % limit; };
  int records = 0;
  const auto pump = [&] {
    daemon.read("a", 0);
    daemon.read("b", 0);
    while (auto frames = daemon.net.take_control()) records += frames->front() == letter(IoMessage::kEnded) ? 1 : 0;
  };
  for (uint64_t id = 1; id <= 300; ++id) {
    for (const std::string client : {"a", "b"}) {
      const size_t tokens = 1 + below(80);
      while (wanted.count({client, id}) == 0) {
        try {
          daemon.submit(client, id, static_cast<int>(tokens));
          wanted[{client, id}] = tokens;
        } catch (const ull::QueueFull&) {
          pump();
        }
      }
      const auto* bytes = reinterpret_cast<const uint8_t*>(client.data());
      if (below(8) == 0) (void)daemon.engine.cancel({bytes, client.size()}, id);
    }
  }
  while (records < 600) pump();
  for (const auto& [key, tokens] : wanted) {
    const Received& got = daemon.finish(key.first, key.second);
    CHECK_EQ(got.dones, 1);
    CHECK(got.finish_reason == "cancelled" || got.tokens == tokens);
    CHECK_EQ(got.text.size(), got.tokens);
  }
}

}  // namespace
