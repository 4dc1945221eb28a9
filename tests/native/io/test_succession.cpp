// Clients' sockets that one server hands to another: what was half said on either side is said to its end, and a server
// that nobody succeeds goes on. Both are in this process, with descriptors of their own, as two processes have them.
#include <fcntl.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "protocol/saved_state.h"
#include "server_fixture.h"
#include "zmtp_bytes.h"

namespace {

using namespace ull::test;
using ull::Sent;
using ull::Server;
using ull::StateReader;
using ull::StateWriter;
using Estate = ull::Transport::Estate;
using Options = Server::Options;

std::string endpoint_of(bool local, const DrivenServer& server) { return local ? server.local() : server.at(); }
std::string hello(bool local) { return local ? kLocalHello : kHandshake; }
std::string framed(bool local, const std::string& payload) { return local ? local_message(payload) : message(payload); }

// As another process would have it: descriptors of its own for the same sockets.
Estate sent(Estate estate) {
  for (auto* handed : {&estate.doors, &estate.clients}) {
    for (auto& each : *handed) each.fd = fcntl(each.fd, F_DUPFD_CLOEXEC, 0);
  }
  return estate;
}

// A server with doors of its own, until it takes over those of another.
struct Successor : DrivenServer {
  Successor() : DrivenServer({.linger_ms = 0}) {}  // clients here do not read to the end

