// How a graph executor gets ready: it runs every graph, and measures those that it chooses from.
#include <algorithm>
#include <array>
#include <stdexcept>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "draft/suffix.h"
#include "graph/dflash.h"
#include "graph/draft_model.h"
#include "graph/eagle.h"
#include "graph/graph_executor.h"
#include "graph/medusa.h"
#include "graph/requests.h"
#include "graph/timing.h"

namespace ull::graph {
namespace {

constexpr int kFarPosition = 8192;
constexpr double kUnmeasured = 1e15;  // nanoseconds

// Tokens of a prompt that one step reads. Behind each step the engine may turn to a more urgent request.
int prefill_chunk(const GraphProgram& program) noexcept {
  static_assert(gpu::kChunkTokens <= gpu::kTapSlots);
  // All slots at once: the rounds of a step wait for each other on the device alone.
  if (program.chunk == nullptr) return gpu::kRoundSlots * gpu::kTreeTokens;
  // One graph, beside which the host's turn behind it is short. An EAGLE head reads the last tap of a step with the
  // token that follows, hence behind the next step, which must leave that tap in the ring.
  return program.eagle == nullptr ? gpu::kChunkTokens : std::min(gpu::kChunkTokens, gpu::kTapSlots - 1);
}

}  // namespace

void GraphExecutor::require(Status status) const {
  if (status != Status::kOk) {
    throw std::runtime_error(queue_.failure() != nullptr ? queue_.failure() : "the graph executor has failed");
  }
}

void GraphExecutor::prepare() {
  info_ = ExecutorInfo{};
  info_.vocabulary = program_.vocabulary;
  info_.context = program_.context_tokens;
  info_.page_count = program_.page_count;
  info_.prefill_chunk = std::min(options_.prefill_chunk, prefill_chunk(program_));
  // At least a plain round and the continuations behind it.
  info_.tokens_per_round = std::max({program_.most_nodes(), 2, 1 + program_.burst_rounds});
  info_.weight_bytes = program_.weight_bytes;
  info_.kv_bytes = program_.kv_bytes;
  info_.reuse = program_.reuse;
  const int most_fed = std::max(program_.last_chunk != nullptr ? info_.prefill_chunk : 0, program_.most_nodes());
  info_.forced_tokens = program_.rounds_prefill() ? std::min(most_fed, info_.context) - 1 : 0;
  info_.prefill_draws = program_.prefill_draws();
  info_.copies_pages = program_.kv_pages != 0 && (program_.draft == nullptr || program_.draft->kv_pages != 0) &&
                       (program_.eagle == nullptr || program_.eagle->kv_pages != 0) &&
                       (program_.dflash == nullptr || program_.dflash->kv_pages != 0);
  info_.penalties = true;
  info_.constraints = redraws_.offered();
  info_.score_nodes = redraws_.offered() ? std::min(program_.most_nodes(), info_.context) : 0;
  info_.name = program_.name.c_str();
  info_.default_drafter = options_.drafter;
  info_.default_max_tree = options_.max_tree;
  settled_ = false;
  require(queue_.enter());
  queue_.set_watchdog(kPrepareNs);
  const int64_t watchdog = options_.watchdog_ms * 1'000'000;
  std::vector<std::unique_ptr<Drafter>> drafters;
  if (program_.most_nodes() > 1) {
    drafters.push_back(std::make_unique<SuffixDrafter>(info_.context, options_.past_outputs));
  }
  if (program_.medusa != nullptr && program_.most_nodes() > 1) {
    drafters.push_back(std::make_unique<MedusaDrafter>(program_, queue_, setting_, text_));
  }
  if (program_.eagle != nullptr && program_.most_nodes() > 1) {
    drafters.push_back(
        std::make_unique<EagleDrafter>(*program_.eagle, driver_, queue_, tags_, info_.vocabulary, watchdog));
  }
  if (program_.dflash != nullptr && program_.most_nodes() > 1) {
    drafters.push_back(
        std::make_unique<DflashDrafter>(*program_.dflash, driver_, queue_, tags_, info_.vocabulary, watchdog));
  }
  if (options_.in_place_of_draft_model) {
    drafters.push_back(options_.in_place_of_draft_model());
  } else if (program_.draft != nullptr && program_.most_nodes() > 1) {
    drafters.push_back(std::make_unique<DraftModel>(*program_.draft, driver_, queue_, program_.vocabulary, watchdog));
  }
  if (options_.replace_drafter) {
    for (auto& drafter : drafters) drafter = options_.replace_drafter(std::move(drafter));
  }
  proposer_ = std::make_unique<Proposer>(
      std::move(drafters),
      Proposer::Options{info_.vocabulary, info_.context, program_.most_nodes(), options_.adaptive});
  proposer_->prepare(measure(), info_);
  queue_.set_watchdog(watchdog, dearest_ns_);
}

// Replays every graph on pages that hold nothing yet: what is drawn does not matter. A graph's time holds the
// lm_head's. A tree costs what the graph that it takes does, here and there, so that more nodes never cost less.
VerifyCosts GraphExecutor::measure() {
  const int held = std::min(info_.context, tokens_in(info_.page_count));
  std::vector<int32_t> pages(static_cast<size_t>(pages_for(held)));
  for (size_t page = 0; page < pages.size(); ++page) pages[page] = static_cast<int32_t>(page);
  // Where attention's share is measured, and a wide graph has twice as many blocks at work.
  const int far = std::clamp(held - kMaxTreeTokens, 0, std::max(kFarPosition, 2 * program_.wide.from));
  int64_t near_ns[kCostSizes] = {}, far_ns[kCostSizes] = {}, single_ns[kSamplers] = {};
  bool widens[kCostSizes] = {};
  for (int i = 0; i < kCostSizes; ++i) {
    if (program_.rounds[i] == nullptr || kCostTokens[i] > held) continue;
    const auto timed = [&](int position) {
      return measure_graph(program_.rounds[i], gpu::RoundMode::kTake, kCostTokens[i], position, pages);
    };
    near_ns[i] = timed(0);
    // What takes as long as all measurements of a graph may runs on an emulator: once is enough, here and below.
    far_ns[i] = far > 0 && near_ns[i] < kMeasureNs ? timed(far) : near_ns[i];
    if (program_.wide.rounds[i] != nullptr && far >= program_.wide.from && near_ns[i] < kMeasureNs) {
      const int64_t wide_ns = measure_graph(program_.wide.rounds[i], gpu::RoundMode::kTake, kCostTokens[i], far, pages);
      widens[i] = wide_ns < far_ns[i];
      far_ns[i] = std::min(far_ns[i], wide_ns);
    }
    dearest_ns_ = std::max({dearest_ns_, near_ns[i], far_ns[i]});
  }
  for (const Sampler sampler : {Sampler::kPlain, Sampler::kScan}) {
    if (void* graph = program_.single(sampler); graph != nullptr) {
      single_ns[static_cast<int>(sampler)] = measure_graph(graph, gpu::RoundMode::kTake, 1, 0, pages);
    }
    // Taken where the full sampler's is.
    if (void* graph = program_.single(sampler, /*is_wide=*/true); graph != nullptr) launch_first(graph);
  }
  const auto timed_prompt = [&](void* graph, int count, int position) {
    const int64_t nanoseconds = measure_graph(graph, gpu::RoundMode::kPrefill, count, position, pages);
    dearest_ns_ = std::max(dearest_ns_, nanoseconds);
    return nanoseconds;
  };
  const int64_t prefill_ns = timed_prompt(program_.prefill, std::min(held, gpu::kTreeTokens), 0);
  const bool reaches = far > 0 && prefill_ns < kMeasureNs;
  const int64_t far_prefill_ns = reaches ? timed_prompt(program_.prefill, gpu::kTreeTokens, far) : prefill_ns;
  CostLine rounds[kCostSizes];
  for (int i = 0; i < kCostSizes; ++i) rounds[i] = CostLine::through(near_ns[i], far_ns[i], far);
  const CostLine prefill = CostLine::through(prefill_ns, far_prefill_ns, far);
  graphs_.measured(rounds, single_ns, prefill, widens);
  if (program_.chunk != nullptr) {
    constexpr int kTiles = PromptCosts::kTiles;
    const auto timed_chunk = [&](int tiles, int position) {
      return timed_prompt(program_.chunk, std::min(held, tiles * gpu::kChunkTile), position);
    };
    const int64_t one_ns = timed_chunk(1, 0), many_ns = one_ns < kMeasureNs ? timed_chunk(kTiles, 0) : kTiles * one_ns;
    int64_t drawing_ns = 0;  // what the last one takes more, however many tokens it has
    if (program_.last_chunk != nullptr) {
      const int count = std::min(held, gpu::kChunkTile);
      drawing_ns = measure_graph(program_.last_chunk, gpu::RoundMode::kTake, count, 0, pages) - one_ns;
      drawing_ns = std::max<int64_t>(drawing_ns, 0);
    }
    dearest_ns_ = std::max(dearest_ns_, many_ns + drawing_ns);
    const int behind = std::min(far, held - gpu::kChunkTokens);
    if (many_ns < kMeasureNs && behind > 0 && !program_.chunks_prefill()) {
      std::array<PromptCosts::Measured, kTiles> chunks;
      for (int tiles = 1; tiles <= kTiles; ++tiles) {
        const int64_t chunk_ns = tiles == 1 ? one_ns : tiles == kTiles ? many_ns : timed_chunk(tiles, 0);
        chunks[static_cast<size_t>(tiles) - 1] = {chunk_ns, timed_chunk(tiles, behind)};
      }
      const int64_t plain = single_ns[static_cast<int>(graphs_.plain())], single = plain > 0 ? plain : near_ns[0];
      const PromptCosts::First first{{near_ns[kCostSizes - 1], far_ns[kCostSizes - 1]},
                                     {single, single + far_ns[0] - near_ns[0]},
                                     far,
                                     drawing_ns,
                                     info_.prefill_chunk};
      prompt_costs_ = {{prefill_ns, static_cast<int64_t>(prefill.at(behind))}, chunks, behind, first};
    }
  }
  run_bursts(held);
  run_redraws();

  VerifyCosts costs;
  costs.stepped = true;
  for (int i = 0; i < kCostSizes; ++i) {
    info_.verify_ns[i] = near_ns[i];
    const int graph = graphs_.chosen(i, 0), far_graph = graphs_.chosen(i, far);
    const bool known = graph >= 0 && rounds[graph].known();
    costs.body_ns[i] = known ? rounds[graph].first_ns : kUnmeasured;
    if (known && far > 0) costs.body_position_ns[i] = (rounds[far_graph].at(far) - costs.body_ns[i]) / far;
  }
  // What most requests pay for a plain round.
  if (const int64_t plain_ns = single_ns[static_cast<int>(graphs_.plain())]; plain_ns > 0) {
    info_.verify_ns[0] = plain_ns;
    costs.body_ns[0] = static_cast<double>(plain_ns);
  }
  return costs;
}

// A round of one token at the first position.
void GraphExecutor::launch_first(void* graph) {
  constexpr int32_t kToken = 0;
  gpu::RoundRequest& first = queue_.next_request(graph);
  first.mode = gpu::RoundMode::kTake;
  first.count = 1;
  first.position = 0;
  first.max_tokens = 1;
  fill_chain(first, &kToken, 1);
  require(queue_.launch(graph, setting_, text_));
}

// Each burst behind a round that it continues, as far as `held` positions suffice: so that none is run for the first
// time when a request waits for it.
void GraphExecutor::run_bursts(int held) {
  if (program_.burst_rounds >= held) return;
  for (int i = 0; i < 2 * kSamplers; ++i) {
    const auto sampler = static_cast<Sampler>(i % kSamplers);
    const bool is_wide = i >= kSamplers;
    void* graph = program_.burst(sampler, is_wide);
    if (graph == nullptr) continue;
    launch_first(program_.single(sampler, is_wide));
    for (int round = 0; round < program_.burst_rounds; ++round) {
      fill_continuation(queue_.next_request(graph, round), 1 + round);
    }
    require(queue_.launch(graph, setting_, text_, program_.burst_rounds));
    require(queue_.drain());
  }
}

// Behind a round of one token, whose logits they draw from.
void GraphExecutor::run_redraws() {
  if (!redraws_.offered()) return;
  launch_first(program_.rounds[0]);
  require(redraws_.rehearse());
}

// The median duration of rounds that keep the device busy, by its own clock.
int64_t GraphExecutor::measure_graph(void* graph, gpu::RoundMode mode, int count, int position,
                                     const std::vector<int32_t>& pages) {
  require(queue_.drain());
  setting_.take(Sampling{}, nullptr, 0, pages.data(), static_cast<int>(pages.size()));
  constexpr int32_t tokens[gpu::kChunkTokens] = {};
  std::vector<int64_t> durations;
  uint64_t ended = queue_.seen();  // rounds whose duration has been read
  const auto read = [&](uint64_t through) {
    for (; ended < through; ++ended) {
      const gpu::RoundResult& answer = queue_.result(ended + 1);
      durations.push_back(static_cast<int64_t>(answer.end_ns - answer.begin_ns));
    }
  };
  const int64_t start = monotonic_ns();
  for (int round = 0; round < kMeasuredRuns && (round == 0 || monotonic_ns() - start < kMeasureNs); ++round) {
    // The end of a round is known once the next has answered: one slot stays free, so that it is read in time.
    while (queue_.launched() - queue_.seen() >= gpu::kRoundSlots - 1) {
      require(queue_.await(queue_.seen() + 1));
      read(queue_.seen() - 1);
    }
    if (mode == gpu::RoundMode::kPrefill) {
      fill_prompt(graph, tokens, count, position);
    } else if (graph == program_.last_chunk) {
      fill_last_chunk(tokens, count, position, 1);
    } else {
      gpu::RoundRequest& request = queue_.next_request(graph);
      request.mode = mode;
      request.count = count;
      request.position = position;
      request.max_tokens = count;
      fill_chain(request, tokens, count);
    }
    require(queue_.launch(graph, setting_, text_));
    if (round == 0) require(queue_.drain());  // where one takes longer than all may, it is the only one
  }
  require(queue_.drain());
  read(queue_.seen());
  return median_ns(durations);
}

}  // namespace ull::graph
