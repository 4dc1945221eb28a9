// From token ids to text, incrementally: the text of a list of ids is what the checkpoint's own tokenizer makes of the
// whole list with its special tokens left out (tokenizers' `decode(ids, skip_special_tokens=True)`), cut at the first
// stop string. It depends only on the ids, never on the rounds in which they come, and what has been released is never
// taken back. No allocation.
//
// - A byte-level vocabulary's tokens are parts of characters. Every maximal invalid subpart becomes U+FFFD
// (Utf8Repair).
// - A SentencePiece vocabulary has byte tokens (<0xE2>). A run of them, special tokens in between not counted, is text
//   if all of it is valid; else each of its bytes is U+FFFD (ByteRun). So a run is held until it ends, is broken, or
//   completes a stop string. The one exception to decode(): a run that has been valid for kTrustedRunBytes is released,
//   and from there on character by character.
// - Leading spaces that the decoder strips are stripped where a text begins: a completion goes on behind its prompt.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "engine/stops.h"

namespace ull {

inline constexpr size_t kTrustedRunBytes = 64;  // bytes of whole characters after which a run is no longer held
inline constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

enum class PieceKind : uint8_t {
  kSkipped,    // special tokens and ids without a token: as if they were not there
  kText,       // whole characters
  kBytes,      // parts of characters
  kByteToken,  // one byte of a run
};

// What one token adds to a text.
struct Piece {
  std::string_view bytes;  // empty if it is skipped
  PieceKind kind = PieceKind::kSkipped;
};

// The spaces that a text loses at its beginning.
struct LeadingSpaces {
  uint32_t count = 0;             // at most so many
  bool first_token_only = false;  // and none behind the first token
};

// Where finished text goes: a caller's buffer. The caller guarantees room.
struct TextBuffer {
  char* data = nullptr;
  size_t size = 0;
  void append(std::string_view text) noexcept {
    std::memcpy(data + size, text.data(), text.size());
    size += text.size();
  }
};

// For those who only want to know where a stop string ends.
struct NoText {
  void append(std::string_view) noexcept {}
};

// Follows bytes through UTF-8.
class Utf8Scanner {
 public:
  void reset() noexcept { missing_ = 0; }
  // False if no character goes on, or begins, with `byte`: nothing has changed then.
  [[nodiscard]] bool accept(uint8_t byte) noexcept;
  // Whether no character is incomplete.
  [[nodiscard]] bool whole() const noexcept { return missing_ == 0; }

 private:
  int missing_ = 0;  // bytes that the character still needs
  uint8_t low_ = 0;  // range of the next one
  uint8_t high_ = 0;
};

// The last stage: drops leading spaces and ends the text at the first stop string.
class TextFilter {
 public:
  // `stops` must outlive the filter's use.
  void reset(const StopSet* stops, uint32_t leading_spaces) noexcept;

  template <typename Out>
  void write(std::string_view text, Out& out) noexcept {
    if (leading_spaces_ > 0) drop_spaces(text);
    if (stops_->count() == 0) {
      out.append(text);
      return;
    }
    if (stopped_) return;
    for (const char byte : text) {
      if (!matcher_.feed(static_cast<uint8_t>(byte), [&](uint8_t released) { append(released, out); })) continue;
      stopped_ = true;
      return;
    }
  }
  template <typename Out>
  void finish(Out& out) noexcept {
    matcher_.finish([&](uint8_t released) { append(released, out); });
  }

  void keep_spaces() noexcept { leading_spaces_ = 0; }
  [[nodiscard]] uint32_t leading_spaces() const noexcept { return leading_spaces_; }
  [[nodiscard]] bool searches() const noexcept { return stops_->count() > 0; }
  [[nodiscard]] bool stopped() const noexcept { return stopped_; }

 private:
  void drop_spaces(std::string_view& text) noexcept;
  template <typename Out>
  static void append(uint8_t byte, Out& out) noexcept {
    const char character = static_cast<char>(byte);
    out.append({&character, 1});
  }

  const StopSet* stops_ = nullptr;
  StopMatcher matcher_;
  uint32_t leading_spaces_ = 0;  // still to be dropped
  bool stopped_ = false;
};

// Passes valid UTF-8 on, character by character, and puts U+FFFD for each maximal invalid subpart, like Rust's
// String::from_utf8_lossy and Python's errors="replace" (Unicode 15, section 3.9, "Substitution of Maximal Subparts").
class Utf8Repair {
 public:
  void reset() noexcept;

