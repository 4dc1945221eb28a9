// A head that drafts on the device: its passes are captured graphs with a queue of their own on the target's stream.
// They read what the target's rounds have left: taps, and for sampling, biases and text its State. So it proposes only
// right after a round of the same sequence. The executor's thread grows the tree and waits for the passes. Behind a
// round that verifies a tree of its own the next proposal is begun at once: the device knows what has been accepted.
#pragma once

#include <cstdint>

#include "draft/head_drafter.h"
#include "graph/driver.h"
#include "graph/last_round.h"
#include "graph/program.h"
#include "graph/prompt_costs.h"
#include "graph/round_queue.h"
#include "graph/setting.h"
#include "graph/text.h"

namespace ull::graph {

class HeadOnDevice : public HeadDrafter {
 public:
  void copy_page(const CopyStep& step) noexcept override;
  [[nodiscard]] int confidence(const DraftContext& context) noexcept override;
  void observe(const DraftOutcome& outcome) noexcept override;
  [[nodiscard]] bool branches() const noexcept override { return true; }
  [[nodiscard]] bool foresees() const noexcept override { return true; }
  [[nodiscard]] int64_t weight_bytes() const noexcept override { return blocks_.weight_bytes; }
  [[nodiscard]] int64_t kv_bytes() const noexcept override { return blocks_.kv_bytes; }

 protected:
  // `target`: the rounds of the model that it drafts for, of `vocabulary` tokens; they fail with it. `tags`: of the
  // taps that these have left. All of them must outlive it, and the blocks.
  HeadOnDevice(DrafterKind kind, int lookahead, const RoundBlocks& blocks, const Driver& driver, RoundQueue& target,
               const TapTags& tags, int vocabulary, int64_t watchdog_ns);

  // Begins and ends the measuring: the first pages serve as scratch, since no sequence exists yet. begin throws
  // std::runtime_error with the device's failure.
  void begin_measuring();
  void end_measuring() noexcept { queue_.set_watchdog(watchdog_ns_); }
  // Measures chunks. pass_ns: what a pass that reads kTreeTokens positions takes. Throws as require().
  void measure_chunks(int64_t pass_ns);
  // Throws std::runtime_error with the device's failure.
  void require(Status status) const;

  // How many of the next `count` positions a chunk is to read; 0: none, a pass of up to kTreeTokens is cheaper.
  [[nodiscard]] int chunk_of(int count) const noexcept;
  // Launches a chunk of at most kChunkTokens positions; tokens: [count] as read() has them. As launch().
  [[nodiscard]] Status launch_chunk(const int32_t* tokens, int count, int start) noexcept;

  // kOk or kExecutorFailed. The caller has filled queue_.next_request(graph).
  [[nodiscard]] Status launch(void* graph) noexcept;
  // Waits for all passes. kOk, kAborted with nothing under way, or kExecutorFailed.
  [[nodiscard]] Status finish(const std::atomic<bool>& abort) noexcept;
  // Until there is room for one more pass. As finish().
  [[nodiscard]] Status reach_slot(const std::atomic<bool>& abort) noexcept {
    return queue_.has_slot() ? Status::kOk : finish(abort);
  }
  // A token's candidates -> tokens, scores [kMedusaRanks]; how many, or -1 if the answer is none to such a question.
  [[nodiscard]] int candidates(const gpu::EmittedToken& answer, int node, int32_t* tokens,
                               float* scores) const noexcept;
  // The target's rounds fail with it.
  [[nodiscard]] Status failed() noexcept { return target_.fail(queue_.failure(), queue_.restart_helps()); }
  [[nodiscard]] Status impossible() noexcept;

  const RoundBlocks& blocks_;
  RoundQueue& target_;
  const int vocabulary_;
  Setting setting_;
  Text text_;
  RoundQueue queue_;
  LastRound last_;  // whose State the passes read
  // What the round under way verifies, if it is a proposal of this head.
  struct Verified {
    const int32_t* pages = nullptr;  // of its sequence; null: it is none
    int32_t root = 0;
    int32_t from = 0;  // the first position that may be attended to
    int tokens = 0;    // most that it emits
  };
  // The passes that were launched behind a round. They may find nothing to do.
  struct Behind {
    uint64_t first = 0, last = 0;  // sequences; 0: there are none
    uint64_t round = 0;            // the target's
    int32_t start = 0;             // of the entries that are made: the round's root
    int32_t from = 0;              // as Verified::from
  };

  // Begins and ends launching behind the round. begin: whether there is something to launch.
  [[nodiscard]] bool begin_behind() noexcept;
  void end_behind(uint64_t first) noexcept;
  // Whether passes behind the target's last round have made the entries from `start` on; waits for them. kOk, kAborted
  // or kExecutorFailed.
  [[nodiscard]] Status made_behind(int32_t start, int32_t from, const std::atomic<bool>& abort, bool* made) noexcept;

  Verified verified_;
  Behind behind_;

 private:
  const int64_t watchdog_ns_;
  PromptCosts costs_;
};

}  // namespace ull::graph
