// One decode round on the cpu executor: draft, verify, accept. A plain round is one whose tree is its root; one with
// forced tokens is a plain round whose pass begins with them. A pass that only scores is one over a tree that others
// have made; nothing of it stays.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/aligned.h"
#include "base/status.h"
#include "cpu/model.h"
#include "cpu/sampler.h"
#include "cpu/taps.h"
#include "draft/drafter.h"
#include "draft/planner.h"
#include "draft/proposer.h"
#include "draft/tree.h"
#include "executor/executor.h"

namespace ull::cpu {

class Speculator {
 public:
  // drafters: at most one of each kind. taps: where the hidden states go that some of them read; null: none does.
  // Allocates everything.
  Speculator(Model& model, std::vector<std::unique_ptr<Drafter>> drafters, bool adaptive, TapRing* taps = nullptr);

  // Prepares the drafters and measures what verifying costs -> info.verify_ns, draft_ns, drafters and their bytes. The
  // cache must not hold anything yet.
  void prepare(ExecutorInfo& info);
  // For the drafters' own models.
  void set_pulse(Pulse* pulse) noexcept { proposer_.set_pulse(pulse); }

  // After the target's copy.
  void copy_page(const CopyStep& step) noexcept { proposer_.copy_page(step); }
  // After the target's prefill of a chunk. kOk or kAborted.
  [[nodiscard]] Status prefill(const PrefillStep& step, const std::atomic<bool>& abort) noexcept;
  // Runs a round; result is complete if it returns kOk.
  [[nodiscard]] Status round(const RoundStep& step, const std::atomic<bool>& abort, RoundResult& result) noexcept;
  // A step that makes sense -> step.logprobs. kOk, kAborted, or kExecutorFailed if a logit is not finite.
  [[nodiscard]] Status score(const ScoreStep& step, const std::atomic<bool>& abort) noexcept;

  // Whether a pass for such a request keeps its taps; see ForwardStep::tapped.
  [[nodiscard]] bool taps(DrafterKind speculation) const noexcept;

 private:
  [[nodiscard]] Status forced_round(const RoundStep& step, const std::atomic<bool>& abort,
                                    RoundResult& result) noexcept;
  [[nodiscard]] Status score_rows(const ScoreStep& step, int first, int end) noexcept;
  [[nodiscard]] VerifyCosts measure(ExecutorInfo& info);
  [[nodiscard]] Status verify(const RoundStep& step, const std::atomic<bool>& abort) noexcept;
  // Draws the token at `position` from logits [vocabulary], and has the step's constraint take it. kExecutorFailed too
  // if the constraint has failed.
  [[nodiscard]] Status draw(const RoundStep& step, float* logits, int32_t position, RoundToken& token) noexcept;
  // Draws at the visited nodes and copies what was accepted to its place in the cache.
  [[nodiscard]] Status accept(const RoundStep& step, RoundResult& result) noexcept;
  [[nodiscard]] DraftContext context(const RoundStep& step, const std::atomic<bool>& abort) noexcept;
  void remember_hidden(int row, int position, int32_t token, const int32_t* pages) noexcept;
  // Rows [0, count) of the last pass were the tokens of positions [start, start + count).
  void keep_taps(const int32_t* tokens, int count, int start, const int32_t* pages) noexcept;

  Model& model_;
  Sampler sampler_;
  Proposer proposer_;
  TokenCounts counts_;
  int batch_rows_;           // tokens whose logits are held at once
  const bool keeps_hidden_;  // Medusa heads want it
  TapRing* const taps_;
  AlignedArray<float> logits_;  // [batch_rows][vocabulary]
  AlignedArray<float> hidden_;  // [hidden] the lm_head's input of the last accepted node
  int hidden_position_ = -1;    // of that node; -1: there is none
  int32_t hidden_token_ = 0;
  int32_t hidden_page_ = 0;

  // The round in flight.
  TreePaths paths_;
  bool penalises_ = false;  // counts_ holds the text up to the node in hand
  bool batched_ = false;    // logits_ holds those of every node
};

}  // namespace ull::cpu
