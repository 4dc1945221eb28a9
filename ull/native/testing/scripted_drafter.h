// A drafter for tests: proposes by script, whatever the planner wants, so that every tree shape and every kind of
// wrong guess meets the verifier. It knows the true continuation and uses it as the mode says.
#pragma once

#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

#include "base/philox.h"
#include "draft/drafter.h"

namespace ull {

class ScriptedDrafter final : public Drafter {
 public:
  enum class Mode : uint8_t {
    kRight,       // the true continuation as a chain
    kWrong,       // a chain that is wrong from the start
    kRandom,      // a tree of random shape and tokens, some of them right
    kMixed,       // a tree of random shape that always holds the true path, wrong nodes around it
    kDuplicates,  // the same few tokens again and again below every node
    kBeyond,      // ids outside the vocabulary, negative ones too, and right ones
  };

  // truth: the sequence's tokens by position.
  ScriptedDrafter(Mode mode, std::vector<int32_t> truth, int vocabulary, uint64_t seed)
      : mode_(mode), truth_(std::move(truth)), vocabulary_(vocabulary), seed_(seed) {}

  [[nodiscard]] DrafterKind kind() const noexcept override { return DrafterKind::kDraft; }
  [[nodiscard]] Status propose(const DraftContext& context, const TreePlan& plan, DraftTree& tree) noexcept override;
  [[nodiscard]] bool branches() const noexcept override { return true; }
  [[nodiscard]] int max_rank() const noexcept override { return kMaxTreeTokens; }
  [[nodiscard]] int64_t cost_ns(int) const noexcept override { return 0; }

 private:
  [[nodiscard]] uint32_t random(uint32_t below) noexcept;
  [[nodiscard]] int32_t true_token(int position) const noexcept;  // -1: not known
  void chain(int position, bool right, DraftTree& tree) noexcept;
  void bush(int position, bool with_truth, DraftTree& tree) noexcept;

  const Mode mode_;
  const std::vector<int32_t> truth_;
  const int vocabulary_;
  const uint64_t seed_;
  uint32_t drawn_ = 0;
};

// What an executor takes in place of its draft model.
[[nodiscard]] MakeDrafter scripted_drafter(ScriptedDrafter::Mode mode, std::vector<int32_t> truth, int vocabulary,
                                           uint64_t seed);

// "right", "wrong", "random", "mixed", "duplicates" or "beyond"; throws std::invalid_argument.
[[nodiscard]] ScriptedDrafter::Mode parse_draft_mode(std::string_view name);

}  // namespace ull
