// One request from submission to its terminal event: a slot of a fixed pool. All its memory is allocated at start.
//
// Ownership moves with `state`: the control thread fills a free slot and submits it; the engine thread runs it and
// writes its results; the io thread delivers them and frees the slot. What a later owner reads was published to it
// by a ring. Only the atomics are written by others: `cancel` and
// `held` by any thread.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cassert>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "engine/choices.h"
#include "engine/prompt_logprobs.h"
#include "engine/round_totals.h"
#include "engine/text.h"
#include "executor/constraint.h"
#include "executor/executor.h"

namespace ull {

inline constexpr int kMaxStopIds = 32;
inline constexpr int kMaxIdentity = 255;  // bytes that name a client
inline constexpr int kMaxWarnings = 8;
inline constexpr int kMaxWarningBytes = 64;

// How urgent a request is: a more urgent one does not wait for the end of another.
enum class Priority : uint8_t { kRealtime, kInteractive, kBatch };
inline constexpr int kPriorities = 3;

[[nodiscard]] constexpr const char* priority_name(Priority priority) noexcept {
  switch (priority) {
    case Priority::kRealtime:
      return "realtime";
    case Priority::kInteractive:
      return "interactive";
    case Priority::kBatch:
      return "batch";
  }
  return "unknown";
}

[[nodiscard]] constexpr std::optional<Priority> parse_priority(std::string_view name) noexcept {
  for (int i = 0; i < kPriorities; ++i) {
    if (name == priority_name(static_cast<Priority>(i))) return static_cast<Priority>(i);
  }
  return std::nullopt;
}

enum class FinishReason : uint8_t { kNone, kStop, kLength, kCancelled, kTimeout, kDeadline, kError };

[[nodiscard]] constexpr const char* finish_reason_name(FinishReason reason) noexcept {
  switch (reason) {
    case FinishReason::kNone:
      return "none";
    case FinishReason::kStop:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kCancelled:
      return "cancelled";
    case FinishReason::kTimeout:
      return "timeout";
    case FinishReason::kDeadline:
      return "deadline";
    case FinishReason::kError:
      return "error";
  }
  return "unknown";
}

// CLOCK_MONOTONIC nanoseconds; 0: did not happen.
struct Timeline {
  int64_t received_ns = 0;   // the io thread had read the request
  int64_t admitted_ns = 0;   // the control plane had accepted it
  int64_t started_ns = 0;    // the engine thread took it from the queue
  int64_t prefilled_ns = 0;  // all of the prompt but what the first round reads was in the cache
  int64_t first_token_ns = 0;
  int64_t last_token_ns = 0;
  int64_t done_ns = 0;
  int64_t expected_first_ns = 0;  // as predicted at admission: its first token, ...
  int64_t expected_done_ns = 0;   // ... and its last, if it has max_tokens
};

// Why a request is cancelled whose end a daemon that is being stopped does not wait for.
inline constexpr const char* kDraining = "draining";
inline constexpr const char* kShuttingDown = "the daemon is shutting down and did not wait for this request";

// How a request ended; written by the engine thread before its final event.
struct Outcome {
  FinishReason reason = FinishReason::kNone;
  int32_t cached_tokens = 0;
  int32_t completion_tokens = 0;
  const char* error_code = nullptr;     // static; null unless reason is kError or the engine stopped
  const char* error_message = nullptr;  // static, the executor's or the constraint's
  int32_t masks = 0;                    // that its constraint has computed
  int32_t forced_tokens = 0;            // of the completion, which its constraint forced: none of them was drawn
};

// What the client should know of its request although it was accepted: names of fields that nobody knows.
class WarningList {
 public:
  void clear() noexcept { count_ = 0; }
  // False if it is longer than kMaxWarningBytes, or there are kMaxWarnings already.
  [[nodiscard]] bool add(std::string_view warning) noexcept {
    if (warning.size() > kMaxWarningBytes || count_ == kMaxWarnings) return false;
    std::copy(warning.begin(), warning.end(), bytes_[count_].begin());
    sizes_[count_++] = static_cast<uint8_t>(warning.size());
    return true;
  }
  [[nodiscard]] size_t size() const noexcept { return count_; }
  [[nodiscard]] std::string_view operator[](size_t index) const noexcept {
    return {bytes_[index].data(), sizes_[index]};
  }

 private:
  size_t count_ = 0;
  std::array<uint8_t, kMaxWarnings> sizes_{};
  std::array<std::array<char, kMaxWarningBytes>, kMaxWarnings> bytes_;
};

// What a request is doing. Of all requests one at most is prefilling or running.
enum class SlotState : uint8_t {
  kFree,        // there is none
  kQueued,      // it waits to begin
  kPrefilling,  // its prompt is being read
  kRunning,     // its rounds are being run
  kSuspended,   // it has begun, and waits for a more urgent one
  kHeld,        // it has ended, and nothing is delivered before it is committed or dropped
  kEnded,       // it has ended, and its final event is on its way
};

// Whether the engine has the request.
[[nodiscard]] constexpr bool is_active(SlotState state) noexcept {
  return state != SlotState::kFree && state != SlotState::kHeld && state != SlotState::kEnded;
}

// The transitions that there are.
[[nodiscard]] constexpr bool may_follow(SlotState from, SlotState to) noexcept {
  switch (to) {
    case SlotState::kQueued:
      return from == SlotState::kFree;
    case SlotState::kPrefilling:
      return from == SlotState::kQueued || from == SlotState::kSuspended;
    case SlotState::kRunning:
      return from == SlotState::kPrefilling;
    case SlotState::kSuspended:
      return from == SlotState::kPrefilling || from == SlotState::kRunning;
    case SlotState::kHeld:
      return from == SlotState::kPrefilling || from == SlotState::kRunning;
    case SlotState::kEnded:
      return from != SlotState::kFree && from != SlotState::kEnded && from != SlotState::kHeld;
    case SlotState::kFree:
      return from == SlotState::kHeld || from == SlotState::kEnded;
  }
  return false;
}

struct RequestSlot {
  // By the control thread from kFree to kQueued, by the io thread to kFree, else by the engine thread.
  void enter(SlotState next) noexcept {
    assert(may_follow(state.load(std::memory_order_relaxed), next));
    state.store(next, std::memory_order_release);
  }
  [[nodiscard]] bool active() const noexcept { return is_active(state.load(std::memory_order_acquire)); }

