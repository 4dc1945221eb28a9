// An EAGLE head for the graph executor, played on the stream of the device that plays the target (fake_device.h). Its
// passes behave as kernels/params.h says of RoundMode::kEagle. An entry of its pages is a function of the tap and the
// token that it was made of, and what a ranked entry names is right only if every entry that it attends to is one of
// its own text: one that is missing, stale or foreign shows as a draft that names nothing right.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "draft/eagle_tree.h"
#include "fake_device.h"
#include "graph/program.h"

namespace ull::test {

class FakeEagle final : public StreamPart {
 public:
  // Sequence numbers are those of the head's passes; 0: never.
  struct Script {
    int rank = 0;      // at which an entry names the right token; -1: nowhere
    float gap = 4.0F;  // between the scores of two ranks
    int heals = 0;     // n > 0: it names the right token if no more than one entry in n is wrong
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

  // The graphs, by the entries that they hold.
  static constexpr int kFill = 0;
  struct Record {
    uint64_t sequence;
    gpu::RoundStatus status;
    int graph;    // entries that the pass's graph holds; kFill: it is the one that ranks nothing
    int count;    // entries,
    int read;     // the first of them, made of taps and kept,
    int ranked;   // and the last of them
    int start;    // position of the first entry
    int from;     // positions before it are lacking
    int wrong;    // entries attended to that are not of this text
    bool behind;  // it was launched behind the target's round, before that had been read
  };

  FakeEagle(Script script, const FakeDevice::Script& target)
      : script_(std::move(script)),
        model_(target.model),
        context_(target.context),
        page_count_(target.page_count),
        requests_(gpu::kRoundSlots),
        results_(gpu::kRoundSlots),
        host_pages_(static_cast<size_t>(pages_for(target.context)), -1),
        host_text_(static_cast<size_t>(target.context), -1),
        pool_(static_cast<size_t>(page_count_) * kPageTokens, 0),
        pages_(host_pages_.size(), -1) {}

  // For the executor of that device's program.
  [[nodiscard]] graph::EagleProgram program(FakeDevice& device) {
    device_ = &device;
    device.attach(*this);
    const graph::GraphProgram target = device.program();
    graph::EagleProgram program;
    program.fill = handle(0);
    program.first = handle(1);
    for (int i = 0; i < graph::kEagleSizes; ++i) program.levels[i] = handle(2 + i);
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
    return program;
  }

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
    if (launched_ - begun_ > gpu::kRoundSlots) std::abort();
    return graph::kSuccess;
  }

  int run(int graph) override {
    std::unique_lock lock(mutex_);
    const uint64_t sequence = ++begun_;
    const Script script = script_;
    lock.unlock();
    if (sequence == script.hang_at) return kHangs;
    if (script.before) script.before(sequence);
    if (sequence == script.stream_error_at) return kIllegalAddress;
    if (sequence == script.silent_at) return graph::kSuccess;
    gpu::RoundResult& result = results_[sequence % gpu::kRoundSlots];
    const Record record = pass(graph, sequence, script, result);
    lock.lock();
    records_.push_back(record);
    lock.unlock();
    std::atomic_ref<uint64_t>(result.sequence).store(sequence, std::memory_order_release);
    return graph::kSuccess;
  }

  [[nodiscard]] bool holds(uint64_t address, size_t bytes) const override {
    const uint64_t first = reinterpret_cast<uintptr_t>(pool_.data());
    return address >= first && address + bytes <= first + pool_.size() * sizeof(uint32_t);
  }

 private:
  using Tokens = std::vector<int32_t>;

  [[nodiscard]] static void* handle(uintptr_t graph) { return reinterpret_cast<void*>(kFirstGraph + graph); }

  // What an entry is made of: a tap, which knows the text up to the entry's position, and the token behind it.
  static uint32_t entry_of(const Tokens& tap, int32_t token) {
    return (FakeModel::hash_of(tap, 1) ^ static_cast<uint32_t>(token)) * 16777619U;
  }

  Record pass(int graph, uint64_t sequence, const Script& script, gpu::RoundResult& result) {
    gpu::RoundRequest request = requests_[sequence % gpu::kRoundSlots];
    const bool behind = request.position < 0, nothing = behind && !take_kept(request);
    const int kind = graph - static_cast<int>(kFirstGraph);  // 0: fill, 1: first, then the levels
    Record record{.sequence = sequence,
                  .status = gpu::RoundStatus::kOk,
                  .graph = kind == 0   ? kFill
                           : kind == 1 ? graph::kEagleFirst
                                       : graph::kEagleLevels[kind - 2],
                  .count = request.count,
                  .read = request.forced,
                  .ranked = request.max_tokens,
                  .start = request.position,
                  .from = request.first,
                  .wrong = 0,
                  .behind = behind};
    if (nothing) {
      result.count = result.stopped = 0;
      result.status = record.status = gpu::RoundStatus::kSkipped;
      return record;
    }
    check(request, sequence, kind, kind == 0 ? gpu::kTreeTokens : record.graph);
    result.count = 0;
    result.stopped = 0;
    if (sequence <= cancelled() || sequence == script.skipped_at) record.status = gpu::RoundStatus::kSkipped;
    result.status = record.status;
    if (record.status == gpu::RoundStatus::kSkipped) return record;
    if (request.setting != setting_) {
      setting_ = request.setting;
      std::copy_n(host_pages_.begin(), request.page_count, pages_.begin());
    }
    for (int i = 0; i < request.forced; ++i) {
      const int position = request.position + i;
      cached(position) = entry_of(device_->tap(position), request.tokens[i]);
    }
    result.count = request.max_tokens;
    for (int i = 0; i < request.max_tokens; ++i) {
      record.wrong += rank(request, request.count - request.max_tokens + i, script, result.tokens[i]);
    }
    if (sequence == script.absurd_at) script.absurdity(result);
    return record;
  }

