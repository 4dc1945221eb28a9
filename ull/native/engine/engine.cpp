#include "engine/engine.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/allocation.h"
#include "base/clock.h"
#include "base/thread.h"

namespace ull {
namespace {

constexpr int kDeliverySlots = 15;  // ended requests that may still be on their way to their clients
constexpr int kWarmUpRounds = 4;    // of each kind
constexpr int kWarmUpTokens = 16;   // of a short chunk
constexpr int64_t kMaxAgingMs = 86'400'000;

EngineOptions checked(const EngineOptions& options) {
  const auto require = [](bool condition, const char* what) {
    if (!condition) throw std::invalid_argument(what);
  };
  const auto require_within = [](int value, int least, int most, const std::string& name) {
    if (value >= least && value <= most) return;
    throw std::invalid_argument(name + ": must be " + std::to_string(least) + " to " + std::to_string(most));
  };
  require_within(options.queue_depth, 0, kMaxQueueDepth, "queue_depth");
  require_within(options.client_share, 0, kMaxQueueDepth + 1, "client_share");  // one request runs
  require(options.core >= -1, "core: must be a core's number, or -1 for any");
  require(options.watchdog_ms >= 1, "watchdog_ms: must be positive");
  require(options.max_prompt >= 0, "max_prompt: must not be negative");
  require_within(options.max_sessions, 1, kMaxSessions, "max_sessions");
  require(options.slow_cycle_us >= 1, "slow_cycle_us: must be positive");
  require(options.aging_ms >= 1 && options.aging_ms <= kMaxAgingMs, "aging_ms: must be 1 to 86400000");
  return options;
}

std::unique_ptr<EngineShared> share(int queue_depth, int context) {
  const int slots = queue_depth + 1 + kDeliverySlots;
  const double bytes = slots * (static_cast<double>(sizeof(RequestSlot)) + sizeof(int32_t) * context);
  return allocate_for(
      "queue_depth: " + std::to_string(queue_depth) + " requests of up to " + std::to_string(context) + " tokens",
      bytes, [&] { return std::make_unique<EngineShared>(slots, context); });
}

void check_penalties(const Sampling& sampling, bool offered) {
  const auto check = [&](const char* field, float value, float off, float least, float most, const char* reason) {
    if (!(value >= least && value <= most)) throw InvalidRequest(field, reason);
    if (value != off && !offered) throw InvalidRequest(field, "this engine's executor applies no penalties");
  };
  check("repetition_penalty", sampling.repetition_penalty, 1.0F, kLeastRepetitionPenalty, kMostRepetitionPenalty,
        "must be 0.01 to 100");
  check("frequency_penalty", sampling.frequency_penalty, 0.0F, -kMostPenalty, kMostPenalty, "must be -2 to 2");
  check("presence_penalty", sampling.presence_penalty, 0.0F, -kMostPenalty, kMostPenalty, "must be -2 to 2");
}

// What looks at single tokens says nothing of a label.
void check_choices(const Submission& submission) {
  const Sampling& sampling = submission.sampling;
  const std::pair<const char*, bool> options[] = {
      {"top_k", sampling.top_k != 0},
      {"top_p", sampling.top_p != 1.0F},
      {"min_p", sampling.min_p != 0.0F},
      {"repetition_penalty", sampling.repetition_penalty != 1.0F},
      {"frequency_penalty", sampling.frequency_penalty != 0.0F},
      {"presence_penalty", sampling.presence_penalty != 0.0F},
      {"logit_bias", sampling.bias_count != 0},
      {"logprobs", sampling.top_logprobs >= 0},
      {"stop", !submission.stops.empty()},
      {"grammar", submission.constraint != nullptr},
  };
  for (const auto& [field, used] : options) {
    if (used) throw InvalidRequest(field, "cannot be combined with choices: leave one of them out");
  }
}

}  // namespace

Engine::Engine(Executor& executor, const std::string& vocabulary_path, const EngineOptions& options)
    : executor_(executor), vocabulary_(vocabulary_path), options_(checked(options)) {
  executor_.prepare();
  const ExecutorInfo& info = executor_.info();
  context_ = std::min(info.context, tokens_in(info.page_count));
  if (context_ < 2) throw std::invalid_argument("executor: its context must hold at least 2 tokens");
  if (info.tokens_per_round < 1 || info.tokens_per_round > kMaxTokensPerRound) {
    throw std::invalid_argument("executor: its rounds must emit 1 to 65 tokens");
  }
  if (info.score_nodes < 0 || info.score_nodes > kMaxTreeTokens) {
    throw std::invalid_argument("executor: its passes must score 0 to 64 nodes");
  }
  max_prompt_ = context_ - 1;
  if (options.max_prompt > 0) max_prompt_ = std::min(max_prompt_, options.max_prompt);
  shared_ = share(options.queue_depth, context_);
  EngineLoop::Options loop;
  loop.context = context_;
  loop.core = options.core;
  loop.cooperative = options.cooperative.value_or(options.core < 0);
  loop.idle = options.idle;
  loop.slow_cycle_ns = options.slow_cycle_us * 1000;
  loop.aging_ns = options.aging_ms * 1'000'000;
  loop.cache = {.page_count = info.page_count,
                .context = context_,
                .max_sequences = options.max_sessions,
                .max_open = kPriorities,
                .reuse = options.prefix_cache,
                .copies = info.copies_pages,
                .shares_open = info.reuse == Reuse::kAll};
  loop_ = std::make_unique<EngineLoop>(*shared_, executor_, vocabulary_, loop);
  forecast_ = std::make_unique<Forecast>(*shared_, loop_->cached(), info);
  watchdog_ = std::make_unique<Watchdog>(*shared_, options.watchdog_ms);
}

Engine::~Engine() { stop(); }

void Engine::warm_up() {
  if (started_) throw std::logic_error("warm_up() comes before start()");
  const ExecutorInfo& info = executor_.info();
  std::vector<int32_t> history(static_cast<size_t>(context_), 0);
  std::vector<int32_t> pages(static_cast<size_t>(pages_for(context_)));
  for (size_t page = 0; page < pages.size(); ++page) pages[page] = static_cast<int32_t>(page);
  Drafted drafted;
  RoundResult result;
  const auto finish = [&](Status status) {
    if (status == Status::kOk) {
      do {
        status = executor_.poll(result);
      } while (status == Status::kPending);
    }
    if (status != Status::kOk) {
      const char* reason = executor_.failure();
      throw std::runtime_error(std::string("the executor failed while warming up: ") +
                               (reason != nullptr ? reason : status_name(status)));
    }
  };
  const bool drafts = info.drafters[static_cast<size_t>(DrafterKind::kAuto)];
  int position = std::max(0, std::min(info.prefill_chunk, context_ - kWarmUpRounds - 1));
  StepCosts& costs = loop_->costs();
  for (const int count : {position, std::min(position, kWarmUpTokens)}) {  // two sizes tell what a token costs
    if (count == 0) continue;
    drafted = {};
    const int64_t began = monotonic_ns();
    finish(executor_.start_prefill({.tokens = history.data(),
                                    .count = count,
                                    .start = 0,
                                    .pages = pages.data(),
                                    .drafted = &drafted,
                                    .speculation = drafts ? DrafterKind::kAuto : DrafterKind::kNone}));
    costs.learn_prefill(count, 0, monotonic_ns() - began);
  }
  const Sampling greedy;
  if (const int32_t forced = std::min(info.prompt_forced(), position); forced > 0) {
    finish(executor_.start_round({.token = history[0],
                                  .position = 0,
                                  .pages = pages.data(),
                                  .sampling = &greedy,
                                  .max_tokens = 1,
                                  .history = history.data(),
                                  .drafted = &drafted,
                                  .prompt_tokens = forced + 1,
                                  .rehearsal = true,
                                  .forced = forced}));
  }
  for (const int count : {std::min(info.score_nodes, context_ - position), std::min(info.score_nodes, 1)}) {
    if (count == 0) continue;
    // Every node below the root, and each asked for one token.
    const std::vector<uint8_t> parents(static_cast<size_t>(count), 0);
    std::vector<ScoreQuery> queries;
    for (int node = 0; node < count; ++node) queries.push_back({.node = node, .token = 0});
    std::vector<float> logprobs(queries.size());
    const int64_t began = monotonic_ns();
    finish(executor_.start_scores({.tokens = history.data(),
                                   .parents = parents.data(),
                                   .count = count,
                                   .position = position,
                                   .pages = pages.data(),
                                   .queries = queries.data(),
                                   .query_count = count,
                                   .logprobs = logprobs.data()}));
    costs.learn_scores(count, position, monotonic_ns() - began);
  }
  Sampling sampled;  // the longest path through the sampler
  sampled.temperature = 1.0F;
  sampled.top_k = 40;
  sampled.top_p = 0.9F;
  for (int kind = 0; kind < kDrafterKinds; ++kind) {
    const auto speculation = static_cast<DrafterKind>(kind);
    if (!info.drafters[kind] || speculation == DrafterKind::kAuto) continue;  // which chooses from the others
    for (int round = 0; round < kWarmUpRounds && position < context_ - 1; ++round) {
      const int most = std::min(info.tokens_per_round, context_ - 1 - position);
      const int64_t began = monotonic_ns();
      finish(executor_.start_round({.token = history[static_cast<size_t>(position)],
                                    .position = position,
                                    .pages = pages.data(),
                                    .sampling = round % 2 == 0 ? &greedy : &sampled,
                                    .max_tokens = most,
                                    .history = history.data(),
                                    .speculation = speculation,
                                    .drafted = &drafted,
                                    .rehearsal = true}));
      if (round > 0) costs.learn_round(speculation, result.count, position, monotonic_ns() - began);
      for (int i = 0; i < result.count; ++i) history[static_cast<size_t>(++position)] = result.tokens[i].token;
    }
  }
  executor_.rest();
}

void Engine::start() {
  if (started_) throw std::logic_error("an engine starts once");
  started_ = true;
  thread_ = start_thread([this] { loop_->run(); });
  watchdog_->start();
}

void Engine::stop() noexcept {
  draining_ = true;
  if (thread_.joinable()) end_threads();
  executor_.settle();
}

void Engine::end_threads() noexcept {
  shared_->stopping.store(true, std::memory_order_release);
  shared_->calls.fetch_add(1, std::memory_order_release);
  executor_.abort();
  shared_->engine_agent.wake();
  thread_.join();
  watchdog_->stop();
  for (uint32_t index = 0; index < shared_->slots; ++index) {  // what nobody has committed
    RequestSlot& slot = shared_->slot(index);
    if (!slot.held.load(std::memory_order_acquire)) continue;
    slot.shed.store(true, std::memory_order_relaxed);
    slot.cancel.store(true, std::memory_order_release);
  }
  release();
}

void Engine::check(const Submission& submission) const {
  const auto require = [](bool condition, const char* field, const char* reason) {
    if (!condition) throw InvalidRequest(field, reason);
  };
  const int vocabulary = executor_.info().vocabulary;
  const auto is_token = [vocabulary](int32_t token) { return token >= 0 && token < vocabulary; };
  require(!submission.identity.empty() && submission.identity.size() <= kMaxIdentity, "identity",
          "must have 1 to 255 bytes");
  require(!submission.tokens.empty(), "token_ids", "the prompt is empty");
  if (submission.tokens.size() > static_cast<size_t>(max_prompt_)) {
    const size_t excess = submission.tokens.size() - static_cast<size_t>(max_prompt_);
    throw InvalidRequest("token_ids", "the prompt is too long by " + std::to_string(excess) + " tokens (at most " +
                                          std::to_string(max_prompt_) + ")");
  }
  require(std::all_of(submission.tokens.begin(), submission.tokens.end(), is_token), "token_ids",
          "a token is outside the vocabulary");
  require(submission.max_tokens >= 0, "max_tokens", "must be 0 (only read the prompt) or more");
  // Records wait for the io thread, of which there are not enough for answers that may never be asked for.
  require(!submission.hold || submission.sampling.top_logprobs < 0, "hold", "cannot be combined with logprobs");
  const Sampling& sampling = submission.sampling;
  require(std::isfinite(sampling.temperature) && sampling.temperature >= 0, "temperature", "must be finite, 0 or more");
  require(sampling.top_k >= 0, "top_k", "must be 0 (off) or more");
  require(sampling.top_p > 0 && sampling.top_p <= 1, "top_p", "must be above 0 and at most 1");
  require(sampling.min_p >= 0 && sampling.min_p <= 1, "min_p", "must be 0 to 1");
  require(sampling.top_logprobs >= -1 && sampling.top_logprobs <= kMaxTopLogprobs, "logprobs", "must be 0 to 20");
  require(sampling.bias_count >= 0 && sampling.bias_count <= kMaxLogitBias, "logit_bias", "has too many entries");
  for (int i = 0; i < sampling.bias_count; ++i) {
    require(is_token(sampling.bias[i].token), "logit_bias", "a token is outside the vocabulary");
    require(!std::isnan(sampling.bias[i].bias), "logit_bias", "a bias is not a number");
  }
  check_penalties(sampling, executor_.info().penalties);
  require(
      !submission.speculation.has_value() || executor_.info().drafters[static_cast<size_t>(*submission.speculation)],
      "speculate", "the engine has no such drafter");
  require(submission.max_tree >= 0 && submission.max_tree <= kMaxTreeTokens, "max_tree",
          "must be 1 to 64 tokens, or 0 for the engine's default");
  require(submission.stop_ids.size() <= kMaxStopIds, "stop_ids", "has more than 32 entries");
  require(submission.constraint == nullptr || executor_.info().constraints, "grammar",
          "this engine's executor applies none");
  require(!submission.prompt_logprobs || executor_.info().scores_prompts(), "prompt_logprobs",
          "this engine's executor does not score prompts: leave it out");
  require(submission.prompt_top_logprobs >= 0 && submission.prompt_top_logprobs <= kMaxPromptTopLogprobs,
          "prompt_top_logprobs", "must be 0 to 5");
  require(submission.prompt_top_logprobs <= vocabulary, "prompt_top_logprobs", "is more than the vocabulary has");
  require(submission.prompt_top_logprobs == 0 || submission.prompt_logprobs, "prompt_top_logprobs",
          "needs prompt_logprobs to be true");
}

// The tree of a submission's labels; null if it has none. Throws InvalidRequest.
std::unique_ptr<Choices> Engine::choices_of(const Submission& submission) const {
  if (submission.choices.empty()) return nullptr;
  check_choices(submission);
  const ExecutorInfo& info = executor_.info();
  if (info.score_nodes == 0) throw InvalidRequest("choices", "this engine's executor does not score");
  for (const std::vector<int32_t>& label : submission.choices) {
    const auto is_token = [&](int32_t token) { return token >= 0 && token < info.vocabulary; };
    if (std::ranges::all_of(label, is_token)) continue;
    throw InvalidRequest("choices", "a token is outside the vocabulary");
  }
  std::unique_ptr<Choices> choices;
  try {
    choices = std::make_unique<Choices>(submission.choices, submission.stop_ids, info.score_nodes);
  } catch (const std::invalid_argument& error) {
    throw InvalidRequest("choices", error.what());
  }
  // The completion is at most the longest label; a pass writes behind the prompt but its last token.
  const int needed = static_cast<int>(submission.tokens.size()) + std::max(choices->longest(), choices->widest() - 1);
  if (needed > context_) {
    throw InvalidRequest("choices", "with the prompt the labels need " + std::to_string(needed) +
                                        " tokens of context, which holds " + std::to_string(context_));
  }
  return choices;
}

uint64_t Engine::submit(const Submission& submission) {
  if (!started_) throw EngineClosed("the engine has not been started");
  if (draining_) throw EngineClosed("the engine is draining");
  if (shared_->failed.load(std::memory_order_acquire)) {
    const char* reason = failure();
    throw EngineClosed(std::string("the engine has failed") + (reason != nullptr ? std::string(": ") + reason : ""));
  }
  free_ended();
  check(submission);
  std::unique_ptr<Choices> choices = choices_of(submission);
  if (find(submission.identity, submission.id) != kNoSlot) {
    throw InvalidRequest("id", "a request with this id is in flight");
  }
  check_room(submission.identity);
  const uint32_t index = free_slot();
  std::unique_ptr<PromptLogprobs> prompt_logprobs;
  if (submission.prompt_logprobs) {
    prompt_logprobs = std::make_unique<PromptLogprobs>(static_cast<int32_t>(submission.tokens.size()),
                                                       executor_.info().score_nodes, submission.prompt_top_logprobs);
  }

  RequestSlot& slot = shared_->slot(index);
  slot.stops.clear();
  for (const std::string& stop : submission.stops) {
    if (!slot.stops.add(stop)) {
      throw InvalidRequest("stop", "at most 16 strings, each of 1 to 256 bytes of UTF-8");
    }
  }
  slot.warnings.clear();
  for (const std::string& warning : submission.warnings) {
    if (!slot.warnings.add(warning)) throw InvalidRequest("warnings", "at most 8, each of at most 64 bytes of UTF-8");
  }
  std::copy(submission.identity.begin(), submission.identity.end(), slot.identity.begin());
  slot.identity_size = static_cast<uint8_t>(submission.identity.size());
  slot.id = submission.id;
  slot.prompt_tokens = static_cast<int32_t>(submission.tokens.size());
  slot.choices = std::move(choices);
  slot.max_tokens = slot.choices != nullptr ? slot.choices->longest()
                                            : std::min(submission.max_tokens, context_ - slot.prompt_tokens);
  slot.sampling = submission.sampling;
  std::copy_n(submission.sampling.bias, submission.sampling.bias_count, slot.bias.begin());
  slot.sampling.bias = slot.bias.data();
  slot.speculation = submission.speculation.value_or(executor_.info().default_drafter);
  if (slot.choices != nullptr) slot.speculation = DrafterKind::kNone;  // nothing is drafted
  slot.max_tree = submission.max_tree > 0 ? submission.max_tree : executor_.info().default_max_tree;
  slot.rounds = RoundTotals{};
  slot.stop_id_count = static_cast<int32_t>(submission.stop_ids.size());
  std::copy(submission.stop_ids.begin(), submission.stop_ids.end(), slot.stop_ids.begin());
  slot.priority = submission.priority;
  slot.timeout_ns = submission.timeout_ns;
  slot.deadline_ns = submission.deadline_ns;
  slot.rolled_back_tokens = submission.rolled_back_tokens;
  slot.returns_tokens = submission.returns_tokens;
  slot.told_by_control = submission.told_by_control;
  slot.constraint = submission.constraint;
  slot.prompt_logprobs = std::move(prompt_logprobs);
  unfreed_ += (slot.constraint != nullptr ? 1 : 0) + (slot.prompt_logprobs != nullptr ? 1 : 0);
  slot.pin = submission.pin;
  slot.rehearsal = submission.rehearsal;
  std::copy(submission.tokens.begin(), submission.tokens.end(), slot.tokens.get());
  slot.leading_spaces = vocabulary_.leading_spaces(submission.tokens);
  slot.timeline = Timeline{};
  slot.timeline.received_ns = submission.received_ns;
  slot.timeline.admitted_ns = submission.admitted_ns;
  slot.outcome = Outcome{};
  slot.cancel.store(false, std::memory_order_relaxed);
  slot.shed.store(false, std::memory_order_relaxed);
  slot.withdrawn.store(false, std::memory_order_relaxed);
  slot.held.store(submission.hold, std::memory_order_relaxed);
  slot.logprobs_returned.store(0, std::memory_order_relaxed);
  slot.reached.store(0, std::memory_order_relaxed);
  if (!slot.rehearsal) foresee(slot);
  slot.enter(SlotState::kQueued);

  shared_->in_flight.fetch_add(1, std::memory_order_relaxed);
  (void)shared_->submitted.try_push(index);  // has room for every slot
  shared_->calls.fetch_add(1, std::memory_order_release);
  shared_->engine_agent.wake();
  rehearsed_ += submission.rehearsal ? 1 : 0;
  return ++submitted_;
}

int Engine::client_share() const noexcept {
  return options_.client_share > 0 ? options_.client_share : std::max(1, options_.queue_depth / 2);
}

// Writes when the request is expected to be done. Throws DeadlineUnreachable where that is too late.
void Engine::foresee(RequestSlot& slot) {
  const Expected expected = forecast_->of(slot, monotonic_ns());
  slot.timeline.expected_first_ns = expected.first_ns;
  slot.timeline.expected_done_ns = expected.done_ns;
  slot.reached.store(expected.cached, std::memory_order_relaxed);
  if (slot.deadline_ns == 0) return;
  if (expected.late_ns > slot.deadline_ns) {
    throw DeadlineUnreachable("the answer cannot be expected by then", expected.late_ns);
  }
  if (!expected.keeps_promises) {
    throw DeadlineUnreachable("requests that were accepted before would miss their deadlines", expected.late_ns);
  }
}

// Whether the queue and the client's share of it have a place left. Throws QueueFull.
void Engine::check_room(std::span<const uint8_t> client) {
  const int share = client_share();
  int taken = 0;
  int active = 0;
  for (uint32_t index = 0; index < shared_->slots; ++index) {
    const RequestSlot& slot = shared_->slot(index);
    const SlotState state = slot.state.load(std::memory_order_acquire);
    // What is held takes its client's place, though not the queue's.
    if (!is_active(state) && state != SlotState::kHeld) continue;
    active += is_active(state) ? 1 : 0;
    taken += std::ranges::equal(slot.client(), client) ? 1 : 0;
  }
  const bool full = active > options_.queue_depth || free_slot() == kNoSlot;
  if (!full && taken < share) return;
  ++refused_;
  const int64_t expected_ns = forecast_->next_end_ns();
  if (full) throw QueueFull("the queue is full", queue_length(), expected_ns);
  throw QueueFull(
      "this client's share of the queue is taken: " + std::to_string(taken) + " of its requests wait, run or are held",
      queue_length(), expected_ns);
}

bool Engine::cancel(std::span<const uint8_t> identity, uint64_t id, bool shed) noexcept {
  const uint32_t index = find(identity, id);
  if (index == kNoSlot) return false;
  RequestSlot& slot = shared_->slot(index);
  const bool held = slot.held.load(std::memory_order_acquire);
  if (!slot.active() && !held) return false;
  if (shed) slot.shed.store(true, std::memory_order_relaxed);  // cancel_slot() publishes it
  cancel_slot(index);
  if (held) release();
  return true;
}

bool Engine::withdraw(std::span<const uint8_t> identity, uint64_t id) noexcept {
  const uint32_t index = find(identity, id);
  if (index == kNoSlot || !shared_->slot(index).held.load(std::memory_order_acquire)) return false;
  shared_->slot(index).withdrawn.store(true, std::memory_order_relaxed);  // cancel_slot() publishes it
  cancel_slot(index);
  release();
  return true;
}

bool Engine::commit(std::span<const uint8_t> identity, uint64_t id) noexcept {
  const uint32_t index = find(identity, id);
  if (index == kNoSlot) return false;
  RequestSlot& slot = shared_->slot(index);
  if (slot.cancel.load(std::memory_order_acquire) || !slot.held.exchange(false, std::memory_order_acq_rel))
    return false;
  release();
  return true;
}

// More than there is room for while the engine thread is busy unpins everything: what stays too long cannot be mended.
void Engine::unpin(uint64_t pin) noexcept {
  if (!shared_->unpins.try_push(pin)) shared_->unpin_all.store(true, std::memory_order_relaxed);
  shared_->calls.fetch_add(1, std::memory_order_release);
  shared_->engine_agent.wake();
}

// What an ended request's constraint has learnt may be megabytes, and a long prompt's log-probabilities half of one:
// neither the engine thread nor the io thread frees them.
void Engine::free_ended() noexcept {
  const auto free = [this](auto& held) {
    unfreed_ -= held != nullptr ? 1 : 0;
    held.reset();
  };
  for (uint32_t index = 0; index < shared_->slots && unfreed_ > 0; ++index) {
    RequestSlot& slot = shared_->slot(index);
    if (slot.state.load(std::memory_order_acquire) != SlotState::kFree) continue;
    free(slot.constraint);
    free(slot.prompt_logprobs);
  }
}

// The io thread has something to look at among what is held.
void Engine::release() noexcept {
  shared_->releases.fetch_add(1, std::memory_order_release);
  shared_->io_agent.wake();
}

void Engine::cancel_slot(uint32_t slot) noexcept {
  shared_->slot(slot).cancel.store(true, std::memory_order_seq_cst);
  shared_->calls.fetch_add(1, std::memory_order_release);
  // An abort may hit the next request's step if this one ends just now; the engine thread then repeats that step.
  if (shared_->running.load(std::memory_order_seq_cst) == slot) executor_.abort();
  shared_->engine_agent.wake();
}

bool Engine::drained() const noexcept { return stats().slots_used == 0; }

uint32_t Engine::find(std::span<const uint8_t> identity, uint64_t id) const noexcept {
  for (uint32_t index = 0; index < shared_->slots; ++index) {
    const RequestSlot& slot = shared_->slot(index);
    if (slot.state.load(std::memory_order_acquire) == SlotState::kFree || slot.id != id) continue;
    const std::span<const uint8_t> client = slot.client();
    if (std::equal(client.begin(), client.end(), identity.begin(), identity.end())) return index;
  }
  return kNoSlot;
}

uint32_t Engine::free_slot() const noexcept {
  for (uint32_t index = 0; index < shared_->slots; ++index) {
    if (shared_->slot(index).state.load(std::memory_order_acquire) == SlotState::kFree) return index;
  }
  return kNoSlot;
}

Engine::Occupancy Engine::occupancy() const noexcept {
  const bool running = shared_->running.load(std::memory_order_acquire) != kNoSlot;
  return {running, std::max(0, shared_->in_flight.load(std::memory_order_acquire) - (running ? 1 : 0))};
}

EngineStats Engine::stats() const noexcept {
  EngineStats stats;
  stats.counters = shared_->counters.load();
  stats.submitted = submitted_ - rehearsed_;
  stats.refused = refused_;
  const uint64_t rehearsed = shared_->rehearsed_progress.load(std::memory_order_acquire);
  stats.progress = shared_->progress.load(std::memory_order_relaxed) - rehearsed;
  stats.stalls = shared_->stalls.load(std::memory_order_relaxed);
  stats.late_threads = shared_->late_threads.load(std::memory_order_relaxed);
  const Occupancy occupancy = this->occupancy();
  stats.running = occupancy.running;
  stats.queue_length = occupancy.waiting;
  for (uint32_t index = 0; index < shared_->slots; ++index) {
    stats.slots_used += shared_->slot(index).state.load(std::memory_order_acquire) != SlotState::kFree ? 1 : 0;
  }
  stats.page_count = executor_.info().page_count;
  return stats;
}

NamedCounts EngineStats::named() const {
  return {{"submitted", submitted},
          {"refused", refused},
          {"started", counters.started},
          {"queue_length", static_cast<uint64_t>(queue_length)},
          {"running", running ? 1 : 0},
          {"slots_used", static_cast<uint64_t>(slots_used)},
          {"prompt_tokens", counters.prompt_tokens},
          {"cached_tokens", counters.cached_tokens},
          {"prefix_hits", counters.prefix_hits},
          {"completion_tokens", counters.completion_tokens},
          {"prefill_chunks", counters.prefill_chunks},
          {"rounds", counters.rounds},
          {"score_passes", counters.score_passes},
          {"scored_tokens", counters.scored_tokens},
          {"drafted_tokens", counters.drafted_tokens},
          {"accepted_tokens", counters.accepted_tokens},
          {"repeated_steps", counters.repeated_steps},
          {"logprob_waits", counters.logprob_waits},
          {"longest_cycle_ns", counters.longest_cycle_ns},
          {"slow_cycles", counters.slow_cycles},
          {"stalls", stalls},
          {"late_threads", late_threads},
          {"progress", progress},
          {"pages_used", counters.pages_used},
          {"page_count", static_cast<uint64_t>(page_count)},
          {"sessions", counters.sessions},
          {"suspensions", counters.suspensions}};
}

NamedCounts EngineStats::by_drafter(const uint64_t (&counts)[kDrafterKinds]) {
  NamedCounts named;
  for (int i = 0; i < kDrafterKinds; ++i) {
    if (static_cast<DrafterKind>(i) == DrafterKind::kAuto) continue;  // chooses a drafter, is none
    named.emplace_back(drafter_name(static_cast<DrafterKind>(i)), counts[i]);
  }
  return named;
}

NamedCounts EngineStats::finished() const {
  return {{"stop", counters.stopped},    {"length", counters.length},     {"cancelled", counters.cancelled},
          {"timeout", counters.timeout}, {"deadline", counters.deadline}, {"error", counters.error}};
}

const char* Engine::health() const noexcept {
  if (shared_->failed.load(std::memory_order_relaxed)) return "failed";
  return shared_->stalled.load(std::memory_order_acquire) ? "stalled" : "ok";
}

}  // namespace ull