  std::vector<std::string> succeed(DrivenServer& before) {
    std::vector<std::string> identities;
    for (const auto& identity : socket.take_over(sent(before.socket.hand_over()))) {
      identities.push_back(text_of(identity));
    }
    before.socket.abandon();
    return identities;
  }
};

TEST(who_is_connected_notices_nothing) {
  for (const bool local : {false, true}) {
    DrivenServer before;
    Client client(endpoint_of(local, before), hello(local) + framed(local, "one"));
    const Received first = before.receive();
    (void)client.receive(local ? kLocalHello.size() : kTheirs.size());
    Successor after;
    const auto identities = after.succeed(before);
    CHECK_EQ(identities.size(), 1U);
    CHECK(after.send(identities[0], "answer") == Sent::kOk);  // of whatever waited there
    CHECK_EQ(client.receive(framed(local, "answer").size()), framed(local, "answer"));
    CHECK(client.send(framed(local, "two")));
    const Received second = after.receive();
    CHECK_EQ(second.what, "two");
    CHECK_EQ(second.client, identities[0]);
    CHECK_EQ(after.socket.counts().clients, 1U);
    CHECK_EQ(after.socket.counts().local_clients, local ? 1U : 0U);
    client.hang_up();
    after.until([&] { return !after.gone.empty(); });
    CHECK_EQ(after.gone.front(), identities[0]);
  }
}

TEST(a_message_and_a_handshake_may_be_cut_anywhere) {
  for (const bool local : {false, true}) {
    const std::string payload(9'000, 'x');
    const std::string text = hello(local) + framed(local, payload) + framed(local, "next");
    for (size_t cut = 0; cut < text.size(); cut += cut < 150 || cut + 40 > text.size() ? 1 : 997) {
      DrivenServer before;
      Client client(endpoint_of(local, before), text.substr(0, cut));
      std::vector<std::string> messages;
      before.until([&] { return before.socket.counts().clients == 1; });
      for (int quiet = 0; quiet < 2;) {
        const auto received = before.turn();
        if (received) messages.push_back(received->what);
        quiet = received || before.socket.ready() ? 0 : quiet + 1;
      }
      Successor after;
      (void)after.succeed(before);
      CHECK(client.send(text.substr(cut)));
      while (messages.size() < 2) messages.push_back(after.receive().what);
      CHECK(messages[0] == payload);
      CHECK_EQ(messages[1], "next");
    }
  }
}

TEST(what_a_client_has_not_taken_of_a_frame_comes_from_the_successor) {
  for (const bool local : {false, true}) {
    DrivenServer before;
    Client client(endpoint_of(local, before), hello(local) + framed(local, "request"));
    const Received request = before.receive();
    const std::string large(300'000, 'a');
    std::string wanted = local ? kLocalHello : kTheirs;
    while (before.send(request.client, large) == Sent::kOk) wanted += framed(local, large);
    Successor after;
    const auto identities = after.succeed(before);
    CHECK(after.send(identities[0], "behind it") == Sent::kBlocked);
    after.until([&] {
      (void)client.look();
      return after.send(identities[0], "behind it") == Sent::kOk;
    });
    wanted += framed(local, "behind it");
    CHECK(client.receive(wanted.size() - client.received.size()) == wanted.substr(client.received.size()));
  }
}

TEST(a_message_that_is_too_long_is_refused_by_the_successor_with_its_id) {
  for (const bool local : {false, true}) {
    DrivenServer before({.max_message = 4096});
    const std::string payload = kRequest + std::string(8'000, ' ');
    const std::string text = framed(local, payload);
    Client client(endpoint_of(local, before), hello(local) + text.substr(0, 6'000));
    before.until([&] { return before.socket.counts().clients == 1; });
    before.tend_for(2);
    for (int i = 0; i < 8; ++i) CHECK(!before.turn());
    Successor after;
    (void)after.succeed(before);
    CHECK(client.send(text.substr(6'000) + framed(local, "next")));
    const Received refused = after.receive();
    CHECK_EQ(refused.what, "too_long");
    CHECK(refused.id == 42U);
    CHECK_EQ(after.receive().what, "next");
  }
}

TEST(the_doors_are_the_same_ones) {
  DrivenServer before({.zeromq = {"tcp://127.0.0.1:0"}});
  const std::string tcp = before.at(1), ipc = before.at();
  Client waiting(tcp, kHandshake + message("early"));  // at the door, and nobody has opened
  Successor after;
  const std::string own = after.at();
  (void)after.succeed(before);
  CHECK_EQ(after.socket.endpoints().size(), 2U);
  CHECK_EQ(after.at(0), ipc);
  CHECK_EQ(after.at(1), tcp);
  CHECK_EQ(after.receive().what, "early");
  Client late(ipc, kHandshake + message("late"));
  CHECK_EQ(after.receive().what, "late");
  CHECK(!Client(own, "").connected());
}

TEST(the_file_of_a_door_is_watched_as_before) {
  DrivenServer before;
  Successor after;
  (void)after.succeed(before);
  ull::Transport::EndpointNews news;
  after.socket.look_at_files();
  CHECK(!after.socket.news(news));
  unlink(before.folder.path("zmq").c_str());
  after.socket.look_at_files();
  CHECK(after.socket.news(news));
  CHECK_EQ(news.what, "bound_again");
  Client client(after.at(), kHandshake + message("through the new file"));
  CHECK_EQ(after.receive().what, "through the new file");
}

TEST(without_a_successor_it_goes_on) {
  DrivenServer server;
  Client client(server.at(), kHandshake + message("one"));
  const Received first = server.receive();
  CHECK(client.send(message("two").substr(0, 9)));
  server.tend_for(2);
  const Estate estate = sent(server.socket.hand_over());
  for (const auto* handed : {&estate.doors, &estate.clients}) {
    for (const auto& each : *handed) close(each.fd);
  }
  CHECK(client.send(message("two").substr(9)));
  CHECK_EQ(server.receive().what, "two");
  CHECK(server.send(first.client, "answer") == Sent::kOk);
}

TEST(what_is_no_estate_is_not_taken) {
  DrivenServer before;
  Client client(before.at(), kHandshake + message("one"));
  (void)before.receive();
  const Estate good = before.socket.hand_over();
  const size_t size = good.clients[0].state.size();
  for (size_t cut = 0; cut < size; cut += cut < 200 ? 1 : 61) {
    Estate bad = sent(good);
    bad.clients[0].state.resize(cut);
    Successor after;
    CHECK_THROWS((void)after.socket.take_over(bad), std::runtime_error);
  }
  Estate longer = sent(good);
  longer.clients[0].state.push_back(0);
  Successor after;
  CHECK_THROWS((void)after.socket.take_over(longer), std::runtime_error);
  Estate no_door = sent(good);
  no_door.doors[0].fd = no_door.clients[0].fd;
  Successor another;
  CHECK_THROWS((void)another.socket.take_over(no_door), std::runtime_error);
  DrivenServer small({.max_connections = 1, .linger_ms = 0});
  Client second(before.at(), kHandshake + message("two"));
  (void)before.receive();
  CHECK_THROWS((void)small.socket.take_over(sent(before.socket.hand_over())), std::runtime_error);
}

TEST(states_are_read_as_they_were_written) {
  StateWriter writer;
  writer.number(UINT64_MAX);
  writer.number(1);
  writer.text("text");
  writer.bytes({});
  const std::vector<uint8_t> bytes = writer.take();
  StateReader reader(bytes);
  CHECK_EQ(reader.number(), UINT64_MAX);
  CHECK(reader.flag());
  CHECK_EQ(reader.text(), "text");
  CHECK(!reader.whole());
  CHECK(reader.bytes().empty());
  CHECK(reader.whole());
  CHECK_EQ(reader.number(), 0U);
  CHECK(!reader.whole());
  StateReader lying(std::span<const uint8_t>(bytes).first(8));  // a length beyond the end
  CHECK(lying.bytes().empty());
  CHECK(!lying.whole());
}

}  // namespace
