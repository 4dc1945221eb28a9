// Which positions' hidden states lie in a ring: what the target leaves for the heads that draft for it ("taps") is kept
// for the newest positions alone, at slot position % capacity. A slot is known by the position, the token and the page
// that it belongs to, so that what another sequence has left there is not taken for one's own. A mistake would cost
// acceptance, never output.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kv/page.h"

namespace ull {

class TapTags {
 public:
  // capacity: positions. Allocates.
  explicit TapTags(int capacity) : tags_(static_cast<size_t>(capacity)) {}

  [[nodiscard]] int capacity() const noexcept { return static_cast<int>(tags_.size()); }
  [[nodiscard]] int slot(int32_t position) const noexcept { return position % capacity(); }

  void put(int32_t position, int32_t token, int32_t page) noexcept {
    tags_[static_cast<size_t>(slot(position))] = {position, token, page};
  }
  // The slots of `count` positions may have been written by a round of which nobody knows yet what it fed.
  void forget(int32_t position, int count) noexcept {
    for (int i = 0; i < std::min(count, capacity()); ++i) tags_[static_cast<size_t>(slot(position + i))] = {};
  }
  [[nodiscard]] bool holds(int32_t position, int32_t token, int32_t page) const noexcept {
    const Tag& tag = tags_[static_cast<size_t>(slot(position))];
    return tag.position == position && tag.token == token && tag.page == page;
  }
  // The first position from which on it holds the sequence's taps without a gap up to `end`; `end` if not even the
  // last is there, and never one before `begin`.
  [[nodiscard]] int32_t first_held(const int32_t* history, const int32_t* pages, int32_t begin,
                                   int32_t end) const noexcept {
    int32_t first = end;
    const int32_t least = std::max(begin, end - capacity());
    while (first > least && holds(first - 1, history[first - 1], pages[(first - 1) / kPageTokens])) --first;
    return first;
  }
  void clear() noexcept { std::fill(tags_.begin(), tags_.end(), Tag{}); }

 private:
  struct Tag {
    int32_t position = -1;
    int32_t token = 0;
    int32_t page = 0;
  };

  std::vector<Tag> tags_;
};

}  // namespace ull
