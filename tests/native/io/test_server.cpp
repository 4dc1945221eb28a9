// The clients' sockets against raw ones, mostly by the local transport's protocol: what clients may send, what they may
// cost, and how they end. What is ZeroMQ's own is in test_zmtp_server.cpp.
#include "io/server.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "check.h"
#include "server_fixture.h"

namespace {

using namespace std::string_view_literals;
using ull::Sent;
using ull::test::Client;
using ull::test::DrivenServer;
using ull::test::Folder;
using ull::test::kLocalHello;
using ull::test::local_message;
using ull::test::Received;

// A client by the local transport.
class Peer : public Client {
 public:
  explicit Peer(const DrivenServer& server, const std::string& first = kLocalHello) : Client(server.local(), first) {}

  // As much as there is room for, without waiting.
  size_t send_some(const std::string& text) {
    const ssize_t sent = ::send(fd(), text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    return sent < 0 ? 0 : static_cast<size_t>(sent);
  }
  std::string receive_message() {
    const std::string header = receive(4);
    if (header.size() < 4) return "hung up";
    uint32_t length = 0;
    for (int i = 3; i >= 0; --i) length = length << 8 | static_cast<uint8_t>(header[static_cast<size_t>(i)]);
    return receive(length);
  }
};

TEST(messages_and_answers) {
  DrivenServer server;
  Peer peer(server);
  CHECK(peer.connected());
  peer.send(local_message("request") + local_message(""));
  const Received first = server.receive();
  CHECK_EQ(first.what, "request");
  REQUIRE(first.client.size() == ull::Server::kIdentity);
  CHECK_EQ(first.client.substr(0, 2), std::string("\0L", 2));
  CHECK_EQ(server.receive().what, "");
  CHECK(server.send(first.client, "answer") == Sent::kOk);
  CHECK(server.send(first.client, "") == Sent::kOk);
  CHECK_EQ(peer.receive(8), kLocalHello);
  CHECK_EQ(peer.receive_message(), "answer");
  CHECK_EQ(peer.receive_message(), "");
  CHECK(server.send("nobody", "x") == Sent::kGone);
  std::string other = first.client;
  other[1] = 'Z';  // of another protocol
  CHECK(server.send(other, "x") == Sent::kGone);
  CHECK(server.send(std::string("\0L\0\0\0\0\0\0\0\0", 10), "x") == Sent::kGone);
  CHECK(server.send(std::string("\0L\377\377\377\377\377\377\377\377", 10), "x") == Sent::kGone);
}

TEST(bytes_may_come_one_at_a_time) {
  DrivenServer server;
  Peer peer(server, "");
  const std::string text = kLocalHello + local_message("a request that dribbles") + local_message("and another");
  std::vector<std::string> payloads;
  for (const char byte : text) {
    peer.send({byte});
    for (int i = 0; i < 3; ++i) {
      if (const auto received = server.turn()) payloads.push_back(received->what);
    }
  }
  server.until([&] { return payloads.size() + server.socket.ready() >= 2; });
  while (payloads.size() < 2) payloads.push_back(server.receive().what);
  CHECK_EQ(payloads[0], "a request that dribbles");
  CHECK_EQ(payloads[1], "and another");
}

TEST(messages_of_every_size_arrive_whole) {
  DrivenServer server({.max_message = 3'000'000});
  Peer peer(server);
  const std::vector<size_t> sizes = {0, 1, 4091, 4092, 4093, 4096, 5000, 70'000, 300'000, 3'000'000, 10, 8188};
  std::thread writer([&] {
    for (const size_t size : sizes) peer.send(local_message(std::string(size, static_cast<char>('a' + size % 26))));
  });
  for (const size_t size : sizes) {
    CHECK(server.receive().what == std::string(size, static_cast<char>('a' + size % 26)));
  }
  writer.join();
}

// It goes as it arrives, and its request is refused by its id.
TEST(a_message_that_is_too_long_is_thrown_away) {
  DrivenServer server({.max_message = 1000});
  Peer peer(server);
  const std::string head = "\x81\xa2id\x2a";  // {"id": 42, ...}
  std::thread writer([&] {
    for (const size_t size : {size_t{1001}, size_t{5000}, size_t{3'000'000}}) {
      peer.send(local_message(head + std::string(size - head.size(), 'x')) + local_message("after"));
    }
    for (const char byte : local_message(std::string(1001, 'x'))) peer.send(std::string(1, byte));
    peer.send(local_message("last"));
  });
  for (int i = 0; i < 3; ++i) {
    const Received refused = server.receive();
    CHECK_EQ(refused.what, ull::kTooLong);
    CHECK(refused.id == 42U);
    CHECK_EQ(server.receive().what, "after");
  }
  const Received dribbled = server.receive();
  CHECK_EQ(dribbled.what, ull::kTooLong);
  CHECK(!dribbled.id);
  CHECK_EQ(server.receive().what, "last");
  writer.join();
  CHECK_EQ(server.socket.counts().dropped, 0U);
}

TEST(a_client_that_announces_too_much_is_dropped) {
  DrivenServer server({.max_message = 1000});
  for (const std::string_view header : {"\x01\x00\x00\x01"sv, "\xff\xff\xff\xff"sv}) {
    Peer peer(server);
    peer.send(local_message(std::string(1000, 'x')));
    CHECK_EQ(server.receive().what.size(), 1000U);
    const size_t before = server.gone.size();
    peer.send(std::string(header));
    server.until([&] { return server.gone.size() > before; });
    CHECK_EQ(peer.receive(8), kLocalHello);
    CHECK_EQ(peer.receive_message(), "hung up");
  }
  CHECK_EQ(server.socket.counts().dropped, 2U);
}

TEST(what_is_announced_and_not_sent_takes_no_room) {
  constexpr size_t kChunk = ull::Input::kChunk;
  ull::Input input;
  CHECK_EQ(input.growth(), 0U);
  input.want(size_t{1} << 30);
  while (input.filled() < 100'000) {
    const size_t growth = input.growth();
    const size_t large = input.large();
    const auto room = input.room();
    CHECK_EQ(input.large(), large + growth - (large + growth < kChunk && growth == kChunk ? kChunk : 0));
    REQUIRE(!room.empty());
    input.add(std::min<size_t>(room.size(), 1000));
    CHECK(kChunk + input.large() <= std::max(2 * input.filled(), kChunk));
  }
}

TEST(input_is_taken_from_its_beginning) {
  ull::Input input;
  const auto feed = [&](size_t size, char byte) {
    const auto room = input.room();
    REQUIRE(room.size() >= size);
    std::fill_n(room.begin(), size, static_cast<uint8_t>(byte));
    input.add(size);
  };
  feed(4000, 'a');
  input.drop(3999);
  feed(96, 'b');  // to the chunk's end
  input.want(200);
  CHECK_EQ(input.growth(), 0U);
  feed(3999, 'c');  // what is left has moved to the front
  REQUIRE(input.filled() == 4096);
  CHECK(input.bytes()[0] == 'a' && input.bytes()[1] == 'b' && input.bytes()[97] == 'c');
  input.want(5000);
  CHECK_EQ(input.growth(), 904U);  // never beyond the end of what is wanted
  CHECK_EQ(input.room().size(), 904U);
  input.add(904);
  CHECK_EQ(input.large(), 904U);
  input.drop(5000);
  CHECK_EQ(input.large(), 0U);
}

TEST(wrong_hellos_are_dropped) {
  DrivenServer server;
  const std::vector<std::string> hellos = {"ull2", std::string("ull1\1\0\0\0", 8), "GET / HTTP/1.1\r\n\r\n",
                                           std::string(5000, '\0'), std::string("\0", 1)};
  for (const std::string& hello : hellos) {
    Peer peer(server, "");
    peer.send(hello);
    CHECK_EQ(server.socket.counts().dropped, static_cast<uint64_t>(&hello - hellos.data()));
    server.until([&] { return server.socket.counts().dropped == static_cast<uint64_t>(&hello - hellos.data()) + 1; });
  }
  CHECK(server.gone.empty());  // they never had an identity
  CHECK_EQ(server.socket.counts().clients, 0U);
}

TEST(a_hello_that_does_not_come_is_not_waited_for) {
  DrivenServer server({.handshake_ms = 50});
  Peer mute(server, "");
  Peer half(server, "");
  half.send("ull1");
  Peer good(server);
  server.until([&] { return server.socket.counts().dropped == 2; });
  CHECK_EQ(mute.receive(8), kLocalHello);
  CHECK_EQ(mute.receive(1), "");
  CHECK_EQ(half.receive(8).size(), 8U);
  CHECK_EQ(half.receive(1), "");
  good.send(local_message("still here"));
  CHECK_EQ(server.receive().what, "still here");
}

TEST(a_hang_up_is_noticed_and_what_was_unread_is_dropped) {
  DrivenServer server;
  auto peer = std::make_unique<Peer>(server);
  peer->send(local_message("request"));
  const std::string client = server.receive().client;
  peer->send(local_message("never read") + local_message("never read"));
  peer.reset();
  server.until([&] { return !server.gone.empty(); });
  CHECK_EQ(server.gone.front(), client);
  CHECK(server.send(client, "x") == Sent::kGone);
  CHECK(!server.turn());
  Peer next(server);  // has the same place, and another identity
  next.send(local_message("hello"));
  CHECK(server.receive().client != client);
  CHECK(server.send(client, "x") == Sent::kGone);
  Peer half(server);  // half of a hang-up is one
  half.send(local_message("hello"));
  (void)server.receive();
  shutdown(half.fd(), SHUT_WR);
  server.until([&] { return server.gone.size() == 2; });
}

TEST(a_send_finds_out_first) {
  DrivenServer server;
  auto peer = std::make_unique<Peer>(server);
  peer->send(local_message("request"));
  const std::string client = server.receive().client;
  peer.reset();
  CHECK(server.send(client, "x") == Sent::kGone);
  const auto gone = server.socket.gone();
  CHECK_EQ(std::string(gone.begin(), gone.end()), client);
}

TEST(clients_take_turns) {
  DrivenServer server;
  Peer greedy(server);
  Peer modest(server);
  std::string flood;
  for (int i = 0; i < 500; ++i) flood += local_message("greedy");
  greedy.send(flood);
  (void)server.receive();
  modest.send(local_message("modest"));
  int between = 0;
  while (server.receive().what != "modest") ++between;
  CHECK(between <= 3);  // one before its event was seen, one in hand, one turn
}

TEST(what_is_not_received_stays_in_the_kernel) {
  DrivenServer server;
  Peer peer(server);
  peer.send(local_message("first"));
  (void)server.receive();
  const std::string more = local_message(std::string(10'000, 'x'));
  size_t taken = 0;
  for (int stuck = 0; stuck < 50;) {  // the kernel takes some hundred kilobytes, and then no more
    const size_t sent = peer.send_some(more);
    taken += sent;
    stuck = sent == 0 ? stuck + 1 : 0;
    server.socket.tend();
    REQUIRE(taken < 16'000'000);
  }
  CHECK(server.socket.ready());
  CHECK_EQ(server.receive().what.size(), 10'000U);
}

TEST(a_client_that_does_not_read_is_blocked_and_catches_up) {
  DrivenServer server;
  Peer peer(server);
  peer.send(local_message("request"));
  const std::string client = server.receive().client;
  const std::string small(60, 's');
  const std::string large(500'000, 'l');  // of which the kernel takes a part
  int sent = 0;
  while (server.send(client, small) == Sent::kOk) REQUIRE(++sent < 100'000);
  CHECK(sent > 0);
  CHECK_EQ(peer.receive(8), kLocalHello);
  for (int i = 0; i < sent; ++i) CHECK_EQ(peer.receive_message(), small);
  CHECK(server.send(client, large) == Sent::kOk);
  CHECK(server.send(client, large) == Sent::kBlocked);
  std::string got;
  std::thread reader([&] { got = peer.receive_message(); });
  Sent then = Sent::kBlocked;
  server.until([&] { return (then = server.send(client, "after")) != Sent::kBlocked; });
  reader.join();
  CHECK(then == Sent::kOk);
  CHECK(got == large);
  CHECK_EQ(peer.receive_message(), "after");
}

TEST(the_rest_of_a_frame_follows_without_a_further_send) {
  DrivenServer server;
  Peer peer(server);
  peer.send(local_message("request"));
  const std::string client = server.receive().client;
  const std::string large(2'000'000, 'l');
  CHECK(server.send(client, large) == Sent::kOk);
  CHECK_EQ(peer.receive(8), kLocalHello);
  std::atomic<bool> whole{false};
  std::thread reader([&] {
    CHECK(peer.receive_message() == large);
    whole = true;
  });
  server.until([&] { return whole.load(); });
  reader.join();
}

TEST(closing_gives_what_was_sent_time_to_leave) {
  for (const bool reads : {true, false}) {
    DrivenServer server({.linger_ms = reads ? 20'000 : 30});
    Peer peer(server);
    peer.send(local_message("request"));
    const std::string client = server.receive().client;
    const std::string large(2'000'000, 'l');
    CHECK(server.send(client, large) == Sent::kOk);
    CHECK_EQ(peer.receive(8), kLocalHello);
    std::string got;
    std::thread reader([&] {
      if (reads) got = peer.receive_message();
    });
    server.socket.close();
    reader.join();
    CHECK(!reads || got == large);
    server.socket.close();
  }
}

// libzmq leaves unread what it had no room for when its peer's descriptor closes (POLLHUP), but not at an end of file.
TEST(a_local_client_that_reads_late_is_not_hung_up_on) {
  DrivenServer server({.linger_ms = 20'000});
  Peer peer(server);
  peer.send(local_message("request"));
  const std::string client = server.receive().client;
  const std::string last(50'000, 'l');
  CHECK(server.send(client, last) == Sent::kOk);  // the kernel has room for all of it
  std::thread closing([&] { server.socket.close(); });
  pollfd item{peer.fd(), POLLRDHUP, 0};
  CHECK_EQ(poll(&item, 1, 20'000), 1);  // no more will come,
  CHECK_EQ(item.revents & POLLHUP, 0);  // ... but the connection stands while something is unread
  item.events = 0;
  CHECK_EQ(poll(&item, 1, 50), 0);
  CHECK_EQ(peer.receive(8), kLocalHello);
  CHECK(peer.receive_message() == last);
  closing.join();
  CHECK_EQ(peer.receive(1), "");
}

TEST(a_thousand_clients) {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  const size_t count = std::min<size_t>(1000, limit.rlim_cur / 2 - 50);
  DrivenServer server({.max_connections = static_cast<int>(count)});
  std::vector<std::unique_ptr<Peer>> peers;
  std::vector<std::string> clients;
  for (size_t i = 0; i < count; ++i) {
    peers.push_back(std::make_unique<Peer>(server));
    peers.back()->send(local_message(std::to_string(i)));
    const Received received = server.receive();
    CHECK_EQ(received.what, std::to_string(i));
    clients.push_back(received.client);
  }
  CHECK_EQ(server.socket.counts().clients, count);
  Peer late(server);  // no room: told at once
  server.until([&] { return server.socket.counts().refused == 1; });
  CHECK_EQ(late.receive(8), "");
  for (size_t i = 0; i < count; ++i) CHECK(server.send(clients[i], clients[i]) == Sent::kOk);
  for (size_t i = 0; i < count; ++i) {
    CHECK_EQ(peers[i]->receive(8), kLocalHello);
    CHECK_EQ(peers[i]->receive_message(), clients[i]);
  }
  peers.clear();
  server.until([&] { return server.gone.size() == count; });
  CHECK_EQ(server.socket.counts().clients, 0U);
  Peer again(server);
  again.send(local_message("room again"));
  CHECK_EQ(server.receive().what, "room again");
}

TEST(unfinished_messages_have_a_budget) {
  DrivenServer server({.max_message = 100'000});
  std::vector<std::unique_ptr<Peer>> peers;
  const std::string most = local_message(std::string(100'000, 'x')).substr(0, 90'000);
  for (int i = 0; i < 20; ++i) {
    peers.push_back(std::make_unique<Peer>(server));
    peers.back()->send(most);
    for (int turn = 0; turn < 20; ++turn) CHECK(!server.turn());
  }
  CHECK(server.socket.counts().clients <= 9);
  CHECK_EQ(server.socket.counts().clients + server.gone.size(), 20U);
  peers.back()->send(std::string(10'004, 'x'));  // the newest is not the one that paid
  CHECK_EQ(server.receive().what.size(), 100'000U);
}

TEST(no_descriptors_left_is_survived_without_spinning) {
  DrivenServer server;
  Peer first(server);
  first.send(local_message("first"));
  (void)server.receive();
  Peer second(server);
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  const int next = dup(first.fd());
  close(next);
  const rlimit none{static_cast<rlim_t>(next), limit.rlim_max};
  setrlimit(RLIMIT_NOFILE, &none);
  // What one look cannot accept is not an event for a while.
  pollfd item{server.socket.fd(), POLLIN, 0};
  CHECK_EQ(poll(&item, 1, 10'000), 1);
  server.socket.tend();
  CHECK_EQ(poll(&item, 1, 0), 0);
  first.send(local_message("goes on"));
  CHECK_EQ(server.receive().what, "goes on");
  setrlimit(RLIMIT_NOFILE, &limit);
  second.send(local_message("second"));
  CHECK_EQ(server.receive().what, "second");
}

TEST(connections_leave_descriptors_for_the_rest) {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  const rlimit few{64, limit.rlim_max};
  setrlimit(RLIMIT_NOFILE, &few);
  {
    DrivenServer server;
    std::vector<std::unique_ptr<Peer>> peers;
    for (int i = 0; i < 40; ++i) peers.push_back(std::make_unique<Peer>(server));
    setrlimit(RLIMIT_NOFILE, &limit);
    server.until([&] { return server.socket.counts().accepted + server.socket.counts().refused >= 26; });
    CHECK(server.socket.counts().accepted <= 32);
  }
  setrlimit(RLIMIT_NOFILE, &limit);
}

TEST(a_file_that_was_deleted_is_made_again) {
  DrivenServer server;
  Peer first(server);
  first.send(local_message("first"));
  (void)server.receive();
  server.socket.look_at_files();
  CHECK_EQ(unlink(server.folder.path("local").c_str()), 0);
  CHECK(!Peer(server, "").connected());
  server.socket.look_at_files();
  Peer second(server);
  second.send(local_message("second"));
  CHECK_EQ(server.receive().what, "second");
  first.send(local_message("goes on"));
  CHECK_EQ(server.receive().what, "goes on");
}

TEST(endpoints_are_checked) {
  Folder folder;
  const auto refused = [](const std::string& endpoint, const std::string& why) {
    try {
      const ull::Listener listener(endpoint);
      CHECK_EQ(endpoint, "refused");
    } catch (const std::runtime_error& error) {
      CHECK_EQ(std::string(error.what()), endpoint + ": " + why);
    }
  };
  const ull::Listener path("ipc://" + folder.path("local"));
  CHECK(!path.tcp());
  refused("ipc://" + folder.path("local"), "Address already in use");
  refused("ipc://" + std::string(200, 'x'), "File name too long");
  refused("ipc:///nonexistent/s", "No such file or directory");
  for (const char* wrong : {"", "ipc://", "udp://127.0.0.1:1"}) refused(wrong, "Invalid argument");
  for (const char* wrong : {"tcp://127.0.0.1", "tcp://:80"}) refused(wrong, "it has no port");
  for (const char* wrong : {"tcp://127.0.0.1:", "tcp://127.0.0.1:x", "tcp://127.0.0.1:65536", "tcp://127.0.0.1:99999",
                            "tcp://127.0.0.1:-1", "tcp://[::1]:70000"}) {
    refused(wrong, "a port is 0 to 65535, or *");
  }
  CHECK_THROWS(ull::Listener("tcp://nobody.invalid:0"), std::runtime_error);
  for (const char* free : {"tcp://127.0.0.1:*", "tcp://127.0.0.1:0", "tcp://lo:0"}) {
    const ull::Listener listener(free);
    CHECK(listener.tcp());
    CHECK(listener.endpoint().starts_with("tcp://127.0.0.1:"));
    CHECK(!listener.endpoint().ends_with(":0"));
    refused(listener.endpoint(), "Address already in use");
  }
  CHECK(ull::Listener("tcp://*:0").endpoint().starts_with("tcp://0.0.0.0:"));
  const ull::Listener abstract("ipc://@ull-test-" + std::to_string(getpid()));
  CHECK(abstract.state() == ull::SocketFile::State::kOurs);
}

TEST(vanished_machines_are_noticed_by_the_kernel) {
  const ull::Listener listener("tcp://127.0.0.1:0");
  const auto option = [&](int level, int name) {
    int value = -1;
    socklen_t size = sizeof(value);
    getsockopt(listener.fd(), level, name, &value, &size);
    return value;
  };
  CHECK_EQ(option(SOL_SOCKET, SO_KEEPALIVE), 1);
  CHECK(option(IPPROTO_TCP, TCP_KEEPIDLE) + option(IPPROTO_TCP, TCP_KEEPINTVL) * option(IPPROTO_TCP, TCP_KEEPCNT) <= 5);
  CHECK_EQ(option(IPPROTO_TCP, TCP_USER_TIMEOUT), 5000);
  CHECK_EQ(option(IPPROTO_TCP, TCP_NODELAY), 1);
}

// Streams cut and damaged anywhere, many at once: others are served, nothing is left behind.
TEST(storm) {
  DrivenServer server({.max_message = 20'000});
  uint32_t state = 7;
  const auto below = [&](uint32_t limit) { return (state = state * 1664525U + 1013904223U) / 65536 % limit; };
  Peer good(server);
  uint64_t served = 0;
  for (int round = 0; round < 400; ++round) {
    std::string stream = kLocalHello;
    for (uint32_t i = below(5); i-- > 0;) stream += local_message(std::string(below(15'000), 'b'));
    for (uint32_t i = below(3); i-- > 0;) stream[below(static_cast<uint32_t>(stream.size()))] ^= 1 << below(8);
    stream.resize(below(static_cast<uint32_t>(stream.size()) + 1));
    Peer bad(server, "");
    bad.send(stream);
    good.send(local_message("good"));
    for (bool seen = false; !seen;) {
      const std::optional<Received> received = server.turn();
      if (received && received->what == "good") {
        ++served;
        seen = true;
        if (below(2) == 0) CHECK(server.send(received->client, "answer") == Sent::kOk);
      } else if (received) {
        (void)server.send(received->client, "answer");
      }
    }
  }
  CHECK_EQ(served, 400U);
  server.until([&] { return server.socket.counts().clients == 1; });
}

}  // namespace
