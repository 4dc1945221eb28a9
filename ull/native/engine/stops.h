// Stop strings: StopSet holds a request's, StopMatcher finds the first of them in a text and holds back what may still
// become one. No allocation.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace ull {

inline constexpr int kMaxStops = 16;       // stop strings per request
inline constexpr int kMaxStopBytes = 256;  // bytes per stop string

// A request's stop strings with their matching automata (Knuth, Morris, Pratt 1977). Immutable once built.
class StopSet {
 public:
  void clear() noexcept { count_ = 0; }
  // False if the string is empty, longer than kMaxStopBytes, or there are kMaxStops already.
  [[nodiscard]] bool add(std::string_view stop) noexcept;

  [[nodiscard]] int count() const noexcept { return count_; }
  [[nodiscard]] std::string_view stop(int index) const noexcept {
    return {bytes_[static_cast<size_t>(index)].data(), lengths_[static_cast<size_t>(index)]};
  }
  // How many bytes of the stop string match after `byte`, if `matched` (less than all) did before.
  [[nodiscard]] int step(int index, int matched, uint8_t byte) const noexcept {
    const auto& bytes = bytes_[static_cast<size_t>(index)];
    const auto& borders = borders_[static_cast<size_t>(index)];
    const char next = static_cast<char>(byte);
    while (matched > 0 && next != bytes[static_cast<size_t>(matched)]) {
      matched = borders[static_cast<size_t>(matched) - 1];
    }
    return matched + (next == bytes[static_cast<size_t>(matched)] ? 1 : 0);
  }

 private:
  int count_ = 0;
  std::array<uint16_t, kMaxStops> lengths_{};
  std::array<std::array<char, kMaxStopBytes>, kMaxStops> bytes_;
  // borders_[s][n]: the longest proper prefix of stop s that is a suffix of its first n + 1 bytes.
  std::array<std::array<uint16_t, kMaxStopBytes>, kMaxStops> borders_;
};

// Finds the first place where a stop string ends (among those that end there, the longest). Releases every byte that
// can no longer belong to one.
class StopMatcher {
 public:
  void reset(const StopSet* stops) noexcept;

  // Takes one byte and calls release(byte) for each byte that is now known to be text. True if a stop string has
  // just been completed: its bytes are dropped and the matcher must be fed no more.
  template <typename Release>
  bool feed(uint8_t byte, Release&& release) noexcept {
    int longest = 0;
    int holder = 0;
    int completed = 0;
    for (int index = 0; index < stops_->count(); ++index) {
      uint16_t& matched = matched_[static_cast<size_t>(index)];
      matched = static_cast<uint16_t>(stops_->step(index, matched, byte));
      if (matched == stops_->stop(index).size() && matched > completed) completed = matched;
      if (matched > longest) {
        longest = matched;
        holder = index;
      }
    }
    // The bytes before this one that were held, then this one: a prefix of them is released. What is held is always
    // the beginning of a stop string, so it needs no buffer.
    const int available = held_ + 1;
    const int kept = completed > 0 ? completed : longest;
    for (int i = 0; i < available - kept; ++i) {
      release(i < held_ ? static_cast<uint8_t>(stops_->stop(holder_)[static_cast<size_t>(i)]) : byte);
    }
    holder_ = holder;
    held_ = completed > 0 ? 0 : longest;
    return completed > 0;
  }

  // The stream has ended: nothing more can complete a stop string.
  template <typename Release>
  void finish(Release&& release) noexcept {
    for (int i = 0; i < held_; ++i) release(static_cast<uint8_t>(stops_->stop(holder_)[static_cast<size_t>(i)]));
    held_ = 0;
  }

 private:
  const StopSet* stops_ = nullptr;
  std::array<uint16_t, kMaxStops> matched_{};
  int held_ = 0;    // bytes held back
  int holder_ = 0;  // the stop string they are the beginning of
};

}  // namespace ull
