#include "graph/medusa.h"

#include <algorithm>
#include <atomic>
#include <stdexcept>

#include "graph/timing.h"

namespace ull::graph {
MedusaDrafter::MedusaDrafter(const GraphProgram& program, RoundQueue& queue, const Setting& setting, const Text& text)
    : program_(program), queue_(queue), setting_(setting), text_(text), last_(queue) {}

// The median time from launch to answer. What the hidden state holds does not matter.
void MedusaDrafter::prepare() {
  const std::atomic<bool> never{false};
  if (queue_.drain() != Status::kOk) throw std::runtime_error(queue_.failure());
  cost_ns_ = median_duration_ns([&] {
    if (run(0, never) != Status::kOk) throw std::runtime_error(queue_.failure());
  });
}

int MedusaDrafter::confidence(const DraftContext& context) noexcept {
  return last_.precedes(context) ? temperature_confidence(context.sampling->temperature) : -1;
}

void MedusaDrafter::observe(const DraftOutcome& outcome) noexcept { last_.observe(outcome); }

Status MedusaDrafter::propose(const DraftContext& context, const TreePlan& plan, DraftTree& tree) noexcept {
  if (!last_.precedes(context)) return Status::kOk;
  if (const Status status = run(context.position, *context.abort); status != Status::kOk) return status;
  if (!take(queue_.result(queue_.asked()), plan)) {
    return queue_.fail("the device gave an impossible answer to a draft", /*restart_helps=*/true);
  }
  candidates_.grow(plan.count, tree);
  return Status::kOk;
}

// What ranks the candidates, sampling, biases, seed and text, is the device's from the round before. position: of the
// round's last token; -1: where that round ends.
Status MedusaDrafter::launch(int32_t position) noexcept {
  gpu::RoundRequest& request = queue_.next_request(program_.medusa);
  request.mode = gpu::RoundMode::kMedusa;
  request.count = program_.medusa_heads;
  request.position = position;
  request.max_tokens = 0;
  std::fill_n(request.tokens, program_.medusa_heads, 0);
  return queue_.launch(program_.medusa, setting_, text_);
}

void MedusaDrafter::run_behind() noexcept {
  if (queue_.has_slot() && launch(-1) == Status::kOk) behind_ = queue_.launched();
}

Status MedusaDrafter::run(int32_t position, const std::atomic<bool>& abort) noexcept {
  if (behind_ != 0 && behind_ == queue_.asked()) {
    if (const Status status = queue_.await(behind_, abort); status != Status::kOk) return status;
    if (queue_.result(behind_).status != gpu::RoundStatus::kSkipped) return Status::kOk;
  }
  if (launch(position) != Status::kOk) return Status::kExecutorFailed;
  return queue_.await(queue_.launched(), abort);
}

// False if the answer is not one to what was asked.
bool MedusaDrafter::take(const gpu::RoundResult& answer, const TreePlan& plan) noexcept {
  if (answer.status != gpu::RoundStatus::kOk || answer.count != program_.medusa_heads) return false;
  candidates_.depth = std::min(plan.depth, program_.medusa_heads);
  for (int d = 1; d <= candidates_.depth; ++d) {
    const gpu::EmittedToken& head = answer.tokens[d - 1];
    if (head.top_count < 1 || head.top_count > kMedusaRanks) return false;
    candidates_.counts[d] = std::min(head.top_count, plan.count);
    for (int rank = 0; rank < candidates_.counts[d]; ++rank) {
      if (head.top[rank].token < 0 || head.top[rank].token >= program_.vocabulary) return false;
      candidates_.tokens[d][rank] = head.top[rank].token;
      candidates_.scores[d][rank] = head.top[rank].logprob;
    }
  }
  return true;
}

}  // namespace ull::graph
