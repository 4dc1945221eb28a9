// An EAGLE-3 head on the device: its passes are captured graphs (RoundMode::kEagle), which read what the target's
// rounds have left in the ring of taps, and the target's State for sampling, biases and text. So it proposes only right
// after a round of the same sequence. The executor's thread grows the tree: it waits for each level's candidates, and
// names the next level's entries. Behind a round that verifies a tree of its own the first pass of the next proposal is
// launched at once: the device knows which entries the accepted nodes make.
#pragma once

#include <cstdint>

#include "draft/eagle_tree.h"
#include "draft/head_drafter.h"
#include "graph/driver.h"
#include "graph/last_round.h"
#include "graph/program.h"
#include "graph/round_queue.h"
#include "graph/setting.h"
#include "graph/text.h"

namespace ull::graph {

class EagleDrafter final : public HeadDrafter {
 public:
  // `target`: the rounds of the model that it drafts for, of `vocabulary` tokens; they fail with it. `tags`: of the
  // taps that these have left. All of them must outlive it, and the program.
  EagleDrafter(const EagleProgram& program, const Driver& driver, RoundQueue& target, const TapTags& tags,
               int vocabulary, int64_t watchdog_ns);

  // Measures its passes. Throws std::runtime_error with the device's failure.
  void prepare() override;
  void copy_page(const CopyStep& step) noexcept override;
  [[nodiscard]] int confidence(const DraftContext& context) noexcept override;
  [[nodiscard]] Status propose(const DraftContext& context, const TreePlan& plan, DraftTree& tree) noexcept override;
  void run_behind() noexcept override;
  void observe(const DraftOutcome& outcome) noexcept override;
  [[nodiscard]] int max_depth() const noexcept override { return kMaxEagleDepth; }
  [[nodiscard]] int max_rank() const noexcept override { return kEagleRanks; }
  [[nodiscard]] bool branches() const noexcept override { return true; }
  [[nodiscard]] bool foresees() const noexcept override { return true; }
  [[nodiscard]] int64_t cost_ns(int depth) const noexcept override;
  [[nodiscard]] int64_t weight_bytes() const noexcept override { return program_.weight_bytes; }
  [[nodiscard]] int64_t kv_bytes() const noexcept override { return program_.kv_bytes; }

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
  // Waits for all passes. kOk, kAborted with nothing under way, or kExecutorFailed.
  [[nodiscard]] Status finish(const std::atomic<bool>& abort) noexcept;
  // Runs a level of `pass_` and gives its newest entries' nodes their candidates. As finish().
  [[nodiscard]] Status run_level(void* graph, const int* nodes, const std::atomic<bool>& abort) noexcept;
  [[nodiscard]] void* level_for(int entries) const noexcept;
  // The target's rounds fail with it.
  [[nodiscard]] Status failed() noexcept;

  const EagleProgram& program_;
  RoundQueue& target_;
  const int vocabulary_;
  const int64_t watchdog_ns_;
  Setting setting_;
  Text text_;
  RoundQueue queue_;
  LastRound last_;  // whose State the passes read
  EagleTree tree_;
  Pass pass_;                              // of the proposal
  int16_t entries_[EagleTree::kCapacity];  // [node] that it was run as
  int64_t root_ns_ = 0;                    // a first pass
  int64_t level_ns_ = 0;                   // a level

  // The first pass that was launched behind a round.
  uint64_t behind_ = 0;                  // its sequence; 0: there is none
  int32_t behind_start_ = 0;             // of the entries that it makes, the round's root
  int32_t behind_from_ = 0;              // as Pass::from
  const int32_t* root_pages_ = nullptr;  // of the proposal that the round verifies
  int root_tokens_ = 0;                  // most that the round emits
};

}  // namespace ull::graph
