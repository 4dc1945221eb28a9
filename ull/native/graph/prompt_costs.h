// By what prompts are read: chunks, rounds of 64 tokens, and the first round, which may take the last 64 tokens with
// it, or the last chunk. The bits are the same. A chunk reads the weights once for up to 512 tokens, but it takes as
// long as its whole tiles of 128. How much longer it takes behind a cache depends on how many tiles those are: of few
// tokens blocks share the pages out, of many each walks through all of them.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "graph/cost_line.h"
#include "kernels/params.h"

namespace ull::graph {

// What draws the token behind a prompt.
enum class FirstRound : uint8_t {
  kSingle,  // a round of the prompt's last token
  kFull,    // one of its last tokens, as many as a round holds
  kChunk,   // its last chunk
};

class PromptCosts {
 public:
  static constexpr int kTiles = gpu::kChunkParts;

  // What a graph takes with so many tokens at position 0 and at `far`; 0: unknown.
  struct Measured {
    int64_t near_ns = 0;
    int64_t far_ns = 0;
  };
  // Rounds that draw the token behind a prompt: of kTreeTokens tokens, and of one. far: where they were measured, too.
  // drawing_ns: what a chunk takes more that draws it. widest: most tokens that the steps before it read.
  struct First {
    Measured full, single;
    int far = 0;
    int64_t drawing_ns = 0;
    int widest = gpu::kChunkTokens;
  };

  // Nothing is known: whatever may be a chunk is one.
  PromptCosts() = default;
  // round: of kTreeTokens tokens; chunks: of 1, 2, .. tiles. far: 0: no position was.
  PromptCosts(const Measured& round, const std::array<Measured, kTiles>& chunks, int far) noexcept
      : PromptCosts(round, chunks, far, First{}) {}
  PromptCosts(const Measured& round, const std::array<Measured, kTiles>& chunks, int far, const First& first) noexcept
      : known_(round.near_ns > 0),
        first_known_(first.full.near_ns > 0 && first.single.near_ns > 0),
        round_(line(round, far)),
        full_(line(first.full, first.far)),
        single_(line(first.single, first.far)),
        drawing_ns_(static_cast<double>(first.drawing_ns)),
        widest_(first.widest) {
    for (size_t i = 0; i < chunks.size(); ++i) {
      chunks_[i] = line(chunks[i], far);
      known_ = known_ && chunks[i].near_ns > 0;
    }
  }

  // Of `count` tokens, more than kTreeTokens and at most kChunkTokens, from position `start` on. What would save less
  // than a tenth of a millisecond is no reason to read the weights more than once, here and below.
  [[nodiscard]] bool prefers_chunk(int count, int start) const noexcept {
    return !known_ || chunk_ns(count, start) <= rounds_ns(count, start) + kLeastSavedNs;
  }

  // Of the `count` tokens of a prompt that are to be read from position `start` on. last: how many the last chunk has,
  // behind which may be drawn; 0: there is none.
  [[nodiscard]] FirstRound first(int count, int start, int last) const noexcept {
    if (count <= gpu::kTreeTokens) return FirstRound::kFull;
    const int end = start + count;
    const bool draws = last > gpu::kTreeTokens;
    if (!known_ || !first_known_) return draws ? FirstRound::kChunk : FirstRound::kFull;
    FirstRound best = FirstRound::kFull;
    double least = read_ns(count - gpu::kTreeTokens, start) + full_.at(end - gpu::kTreeTokens);
    if (const double single = read_ns(count - 1, start) + single_.at(end - 1); single + kLeastSavedNs < least) {
      best = FirstRound::kSingle;
      least = single;
    }
    if (!draws) return best;
    const double chunk = read_ns(count - last, start) + chunk_ns(last, end - last) + drawing_ns_;
    return chunk <= least + kLeastSavedNs ? FirstRound::kChunk : best;
  }

 private:
  static constexpr double kLeastSavedNs = 100'000.0;

  [[nodiscard]] static CostLine line(const Measured& measured, int far) noexcept {
    return CostLine::through(measured.near_ns, measured.far_ns, far);
  }
  [[nodiscard]] double chunk_ns(int count, int start) const noexcept {
    return chunks_[static_cast<size_t>((count - 1) / gpu::kChunkTile)].at(start);
  }
  [[nodiscard]] double rounds_ns(int count, int start) const noexcept {
    const int rounds = (count + gpu::kTreeTokens - 1) / gpu::kTreeTokens;
    return rounds * round_.at(start + count / 2.0);
  }
  // In the parts that it is read in.
  [[nodiscard]] double read_ns(int count, int start) const noexcept {
    double sum = 0.0;
    for (int part = 0; count > 0; count -= part, start += part) {
      part = std::min(count, widest_);
      const bool in_chunk = part > gpu::kTreeTokens && prefers_chunk(part, start);
      if (!in_chunk) part = std::min(part, gpu::kTreeTokens);
      sum += in_chunk ? chunk_ns(part, start) : round_.at(start);
    }
    return sum;
  }

  bool known_ = false, first_known_ = false;
  CostLine round_, full_, single_;
  double drawing_ns_ = 0.0;
  int widest_ = gpu::kChunkTokens;
  std::array<CostLine, kTiles> chunks_;
};

}  // namespace ull::graph
