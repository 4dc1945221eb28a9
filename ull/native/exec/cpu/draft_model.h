// A small model of its own as drafter. Its KV cache is indexed by the session's page table, so position p of a session
// lies in the same page and slot in both caches; `drafted` says up to where the draft's holds the session's tokens.
//
// It drafts a chain, each next token fed by the one rule with the request's noise, with alternatives at each depth.
#pragma once

#include <cstdint>

#include "base/aligned.h"
#include "exec/cpu/candidates.h"
#include "exec/cpu/model.h"
#include "exec/cpu/sampler.h"
#include "spec/drafter.h"

namespace ull::cpu {

// How often the chain's token is accepted, by how far it leads the runner-up. Learns from every round.
class LeadStatistics {
 public:
  // The class of a lead (>= 0) in score: adjusted logit + noise.
  [[nodiscard]] static int classify(float lead) noexcept;

  [[nodiscard]] float acceptance(int lead_class) const noexcept { return accepted_[lead_class] / tried_[lead_class]; }
  void record(int lead_class, bool accepted) noexcept;

 private:
  static constexpr int kClasses = 16;
  static constexpr float kMemory = 200.0F;  // trials that count

  // Optimistic at first: a chain that is never drafted teaches nothing.
  float accepted_[kClasses] = {4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4};
  float tried_[kClasses] = {5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5};
};

class DraftModel final : public Drafter {
 public:
  // Loads target.spec().draft; it runs on the target's team and has as many pages. coupled: see MedusaDrafter. Throws
  // std::invalid_argument, "draft: ..." naming the field or tensor at fault.
  explicit DraftModel(const Model& target, bool coupled = true);

  [[nodiscard]] Speculation kind() const noexcept override { return Speculation::kDraft; }
  void prepare() override;
  [[nodiscard]] Status prefill(const PrefillStep& step, const std::atomic<bool>& abort) noexcept override;
  [[nodiscard]] int confidence(const DraftContext& context) noexcept override;
  [[nodiscard]] bool catches_up() const noexcept override { return true; }
  [[nodiscard]] double catch_up_ns(int tokens) const noexcept override { return tokens * read_ns_; }
  [[nodiscard]] int missed(const DraftContext& context) const noexcept override;
  [[nodiscard]] Status catch_up(const DraftContext& context) noexcept override;
  [[nodiscard]] Status propose(const DraftContext& context, const TreePlan& plan, DraftTree& tree) noexcept override;
  void observe(const DraftOutcome& outcome) noexcept override;
  [[nodiscard]] int max_depth() const noexcept override { return kMaxDepth; }
  [[nodiscard]] int max_rank() const noexcept override { return kDraftRanks; }
  [[nodiscard]] int64_t cost_ns(int depth) const noexcept override { return depth * step_ns_; }
  [[nodiscard]] int64_t weight_bytes() const noexcept override { return model_.weights().bytes(); }
  [[nodiscard]] int64_t kv_bytes() const noexcept override { return model_.cache().bytes(); }
  [[nodiscard]] const Model& model() const noexcept { return model_; }

 private:
  static constexpr int kMaxDepth = 16;
  static constexpr int kDraftRanks = 4;
  // A gap up to this long, as an accepted chain leaves it, is read together with the root.
  static constexpr int kSmallGap = 8;

  // Feeds the tokens of positions [start, start + count), logits of the last one if wanted.
  [[nodiscard]] Status feed(const int32_t* tokens, int count, int start, const int32_t* pages, bool logits,
                            const std::atomic<bool>& abort) noexcept;
  // Ranks candidates at depth d of the tree; false if there are none.
  [[nodiscard]] bool rank(const DraftContext& context, int d) noexcept;
  // The request's sampling, as far as the common vocabulary goes.
  void adopt(const Sampling& sampling) noexcept;

  Model model_;
  const int common_;  // tokens that both vocabularies have; one of them may be padded further
  Sampler sampler_;
  const bool coupled_;
  AlignedArray<float> logits_;    // [vocabulary]
  AlignedArray<int32_t> tokens_;  // [chunk] tokens to be fed
  AlignedArray<LogitBias> bias_;  // [kMaxLogitBias]
  Sampling sampling_;
  Candidates candidates_;
  LeadStatistics statistics_;
  int64_t step_ns_ = 0;   // one token fed, and its candidates ranked
  double read_ns_ = 0.0;  // per token of a chunk

  // The proposal of the round in flight.
  int32_t* drafted_ = nullptr;
  int32_t position_ = 0;           // of its root
  int chain_ = 0;                  // its depth; 0: there is none
  int fed_ = 0;                    // tokens of it that are in the KV cache
  int leads_[kMaxDepth + 1] = {};  // [depth] class
};

}  // namespace ull::cpu
