// Medusa heads (Cai et al., arXiv 2401.10774): small networks on the model's last hidden state, head i predicting the
// token i + 2 positions after the one that was fed. x <- x + SiLU(W x + b) per layer, then an lm_head: the model's
// (version 2) or the head's own (version 1).
#pragma once

#include <cstdint>
#include <vector>

#include "base/aligned.h"
#include "cpu/model.h"
#include "cpu/sampler.h"
#include "cpu/tensor_loader.h"
#include "draft/drafter.h"
#include "draft/medusa_tree.h"

namespace ull::cpu {

class MedusaHeads {
 public:
  // model.spec().medusa says what to load. Throws std::invalid_argument naming the tensor at fault.
  explicit MedusaHeads(Model& model);

  [[nodiscard]] int heads() const noexcept { return static_cast<int>(heads_.size()); }
  [[nodiscard]] int64_t bytes() const noexcept { return memory_.bytes; }

  // Logits of heads [0, count) on `hidden` ([hidden], the lm_head's input) -> [count][vocabulary].
  void run(const float* hidden, int count, float* logits) noexcept;

 private:
  struct Head {
    std::vector<Matrix> blocks;  // [layers], each [hidden, hidden]
    Matrix lm_head;              // version 1
  };

  // One layer of `count` heads, shared out over the team: x -> next, both [count][hidden].
  void block(int member, int layer, int count, const float* x, float* next) noexcept;
  void block_tiles(int member, const Matrix& matrix, int first, int end, const float* x, float* next) noexcept;

  Model& model_;
  TensorMemory memory_;
  std::vector<Head> heads_;
  AlignedArray<float> states_[2];            // [heads][hidden] before and after a layer, in turn
  std::vector<AlignedArray<float>> scaled_;  // [threads] [hidden] a block's input times its input_scale
};

// Takes the number of nodes and the depth from the plan and chooses the shape by the heads' own confidence: on the tiny
// engine, trees of 8 to 32 get 7 to 9% more tokens per round greedy than by the planner's average ranks, and 1 to 7%
// at T = 0.8.
class MedusaDrafter final : public Drafter {
 public:
  // coupled: candidates are ranked with the request's noise; false, for comparisons: by the logits alone.
  explicit MedusaDrafter(Model& model, bool coupled = true);

  [[nodiscard]] DrafterKind kind() const noexcept override { return DrafterKind::kMedusa; }
  void prepare() override;
  [[nodiscard]] int confidence(const DraftContext& context) noexcept override;
  [[nodiscard]] Status propose(const DraftContext& context, const TreePlan& plan, DraftTree& tree) noexcept override;
  [[nodiscard]] int max_depth() const noexcept override { return heads_.heads(); }
  [[nodiscard]] int max_rank() const noexcept override { return kMedusaRanks; }
  [[nodiscard]] bool branches() const noexcept override { return true; }
  [[nodiscard]] bool foresees() const noexcept override { return true; }
  [[nodiscard]] int64_t cost_ns(int depth) const noexcept override;
  [[nodiscard]] int64_t weight_bytes() const noexcept override { return heads_.bytes(); }

 private:
  Model& model_;
  MedusaHeads heads_;
  Sampler sampler_;
  const int hidden_;
  const int vocabulary_;
  const bool coupled_;
  AlignedArray<float> logits_;  // [heads][vocabulary]
  MedusaCandidates candidates_;
  int64_t cost_ns_[kMaxMedusaHeads + 1] = {};  // by depth
};

}  // namespace ull::cpu
