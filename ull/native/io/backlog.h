// Clients' messages that libzmq has received and the control plane has not asked for: per client in order, one of each
// client in turn.
//
// libzmq's own high-water mark cannot bound them: a connection that it has stopped reading, whose peer then hangs up,
// makes it abort the process if a PING is left in its buffer. So everything is taken from it at once, and the bound is
// here, in bytes: one client may hold as much as is still free, so that there is always room for the next one. A
// message beyond that is not kept; its request is, to be refused in its turn.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>

#include "io/transport.h"
#include "io/zmq_api.h"

namespace ull {

class Backlog {
 public:
  static constexpr size_t kMessageCost = 256;  // bytes that a message counts for beside its payload

  struct Counts {
    uint64_t refused = 0;  // messages that were not kept: their requests are answered `busy`
    uint64_t dropped = 0;  // ... of clients that had too many of those, too: nobody answers them
  };

  // `bytes`: for all messages together, and a quarter of it for refusals.
  Backlog(const zmq::Api& api, size_t bytes) : api_(api), bytes_(bytes) {}
  ~Backlog();
  Backlog(const Backlog&) = delete;
  Backlog& operator=(const Backlog&) = delete;

  // Moves the message in.
  void push(Incoming& message) noexcept;
  // Moves the next one out, of the client whose turn it is. False if there is none.
  [[nodiscard]] bool pop(Incoming& message) noexcept;

  // Drops what a client that has gone away had sent: nobody would take the answers.
  void forget(std::span<const uint8_t> identity) noexcept;

  [[nodiscard]] bool empty() const noexcept { return turns_.empty(); }
  [[nodiscard]] size_t cost() const noexcept { return cost_ + refusal_cost_; }  // bytes
  [[nodiscard]] const Counts& counts() const noexcept { return counts_; }

 private:
  struct Entry {
    zmq::Message payload;
    const char* malformed;
    int64_t received_ns;
    uint64_t id;
    bool has_id;
  };
  struct Queue {
    std::string_view identity;  // the key that it is found by
    std::deque<Entry> entries;
    size_t cost = 0;          // of messages
    size_t refusal_cost = 0;  // of refusals
  };
  struct Hash : std::hash<std::string_view> {
    using is_transparent = void;
  };

  void account(Queue& queue, const Entry& entry, bool in) noexcept;
  [[nodiscard]] bool fits(const Queue& queue, size_t cost) const noexcept;
  [[nodiscard]] bool refusal_fits(const Queue& queue) const noexcept;
  void keep(zmq::Message& from, zmq::Message& to) noexcept;
  void store(Incoming& message);

  const zmq::Api& api_;
  const size_t bytes_;
  std::unordered_map<std::string, Queue, Hash, std::equal_to<>> queues_;  // clients that wait
  std::list<Queue*> turns_;                                               // each of them once
  size_t cost_ = 0;
  size_t refusal_cost_ = 0;
  Counts counts_;
};

}  // namespace ull
