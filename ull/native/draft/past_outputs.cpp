#include "draft/past_outputs.h"

#include <algorithm>

namespace ull {

PastOutputs::PastOutputs(int capacity)
    : capacity_(std::max(capacity, 1)),
      index_(capacity_),
      text_(std::make_unique<std::atomic<int32_t>[]>(static_cast<size_t>(capacity_) + 1)) {}

// The release of a token comes after the count of what came before it: whoever copies a token that has overwritten an
// older one sees that count, and drops it.
void PastOutputs::append(int32_t token) noexcept {
  token = std::max(token, kBoundary);
  index_.append(token);
  const uint64_t at = appended_.load(std::memory_order_relaxed);
  text_[at % (static_cast<uint64_t>(capacity_) + 1)].store(token, std::memory_order_release);
  appended_.store(at + 1, std::memory_order_release);
}

// The ring has a slot more than there are tokens kept: the one that is being written.
std::vector<int32_t> PastOutputs::copy() const {
  const auto capacity = static_cast<uint64_t>(capacity_);
  const uint64_t end = appended_.load(std::memory_order_acquire);
  const uint64_t begin = end > capacity ? end - capacity : 0;
  std::vector<int32_t> tokens(static_cast<size_t>(end - begin));
  for (uint64_t at = begin; at < end; ++at) {
    tokens[static_cast<size_t>(at - begin)] = text_[at % (capacity + 1)].load(std::memory_order_acquire);
  }
  const uint64_t now = appended_.load(std::memory_order_relaxed);
  const uint64_t kept = now > capacity ? now - capacity : 0;  // from there on nothing has been overwritten
  const auto overwritten = static_cast<ptrdiff_t>(std::min(std::max(kept, begin), end) - begin);
  tokens.erase(tokens.begin(), tokens.begin() + overwritten);
  return tokens;
}

}  // namespace ull
