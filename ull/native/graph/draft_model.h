// A draft model on the device: a graph program of its own, with its own blocks, state, weights and pages. Its chain is
// a round of one token and continuations of it, which follow one another without the host; what it must read first goes
// before them as chunks of a prompt. The executor's thread waits for the chain, as it would for the round itself;
// nothing of it is under way when the target's round is launched.
#pragma once

#include <cstdint>

#include "draft/chain_drafter.h"
#include "graph/driver.h"
#include "graph/program.h"
#include "graph/round_graphs.h"
#include "graph/round_queue.h"
#include "graph/setting.h"
#include "graph/text.h"

namespace ull::graph {

class DraftModel final : public ChainDrafter {
 public:
  // `target`: the rounds of the model that it drafts for, which fail with it. Both must outlive it, and the program.
  DraftModel(const GraphProgram& program, const Driver& driver, RoundQueue& target, int target_vocabulary,
             int64_t watchdog_ns);

  // Measures what a chain takes. Throws std::runtime_error with the device's failure.
  void prepare() override;
  void copy_page(const CopyStep& step) noexcept override;
  [[nodiscard]] double catch_up_ns(int tokens) const noexcept override {
    return tokens * (tokens > gpu::kTreeTokens ? many_ns_ : few_ns_);
  }
  [[nodiscard]] Status propose(const DraftContext& context, const TreePlan& plan, DraftTree& tree) noexcept override;
  [[nodiscard]] int64_t cost_ns(int depth) const noexcept override { return start_ns_ + depth * step_ns_; }
  [[nodiscard]] int64_t weight_bytes() const noexcept override { return program_.weight_bytes; }
  [[nodiscard]] int64_t kv_bytes() const noexcept override { return program_.kv_bytes; }

 private:
  [[nodiscard]] Status read(const int32_t* tokens, int count, int start, const int32_t* pages,
                            const std::atomic<bool>& abort) noexcept override;
  // Draws `depth` tokens behind `root`, each fed to the next -> candidates_.
  [[nodiscard]] Status draw(int32_t root, int32_t position, int depth, const Sampling& sampling,
                            const std::atomic<bool>& abort) noexcept;

  // Launches `rounds` rounds, each with `graph_of(index)` and as `fill(index, request)` asks, and waits for them:
  // `take(result)` says whether an answer is possible. kOk, kAborted with nothing under way, or kExecutorFailed.
  template <typename Graph, typename Fill, typename Take>
  [[nodiscard]] Status run(int rounds, const std::atomic<bool>& abort, const Graph& graph_of, const Fill& fill,
                           const Take& take) noexcept;
  // The target's rounds fail with it.
  [[nodiscard]] Status failed() noexcept;

  template <typename Run>
  [[nodiscard]] int64_t median_ns(const Run& run) const;

  const GraphProgram& program_;
  const RoundGraphs graphs_;
  RoundQueue& target_;
  const int64_t watchdog_ns_;
  Setting setting_;
  Text text_;
  RoundQueue queue_;

  int64_t start_ns_ = 0;  // of a chain, whatever its depth
  int64_t step_ns_ = 0;   // of each of its tokens
  double few_ns_ = 0.0;   // per token of up to kTreeTokens that are read
  double many_ns_ = 0.0;  // and of more
};

}  // namespace ull::graph
