// What heads for the graph executor have in common where they are played on the stream of the device that plays the
// target (fake_device.h): mapped memory, pages, faults and a record of their passes.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "fake_device.h"
#include "graph/program.h"

namespace ull::test {

class FakeHead : public StreamPart {
 public:
  // Sequence numbers are those of the head's passes; 0: never.
  struct Script {
    int rank = 0;        // at which it names the right token; -1: nowhere
    float gap = 4.0F;    // between the scores of two ranks
    int heals = 0;       // n > 0: it names the right token if no more than one entry in n is wrong
    bool nodes = false;  // of DFlash: it has a Markov term
    bool anchor_predicts = false;
    int block = 8;        // entries of a DFlash head's block
    float chance = 1.0F;  // that a DFlash head gives its candidates of a depth
    bool chunks = false;  // it has a graph of them
    int chunk_us = 0;     // that a chunk takes, and a pass that reads up to 64 positions and ranks nothing
    int fill_us = 0;
    bool fails_copies = false;
    uint64_t launch_error_at = 0;
    uint64_t stream_error_at = 0;
    uint64_t hang_at = 0;
    uint64_t silent_at = 0;
    uint64_t skipped_at = 0;  // this pass says that it was skipped, though nobody has cancelled it
    uint64_t absurd_at = 0;
    std::function<void(gpu::RoundResult&)> absurdity = nullptr;
    std::function<void(uint64_t)> before = nullptr;  // on the device's thread, before a pass begins
  };

  struct Record {
    uint64_t sequence;
    gpu::RoundStatus status;
    int graph;    // as the head says; kChunkTokens: a chunk's
    int count;    // entries,
    int read;     // the first of them, made of taps and kept,
    int ranked;   // and how many were ranked
    int start;    // position of the first entry
    int from;     // positions before it are lacking
    int wrong;    // entries attended to that are not of this text
    bool behind;  // it was launched behind the target's round, before that had been read
  };

  // The passes since the last call; call it when the device is at rest.
  [[nodiscard]] std::vector<Record> records() {
    const std::lock_guard lock(mutex_);
    return std::exchange(records_, {});
  }
  void arm(const std::function<void(Script&, uint64_t next)>& change) {
    const std::lock_guard lock(mutex_);
    change(script_, launched_ + 1);
  }
  // Passes up to this one are to be skipped.
  [[nodiscard]] uint64_t cancelled() {
    return std::atomic_ref<uint64_t>(control_.cancelled_through).load(std::memory_order_acquire);
  }

  int launch(int graph) override {
    const std::lock_guard lock(mutex_);
    if (graph == 0) return script_.fails_copies ? kOutOfMemory : graph::kSuccess;
    if (script_.launch_error_at == launched_ + 1) return kOutOfMemory;
    ++launched_;
    note_launch(requests_[launched_ % gpu::kRoundSlots]);
    if (launched_ - begun_ > gpu::kRoundSlots) std::abort();
    return graph::kSuccess;
  }

  int run(int graph) override {
    std::unique_lock lock(mutex_);
    const uint64_t sequence = ++begun_;
    const Script script = script_;
    lock.unlock();
    const size_t slot = sequence % gpu::kRoundSlots;
    gpu::RoundResult& result = results_[slot];
    const auto answer = [&] {
      std::atomic_ref<uint64_t>(result.sequence).store(sequence, std::memory_order_release);
      return graph::kSuccess;
    };
    if (!await_request(requests_[slot], control_, result, sequence)) return answer();
    if (sequence == script.hang_at) return kHangs;
    if (script.before) script.before(sequence);
    if (sequence == script.stream_error_at) return kIllegalAddress;
    if (sequence == script.silent_at) return graph::kSuccess;
    const Record record = graph == kFirstGraph + kChunk ? chunk(sequence, script, result)
                                                        : pass(graph - kFirstGraph, sequence, script, result);
    lock.lock();
    records_.push_back(record);
    lock.unlock();
    return answer();
  }

  [[nodiscard]] bool holds(uint64_t address, size_t bytes) const override {
    const uint64_t first = reinterpret_cast<uintptr_t>(pool_.data());
    return address >= first && address + bytes <= first + pool_.size() * sizeof(uint32_t);
  }

 protected:
  using Tokens = std::vector<int32_t>;

  FakeHead(Script script, const FakeDevice::Script& target)
      : script_(std::move(script)),
        model_(target.model),
        context_(target.context),
        page_count_(target.page_count),
        requests_(gpu::kRoundSlots),
        results_(gpu::kRoundSlots),
        host_pages_(static_cast<size_t>(pages_for(target.context)), -1),
        host_text_(static_cast<size_t>(target.context), -1),
        host_chunks_(size_t{gpu::kRoundSlots} * gpu::kChunkTokens, -1),
        pool_(static_cast<size_t>(page_count_) * kPageTokens, 0),
        pages_(host_pages_.size(), -1) {}

