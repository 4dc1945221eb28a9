// A draft model on the CPU. It stops where the chain has become unlikely, and has alternatives at each depth.
#pragma once

#include <cstdint>

#include "base/aligned.h"
#include "cpu/model.h"
#include "cpu/sampler.h"
#include "draft/chain_drafter.h"

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

class DraftModel final : public ChainDrafter {
 public:
  // Loads target.spec().draft; it runs on the target's team and has as many pages. coupled: see MedusaDrafter. Throws
  // std::invalid_argument, "draft: ..." naming the field or tensor at fault.
  explicit DraftModel(const Model& target, bool coupled = true);

  void prepare() override;
  void set_pulse(Pulse* pulse) noexcept override { model_.set_pulse(pulse); }
  void copy_page(const CopyStep& step) noexcept override { model_.copy_page(step); }
  [[nodiscard]] double catch_up_ns(int tokens) const noexcept override { return tokens * read_ns_; }
  [[nodiscard]] Status propose(const DraftContext& context, const TreePlan& plan, DraftTree& tree) noexcept override;
  [[nodiscard]] int max_rank() const noexcept override { return DraftChain::kMaxRanks; }
  [[nodiscard]] bool foresees() const noexcept override { return true; }
  [[nodiscard]] int64_t cost_ns(int depth) const noexcept override { return depth * step_ns_; }
  [[nodiscard]] int64_t weight_bytes() const noexcept override { return model_.weights().bytes(); }
  [[nodiscard]] int64_t kv_bytes() const noexcept override { return model_.cache().bytes(); }
  [[nodiscard]] const Model& model() const noexcept { return model_; }

 private:
  [[nodiscard]] Status read(const int32_t* tokens, int count, int start, const int32_t* pages,
                            const std::atomic<bool>& abort) noexcept override {
    return feed(tokens, count, start, pages, /*logits=*/false, abort);
  }
  void learn(int depth, bool accepted) noexcept override { statistics_.record(leads_[depth], accepted); }

  // Feeds the tokens of positions [start, start + count), logits of the last one if wanted.
  [[nodiscard]] Status feed(const int32_t* tokens, int count, int start, const int32_t* pages, bool logits,
                            const std::atomic<bool>& abort) noexcept;
  // Ranks candidates at depth d of the tree; false if there are none.
  [[nodiscard]] bool rank(const DraftContext& context, const Sampling& sampling, int d) noexcept;

  Model model_;
  Sampler sampler_;
  const bool coupled_;
  AlignedArray<float> logits_;    // [vocabulary]
  AlignedArray<int32_t> tokens_;  // [chunk] tokens to be fed
  LeadStatistics statistics_;
  int leads_[kMaxDepth + 1] = {};  // [depth] class, of the proposal in flight
  int64_t step_ns_ = 0;            // one token fed, and its candidates ranked
  double read_ns_ = 0.0;           // per token of a chunk
};

}  // namespace ull::cpu
