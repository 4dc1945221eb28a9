#include "graph/round_queue.h"

#include <algorithm>
#include <cstdio>

#include "base/clock.h"

namespace ull::graph {
namespace {

// Asking the driver takes a lock of its own and may leave the virtual machine: what is on time is not asked about.
constexpr int64_t kAskNs = 10'000'000;  // between two questions, and before the first
constexpr int kOverdue = 8;             // times what the dearest round takes
constexpr uint32_t kPollsPerLook = 16;  // between two looks at the clock

// What both sides of the bus touch at once: single words, in memory that both map.
std::atomic_ref<uint64_t> shared(uint64_t& word) noexcept { return std::atomic_ref<uint64_t>(word); }

}  // namespace

RoundQueue::RoundQueue(const RoundBlocks& program, const Driver& driver, Foresight& foresight)
    : program_(program), driver_(driver), foresight_(foresight) {
  shared(program_.control->cancelled_through).store(0, std::memory_order_relaxed);
  for (int i = 0; i < gpu::kRoundSlots; ++i) shared(program_.results[i].sequence).store(0, std::memory_order_relaxed);
}

Status RoundQueue::enter() noexcept {
  if (failed()) return Status::kExecutorFailed;
  if (entered_ == std::this_thread::get_id()) return Status::kOk;
  const Driver::Result error = driver_.set_context(program_.context);
  if (error != kSuccess) return fail("cuCtxSetCurrent", error);
  entered_ = std::this_thread::get_id();
  return Status::kOk;
}

Status RoundQueue::launch(void* graph, const Setting& setting, const Text& text, int rounds) noexcept {
  if (failed()) return Status::kExecutorFailed;
  const bool waits = foresight_.waits(*this, graph);
  const uint64_t last = launched_ + static_cast<uint64_t>(rounds);
  for (uint64_t sequence = launched_ + 1; sequence <= last; ++sequence) {
    gpu::RoundRequest& request = program_.requests[slot(sequence)];
    request.awaited = waits ? 1 : 0;
    setting.write(request, device_setting_ == setting.version());
    text.write(request);
    // Release: a device that waits for the number reads the rest behind it.
    shared(request.sequence).store(sequence, std::memory_order_release);
  }
  if (!waits) {
    // The driver's call orders the blocks before the device's reads of them.
    const Driver::Result error = driver_.launch(graph, program_.stream);
    if (error != kSuccess) return fail("cuGraphLaunch", error);
  }
  launched_ = asked_ = last;
  foresight_.launched(*this, graph, rounds);
  return Status::kOk;
}

void RoundQueue::launch_waiting(void* graph) noexcept {
  const uint64_t sequence = launched_ + 1;
  gpu::RoundRequest& request = program_.requests[slot(sequence)];
  request.awaited = 1;
  shared(request.sequence).store(sequence | gpu::kAwaited, std::memory_order_relaxed);
  const Driver::Result error = driver_.launch(graph, program_.stream);
  if (error != kSuccess) (void)fail("cuGraphLaunch", error);
}

void RoundQueue::send_away() noexcept {
  ++launched_;
  shared(program_.requests[slot(launched_)].sequence).store(kSentAway, std::memory_order_release);
}

Status RoundQueue::copy_page(int32_t from, int32_t to) noexcept {
  if (failed()) return Status::kExecutorFailed;
  foresight_.send_away();
  const auto bytes = static_cast<uint64_t>(program_.page_bytes());
  const auto address = [&](int32_t page) { return program_.kv_pages + static_cast<uint64_t>(page) * bytes; };
  const Driver::Result error = driver_.copy(address(to), address(from), bytes, program_.stream);
  return error == kSuccess ? Status::kOk : fail("cuMemcpyDtoDAsync", error);
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
  foresight_.stop();
  cancelled_through_ = launched_;
  shared(program_.control->cancelled_through).store(launched_, std::memory_order_release);
}

Status RoundQueue::await(uint64_t through, const std::atomic<bool>& abort) noexcept {
  restart_watchdog();
  if (seen_ < through) foresight_.prepare_next();
  bool aborted = false;
  for (;;) {
    if (failed()) return Status::kExecutorFailed;
    if (!aborted && abort.load(std::memory_order_acquire)) {
      aborted = true;
      through = launched_;
      cancel();
    }
    if (seen_ >= through) return aborted ? Status::kAborted : Status::kOk;
    if (take_answer()) continue;
    if (watch() != Status::kPending) return Status::kExecutorFailed;
    cpu_relax();
  }
}

Status RoundQueue::drain() noexcept {
  foresight_.stop();
  if (await(launched_) != Status::kOk) return Status::kExecutorFailed;
  const int64_t start = monotonic_ns();
  for (;;) {
    const Driver::Result state = driver_.query(program_.stream);
    if (state == kSuccess) return Status::kOk;
    if (state != kNotReady) return fail("a round", state);
    if (monotonic_ns() - start >= limit_ns_) return fail("the device does not come to rest", /*restart_helps=*/false);
    cpu_relax();
  }
}

void RoundQueue::set_watchdog(int64_t limit_ns, int64_t round_ns) noexcept {
  limit_ns_ = limit_ns;
  // An error is heard of before the watchdog's time is over.
  overdue_ns_ = std::min(std::max(kAskNs, kOverdue * round_ns), limit_ns / 2);
}

void RoundQueue::restart_watchdog() noexcept {
  polls_ = 0;
  progress_ns_ = 0;
}

Status RoundQueue::watch() noexcept {
  if (failed()) return Status::kExecutorFailed;
  if (++polls_ % kPollsPerLook != 0) return Status::kPending;
  const int64_t now = monotonic_ns();
  if (progress_ns_ == 0) {
    progress_ns_ = now;
    ask_ns_ = now + overdue_ns_;
  }
  if (now < ask_ns_) return Status::kPending;
  ask_ns_ = std::min(now + kAskNs, progress_ns_ + limit_ns_);
  foresight_.stop();  // the stream could not come to its end
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
  foresight_.send_away();  // nothing may wait for a host that has given up
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