  template <typename Out>
  void feed(uint8_t byte, TextFilter& filter, Out& out) noexcept {
    if (!scanner_.accept(byte)) {
      if (pending_ == 0) {
        filter.write(kReplacement, out);
        return;
      }
      finish(filter, out);
      feed(byte, filter, out);
      return;
    }
    bytes_[pending_++] = static_cast<char>(byte);
    if (!scanner_.whole()) return;
    filter.write({bytes_.data(), pending_}, out);
    pending_ = 0;
  }

  // No byte follows that could complete the character.
  template <typename Out>
  void finish(TextFilter& filter, Out& out) noexcept {
    if (pending_ > 0) filter.write(kReplacement, out);
    reset();
  }

 private:
  Utf8Scanner scanner_;
  std::array<char, 4> bytes_{};  // the incomplete character
  size_t pending_ = 0;
};

// A run of byte tokens. A stop string that the bytes so far complete ends the text, and with it the run.
class ByteRun {
 public:
  void reset() noexcept;

  template <typename Out>
  void feed(uint8_t byte, TextFilter& filter, Out& out) noexcept {
    if (state_ == State::kNone) begin();
    if (state_ == State::kBroken || !scanner_.accept(byte)) {
      replace(held_ + 1, filter, out);
      state_ = State::kBroken;
      return;
    }
    bytes_[held_++] = static_cast<char>(byte);
    if (!scanner_.whole()) return;
    if (state_ == State::kHeld && held_ < kTrustedRunBytes && !completes_stop(filter)) return;
    state_ = State::kTrusted;
    release(filter, out);
  }

  template <typename Out>
  void end(TextFilter& filter, Out& out) noexcept {
    if (state_ == State::kNone) return;
    if (scanner_.whole()) {
      release(filter, out);
    } else {
      replace(held_, filter, out);
    }
    state_ = State::kNone;
  }

 private:
  enum class State : uint8_t {
    kNone,     // no run
    kHeld,     // valid so far; nothing of it is released
    kTrusted,  // all but the incomplete character is released
    kBroken,   // invalid
  };

  void begin() noexcept;
  [[nodiscard]] bool completes_stop(const TextFilter& filter) const noexcept;
  template <typename Out>
  void release(TextFilter& filter, Out& out) noexcept {
    filter.write({bytes_.data(), held_}, out);
    held_ = 0;
  }
  template <typename Out>
  void replace(size_t count, TextFilter& filter, Out& out) noexcept {
    for (size_t i = 0; i < count; ++i) filter.write(kReplacement, out);
    held_ = 0;
    scanner_.reset();
  }

  State state_ = State::kNone;
  Utf8Scanner scanner_;
  size_t held_ = 0;
  std::array<char, kTrustedRunBytes + 3> bytes_{};
};

class TextAssembler {
 public:
  // `stops` must outlive the assembler's use.
  void reset(const StopSet* stops, LeadingSpaces leading = {}) noexcept;

  // Takes one token, appends finished text to `out` (append(std::string_view)). True once a stop string is complete;
  // everything after it is ignored. Appends at most text_bound(piece.bytes.size()) bytes.
  template <typename Out>
  bool feed(const Piece& piece, Out& out) noexcept {
    if (filter_.stopped() || piece.kind == PieceKind::kSkipped) return filter_.stopped();
    if (piece.kind == PieceKind::kByteToken) {
      repair_.finish(filter_, out);
      run_.feed(static_cast<uint8_t>(piece.bytes[0]), filter_, out);
    } else {
      run_.end(filter_, out);
      if (piece.kind == PieceKind::kText) {
        if (!piece.bytes.empty()) repair_.finish(filter_, out);
        filter_.write(piece.bytes, out);
      } else {
        for (const char byte : piece.bytes) repair_.feed(static_cast<uint8_t>(byte), filter_, out);
      }
    }
    if (first_token_only_) filter_.keep_spaces();
    return filter_.stopped();
  }

  // The stream has ended: appends what was held back, U+FFFD for an incomplete character.
  template <typename Out>
  void finish(Out& out) noexcept {
    run_.end(filter_, out);
    repair_.finish(filter_, out);
    filter_.finish(out);
  }

  // The leading spaces that text still to come may lose.
  [[nodiscard]] LeadingSpaces leading_spaces() const noexcept { return {filter_.leading_spaces(), first_token_only_}; }

  // Bytes that feed() of `bytes` bytes followed by finish() can append: every byte may become a U+FFFD.
  [[nodiscard]] static constexpr size_t text_bound(size_t bytes) noexcept {
    return 3 * (bytes + kTrustedRunBytes + 8) + kMaxStopBytes;
  }

 private:
  TextFilter filter_;
  Utf8Repair repair_;
  ByteRun run_;
  bool first_token_only_ = false;
};

}  // namespace ull
