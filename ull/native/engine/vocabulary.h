// vocab.bin: what each token id means in bytes (layout: magic "ULLVOCAB", u32 version, u32 count, u32 leading_spaces,
// u32 offsets[count+1], u8 flags[count], bytes; little endian).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/text.h"

namespace ull {

class Vocabulary {
 public:
  // Throws std::runtime_error naming the file and what is wrong with it.
  explicit Vocabulary(const std::string& path);

  [[nodiscard]] int size() const noexcept { return static_cast<int>(entries_.size()); }
  // Bytes of the longest token.
  [[nodiscard]] size_t longest() const noexcept { return longest_; }

  // What the token adds to a text; ids outside the vocabulary are skipped.
  [[nodiscard]] Piece piece(int32_t token) const noexcept {
    if (token < 0 || static_cast<size_t>(token) >= entries_.size()) return {};
    const Entry entry = entries_[static_cast<size_t>(token)];
    return {{bytes_.data() + entry.offset, entry.length}, static_cast<PieceKind>(entry.kind)};
  }

  // The spaces that a whole text loses at its beginning.
  [[nodiscard]] LeadingSpaces leading_spaces() const noexcept { return leading_; }
  // The spaces that a text loses at its beginning if it goes on behind the tokens of `prompt`: none if these have text.
  [[nodiscard]] LeadingSpaces leading_spaces(std::span<const int32_t> prompt) const noexcept;

 private:
  struct Entry {
    uint32_t offset;
    uint32_t length : 30;  // 0 for special tokens: they are never rendered
    uint32_t kind : 2;     // PieceKind
  };
  static_assert(sizeof(Entry) == 8);

  std::vector<char> bytes_;
  std::vector<Entry> entries_;
  LeadingSpaces leading_;
  size_t longest_ = 0;
};

}  // namespace ull
