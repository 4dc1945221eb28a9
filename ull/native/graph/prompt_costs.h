// Whether a part of a prompt is read as a chunk or in rounds of 64 tokens, whose bits are the same. A chunk reads the
// weights once for up to 512 tokens, but its attention walks through the pages with a block for so many of its tokens:
// behind a long cache a few tokens take about as long as many, where a round shares the pages out to all blocks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/params.h"

namespace ull::graph {

class PromptCosts {
 public:
  static constexpr int kFewTokens = gpu::kChunkTile;  // of the smaller of two chunks that are measured

  // What a graph takes with so many tokens at position 0 and at `far`; 0: unknown.
  struct Measured {
    int64_t near_ns = 0;
    int64_t far_ns = 0;
  };

  // Nothing is known: whatever may be a chunk is one.
  PromptCosts() = default;
  // round: of kTreeTokens tokens; few, many: of chunks of kFewTokens and kChunkTokens. far: 0: no position was.
  PromptCosts(const Measured& round, const Measured& few, const Measured& many, int far) noexcept
      : known_(round.near_ns > 0 && few.near_ns > 0 && many.near_ns > 0),
        round_(line(round, far)),
        few_(line(few, far)),
        many_(line(many, far)) {}

  // Of `count` tokens, more than kTreeTokens and at most kChunkTokens, from position `start` on. What would save less
  // than a tenth of a millisecond is no reason to read the weights more than once.
  [[nodiscard]] bool prefers_chunk(int count, int start) const noexcept {
    return !known_ || chunk_ns(count, start) <= rounds_ns(count, start) + kLeastSavedNs;
  }

 private:
  static constexpr double kLeastSavedNs = 100'000.0;

  struct Line {
    double first_ns = 0.0;     // at position 0
    double position_ns = 0.0;  // more for each position before it
    [[nodiscard]] double at(double position) const noexcept { return first_ns + position * position_ns; }
  };

  [[nodiscard]] static Line line(const Measured& measured, int far) noexcept {
    const auto longer = static_cast<double>(measured.far_ns - measured.near_ns);
    const bool sloped = far > 0 && measured.far_ns > 0;
    return {static_cast<double>(measured.near_ns), sloped ? std::max(longer, 0.0) / far : 0.0};
  }
  [[nodiscard]] double chunk_ns(int count, int start) const noexcept {
    const double share = std::clamp((count - kFewTokens) / double{gpu::kChunkTokens - kFewTokens}, 0.0, 1.0);
    return few_.at(start) + share * (many_.at(start) - few_.at(start));
  }
  [[nodiscard]] double rounds_ns(int count, int start) const noexcept {
    const int rounds = (count + gpu::kTreeTokens - 1) / gpu::kTreeTokens;
    return rounds * round_.at(start + count / 2.0);
  }

  bool known_ = false;
  Line round_;
  Line few_;
  Line many_;
};

}  // namespace ull::graph
