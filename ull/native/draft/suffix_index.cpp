#include "draft/suffix_index.h"

#include <algorithm>
#include <bit>

namespace ull {

SuffixIndex::SuffixIndex(int capacity) : capacity_(std::max(capacity, 1)) {
  const auto ring = std::bit_ceil(static_cast<uint32_t>(capacity_));
  bits_ = std::clamp(static_cast<int>(std::bit_width(ring)) - 1, 8, 20);
  mask_ = ring - 1;
  tokens_.assign(ring, -1);
  previous_.assign(size_t{ring} * kRunCount, 0);
  latest_.assign(size_t{kRunCount} << bits_, 0);
}

int64_t SuffixIndex::bytes() const noexcept {
  return static_cast<int64_t>((tokens_.size() + previous_.size() + latest_.size()) * sizeof(int32_t));
}

template <typename Token>
size_t SuffixIndex::bucket(int run, const Token& token) const noexcept {
  uint32_t mixed = 0;
  for (int i = 0; i < kRuns[run]; ++i) mixed = ((mixed ^ static_cast<uint32_t>(token(i))) * 0x9E3779B1U) ^ mixed >> 15;
  mixed = (mixed ^ mixed >> 13) * 0xC2B2AE35U;
  return (static_cast<size_t>(run) << bits_) + (mixed >> (32 - bits_));
}

void SuffixIndex::append(int32_t token) noexcept {
  const uint32_t at = end_++;
  tokens_[at & mask_] = token;
  count_ = std::min(count_ + 1, capacity_);
  for (int run = 0; run < kRunCount; ++run) {
    if (count_ < kRuns[run]) continue;
    uint32_t& newest = latest_[bucket(run, [&](int i) { return tokens_[(at - static_cast<uint32_t>(i)) & mask_]; })];
    previous_[size_t{at & mask_} * kRunCount + static_cast<size_t>(run)] = newest;
    newest = at;
  }
}

int SuffixIndex::common(uint32_t at, const int32_t* last, int length) const noexcept {
  const int most = std::min({length, kLongest, count_ - behind(at)});
  int same = 0;
  while (same < most && token(at - static_cast<uint32_t>(same)) == last[-same]) ++same;
  return same;
}

// A place is old by its distance from the end. A stale entry costs a useless look: tokens are compared, and a chain is
// only followed towards what is older.
int SuffixIndex::find(const int32_t* text, int length, Runs runs, Place* places, int most) const noexcept {
  const int32_t* last = text + length - 1;
  int found = 0;
  for (int run = 0; run < kRunCount && found < most; ++run) {
    if (length < kRuns[run]) continue;
    const int first = found;
    int age = -1;
    uint32_t at = latest_[bucket(run, [&](int i) { return last[-i]; })];
    for (int looked = 0; looked < kMostLooks && found < most; ++looked) {
      const int now = behind(at);
      if (now <= age || now >= count_) break;
      age = now;
      const int same = common(at, last, length);
      if (same >= kRuns[run] && (run == 0 || same < kRuns[run - 1])) {
        int slot = found++;
        for (; slot > first && places[slot - 1].common < same; --slot) places[slot] = places[slot - 1];
        places[slot] = {at, same};
      }
      at = previous_[size_t{at & mask_} * kRunCount + static_cast<size_t>(run)];
    }
    if (found > 0 && runs == Runs::kLongest) break;
  }
  return found;
}

}  // namespace ull
