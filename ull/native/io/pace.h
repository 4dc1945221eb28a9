// When the next token is due. Decoding is regular, so an adaptive io thread need not choose between a wake-up per token
// and a core spent on spinning: it sleeps through most of the interval and spins around the moment when a token is due.
#pragma once

#include <algorithm>
#include <cstdint>

namespace ull {

class Pace {
 public:
  // A token was accepted at `time_ns`.
  void token(int64_t time_ns) noexcept {
    const int64_t gap = time_ns - last_ns_;
    last_ns_ = time_ns;
    if (gap <= 0 || gap > kLongestNs) {
      interval_ns_ = 0;
    } else {
      interval_ns_ = interval_ns_ == 0 ? gap : interval_ns_ + (gap - interval_ns_) / 8;
    }
  }
  // The request has ended: what comes next is not regular.
  void end() noexcept { interval_ns_ = 0; }

  // Whether a token is expected, soon or now. False once it is overdue.
  [[nodiscard]] bool expects(int64_t now) const noexcept {
    return interval_ns_ >= kShortestNs && now < last_ns_ + interval_ns_ + margin_ns();
  }
  // From here on it pays to spin for it.
  [[nodiscard]] int64_t spin_from_ns() const noexcept { return last_ns_ + interval_ns_ - margin_ns(); }

 private:
  static constexpr int64_t kShortestNs = 100'000;    // below it a sleep is hardly shorter than its own cost
  static constexpr int64_t kLongestNs = 50'000'000;  // beyond it a wake-up is a small part of the interval
  static constexpr int64_t kLeastMarginNs = 30'000;  // covers a timer's wake-up
  static constexpr int64_t kMostMarginNs = 250'000;

  [[nodiscard]] int64_t margin_ns() const noexcept {
    return std::clamp(interval_ns_ / 8, kLeastMarginNs, kMostMarginNs);
  }

  int64_t last_ns_ = 0;
  int64_t interval_ns_ = 0;  // running mean; 0: unknown
};

}  // namespace ull
