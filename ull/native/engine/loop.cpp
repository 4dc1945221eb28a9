// The loop itself, from the queue to the last round. What it tells others and hears from them is in loop_exchange.cpp,
// what it does in passes that score in loop_scores.cpp.
#include "engine/loop.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/clock.h"
#include "base/cpu.h"

namespace ull {
namespace {

// An executor that ignores abort() for longer has failed: the first, and as many of its dearest passes, which is more
// than a chunk of a prompt takes, where one that has begun cannot be stopped.
constexpr int64_t kAbortGraceNs = 2'000'000'000;
constexpr int kAbortPasses = 16;
constexpr uint32_t kPollsPerLook = 64;  // polls of a pending step between two looks at clock and commands

constexpr int64_t kFastRoundNs = 20'000;  // of rounds that are faster ...
constexpr int kFastRounds = 16;           // ... one in so many is learnt from

}  // namespace

EngineLoop::EngineLoop(EngineShared& shared, Executor& executor, const Vocabulary& vocabulary, const Options& options)
    : shared_(shared),
      agent_(shared.engine_agent),
      executor_(executor),
      vocabulary_(vocabulary),
      options_(options),
      cache_(options.cache),
      schedule_(shared.slots, options.aging_ns) {
  // A round may feed what later requests are to find in the cache only where it writes what a prefill would.
  const ExecutorInfo& info = executor.info();
  abort_grace_ns_ = kAbortGraceNs + kAbortPasses * *std::ranges::max_element(info.verify_ns);
  if (info.reuse == Reuse::kAll) most_forced_ = info.forced_tokens;
  forced_.resize(static_cast<size_t>(most_forced_));
}

void EngineLoop::run() noexcept {
  // The control plane has checked the core.
  agent_.begin(
      {.name = "ull-engine", .core = options_.core, .cooperative = options_.cooperative, .idle = options_.idle});
  executor_.set_pulse(this);
  publish();
  while (!shared_.stopping.load(std::memory_order_acquire) || shared_.in_flight.load(std::memory_order_relaxed) > 0) {
    if (do_work()) {
      idle_since_ns_ = 0;
    } else {
      idle();
    }
  }
  publish();
  executor_.set_pulse(nullptr);
  agent_.end();
}

// The most urgent request, until it ends or another one is more urgent. False if there is none.
bool EngineLoop::do_work() noexcept {
  const int64_t now = monotonic_ns();
  look_around(now);
  const std::optional<Priority> next = schedule_.choose(now, [this](uint32_t slot) { return may_begin(slot); });
  if (!next) {
    if (unpublished_) publish();
    return false;
  }
  serve(*next);
  publish();
  return true;
}

void EngineLoop::idle() noexcept {
  const int64_t now = monotonic_ns();
  agent_.tick();
  if (idle_since_ns_ == 0) idle_since_ns_ = now;
  cpu_relax();
  agent_.give_way();
  agent_.end_cycle(now, false);
  if (!agent_.sleeps() || !Agent::spun(now - idle_since_ns_)) return;
  // `stopping` too: look_around() may have seen the change of `calls` that came with it, after run() last looked.
  (void)agent_.sleep([this] {
    const bool nothing_new = shared_.calls.load(std::memory_order_acquire) == seen_calls_;
    return nothing_new && !shared_.stopping.load(std::memory_order_acquire);
  });
}

void EngineLoop::serve(Priority priority) noexcept {
  const int64_t now = monotonic_ns();
  run_ = &run_of(priority);
  const bool begins = !schedule_.begun(priority);
  if (!begins) {
    schedule_.resume(priority, now);
  } else {
    begin(schedule_.begin(priority, now));
  }
  run_->request->enter(SlotState::kPrefilling);
  // seq_cst, like the canceller's store to `cancel` and load of `running`: one of the two sees the other.
  shared_.running.store(run_->slot, std::memory_order_seq_cst);
  Ending ending = check_commands(now);
  if (!ending) ending = open_sequence();
  if (!ending) ending = prefill();
  if (!ending && run_->request->prompt_logprobs != nullptr) ending = score_prompt();
  if (!ending) ending = run_->request->choices != nullptr ? score() : decode();
  shared_.running.store(kNoSlot, std::memory_order_seq_cst);
  executor_.rest();
  if (ending.suspended) {
    suspend();
  } else {
    end_run(*run_, ending);
  }
  run_ = nullptr;
  costs_.learn_load(priority, monotonic_ns() - now, begins);
}

void EngineLoop::begin(uint32_t slot) noexcept {
  RequestSlot& request = shared_.slot(slot);
  *run_ = Run{};
  run_->request = &request;
  run_->slot = slot;
  run_->progress_before = shared_.progress.load(std::memory_order_relaxed);
  run_->text.reset(&request.stops, request.leading_spaces);
  if (request.constraint != nullptr) {
    run_->constraint = RunConstraint(*request.constraint, request.sampling, executor_.info().vocabulary);
    // A forced token has no logprob, and was not fed where a penalty would have looked at it.
    run_->forces = most_forced_ > 0 && !request.sampling.penalises() && request.sampling.top_logprobs < 0;
  }
  request.timeline.started_ns = monotonic_ns();
  EngineCounters& counted = counters(request);
  ++counted.started;
  counted.prompt_tokens += static_cast<uint64_t>(request.prompt_tokens);
}

void EngineLoop::suspend() noexcept {
  if (run_->announced < run_->completed) announce();
  run_->last_round_ns = 0;  // the wait is no slow cycle
  run_->request->enter(SlotState::kSuspended);
  schedule_.suspend(monotonic_ns());
  ++counters(*run_->request).suspensions;
}

// Whether a more urgent request is to come first.
bool EngineLoop::outranked(int64_t now) noexcept {
  if (!schedule_.changed(now)) return false;
  return schedule_.choose(now, [this](uint32_t slot) { return may_begin(slot); }) != run_->request->priority;
}

// Whether a request may begin beside those that are suspended. Where what a suspended request has computed can be
// computed again, bit for bit, its pages are taken if they are needed; elsewhere there must be enough for all to the
// end.
bool EngineLoop::may_begin(uint32_t slot) noexcept {
  if (executor_.info().reuse == Reuse::kAll) return true;
  const auto needs = [](const RequestSlot& request) { return pages_for(request.most_positions()); };
  int pages = cache_.pages_pinned() + needs(shared_.slot(slot));
  for (int i = 0; i < kPriorities; ++i) {
    const auto priority = static_cast<Priority>(i);
    if (schedule_.begun(priority)) pages += needs(*run_of(priority).request);
  }
  return pages <= cache_.page_count();
}

// Finds what is cached of the request's text, and copies what it takes over of another's page: it goes on writing
// there. Nothing to do for one that has kept its sequence.
EngineLoop::Ending EngineLoop::open_sequence() noexcept {
  if (run_->sequence != nullptr) return {};
  const RequestSlot& request = *run_->request;
  const std::span<const int32_t> text{request.tokens.get(), static_cast<size_t>(run_->text_tokens())};
  run_->sequence = &cache_.open(text, request.pin);
  if (run_->completed == 0) {
    const int32_t cached = run_->sequence->size();
    run_->request->reached.store(cached, std::memory_order_relaxed);
    run_->request->outcome.cached_tokens = cached;
    EngineCounters& counted = counters(request);
    counted.cached_tokens += static_cast<uint64_t>(cached);
    counted.prefix_hits += cached > 0 ? 1 : 0;
  }
  const PageCopy& copy = run_->sequence->copy();
  if (copy.tokens == 0) return {};
  const CopyStep step{.from_page = copy.from, .to_page = copy.to, .tokens = copy.tokens};
  if (const Ending ending = run_step([&] { return executor_.start_copy(step); })) return ending;
  run_->sequence->copied();
  return {};
}

// Makes the sequence's page table cover `tokens`, if need be with the pages of suspended requests, the least urgent
// first: these read their text again. False if there are not enough.
bool EngineLoop::reserve(int32_t tokens) noexcept {
  Sequence& sequence = *run_->sequence;
  for (int i = kPriorities - 1; cache_.reserve(sequence, tokens) != Status::kOk; --i) {
    if (i < 0 || executor_.info().reuse != Reuse::kAll) return false;
    Run& other = run_of(static_cast<Priority>(i));
    if (!schedule_.suspended(static_cast<Priority>(i)) || other.sequence == nullptr) continue;
    cache_.close(*other.sequence, other.sequence->size());
    other.sequence = nullptr;
  }
  return true;
}

// Puts all of the text but its last tokens into the cache; the next round feeds these, at least one, and of a prompt
// and what is forced behind it as many as the executor wants. A pass that scores feeds one.
EngineLoop::Ending EngineLoop::prefill() noexcept {
  RequestSlot& request = *run_->request;
  Sequence& sequence = *run_->sequence;
  const int32_t chunk = executor_.info().prefill_chunk;
  const bool scores = request.choices != nullptr || request.prompt_logprobs != nullptr;
  const int32_t behind = look_ahead(most_forced_), left = run_->text_tokens() + behind - sequence.size();
  const int32_t wanted = std::min(executor_.first_forced(left, sequence.size()), executor_.info().prompt_forced());
  const int32_t forced = run_->completed == 0 && !scores ? std::max(wanted - behind, 0) : 0;
  const int32_t end = request.max_tokens > 0 ? run_->text_tokens() - 1 - forced : request.prompt_tokens;
  int64_t now = monotonic_ns();
  while (sequence.size() < end) {
    const int32_t start = sequence.size();
    const int32_t count = std::min(chunk, end - start);
    if (!reserve(start + count)) return {FinishReason::kError, kInternal, "the KV cache is full"};
    const PrefillStep step{.tokens = request.tokens.get() + start,
                           .count = count,
                           .start = start,
                           .pages = sequence.page_table(),
                           .drafted = sequence.drafted(),
                           .speculation = request.speculation,
                           .history = request.tokens.get()};
    if (const Ending ending = run_step([&] { return executor_.start_prefill(step); })) return ending;
    sequence.append({step.tokens, static_cast<size_t>(count)});
    request.reached.store(sequence.size(), std::memory_order_relaxed);
    ++counters(request).prefill_chunks;
    const int64_t began = std::exchange(now, monotonic_ns());
    costs_.learn_prefill(count, start, now - began);
    trace(TraceKind::kPrefill, began, now, count);
    if (const Ending ending = check_commands(now)) return ending;
    if (sequence.size() < end && outranked(now)) return {.suspended = true};
  }
  run_->step_ns = now;
  if (run_->completed == 0) request.timeline.prefilled_ns = now;
  if (request.max_tokens == 0 && request.prompt_logprobs == nullptr) return {FinishReason::kLength};
  request.enter(SlotState::kRunning);
  return outranked(now) ? Ending{.suspended = true} : Ending{};
}

// Rounds until something ends the request. The sequence always holds the tokens before the one to feed, so
// request.tokens[sequence.size()] is that token.
EngineLoop::Ending EngineLoop::decode() noexcept {
  RequestSlot& request = *run_->request;
  Sequence& sequence = *run_->sequence;
  if (run_->constraint && run_->completed == 0) {
    if (const Ending ending = begin_completion()) return ending;
  }
  for (;;) {
    const int32_t position = sequence.size();
    const int32_t forced = std::max(0, run_->text_tokens() - 1 - position);  // a prompt's end, and by a constraint
    const int32_t most = std::min(executor_.info().tokens_per_round, request.max_tokens - run_->completed);
    if (!reserve(position + forced + most)) return {FinishReason::kError, kInternal, "the KV cache is full"};
    const RoundStep step{.token = request.tokens[position],
                         .position = position,
                         .pages = sequence.page_table(),
                         .sampling = &request.sampling,
                         .max_tokens = most,
                         .history = request.tokens.get(),
                         .speculation = request.speculation,
                         .max_tree = request.max_tree,
                         .drafted = sequence.drafted(),
                         .stops = request.stop_ids.data(),
                         .stop_count = request.stop_id_count,
                         .prompt_tokens = request.prompt_tokens,
                         .rehearsal = request.rehearsal,
                         .forced = forced,
                         .constraint = run_->constraint ? &run_->constraint : nullptr};
    if (const Ending ending = run_step([&] { return executor_.start_round(step); })) return ending;
    if (const Ending ending = accept_round(step)) return ending;
    announce();
    agent_.give_way();
    if (const Ending ending = check_commands(run_->last_round_ns)) return ending;
    if (outranked(run_->last_round_ns)) return {.suspended = true};
  }
}

// What is forced at the beginning of a completion, as far as the round that follows can feed it.
EngineLoop::Ending EngineLoop::begin_completion() noexcept {
  RequestSlot& request = *run_->request;
  if (run_->constraint.complete()) return {FinishReason::kStop};
  const int64_t now = monotonic_ns();
  run_->unannounced_ns = now;
  const int32_t fed = run_->text_tokens() - 1 - run_->sequence->size();
  const Ending ending = accept_forced(most_forced_ - fed);
  if (run_->completed == 0) return ending;
  request.timeline.first_token_ns = request.timeline.last_token_ns = now;
  if (!ending) announce();
  return ending;
}

// Takes over a round's tokens up to the one that ends the request, if any.
EngineLoop::Ending EngineLoop::accept_round(const RoundStep& step) noexcept {
  RequestSlot& request = *run_->request;
  const int64_t now = monotonic_ns();
  const int32_t most = step.forced > 0 ? 1 : step.max_tokens;
  const bool valid = result_.count >= 1 && result_.count <= most && result_.accepted >= 0 &&
                     result_.accepted < result_.count && result_.tree_tokens > result_.accepted &&
                     result_.tree_tokens <= kMaxTreeTokens &&
                     std::all_of(result_.tokens, result_.tokens + result_.count, [&](const RoundToken& token) {
                       return token.token >= 0 && token.token < executor_.info().vocabulary;
                     });
  if (!valid) return impossible_result();

  if (run_->last_round_ns != 0 && !request.rehearsal) {
    const int64_t cycle = now - run_->last_round_ns;
    shared_.round_ns.record(cycle);
    counters_.longest_cycle_ns = std::max(counters_.longest_cycle_ns, static_cast<uint64_t>(cycle));
    counters_.slow_cycles += cycle > options_.slow_cycle_ns ? 1 : 0;
    if (step.forced == 0 && --unlearnt_rounds_ <= 0) {
      costs_.learn_round(request.speculation, result_.count, step.position, cycle);
      unlearnt_rounds_ = cycle < kFastRoundNs ? kFastRounds : 1;
    }
  } else if (step.forced > 0 || (executor_.info().prefill_draws && step.ends_prompt())) {
    costs_.learn_prefill(step.forced + 1, step.position, now - run_->step_ns);
  }
  run_->last_round_ns = now;
  if (run_->completed == run_->announced) run_->unannounced_ns = now;
  if (run_->completed == 0) request.timeline.first_token_ns = now;
  request.timeline.last_token_ns = now;
  count_round();
  trace(TraceKind::kRound, std::exchange(run_->step_ns, now), now, result_.count);

  Ending ending;
  int32_t kept = 0;
  while (!ending && kept < result_.count) {
    const RoundToken& token = result_.tokens[kept];
    if (request.sampling.top_logprobs >= 0) {
      if (ending = take_logprob(token); ending) break;
    }
    ending = accept_token(token.token);
    ++kept;
    // The constraint has taken all of the round.
    if (run_->constraint && kept == result_.count && !run_->silent_last && run_->constraint.complete()) {
      ending = {FinishReason::kStop};
    }
  }
  // In the cache now: the tokens that were fed and those kept, but for the last, which the next round feeds.
  run_->sequence->append({request.tokens.get() + step.position, static_cast<size_t>(step.forced + kept)});
  request.reached.store(run_->sequence->size(), std::memory_order_relaxed);
  counters(request).completion_tokens += static_cast<uint64_t>(kept);
  return ending || !run_->constraint ? ending : accept_forced(most_forced_);
}

// Puts a token behind the text; says whether that ends the request.
EngineLoop::Ending EngineLoop::accept_token(int32_t token) noexcept {
  RequestSlot& request = *run_->request;
  request.tokens[request.prompt_tokens + run_->completed] = token;
  ++run_->completed;
  if (request.stops_at(token)) {
    run_->silent_last = true;
    return {FinishReason::kStop};
  }
  if (request.stops.count() > 0) {
    NoText nowhere;
    if (run_->text.feed(vocabulary_.piece(token), nowhere)) return {FinishReason::kStop};
  }
  return run_->completed == request.max_tokens ? Ending{FinishReason::kLength} : Ending{};
}

// The next tokens that the constraint forces, if they are not drawn -> forced_. Returns how many there are, at most
// `most` and as many as the request may still have.
int32_t EngineLoop::look_ahead(int32_t most) noexcept {
  if (!run_->forces) return 0;
  most = std::min({most, most_forced_, run_->request->max_tokens - run_->completed});
  return most > 0 ? run_->constraint.forced(forced_.data(), most) : 0;
}

// Puts the tokens that the constraint forces, at most `most`, behind the text: the completion ends where it would if
// they were drawn.
EngineLoop::Ending EngineLoop::accept_forced(int32_t most) noexcept {
  RequestSlot& request = *run_->request;
  const int32_t before = run_->completed;
  Ending ending;
  for (int32_t left = most; !ending && left > 0;) {
    const int32_t count = look_ahead(left);
    if (count == 0) break;
    for (int32_t i = 0; i < count && !ending; ++i) {
      if (!run_->constraint.take(forced_[static_cast<size_t>(i)])) {
        ending = constraint_failure();
        break;
      }
      ending = accept_token(forced_[static_cast<size_t>(i)]);
      if (!run_->silent_last && run_->constraint.complete()) ending = {FinishReason::kStop};
    }
    left -= count;
  }
  const int32_t taken = run_->completed - before;
  request.outcome.forced_tokens += taken;
  counters(request).completion_tokens += static_cast<uint64_t>(taken);
  return ending;
}

// Of a round, result_ has the rest.
void EngineLoop::trace(TraceKind kind, int64_t begin_ns, int64_t end_ns, int32_t count) noexcept {
  const RequestSlot& request = *run_->request;
  if (request.rehearsal) return;
  const bool round = kind == TraceKind::kRound;
  shared_.steps.push({.begin_ns = begin_ns,
                      .end_ns = end_ns,
                      .id = request.id,
                      .connection = request.connection(),
                      .kind = kind,
                      .drafter = static_cast<uint8_t>(round ? result_.drafter : DrafterKind::kNone),
                      .tree = static_cast<uint16_t>(round ? result_.tree_tokens : 0),
                      .accepted = static_cast<uint16_t>(round ? result_.accepted : 0),
                      .count = static_cast<uint16_t>(std::min(count, 65535))});
}

void EngineLoop::count_round() noexcept {
  run_->request->rounds.count(result_);
  EngineCounters& counted = counters(*run_->request);
  ++counted.rounds;
  const auto drafter = static_cast<size_t>(result_.drafter);
  ++counted.rounds_by_drafter[drafter];
  counted.drafted_by_drafter[drafter] += static_cast<uint64_t>(result_.tree_tokens - 1);
  counted.accepted_by_drafter[drafter] += static_cast<uint64_t>(result_.accepted);
  counted.drafted_tokens += static_cast<uint64_t>(result_.tree_tokens - 1);
  counted.accepted_tokens += static_cast<uint64_t>(result_.accepted);
  for (int depth = 0; depth < std::min(result_.accepted, kCountedDepths); ++depth) ++counted.accepted_by_depth[depth];
}

// Makes a pass that scores, as a step that is counted, learnt from and traced. now: when it could begin -> when it has
// ended.
EngineLoop::Ending EngineLoop::run_pass(const ScoreStep& step, int64_t& now) noexcept {
  if (const Ending ending = run_step([&] { return executor_.start_scores(step); })) return ending;
  EngineCounters& counted = counters(*run_->request);
  ++counted.score_passes;
  counted.scored_tokens += static_cast<uint64_t>(step.count);
  const int64_t began = std::exchange(now, monotonic_ns());
  costs_.learn_scores(step.count, step.position, now - began);
  trace(TraceKind::kScore, began, now, step.count);
  return {};
}

// Starts a step and polls it to its end. A step that was hit by an abort meant for an earlier request is run again:
// it rewrites the same positions.
template <typename Start>
EngineLoop::Ending EngineLoop::run_step(Start&& start) noexcept {
  for (;;) {
    Status status = start();
    if (status == Status::kOk || status == Status::kPending) status = wait_for_step();
    switch (status) {
      case Status::kOk:
        shared_.progress.fetch_add(1, std::memory_order_relaxed);
        return {};
      case Status::kAborted:
        if (const Ending ending = check_commands(monotonic_ns())) return ending;
        ++counters(*run_->request).repeated_steps;
        continue;
      case Status::kOutOfPages:
        return {FinishReason::kError, kInternal, "the executor ran out of KV pages"};
      case Status::kPending:
      case Status::kExecutorFailed:
        break;
    }
    if (run_->constraint && run_->constraint.failure() != nullptr) return constraint_failure();
    shared_.failed.store(true, std::memory_order_release);
    return executor_failure();
  }
}

Status EngineLoop::wait_for_step() noexcept {
  int64_t aborted_ns = 0;
  for (uint32_t polls = 1;; ++polls) {
    const Status status = executor_.poll(result_);
    if (status != Status::kPending) return status;
    cpu_relax();
    if (polls % kPollsPerLook != 0) continue;
    agent_.give_way();
    const int64_t now = monotonic_ns();
    const bool interrupted = static_cast<bool>(check_commands(now));
    if (interrupted && aborted_ns == 0) {
      executor_.abort();
      aborted_ns = now;
    }
    if (aborted_ns != 0 && now - aborted_ns > abort_grace_ns_) return Status::kExecutorFailed;
  }
}

}  // namespace ull
