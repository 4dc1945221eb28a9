#include "graph/dflash.h"

#include <algorithm>
#include <cmath>

#include "graph/timing.h"

namespace ull::graph {

DflashDrafter::DflashDrafter(const DflashProgram& program, const Driver& driver, RoundQueue& target,
                             const TapTags& tags, int vocabulary, int64_t watchdog_ns)
    : HeadOnDevice(DrafterKind::kDflash, /*lookahead=*/0, program, driver, target, tags, vocabulary, watchdog_ns),
      program_(program) {}

// What is proposed does not matter.
void DflashDrafter::prepare() {
  const std::atomic<bool> never{false};
  begin_measuring();
  const int held = std::min(kPageTokens, program_.context_tokens), block = std::min(program_.block_tokens, held - 1);
  const auto timed = [&](const auto& launch) {
    return median_duration_ns([&] {
      require(launch());
      require(finish(never));
    });
  };
  measure_chunks(timed([&] { return launch_context(0, held); }));
  block_ns_ = timed([&] { return launch_context(0, 1); });
  block_ns_ += timed([&] { return launch_block(0, 1, 0, block, ranked(predicted(block))); });
  if (program_.nodes != nullptr) {
    tokens_[0] = 0;
    parents_[0] = 0;
    count_ = 1;
    level_ns_ = timed([&] { return launch_nodes(1, 1); });
  }
  end_measuring();
}

int DflashDrafter::max_depth() const noexcept {
  const int depths = predicted(program_.block_tokens);
  return program_.nodes == nullptr ? depths : std::min(depths, kMaxEagleDepth);
}

// A block takes as long however much of it is asked for.
int64_t DflashDrafter::cost_ns(int depth) const noexcept {
  return depth < 1 ? 0 : block_ns_ + std::min(depth, max_depth()) * level_ns_;
}

Status DflashDrafter::launch_context(int start, int count) noexcept {
  void* graph = program_.contexts[count <= kDflashContexts[0] ? 0 : 1];
  gpu::RoundRequest& request = queue_.next_request(graph);
  request.mode = gpu::RoundMode::kDflashContext;
  request.count = count;
  request.position = start;
  request.max_tokens = 0;
  std::fill_n(request.tokens, count, 0);
  return launch(graph);
}

Status DflashDrafter::launch_block(int32_t root, int32_t position, int32_t from, int entries, int depth) noexcept {
  gpu::RoundRequest& request = queue_.next_request(program_.block);
  request.mode = gpu::RoundMode::kDflashBlock;
  request.count = entries;
  request.position = position;
  request.max_tokens = depth;
  request.first = from;
  std::fill_n(request.tokens, entries, program_.mask_token);
  request.tokens[0] = root;
  return launch(program_.block);
}

Status DflashDrafter::launch_nodes(int32_t position, int ranked) noexcept {
  gpu::RoundRequest& request = queue_.next_request(program_.nodes);
  request.mode = gpu::RoundMode::kDflashNodes;
  request.count = count_;
  request.position = position;
  request.max_tokens = ranked;
  std::copy_n(tokens_, count_, request.tokens);
  std::copy_n(parents_, count_, request.parents);
  return launch(program_.nodes);
}

Status DflashDrafter::read(const int32_t* tokens, int count, int start, int from, const int32_t* pages, bool last,
                           const std::atomic<bool>& abort) noexcept {
  const int page_count = pages_for(start + count);
  if (!setting_.holds(pages, page_count)) {  // what is under way behind a round reads the mapped page table
    if (const Status status = finish(abort); status != Status::kOk) return status;
    setting_.take(pages, page_count);
  }
  if (const Status status = made_behind(start, from, abort, &made_); status != Status::kOk || made_) return status;
  for (int done = 0; done < count;) {
    const int in_chunk = chunk_of(count - done),
              taken = in_chunk > 0 ? in_chunk : std::min(count - done, kMaxTreeTokens);
    if (const Status status = reach_slot(abort); status != Status::kOk) return status;
    const Status status =
        in_chunk > 0 ? launch_chunk(tokens + done, taken, start + done) : launch_context(start + done, taken);
    if (status != Status::kOk) return status;
    done += taken;
  }
  return last ? Status::kOk : finish(abort);  // the block follows at once
}

void DflashDrafter::run_behind() noexcept {
  const int entries = program_.block_tokens;
  if (verified_.root + verified_.tokens + entries > program_.context_tokens || !begin_behind()) return;
  if (launch_context(-1, verified_.tokens) != Status::kOk) return;
  const uint64_t first = queue_.asked();
  if (launch_block(0, -1, verified_.from, entries, ranked(max_depth())) == Status::kOk) end_behind(first);
}

Status DflashDrafter::propose(const DraftContext& context, const TreePlan& plan, DraftTree& tree) noexcept {
  if (plan.count < 2 || context.drafted == nullptr || !last_.precedes(context)) return Status::kOk;
  const int32_t root = context.position;
  const int entries = std::min({program_.block_tokens, tree.max_depth() + 1, program_.context_tokens - root});
  const int depth = std::min({plan.depth, predicted(entries), max_depth(), tree.max_depth()});
  if (depth < 1) return Status::kOk;
  int32_t from = root;
  verified_ = {};
  made_ = false;
  if (const Status status = reach_root(context, &from); status != Status::kOk) return status;
  if (from >= root) return Status::kOk;
  if (!made_) {
    if (const Status status = reach_slot(*context.abort); status != Status::kOk) return status;
    const Status launched = launch_block(context.history[root], root, from, entries, ranked(depth));
    if (launched != Status::kOk) return launched;
  }
  if (const Status status = finish(*context.abort); status != Status::kOk) return status;
  const Status status = program_.nodes == nullptr ? grow_along(queue_.result(queue_.asked()), depth, plan, tree)
                                                  : grow_by_levels(context, depth, plan, tree);
  if (status == Status::kOk) verified_ = {context.pages, root, from, tree.deepest() + 1};
  return status;
}

Status DflashDrafter::grow_along(const gpu::RoundResult& answer, int depth, const TreePlan& plan,
                                 DraftTree& tree) noexcept {
  if (answer.status != gpu::RoundStatus::kOk || answer.count < depth) return impossible();
  for (int d = 1; d <= depth; ++d) {
    Candidates& found = depths_[d];
    const gpu::EmittedToken& entry = answer.tokens[d - 1];
    float scores[kMedusaRanks];
    found.count = candidates(entry, program_.anchor_predicts ? d - 1 : d, found.tokens, scores);
    if (found.count < 0 || !std::isfinite(entry.logprob)) return impossible();
    found.count = std::min(found.count, plan.count - 1);
    share_out(scores, found.count, std::clamp(entry.logprob, 0.0F, 1.0F), found.shares);
  }
  grow(plan.count, tree, [&](int node) -> Branch {
    const int d = tree.depth(node) + 1;
    if (d > depth) return {};
    return {depths_[d].count, depths_[d].tokens, depths_[d].shares};
  });
  return Status::kOk;
}

Status DflashDrafter::grow_by_levels(const DraftContext& context, int depth, const TreePlan& plan,
                                     DraftTree& tree) noexcept {
  tree_.begin(plan.count, depth, kMaxEagleWidth);
  tokens_[0] = context.history[context.position];
  parents_[0] = 0;
  count_ = 1;
  nodes_[0] = 0;
  int level[kMaxEagleWidth] = {0};
  for (int ranked = 1; ranked > 0;) {
    if (const Status status = launch_nodes(context.position, ranked); status != Status::kOk) return status;
    if (const Status status = finish(*context.abort); status != Status::kOk) return status;
    const gpu::RoundResult& answer = queue_.result(queue_.asked());
    if (answer.count != ranked) return impossible();
    for (int i = 0; i < ranked; ++i) {
      int32_t tokens[kMedusaRanks];
      float scores[kMedusaRanks];
      const gpu::EmittedToken& entry = answer.tokens[i];
      const int count = candidates(entry, count_ - ranked + i, tokens, scores);
      if (count < 0 || !std::isfinite(entry.logprob)) return impossible();
      tree_.add_candidates(level[i], tokens, scores, count, std::clamp(entry.logprob, 0.0F, 1.0F));
    }
    ranked = tree_.next_level(level);
    for (int i = 0; i < ranked; ++i) {
      nodes_[level[i]] = static_cast<int16_t>(count_);
      tokens_[count_] = tree_.token(level[i]);
      parents_[count_++] = static_cast<uint8_t>(nodes_[tree_.parent(level[i])]);
    }
  }
  tree_.finish(tree);
  return Status::kOk;
}

}  // namespace ull::graph
