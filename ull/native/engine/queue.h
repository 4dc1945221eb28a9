// The requests that wait for the engine thread. Clients take turns: who has one request waiting is not behind the many
// of another client; a client's own requests keep their order. Nothing allocates after construction.
//
// Each request has a turn: the one after the client's last that waits or runs, or the turn that is being served if the
// client has none. The lowest turn goes first, of equal ones the request that came first.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "engine/request.h"

namespace ull {

class RequestQueue {
 public:
  // Holds at most `capacity` requests.
  explicit RequestQueue(size_t capacity) { waiting_.reserve(capacity); }

  [[nodiscard]] bool empty() const noexcept { return waiting_.empty(); }

  // CLOCK_MONOTONIC; the greatest number if no request has a deadline.
  [[nodiscard]] int64_t next_deadline_ns() const noexcept { return next_deadline_ns_; }

  // `request` is the one in `slot`.
  void push(uint32_t slot, const RequestSlot& request) noexcept {
    const std::span<const uint8_t> client = request.client();
    uint64_t turn = std::ranges::equal(client, std::span(served_.data(), served_size_)) ? turn_ + 1 : turn_;
    for (const Waiting& other : waiting_) {
      if (std::ranges::equal(client, other.request->client())) turn = std::max(turn, other.turn + 1);
    }
    waiting_.push_back({slot, turn, &request});
    note_deadline(request);
  }

  // The next request to run; the queue is not empty.
  [[nodiscard]] uint32_t take() noexcept {
    const auto next = std::min_element(waiting_.begin(), waiting_.end(),
                                       [](const Waiting& a, const Waiting& b) { return a.turn < b.turn; });
    const uint32_t slot = next->slot;
    const std::span<const uint8_t> client = next->request->client();
    std::ranges::copy(client, served_.begin());  // the slot may soon be another's
    served_size_ = client.size();
    turn_ = next->turn;
    waiting_.erase(next);
    return slot;
  }

  // Removes the requests of which ended(slot, request) says so.
  template <typename Ended>
  void remove_if(const Ended& ended) noexcept {
    next_deadline_ns_ = kNever;
    std::erase_if(waiting_, [&](const Waiting& each) {
      if (ended(each.slot, *each.request)) return true;
      note_deadline(*each.request);
      return false;
    });
  }

 private:
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

  struct Waiting {
    uint32_t slot;
    uint64_t turn;
    const RequestSlot* request;
  };

  void note_deadline(const RequestSlot& request) noexcept {
    for (const int64_t limit : {request.timeout_ns, request.deadline_ns}) {
      if (limit != 0) next_deadline_ns_ = std::min(next_deadline_ns_, limit);
    }
  }

  std::vector<Waiting> waiting_;                // in order of arrival
  std::array<uint8_t, kMaxIdentity> served_{};  // the client whose request was taken last
  size_t served_size_ = 0;
  uint64_t turn_ = 0;  // of that request
  int64_t next_deadline_ns_ = kNever;
};

}  // namespace ull
