// A drafter whose acceptance is known beforehand, to measure what rounds with it take where no trained head is at hand:
// it has a head of random weights make its proposal, which costs what it costs, and drafts a chain as deep as that. How
// many of the chain's tokens are right is drawn by chances that others have published.
//
// What is right it knows from a request before: the same prompt, sampled alike, gets the same answer. Until it has seen
// one it proposes nothing. A request's seed says whose chances it plays: those of table seed % tables.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "base/philox.h"
#include "draft/drafter.h"

namespace ull {

class ReplayedAcceptance final : public Drafter {
 public:
  // Of each kind of text, [depth - 1]: the chance that a chain's token is right if all before it are.
  using Tables = std::vector<std::vector<float>>;

  // context: most tokens of a sequence. Throws std::invalid_argument: tables must be there, of one length of 1 to
  // kMaxTreeTokens - 1, and of chances from 0 to 1.
  ReplayedAcceptance(std::unique_ptr<Drafter> head, Tables tables, int vocabulary, int context);

  [[nodiscard]] Status propose(const DraftContext& context, const TreePlan& plan, DraftTree& tree) noexcept override;
  [[nodiscard]] int confidence(const DraftContext& context) noexcept override;
  void observe(const DraftOutcome& outcome) noexcept override;
  [[nodiscard]] int max_depth() const noexcept override;
  [[nodiscard]] int max_rank() const noexcept override { return 1; }

  // All else is the head's.
  [[nodiscard]] DrafterKind kind() const noexcept override { return head_->kind(); }
  void prepare() override { head_->prepare(); }
  void set_pulse(Pulse* pulse) noexcept override { head_->set_pulse(pulse); }
  void copy_page(const CopyStep& step) noexcept override { head_->copy_page(step); }
  [[nodiscard]] Status prefill(const PrefillStep& step, const std::atomic<bool>& abort) noexcept override {
    return head_->prefill(step, abort);
  }
  [[nodiscard]] Status keep_up(const DraftContext& context) noexcept override { return head_->keep_up(context); }
  [[nodiscard]] bool catches_up() const noexcept override { return head_->catches_up(); }
  [[nodiscard]] double catch_up_ns(int tokens) const noexcept override { return head_->catch_up_ns(tokens); }
  [[nodiscard]] int missed(const DraftContext& context) const noexcept override { return head_->missed(context); }
  [[nodiscard]] Status catch_up(const DraftContext& context) noexcept override { return head_->catch_up(context); }
  void run_behind() noexcept override { head_->run_behind(); }
  [[nodiscard]] bool branches() const noexcept override { return head_->branches(); }
  [[nodiscard]] bool foresees() const noexcept override { return head_->foresees(); }
  [[nodiscard]] int64_t weight_bytes() const noexcept override { return head_->weight_bytes(); }
  [[nodiscard]] int64_t kv_bytes() const noexcept override { return head_->kv_bytes(); }
  [[nodiscard]] int64_t cost_ns(int depth) const noexcept override { return head_->cost_ns(depth); }

 private:
  static constexpr int32_t kUnknown = -1;

  [[nodiscard]] int32_t token_at(int32_t position) const noexcept;
  [[nodiscard]] float uniform() noexcept;  // [0, 1)

  const std::unique_ptr<Drafter> head_;
  const Tables tables_;
  const int vocabulary_;
  std::vector<int32_t> text_;  // [context] by position, as the last requests were answered
  uint32_t drawn_ = 0;
};

// In place of the drafters of these kinds that an executor makes. Throws std::invalid_argument.
[[nodiscard]] ReplaceDrafter replayed_acceptance(std::map<DrafterKind, ReplayedAcceptance::Tables> tables,
                                                 int vocabulary, int context);

}  // namespace ull
