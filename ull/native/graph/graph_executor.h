// The executor that replays captured CUDA graphs (program.h) and keeps the device busy: while a plain round runs, the
// one that will most likely follow is already queued behind it, as a continuation that takes token and position from
// the device's own state. If the next step turns out to be exactly that round, it is adopted; if not, it is cancelled,
// its answer ignored (round_queue.h says why that does no harm), and what is wanted is launched behind it.
//
// Where the program holds a burst of such rounds in one graph, that is queued as long as the request wants them all.
// Its rounds are adopted one by one, each as soon as it has answered. What is no longer wanted costs no more than
// without bursts: each round looks at the host's cancellation before it begins, so that only one that has begun is run.
//
// Requests that speculate get no such round: whether a draft pays shows only when the newest token is known, and a
// continuation that has begun costs a round. What follows is launched all the same, passes of drafters and the next
// round, but waits on the stream for its request (foresight.h). Those with a constraint get neither: it may refuse what
// was drawn, the next round then begins behind another token, and the device draws that from the same logits
// (redraws.h).
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/cpu.h"
#include "draft/drafter.h"
#include "draft/past_outputs.h"
#include "draft/proposer.h"
#include "draft/tap_tags.h"
#include "executor/executor.h"
#include "graph/driver.h"
#include "graph/foresight.h"
#include "graph/program.h"
#include "graph/prompt_costs.h"
#include "graph/redraws.h"
#include "graph/round_graphs.h"
#include "graph/round_queue.h"
#include "graph/setting.h"
#include "graph/text.h"

namespace ull::graph {

struct GraphOptions {
  int64_t watchdog_ms = 2000;                // without an answer for longer, the device has failed
  int prefill_chunk = gpu::kChunkTokens;     // most prompt tokens of a step
  DrafterKind drafter = DrafterKind::kNone;  // of requests that name none
  int max_tree = kMaxTreeTokens;             // of requests that set none
  bool adaptive = true;                      // false: always the widest tree that is allowed
  MakeDrafter in_place_of_draft_model = nullptr;
  ReplaceDrafter replace_drafter = nullptr;
  std::shared_ptr<PastOutputs> past_outputs = nullptr;  // of the suffix drafter; null: none
};

class GraphExecutor final : public Executor {
 public:
  // Launches nothing: prepare() does. The program must outlive settle(). Throws std::invalid_argument.
  GraphExecutor(GraphProgram program, const Driver& driver, const GraphOptions& options);
  ~GraphExecutor() override { settle(); }
  GraphExecutor(const GraphExecutor&) = delete;
  GraphExecutor& operator=(const GraphExecutor&) = delete;

  // Measures what rounds cost, which also runs each graph for the first time. Throws std::runtime_error with the
  // device's failure.
  void prepare() override;
  [[nodiscard]] const ExecutorInfo& info() const noexcept override { return info_; }
  [[nodiscard]] int first_forced(int count, int start) const noexcept override;
  [[nodiscard]] Status start_prefill(const PrefillStep& step) noexcept override;
  [[nodiscard]] Status start_round(const RoundStep& step) noexcept override;
  [[nodiscard]] Status start_scores(const ScoreStep& step) noexcept override;
  // Copies whole pages: what lies behind the tokens is nobody's.
  [[nodiscard]] Status start_copy(const CopyStep& step) noexcept override;
  [[nodiscard]] Status poll(RoundResult& result) noexcept override;
  void rest() noexcept override { foresight_.stop(); }
  void abort() noexcept override { abort_.store(true, std::memory_order_release); }
  void settle() noexcept override;
  [[nodiscard]] const char* failure() const noexcept override { return queue_.failure(); }
  [[nodiscard]] bool restart_helps() const noexcept override { return queue_.restart_helps(); }

 private:
  enum class StepKind : uint8_t { kNone, kPrefill, kRound, kScores, kCopy };

