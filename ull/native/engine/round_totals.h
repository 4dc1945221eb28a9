// What the rounds of one request did, for its terminal frame and the statistics.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "executor/executor.h"

namespace ull {

inline constexpr int kMaxDraftDepth = kMaxTreeTokens - 1;

struct RoundTotals {
  int32_t rounds = 0;
  int32_t drafted_tokens = 0;  // the whole of every tree but its root
  int32_t accepted_tokens = 0;
  std::array<int32_t, kDrafterKinds> by_drafter{};          // rounds, by what proposed; kNone: plain rounds
  std::array<int32_t, kMaxDraftDepth> accepted_by_depth{};  // [d] rounds whose draft was accepted to depth d + 1

  void count(const RoundResult& result) noexcept {
    ++rounds;
    ++by_drafter[static_cast<size_t>(result.drafter)];
    drafted_tokens += result.tree_tokens - 1;
    accepted_tokens += result.accepted;
    for (int32_t depth = 0; depth < result.accepted; ++depth) ++accepted_by_depth[static_cast<size_t>(depth)];
  }

  // How deep any draft was accepted.
  [[nodiscard]] int deepest() const noexcept {
    // A draft accepted to a depth was accepted to every smaller one.
    return static_cast<int>(std::find(accepted_by_depth.begin(), accepted_by_depth.end(), 0) -
                            accepted_by_depth.begin());
  }
};

}  // namespace ull
