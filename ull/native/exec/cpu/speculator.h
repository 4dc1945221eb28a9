// One decode round on the cpu executor: draft, verify, accept. A plain round is one whose tree is its root.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/aligned.h"
#include "base/status.h"
#include "exec/cpu/model.h"
#include "exec/cpu/sampler.h"
#include "exec/executor.h"
#include "spec/drafter.h"
#include "spec/planner.h"
#include "spec/tree.h"

namespace ull::cpu {

class Speculator {
 public:
  // drafters: at most one of each kind. Allocates everything.
  Speculator(Model& model, std::vector<std::unique_ptr<Drafter>> drafters, bool adaptive);

  // Prepares the drafters and measures what verifying costs -> info.verify_ns, draft_ns, drafters and their bytes. The
  // cache must not hold anything yet.
  void prepare(ExecutorInfo& info);

  // After the target's prefill of a chunk. kOk or kAborted.
  [[nodiscard]] Status prefill(const PrefillStep& step, const std::atomic<bool>& abort) noexcept;
  // Runs a round; result is complete if it returns kOk.
  [[nodiscard]] Status round(const RoundStep& step, const std::atomic<bool>& abort, RoundResult& result) noexcept;

 private:
  // The drafter's proposals for a round, before one is chosen.
  struct Option {
    Drafter* drafter = nullptr;
    int confidence = -1;
    double worth = 0.0;
    TreePlan plan;
  };

  void measure(ExecutorInfo& info);
  [[nodiscard]] bool serves(const Drafter& drafter, Speculation wanted) const noexcept;
  // Lets a drafter read what it has missed, paid from the planner's reserve.
  [[nodiscard]] Status catch_up(Drafter& drafter, const DraftContext& now, Speculation wanted) noexcept;
  // Fills tree_; chosen_ stays without a drafter for a plain round.
  [[nodiscard]] Status draft(const RoundStep& step, const std::atomic<bool>& abort) noexcept;
  [[nodiscard]] Status verify(const RoundStep& step, const std::atomic<bool>& abort) noexcept;
  // Draws at the visited nodes and copies what was accepted to its place in the cache.
  [[nodiscard]] Status accept(const RoundStep& step, RoundResult& result) noexcept;
  void learn(const RoundStep& step, const RoundResult& result) noexcept;
  void follow_shadow(const RoundStep& step, const RoundResult& result) noexcept;
  [[nodiscard]] DraftContext context(const RoundStep& step, const std::atomic<bool>& abort) noexcept;
  void remember_hidden(int row, int position, int32_t token, const int32_t* pages) noexcept;

  Model& model_;
  Sampler sampler_;
  std::vector<std::unique_ptr<Drafter>> drafters_;
  Planner planner_;
  TokenCounts counts_;
  int batch_rows_;  // tokens whose logits are held at once
  bool keeps_hidden_ = false;
  AlignedArray<float> logits_;  // [batch_rows][vocabulary]
  AlignedArray<float> hidden_;  // [hidden] the lm_head's input of the last accepted node
  int hidden_position_ = -1;    // of that node; -1: there is none
  int32_t hidden_token_ = 0;
  int32_t hidden_page_ = 0;

  double worths_[kSpeculations] = {};  // of each drafter's last plan

  // The round in flight.
  DraftTree tree_;
  TreePaths paths_;
  Option chosen_;
  Option option_;
  Planner::Limits limits_{};
  bool penalizes_ = false;      // counts_ holds the text up to the node in hand
  bool batched_ = false;        // logits_ holds those of every node
  int64_t round_start_ns_ = 0;  // moved on by what catching up took
  int64_t verify_start_ns_ = 0;

  // What n-gram would have drafted in plain rounds, followed for its statistics alone.
  Drafter* ngram_ = nullptr;
  DraftTree shadow_;
  TreePlan shadow_plan_;
  int shadow_node_ = -1;     // -1: no shadow
  int shadow_position_ = 0;  // of the next token to compare with
  int shadow_confidence_ = 0;
};

}  // namespace ull::cpu
