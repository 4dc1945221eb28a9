// Which request the engine thread works on: the most urgent. Of each priority at most one has begun; the others wait in
// its queue. A request that has begun and is not worked on is suspended.
//
// A priority's level is its number, the lowest first; one that waits rises by one for each `aging_ns`. So nothing waits
// for ever: who has risen to the front is served as urgently for a slice of a twentieth of that, then counts as itself
// again. What is worked on goes on where levels are equal.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "engine/queue.h"
#include "engine/request.h"

namespace ull {

class Schedule {
 public:
  // At most `capacity` requests wait. aging_ns: above 0.
  Schedule(size_t capacity, int64_t aging_ns)
      : aging_ns_(aging_ns), queues_{RequestQueue(capacity), RequestQueue(capacity), RequestQueue(capacity)} {}

  void push(uint32_t slot, const RequestSlot& request, int64_t now) noexcept {
    queue(request.priority).push(slot, request, now);
    review_ns_ = 0;
  }

  // The priority to work on; none if there is nothing to do. may_begin(slot): whether a request may begin beside those
  // that have.
  template <typename MayBegin>
  [[nodiscard]] std::optional<Priority> choose(int64_t now, const MayBegin& may_begin) noexcept {
    std::optional<Priority> best;
    int64_t best_level = 0;
    const auto consider = [&](Priority priority) {
      const int64_t level = this->level(priority, now);
      if (best && level >= best_level) return;
      best = priority;
      best_level = level;
    };
    if (running_ != kNobody) consider(running_);
    for (int i = 0; i < kPriorities; ++i) {
      const auto priority = static_cast<Priority>(i);
      if (priority == running_) continue;
      const RequestQueue& waiting = queue(priority);
      if (begun(priority) || (!waiting.empty() && (!any_begun() || may_begin(waiting.front())))) consider(priority);
    }
    review_ns_ = next_review(now);
    return best;
  }
  // Whether choose() may say something else than it last did.
  [[nodiscard]] bool changed(int64_t now) const noexcept { return now >= review_ns_; }

  [[nodiscard]] bool begun(Priority priority) const noexcept { return begun_[index(priority)]; }
  [[nodiscard]] bool suspended(Priority priority) const noexcept { return begun(priority) && priority != running_; }

  // The request of that priority which is worked on from now on, from its queue.
  [[nodiscard]] uint32_t begin(Priority priority, int64_t now) noexcept {
    resume(priority, now);
    const uint32_t slot = queue(priority).front();
    queue(priority).pop();
    begun_[index(priority)] = true;
    return slot;
  }
  void resume(Priority priority, int64_t now) noexcept {
    lifted_ = level(priority, now);
    lifted_until_ns_ = lifted_ < number(priority) ? now + aging_ns_ / kSlices : 0;
    running_ = priority;
    review_ns_ = next_review(now);
  }
  void suspend(int64_t now) noexcept {
    waits_since_ns_[index(running_)] = now;
    running_ = kNobody;
  }
  // Of the request that has begun, worked on or suspended.
  void end(Priority priority) noexcept {
    begun_[index(priority)] = false;
    if (priority == running_) running_ = kNobody;
    review_ns_ = 0;
  }

  [[nodiscard]] int64_t next_limit_ns() const noexcept {
    int64_t next = kNever;
    for (const RequestQueue& waiting : queues_) next = std::min(next, waiting.next_limit_ns());
    return next;
  }
  // As RequestQueue::remove_if().
  template <typename Ended>
  void remove_if(const Ended& ended) noexcept {
    for (RequestQueue& waiting : queues_) waiting.remove_if(ended);
  }

 private:
  static constexpr auto kNobody = static_cast<Priority>(kPriorities);
  static constexpr int64_t kSlices = 20;  // of the time after which a waiting priority rises

  [[nodiscard]] static constexpr int64_t number(Priority priority) noexcept { return static_cast<int64_t>(priority); }
  [[nodiscard]] static constexpr size_t index(Priority priority) noexcept { return static_cast<size_t>(priority); }
  [[nodiscard]] RequestQueue& queue(Priority priority) noexcept { return queues_[index(priority)]; }
  [[nodiscard]] bool any_begun() const noexcept { return std::ranges::find(begun_, true) != begun_.end(); }

  // Since when it waits; kNever if nothing of it does.
  [[nodiscard]] int64_t since(Priority priority) const noexcept {
    if (priority == running_) return kNever;
    return begun(priority) ? waits_since_ns_[index(priority)] : queues_[index(priority)].oldest_ns();
  }
  [[nodiscard]] int64_t level(Priority priority, int64_t now) const noexcept {
    if (priority == running_) return now < lifted_until_ns_ ? lifted_ : number(priority);
    return number(priority) - std::max<int64_t>(0, now - since(priority)) / aging_ns_;
  }
  [[nodiscard]] int64_t next_review(int64_t now) const noexcept {
    int64_t next = lifted_until_ns_ > now ? lifted_until_ns_ : kNever;
    for (int i = 0; i < kPriorities; ++i) {
      const int64_t from = since(static_cast<Priority>(i));
      if (from == kNever) continue;
      next = std::min(next, from + (std::max<int64_t>(0, now - from) / aging_ns_ + 1) * aging_ns_);
    }
    return next;
  }

  const int64_t aging_ns_;
  std::array<RequestQueue, kPriorities> queues_;  // by priority
  std::array<bool, kPriorities> begun_{};
  std::array<int64_t, kPriorities> waits_since_ns_{};  // of what is suspended
  Priority running_ = kNobody;                         // that is worked on
  int64_t lifted_ = 0;                                 // its level ...
  int64_t lifted_until_ns_ = 0;                        // ... until then
  int64_t review_ns_ = 0;
};

}  // namespace ull
