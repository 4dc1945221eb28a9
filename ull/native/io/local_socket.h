// The daemon's socket for clients on the same machine: a unix stream that the io thread reads and writes itself, so
// that a token wakes its client and nobody else; through libzmq it wakes a thread of each side first.
//
// A message is a u32 (little endian) and that many bytes of payload, in both directions. Each side's first eight bytes
// are its hello: `ull1` and a u32 0. A client that says or announces anything else, or hangs up in either direction, is
// gone, and what it had sent and nobody has read goes with it.
//
// One thread at a time may use it. Descriptors are edge triggered behind one epoll descriptor: an event puts a
// connection into the queue of those that may have a message, and front() takes turns between them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "io/local_input.h"
#include "io/socket_file.h"
#include "io/transport.h"
#include "io/zmq_api.h"
#include "sync/alarm.h"

namespace ull {

class LocalSocket final : public Transport {
 public:
  struct Options {
    int64_t max_message = 16 * 1024 * 1024;  // bytes of one payload; a longer one is refused, see kLongestRefused
    int max_connections = 0;                 // 0: 1024, or half of the descriptors that the process may have
    int hello_ms = 1000;                     // a connection that has not said its hello by then is dropped
    int linger_ms = 1000;                    // time that frames sent before close() have to reach their clients
  };
  static constexpr size_t kIdentity = 10;  // bytes: 0, 'L' and a u64 (big endian) that is never used again
  using Identity = std::array<uint8_t, kIdentity>;

  struct Message {
    Identity client;
    std::span<const uint8_t> payload;
    bool too_long = false;  // it was thrown away
    bool has_id = false;    // ... and the request's id was found in it
    uint64_t id = 0;
  };
  struct Counts {
    uint64_t clients = 0;   // connected now
    uint64_t accepted = 0;  // since the start
    uint64_t refused = 0;   // turned away: no room for another connection
    uint64_t dropped = 0;   // disconnected: wrong or late hello, too long a message, memory short
  };

  // Throws std::system_error if the process has no descriptors left.
  LocalSocket(const zmq::Api& api, const Options& options);
  ~LocalSocket() override { close(); }
  LocalSocket(const LocalSocket&) = delete;
  LocalSocket& operator=(const LocalSocket&) = delete;

  // Whether a client's identity is one of this transport: libzmq's own have 5 bytes, chosen ones never begin with 0.
  [[nodiscard]] static bool owns(std::span<const uint8_t> identity) noexcept {
    return identity.size() == kIdentity && identity[0] == 0 && identity[1] == 'L';
  }

  // Binds a path that does not exist; the umask decides who may connect. Throws std::runtime_error naming it.
  void listen(const std::string& path);
  // Binds each path again whose file is gone; who is connected notices nothing, who comes meanwhile takes ZeroMQ.
  void look_at_files() noexcept;
  // Gives what has been sent time to leave, then closes everything. Files are the caller's to remove.
  void close() noexcept;

  // Sends one message without waiting. kBlocked while the client's buffer in the kernel is full.
  [[nodiscard]] Sent send(std::span<const uint8_t> identity, std::span<const uint8_t> payload) noexcept override;
  // tend(), front() and pop(): one whole message, or none.
  [[nodiscard]] Received receive(Incoming& message) noexcept override;

  // Takes in what the kernel has to tell: new clients, input, hang-ups, room. To be called when fd() is readable.
  void tend() noexcept override;
  // The next whole message, one of each client in turn; null: there is none. The same until pop(): meanwhile its
  // client's further input stays in the kernel.
  [[nodiscard]] const Message* front() noexcept;
  void pop() noexcept;
  // Whether front() may have more without a further event: not the time to sleep.
  [[nodiscard]] bool ready() const noexcept { return current_ != kNone || queue_size_ > 0; }
  // A client that has hung up and whose requests are to be ended; null: none. The same until pop_gone().
  [[nodiscard]] const Identity* gone() noexcept;
  void pop_gone() noexcept;

  [[nodiscard]] int fd() const noexcept { return epoll_; }
  [[nodiscard]] Counts counts() const noexcept { return counts_; }

 private:
  enum class State : uint8_t { kFree, kHello, kOpen, kGone };
  enum class Read : uint8_t { kMessage, kThrownAway, kNothing, kTurnOver, kHungUp, kUnfit };

  // A message that is thrown away as it arrives.
  struct Refusal {
    bool active = false;
    bool has_id = false;
    uint64_t id = 0;
    size_t left = 0;  // bytes of it that have not arrived
  };

  struct Connection {
    int fd = -1;
    uint64_t id = 0;  // serial number and index: what the identity carries
    State state = State::kFree;
    bool queued = false;   // in the queue of those that may have a message
    bool drained = false;  // the last read took all that there was: an event will tell of more
    int64_t hello_by_ns = 0;
    uint64_t grown = 0;  // when its input first grew beyond a chunk, as a count of such; 0: it has not
    LocalInput input;
    Refusal refusal;
    std::vector<uint8_t> rest;  // of a frame that the kernel took a part of
    size_t rest_sent = 0;       // bytes of it
  };

  struct Listener {
    int fd;
    SocketFile file;
  };

  static constexpr uint32_t kNone = UINT32_MAX;

  void watch(int fd, uint64_t tag, uint32_t events, int operation) noexcept;
  void watch_listener(int listener) noexcept;
  void accept_clients(int listener) noexcept;
  void greet(int fd) noexcept;
  void pause_listening() noexcept;
  void on_alarm() noexcept;
  void set_alarm() noexcept;
  [[nodiscard]] Connection* find(uint64_t id) noexcept;
  [[nodiscard]] uint32_t index_of(const Connection& connection) const noexcept;
  void enqueue(Connection& connection) noexcept;
  [[nodiscard]] Read read(Connection& connection) noexcept;
  [[nodiscard]] bool make_room(Connection& connection) noexcept;
  [[nodiscard]] Read examine(Connection& connection) noexcept;
  [[nodiscard]] std::span<uint8_t> room_for(Connection& connection) noexcept;
  void begin_refusal(Connection& connection, size_t length) noexcept;
  [[nodiscard]] bool flush(Connection& connection) noexcept;
  void hang_up(Connection& connection) noexcept;
  void drop(Connection& connection) noexcept;
  void release(Connection& connection) noexcept;

  const zmq::Api& api_;
  const Options options_;
  int epoll_ = -1;
  std::vector<Listener> listeners_;
  Alarm alarm_;
  int64_t paused_until_ns_ = 0;          // descriptors are used up: nobody is accepted until then; 0: not paused
  std::vector<Connection> connections_;  // [max_connections]
  std::vector<uint32_t> free_;           // indices
  std::vector<uint32_t> queue_;          // ring [max_connections] of indices that may have a message
  size_t queue_head_ = 0;
  size_t queue_size_ = 0;
  std::vector<uint8_t> thrown_away_;  // [kTurnBytes] where messages that are too long go
  std::vector<uint32_t> gone_;        // indices of clients that have hung up, oldest first
  uint64_t serial_ = 0;
  uint64_t growths_ = 0;
  size_t large_ = 0;  // bytes of all input buffers beyond their chunks
  uint32_t current_ = kNone;
  Message message_{};
  Identity gone_identity_{};
  Counts counts_;
};

}  // namespace ull
