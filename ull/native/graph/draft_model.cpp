#include "graph/draft_model.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "base/clock.h"
#include "graph/timing.h"

namespace ull::graph {
namespace {

constexpr int kMeasuredDepth = 8;

}  // namespace

DraftModel::DraftModel(const GraphProgram& program, const Driver& driver, RoundQueue& target, int target_vocabulary,
                       int64_t watchdog_ns)
    : ChainDrafter(program.vocabulary, program.context_tokens, std::min(program.vocabulary, target_vocabulary)),
      program_(program),
      graphs_(program),
      target_(target),
      watchdog_ns_(watchdog_ns),
      setting_(program.pages, pages_for(program.context_tokens)),
      text_(program.text, program.context_tokens),
      queue_(program, driver, target.foresight()) {}

// Page 0 serves as scratch: no sequence exists yet. What is drawn does not matter.
void DraftModel::prepare() {
  std::vector<int32_t> pages(static_cast<size_t>(pages_for(gpu::kChunkTokens)));
  std::iota(pages.begin(), pages.end(), 0);
  const std::atomic<bool> never{false};
  const std::vector<int32_t> tokens(gpu::kChunkTokens, 0);
  const auto require = [](Status status, const RoundQueue& queue) {
    if (status != Status::kOk) throw std::runtime_error(queue.failure());
  };
  queue_.set_watchdog(kPrepareNs);
  require(target_.drain(), target_);
  setting_.take(Sampling{}, nullptr, 0, pages.data(), 1);
  const auto chain = [&](int depth) {
    return median_duration_ns([&] { require(draw(0, 0, depth, Sampling{}, never), queue_); });
  };
  const int depth = std::min(kMeasuredDepth, program_.context_tokens - 1);
  const int64_t one = chain(1), all = chain(depth);
  step_ns_ = depth > 1 ? std::max<int64_t>((all - one) / (depth - 1), 1) : one;
  start_ns_ = std::max<int64_t>(one - step_ns_, 0);
  const auto read_ns = [&](int most) {
    const int count = std::min({most, program_.context_tokens, tokens_in(program_.page_count)});
    const auto lasts = median_duration_ns([&] { require(read(tokens.data(), count, 0, pages.data(), never), queue_); });
    return static_cast<double>(lasts) / count;
  };
  few_ns_ = read_ns(gpu::kTreeTokens);
  many_ns_ = program_.chunk != nullptr ? read_ns(gpu::kChunkTokens) : few_ns_;
  queue_.set_watchdog(watchdog_ns_);
}

template <typename Graph, typename Fill, typename Take>
Status DraftModel::run(int rounds, const std::atomic<bool>& abort, const Graph& graph_of, const Fill& fill,
                       const Take& take) noexcept {
  for (int launched = 0, answered = 0; answered < rounds;) {
    for (; launched < rounds && queue_.has_slot(); ++launched) {
      void* graph = graph_of(launched);
      fill(launched, queue_.next_request(graph));
      if (queue_.launch(graph, setting_, text_) != Status::kOk) return failed();
    }
    const Status status = queue_.await(queue_.seen() + 1, abort);
    if (status == Status::kExecutorFailed) return failed();
    if (status != Status::kOk) return status;
    if (queue_.was_sent_away(queue_.seen())) continue;
    ++answered;
    if (take(queue_.result(queue_.seen()))) continue;
    (void)queue_.fail("the device gave an impossible answer to a draft", /*restart_helps=*/true);
    return failed();
  }
  return Status::kOk;
}

Status DraftModel::failed() noexcept { return target_.fail(queue_.failure(), queue_.restart_helps()); }

void DraftModel::copy_page(const CopyStep& step) noexcept {
  if (queue_.copy_page(step.from_page, step.to_page) != Status::kOk) (void)failed();
}

Status DraftModel::read(const int32_t* tokens, int count, int start, const int32_t* pages,
                        const std::atomic<bool>& abort) noexcept {
  setting_.take(pages, pages_for(start + count));
  // What is more than a round holds goes in chunks, where there is a graph of them.
  const int most = program_.chunk != nullptr ? gpu::kChunkTokens : gpu::kTreeTokens;
  const auto tokens_of = [&](int part) { return std::min(count - part * most, most); };
  return run((count + most - 1) / most, abort,
             [&](int part) {
               const int here = tokens_of(part);
               return here > gpu::kTreeTokens ? program_.chunk : graphs_.prefill_for(here, start + part * most);
             },
             [&](int part, gpu::RoundRequest& request) {
               const int first = part * most, here = tokens_of(part);
               request.mode = gpu::RoundMode::kPrefill;
               request.count = here;
               request.position = start + first;
               request.max_tokens = 0;
               if (here > gpu::kTreeTokens) {
                 int32_t* to = queue_.next_chunk();
                 for (int i = 0; i < here; ++i) to[i] = known(tokens[first + i]);
                 return;
               }
               for (int i = 0; i < here; ++i) {
                 request.tokens[i] = known(tokens[first + i]);
                 request.parents[i] = static_cast<uint8_t>(std::max(i - 1, 0));
               }
             },
             [](const gpu::RoundResult& answer) { return answer.status == gpu::RoundStatus::kOk; });
}

Status DraftModel::draw(int32_t root, int32_t position, int depth, const Sampling& sampling,
                        const std::atomic<bool>& abort) noexcept {
  candidates_.depth = 0;
  bool ended = false;
  return run(
      depth, abort, [&](int index) { return graphs_.round_for(1, position + index, sampling); },
      [&](int index, gpu::RoundRequest& request) {
        request.mode = index == 0 ? gpu::RoundMode::kTake : gpu::RoundMode::kContinue;
        request.count = 1;
        request.position = position + index;
        request.max_tokens = 1;
        request.tokens[0] = known(root);
        request.parents[0] = 0;
      },
      [&](const gpu::RoundResult& answer) {
        if (ended) return answer.status == gpu::RoundStatus::kSkipped;
        // No token is to be had, or none that the request allows: the chain ends before it.
        ended = answer.status == gpu::RoundStatus::kNotFinite;
        if (ended) return true;
        const int32_t token = answer.tokens[0].token;
        if (answer.status != gpu::RoundStatus::kOk || answer.count != 1 || token < 0 || token >= program_.vocabulary)
          return false;
        candidates_.counts[++candidates_.depth] = 1;
        candidates_.tokens[candidates_.depth][0] = token;
        return true;
      });
}

Status DraftModel::propose(const DraftContext& context, const TreePlan& plan, DraftTree& tree) noexcept {
  const int depth = begin_chain(context, plan);
  if (depth < 1) return Status::kOk;
  const int32_t root = context.position, missing = first_missing(context);
  Sampling sampling = common_sampling(*context.sampling);
  sampling.top_logprobs = -1;
  setting_.take(sampling, nullptr, 0, context.pages, pages_for(root + depth));
  // The device's own text ends in the last chain, which is never all of what the round has emitted.
  if (sampling.penalises()) text_.take(context.history, root + 1, context.prompt_tokens);
  if (missing < root) {
    const Status status = read(context.history + missing, root - missing, missing, context.pages, *context.abort);
    if (status != Status::kOk) return status;
  }
  reached_root(context);
  if (const Status status = draw(context.history[root], root, depth, sampling, *context.abort); status != Status::kOk) {
    return status;
  }
  chain_ = candidates_.depth;
  fed_ = std::max(chain_ - 1, 0);
  candidates_.fill(plan, tree);
  return Status::kOk;
}

}  // namespace ull::graph
