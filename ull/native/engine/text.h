// From token bytes to text, incrementally: StopMatcher finds the first stop string in the byte stream and holds back
// what may still become one, Utf8Repair turns the rest into valid UTF-8, TextAssembler is the two in a row. The result
// depends only on the bytes, never on where they were cut. No allocation.
#pragma once

#include <array>
#include <cstdint>
#include <span>
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
  [[nodiscard]] int step(int index, int matched, uint8_t byte) const noexcept;

 private:
  int count_ = 0;
  std::array<uint16_t, kMaxStops> lengths_{};
  std::array<std::array<char, kMaxStopBytes>, kMaxStops> bytes_;
  // borders_[s][n]: the longest proper prefix of stop s that is a suffix of its first n + 1 bytes.
  std::array<std::array<uint16_t, kMaxStopBytes>, kMaxStops> borders_;
};

// Where finished text goes: a caller's buffer. The caller guarantees room.
struct TextBuffer {
  char* data = nullptr;
  size_t size = 0;
  void append(const char* bytes, size_t count) noexcept {
    for (size_t i = 0; i < count; ++i) data[size + i] = bytes[i];
    size += count;
  }
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

// Passes valid UTF-8 on, character by character, and puts U+FFFD for each maximal invalid subpart, like
// bytes.decode("utf-8", errors="replace") (Unicode 15, section 3.9, "Substitution of Maximal Subparts").
class Utf8Repair {
 public:
  void reset() noexcept { pending_ = 0; }
  void feed(uint8_t byte, TextBuffer& out) noexcept;
  void finish(TextBuffer& out) noexcept;

 private:
  static constexpr std::string_view kReplacement = "\xEF\xBF\xBD";
  void begin(uint8_t byte, TextBuffer& out) noexcept;

  std::array<char, 4> bytes_{};  // the incomplete character
  int pending_ = 0;              // bytes of it seen
  int needed_ = 0;               // bytes it will have
  uint8_t low_ = 0x80;           // range of its next byte
  uint8_t high_ = 0xBF;
};

class TextAssembler {
 public:
  // `stops` must outlive the assembler's use.
  void reset(const StopSet* stops) noexcept;

  // Takes one token's bytes, appends finished text. True once a stop string is complete; everything after it is
  // ignored. Appends at most text_bound(bytes.size()) bytes.
  bool feed(std::span<const uint8_t> bytes, TextBuffer& out) noexcept;
  // The stream has ended: appends what was held back, U+FFFD for an incomplete character.
  void finish(TextBuffer& out) noexcept;

  // Bytes that feed() of `bytes` bytes followed by finish() can append: every byte may become a U+FFFD.
  [[nodiscard]] static constexpr size_t text_bound(size_t bytes) noexcept { return 3 * (bytes + kMaxStopBytes + 4); }

 private:
  StopMatcher matcher_;
  Utf8Repair repair_;
  bool stopped_ = false;
};

}  // namespace ull
