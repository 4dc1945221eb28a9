// Medusa heads on the device: a captured graph of its own (RoundMode::kMedusa), launched when a round is to be drafted
// by them. It reads the hidden state that the last round left behind, so it proposes only right after a round of the
// same sequence. Behind a round that verifies a tree of theirs they are launched at once, and their answer is there, or
// under way, when the host has read the round; else the executor's thread waits for it, as it would for the round.
#pragma once

#include <cstdint>

#include "draft/drafter.h"
#include "draft/medusa_tree.h"
#include "graph/last_round.h"
#include "graph/program.h"
#include "graph/round_queue.h"
#include "graph/setting.h"

namespace ull::graph {

class MedusaDrafter final : public Drafter {
 public:
  // All of them must outlive it.
  MedusaDrafter(const GraphProgram& program, RoundQueue& queue, const Setting& setting, const Text& text);

  [[nodiscard]] DrafterKind kind() const noexcept override { return DrafterKind::kMedusa; }
  // Measures what the heads take. Throws std::runtime_error with the device's failure.
  void prepare() override;
  [[nodiscard]] int confidence(const DraftContext& context) noexcept override;
  [[nodiscard]] Status propose(const DraftContext& context, const TreePlan& plan, DraftTree& tree) noexcept override;
  void run_behind() noexcept override;
  void observe(const DraftOutcome& outcome) noexcept override;
  [[nodiscard]] int max_depth() const noexcept override { return program_.medusa_heads; }
  [[nodiscard]] int max_rank() const noexcept override { return kMedusaRanks; }
  [[nodiscard]] bool branches() const noexcept override { return true; }
  [[nodiscard]] int64_t cost_ns(int) const noexcept override { return cost_ns_; }
  [[nodiscard]] int64_t weight_bytes() const noexcept override { return program_.medusa_bytes; }

 private:
  [[nodiscard]] Status launch(int32_t position) noexcept;
  // Waits for the heads, which it runs if nobody has; nothing else is under way. kOk, kAborted, or kExecutorFailed.
  [[nodiscard]] Status run(int32_t position, const std::atomic<bool>& abort) noexcept;
  [[nodiscard]] bool take(const gpu::RoundResult& answer, const TreePlan& plan) noexcept;

  const GraphProgram& program_;
  RoundQueue& queue_;
  const Setting& setting_;
  const Text& text_;
  MedusaCandidates candidates_;
  int64_t cost_ns_ = 0;
  uint64_t behind_ = 0;  // the sequence of heads that were launched behind a round; 0: none were
  LastRound last_;       // whose hidden state the heads read
};

}  // namespace ull::graph
