// An engine on the scripted executor, with the test in the place of the io thread and the control plane.
#pragma once

#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "check.h"
#include "engine/engine.h"
#include "testing/scripted_executor.h"

namespace ull::test {

// vocab.bin of 128 tokens: token t is the character t; 0 is special.
class AsciiVocabulary {
 public:
  AsciiVocabulary()
      : path_(std::filesystem::temp_directory_path() / ("ull-test-vocabulary-" + std::to_string(getpid()) + ".bin")) {
    std::ofstream file(path_, std::ios::binary);
    const auto u32 = [&](uint32_t value) { file.write(reinterpret_cast<const char*>(&value), sizeof(value)); };
    file << "ULLVOCAB";
    u32(2);
    u32(128);
    u32(0);
    for (uint32_t offset = 0; offset <= 128; ++offset) u32(offset);
    for (int token = 0; token < 128; ++token) file.put(token == 0 ? '\1' : '\0');
    for (int token = 0; token < 128; ++token) file.put(static_cast<char>(token));
  }
  ~AsciiVocabulary() { std::filesystem::remove(path_); }
  [[nodiscard]] std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

inline std::vector<int32_t> ids(std::string_view text) { return {text.begin(), text.end()}; }

// What a request came to.
struct Result {
  std::vector<int32_t> tokens;
  Outcome outcome;
  Timeline timeline;
  std::vector<float> logprobs;
  std::vector<float> prompt_logprobs;
  std::vector<TokenLogprob> prompt_top;
  bool silent_last = false;
  int finals = 0;

  [[nodiscard]] std::string text() const { return {tokens.begin(), tokens.end()}; }
};

class Harness {
 public:
  explicit Harness(ScriptedExecutor::Options script, EngineOptions options = {}, bool start = true)
      : executor(small(std::move(script))), engine(executor, vocabulary_.path(), options) {
    if (start) engine.start();
  }

  static Submission request(uint64_t id, std::span<const int32_t> prompt, int max_tokens) {
    static const uint8_t client[] = {'c', 'l', 'i', 'e', 'n', 't'};
    Submission submission;
    submission.identity = client;
    submission.id = id;
    submission.tokens = prompt;
    submission.max_tokens = max_tokens;
    return submission;
  }

  void submit(const Submission& submission) { (void)engine.submit(submission); }
  // Submits `first`, and the others while it is within step `step` of the executor (from 0).
  void submit_within(const Submission& first, int64_t step, const auto&... others) {
    executor.hold_from(step);
    submit(first);
    wait_for_steps(step + 1);
    (submit(others), ...);
    executor.let_go();
  }
  bool cancel(uint64_t id) { return engine.cancel(request(id, {}, 0).identity, id); }

  // Plays the io thread: takes events until the request has ended, and frees its slot.
  const Result& wait(uint64_t id) {
    while (results[id].finals == 0) {
      if (!pump()) std::this_thread::yield();
    }
    return results[id];
  }

  // Takes one event; false if there was none.
  bool pump() {
    EngineEvent event;
    EngineShared& shared = engine.shared();
    if (!shared.events.try_pop(event)) return false;
    RequestSlot& slot = shared.slot(event.slot);
    Result& result = results[slot.id];
    CHECK_EQ(static_cast<size_t>(event.index), result.tokens.size());
    CHECK(event.count == 0 || event.time_ns > 0);
    result.tokens.insert(result.tokens.end(), slot.completion() + event.index,
                         slot.completion() + event.index + event.count);
    int32_t record = event.logprobs;
    while (record >= 0) {
      result.logprobs.push_back(shared.logprobs[static_cast<size_t>(record)].token.logprob);
      record = shared.give_back(slot, record);
    }
    CHECK(static_cast<size_t>(event.prompt_logprobs) >= result.prompt_logprobs.size());
    if (event.prompt_logprobs > 0) {
      const auto found = slot.prompt_logprobs->values().first(static_cast<size_t>(event.prompt_logprobs));
      result.prompt_logprobs.assign(found.begin(), found.end());
      const auto top_count = static_cast<size_t>(slot.prompt_logprobs->top_count());
      const auto top = slot.prompt_logprobs->top().first(found.size() * top_count);
      result.prompt_top.assign(top.begin(), top.end());
    }
    if (event.final) {
      ++result.finals;
      result.outcome = slot.outcome;
      result.timeline = slot.timeline;
      result.silent_last = event.silent_last;
      CHECK_EQ(result.tokens.size(), static_cast<size_t>(slot.outcome.completion_tokens));
      slot.enter(SlotState::kFree);
    }
    return true;
  }

  // Waits until the engine thread has started `steps` executor steps in all.
  void wait_for_steps(int64_t steps) {
    while (executor.steps() < steps) std::this_thread::yield();
  }

  std::map<uint64_t, Result> results;

 private:
  static ScriptedExecutor::Options small(ScriptedExecutor::Options script) {
    script.vocabulary = 128;
    return script;
  }
  AsciiVocabulary vocabulary_;

 public:
  ScriptedExecutor executor;
  Engine engine;
};

}  // namespace ull::test
