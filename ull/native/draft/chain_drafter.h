// A small model of its own as drafter: what does not depend on where it runs. Its KV cache is indexed by the sequence's
// page table, so position p of a sequence lies in the same page and slot in both caches; `drafted` says up to where the
// draft's holds the sequence's tokens.
//
// It drafts a chain, each next token fed by the one rule with the request's noise.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "draft/draft_chain.h"
#include "draft/drafter.h"

namespace ull {

class ChainDrafter : public Drafter {
 public:
  [[nodiscard]] DrafterKind kind() const noexcept override { return DrafterKind::kDraft; }
  [[nodiscard]] Status prefill(const PrefillStep& step, const std::atomic<bool>& abort) noexcept override;
  [[nodiscard]] int confidence(const DraftContext& context) noexcept override;
  [[nodiscard]] bool catches_up() const noexcept override { return true; }
  [[nodiscard]] int missed(const DraftContext& context) const noexcept override;
  [[nodiscard]] Status catch_up(const DraftContext& context) noexcept override;
  void observe(const DraftOutcome& outcome) noexcept override;
  [[nodiscard]] int max_depth() const noexcept override { return kMaxDepth; }

 protected:
  static constexpr int kMaxDepth = 16;
  // A gap up to this long, as an accepted chain leaves it, is read together with the root.
  static constexpr int kSmallGap = 8;

  // vocabulary, context: the draft model's own. common: tokens that both models' vocabularies have; one of them may be
  // padded further.
  ChainDrafter(int vocabulary, int context, int common);

  // Puts the tokens of positions [start, start + count) into the cache. kOk, kAborted or kExecutorFailed.
  [[nodiscard]] virtual Status read(const int32_t* tokens, int count, int start, const int32_t* pages,
                                    const std::atomic<bool>& abort) noexcept = 0;
  // What became of the chain's token at `depth` (from 1), in order, up to the first that was not accepted.
  virtual void learn(int depth, bool accepted) noexcept { (void)depth, (void)accepted; }

  // The request's sampling, as far as the common vocabulary goes. Valid until the next one.
  [[nodiscard]] const Sampling& common_sampling(const Sampling& sampling) noexcept;
  // The token as this model knows it: one that it does not know stands as token 0.
  [[nodiscard]] int32_t known(int32_t token) const noexcept { return token < vocabulary_ ? token : 0; }

  // Begins a proposal: candidates_ has what the plan wants. How deep the chain may become; 0: there is none.
  [[nodiscard]] int begin_chain(const DraftContext& context, const TreePlan& plan) noexcept;
  // The first position before the root that the cache lacks; the root's if it lacks none.
  [[nodiscard]] static int32_t first_missing(const DraftContext& context) noexcept;
  // The cache holds all tokens before the root. The root counts once the target has it too: observe().
  void reached_root(const DraftContext& context) noexcept;

  // The proposal of the round in flight.
  DraftChain candidates_;
  int chain_ = 0;  // its depth; 0: there is none
  int fed_ = 0;    // tokens of it that are in the KV cache

 private:
  const int vocabulary_, context_, common_;
  std::vector<LogitBias> bias_;  // [kMaxLogitBias]
  Sampling sampling_;
  Drafted* drafted_ = nullptr;  // of the sequence that the proposal is for
  int32_t position_ = 0;        // of its root
};

}  // namespace ull
