// Prompt lookup, which the suffix drafter is measured against: what followed the last time that the sequence's newest
// tokens stood in it. No model, no cost to speak of. An index of pairs (hash chains, as in zlib) grows with the
// sequence; a query walks the places where the newest pair stood before, the latest first, and takes the one with the
// longest common past.
#pragma once

#include <cstdint>
#include <vector>

#include "draft/drafter.h"

namespace ull {

class NgramDrafter final : public Drafter {
 public:
  static constexpr int kShortest = 2;     // tokens that must match
  static constexpr int kLongest = 32;     // no longer match is told from another
  static constexpr int kMostPlaces = 64;  // looked at per query

  // context: most tokens of a sequence.
  explicit NgramDrafter(int context);

  [[nodiscard]] DrafterKind kind() const noexcept override { return DrafterKind::kSuffix; }
  // By the length of the match: 2, 3 to 4, 5 to 7, 8 and more.
  [[nodiscard]] int confidence(const DraftContext& context) noexcept override;
  // A chain: the tokens that followed the match found by confidence().
  [[nodiscard]] Status propose(const DraftContext& context, const TreePlan& plan, DraftTree& tree) noexcept override;
  [[nodiscard]] int64_t cost_ns(int depth) const noexcept override { return 500 + 5 * depth; }

  [[nodiscard]] int match_length() const noexcept { return length_; }  // of the last query; 0: nothing matched

 private:
  void follow(const int32_t* history, int count) noexcept;
  [[nodiscard]] uint32_t bucket(int32_t first, int32_t second) const noexcept;

  int shift_;                      // 32 - log2 of the number of buckets
  std::vector<int32_t> latest_;    // [buckets] position of the newest pair's second token; -1: none
  std::vector<int32_t> previous_;  // [context] the pair before it in the same bucket
  std::vector<int32_t> tokens_;    // [context] what has been indexed
  int indexed_ = 0;
  int match_ = -1;  // position of the matching past's last token
  int length_ = 0;
};

}  // namespace ull
