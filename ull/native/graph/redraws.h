// Draws made again from the logits that a round has left (gpu::RoundMode::kRedraw): where a constraint refuses the
// token that was drawn, and to learn how likely wanted tokens are. Neither reads the weights again.
//
// Nothing else is launched between a round and its draws: they find its logits, and what they leave behind (text,
// hidden state) is what the round itself would have left with that token.
#pragma once

#include <cstdint>

#include "executor/executor.h"
#include "graph/program.h"
#include "graph/round_queue.h"
#include "graph/setting.h"
#include "graph/text.h"

namespace ull::graph {

// A token as the device tells it -> `token`. False: it is none.
[[nodiscard]] bool copy_token(const gpu::EmittedToken& from, int vocabulary, RoundToken& token) noexcept;

class Redraws {
 public:
  // All of them must outlive it.
  Redraws(const GraphProgram& program, RoundQueue& queue, const Setting& setting, const Text& text) noexcept;

  [[nodiscard]] bool offered() const noexcept { return program_.redraw != nullptr; }
  // Runs both graphs behind a round, so that neither is run for the first time when a request waits for it. kOk or
  // kExecutorFailed.
  [[nodiscard]] Status rehearse() noexcept;

  // A step begins.
  void begin() noexcept;

  // ---- a round of a request with a constraint ----
  // Whether a draw under a mask has been launched and not answered.
  [[nodiscard]] bool pending() const noexcept { return redrawn_ > queue_.seen(); }
  // Has the step's constraint take the tokens of `result`, which `answer` brought. The first that it refuses is drawn
  // again under its mask, and the round ends with that token, or with one after which nothing may follow. kOk; kPending
  // while the device draws: to be called again with the same round; kExecutorFailed.
  [[nodiscard]] Status walk(const RoundStep& step, const gpu::RoundResult& answer, RoundResult& result) noexcept;
  // The step was aborted: its constraint stands where it stood.
  void give_back(const RoundStep& step) noexcept;

  // ---- scores ----
  // Asks for as many of the step's queries as there are slots, behind the round that computes their logits.
  void ask(const ScoreStep& step) noexcept;
  [[nodiscard]] bool asked(const ScoreStep& step) const noexcept { return asked_ == step.query_count; }
  // Takes what has been answered. kOk once that is all; kPending or kExecutorFailed.
  [[nodiscard]] Status collect(const ScoreStep& step) noexcept;

 private:
  [[nodiscard]] gpu::RoundRequest& request(void* graph, int count, int32_t position) noexcept;
  // Draws behind `node`, at `position`, what the mask allows.
  [[nodiscard]] Status draw(int node, int32_t position, const uint32_t* mask) noexcept;
  [[nodiscard]] Status end_early(RoundResult& result) const noexcept;
  [[nodiscard]] bool allowed(int32_t token) const noexcept;

  const GraphProgram& program_;
  RoundQueue& queue_;
  const Setting& setting_;
  const Text& text_;

  // Of the step in flight.
  int32_t taken_ = 0;         // tokens that its constraint has taken
  uint64_t redrawn_ = 0;      // sequence of its draw under a mask; 0: there is none
  int32_t asked_ = 0;         // queries launched
  int32_t answered_ = 0;      // and answered
  uint64_t first_asked_ = 0;  // sequence of the first of them
};

}  // namespace ull::graph
