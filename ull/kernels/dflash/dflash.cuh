// What a DFlash head is (Chen et al., arXiv 2602.06036; DSpark's, arXiv 2607.05147), and which rows of a pass are
// ranked.
#pragma once

#include "model.cuh"

namespace ull::gpu {

inline constexpr int kTargetHidden = ULL_DFLASH_TARGET_HIDDEN;
inline constexpr int kRead = ULL_DFLASH_TAPS;                             // layers whose taps a position is made of
inline constexpr bool kAnchorPredicts = ULL_DFLASH_ANCHOR_PREDICTS != 0;  // entry 0 of a block predicts the token at 1
inline constexpr bool kMapped = ULL_DFLASH_MAPPED != 0;                   // its tokens have numbers of their own
inline constexpr bool kMarkov = ULL_DFLASH_MARKOV > 0;                    // it has a Markov term,
inline constexpr int kRank = kMarkov ? ULL_DFLASH_MARKOV : kColumnUnit;   // of that rank,
inline constexpr bool kGated = ULL_DFLASH_GATED != 0;                     // behind a gate
inline constexpr bool kConfident = ULL_DFLASH_CONFIDENCE > 0;             // it says how likely its drafts are accepted,
inline constexpr bool kConfidenceReadsMarkov = ULL_DFLASH_CONFIDENCE > 1;  // and reads the token before for that
static_assert(kBlock, "entries see each other");
static_assert(kTaps == 0, "nothing is kept but the residual");

// The rows that are ranked: of a block its first predicting entries, of nodes the last ones.
struct Ranked {
  bool block;
  int count;
  int first;  // node; 0 of a block

  ULL_DEVICE explicit Ranked(const Round* round)
      : block(round->mode == RoundMode::kDflashBlock),
        count(round->max_tokens < round->count ? round->max_tokens : round->count),
        first(block ? 0 : round->count - count) {}

  // How far behind the root the token stands that row `index` predicts, and the entry of the block that does.
  ULL_DEVICE int depth(const Round* round, int index) const {
    return 1 + (block ? index : round->depths[first + index]);
  }
  ULL_DEVICE static int entry(int depth) { return kAnchorPredicts ? depth - 1 : depth; }
};

}  // namespace ull::gpu
