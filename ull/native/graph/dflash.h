// A DFlash or DSpark head on the device: it makes its context of the taps (RoundMode::kDflashContext), drafts a block
// in one pass (kDflashBlock), and with a Markov term ranks what follows the nodes of the tree, level by level
// (kDflashNodes). Without one a depth's candidates are the same below every node, and the tree grows along its
// likeliest paths, as on the CPU. Context and block of the next proposal run behind the round.
#pragma once

#include <cstdint>

#include "draft/eagle_tree.h"
#include "draft/growth.h"
#include "graph/head_on_device.h"

namespace ull::graph {

class DflashDrafter final : public HeadOnDevice {
 public:
  // As HeadOnDevice.
  DflashDrafter(const DflashProgram& program, const Driver& driver, RoundQueue& target, const TapTags& tags,
                int vocabulary, int64_t watchdog_ns);

  // Measures its passes. Throws std::runtime_error with the device's failure.
  void prepare() override;
  [[nodiscard]] Status propose(const DraftContext& context, const TreePlan& plan, DraftTree& tree) noexcept override;
  void run_behind() noexcept override;
  [[nodiscard]] int max_depth() const noexcept override;
  [[nodiscard]] int max_rank() const noexcept override { return kMedusaRanks; }
  [[nodiscard]] int64_t cost_ns(int depth) const noexcept override;

 private:
  struct Candidates {
    int count = 0;
    int32_t tokens[kMedusaRanks];
    float shares[kMedusaRanks];
  };

  // Depths that the first `entries` of a block predict.
  [[nodiscard]] int predicted(int entries) const noexcept { return program_.anchor_predicts ? entries : entries - 1; }
  [[nodiscard]] Status read(const int32_t* tokens, int count, int start, int from, const int32_t* pages, bool last,
                            const std::atomic<bool>& abort) noexcept override;
  // Depths of which a block says something on its own: of a Markov head's the nodes do.
  [[nodiscard]] int ranked(int depth) const noexcept { return program_.nodes == nullptr ? depth : 0; }
  // start, position: -1 behind a round.
  [[nodiscard]] Status launch_context(int start, int count) noexcept;
  [[nodiscard]] Status launch_block(int32_t root, int32_t position, int32_t from, int entries, int depth) noexcept;
  // Of nodes_, the last `ranked`.
  [[nodiscard]] Status launch_nodes(int32_t position, int ranked) noexcept;
  // The tree from a block's candidates.
  [[nodiscard]] Status grow_along(const gpu::RoundResult& answer, int depth, const TreePlan& plan,
                                  DraftTree& tree) noexcept;
  // The tree level by level, by the nodes' candidates.
  [[nodiscard]] Status grow_by_levels(const DraftContext& context, int depth, const TreePlan& plan,
                                      DraftTree& tree) noexcept;

  const DflashProgram& program_;
  bool made_ = false;  // a proposal's context was, behind the round
  Candidates depths_[kMaxDflashBlock + 1];
  EagleTree tree_;
  int32_t tokens_[kMaxTreeTokens];       // of the nodes that were ranked, or are to be
  uint8_t parents_[kMaxTreeTokens];      // of these
  int count_ = 0;                        // of these
  int16_t nodes_[EagleTree::kCapacity];  // [node of the tree] which of these it is
  int64_t block_ns_ = 0;                 // a context of few positions, and a block
  int64_t level_ns_ = 0;                 // a level of nodes
};

}  // namespace ull::graph
