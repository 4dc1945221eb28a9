// A msgpack encoder into a caller's buffer (https://github.com/msgpack/msgpack/blob/master/spec.md), always in the
// shortest form, as msgspec writes it. It never writes past the end: once something does not fit, ok() is false and
// nothing more is written.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

namespace ull {

class MsgpackWriter {
 public:
  explicit MsgpackWriter(std::span<uint8_t> buffer) noexcept : buffer_(buffer) {}

  [[nodiscard]] bool ok() const noexcept { return ok_; }
  [[nodiscard]] std::span<const uint8_t> bytes() const noexcept { return buffer_.first(size_); }

  void nil() noexcept { byte(0xC0); }
  void boolean(bool value) noexcept { byte(value ? 0xC3 : 0xC2); }

  void integer(uint64_t value) noexcept {
    if (value < 0x80) {
      byte(static_cast<uint8_t>(value));
    } else if (value <= 0xFF) {
      tagged<uint8_t>(0xCC, value);
    } else if (value <= 0xFFFF) {
      tagged<uint16_t>(0xCD, value);
    } else if (value <= 0xFFFF'FFFF) {
      tagged<uint32_t>(0xCE, value);
    } else {
      tagged<uint64_t>(0xCF, value);
    }
  }

  void real(float value) noexcept { tagged<uint32_t>(0xCA, std::bit_cast<uint32_t>(value)); }

  void real(double value) noexcept { tagged<uint64_t>(0xCB, std::bit_cast<uint64_t>(value)); }

  void text(std::string_view value) noexcept {
    if (value.size() < 32) {
      byte(static_cast<uint8_t>(0xA0 | value.size()));
    } else if (value.size() <= 0xFF) {
      tagged<uint8_t>(0xD9, value.size());
    } else if (value.size() <= 0xFFFF) {
      tagged<uint16_t>(0xDA, value.size());
    } else {
      tagged<uint32_t>(0xDB, value.size());
    }
    raw(value.data(), value.size());
  }

  void binary(std::span<const uint8_t> value) noexcept {
    if (value.size() <= 0xFF) {
      tagged<uint8_t>(0xC4, value.size());
    } else if (value.size() <= 0xFFFF) {
      tagged<uint16_t>(0xC5, value.size());
    } else {
      tagged<uint32_t>(0xC6, value.size());
    }
    raw(value.data(), value.size());
  }

  // Followed by `count` values.
  void array(uint64_t count) noexcept {
    if (count < 16) {
      byte(static_cast<uint8_t>(0x90 | count));
    } else if (count <= 0xFFFF) {
      tagged<uint16_t>(0xDC, count);
    } else {
      tagged<uint32_t>(0xDD, count);
    }
  }

  // Followed by `count` pairs of key and value.
  void map(uint64_t count) noexcept {
    if (count < 16) {
      byte(static_cast<uint8_t>(0x80 | count));
    } else {
      tagged<uint16_t>(0xDE, count);
    }
  }

 private:
  void byte(uint8_t value) noexcept { raw(&value, 1); }

  template <typename Integer>
  void tagged(uint8_t tag, uint64_t value) noexcept {
    uint8_t bytes[1 + sizeof(Integer)];
    bytes[0] = tag;
    for (size_t i = 0; i < sizeof(Integer); ++i) {
      bytes[1 + i] = static_cast<uint8_t>(value >> (8 * (sizeof(Integer) - 1 - i)));  // big endian
    }
    raw(bytes, sizeof(bytes));
  }

  void raw(const void* data, size_t count) noexcept {
    if (!ok_ || count > buffer_.size() - size_) {
      ok_ = false;
      return;
    }
    if (count > 0) std::memcpy(buffer_.data() + size_, data, count);
    size_ += count;
  }

  std::span<uint8_t> buffer_;
  size_t size_ = 0;
  bool ok_ = true;
};

}  // namespace ull
