// What a process tells its successor of a connection or a door, as bytes: numbers as u64, little endian, texts behind
// their length. There are no names and no versions in it: both processes have the same kSavedFormat, or there is no
// hand-over.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

namespace ull {

// Another number whenever a save(), or what ull/daemon/succession.py says beside it, is not as it was before.
inline constexpr int kSavedFormat = 1;

class StateWriter {
 public:
  void number(uint64_t value) {
    for (size_t i = 0; i < sizeof(value); ++i) bytes_.push_back(static_cast<uint8_t>(value >> (8 * i)));
  }
  void flag(bool value) { number(value ? 1 : 0); }
  void bytes(std::span<const uint8_t> value) {
    number(value.size());
    bytes_.insert(bytes_.end(), value.begin(), value.end());
  }
  void text(std::string_view value) { bytes({reinterpret_cast<const uint8_t*>(value.data()), value.size()}); }

  [[nodiscard]] std::vector<uint8_t> take() noexcept { return std::move(bytes_); }

 private:
  std::vector<uint8_t> bytes_;
};

// Reads what a StateWriter wrote, in the same order. What is not there reads as 0 and nothing, and ends all reading.
class StateReader {
 public:
  explicit StateReader(std::span<const uint8_t> bytes) noexcept : rest_(bytes) {}

  [[nodiscard]] uint64_t number() noexcept {
    uint64_t value = 0;
    if (rest_.size() < sizeof(value)) return fail(), 0;
    for (size_t i = 0; i < sizeof(value); ++i) value |= uint64_t{rest_[i]} << (8 * i);
    rest_ = rest_.subspan(sizeof(value));
    return value;
  }
  [[nodiscard]] bool flag() noexcept {
    const uint64_t value = number();
    if (value > 1) fail();
    return value == 1;
  }
  [[nodiscard]] std::span<const uint8_t> bytes() noexcept {
    const uint64_t size = number();
    if (size > rest_.size()) return fail(), std::span<const uint8_t>{};
    const auto value = rest_.first(static_cast<size_t>(size));
    rest_ = rest_.subspan(value.size());
    return value;
  }
  [[nodiscard]] std::string_view text() noexcept {
    const auto value = bytes();
    return {reinterpret_cast<const char*>(value.data()), value.size()};
  }
  // Bytes of which there must be as many as `to` has room for.
  void fill(std::span<uint8_t> to) noexcept {
    const auto value = bytes();
    if (value.size() != to.size()) return fail();
    std::copy(value.begin(), value.end(), to.begin());
  }
  void fail() noexcept {
    failed_ = true;
    rest_ = {};
  }
  // Everything was there, and nothing more.
  [[nodiscard]] bool whole() const noexcept { return !failed_ && rest_.empty(); }

 private:
  std::span<const uint8_t> rest_;
  bool failed_ = false;
};

}  // namespace ull
