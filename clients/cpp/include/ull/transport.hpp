// Carries messages to a daemon and back: over its local socket, or ZeroMQ. See "Transports" in docs/wire.md.
#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include <zmq.hpp>

#include "ull/error.hpp"

namespace ull {

using Clock = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

// The three keys of a client's key file (`ull keys new`), for a daemon that asks for them by tcp: docs/security.md.
struct CurveKeys {
  std::string server_key;  // the daemon's public key; these are texts in Z85
  std::string public_key;
  std::string secret_key;
};

namespace detail {

inline constexpr std::string_view kVersion = "ull1";
inline constexpr size_t kMaxMessageBytes = size_t{16} << 20;  // of one message, either way
inline constexpr Milliseconds kHelloTimeout{1000};
inline constexpr int kNeverAgain = 1 << 30;  // milliseconds

// Whole milliseconds until a point in time, rounded up, for poll().
inline int milliseconds_until(Clock::time_point deadline) {
  const auto left = std::chrono::ceil<Milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, INT_MAX));
}

// One connection. Every method throws Disconnected once it is lost, and ProtocolError for what is no message.
class Transport {
 public:
  virtual ~Transport() = default;
  // Hands one message over; waits for room until the deadline.
  virtual void send(const std::string& payload, Clock::time_point deadline) = 0;
  // The next message; nothing if none has come by the deadline.
  virtual std::optional<std::string> receive(Clock::time_point deadline) = 0;
  // Whether it is still there, as far as is known without waiting.
  virtual bool is_there() = 0;
};

// The unix stream socket beside an ipc endpoint.
class LocalTransport final : public Transport {
 public:
  // Nothing where no daemon answers there.
  static std::unique_ptr<LocalTransport> connect(const std::string& path) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    if (path.size() >= sizeof(address.sun_path)) return nullptr;
    std::memcpy(address.sun_path, path.data(), path.size());
    auto transport = std::unique_ptr<LocalTransport>(new LocalTransport(path));
    const auto deadline = Clock::now() + kHelloTimeout;
    // A unix socket connects at once, or, where the daemon's backlog is full, not now.
    if (transport->socket_ < 0 ||
        ::connect(transport->socket_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
      return nullptr;
    }
    try {
      std::string hello(kVersion);
      hello.append(4, '\0');
      transport->write(hello, deadline);
      while (transport->received_.size() < hello.size()) {
        if (!transport->wait(POLLIN, deadline)) return nullptr;
        transport->read();
      }
      if (transport->received_.compare(0, hello.size(), hello) != 0) return nullptr;
      transport->received_.erase(0, hello.size());
    } catch (const Disconnected&) {
      return nullptr;
    }
    return transport;
  }

  ~LocalTransport() override {
    if (socket_ >= 0) ::close(socket_);
  }
  LocalTransport(const LocalTransport&) = delete;
  LocalTransport& operator=(const LocalTransport&) = delete;

  void send(const std::string& payload, Clock::time_point deadline) override {
    std::string frame;
    frame.reserve(payload.size() + 4);
    for (int shift = 0; shift < 32; shift += 8) frame.push_back(static_cast<char>(payload.size() >> shift & 0xFF));
    frame += payload;
    write(frame, deadline);
  }

