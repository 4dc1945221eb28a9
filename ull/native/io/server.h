// The daemon's sockets for clients, unix streams and TCP, which the io thread reads and writes itself: a token wakes
// its client and no other thread of the daemon. What the bytes mean is the protocol's of the socket that a client has
// come by: ZeroMQ's or the local transport's.
//
// Nothing that a client sends takes more room than a message may have, and that only as it arrives; what has no room
// stays in the kernel, and so with its client. A client whose bytes make no sense, or that hangs up in either
// direction, is gone, and what it had sent and nobody has read goes with it.
//
// One thread at a time may use it. Descriptors are edge triggered behind one epoll descriptor: an event puts a
// connection into the queue of those that may have a message, and receive() takes turns between them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "io/doorkeeper.h"
#include "io/input.h"
#include "io/listener.h"
#include "io/transport.h"
#include "io/zmq_api.h"
#include "protocol/curve.h"
#include "protocol/local_protocol.h"
#include "protocol/zmtp.h"
#include "sync/alarm.h"

namespace ull {

class Server final : public Transport {
 public:
  struct Options {
    std::vector<std::string> zeromq = {};    // endpoints: ipc:// and tcp://
    std::vector<std::string> local = {};     // paths of the local transport's sockets
    int64_t max_message = 16 * 1024 * 1024;  // bytes of one payload; a longer one is refused, see kLongestRefused
    int max_connections = 0;                 // 0: 1024, or half of the descriptors that the process may have
    int handshake_ms = 1000;                 // a connection that has not shaken hands by then is dropped
    int ping_ms = 2000;                      // a client that has been silent for so long is asked whether it lives,
    int mute_ms = 5000;                      // ... and dropped if it has said nothing by then, and was told nothing
    // Keys for tcp: with them, all tcp is CURVE's.
    std::optional<Curve::Options> curve = std::nullopt;
    int linger_ms = 1000;  // time that frames sent before close() have to reach their clients
  };
  static constexpr size_t kIdentity = 10;  // bytes: 0, the protocol's letter and a u64 (big endian)

  // Throws std::system_error if the process has no descriptors left.
  Server(const zmq::Api& api, const Options& options);
  ~Server() override { close(); }
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // Paths must not exist: whoever opens this has claimed them. Files are the caller's to remove.
  void open() override;
  void close() noexcept override;
  [[nodiscard]] const std::vector<std::string>& endpoints() const noexcept override { return endpoints_; }

  // Sends one message without waiting. kBlocked while the client's buffer in the kernel is full.
  [[nodiscard]] Sent send(std::span<const uint8_t> identity, std::span<const uint8_t> payload) noexcept override;
  [[nodiscard]] bool receive(Incoming& message) noexcept override;
  // Takes in what the kernel has to tell: new clients, input, hang-ups, room.
  void tend() noexcept override;
  [[nodiscard]] bool ready() const noexcept override { return queue_size_ > 0; }
  [[nodiscard]] int fd() const noexcept override { return epoll_; }

  [[nodiscard]] std::span<const uint8_t> gone() noexcept override;
  void pop_gone() noexcept override;
  void look_at_files() noexcept override;
  [[nodiscard]] bool news(EndpointNews& news) noexcept override;
  void pop_news() noexcept override;
  [[nodiscard]] bool denial(Denial& denial) noexcept override;
  void pop_denial() noexcept override;
  [[nodiscard]] Counts counts() const noexcept override;

  [[nodiscard]] Estate hand_over() const override;
  [[nodiscard]] std::vector<std::vector<uint8_t>> take_over(const Estate& estate) override;
  void abandon() noexcept override;

 private:
  using Identity = std::array<uint8_t, kIdentity>;
  enum class State : uint8_t { kFree, kHandshake, kOpen, kGone };
  enum class Read : uint8_t { kMessage, kNothing, kTurnOver, kHungUp, kUnfit, kRefused };

