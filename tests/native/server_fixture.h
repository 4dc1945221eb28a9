// A server whose sockets are real, with the test in the place of the io thread, and raw clients of either protocol.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "check.h"
#include "fake_zmq.h"
#include "io/server.h"
#include "zmtp_bytes.h"

namespace ull::test {

inline constexpr int64_t kMsNs = 1'000'000;
inline const zmq::Api kApi = FakeZmq::api();

// By the local transport's protocol.
inline const std::string kLocalHello = "ull1\0\0\0\0"s;

inline std::string local_message(const std::string& payload) {
  std::string text;
  for (int i = 0; i < 4; ++i) text += static_cast<char>(payload.size() >> (8 * i) & 0xff);
  return text + payload;
}

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
  char name_[32] = "/tmp/ull-server-XXXXXX";
};

// A client's end, to `ipc://path` or `tcp://127.0.0.1:port`, that says `first`.
class Client {
 public:
  Client(const std::string& endpoint, const std::string& first) {
    const std::string where = endpoint.substr(6);
    if (endpoint.starts_with("ipc://")) {
      sockaddr_un address{};
      address.sun_family = AF_UNIX;
      where.copy(address.sun_path, where.size());
      connect_to(address);
    } else {
      sockaddr_in address{};
      address.sin_family = AF_INET;
      address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      address.sin_port = htons(static_cast<uint16_t>(std::stoi(where.substr(where.rfind(':') + 1))));
      connect_to(address);
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
  // Waits for room; false once the server has hung up.
  bool send(const std::string& text) {
    for (size_t sent = 0; sent < text.size();) {
      const ssize_t more = ::send(fd_, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
      if (more <= 0) return false;
      sent += static_cast<size_t>(more);
    }
    return true;
  }
  // Waits for `size` bytes: fewer if the server hangs up, or says nothing for 20 seconds.
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
  // Looks what has come, without waiting.
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
  [[nodiscard]] int fd() const { return fd_; }

  std::string received;  // of what was looked at

 private:
  template <typename Address>
  void connect_to(const Address& address) {
    const auto* const any = reinterpret_cast<const sockaddr*>(&address);
    fd_ = socket(any->sa_family, SOCK_STREAM, 0);
    const timeval limit{20, 0};
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    connected_ = connect(fd_, any, sizeof(address)) == 0;
  }

  int fd_ = -1;
  bool connected_ = false;
  bool ended_ = false;
};

struct Received {
  std::string client;
  std::string what;  // the payload, or why there is none
  std::optional<uint64_t> id = {};
};

// The daemon's end, driven by the test as the io thread would. It has a file for each protocol, and what `options` add.
class DrivenServer {
 public:
  explicit DrivenServer(Server::Options options = {}) : socket(kApi, here(std::move(options), folder)) {
    kApi.msg_init(&message_.payload);
    socket.open();
  }
  ~DrivenServer() { kApi.msg_close(&message_.payload); }

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
    const std::string payload = text_of(zmq::bytes(kApi, message_.payload));
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
    for (const int64_t end = monotonic_ns() + ms * kMsNs; monotonic_ns() < end;) {
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
  // Endpoints: of ZeroMQ's protocol, the file first, and of the local transport's.
  [[nodiscard]] std::string at(size_t index = 0) const { return socket.endpoints()[index]; }
  [[nodiscard]] std::string local() const { return "ipc://" + folder.path("local"); }
  [[nodiscard]] uint64_t dropped() const { return socket.counts().dropped; }

  Folder folder;
  Server socket;
  std::vector<std::string> gone;
  size_t turns = 0;

 private:
  static Server::Options here(Server::Options options, const Folder& folder) {
    options.zeromq.insert(options.zeromq.begin(), "ipc://" + folder.path("zmq"));
    options.local = {folder.path("local")};
    return options;
  }

  Incoming message_;
};

}  // namespace ull::test
