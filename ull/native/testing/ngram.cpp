#include "testing/ngram.h"

#include <algorithm>
#include <bit>

namespace ull {
namespace {

constexpr int kRecent = 16;  // tokens compared to tell whether the history is still the one indexed

}  // namespace

NgramDrafter::NgramDrafter(int context)
    : previous_(static_cast<size_t>(context), -1), tokens_(static_cast<size_t>(context), -1) {
  const int bits = std::clamp(static_cast<int>(std::bit_width(static_cast<unsigned>(context))), 8, 20);
  shift_ = 32 - bits;
  latest_.assign(size_t{1} << bits, -1);
}

uint32_t NgramDrafter::bucket(int32_t first, int32_t second) const noexcept {
  const uint32_t mixed = static_cast<uint32_t>(first) * 0x9E3779B1U ^ static_cast<uint32_t>(second) * 0x85EBCA6BU;
  return (mixed ^ mixed >> 15) * 0xC2B2AE35U >> shift_;
}

// Indexes history[0, count), from the start if it is not a continuation of what is indexed. Only the newest indexed
// tokens are compared: a stale entry further back costs a useless look, because a query compares tokens.
void NgramDrafter::follow(const int32_t* history, int count) noexcept {
  const int recent = std::min(indexed_, kRecent);
  const bool continues =
      indexed_ <= count && (indexed_ == 0 || history[0] == tokens_[0]) &&
      std::equal(history + indexed_ - recent, history + indexed_, tokens_.data() + indexed_ - recent);
  if (!continues) {
    std::fill(latest_.begin(), latest_.end(), -1);
    indexed_ = 0;
  }
  for (; indexed_ < count; ++indexed_) {
    const size_t at = static_cast<size_t>(indexed_);
    tokens_[at] = history[at];
    if (indexed_ == 0) continue;
    int32_t& newest = latest_[bucket(history[at - 1], history[at])];
    previous_[at] = newest;
    newest = indexed_;
  }
}

int NgramDrafter::confidence(const DraftContext& context) noexcept {
  const int32_t* history = context.history;
  const int position = context.position;
  match_ = -1;
  length_ = 0;
  if (position < kShortest || position >= static_cast<int>(tokens_.size())) return -1;
  follow(history, position);  // not the newest token: the newest pair must not find itself
  int place = latest_[bucket(history[position - 1], history[position])];
  for (int looked = 0; place > 0 && looked < kMostPlaces && length_ < kLongest; ++looked) {
    int common = 0;
    while (common < kLongest && common <= place && history[place - common] == history[position - common]) ++common;
    if (common >= kShortest && common > length_) {
      length_ = common;
      match_ = place;
    }
    place = previous_[static_cast<size_t>(place)];
  }
  if (match_ < 0) return -1;
  return length_ >= 8 ? 3 : length_ >= 5 ? 2 : length_ >= 3 ? 1 : 0;
}

Status NgramDrafter::propose(const DraftContext& context, const TreePlan& plan, DraftTree& tree) noexcept {
  if (match_ < 0) return Status::kOk;
  const int period = context.position - match_;
  int node = 0;
  for (int depth = 1; depth <= plan.depth && node >= 0; ++depth) {
    // Beyond the present the text is taken to go on repeating what lies between the match and now.
    node = tree.add(node, context.history[match_ + 1 + (depth - 1) % period]);
  }
  return Status::kOk;
}

}  // namespace ull