  struct Connection {
    int fd = -1;
    uint64_t id = 0;  // serial number and index: what the identity carries
    const Protocol* protocol = nullptr;
    const char* refused = nullptr;  // why it may not come in
    State state = State::kFree;
    bool tcp = false;
    bool queued = false;   // in the queue of those that may have a message
    bool drained = false;  // the last read took all that there was: an event will tell of more
    bool asked = false;    // has sent a message
    bool told = false;     // a frame was sent since silence was last looked for
    bool pinged = false;   // since it was last heard
    int64_t heard_ns = 0;  // when it connected or, hands shaken, bytes last came
    uint64_t grown = 0;    // when its input first grew beyond a chunk, as a count of such; 0: it has not
    Input input;
    ProtocolState progress;
    std::vector<uint8_t> rest;  // of a frame that the kernel took a part of
    size_t rest_sent = 0;       // bytes of it
  };

  struct Door {
    Listener listener;
    const Protocol* protocol;
  };

  void watch(int fd, uint64_t tag, uint32_t events, int operation) noexcept;
  void watch_door(const Door& door) noexcept;
  [[nodiscard]] Listener* untold() noexcept;
  void accept_clients(int listener) noexcept;
  void greet(int fd, const Door& door) noexcept;
  Connection& seat(int fd, const Protocol* protocol, bool tcp) noexcept;
  void pause_listening() noexcept;
  void on_alarm() noexcept;
  void set_alarm() noexcept;
  [[nodiscard]] int64_t due_ns(const Connection& connection) const noexcept;
  void look_at(Connection& connection, int64_t now) noexcept;

  [[nodiscard]] Connection* find(uint64_t id) noexcept;
  [[nodiscard]] uint32_t index_of(const Connection& connection) const noexcept;
  [[nodiscard]] static Identity identity_of(const Connection& connection) noexcept;
  void enqueue(Connection& connection) noexcept;
  [[nodiscard]] Connection& dequeue() noexcept;

  [[nodiscard]] Read read(Connection& connection, Incoming& message, size_t& budget) noexcept;
  [[nodiscard]] static bool read_bytes(Connection& connection, std::span<uint8_t> room, size_t& budget) noexcept;
  [[nodiscard]] bool pass_on(Connection& connection, const Step& step, Incoming& message) noexcept;
  void introduce(const Connection& connection, Peer& peer) const noexcept;
  void consume(Connection& connection, size_t bytes) noexcept;
  [[nodiscard]] std::span<uint8_t> room_for(Connection& connection) noexcept;
  [[nodiscard]] bool make_room(Connection& connection) noexcept;

  [[nodiscard]] std::vector<uint8_t> save(const Connection& connection) const;
  [[nodiscard]] bool restore(Connection& connection, StateReader& reader);
  [[nodiscard]] const Protocol* protocol_of(const Door& door) const noexcept;

  [[nodiscard]] Sent transmit(Connection& connection, std::span<const uint8_t> header,
                              std::span<const uint8_t> payload) noexcept;
  [[nodiscard]] bool flush(Connection& connection) noexcept;
  void hang_up(Connection& connection) noexcept;
  void drop(Connection& connection) noexcept;
  void deny(Connection& connection, const char* why) noexcept;
  void look_at_guests() noexcept;
  void release(Connection& connection) noexcept;

  const zmq::Api api_;
  const Options options_;
  const Zmtp zmtp_;
  const LocalProtocol local_;
  const std::unique_ptr<const Curve> curve_;  // null: tcp is Zmtp's too
  Doorkeeper doorkeeper_;
  uint64_t guests_ = 0;  // curve_'s when who is connected was last looked at
  int epoll_ = -1;
  Alarm alarm_;
  std::vector<Door> doors_;
  std::vector<std::string> endpoints_;   // of ZeroMQ's doors
  std::vector<Connection> connections_;  // one place each
  std::vector<uint32_t> free_;           // places
  std::vector<uint32_t> queue_;          // a ring of places whose client may have a message
  size_t queue_head_ = 0;
  size_t queue_size_ = 0;
  std::vector<uint32_t> gone_;  // places whose client has hung up
  Identity gone_identity_;
  size_t remote_ = 0;  // connections by TCP
  size_t large_ = 0;   // bytes of input beyond chunks
  uint64_t growths_ = 0;
  uint64_t serial_ = 0;
  int64_t looked_ns_ = 0;        // when silence was last looked for
  int64_t paused_until_ns_ = 0;  // nobody is accepted before; 0: anybody is
  std::vector<uint8_t> waste_;   // where bytes go that are thrown away
  Counts counts_;
};

}  // namespace ull
