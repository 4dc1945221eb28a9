#include "graph/round_graphs.h"

#include <algorithm>

namespace ull::graph {

bool serves(Sampler sampler, const Sampling& sampling) noexcept {
  if (sampler == Sampler::kFull) return true;
  const bool filters = sampling.temperature > 0.0F && (sampling.top_k > 0 || sampling.top_p < 1.0F);
  // The scan's bounds do not say which tokens min-p leaves out.
  const bool min_p = sampler == Sampler::kScan && sampling.temperature > 0.0F && sampling.min_p > 0.0F;
  return !filters && !min_p && sampling.bias_count == 0 && !sampling.penalises() && sampling.top_logprobs < 0;
}

RoundGraphs::RoundGraphs(const GraphProgram& program) noexcept : program_(program) { measured({}, {}, {}, {}); }

void RoundGraphs::measured(const CostLine (&rounds)[kCostSizes], const int64_t (&single_ns)[kSamplers],
                           const CostLine& prefill, const bool (&widens)[kCostSizes]) noexcept {
  std::copy_n(rounds, kCostSizes, rounds_);
  std::copy_n(widens, kCostSizes, widens_);
  prefill_ = prefill;
  plain_ = program_.single(Sampler::kPlain) != nullptr ? Sampler::kPlain : Sampler::kFull;
  const int one = chosen(0, 0);
  if (one < 0 || !rounds_[one].known()) return;
  plain_ = Sampler::kFull;
  double least = rounds_[one].first_ns;
  for (const Sampler sampler : {Sampler::kPlain, Sampler::kScan}) {
    const auto nanoseconds = static_cast<double>(single_ns[static_cast<int>(sampler)]);
    if (program_.single(sampler) == nullptr || nanoseconds == 0.0 || nanoseconds > least) continue;
    plain_ = sampler;
    least = nanoseconds;
  }
}

int RoundGraphs::chosen(int size, int position) const noexcept {
  int best = -1;
  for (int i = size; i < kCostSizes; ++i) {
    if (program_.rounds[i] == nullptr) continue;
    const bool cheaper = best >= 0 && rounds_[i].known() && rounds_[i].at(position) < rounds_[best].at(position);
    if (best < 0 || cheaper) best = i;
  }
  return best;
}

int RoundGraphs::size_for(int nodes) noexcept {
  const int* size = std::lower_bound(kCostTokens, kCostTokens + kCostSizes, nodes);
  return static_cast<int>(size - kCostTokens);
}

void* RoundGraphs::round_for(int nodes, int position, const Sampling& sampling, bool keeps_logits) const noexcept {
  if (const Sampler sampler = single_for(sampling, keeps_logits); nodes == 1 && sampler != Sampler::kFull) {
    return program_.single(sampler, is_wide(0, position));
  }
  const int graph = chosen(size_for(nodes), position);
  return graph >= 0 ? graph_of(graph, position) : nullptr;
}

// A round's graph fills the cache as well, and then its sampler does nothing; but it has the lm_head.
void* RoundGraphs::prefill_for(int tokens, int position) const noexcept {
  const int graph = program_.rounds_prefill() ? chosen(size_for(tokens), position) : -1;
  const bool dearer = graph >= 0 && prefill_.known() && prefill_.at(position) < rounds_[graph].at(position);
  return graph < 0 || dearer ? program_.prefill : graph_of(graph, position);
}

}  // namespace ull::graph
