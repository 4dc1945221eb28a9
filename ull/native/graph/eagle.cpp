#include "graph/eagle.h"

#include <algorithm>
#include <iterator>

#include "graph/timing.h"

namespace ull::graph {

static_assert(kEagleFirst + (kMaxEagleDepth - 1) * kMaxEagleWidth <= kMaxTreeTokens);
static_assert(kEagleRanks == kMedusaRanks);

EagleDrafter::EagleDrafter(const EagleProgram& program, const Driver& driver, RoundQueue& target, const TapTags& tags,
                           int vocabulary, int64_t watchdog_ns)
    : HeadOnDevice(DrafterKind::kEagle, /*lookahead=*/1, program, driver, target, tags, vocabulary, watchdog_ns),
      program_(program) {}

// What is proposed does not matter.
void EagleDrafter::prepare() {
  const std::atomic<bool> never{false};
  begin_measuring();
  // Entries behind those that are kept follow the last of them: the context may have no room for more.
  const auto timed = [&](void* graph, int read, int count, int ranked) {
    pass_.count = 0;
    for (int i = 0; i < count; ++i) pass_.add(0, std::max(std::min(i, read) - 1, 0));
    pass_.read = read;
    pass_.ranked = ranked;
    pass_.start = pass_.from = 0;
    return median_duration_ns([&] {
      require(launch(graph, pass_));
      require(finish(never));
    });
  };
  const int held = std::min(kPageTokens, program_.context_tokens);
  measure_chunks(timed(program_.fill, held, held, 0));
  root_ns_ = timed(program_.first, 1, 1, 1);
  for (int i = kEagleSizes - 1; i >= 0; --i) {
    const int count = kEagleLevels[i];
    level_ns_ = timed(program_.levels[i], 1, count, kMaxEagleWidth);
  }
  end_measuring();
}

// The levels of most proposals fit into the smallest graph; larger ones read the same weights.
int64_t EagleDrafter::cost_ns(int depth) const noexcept {
  return depth < 1 ? 0 : root_ns_ + (std::min(depth, kMaxEagleDepth) - 1) * level_ns_;
}

Status EagleDrafter::launch(void* graph, const Pass& pass) noexcept {
  gpu::RoundRequest& request = queue_.next_request(graph);
  request.mode = gpu::RoundMode::kEagle;
  request.count = pass.count;
  request.position = pass.start;
  request.max_tokens = pass.ranked;
  request.forced = pass.read;
  request.first = pass.from;
  std::copy_n(pass.tokens, pass.count, request.tokens);
  std::copy_n(pass.parents, pass.count, request.parents);
  return HeadOnDevice::launch(graph);
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
    const int before_first = count - in_first - done;
    const bool is_first = before_first == 0;
    if (const int in_chunk = chunk_of(before_first); in_chunk > 0) {
      if (const Status status = reach_slot(abort); status != Status::kOk) return status;
      if (const Status status = launch_chunk(tokens + done, in_chunk, start + done); status != Status::kOk) {
        return status;
      }
      done += in_chunk;
      continue;
    }
    pass_.count = 0;
    pass_.read = is_first ? in_first : std::min(before_first, kMaxTreeTokens);
    pass_.ranked = is_first ? 1 : 0;
    pass_.start = start + done;
    pass_.from = from;
    for (int i = 0; i < pass_.read; ++i) pass_.add(tokens[done + i], std::max(i - 1, 0));
    // What has been launched behind the round made just these entries, unless they were more than it may make.
    if (is_first && done == 0) {
      bool made = false;
      const Status status = made_behind(start, from, abort, &made);
      if (status != Status::kOk || made) return status;
    }
    if (const Status status = reach_slot(abort); status != Status::kOk) return status;
    if (const Status status = launch(is_first ? program_.first : program_.fill, pass_); status != Status::kOk) {
      return status;
    }
    done += pass_.read;
  }
  return finish(abort);
}

// The cache then holds all before the root, which reach_root() has seen to.
void EagleDrafter::run_behind() noexcept {
  if (!begin_behind()) return;
  gpu::RoundRequest& request = queue_.next_request(program_.first);
  request.mode = gpu::RoundMode::kEagle;
  request.count = std::min(kEagleFirst, verified_.tokens);
  request.position = -1;
  request.max_tokens = 1;
  request.first = verified_.from;
  if (HeadOnDevice::launch(program_.first) == Status::kOk) end_behind(queue_.asked());
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
  const gpu::RoundResult& answer = queue_.result(queue_.asked());
  if (answer.count != pass_.ranked) return impossible();
  for (int i = 0; i < pass_.ranked; ++i) {
    int32_t tokens[kEagleRanks];
    float scores[kEagleRanks];
    const int count = candidates(answer.tokens[i], pass_.count - pass_.ranked + i, tokens, scores);
    if (count < 0) return impossible();
    tree_.add_candidates(nodes[i], tokens, scores, count);
  }
  return Status::kOk;
}

Status EagleDrafter::propose(const DraftContext& context, const TreePlan& plan, DraftTree& tree) noexcept {
  if (plan.depth < 1 || plan.count < 2 || context.drafted == nullptr || !last_.precedes(context)) return Status::kOk;
  const int32_t root = context.position;
  int32_t from = root;
  verified_ = {};
  if (const Status status = reach_root(context, &from); status != Status::kOk) return status;
  if (from == root) return Status::kOk;
  tree_.begin(plan.count, std::min(plan.depth, program_.context_tokens - 1 - root), kMaxEagleWidth);
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
  verified_ = {context.pages, root, from, tree.deepest() + 1};
  return Status::kOk;
}

}  // namespace ull::graph