  std::atomic<SlotState> state{SlotState::kFree};
  std::atomic<int32_t> reached{0};  // tokens of it that are in the KV cache, or may be: for guesses by other threads
  std::atomic<bool> cancel{false};
  std::atomic<bool> shed{false};              // ... and it is the daemon that does not wait for its end
  std::atomic<bool> withdrawn{false};         // ... and its client is not told: another daemon answers it
  std::atomic<bool> held{false};              // nothing of it is delivered until this is false, or `cancel` is true
  std::atomic<int32_t> logprobs_returned{0};  // records that the io thread has given back

  // The request; immutable from submission on.
  std::array<uint8_t, kMaxIdentity> identity;
  uint8_t identity_size = 0;
  uint64_t id = 0;
  int32_t prompt_tokens = 0;
  int32_t max_tokens = 0;  // cut to what the context leaves; of choices the longest; 0: only the prompt is read
  Sampling sampling;       // its bias points to `bias`
  DrafterKind speculation = DrafterKind::kNone;
  int32_t max_tree = 0;  // nodes of a draft tree; 0: the executor's choice
  std::array<LogitBias, kMaxLogitBias> bias;
  std::array<int32_t, kMaxStopIds> stop_ids;
  int32_t stop_id_count = 0;
  StopSet stops;
  WarningList warnings;
  LeadingSpaces leading_spaces;  // that the completion's text loses
  Priority priority = Priority::kInteractive;
  int64_t timeout_ns = 0;                       // CLOCK_MONOTONIC, as is the next; 0: none. It ends the request, ...
  int64_t deadline_ns = 0;                      // ... and so does this, which also says when it must be served
  int32_t rolled_back_tokens = 0;               // of the session that it goes on from: only for its usage
  uint64_t pin = 0;                             // by whom its KV is pinned when it has ended; 0: nobody
  bool returns_tokens = false;                  // the control plane is told the completion's ids
  bool told_by_control = false;                 // the control plane, not the io thread, tells the client of its end
  std::shared_ptr<TokenConstraint> constraint;  // null: there is none. Freed by the control thread
  std::unique_ptr<Choices> choices;             // null: it generates. Filled by the engine thread
  // Null: they are not wanted. Filled by the engine thread, freed by the control thread.
  std::unique_ptr<PromptLogprobs> prompt_logprobs;
  bool rehearsal = false;  // the daemon's own, before it is ready: nobody counts it, and nothing of it stays

  // The engine's results. tokens[prompt_tokens + i] is completion token i; it is written before the event that
  // announces it and never changes, so the io thread reads ids from here however far it has fallen behind.
  std::unique_ptr<int32_t[]> tokens;  // [context]
  Timeline timeline;
  Outcome outcome;
  RoundTotals rounds;

  [[nodiscard]] std::span<const int32_t> prompt() const noexcept {
    return {tokens.get(), static_cast<size_t>(prompt_tokens)};
  }
  [[nodiscard]] std::span<const uint8_t> client() const noexcept { return {identity.data(), identity_size}; }
  // The last eight bytes of what names the client, as a number.
  [[nodiscard]] uint64_t connection() const noexcept {
    uint64_t number = 0;
    for (const uint8_t byte : client().last(std::min<size_t>(identity_size, 8))) number = number << 8 | byte;
    return number;
  }
  [[nodiscard]] const int32_t* completion() const noexcept { return tokens.get() + prompt_tokens; }
  [[nodiscard]] bool stops_at(int32_t token) const noexcept {
    const int32_t* end = stop_ids.data() + stop_id_count;
    return std::find(stop_ids.data(), end, token) != end;
  }
  [[nodiscard]] int32_t prompt_logprobs_found() const noexcept {
    return prompt_logprobs != nullptr ? prompt_logprobs->found() : 0;
  }
  // Positions that it may come to need in the cache.
  [[nodiscard]] int32_t most_positions() const noexcept {
    return choices != nullptr ? prompt_tokens - 1 + choices->widest() : prompt_tokens + max_tokens;
  }
};

// What the engine thread tells the io thread: completion tokens [index, index + count) of a slot have been accepted.
struct EngineEvent {
  int64_t time_ns = 0;  // when the first of them was accepted
  uint32_t slot = 0;
  int32_t index = 0;
  int32_t count = 0;
  int32_t logprobs = -1;        // first of a chain of `count` records in the LogprobPool; -1 if not asked for
  int32_t prompt_logprobs = 0;  // of slot.prompt_logprobs, so many are there now
  bool silent_last = false;     // the last of them is a stop id: it has no text
  bool final = false;           // the request has ended: slot.outcome is set, no further event follows
};
static_assert(sizeof(EngineEvent) == 32);

// One token's logprobs, from the engine thread to the io thread, which gives it back.
struct LogprobRecord {
  RoundToken token;
  int32_t next = -1;  // in the chain
};

}  // namespace ull
