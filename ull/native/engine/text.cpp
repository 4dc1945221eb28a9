#include "engine/text.h"

namespace ull {

// The first byte of a character fixes its length and the range of its second byte (Unicode 15, table 3-7).
bool Utf8Scanner::accept(uint8_t byte) noexcept {
  if (missing_ > 0) {
    if (byte < low_ || byte > high_) return false;
    --missing_;
    low_ = 0x80;
    high_ = 0xBF;
    return true;
  }
  if (byte < 0x80) return true;
  if (byte < 0xC2 || byte > 0xF4) return false;
  missing_ = byte < 0xE0 ? 1 : byte < 0xF0 ? 2 : 3;
  low_ = byte == 0xE0 ? 0xA0 : byte == 0xF0 ? 0x90 : 0x80;
  high_ = byte == 0xED ? 0x9F : byte == 0xF4 ? 0x8F : 0xBF;
  return true;
}

void TextFilter::reset(const StopSet* stops, uint32_t leading_spaces) noexcept {
  stops_ = stops;
  matcher_.reset(stops);
  leading_spaces_ = leading_spaces;
  stopped_ = false;
}

void TextFilter::drop_spaces(std::string_view& text) noexcept {
  while (leading_spaces_ > 0 && !text.empty()) {
    if (text.front() != ' ') {
      leading_spaces_ = 0;
      return;
    }
    text.remove_prefix(1);
    --leading_spaces_;
  }
}

void Utf8Repair::reset() noexcept {
  scanner_.reset();
  pending_ = 0;
}

void ByteRun::reset() noexcept { state_ = State::kNone; }

void ByteRun::begin() noexcept {
  state_ = State::kHeld;
  scanner_.reset();
  held_ = 0;
}

// Whether the bytes held complete a stop string if they are text.
bool ByteRun::completes_stop(const TextFilter& filter) const noexcept {
  if (!filter.searches()) return false;
  TextFilter trial = filter;
  NoText nowhere;
  trial.write({bytes_.data(), held_}, nowhere);
  return trial.stopped();
}

void TextAssembler::reset(const StopSet* stops, LeadingSpaces leading) noexcept {
  filter_.reset(stops, leading.count);
  repair_.reset();
  run_.reset();
  first_token_only_ = leading.first_token_only;
}

}  // namespace ull