  // Whether it is for the graph of a prompt's last chunk: its forced tokens are more than a round's graph holds, or a
  // prompt ends with it that chunks alone read.
  [[nodiscard]] bool is_chunk(const RoundStep& step) const noexcept {
    return step.forced >= program_.most_nodes() || ends_prompt(step);
  }
  [[nodiscard]] bool ends_prompt(const RoundStep& step) const noexcept {
    return program_.prefill_draws() && step.history != nullptr && step.ends_prompt();
  }
  [[nodiscard]] static const GraphOptions& checked(const GraphOptions& options, const GraphProgram& program);
  [[nodiscard]] bool valid(const int32_t* tokens, int count, int start) const noexcept;
  [[nodiscard]] bool valid(const RoundStep& step) const noexcept;
  [[nodiscard]] bool valid(const ScoreStep& step) const noexcept;
  [[nodiscard]] Status begin_step(StepKind kind) noexcept;
  void drop_ahead() noexcept;
  [[nodiscard]] bool ahead_is(const RoundStep& step) noexcept;
  [[nodiscard]] bool text_is(const RoundStep& step) noexcept;

  // Launches what is left of the step, as far as slots and the page table allow.
  void advance() noexcept;
  void launch_prompt() noexcept;
  // The next request, of a graph that reads `count` tokens of a prompt from `position` on.
  void fill_prompt(void* graph, const int32_t* tokens, int count, int position) noexcept;
  // The next request, of the graph that also draws behind them.
  void fill_last_chunk(const int32_t* tokens, int count, int position, int max_tokens) noexcept;
  void launch_tree() noexcept;
  void launch_ahead() noexcept;
  void launch_scores() noexcept;

  [[nodiscard]] Status abandon() noexcept;
  [[nodiscard]] Status finish_prefill() noexcept;
  [[nodiscard]] Status finish_round(RoundResult& result) noexcept;
  [[nodiscard]] Status finish_scores() noexcept;
  [[nodiscard]] bool copy_tokens(const gpu::RoundResult& answer, RoundResult& result) const noexcept;

  // Notes which taps a round that has ended left in the ring.
  void keep_taps(const RoundResult& result) noexcept;

  // Measures every graph of one round -> graphs_, info_.verify_ns; the costs of trees. Runs the others.
  [[nodiscard]] VerifyCosts measure();
  // A graph's time with a chain of `count` nodes from `position` on.
  [[nodiscard]] int64_t measure_graph(void* graph, gpu::RoundMode mode, int count, int position,
                                      const std::vector<int32_t>& pages);
  // What bursts and redraws go on from.
  void launch_first(void* graph);
  // Runs each burst once, on the first of `held` positions.
  void run_bursts(int held);
  // Likewise what draws again.
  void run_redraws();
  void require(Status status) const;

  const GraphProgram program_;
  const Driver driver_;
  const GraphOptions options_;
  ExecutorInfo info_;
  Setting setting_;
  Text text_;
  Foresight foresight_;
  RoundQueue queue_;
  Redraws redraws_;
  RoundGraphs graphs_;
  PromptCosts prompt_costs_;
  TapTags tags_;                        // of the taps that rounds leave, where a head reads them
  int64_t dearest_ns_ = 0;              // of the graphs
  std::unique_ptr<Proposer> proposer_;  // from prepare() on; its tree is the round's, a plain one's is the root alone

  // The step in flight.
  StepKind kind_ = StepKind::kNone;
  PrefillStep prefill_{};
  PrefillStep prompt_{};  // tokens, count and start of what is yet to be launched
  RoundStep round_{};
  ScoreStep scores_{};
  bool launched_ = false;   // all of it; a copy ends with that: what follows comes behind it
  bool abandoned_ = false;  // aborted: its rounds are being skipped
  bool settled_ = true;     // nothing has been started since settle()
  uint64_t first_ = 0;      // sequence of its first round
  uint64_t last_ = 0;       // and of the last one launched

  // The continuation queued behind the last plain round, and the last of those queued with it; 0: there is none.
  uint64_t ahead_ = 0;
  uint64_t ahead_through_ = 0;
  int32_t ahead_token_ = -1;     // that it feeds: known, like the rest, once the round before it has been taken
  int32_t ahead_position_ = -1;  // -1: it is not to be adopted

  alignas(kCacheLine) std::atomic<bool> abort_{false};  // set by any thread; the rest belongs to the engine's
};

}  // namespace ull::graph