  bool is_there() override {
    char byte = 0;
    const ssize_t count = ::recv(socket_, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
    return count > 0 || (count < 0 && (errno == EAGAIN || errno == EINTR));
  }

  std::optional<std::string> receive(Clock::time_point deadline) override {
    for (;;) {
      if (std::optional<std::string> message = take()) return message;
      if (!wait(POLLIN, deadline)) return std::nullopt;
      read();
    }
  }

 private:
  explicit LocalTransport(std::string path)
      : path_(std::move(path)), socket_(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {}

  // A whole message of what was received.
  std::optional<std::string> take() {
    if (received_.size() - begin_ < 4) return std::nullopt;
    size_t size = 0;
    for (int i = 3; i >= 0; --i) size = size << 8 | static_cast<uint8_t>(received_[begin_ + static_cast<size_t>(i)]);
    if (size > kMaxMessageBytes)
      throw ProtocolError("the daemon announces a message of " + std::to_string(size) + " bytes");
    if (received_.size() - begin_ - 4 < size) return std::nullopt;
    std::string message = received_.substr(begin_ + 4, size);
    begin_ += 4 + size;
    if (begin_ == received_.size()) {
      received_.clear();
      begin_ = 0;
    }
    return message;
  }

  // Reads what is there, at least a byte.
  void read() {
    received_.erase(0, begin_);
    begin_ = 0;
    char buffer[1 << 16];
    const ssize_t count = ::recv(socket_, buffer, sizeof(buffer), 0);
    if (count == 0) throw gone("has closed the connection");
    if (count > 0) {
      received_.append(buffer, static_cast<size_t>(count));
    } else if (errno != EAGAIN && errno != EINTR) {
      throw gone(std::strerror(errno));
    }
  }

  void write(const std::string& bytes, Clock::time_point deadline) {
    size_t sent = 0;
    while (sent < bytes.size()) {
      const ssize_t count = ::send(socket_, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
      if (count >= 0) {
        sent += static_cast<size_t>(count);
      } else if (errno == EAGAIN) {
        // It may want its own messages read first: no more of them than it keeps for a client.
        const short ready = wait(POLLIN | POLLOUT, deadline);
        if (ready == 0) throw gone("takes no messages");
        if ((ready & POLLIN) != 0 && received_.size() - begin_ <= kMaxMessageBytes) read();
      } else if (errno != EINTR) {
        throw gone(std::strerror(errno));
      }
    }
  }

  // What of `events` the socket is ready for; 0 where nothing is by the deadline.
  short wait(short events, Clock::time_point deadline) const {
    pollfd entry{socket_, events, 0};
    for (;;) {
      const int count = ::poll(&entry, 1, milliseconds_until(deadline));
      if (count > 0) return entry.revents;
      if (count == 0 && Clock::now() >= deadline) return 0;
      if (count < 0 && errno != EINTR) throw gone(std::strerror(errno));
    }
  }

  [[nodiscard]] Disconnected gone(const std::string& why) const {
    return Disconnected("the daemon at " + path_ + ": " + why);
  }

  std::string path_;
  int socket_;
  std::string received_;
  size_t begin_ = 0;  // of what has not been taken
};

// A DEALER. libzmq would connect again by itself, and the daemon know nothing of what was asked before: a lost
// connection is noticed by a monitor, and this transport ends with it.
class ZmqTransport final : public Transport {
 public:
  ZmqTransport(zmq::context_t& context, const std::string& url, const std::optional<CurveKeys>& keys,
               Clock::time_point deadline)
      : url_(url), socket_(context, zmq::socket_type::dealer), monitor_(context, zmq::socket_type::pair) {
    socket_.set(zmq::sockopt::linger, 0);
    socket_.set(zmq::sockopt::ipv6, true);
    // Without `immediate`, and as long as it does not connect again, what came before a hang-up can be read behind it.
    socket_.set(zmq::sockopt::reconnect_ivl, kNeverAgain);
    socket_.set(zmq::sockopt::maxmsgsize, static_cast<int64_t>(kMaxMessageBytes));
    socket_.set(zmq::sockopt::heartbeat_ivl, 1000);
    socket_.set(zmq::sockopt::heartbeat_timeout, 5000);
    if (keys) {
      try {
        socket_.set(zmq::sockopt::curve_serverkey, keys->server_key);
        socket_.set(zmq::sockopt::curve_publickey, keys->public_key);
        socket_.set(zmq::sockopt::curve_secretkey, keys->secret_key);
      } catch (const zmq::error_t& error) {
        throw UsageError(std::string("keys: not those of a key file, 40 characters of Z85 each: ") + error.what());
      }
    }
    static std::atomic<uint64_t> monitors{0};
    const std::string events = "inproc://ull-monitor-" + std::to_string(++monitors);
    const int kinds = ZMQ_EVENT_HANDSHAKE_SUCCEEDED | ZMQ_EVENT_DISCONNECTED | ZMQ_EVENT_CONNECT_RETRIED;
    if (zmq_socket_monitor(socket_.handle(), events.c_str(), kinds) != 0) throw gone(zmq_strerror(zmq_errno()));
    try {
      monitor_.connect(events);
      socket_.connect(url);
      while (!connected_) {
        if (is_lost_ || poll(0, deadline) == 0) throw gone("nothing answers there");
        take_events();
      }
    } catch (const zmq::error_t& error) {
      stop_monitor();
      throw gone(error.what());
    } catch (...) {
      stop_monitor();
      throw;
    }
  }
  ~ZmqTransport() override { stop_monitor(); }
  ZmqTransport(const ZmqTransport&) = delete;
  ZmqTransport& operator=(const ZmqTransport&) = delete;

  void send(const std::string& payload, Clock::time_point deadline) override {
    for (;;) {
      take_events();
      if (is_lost_) return;  // whoever reads is told, behind what has come
      const auto version = socket_.send(zmq::buffer(kVersion), zmq::send_flags::sndmore | zmq::send_flags::dontwait);
      if (version) {
        // The first frame was taken, and so is the rest of the message.
        (void)socket_.send(zmq::buffer(payload), zmq::send_flags::none);
        return;
      }
      if (poll(ZMQ_POLLOUT, deadline) == 0) throw gone("takes no messages");
    }
  }

  bool is_there() override {
    take_events();
    return !is_lost_;
  }

  std::optional<std::string> receive(Clock::time_point deadline) override {
    for (;;) {
      const bool was_lost = is_lost_;
      zmq::message_t version;
      if (socket_.recv(version, zmq::recv_flags::dontwait)) return payload(version);
      if (was_lost) throw gone("has closed the connection");  // and everything before that has been read
      take_events();
      if (!is_lost_ && poll(ZMQ_POLLIN, deadline) == 0) return std::nullopt;
    }
  }

 private:
  std::string payload(const zmq::message_t& version) {
    std::string message;
    int frames = 1;
    for (bool more = version.more(); more; ++frames) {
      zmq::message_t frame;
      (void)socket_.recv(frame, zmq::recv_flags::none);
      more = frame.more();
      if (frames == 1) message = frame.to_string();
    }
    if (frames != 2 || version.to_string_view() != kVersion) {
      throw ProtocolError("a message of " + url_ + " is not of two frames, the first of which is " +
                          std::string(kVersion));
    }
    return message;
  }

  // Waits for the socket to be ready, or for an event; 0 where nothing happens by the deadline.
  int poll(short events, Clock::time_point deadline) {
    zmq::pollitem_t items[] = {{socket_.handle(), 0, events, 0}, {monitor_.handle(), 0, ZMQ_POLLIN, 0}};
    for (;;) {
      try {
        const int ready = zmq::poll(items, 2, Milliseconds(milliseconds_until(deadline)));
        if (ready > 0) return ready;
        if (Clock::now() >= deadline) return 0;
      } catch (const zmq::error_t& error) {
        if (error.num() != EINTR) throw gone(error.what());
      }
    }
  }

  void take_events() {
    zmq::message_t event;
    while (monitor_.recv(event, zmq::recv_flags::dontwait)) {
      uint16_t kind = 0;
      std::memcpy(&kind, event.data(), std::min(sizeof(kind), event.size()));
      zmq::message_t address;
      (void)monitor_.recv(address, zmq::recv_flags::none);
      if (kind == ZMQ_EVENT_HANDSHAKE_SUCCEEDED) connected_ = true;
      if (kind == ZMQ_EVENT_DISCONNECTED || kind == ZMQ_EVENT_CONNECT_RETRIED) is_lost_ = true;
    }
  }

  void stop_monitor() noexcept { zmq_socket_monitor(socket_.handle(), nullptr, 0); }

  [[nodiscard]] Disconnected gone(const std::string& why) const {
    return Disconnected("the daemon at " + url_ + ": " + why);
  }

  std::string url_;
  zmq::socket_t socket_;
  zmq::socket_t monitor_;
  bool connected_ = false;
  bool is_lost_ = false;
};

}  // namespace detail
}  // namespace ull
