// The io thread's way out: frames for clients, and what clients have not taken yet. Replies and the ends of requests
// wait here, per client and in order, and are tried again at growing intervals until their client takes them or is
// gone.
//
// Two budgets keep it small. While all that waits for clients of good standing exceeds the first, room() is false and
// replies stay with the control plane. A client that has left a message for longer than the stall time loses its
// standing: nobody is kept waiting for it, and what is beyond its share of the second budget is dropped and counted.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "io/transport.h"

namespace ull {

class Outbox {
 public:
  struct Limits {
    int64_t stall_ns = 250'000'000;               // a client that leaves a message for longer loses its standing
    size_t waiting_bytes = 256 * 1024;            // for clients of good standing, together
    size_t stalled_bytes = 1024 * 1024;           // for one client that has stalled
    size_t all_stalled_bytes = 16 * 1024 * 1024;  // for all of them
  };
  static constexpr size_t kLetterCost = 128;  // bytes that a waiting message counts for beside its payload

  enum class Kind : uint8_t { kReply, kDone };
  struct Counts {
    uint64_t sent = 0;     // at once or later
    uint64_t dropped = 0;  // their client was gone, or had left too many
  };

  Outbox(Sender& clients, const Limits& limits) : clients_(clients), limits_(limits) {}
  Outbox(const Outbox&) = delete;
  Outbox& operator=(const Outbox&) = delete;

  // Sends a frame that its sender keeps. kBlocked also while something older waits for this client.
  [[nodiscard]] Sent send(std::span<const uint8_t> identity, std::span<const uint8_t> payload) noexcept;
  // Sends a message, or keeps it until its client takes it.
  void post(Kind kind, std::span<const uint8_t> identity, std::span<const uint8_t> payload, int64_t now) noexcept;
  // Tries again what is due, a bounded part of it at a time.
  void retry(int64_t now) noexcept;

  // What waits for a client, the oldest first.
  [[nodiscard]] std::vector<std::vector<uint8_t>> waiting_for(std::span<const uint8_t> identity) const;

  [[nodiscard]] bool room() const noexcept { return waiting_cost_ < limits_.waiting_bytes; }
  // When retry() has something to do; INT64_MAX: never.
  [[nodiscard]] int64_t due_ns() const noexcept { return due_.empty() ? INT64_MAX : due_.begin()->first; }
  // Nothing waits but for clients that have stalled.
  [[nodiscard]] bool delivered() const noexcept { return waiting_cost_ == 0; }
  [[nodiscard]] uint64_t waiting() const noexcept { return waiting_; }  // messages
  [[nodiscard]] const Counts& counts(Kind kind) const noexcept { return counts_[static_cast<size_t>(kind)]; }

 private:
  struct Letter {
    Kind kind;
    int64_t posted_ns;
    std::vector<uint8_t> payload;
  };
  struct Box {
    std::string_view identity;  // the key that it is found by
    std::deque<Letter> letters;
    size_t cost = 0;  // of all letters
    int64_t pause_ns = 0;
    bool stalled = false;
  };
  struct Hash : std::hash<std::string_view> {
    using is_transparent = void;
  };
  using Boxes = std::unordered_map<std::string, Box, Hash, std::equal_to<>>;

  [[nodiscard]] Box* find(std::span<const uint8_t> identity) noexcept;
  void keep(Kind kind, std::span<const uint8_t> identity, std::span<const uint8_t> payload, int64_t now);
  void deliver(Box& box, int64_t now) noexcept;
  void stall(Box& box) noexcept;
  void remove(Box& box, bool newest, bool sent) noexcept;
  [[nodiscard]] Counts& count(Kind kind) noexcept { return counts_[static_cast<size_t>(kind)]; }

  Sender& clients_;
  const Limits limits_;
  Boxes boxes_;                       // clients for whom something waits
  std::multimap<int64_t, Box*> due_;  // each box once, by when it is tried again
  size_t waiting_cost_ = 0;           // of boxes of good standing
  size_t stalled_cost_ = 0;           // of the others
  uint64_t waiting_ = 0;
  Counts counts_[2];
};

}  // namespace ull
