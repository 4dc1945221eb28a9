#include "exec/graph/round_queue.h"

#include <algorithm>
#include <cstdio>

#include "base/clock.h"

namespace ull::graph {
namespace {

constexpr int64_t kLookNs = 1'000'000;  // between two questions to the driver
constexpr uint32_t kPollsPerLook = 16;  // between two looks at the clock

// What both sides of the bus touch at once: single words, in memory that both map.
std::atomic_ref<uint64_t> shared(uint64_t& word) noexcept { return std::atomic_ref<uint64_t>(word); }

}  // namespace

RoundQueue::RoundQueue(const GraphProgram& program, const Driver& driver) : program_(program), driver_(driver) {
  shared(program_.control->cancelled_through).store(0, std::memory_order_relaxed);
  for (int i = 0; i < gpu::kRoundSlots; ++i) shared(program_.results[i].sequence).store(0, std::memory_order_relaxed);
}

Status RoundQueue::enter() noexcept {
  if (failed()) return Status::kExecutorFailed;
  const Driver::Result error = driver_.set_context(program_.context);
  return error == kSuccess ? Status::kOk : fail("cuCtxSetCurrent", error);
}

Status RoundQueue::launch(void* graph, const Setting& setting, const Text& text) noexcept {
  if (failed()) return Status::kExecutorFailed;
  gpu::RoundRequest& request = next_request();
  request.sequence = launched_ + 1;
  setting.write(request, device_setting_ == setting.version());
  text.write(request);
  // The driver's call orders the block before the device's reads of it.
  const Driver::Result error = driver_.launch(graph, program_.stream);
  if (error != kSuccess) return fail("cuGraphLaunch", error);
  ++launched_;
  return Status::kOk;
}

bool RoundQueue::take_answer() noexcept {
  if (idle()) return false;
  gpu::RoundResult& result = program_.results[slot(seen_ + 1)];
  // Acquire: the device stores the sequence last, with release.
  if (shared(result.sequence).load(std::memory_order_acquire) != seen_ + 1) return false;
  ++seen_;
  // A round that was skipped may not have looked at its setting.
  if (result.status != gpu::RoundStatus::kSkipped) {
    device_setting_ = program_.requests[slot(seen_)].setting;
  }
  polls_ = 0;
  progress_ns_ = 0;
  return true;
}

void RoundQueue::cancel() noexcept {
  cancelled_through_ = launched_;
  shared(program_.control->cancelled_through).store(launched_, std::memory_order_release);
}

Status RoundQueue::wait() noexcept {
  restart_watchdog();
  while (!idle()) {
    if (take_answer()) continue;
    if (watch() != Status::kPending) return Status::kExecutorFailed;
    cpu_relax();
  }
  return failed() ? Status::kExecutorFailed : Status::kOk;
}

Status RoundQueue::drain() noexcept {
  if (wait() != Status::kOk) return Status::kExecutorFailed;
  const int64_t start = monotonic_ns();
  for (;;) {
    const Driver::Result state = driver_.query(program_.stream);
    if (state == kSuccess) return Status::kOk;
    if (state != kNotReady) return fail("a round", state);
    if (monotonic_ns() - start >= limit_ns_) return fail("the device does not come to rest", /*restart_helps=*/false);
    cpu_relax();
  }
}

void RoundQueue::restart_watchdog() noexcept {
  polls_ = 0;
  progress_ns_ = 0;
}

Status RoundQueue::watch() noexcept {
  if (failed()) return Status::kExecutorFailed;
  if (++polls_ % kPollsPerLook != 0) return Status::kPending;
  const int64_t now = monotonic_ns();
  if (progress_ns_ == 0) progress_ns_ = looked_ns_ = now;
  if (now - looked_ns_ < kLookNs) return Status::kPending;
  looked_ns_ = now;
  const Driver::Result state = driver_.query(program_.stream);
  // What has been answered comes first, also where a later round has failed since, or runs for too long.
  if (!idle() && shared(program_.results[slot(seen_ + 1)].sequence).load(std::memory_order_acquire) == seen_ + 1) {
    return Status::kPending;
  }
  if (state == kSuccess && !idle()) {
    char what[96];
    std::snprintf(what, sizeof(what), "the device ended round %llu without an answer",
                  static_cast<unsigned long long>(seen_ + 1));
    return fail(what, /*restart_helps=*/true);
  }
  if (state != kSuccess && state != kNotReady) return fail("a round", state);
  if (now - progress_ns_ < limit_ns_) return Status::kPending;
  char what[96];
  std::snprintf(what, sizeof(what), "the device has not answered round %llu for %lld ms",
                static_cast<unsigned long long>(seen_ + 1), static_cast<long long>((now - progress_ns_) / 1'000'000));
  return fail(what, /*restart_helps=*/false);
}

Status RoundQueue::fail(const char* what, bool restart_helps) noexcept {
  if (failed()) return Status::kExecutorFailed;
  std::snprintf(failure_, sizeof(failure_), "%s", what);
  restart_helps_ = restart_helps;
  failed_.store(true, std::memory_order_release);
  return Status::kExecutorFailed;
}

// An error that the stream goes on reporting has taken the context with it (an illegal access, an uncorrectable memory
// error, ...): the GPU is to be looked at, or reset, before it is used again. Any other was the call's own.
Status RoundQueue::fail(const char* call, Driver::Result error) noexcept {
  const Driver::Result now = driver_.query(program_.stream);
  const bool sticky = now != kSuccess && now != kNotReady;
  const char* name = nullptr;
  const char* text = nullptr;
  if (driver_.error_name(error, &name) != kSuccess || name == nullptr) name = "an unknown CUDA error";
  if (driver_.error_text(error, &text) != kSuccess || text == nullptr) text = "no description";
  char what[sizeof(failure_)];
  std::snprintf(what, sizeof(what), "%s failed with %s (%d): %s", call, name, error, text);
  return fail(what, /*restart_helps=*/!sticky);
}

}  // namespace ull::graph
