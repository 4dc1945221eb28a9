// The clients' sockets against raw ones, mostly by the local transport's protocol: what clients may send, what they may
// cost, and how they end. What is ZeroMQ's own is in test_zmtp.cpp.
#include "io/server.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "fake_zmq.h"

namespace {

using namespace std::string_view_literals;
using ull::Sent;
using Options = ull::Server::Options;

const ull::zmq::Api kApi = ull::test::FakeZmq::api();
const std::string kHello("ull1\0\0\0\0", 8);

std::string framed(const std::string& payload) {
  std::string frame;
  for (int i = 0; i < 4; ++i) frame += static_cast<char>(payload.size() >> (8 * i) & 0xff);
  return frame + payload;
}

std::span<const uint8_t> bytes(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

class Folder {
 public:
  Folder() { CHECK(mkdtemp(name_) != nullptr); }
  ~Folder() {
    unlink(path().c_str());
    rmdir(name_);
  }
  [[nodiscard]] std::string path() const { return std::string(name_) + "/s.local"; }

 private:
  char name_[32] = "/tmp/ull-local-XXXXXX";
};

// A client's end: a blocking unix socket with a limit on every wait.
class Peer {
 public:
  explicit Peer(const std::string& path, bool hello = true) : fd_(socket(AF_UNIX, SOCK_STREAM, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, path.size());
    timeval limit{20, 0};
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    setsockopt(fd_, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit));
    connected_ = connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
    if (hello) send(kHello);
  }
  ~Peer() { hang_up(); }
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  void hang_up() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
  }
  void send(const std::string& text) {
    for (size_t sent = 0; sent < text.size();) {
      const ssize_t more = ::send(fd_, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
      if (more <= 0) return;
      sent += static_cast<size_t>(more);
    }
  }
  // As much as there is room for, without waiting.
  size_t send_some(const std::string& text) {
    const ssize_t sent = ::send(fd_, text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    return sent < 0 ? 0 : static_cast<size_t>(sent);
  }
  std::string receive(size_t size) {
    std::string text(size, '\0');
    size_t got = 0;
    while (got < size) {
      const ssize_t more = recv(fd_, text.data() + got, size - got, 0);
      if (more <= 0) break;
      got += static_cast<size_t>(more);
    }
    text.resize(got);
    return text;
  }
  std::string receive_message() {
    const std::string header = receive(4);
    if (header.size() < 4) return "hung up";
    uint32_t length = 0;
    for (int i = 3; i >= 0; --i) length = length << 8 | static_cast<uint8_t>(header[static_cast<size_t>(i)]);
    return receive(length);
  }
  [[nodiscard]] bool connected() const { return connected_; }
  [[nodiscard]] int fd() const { return fd_; }

 private:
  int fd_;
  bool connected_ = false;
};

struct Received {
  std::string client;
  std::string payload;
  bool too_long = false;
  bool has_id = false;
  uint64_t id = 0;
};

// The daemon's end, driven by the test as the io thread would.
class Server {
 public:
  explicit Server(Options options = {}) : socket(kApi, here(std::move(options), folder.path())) {
    kApi.msg_init(&message_.payload);
    socket.open();
  }
  ~Server() { kApi.msg_close(&message_.payload); }

  // One round of the io thread; waits up to a millisecond for an event if there is nothing to do.
  std::optional<Received> turn() {
    const bool received = socket.receive(message_);
    for (auto client = socket.gone(); !client.empty(); client = socket.gone()) {
      gone.emplace_back(client.begin(), client.end());
      socket.pop_gone();
    }
    if (!received) {
      pollfd item{socket.fd(), POLLIN, 0};
      if (!socket.ready()) poll(&item, 1, 1);
      return std::nullopt;
    }
    const auto client = message_.client();
    const auto payload = ull::zmq::bytes(kApi, message_.payload);
    return Received{{client.begin(), client.end()},
                    {payload.begin(), payload.end()},
                    message_.malformed == ull::kTooLong,
                    message_.has_id,
                    message_.id};
  }
  Received receive() {
    for (;;) {
      if (std::optional<Received> received = turn()) return *received;
    }
  }
  void until(const std::function<bool()>& condition) {
    while (!condition()) (void)turn();
  }
  Sent send(const std::string& client, const std::string& payload) {
    return socket.send(bytes(client), bytes(payload));
  }

  Folder folder;
  ull::Server socket;
  std::vector<std::string> gone;

 private:
  static Options here(Options options, const std::string& path) {
    options.local = {path};
    return options;
  }

  ull::Incoming message_;
};

TEST(messages_and_answers) {
  Server server;
  Peer peer(server.folder.path());
  CHECK(peer.connected());
  peer.send(framed("request") + framed(""));
  const Received first = server.receive();
  CHECK_EQ(first.payload, "request");
  REQUIRE(first.client.size() == ull::Server::kIdentity);
  CHECK_EQ(first.client.substr(0, 2), std::string("\0L", 2));
  CHECK_EQ(server.receive().payload, "");
  CHECK(server.send(first.client, "answer") == Sent::kOk);
  CHECK(server.send(first.client, "") == Sent::kOk);
  CHECK_EQ(peer.receive(8), kHello);
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
  Server server;
  Peer peer(server.folder.path(), false);
  const std::string text = kHello + framed("a request that dribbles") + framed("and another");
  std::vector<std::string> payloads;
  for (const char byte : text) {
    peer.send({byte});
    for (int i = 0; i < 3; ++i) {
      if (const auto received = server.turn()) payloads.push_back(received->payload);
    }
  }
  server.until([&] { return payloads.size() + server.socket.ready() >= 2; });
  while (payloads.size() < 2) payloads.push_back(server.receive().payload);
  CHECK_EQ(payloads[0], "a request that dribbles");
  CHECK_EQ(payloads[1], "and another");
}

TEST(messages_of_every_size_arrive_whole) {
  Server server({.max_message = 3'000'000});
  Peer peer(server.folder.path());
  const std::vector<size_t> sizes = {0, 1, 4091, 4092, 4093, 4096, 5000, 70'000, 300'000, 3'000'000, 10, 8188};
  std::thread writer([&] {
    for (const size_t size : sizes) peer.send(framed(std::string(size, static_cast<char>('a' + size % 26))));
  });
  for (const size_t size : sizes) {
    CHECK(server.receive().payload == std::string(size, static_cast<char>('a' + size % 26)));
  }
  writer.join();
}

// It goes as it arrives, and its request is refused by its id.
TEST(a_message_that_is_too_long_is_thrown_away) {
  Server server({.max_message = 1000});
  Peer peer(server.folder.path());
  const std::string head = "\x81\xa2id\x2a";  // {"id": 42, ...}
  std::thread writer([&] {
    for (const size_t size : {size_t{1001}, size_t{5000}, size_t{3'000'000}}) {
      peer.send(framed(head + std::string(size - head.size(), 'x')) + framed("after"));
    }
    for (const char byte : framed(std::string(1001, 'x'))) peer.send(std::string(1, byte));
    peer.send(framed("last"));
  });
  for (int i = 0; i < 3; ++i) {
    const Received refused = server.receive();
    CHECK(refused.too_long && refused.has_id && refused.payload.empty());
    CHECK_EQ(refused.id, 42U);
    CHECK_EQ(server.receive().payload, "after");
  }
  const Received dribbled = server.receive();
  CHECK(dribbled.too_long && !dribbled.has_id);
  CHECK_EQ(server.receive().payload, "last");
  writer.join();
  CHECK_EQ(server.socket.counts().dropped, 0U);
}

TEST(a_client_that_announces_too_much_is_dropped) {
  Server server({.max_message = 1000});
  for (const std::string_view header : {"\x01\x00\x00\x01"sv, "\xff\xff\xff\xff"sv}) {
    Peer peer(server.folder.path());
    peer.send(framed(std::string(1000, 'x')));
    CHECK_EQ(server.receive().payload.size(), 1000U);
    const size_t before = server.gone.size();
    peer.send(std::string(header));
    server.until([&] { return server.gone.size() > before; });
    CHECK_EQ(peer.receive(8), kHello);
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
  Server server;
  const std::vector<std::string> hellos = {"ull2", std::string("ull1\1\0\0\0", 8), "GET / HTTP/1.1\r\n\r\n",
                                           std::string(5000, '\0'), std::string("\0", 1)};
  for (const std::string& hello : hellos) {
    Peer peer(server.folder.path(), false);
    peer.send(hello);
    CHECK_EQ(server.socket.counts().dropped, static_cast<uint64_t>(&hello - hellos.data()));
    server.until([&] { return server.socket.counts().dropped == static_cast<uint64_t>(&hello - hellos.data()) + 1; });
  }
  CHECK(server.gone.empty());  // they never had an identity
  CHECK_EQ(server.socket.counts().clients, 0U);
}

TEST(a_hello_that_does_not_come_is_not_waited_for) {
  Server server({.handshake_ms = 50});
  Peer mute(server.folder.path(), false);
  Peer half(server.folder.path(), false);
  half.send("ull1");
  Peer good(server.folder.path());
  server.until([&] { return server.socket.counts().dropped == 2; });
  CHECK_EQ(mute.receive(8), kHello);
  CHECK_EQ(mute.receive(1), "");
  CHECK_EQ(half.receive(8).size(), 8U);
  CHECK_EQ(half.receive(1), "");
  good.send(framed("still here"));
  CHECK_EQ(server.receive().payload, "still here");
}

TEST(a_hang_up_is_noticed_and_what_was_unread_is_dropped) {
  Server server;
  auto peer = std::make_unique<Peer>(server.folder.path());
  peer->send(framed("request"));
  const std::string client = server.receive().client;
  peer->send(framed("never read") + framed("never read"));
  peer.reset();
  server.until([&] { return !server.gone.empty(); });
  CHECK_EQ(server.gone.front(), client);
  CHECK(server.send(client, "x") == Sent::kGone);
  CHECK(!server.turn());
  Peer next(server.folder.path());  // has the same place, and another identity
  next.send(framed("hello"));
  CHECK(server.receive().client != client);
  CHECK(server.send(client, "x") == Sent::kGone);
  Peer half(server.folder.path());  // half of a hang-up is one
  half.send(framed("hello"));
  (void)server.receive();
  shutdown(half.fd(), SHUT_WR);
  server.until([&] { return server.gone.size() == 2; });
}

TEST(a_send_finds_out_first) {
  Server server;
  auto peer = std::make_unique<Peer>(server.folder.path());
  peer->send(framed("request"));
  const std::string client = server.receive().client;
  peer.reset();
  CHECK(server.send(client, "x") == Sent::kGone);
  const auto gone = server.socket.gone();
  CHECK_EQ(std::string(gone.begin(), gone.end()), client);
}

TEST(clients_take_turns) {
  Server server;
  Peer greedy(server.folder.path());
  Peer modest(server.folder.path());
  std::string flood;
  for (int i = 0; i < 500; ++i) flood += framed("greedy");
  greedy.send(flood);
  (void)server.receive();
  modest.send(framed("modest"));
  int between = 0;
  while (server.receive().payload != "modest") ++between;
  CHECK(between <= 3);  // one before its event was seen, one in hand, one turn
}

TEST(what_is_not_received_stays_in_the_kernel) {
  Server server;
  Peer peer(server.folder.path());
  peer.send(framed("first"));
  (void)server.receive();
  const std::string more = framed(std::string(10'000, 'x'));
  size_t taken = 0;
  for (int stuck = 0; stuck < 50;) {  // the kernel takes some hundred kilobytes, and then no more
    const size_t sent = peer.send_some(more);
    taken += sent;
    stuck = sent == 0 ? stuck + 1 : 0;
    server.socket.tend();
    REQUIRE(taken < 16'000'000);
  }
  CHECK(server.socket.ready());
  CHECK_EQ(server.receive().payload.size(), 10'000U);
}

TEST(a_client_that_does_not_read_is_blocked_and_catches_up) {
  Server server;
  Peer peer(server.folder.path());
  peer.send(framed("request"));
  const std::string client = server.receive().client;
  const std::string small(60, 's');
  const std::string large(500'000, 'l');  // of which the kernel takes a part
  int sent = 0;
  while (server.send(client, small) == Sent::kOk) REQUIRE(++sent < 100'000);
  CHECK(sent > 0);
  CHECK_EQ(peer.receive(8), kHello);
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
  Server server;
  Peer peer(server.folder.path());
  peer.send(framed("request"));
  const std::string client = server.receive().client;
  const std::string large(2'000'000, 'l');
  CHECK(server.send(client, large) == Sent::kOk);
  CHECK_EQ(peer.receive(8), kHello);
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
    Server server({.linger_ms = reads ? 20'000 : 30});
    Peer peer(server.folder.path());
    peer.send(framed("request"));
    const std::string client = server.receive().client;
    const std::string large(2'000'000, 'l');
    CHECK(server.send(client, large) == Sent::kOk);
    CHECK_EQ(peer.receive(8), kHello);
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

TEST(a_thousand_clients) {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  const size_t count = std::min<size_t>(1000, limit.rlim_cur / 2 - 50);
  Server server({.max_connections = static_cast<int>(count)});
  std::vector<std::unique_ptr<Peer>> peers;
  std::vector<std::string> clients;
  for (size_t i = 0; i < count; ++i) {
    peers.push_back(std::make_unique<Peer>(server.folder.path()));
    peers.back()->send(framed(std::to_string(i)));
    const Received received = server.receive();
    CHECK_EQ(received.payload, std::to_string(i));
    clients.push_back(received.client);
  }
  CHECK_EQ(server.socket.counts().clients, count);
  Peer late(server.folder.path());  // no room: told at once
  server.until([&] { return server.socket.counts().refused == 1; });
  CHECK_EQ(late.receive(8), "");
  for (size_t i = 0; i < count; ++i) CHECK(server.send(clients[i], clients[i]) == Sent::kOk);
  for (size_t i = 0; i < count; ++i) {
    CHECK_EQ(peers[i]->receive(8), kHello);
    CHECK_EQ(peers[i]->receive_message(), clients[i]);
  }
  peers.clear();
  server.until([&] { return server.gone.size() == count; });
  CHECK_EQ(server.socket.counts().clients, 0U);
  Peer again(server.folder.path());
  again.send(framed("room again"));
  CHECK_EQ(server.receive().payload, "room again");
}

TEST(unfinished_messages_have_a_budget) {
  Server server({.max_message = 100'000});
  std::vector<std::unique_ptr<Peer>> peers;
  const std::string most = framed(std::string(100'000, 'x')).substr(0, 90'000);
  for (int i = 0; i < 20; ++i) {
    peers.push_back(std::make_unique<Peer>(server.folder.path()));
    peers.back()->send(most);
    for (int turn = 0; turn < 20; ++turn) CHECK(!server.turn());
  }
  CHECK(server.socket.counts().clients <= 9);
  CHECK_EQ(server.socket.counts().clients + server.gone.size(), 20U);
  peers.back()->send(std::string(10'004, 'x'));  // the newest is not the one that paid
  CHECK_EQ(server.receive().payload.size(), 100'000U);
}

TEST(no_descriptors_left_is_survived_without_spinning) {
  Server server;
  Peer first(server.folder.path());
  first.send(framed("first"));
  (void)server.receive();
  Peer second(server.folder.path());
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
  first.send(framed("goes on"));
  CHECK_EQ(server.receive().payload, "goes on");
  setrlimit(RLIMIT_NOFILE, &limit);
  second.send(framed("second"));
  CHECK_EQ(server.receive().payload, "second");
}

TEST(connections_leave_descriptors_for_the_rest) {
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  const rlimit few{64, limit.rlim_max};
  setrlimit(RLIMIT_NOFILE, &few);
  {
    Server server;
    std::vector<std::unique_ptr<Peer>> peers;
    for (int i = 0; i < 40; ++i) peers.push_back(std::make_unique<Peer>(server.folder.path()));
    setrlimit(RLIMIT_NOFILE, &limit);
    server.until([&] { return server.socket.counts().accepted + server.socket.counts().refused >= 26; });
    CHECK(server.socket.counts().accepted <= 32);
  }
  setrlimit(RLIMIT_NOFILE, &limit);
}

TEST(a_file_that_was_deleted_is_made_again) {
  Server server;
  Peer first(server.folder.path());
  first.send(framed("first"));
  (void)server.receive();
  server.socket.look_at_files();
  CHECK_EQ(unlink(server.folder.path().c_str()), 0);
  CHECK(!Peer(server.folder.path()).connected());
  server.socket.look_at_files();
  Peer second(server.folder.path());
  second.send(framed("second"));
  CHECK_EQ(server.receive().payload, "second");
  first.send(framed("goes on"));
  CHECK_EQ(server.receive().payload, "goes on");
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
  const ull::Listener path("ipc://" + folder.path());
  CHECK(!path.tcp());
  refused("ipc://" + folder.path(), "Address already in use");
  refused("ipc://" + std::string(200, 'x'), "File name too long");
  refused("ipc:///nonexistent/s", "No such file or directory");
  for (const char* wrong : {"", "ipc://", "udp://127.0.0.1:1", "tcp://127.0.0.1", "tcp://127.0.0.1:", "tcp://:80",
                            "tcp://127.0.0.1:x", "tcp://127.0.0.1:70000", "tcp://127.0.0.1:-1"}) {
    refused(wrong, "Invalid argument");
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
  Server server({.max_message = 20'000});
  uint32_t state = 7;
  const auto below = [&](uint32_t limit) { return (state = state * 1664525U + 1013904223U) / 65536 % limit; };
  Peer good(server.folder.path());
  uint64_t served = 0;
  for (int round = 0; round < 400; ++round) {
    std::string stream = kHello;
    for (uint32_t i = below(5); i-- > 0;) stream += framed(std::string(below(15'000), 'b'));
    for (uint32_t i = below(3); i-- > 0;) stream[below(static_cast<uint32_t>(stream.size()))] ^= 1 << below(8);
    stream.resize(below(static_cast<uint32_t>(stream.size()) + 1));
    Peer bad(server.folder.path(), false);
    bad.send(stream);
    good.send(framed("good"));
    for (bool seen = false; !seen;) {
      const std::optional<Received> received = server.turn();
      if (received && received->payload == "good") {
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
