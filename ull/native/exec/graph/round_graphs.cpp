#include "exec/graph/round_graphs.h"

#include <algorithm>

namespace ull::graph {

RoundGraphs::RoundGraphs(const GraphProgram& program) noexcept : program_(program) { measured({}, 0); }

void RoundGraphs::measured(const int64_t (&round_ns)[kCostSizes], int64_t prefill_ns) noexcept {
  std::copy_n(round_ns, kCostSizes, round_ns_);
  prefill_ns_ = prefill_ns;
  int larger = -1;
  for (int i = kCostSizes - 1; i >= 0; --i) {
    const bool cheaper = larger >= 0 && round_ns_[larger] > 0 && round_ns_[larger] < round_ns_[i];
    if (program_.rounds[i] != nullptr && !cheaper) larger = i;
    chosen_[i] = larger;
  }
}

int RoundGraphs::size_for(int nodes) noexcept {
  const int* size = std::lower_bound(kCostTokens, kCostTokens + kCostSizes, nodes);
  return static_cast<int>(size - kCostTokens);
}

void* RoundGraphs::round_for(int nodes) const noexcept {
  const int size = size_for(nodes);
  return size < kCostSizes && chosen_[size] >= 0 ? program_.rounds[chosen_[size]] : nullptr;
}

// A round's graph fills the cache as well, and then its sampler does nothing; but it has the lm_head.
void* RoundGraphs::prefill_for(int tokens) const noexcept {
  const int graph = program_.rounds_prefill() ? chosen_[size_for(tokens)] : -1;
  const bool dearer = graph >= 0 && prefill_ns_ > 0 && prefill_ns_ < round_ns_[graph];
  return graph < 0 || dearer ? program_.prefill : program_.rounds[graph];
}

}  // namespace ull::graph
