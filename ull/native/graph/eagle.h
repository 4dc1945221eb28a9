// An EAGLE-3 head on the device: its passes are captured graphs (RoundMode::kEagle), which read what the target's
// rounds have left in the ring of taps, and the target's State for sampling, biases and text. So it proposes only right
// after a round of the same sequence. The executor's thread grows the tree: it waits for each level's candidates, and
// names the next level's entries. Behind a round that verifies a tree of its own the first pass of the next proposal is
// launched at once: the device knows which entries the accepted nodes make.
#pragma once

#include <cstdint>

#include "draft/eagle_tree.h"
#include "graph/head_on_device.h"

namespace ull::graph {

class EagleDrafter final : public HeadOnDevice {
 public:
  // As HeadOnDevice.
  EagleDrafter(const EagleProgram& program, const Driver& driver, RoundQueue& target, const TapTags& tags,
               int vocabulary, int64_t watchdog_ns);

  // Measures its passes. Throws std::runtime_error with the device's failure.
  void prepare() override;
  [[nodiscard]] Status propose(const DraftContext& context, const TreePlan& plan, DraftTree& tree) noexcept override;
  void run_behind() noexcept override;
  [[nodiscard]] int max_depth() const noexcept override { return kMaxEagleDepth; }
  [[nodiscard]] int max_rank() const noexcept override { return kEagleRanks; }
  [[nodiscard]] int64_t cost_ns(int depth) const noexcept override;

 private:
  // What a pass is asked: the entries so far, the newest `ranked` of which get candidates.
  struct Pass {
    int32_t tokens[kMaxTreeTokens];
    uint8_t parents[kMaxTreeTokens];
    int count = 0;
    int read = 0;       // of them, first: made of taps, and kept
    int ranked = 0;     // of them, last
    int32_t start = 0;  // position of the first
    int32_t from = 0;   // the first position that may be attended to

    void add(int32_t token, int parent) noexcept {
      tokens[count] = token;
      parents[count++] = static_cast<uint8_t>(parent);
    }
  };

  [[nodiscard]] Status read(const int32_t* tokens, int count, int start, int from, const int32_t* pages, bool last,
                            const std::atomic<bool>& abort) noexcept override;
  [[nodiscard]] Status launch(void* graph, const Pass& pass) noexcept;
  // Runs a level of `pass_` and gives its newest entries' nodes their candidates. As finish().
  [[nodiscard]] Status run_level(void* graph, const int* nodes, const std::atomic<bool>& abort) noexcept;
  [[nodiscard]] void* level_for(int entries) const noexcept;

  const EagleProgram& program_;
  EagleTree tree_;
  Pass pass_;                              // of the proposal
  int16_t entries_[EagleTree::kCapacity];  // [node] that it was run as
  int64_t root_ns_ = 0;                    // a first pass
  int64_t level_ns_ = 0;                   // a level
};

}  // namespace ull::graph
