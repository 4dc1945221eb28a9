// Which of a program's graphs a round takes: of those that hold its nodes the cheapest where it stands, as measured,
// which need not be the smallest: a larger one's attention may be faster behind a long cache, or the same one's with
// more blocks (WideGraphs). What a round computes does not depend on it, bit for bit: see GraphProgram::rounds.
#pragma once

#include <cstdint>

#include "executor/sampling.h"
#include "graph/cost_line.h"
#include "graph/program.h"

namespace ull::graph {

// Whether a request asks for no more than what the sampler can do. Filters do nothing where nothing is drawn.
[[nodiscard]] bool serves(Sampler sampler, const Sampling& sampling) noexcept;

class RoundGraphs {
 public:
  // Until they are measured, the smallest that holds a round is its own, with the plain sampler where that serves. The
  // program must outlive it.
  explicit RoundGraphs(const GraphProgram& program) noexcept;

  // What a round of each graph takes, a single one with each sampler (but for kFull's) at position 0 (0: unknown), and
  // the graph that only fills the cache. widens: of which sizes the wide graph is the cheaper one where it is meant,
  // and then the line is through what that takes there.
  void measured(const CostLine (&rounds)[kCostSizes], const int64_t (&single_ns)[kSamplers], const CostLine& prefill,
                const bool (&widens)[kCostSizes]) noexcept;

  // Of a round of `nodes` (1 .. most_nodes()) from `position` on. keeps_logits: it leaves the exact logits of all
  // tokens, to draw again.
  [[nodiscard]] void* round_for(int nodes, int position, const Sampling& sampling,
                                bool keeps_logits = false) const noexcept;
  // Of burst_rounds rounds of one token from `position` on; null: one by one is all there is.
  [[nodiscard]] void* burst_for(const Sampling& sampling, int position) const noexcept {
    return program_.burst(single_for(sampling), is_wide(0, position));
  }
  // Of a chunk of `tokens` (1 .. kTreeTokens) from `position` on that only fills the cache.
  [[nodiscard]] void* prefill_for(int tokens, int position) const noexcept;
  // Which graph kCostTokens[size] nodes take from `position` on; -1: none holds them.
  [[nodiscard]] int chosen(int size, int position) const noexcept;
  // The sampler of a single round that asks for nothing.
  [[nodiscard]] Sampler plain() const noexcept { return plain_; }

 private:
  // Whether rounds of kCostTokens[size] take the wide graph from `position` on.
  [[nodiscard]] bool is_wide(int size, int position) const noexcept {
    return widens_[size] && position >= program_.wide.from;
  }
  [[nodiscard]] void* graph_of(int size, int position) const noexcept {
    return is_wide(size, position) ? program_.wide.rounds[size] : program_.rounds[size];
  }
  // The index of the smallest size that holds `nodes`.
  [[nodiscard]] static int size_for(int nodes) noexcept;
  [[nodiscard]] Sampler single_for(const Sampling& sampling, bool keeps_logits = false) const noexcept {
    if (serves(plain_, sampling) && !(keeps_logits && plain_ == Sampler::kScan)) return plain_;
    const bool plain = program_.single(Sampler::kPlain) != nullptr && serves(Sampler::kPlain, sampling);
    return plain ? Sampler::kPlain : Sampler::kFull;
  }

  const GraphProgram& program_;
  Sampler plain_ = Sampler::kFull;
  CostLine rounds_[kCostSizes] = {};
  CostLine prefill_;
  bool widens_[kCostSizes] = {};
};

}  // namespace ull::graph
