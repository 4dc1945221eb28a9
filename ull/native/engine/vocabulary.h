// vocab.bin: what each token id means in bytes (layout: magic "ULLVOCAB", u32 version, u32 count, u32 offsets[count+1],
// u8 flags[count], bytes; little endian).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace ull {

class Vocabulary {
 public:
  // Throws std::runtime_error naming the file and what is wrong with it.
  explicit Vocabulary(const std::string& path);

  [[nodiscard]] int size() const noexcept { return static_cast<int>(pieces_.size()); }
  // Bytes of the longest token.
  [[nodiscard]] size_t longest() const noexcept { return longest_; }

  // The token's bytes as text; empty for special tokens and ids outside the vocabulary.
  [[nodiscard]] std::span<const uint8_t> text(int32_t token) const noexcept {
    if (token < 0 || static_cast<size_t>(token) >= pieces_.size()) return {};
    const Piece piece = pieces_[static_cast<size_t>(token)];
    return {bytes_.data() + piece.offset, piece.length};
  }

 private:
  struct Piece {
    uint32_t offset;
    uint32_t length;  // 0 for special tokens: they are never rendered
  };
  std::vector<uint8_t> bytes_;
  std::vector<Piece> pieces_;
  size_t longest_ = 0;
};

}  // namespace ull
