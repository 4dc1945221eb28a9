// A graph executor on a played device, driven step by step as the engine drives it.
#pragma once

#include <atomic>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "check.h"
#include "fake_device.h"
#include "fake_dflash.h"
#include "fake_eagle.h"
#include "graph/graph_executor.h"

namespace ull::test {

// Keeps the device from beginning a round until release(): the one that is launched after `more` others. Where `at` is
// Script::begun, it can no longer be skipped.
template <typename Device = FakeDevice>
class HeldRound {
 public:
  using Script = typename Device::Script;
  using Hook = std::function<void(uint64_t)> Script::*;

  explicit HeldRound(Device& device, uint64_t more = 0, Hook at = &Script::before) {
    device.arm([&](Script& script, uint64_t next) {
      sequence_ = next + more;
      script.*at = [released = released_, reached = reached_, held = sequence_](uint64_t sequence) {
        if (sequence != held) return;
        *reached = true;
        while (!*released) std::this_thread::yield();
      };
    });
  }
  ~HeldRound() { release(); }
  HeldRound(const HeldRound&) = delete;
  HeldRound& operator=(const HeldRound&) = delete;

  void release() { *released_ = true; }
  [[nodiscard]] uint64_t sequence() const { return sequence_; }
  // Whether all rounds before it have ended.
  [[nodiscard]] bool reached() const { return *reached_; }

 private:
  std::shared_ptr<std::atomic<bool>> released_ = std::make_shared<std::atomic<bool>>(false);
  std::shared_ptr<std::atomic<bool>> reached_ = std::make_shared<std::atomic<bool>>(false);
  uint64_t sequence_ = 0;
};

// Aborts a step while the device's round after `more` others has not begun, which it does once it is cancelled.
template <typename Device = FakeDevice>
class AbortedRound {
 public:
  AbortedRound(graph::GraphExecutor& executor, Device& device, uint64_t more)
      : held_(device, more), thread_([this, &executor, &device] {
          while (!held_.reached()) std::this_thread::yield();
          executor.abort();
          while (device.cancelled() < held_.sequence()) std::this_thread::yield();
          held_.release();
        }) {}
  ~AbortedRound() { thread_.join(); }
  AbortedRound(const AbortedRound&) = delete;
  AbortedRound& operator=(const AbortedRound&) = delete;

 private:
  HeldRound<Device> held_;
  std::thread thread_;
};

struct GraphRig {
  explicit GraphRig(FakeDevice::Script script = {}, graph::GraphOptions options = {},
                    const std::optional<FakeDevice::Script>& draft = std::nullopt,
                    const std::optional<FakeHead::Script>& eagle_head = std::nullopt,
                    const std::optional<FakeHead::Script>& dflash_head = std::nullopt)
      : eagle(eagle_head ? std::make_unique<FakeEagle>(*eagle_head, script) : nullptr),
        dflash(dflash_head ? std::make_unique<FakeDflash>(*dflash_head, script) : nullptr),
        device(script),
        draft_device(draft ? std::make_unique<FakeDevice>(*draft) : nullptr),
        model(script.model),
        executor(program(), FakeDevice::driver(), options) {
    executor.prepare();
    (void)rest();
    if (draft) (void)rest(*draft_device);
    pages.resize(static_cast<size_t>(pages_for(script.context)));
    // Not the identity, so that a page table which did not arrive shows.
    for (size_t i = 0; i < pages.size(); ++i) {
      pages[i] = static_cast<int32_t>((i * 7 + 3) % static_cast<size_t>(script.page_count));
    }
  }

  Status finish() {
    for (;;) {
      const Status status = executor.poll(result);
      if (status != Status::kPending) return status;
      std::this_thread::yield();
    }
  }

  // All of `tokens` from position `start` on.
  Status prefill(const std::vector<int32_t>& tokens, int start = 0) {
    const int chunk = executor.info().prefill_chunk;
    for (int done = 0; done < static_cast<int>(tokens.size());) {
      const int count = std::min(chunk, static_cast<int>(tokens.size()) - done);
      const Status status =
          executor.start_prefill({tokens.data() + done, count, start + done, pages.data(), &drafted, speculation});
      if (status != Status::kOk) return status;
      if (const Status end = finish(); end != Status::kOk) return end;
      done += count;
    }
    return Status::kOk;
  }

  [[nodiscard]] RoundStep step(const std::vector<int32_t>& tokens, int max_tokens) {
    RoundStep step{tokens.back(), static_cast<int32_t>(tokens.size()) - 1, pages.data(), &sampling, max_tokens,
                   tokens.data()};
    step.speculation = speculation;
    step.max_tree = max_tree;
    step.drafted = &drafted;
    step.stops = stops.data();
    step.stop_count = static_cast<int32_t>(stops.size());
    step.prompt_tokens = prompt_tokens;
    return step;
  }

