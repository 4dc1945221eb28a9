// The requests of one priority that wait for the engine thread. Clients take turns: who has one request waiting is not
// behind the many of another client. Nothing allocates after construction.
//
// Each request has a turn: the one after the client's last that waits or runs, or the turn that is being served if the
// client has none. The lowest turn goes first, of equal ones the earliest deadline, of these the request that came
// first. A client's own requests have its turns in the order of their deadlines.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/request.h"

namespace ull {

inline constexpr int64_t kNever = std::numeric_limits<int64_t>::max();  // CLOCK_MONOTONIC

class RequestQueue {
 public:
  // Holds at most `capacity` requests.
  explicit RequestQueue(size_t capacity) { waiting_.reserve(capacity); }
  RequestQueue(const RequestQueue&) = delete;  // a copy would have no room
  RequestQueue& operator=(const RequestQueue&) = delete;

  [[nodiscard]] bool empty() const noexcept { return waiting_.empty(); }
  // When the request that has waited longest came; kNever if none waits.
  [[nodiscard]] int64_t oldest_ns() const noexcept { return waiting_.empty() ? kNever : waiting_.front().since_ns; }
  // When the first of them ends unserved: CLOCK_MONOTONIC, kNever if none has a limit.
  [[nodiscard]] int64_t next_limit_ns() const noexcept { return next_limit_ns_; }

  // `request` is the one in `slot`.
  void push(uint32_t slot, const RequestSlot& request, int64_t now) noexcept {
    const std::span<const uint8_t> client = request.client();
    Waiting entry{.slot = slot, .turn = turn_, .since_ns = now, .due_ns = due(request), .request = &request};
    if (std::ranges::equal(client, std::span(served_.data(), served_size_))) ++entry.turn;
    for (const Waiting& other : waiting_) {
      if (std::ranges::equal(client, other.request->client())) entry.turn = std::max(entry.turn, other.turn + 1);
    }
    while (Waiting* other = last_due_after(entry)) std::swap(other->turn, entry.turn);
    waiting_.push_back(entry);
    note_limits(request);
  }

  // The next request to run; the queue is not empty.
  [[nodiscard]] uint32_t front() const noexcept { return next()->slot; }

  void pop() noexcept {
    const auto taken = waiting_.begin() + (next() - waiting_.cbegin());
    const std::span<const uint8_t> client = taken->request->client();
    std::ranges::copy(client, served_.begin());  // the slot may soon be another's
    served_size_ = client.size();
    turn_ = taken->turn;
    waiting_.erase(taken);
  }

  // Removes the requests of which ended(slot, request) says so.
  template <typename Ended>
  void remove_if(const Ended& ended) noexcept {
    next_limit_ns_ = kNever;
    std::erase_if(waiting_, [&](const Waiting& each) {
      if (ended(each.slot, *each.request)) return true;
      note_limits(*each.request);
      return false;
    });
  }

 private:
  struct Waiting {
    uint32_t slot;
    uint64_t turn;
    int64_t since_ns;
    int64_t due_ns;  // kNever: it has no deadline
    const RequestSlot* request;
  };

  [[nodiscard]] static int64_t due(const RequestSlot& request) noexcept {
    return request.deadline_ns != 0 ? request.deadline_ns : kNever;
  }
  [[nodiscard]] std::vector<Waiting>::const_iterator next() const noexcept {
    return std::min_element(waiting_.cbegin(), waiting_.cend(), [](const Waiting& a, const Waiting& b) {
      return std::tie(a.turn, a.due_ns) < std::tie(b.turn, b.due_ns);
    });
  }
  // Of those of the same client that are due later and have an earlier turn, the one with the latest; null: there is
  // none.
  [[nodiscard]] Waiting* last_due_after(const Waiting& entry) noexcept {
    Waiting* last = nullptr;
    for (Waiting& other : waiting_) {
      const bool before = other.due_ns > entry.due_ns && other.turn < entry.turn;
      if (!before || (last != nullptr && last->turn > other.turn)) continue;
      if (std::ranges::equal(entry.request->client(), other.request->client())) last = &other;
    }
    return last;
  }
  void note_limits(const RequestSlot& request) noexcept {
    for (const int64_t limit : {request.timeout_ns, request.deadline_ns}) {
      if (limit != 0) next_limit_ns_ = std::min(next_limit_ns_, limit);
    }
  }

  std::vector<Waiting> waiting_;                // in order of arrival
  std::array<uint8_t, kMaxIdentity> served_{};  // the client whose request was taken last
  size_t served_size_ = 0;
  uint64_t turn_ = 0;  // of that request
  int64_t next_limit_ns_ = kNever;
};

}  // namespace ull
