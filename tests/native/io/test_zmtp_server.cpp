// ZeroMQ's wire protocol (ZMTP 3.1, https://rfc.zeromq.org/spec/37/) as the server speaks it over sockets: who is let
// in, who is found to be dead, and what the worst may cost. The protocol itself is in test_zmtp.cpp, and what it has in
// common with the local transport's in test_server.cpp.
#include <malloc.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "check.h"
#include "server_fixture.h"
#include "zmtp_bytes.h"

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
using namespace ull::test;
using ull::Sent;
using Options = ull::Server::Options;

TEST(a_connection_is_greeted_at_once) {
  DrivenServer server({.zeromq = {"tcp://127.0.0.1:0"}});
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
  DrivenServer server({.zeromq = {"tcp://127.0.0.1:0"}});
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
  DrivenServer server;
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
  DrivenServer server({.max_message = 1000});
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
  DrivenServer server({.zeromq = {"tcp://127.0.0.1:0"}, .handshake_ms = 1'000'000});
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
  DrivenServer server;
  for (const std::string& text : {""s, greeting(), greeting() + ready("DEALER").substr(0, 20)}) {
    Client client(server.at(), text);
    server.until([&] { return server.socket.counts().clients == 1; });
    client.hang_up();
    server.until([&] { return server.socket.counts().clients == 0; });
  }
  CHECK(server.gone.empty());
  Client client(server.at(), kHandshake);
  server.until([&] { return server.socket.counts().clients == 1; });
  for (int i = 0; i < 3; ++i) (void)server.turn();
  client.hang_up();
  server.until([&] { return server.socket.counts().clients == 0; });
  REQUIRE(server.gone.size() == 1);
  CHECK_EQ(server.gone.front().substr(0, 2), "\0Z"s);
  CHECK_EQ(server.dropped(), 0U);
}

TEST(a_place_begins_anew_with_its_next_client) {
  DrivenServer server({.max_message = 1000, .max_connections = 1});
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
  DrivenServer server(kImpatient);
  const int64_t begin_ns = ull::monotonic_ns();
  Client client(server.at(), kHandshake);
  server.until([&] { return client.look().size() > kTheirs.size(); });
  CHECK(ull::monotonic_ns() - begin_ns >= 30 * kMsNs);
  server.until([&] { return !server.gone.empty(); });
  CHECK(ull::monotonic_ns() - begin_ns >= 90 * kMsNs);
  CHECK(client.ended());
  CHECK(client.take() == kTheirs + ping(""));  // once
  CHECK_EQ(server.dropped(), 1U);
}

TEST(whatever_a_peer_says_it_lives) {
  DrivenServer server(kImpatient);
  // A whole message is one thing, a part of one is another.
  for (const std::string& sign : {pong(""), message("m"), "\1"s, frame(kMore, "ull2")}) {
    Client client(server.at(), kHandshake);
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
  DrivenServer server(kImpatient);
  Client client(server.at(), kHandshake);
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
  DrivenServer server(kImpatient);
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
  DrivenServer server(kImpatient);
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
  DrivenServer server(kImpatient);
  Client old(server.at(), greeting(3, 0) + ready("DEALER") + message("asks"));
  CHECK_EQ(server.receive().what, "asks");
  Client idle(server.at(), greeting(3, 0) + ready("DEALER"));  // loses nothing: it has asked for nothing
  Client local(server.local(), kLocalHello);
  server.until([&] { return idle.ended(); });
  Client silent(server.at(), kHandshake);
  server.until([&] { return silent.ended(); });
  CHECK_EQ(server.dropped(), 2U);
  CHECK(old.take() == kTheirs);
  CHECK(local.take() == kLocalHello);
  CHECK(old.send(message("old")));
  CHECK_EQ(server.receive().what, "old");
  CHECK(local.send(local_message("local")));
  CHECK_EQ(server.receive().what, "local");
}

// The io thread takes none while the control plane has no room for more.
TEST(peers_whose_messages_are_not_taken_are_not_judged) {
  DrivenServer server(kImpatient);
  Client open(server.at(), kHandshake + message("opened before"));
  CHECK_EQ(server.receive().what, "opened before");
  CHECK(open.send(message("sent before")));
  Client fresh(server.at(), kHandshake + message("shook hands meanwhile"));
  Client local(server.local(), kLocalHello + local_message("local"));
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
  DrivenServer server({.handshake_ms = 50});
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
  DrivenServer server({.max_connections = 8, .handshake_ms = 50, .ping_ms = 30, .mute_ms = 90});
  Client mute(server.at(), kHandshake);
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
    DrivenServer server({.zeromq = {"tcp://127.0.0.1:0"}});
    Client good(server.at(), kHandshake + message("good"));
    const std::string identity = server.receive().client;
    Client flood(server.at(door), kHandshake);
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
  DrivenServer server;
  Client client(server.at(), kHandshake);
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
  DrivenServer server;
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
    DrivenServer server({.max_message = 100'000});
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
  DrivenServer server;
  Client modest(server.at(), kHandshake + message("modest"));
  (void)server.receive();
  Client flood(server.at(), kHandshake);
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
  DrivenServer server({.zeromq = {"tcp://127.0.0.1:0"}, .max_connections = 8});
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
  Client local(server.local(), kLocalHello + local_message("local"));
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

std::string news(DrivenServer& server) {
  ull::Transport::EndpointNews news;
  if (!server.socket.news(news)) return "nothing";
  CHECK_EQ(news.endpoint, server.at());
  const std::string what(news.what);
  CHECK(server.socket.news(news) && news.what == what);  // until it is popped
  server.socket.pop_news();
  return what;
}

TEST(what_becomes_of_an_endpoints_file_is_told_once) {
  DrivenServer server;
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
  DrivenServer server;
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
  DrivenServer server;
  CHECK_EQ(unlink(server.folder.path("local").c_str()), 0);
  server.socket.look_at_files();
  CHECK_EQ(news(server), "nothing");
  CHECK_EQ(server.socket.counts().bound_again, 1U);
  Client local(server.local(), kLocalHello + local_message("local"));
  CHECK_EQ(server.receive().what, "local");
  CHECK_EQ(unlink(server.folder.path("local").c_str()), 0);
  CHECK_EQ(unlink(server.folder.path("zmq").c_str()), 0);
  server.socket.look_at_files();
  CHECK_EQ(news(server), "bound_again");
  CHECK_EQ(news(server), "nothing");
}

TEST(good_clients_are_served_among_random_ones) {
  DrivenServer server(
      {.zeromq = {"tcp://127.0.0.1:0"}, .max_message = 500, .handshake_ms = 20, .ping_ms = 20, .mute_ms = 60});
  RandomStreams random(12);
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