  // Makes a request behind a round one for the entries that the round has left to be made; false: there are none.
  bool take_kept(gpu::RoundRequest& request) const {
    const FakeDevice::Kept kept = device_->kept();
    const int count = static_cast<int>(kept.next.size());
    if (count < 1 || count > request.count) return false;
    request.position = kept.base;
    request.count = request.forced = count;
    std::copy(kept.next.begin(), kept.next.end(), request.tokens);
    for (int i = 0; i < count; ++i) request.parents[i] = static_cast<uint8_t>(std::max(i - 1, 0));
    return true;
  }

  // What the kernels rely on.
  void check(const gpu::RoundRequest& request, uint64_t sequence, int kind, int capacity) {
    const int count = request.count, read = request.forced, ranked = request.max_tokens;
    if (request.sequence != sequence || request.mode != gpu::RoundMode::kEagle) std::abort();
    if (count < 1 || count > capacity || read < 1 || read > count || (kind < 2 && read != count)) std::abort();
    if (ranked != (kind < 2 ? kind : std::clamp(ranked, 1, kMaxEagleWidth)) || ranked > count) std::abort();
    if (request.sampling.penalises != 0 || request.first < 0) std::abort();
    depths_[0] = 0;
    for (int i = 0; i < count; ++i) {
      if (request.tokens[i] < 0 || request.tokens[i] >= model_.vocabulary) std::abort();
      if (i == 0) continue;
      if (request.parents[i] >= i || (i < read && request.parents[i] != i - 1)) std::abort();
      if (i >= read && request.parents[i] < read - 1) std::abort();  // it would not follow what is kept
      depths_[i] = depths_[request.parents[i]] + 1;
      if (request.position + depths_[i] >= context_) std::abort();  // there is no such rotation
    }
  }

  // The candidates of an entry; how many of the entries that it attends to are not of its text.
  int rank(const gpu::RoundRequest& request, int entry, const Script& script, gpu::EmittedToken& out) {
    const int last = request.forced - 1, start = request.position;
    Tokens way;  // behind what the last kept entry's tap knows
    for (int i = entry; i >= last; i = request.parents[i]) {
      way.insert(way.begin(), request.tokens[i]);
      if (i == last) break;
    }
    Tokens past = device_->tap(start + last);
    const bool own = static_cast<int>(past.size()) == start + last + 1;
    int wrong = own ? 0 : start + last + 1;
    past.insert(past.end(), way.begin(), way.end());
    // Every entry attended to, on the way of the prefix hash.
    Tokens prefix;
    for (int position = 0; position <= start + last && own; ++position) {
      prefix.push_back(past[static_cast<size_t>(position)]);
      if (position < request.first) continue;
      if (cached(position) != entry_of(prefix, past[static_cast<size_t>(position) + 1])) ++wrong;
    }
    const int attended = start + last + 1 - request.first;
    const bool knows = wrong == 0 || (script.heals > 0 && wrong * script.heals <= attended);
    const gpu::State& state = device_->state();
    uint64_t seed = state.sampling.seed;
    if (state.sampling.penalises != 0) {
      Tokens text = device_->counted_text();  // and of the entries' tokens those that it lacks
      for (int i = 0; i <= last; ++i) {
        if (start + i + 1 >= state.counted) text.push_back(request.tokens[i]);
      }
      text.insert(text.end(), way.begin() + 1, way.end());
      seed = FakeModel::penalised(seed, text, state.prompt_tokens);
    }
    const int32_t next = model_.next(past, seed, state.biases, state.sampling.bias_count);
    out.node = entry;
    out.top_count = kEagleRanks;
    for (int rank = 0; rank < kEagleRanks; ++rank) {
      const bool right = knows && rank == script.rank;
      out.top[rank] = {right ? next : (next + 1 + rank) % model_.vocabulary,
                       5.0F - script.gap * static_cast<float>(rank)};
    }
    return wrong;
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
  // Device memory; the device's thread's.
  std::vector<uint32_t> pool_;  // [page_count, kPageTokens] entries
  std::vector<int32_t> pages_;  // what has been copied of host_pages_
  uint32_t setting_ = 0;
  int depths_[gpu::kTreeTokens] = {};

  std::mutex mutex_;
  std::vector<Record> records_;
  uint64_t launched_ = 0;
  uint64_t begun_ = 0;
};

inline graph::GraphProgram program_with_eagle(FakeDevice& target, FakeEagle& eagle) {
  graph::GraphProgram program = target.program();
  program.eagle = std::make_shared<const graph::EagleProgram>(eagle.program(target));
  return program;
}

}  // namespace ull::test