  [[nodiscard]] static void* handle(uintptr_t graph) { return reinterpret_cast<void*>(kFirstGraph + graph); }

  // Runs graph number `kind` of the head: fills `result` but for its sequence.
  virtual Record pass(int kind, uint64_t sequence, const Script& script, gpu::RoundResult& result) = 0;

  // What is kept of a position: of its tap, and of the token that read() hands over.
  [[nodiscard]] virtual uint32_t entry(const Tokens& tap, int32_t token) const = 0;

  // Everything but the graphs, a chunk's excepted.
  void describe(FakeDevice& device, graph::RoundBlocks& program) {
    device_ = &device;
    device.attach(*this);
    const graph::GraphProgram target = device.program();
    program.stream = target.stream;
    program.context = target.context;
    program.requests = requests_.data();
    program.results = results_.data();
    program.control = &control_;
    program.pages = host_pages_.data();
    program.text = host_text_.data();
    program.vocabulary = target.vocabulary;
    program.context_tokens = context_;
    program.page_count = page_count_;
    program.weight_bytes = 50;
    program.kv_bytes = static_cast<int64_t>(pool_.size() * sizeof(uint32_t));
    program.kv_pages = reinterpret_cast<uintptr_t>(pool_.data());
    if (!script_.chunks) return;
    program.chunk = handle(kChunk);
    program.chunks = host_chunks_.data();
  }

  void copy_setting(const gpu::RoundRequest& request) {
    if (request.setting == setting_) return;
    setting_ = request.setting;
    std::copy_n(host_pages_.begin(), request.page_count, pages_.begin());
  }

  [[nodiscard]] bool knows(int wrong, int attended, const Script& script) const {
    return wrong == 0 || (script.heals > 0 && wrong * script.heals <= attended);
  }

  // Candidates of which the scripted one is `next`, if it `knows`.
  void name(int32_t next, bool knows, const Script& script, gpu::EmittedToken& out) const {
    out.top_count = kMedusaRanks;
    for (int rank = 0; rank < kMedusaRanks; ++rank) {
      const bool right = knows && rank == script.rank;
      out.top[rank] = {right ? next : (next + 1 + rank) % model_.vocabulary,
                       5.0F - script.gap * static_cast<float>(rank)};
    }
  }

  [[nodiscard]] uint32_t& cached(int position) {
    const int32_t page = pages_.at(static_cast<size_t>(position / kPageTokens));
    return pool_.at(static_cast<size_t>(page) * kPageTokens + static_cast<size_t>(position % kPageTokens));
  }

  Script script_;
  const FakeModel model_;
  const int context_;
  const int page_count_;
  FakeDevice* device_ = nullptr;
  // Mapped memory.
  std::vector<gpu::RoundRequest> requests_;
  std::vector<gpu::RoundResult> results_;
  gpu::HostControl control_{};
  std::vector<int32_t> host_pages_;
  std::vector<int32_t> host_text_;
  std::vector<int32_t> host_chunks_;
  // Device memory; the device's thread's.
  std::vector<uint32_t> pool_;  // [page_count, kPageTokens] entries
  std::vector<int32_t> pages_;  // what has been copied of host_pages_
  uint32_t setting_ = 0;

  static void take(int us) { std::this_thread::sleep_for(std::chrono::microseconds(us)); }

 private:
  static constexpr int kChunk = 50;  // of the head's graphs

  Record chunk(uint64_t sequence, const Script& script, gpu::RoundResult& result) {
    const gpu::RoundRequest& request = requests_[sequence % gpu::kRoundSlots];
    int32_t* tokens = host_chunks_.data() + sequence % gpu::kRoundSlots * gpu::kChunkTokens;
    const int count = request.count;
    if (request.sequence != sequence || request.mode != gpu::RoundMode::kPrefill || request.max_tokens != 0 ||
        request.position < 0 || count < 1 || count > gpu::kChunkTokens || request.position + count > context_) {
      std::abort();
    }
    take(script.chunk_us);
    const bool skipped = sequence <= cancelled() || sequence == script.skipped_at;
    const auto status = skipped ? gpu::RoundStatus::kSkipped : gpu::RoundStatus::kOk;
    result.status = status;
    result.count = result.stopped = 0;
    if (!skipped) {
      copy_setting(request);
      for (int i = 0; i < count; ++i)
        cached(request.position + i) = entry(device_->tap(request.position + i), tokens[i]);
    }
    std::fill_n(tokens, gpu::kChunkTokens, -1);  // nothing of it is the next one's
    return {.sequence = sequence,
            .status = status,
            .graph = gpu::kChunkTokens,
            .count = count,
            .read = count,
            .ranked = 0,
            .start = request.position,
            .from = request.first,
            .wrong = 0,
            .behind = false};
  }

  std::mutex mutex_;
  std::vector<Record> records_;
  uint64_t launched_ = 0;
  uint64_t begun_ = 0;
};

}  // namespace ull::test
