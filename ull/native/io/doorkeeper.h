// Remembers who was not let in: for the log, and to turn away those who try again and again before they cost anything.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "io/transport.h"

namespace ull {

class Doorkeeper {
 public:
  static constexpr double kBurst = 8;      // times that somebody from one address may fail at once, ...
  static constexpr double kPerSecond = 4;  // ... and over time

  // Whether somebody from this address may try to come in. Others at the address of one who keeps failing still may,
  // now and then.
  [[nodiscard]] bool admits(const Peer& peer, int64_t now) noexcept {
    Record* const record = find(peer);
    return record == nullptr || record->refill(now) >= 1;
  }

  // Somebody from there was not let in.
  void note(const char* why, const Peer& peer, int64_t now) noexcept {
    Record* record = find(peer);
    if (record == nullptr) {  // in the place of who was here the longest ago
      record = &*std::min_element(records_.begin(), records_.end(),
                                  [](const Record& one, const Record& other) { return one.last_ns < other.last_ns; });
      *record = {.peer = peer, .left = kBurst, .last_ns = now};
    }
    record->left = std::max(0.0, record->refill(now) - 1);
    if (untold_ == denials_.size()) return;  // it is counted, no more
    denials_[(first_ + untold_++) % denials_.size()] = {why, peer};
  }

  [[nodiscard]] bool untold(Transport::Denial& denial) const noexcept {
    if (untold_ > 0) denial = denials_[first_];
    return untold_ > 0;
  }
  void told() noexcept {
    first_ = (first_ + 1) % denials_.size();
    --untold_;
  }

 private:
  struct Record {
    // How often somebody may fail there now.
    double refill(int64_t now) noexcept {
      left = std::min(kBurst, left + static_cast<double>(now - last_ns) * 1e-9 * kPerSecond);
      last_ns = now;
      return left;
    }

    Peer peer = {};
    double left = 0;
    int64_t last_ns = 0;
  };

  [[nodiscard]] Record* find(const Peer& peer) noexcept {
    const auto found = std::find_if(records_.begin(), records_.end(), [&](const Record& record) {
      return record.last_ns > 0 && record.peer.text() == peer.text();
    });
    return found == records_.end() ? nullptr : &*found;
  }

  std::array<Record, 64> records_;
  std::array<Transport::Denial, 32> denials_;
  size_t first_ = 0;
  size_t untold_ = 0;
};

}  // namespace ull
