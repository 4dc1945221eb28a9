// Which of a program's graphs a round takes: of those that hold its nodes the cheapest, as measured, which need not be
// the smallest. What a round computes does not depend on it, bit for bit: see GraphProgram::rounds.
#pragma once

#include <cstdint>

#include "exec/graph/program.h"

namespace ull::graph {

class RoundGraphs {
 public:
  // Until they are measured, the smallest that holds a round is its own. The program must outlive it.
  explicit RoundGraphs(const GraphProgram& program) noexcept;

  // What a round of each graph takes, and a chunk of a prompt; 0: unknown.
  void measured(const int64_t (&round_ns)[kCostSizes], int64_t prefill_ns) noexcept;

  // Of a round of `nodes` (1 .. most_nodes()).
  [[nodiscard]] void* round_for(int nodes) const noexcept;
  // Of a chunk of `tokens` (1 .. kTreeTokens) that only fills the cache.
  [[nodiscard]] void* prefill_for(int tokens) const noexcept;
  // Which graph kCostTokens[size] nodes take; -1: none holds them.
  [[nodiscard]] int chosen(int size) const noexcept { return chosen_[size]; }

 private:
  // The index of the smallest size that holds `nodes`.
  [[nodiscard]] static int size_for(int nodes) noexcept;

  const GraphProgram& program_;
  int chosen_[kCostSizes];
  int64_t round_ns_[kCostSizes] = {};
  int64_t prefill_ns_ = 0;
};

}  // namespace ull::graph
