#include "graph/eagle.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>

#include "graph/timing.h"

namespace ull::graph {

static_assert(kEagleFirst + (kMaxEagleDepth - 1) * kMaxEagleWidth <= kMaxTreeTokens);
static_assert(kEagleRanks <= gpu::kAlternatives);

EagleDrafter::EagleDrafter(const EagleProgram& program, const Driver& driver, RoundQueue& target, const TapTags& tags,
                           int vocabulary, int64_t watchdog_ns)
    : HeadDrafter(DrafterKind::kEagle, tags, /*lookahead=*/1, program.context_tokens),
      program_(program),
      target_(target),
      vocabulary_(vocabulary),
      watchdog_ns_(watchdog_ns),
      setting_(program.pages, pages_for(program.context_tokens)),
      text_(program.text, program.context_tokens),
      queue_(program, driver),
      last_(target) {}

// Page 0 serves as scratch: no sequence exists yet. What is proposed does not matter.
void EagleDrafter::prepare() {
  const int32_t page = 0;
  const std::atomic<bool> never{false};
  const auto require = [](Status status, const RoundQueue& queue) {
    if (status != Status::kOk) throw std::runtime_error(queue.failure());
  };
  queue_.set_watchdog(kPrepareNs);
  require(target_.drain(), target_);
  setting_.take(Sampling{}, nullptr, 0, &page, 1);
  // Entries behind those that are kept follow the last of them: the context may have no room for more.
  const auto timed = [&](void* graph, int read, int count, int ranked) {
    pass_.count = 0;
    for (int i = 0; i < count; ++i) pass_.add(0, std::max(std::min(i, read) - 1, 0));
    pass_.read = read;
    pass_.ranked = ranked;
    pass_.start = pass_.from = 0;
    return median_duration_ns([&] {
      require(launch(graph, pass_), queue_);
      require(finish(never), queue_);
    });
  };
  const int held = std::min(kPageTokens, program_.context_tokens);
  (void)timed(program_.fill, held, held, 0);
  root_ns_ = timed(program_.first, 1, 1, 1);
  for (int i = kEagleSizes - 1; i >= 0; --i) {
    const int count = kEagleLevels[i];
    level_ns_ = timed(program_.levels[i], 1, count, kMaxEagleWidth);
  }
  queue_.set_watchdog(watchdog_ns_);
}

// The levels of most proposals fit into the smallest graph; larger ones read the same weights.
int64_t EagleDrafter::cost_ns(int depth) const noexcept {
  return depth < 1 ? 0 : root_ns_ + (std::min(depth, kMaxEagleDepth) - 1) * level_ns_;
}

void EagleDrafter::copy_page(const CopyStep& step) noexcept {
  if (queue_.copy_page(step.from_page, step.to_page) != Status::kOk) (void)failed();
}

Status EagleDrafter::failed() noexcept { return target_.fail(queue_.failure(), queue_.restart_helps()); }

int EagleDrafter::confidence(const DraftContext& context) noexcept {
  return last_.precedes(context) ? HeadDrafter::confidence(context) : -1;
}

void EagleDrafter::observe(const DraftOutcome& outcome) noexcept {
  HeadDrafter::observe(outcome);
  last_.observe(outcome);
}

Status EagleDrafter::launch(void* graph, const Pass& pass) noexcept {
  gpu::RoundRequest& request = queue_.next_request();
  request.mode = gpu::RoundMode::kEagle;
  request.count = pass.count;
  request.position = pass.start;
  request.max_tokens = pass.ranked;
  request.forced = pass.read;
  request.first = pass.from;
  std::copy_n(pass.tokens, pass.count, request.tokens);
  std::copy_n(pass.parents, pass.count, request.parents);
  return queue_.launch(graph, setting_, text_) == Status::kOk ? Status::kOk : failed();
}

Status EagleDrafter::finish(const std::atomic<bool>& abort) noexcept {
  while (!queue_.idle()) {
    const Status status = queue_.await(queue_.seen() + 1, abort);
    if (status == Status::kExecutorFailed) return failed();
    if (status != Status::kOk) return status;
    // Behind a round that ended the request, or emitted more than it may make, there is nothing to run.
    if (queue_.seen() == behind_ || queue_.result(queue_.seen()).status == gpu::RoundStatus::kOk) continue;
    (void)queue_.fail("the device has not run a pass of the EAGLE head", /*restart_helps=*/true);
    return failed();
  }
  return Status::kOk;
}

// The entries that a proposal begins with stay in pass_: its levels repeat them.
Status EagleDrafter::read(const int32_t* tokens, int count, int start, int from, const int32_t* pages, bool last,
                          const std::atomic<bool>& abort) noexcept {
  const int page_count = pages_for(start + count);
  if (!setting_.holds(pages, page_count)) {  // what is under way behind a round reads the mapped page table
    if (const Status status = finish(abort); status != Status::kOk) return status;
    setting_.take(pages, page_count);
  }
  const int in_first = last ? std::min(count, kEagleFirst) : 0;
  for (int done = 0; done < count;) {
    const bool is_first = done == count - in_first;
    pass_.count = 0;
    pass_.read = is_first ? in_first : std::min(count - in_first - done, kMaxTreeTokens);
    pass_.ranked = is_first ? 1 : 0;
    pass_.start = start + done;
    pass_.from = from;
    for (int i = 0; i < pass_.read; ++i) pass_.add(tokens[done + i], std::max(i - 1, 0));
    // What has been launched behind the round made just these entries, unless they were more than it may make.
    const bool made = is_first && done == 0 && behind_ != 0 && behind_ == queue_.launched() && behind_start_ == start &&
                      behind_from_ == from;
    if (made) {
      if (const Status status = queue_.await(behind_, abort); status != Status::kOk) {
        return status == Status::kExecutorFailed ? failed() : status;
      }
      const gpu::RoundResult& answer = queue_.result(behind_);
      if (answer.status == gpu::RoundStatus::kOk && answer.tokens[0].node == pass_.read - 1) return Status::kOk;
    }
    if (!queue_.has_slot()) {
      if (const Status status = finish(abort); status != Status::kOk) return status;
    }
    if (const Status status = launch(is_first ? program_.first : program_.fill, pass_); status != Status::kOk) {
      return status;
    }
    done += pass_.read;
  }
  return finish(abort);
}

// The cache then holds all before the root, which reach_root() has seen to.
void EagleDrafter::run_behind() noexcept {
  const int32_t root = pass_.start + pass_.read;
  if (root_pages_ == nullptr || !queue_.idle()) return;
  gpu::RoundRequest& request = queue_.next_request();
  setting_.take(root_pages_, pages_for(root + root_tokens_));
  request.mode = gpu::RoundMode::kEagle;
  request.count = std::min(kEagleFirst, root_tokens_);
  request.position = -1;
  request.max_tokens = 1;
  request.first = pass_.from;
  if (queue_.launch(program_.first, setting_, text_) != Status::kOk) {
    (void)failed();
    return;
  }
  behind_ = queue_.launched();
  behind_start_ = root;
  behind_from_ = pass_.from;
}

void* EagleDrafter::level_for(int entries) const noexcept {
  const int* size = std::lower_bound(std::begin(kEagleLevels), std::end(kEagleLevels), entries);
  return program_.levels[size - std::begin(kEagleLevels)];
}

Status EagleDrafter::run_level(void* graph, const int* nodes, const std::atomic<bool>& abort) noexcept {
  if (graph != nullptr) {  // the first has been run
    if (const Status status = launch(graph, pass_); status != Status::kOk) return status;
    if (const Status status = finish(abort); status != Status::kOk) return status;
  }
  const gpu::RoundResult& answer = queue_.result(queue_.seen());
  bool possible = answer.count == pass_.ranked;
  for (int i = 0; possible && i < pass_.ranked; ++i) {
    const gpu::EmittedToken& entry = answer.tokens[i];
    int32_t tokens[kEagleRanks];
    float scores[kEagleRanks];
    possible = entry.node == pass_.count - pass_.ranked + i && entry.top_count >= 1 && entry.top_count <= kEagleRanks;
    for (int rank = 0; possible && rank < entry.top_count; ++rank) {
      tokens[rank] = entry.top[rank].token;
      scores[rank] = entry.top[rank].logprob;
      possible = tokens[rank] >= 0 && tokens[rank] < vocabulary_;
    }
    if (possible) tree_.add_candidates(nodes[i], tokens, scores, entry.top_count);
  }
  if (possible) return Status::kOk;
  (void)queue_.fail("the device gave an impossible answer to a draft", /*restart_helps=*/true);
  return failed();
}

Status EagleDrafter::propose(const DraftContext& context, const TreePlan& plan, DraftTree& tree) noexcept {
  if (plan.depth < 1 || plan.count < 2 || context.drafted == nullptr || !last_.precedes(context)) return Status::kOk;
  const int32_t root = context.position;
  int32_t from = root;
  root_pages_ = nullptr;
  if (const Status status = reach_root(context, &from); status != Status::kOk) return status;
  if (from == root) return Status::kOk;
  tree_.begin(plan.count, std::min(plan.depth, program_.context_tokens - 1 - root), kMaxEagleWidth,
              plan.least_survival);
  entries_[0] = static_cast<int16_t>(pass_.count - 1);
  int nodes[kMaxEagleWidth] = {0};
  void* graph = nullptr;
  do {
    if (const Status status = run_level(graph, nodes, *context.abort); status != Status::kOk) return status;
    pass_.ranked = tree_.next_level(nodes);
    for (int i = 0; i < pass_.ranked; ++i) {
      const int node = nodes[i];
      entries_[node] = static_cast<int16_t>(pass_.count);
      pass_.add(tree_.token(node), entries_[tree_.parent(node)]);
    }
    graph = level_for(pass_.count);
  } while (pass_.ranked > 0);
  tree_.finish(tree);
  root_pages_ = context.pages;
  root_tokens_ = tree.deepest() + 1;
  return Status::kOk;
}

}  // namespace ull::graph
