// What the engine loop tells others, accepted tokens and ends, and what it hears from them: commands and time limits.
#include <algorithm>

#include "base/clock.h"
#include "base/cpu.h"
#include "engine/loop.h"

namespace ull {
namespace {

constexpr int64_t kPublishNs = 1'000'000;  // counters are published at least this often while busy
constexpr const char* kGrammarFailed = "grammar_failed";

// When a request ends at the latest, of what is yet to come; kNever if it may take as long as it likes.
int64_t first_limit_ns(const RequestSlot& request, int64_t now) noexcept {
  int64_t first = kNever;
  for (const int64_t limit : {request.timeout_ns, request.deadline_ns}) {
    if (limit > now) first = std::min(first, limit);
  }
  return first;
}

}  // namespace

// Tells the io thread of the accepted tokens. If its ring is full they stay unannounced and go with the next round's:
// the engine never waits for the io thread. Room for every slot's final event is kept free.
void EngineLoop::announce() noexcept {
  const EngineEvent event{.time_ns = run_->unannounced_ns,
                          .slot = run_->slot,
                          .index = run_->announced,
                          .count = run_->completed - run_->announced,
                          .logprobs = run_->first_logprob,
                          .prompt_logprobs = run_->request->prompt_logprobs_found()};
  if (!shared_.events.try_push(event, shared_.slots)) return;
  shared_.io_agent.wake();
  run_->announced = run_->completed;
  run_->first_logprob = run_->last_logprob = -1;
}

void EngineLoop::end_run(Run& run, const Ending& ending) noexcept {
  RequestSlot& request = *run.request;
  // One that was cancelled may be of a session that is closed already: it leaves pins as they are.
  const bool pins = ending.reason != FinishReason::kCancelled && ending.reason != FinishReason::kError;
  if (run.sequence != nullptr) cache_.close(*run.sequence, reusable_tokens(run), pins ? request.pin : 0);
  schedule_.end(request.priority);
  request.outcome.completion_tokens = run.completed;
  request.outcome.masks = run.constraint.masks();
  const bool rehearsal = request.rehearsal;
  end(run.slot, ending,
      {.time_ns = run.unannounced_ns,
       .slot = run.slot,
       .index = run.announced,
       .count = run.completed - run.announced,
       .logprobs = run.first_logprob,
       .prompt_logprobs = request.prompt_logprobs_found(),
       .silent_last = run.silent_last,
       .final = true});  // the slot may be another request's now
  run.sequence = nullptr;
  if (!rehearsal) return;
  shared_.rehearsed_progress.fetch_add(shared_.progress.load(std::memory_order_relaxed) - run.progress_before,
                                       std::memory_order_release);
}

// How many of the sequence's tokens may serve later requests. What an earlier request left in it was cut likewise and
// is a prefix of this prompt, so that all of the prompt but its last token was written by one prefill or another.
int EngineLoop::reusable_tokens(const Run& run) const noexcept {
  const RequestSlot& request = *run.request;
  if (shared_.failed.load(std::memory_order_relaxed) || request.rehearsal) return 0;
  switch (executor_.info().reuse) {
    case Reuse::kAll:
      return run.sequence->size();
    case Reuse::kPrompt:
      return request.prompt_tokens - (request.max_tokens > 0 ? 1 : 0);
    case Reuse::kNothing:
      break;
  }
  return 0;
}

// The one place where a request ends.
void EngineLoop::end(uint32_t slot, const Ending& ending, const EngineEvent& last) noexcept {
  RequestSlot& request = shared_.slot(slot);
  EngineCounters& counted = counters(request);
  unpublished_ = true;
  switch (ending.reason) {
    case FinishReason::kNone:
    case FinishReason::kStop:
      ++counted.stopped;
      break;
    case FinishReason::kLength:
      ++counted.length;
      break;
    case FinishReason::kCancelled:
      ++counted.cancelled;
      break;
    case FinishReason::kTimeout:
      ++counted.timeout;
      break;
    case FinishReason::kDeadline:
      ++counted.deadline;
      break;
    case FinishReason::kError:
      ++counted.error;
      break;
  }
  request.outcome.reason = ending.reason;
  request.outcome.error_code = ending.error_code;
  request.outcome.error_message = ending.error_message;
  request.timeline.done_ns = monotonic_ns();
  const SlotState was = request.state.load(std::memory_order_relaxed);
  const bool computed = was == SlotState::kPrefilling || was == SlotState::kRunning;
  request.enter(computed && request.held.load(std::memory_order_acquire) ? SlotState::kHeld : SlotState::kEnded);
  shared_.in_flight.fetch_sub(1, std::memory_order_release);
  shared_.progress.fetch_add(1, std::memory_order_relaxed);
  (void)shared_.events.try_push(last);  // cannot fail: announce() keeps room for every slot's final event
  shared_.io_agent.wake();
}

bool EngineLoop::take_record(int32_t& record) noexcept {
  const int32_t held = run_->logprobs_taken - run_->request->logprobs_returned.load(std::memory_order_relaxed);
  if (held >= kLogprobRecordsPerRequest || !shared_.free_logprobs.try_pop(record)) return false;
  ++run_->logprobs_taken;
  return true;
}

// Copies a token's logprobs to a record and chains it to the unannounced ones. Waits for the io thread if too many
// records are under way to the client: unlike ids they have no place of their own to wait in.
EngineLoop::Ending EngineLoop::take_logprob(const RoundToken& token) noexcept {
  int32_t index = -1;
  if (!take_record(index)) {
    ++counters(*run_->request).logprob_waits;
    if (run_->announced < run_->completed) announce();
    while (!take_record(index)) {
      cpu_relax();
      agent_.give_way();
      if (const Ending ending = check_commands(monotonic_ns())) return ending;
      if (run_->announced < run_->completed) announce();
    }
    run_->last_round_ns = 0;  // the wait is the client's, not a slow cycle
    if (run_->completed == run_->announced) run_->unannounced_ns = monotonic_ns();
  }
  LogprobRecord& record = shared_.logprobs[static_cast<size_t>(index)];
  record.token.token = token.token;
  record.token.logprob = token.logprob;
  record.token.top_count = std::clamp(token.top_count, 0, run_->request->sampling.top_logprobs);
  std::copy_n(token.top, record.token.top_count, record.token.top);
  record.next = -1;
  if (run_->first_logprob < 0) {
    run_->first_logprob = index;
  } else {
    shared_.logprobs[static_cast<size_t>(run_->last_logprob)].next = index;
  }
  run_->last_logprob = index;
  return {};
}

// The executor computes on this thread, and has come to the end of a layer.
bool EngineLoop::beat() noexcept {
  shared_.progress.fetch_add(1, std::memory_order_relaxed);
  agent_.give_way();
  return !check_commands(monotonic_ns());
}

EngineLoop::Ending EngineLoop::impossible_result() noexcept {
  shared_.failed.store(true, std::memory_order_release);
  return {FinishReason::kError, kInternal, "the executor returned an impossible result"};
}

// Looks at commands and deadlines; says whether the running request must end. Two loads when nothing has happened.
EngineLoop::Ending EngineLoop::check_commands(int64_t now) noexcept {
  agent_.end_cycle(now, true);
  if (shared_.calls.load(std::memory_order_acquire) != seen_calls_ || now >= next_limit_ns_) {
    look_around(now);
  }
  if (now - published_ns_ >= kPublishNs) publish();
  return interruption(*run_->request, now);
}

EngineLoop::Ending EngineLoop::interruption(const RequestSlot& request, int64_t now) const noexcept {
  const Ending shed{FinishReason::kCancelled, kDraining, kShuttingDown};
  if (request.cancel.load(std::memory_order_seq_cst)) {
    return request.shed.load(std::memory_order_relaxed) ? shed : Ending{FinishReason::kCancelled};
  }
  if (request.timeout_ns != 0 && now >= request.timeout_ns) return {FinishReason::kTimeout};
  if (request.deadline_ns != 0 && now >= request.deadline_ns) return {FinishReason::kDeadline};
  if (shared_.stopping.load(std::memory_order_relaxed)) return shed;
  if (shared_.failed.load(std::memory_order_relaxed)) {
    return executor_failure();
  }
  return {};
}

// A request ends because the executor has failed; the message says why if it can.
EngineLoop::Ending EngineLoop::executor_failure() const noexcept {
  const char* reason = executor_.failure();
  return {FinishReason::kError, kInternal, reason != nullptr ? reason : "the executor failed"};
}

// A request ends because its constraint has failed; the executor goes on.
EngineLoop::Ending EngineLoop::constraint_failure() const noexcept {
  const char* reason = run_->constraint.failure();
  return {FinishReason::kError, kGrammarFailed, reason != nullptr ? reason : "the grammar takes back what it forced"};
}

// Takes what was submitted into the queues and ends the requests that wait, or are suspended, and are cancelled, late,
// or cannot be served.
void EngineLoop::look_around(int64_t now) noexcept {
  seen_calls_ = shared_.calls.load(std::memory_order_acquire);
  uint64_t pin = 0;
  while (shared_.unpins.try_pop(pin)) cache_.unpin(pin);
  if (shared_.unpin_all.load(std::memory_order_relaxed) && shared_.unpin_all.exchange(false)) cache_.unpin_all();
  uint32_t slot = kNoSlot;
  while (shared_.submitted.try_pop(slot)) schedule_.push(slot, shared_.slot(slot), now);
  schedule_.remove_if([&](uint32_t waiting, const RequestSlot& request) {
    const Ending ending = interruption(request, now);
    if (ending) end(waiting, ending, {.slot = waiting, .final = true});
    return static_cast<bool>(ending);
  });
  next_limit_ns_ = schedule_.next_limit_ns();
  for (int i = 0; i < kPriorities; ++i) {
    const auto priority = static_cast<Priority>(i);
    if (!schedule_.begun(priority)) continue;
    Run& run = run_of(priority);
    next_limit_ns_ = std::min(next_limit_ns_, first_limit_ns(*run.request, now));
    if (!schedule_.suspended(priority)) continue;
    if (const Ending ending = interruption(*run.request, now)) end_run(run, ending);
  }
}

void EngineLoop::publish() noexcept {
  unpublished_ = false;
  published_ns_ = monotonic_ns();
  counters_.pages_used = static_cast<uint64_t>(cache_.pages_used());
  counters_.sessions = static_cast<uint64_t>(cache_.resident());
  shared_.costs.store(costs_);
  shared_.counters.store(counters_);  // last: who sees them sees what they have taught
}

}  // namespace ull