  // The first round of a prompt whose last `forced` tokens it takes along; all before them are in the cache.
  [[nodiscard]] RoundStep first_step(const std::vector<int32_t>& prompt, int forced, int max_tokens) {
    RoundStep first = step(prompt, max_tokens);
    first.position -= forced;
    first.token = prompt[static_cast<size_t>(first.position)];
    first.forced = forced;
    first.prompt_tokens = prompt_tokens = static_cast<int32_t>(prompt.size());
    return first;
  }

  // One round of up to `most` tokens, perhaps aborted; what it emits goes behind `tokens`.
  Status advance(std::vector<int32_t>& tokens, int most, bool aborted = false) {
    if (const Status status = executor.start_round(step(tokens, most)); status != Status::kOk) return status;
    if (aborted) executor.abort();
    if (const Status status = finish(); status != Status::kOk) return status;
    for (int i = 0; i < result.count; ++i) tokens.push_back(result.tokens[i].token);
    return Status::kOk;
  }

  // Rounds until `count` tokens more have come; the first feeds the last of `tokens`, all before it are in the cache.
  Status decode(std::vector<int32_t>& tokens, int count) {
    while (count > 0) {
      const int most = std::min(count, executor.info().tokens_per_round);
      tokens.reserve(tokens.size() + 1);
      if (const Status status = advance(tokens, most); status != Status::kOk) return status;
      ++rounds;
      count -= result.count;
    }
    return Status::kOk;
  }

  // `count` tokens after a prompt that nothing is cached of.
  std::vector<int32_t> complete(std::vector<int32_t> prompt, int count) {
    const size_t start = prompt.size();
    prompt_tokens = static_cast<int>(start);
    std::vector<int32_t> cached(prompt.begin(), prompt.end() - 1);
    drafted = {};
    CHECK(prefill(cached) == Status::kOk);
    CHECK(decode(prompt, count) == Status::kOk);
    return {prompt.begin() + static_cast<std::ptrdiff_t>(start), prompt.end()};
  }

  // What the device did since the last call, once it has come to rest.
  [[nodiscard]] std::vector<FakeDevice::Record> rest() {
    executor.rest();
    return rest(device);
  }
  [[nodiscard]] static std::vector<FakeDevice::Record> rest(FakeDevice& device) {
    while (FakeDevice::driver().query(&device) == graph::kNotReady) std::this_thread::yield();
    auto records = device.records();
    device.forget();
    return records;
  }

  [[nodiscard]] graph::GraphProgram program() {
    if (eagle != nullptr) return program_with_eagle(device, *eagle);
    if (dflash != nullptr) return program_with_dflash(device, *dflash);
    return draft_device == nullptr ? device.program() : program_with_draft(device, *draft_device);
  }

  std::unique_ptr<FakeEagle> eagle;    // null: there is no EAGLE head
  std::unique_ptr<FakeDflash> dflash;  // null: there is no DFlash head; one of the two at most
  FakeDevice device;
  std::unique_ptr<FakeDevice> draft_device;  // null: there is no draft model
  FakeModel model;
  graph::GraphExecutor executor;
  std::vector<int32_t> pages;
  Sampling sampling;
  std::vector<int32_t> stops;
  DrafterKind speculation = DrafterKind::kNone;
  int max_tree = 0;
  int prompt_tokens = 0;  // of requests with penalties
  Drafted drafted;        // positions that the draft model's cache holds
  RoundResult result;
  int rounds = 0;
};

// What an executor says of its failure, or null.
inline bool says(const char* failure, std::string_view what) {
  if (failure != nullptr && std::string_view(failure).find(what) != std::string_view::npos) return true;
  ull::check::fail(__FILE__, __LINE__,
                   std::string(failure == nullptr ? "null" : failure) + " does not say " + std::string(what));
  return false;
}

inline std::vector<int32_t> prompt_of(int count, int first = 1) {
  std::vector<int32_t> prompt(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) prompt[static_cast<size_t>(i)] = (first + 3 * i) % 97;
  return prompt;
}

inline int count_of(const std::vector<FakeDevice::Record>& records, gpu::RoundMode mode, gpu::RoundStatus status) {
  return static_cast<int>(std::count_if(records.begin(), records.end(), [&](const FakeDevice::Record& record) {
    return record.mode == mode && record.status == status;
  }));
}

}  // namespace ull::test
