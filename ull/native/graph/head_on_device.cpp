#include "graph/head_on_device.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <numeric>
#include <stdexcept>
#include <vector>

#include "graph/timing.h"

namespace ull::graph {

HeadOnDevice::HeadOnDevice(DrafterKind kind, int lookahead, const RoundBlocks& blocks, const Driver& driver,
                           RoundQueue& target, const TapTags& tags, int vocabulary, int64_t watchdog_ns)
    : HeadDrafter(kind, tags, lookahead, blocks.context_tokens),
      blocks_(blocks),
      target_(target),
      vocabulary_(vocabulary),
      setting_(blocks.pages, pages_for(blocks.context_tokens)),
      text_(blocks.text, blocks.context_tokens),
      queue_(blocks, driver, target.foresight()),
      last_(target),
      watchdog_ns_(watchdog_ns) {}

void HeadOnDevice::begin_measuring() {
  int32_t pages[pages_for(gpu::kChunkTokens)];
  std::iota(std::begin(pages), std::end(pages), 0);
  const int count = std::min(blocks_.page_count, pages_for(std::min(blocks_.context_tokens, gpu::kChunkTokens)));
  queue_.set_watchdog(kPrepareNs);
  if (target_.drain() != Status::kOk) throw std::runtime_error(target_.failure());
  setting_.take(Sampling{}, nullptr, 0, pages, count);
}

void HeadOnDevice::measure_chunks(int64_t pass_ns) {
  if (blocks_.chunk == nullptr) return;
  constexpr int kTiles = PromptCosts::kTiles;
  const std::vector<int32_t> tokens(gpu::kChunkTokens, 0);
  const int room = std::min(blocks_.context_tokens, tokens_in(blocks_.page_count));
  const auto measured_ns = [&](int count) {
    return median_duration_ns([&] {
      require(launch_chunk(tokens.data(), std::min(count, room), 0));
      require(finish(std::atomic<bool>{false}));
    });
  };
  const int64_t few = measured_ns(gpu::kChunkTile), many = measured_ns(gpu::kChunkTokens);
  std::array<PromptCosts::Measured, kTiles> chunks;
  for (int i = 0; i < kTiles; ++i) chunks[static_cast<size_t>(i)].near_ns = few + (many - few) * i / (kTiles - 1);
  costs_ = PromptCosts({.near_ns = pass_ns}, chunks, /*far=*/0);  // nothing is attended to: no position matters
}

void HeadOnDevice::require(Status status) const {
  if (status != Status::kOk) throw std::runtime_error(queue_.failure());
}

void HeadOnDevice::copy_page(const CopyStep& step) noexcept {
  if (queue_.copy_page(step.from_page, step.to_page) != Status::kOk) (void)failed();
}

int HeadOnDevice::confidence(const DraftContext& context) noexcept {
  return last_.precedes(context) ? HeadDrafter::confidence(context) : -1;
}

void HeadOnDevice::observe(const DraftOutcome& outcome) noexcept {
  HeadDrafter::observe(outcome);
  last_.observe(outcome);
}

Status HeadOnDevice::launch(void* graph) noexcept {
  return queue_.launch(graph, setting_, text_) == Status::kOk ? Status::kOk : failed();
}

int HeadOnDevice::chunk_of(int count) const noexcept {
  const int most = std::min(count, gpu::kChunkTokens);
  return blocks_.chunk != nullptr && most > gpu::kTreeTokens && costs_.prefers_chunk(most, 0) ? most : 0;
}

Status HeadOnDevice::launch_chunk(const int32_t* tokens, int count, int start) noexcept {
  gpu::RoundRequest& request = queue_.next_request(blocks_.chunk);
  request.mode = gpu::RoundMode::kPrefill;
  request.count = count;
  request.position = start;
  request.max_tokens = 0;
  std::copy_n(tokens, count, queue_.next_chunk());
  return launch(blocks_.chunk);
}

Status HeadOnDevice::finish(const std::atomic<bool>& abort) noexcept {
  while (!queue_.idle()) {
    const Status status = queue_.await(queue_.seen() + 1, abort);
    if (status == Status::kExecutorFailed) return failed();
    if (status != Status::kOk) return status;
    // Behind a round that ended the request, or emitted more than it may make, there is nothing to run.
    const uint64_t pass = queue_.seen();
    if ((pass >= behind_.first && pass <= behind_.last) || queue_.was_sent_away(pass) ||
        queue_.result(pass).status == gpu::RoundStatus::kOk)
      continue;
    (void)queue_.fail("the device has not run a pass of a head", /*restart_helps=*/true);
    return failed();
  }
  return Status::kOk;
}

int HeadOnDevice::candidates(const gpu::EmittedToken& answer, int node, int32_t* tokens, float* scores) const noexcept {
  if (answer.node != node || answer.top_count < 1 || answer.top_count > kMedusaRanks) return -1;
  for (int rank = 0; rank < answer.top_count; ++rank) {
    tokens[rank] = answer.top[rank].token;
    scores[rank] = answer.top[rank].logprob;
    if (tokens[rank] < 0 || tokens[rank] >= vocabulary_) return -1;
  }
  return answer.top_count;
}

bool HeadOnDevice::begin_behind() noexcept {
  if (verified_.pages == nullptr || !queue_.rests()) return false;
  setting_.take(verified_.pages, pages_for(verified_.root + verified_.tokens));
  return true;
}

void HeadOnDevice::end_behind(uint64_t first) noexcept {
  behind_ = {first, queue_.asked(), target_.asked(), verified_.root, verified_.from};
}

Status HeadOnDevice::made_behind(int32_t start, int32_t from, const std::atomic<bool>& abort, bool* made) noexcept {
  *made = false;
  const bool newest = behind_.last == queue_.asked() && behind_.round == target_.asked();
  if (behind_.last == 0 || !newest || behind_.start != start || behind_.from != from) return Status::kOk;
  const Status status = queue_.await(behind_.last, abort);
  if (status != Status::kOk) return status == Status::kExecutorFailed ? failed() : status;
  *made = queue_.result(behind_.first).status == gpu::RoundStatus::kOk &&
          queue_.result(behind_.last).status == gpu::RoundStatus::kOk;
  return Status::kOk;
}

Status HeadOnDevice::impossible() noexcept {
  (void)queue_.fail("the device gave an impossible answer to a draft", /*restart_helps=*/true);
  return failed();
}

}  // namespace ull::graph
