// A device for the graph executor, played by a thread: it runs "graphs" as kernels/params.h says they behave, on a
// model that is a function of the tokens it finds in the pages, the seed and the biases, and with penalties of the text
// that it keeps. What a round leaves to be drawn from again is what it knew of each node. A page that is missing, stale
// or written by another sequence shows, and so does a setting or a text that did not arrive. Faults come by script.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "executor/sampling.h"
#include "graph/driver.h"
#include "graph/program.h"

namespace ull::test {

inline constexpr int kIllegalAddress = 700;  // CUDA_ERROR_ILLEGAL_ADDRESS
inline constexpr int kOutOfMemory = 2;       // CUDA_ERROR_OUT_OF_MEMORY

struct FakeModel {
  int vocabulary = 100;
  int period = 0;  // 0: any token may follow; n: mostly the token n back, so that the text repeats
  int flaw = 0;    // n: about every nth token is another than the model's without it

  // The token after `past`; `biases` with -inf ban tokens.
  template <typename Bias>
  [[nodiscard]] int32_t next(const std::vector<int32_t>& past, uint64_t seed, const Bias* biases, int count) const {
    return next(past, seed, biases, count, [](int32_t) { return true; });
  }

  // The same among the tokens that are `allowed`; -1: there is none.
  template <typename Bias, typename Allowed>
  [[nodiscard]] int32_t next(const std::vector<int32_t>& past, uint64_t seed, const Bias* biases, int count,
                             const Allowed& allowed) const {
    const uint32_t hash = hash_of(past, seed);
    int32_t token = static_cast<int32_t>(hash % static_cast<uint32_t>(vocabulary));
    if (period > 0 && static_cast<int>(past.size()) >= period && hash >> 8 & 15) {
      token = past[past.size() - static_cast<size_t>(period)];
    }
    if (flaw > 0 && hash / 256 % static_cast<uint32_t>(flaw) == 0) token = (token + 1) % vocabulary;
    const auto banned = [&] {
      return std::any_of(biases, biases + count, [&](const Bias& bias) { return bias.token == token; });
    };
    for (int tried = 0; tried < vocabulary; ++tried, token = (token + 1) % vocabulary) {
      if (!banned() && allowed(token)) return token;
    }
    return -1;
  }

  // How likely `token` is behind `past`: nothing but a function of both.
  [[nodiscard]] static float logprob(const std::vector<int32_t>& past, int32_t token) {
    return -0.01F * static_cast<float>(hash_of(past, static_cast<uint64_t>(token) + 1) % 1000);
  }
  // What it calls the likeliest there but for `rank` others, of any vocabulary of 100 tokens and more.
  [[nodiscard]] static TokenLogprob top(const std::vector<int32_t>& past, int rank) {
    const auto token = (hash_of(past, 0) + static_cast<uint32_t>(rank)) % 100;
    return {static_cast<int32_t>(token), -0.125F * static_cast<float>(rank + 1)};
  }

  [[nodiscard]] static uint32_t hash_of(const std::vector<int32_t>& past, uint64_t seed) {
    uint32_t hash = 2166136261U ^ static_cast<uint32_t>(seed);  // FNV-1a
    for (const int32_t token : past) hash = (hash ^ static_cast<uint32_t>(token)) * 16777619U;
    return hash;
  }

  // What penalties make of the seed: of a text with that many prompt tokens.
  [[nodiscard]] static uint64_t penalised(uint64_t seed, const std::vector<int32_t>& text, int prompt_tokens) {
    for (const int32_t token : text) seed = seed * 31 + static_cast<uint64_t>(token) + 1;
    return seed * 31 + static_cast<uint64_t>(prompt_tokens);
  }

  // `count` tokens after `prompt`, one after another; the first `prompt_tokens` of it are the request's prompt, or all.
  [[nodiscard]] std::vector<int32_t> continuation(std::vector<int32_t> prompt, int count, const Sampling& sampling = {},
                                                  int prompt_tokens = 0) const {
    const size_t start = prompt.size();
    if (prompt_tokens == 0) prompt_tokens = static_cast<int>(start);
    for (int i = 0; i < count; ++i) {
      const uint64_t seed = sampling.penalises() ? penalised(sampling.seed, prompt, prompt_tokens) : sampling.seed;
      prompt.push_back(next(prompt, seed, sampling.bias, sampling.bias_count));
    }
    return {prompt.begin() + static_cast<std::ptrdiff_t>(start), prompt.end()};
  }
};

// Graphs that are launched before their requests are known, as begin() waits for these.
class LateRequests {
 public:
  // How many got a request, and how many did not; once the device is at rest.
  [[nodiscard]] int asked_late() const { return early_ - sent_away_; }
  [[nodiscard]] int sent_away() const { return sent_away_; }
  // None that is missing will come.
  void end() { ended_ = true; }

 protected:
  // On the host's thread, of each graph that it launches.
  void note_launch(gpu::RoundRequest& request) {
    if (is_awaited(request)) ++early_;
  }
  [[nodiscard]] static bool is_awaited(gpu::RoundRequest& request) {
    return (std::atomic_ref<uint64_t>(request.sequence).load(std::memory_order_acquire) & gpu::kAwaited) != 0;
  }

  // Waits for a round's request, if it is not there. False: it was sent away, or cancelled; the result says so.
  bool await_request(gpu::RoundRequest& request, gpu::HostControl& control, gpu::RoundResult& result,
                     uint64_t sequence) {
    std::atomic_ref<uint64_t> number(request.sequence);
    const uint64_t awaited = sequence | gpu::kAwaited;
    const auto cancelled = [&] {
      return std::atomic_ref<uint64_t>(control.cancelled_through).load(std::memory_order_acquire) >= sequence;
    };
    while (number.load(std::memory_order_acquire) == awaited && !cancelled() && !ended_) std::this_thread::yield();
    const uint64_t now = number.load(std::memory_order_acquire);
    if (now == sequence) return true;
    if (now != 0 && now != awaited) std::abort();  // the block is not this round's
    ++sent_away_;
    result.status = gpu::RoundStatus::kSkipped;
    result.count = result.stopped = 0;
    return false;
  }

 private:
  std::atomic<bool> ended_{false};
  std::atomic<int> early_{0};
  std::atomic<int> sent_away_{0};
};

// What else runs on the device's stream, in its turn: a head that reads what the rounds leave.
class StreamPart : public LateRequests {
 public:
  static constexpr int kFirstGraph = 300;  // handles from here on are the part's graphs
  static constexpr int kHangs = -1;

  virtual ~StreamPart() = default;
  // On the host's thread, of a graph, or of a copy between its pages (0): what the driver's call returns.
  virtual int launch(int graph) = 0;
  // On the device's thread: kSuccess, an error that the stream keeps reporting from then on, or kHangs.
  virtual int run(int graph) = 0;
  // Whether these bytes are of its pages.
  [[nodiscard]] virtual bool holds(uint64_t address, size_t bytes) const = 0;
};

class FakeDevice : public LateRequests {
 public:
  // Sequence numbers; 0: never.
  struct Script {
    FakeModel model = {};
    int context = 1024;
    int page_count = 32;
    int round_us = 0;                        // a round takes this long,
    std::array<int, kCostSizes> graph_us{};  // one of this graph so much longer,
    std::array<int, kCostSizes> far_us{};    // and so much behind 1,000 positions: half of it behind 500,
    int wide_from = 0;                       // the first graphs have wide ones, meant from there on; 0: none has
    int wide_sizes = 4;                      // so many of them,
    std::array<int, kCostSizes> wide_us{};   // which take so much longer than the others behind 1,000 positions
    int prefill_us = 0;                      // and the prefill's graph,
    int chunk_us = 0;                        // and that of a chunk,
    int drawing_us = 0;                      // and so much more one that draws
    bool chunks = false;                     // there is one
    bool last_chunks = false;                // and one that draws
    bool fast = false;                       // which alone reads prompts
    bool has_plain = false;                  // there is a round of one token with the plain sampler
    int plain_us = 0;                        // which takes this long besides round_us
    bool has_scan = false;                   // likewise
    int scan_us = 0;
    int burst_rounds = 0;  // of a burst, of which there is one for each sampler; 0: there are none
    bool redraws = true;   // there are graphs that draw again
    int medusa_heads = 0;
    int medusa_rank = 0;           // at which each head names the right token; -1: nowhere
    bool fails_copies = false;     // copying a page fails
    uint64_t launch_error_at = 0;  // launching this round fails
    int launch_error = kOutOfMemory;
    uint64_t stream_error_at = 0;  // this round ends in an error that the stream keeps reporting
    int stream_error = kIllegalAddress;
    uint64_t hang_at = 0;     // this round never ends
    uint64_t silent_at = 0;   // this round ends without an answer
    uint64_t skipped_at = 0;  // this round says that it was skipped, though nobody has cancelled it
    uint64_t not_finite_at = 0;
    uint64_t absurd_at = 0;  // this round's answer is of no such round
    std::function<void(gpu::RoundResult&)> absurdity = nullptr;
    // Called on the device's thread: before a round begins; and when it is not skipped, before it looks at its setting.
    std::function<void(uint64_t)> before = nullptr;
    std::function<void(uint64_t)> begun = nullptr;
  };

  struct Record {
    uint64_t sequence;
    gpu::RoundMode mode;
    gpu::RoundStatus status;
    int graph;  // nodes of the graph that was launched; 0: prefill or draft; kChunkTokens: a chunk's
    graph::Sampler sampler;
    bool in_burst;
    bool is_wide;
    int count;
    int emitted;  // of a draft: 1 if it came right after the round whose hidden state it was to read
    uint32_t setting;
    int position;                 // that was asked for
    std::vector<int32_t> prompt;  // the tokens of a prompt that were read
  };

  explicit FakeDevice(Script script)
      : script_(std::move(script)),
        requests_(gpu::kRoundSlots),
        results_(gpu::kRoundSlots),
        host_pages_(static_cast<size_t>(pages_for(script_.context)), -1),
        host_text_(static_cast<size_t>(script_.context), -1),
        host_mask_(static_cast<size_t>(script_.model.vocabulary + 31) / 32, 0),
        host_chunks_(size_t{gpu::kRoundSlots} * gpu::kChunkTokens, -1),
        pool_(static_cast<size_t>(script_.page_count) * kPageTokens, -1),
        text_(static_cast<size_t>(script_.context) + kMaxTokensPerRound, -1),
        pages_(host_pages_.size(), -1) {
    thread_ = std::thread([this] { run(); });
  }
  ~FakeDevice() {
    {
      const std::lock_guard lock(mutex_);
      stopping_ = true;
      end();
      if (part_ != nullptr) part_->end();
    }
    wake_.notify_all();
    thread_.join();
  }
  FakeDevice(const FakeDevice&) = delete;
  FakeDevice& operator=(const FakeDevice&) = delete;

  // Before anything is launched. It must outlive the device.
  void attach(StreamPart& part) {
    const std::lock_guard lock(mutex_);
    part_ = &part;
    ring_.resize(gpu::kTapSlots);
  }

  [[nodiscard]] graph::GraphProgram program() {
    graph::GraphProgram program;
    for (int i = 0; i < kCostSizes; ++i) program.rounds[i] = reinterpret_cast<void*>(uintptr_t{1} + i);
    const bool has[graph::kSamplers] = {true, script_.has_plain, script_.has_scan};
    for (uintptr_t i = 0; i < graph::kSamplers; ++i) {
      if (has[i] && i > 0) program.singles[i].round = reinterpret_cast<void*>(kSingles + i);
      if (has[i] && script_.burst_rounds > 0) program.singles[i].burst = reinterpret_cast<void*>(kBursts + i);
    }
    program.burst_rounds = script_.burst_rounds;
    if (program.wide.from = script_.wide_from; program.wide.from > 0) {
      const auto widened = [](void* graph) {
        return graph == nullptr ? nullptr : reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(graph) + kWide);
      };
      for (int i = 0; i < script_.wide_sizes; ++i) program.wide.rounds[i] = widened(program.rounds[i]);
      for (int i = 0; i < graph::kSamplers; ++i) {
        program.wide.singles[i] = {widened(program.singles[i].round), widened(program.singles[i].burst)};
      }
    }
    program.prefill = reinterpret_cast<void*>(kPrefill);
    if (script_.chunks) {
      program.chunk = reinterpret_cast<void*>(kChunk);
      program.chunks = host_chunks_.data();
      if (script_.fast) {
        program.prefill = program.chunk;
        program.reuse = Reuse::kPrompt;
      }
      if (script_.last_chunks) program.last_chunk = reinterpret_cast<void*>(kLastChunk);
    }
    if (script_.redraws) {
      program.redraw = reinterpret_cast<void*>(kRedraw);
      program.redraws = reinterpret_cast<void*>(kRedraws);
      program.mask = host_mask_.data();
    }
    if (script_.medusa_heads > 0) {
      program.medusa = reinterpret_cast<void*>(uintptr_t{200});
      program.medusa_heads = script_.medusa_heads;
      program.medusa_bytes = 70;
    }
    program.stream = this;
    program.context = this;
    program.requests = requests_.data();
    program.results = results_.data();
    program.control = &control_;
    program.pages = host_pages_.data();
    program.text = host_text_.data();
    program.vocabulary = script_.model.vocabulary;
    program.context_tokens = script_.context;
    program.page_count = script_.page_count;
    program.weight_bytes = 1000;
    program.kv_bytes = static_cast<int64_t>(pool_.size() * sizeof(int32_t));
    program.kv_pages = reinterpret_cast<uintptr_t>(pool_.data());
    program.name = "graph/fake";
    program.library = "none";
    return program;
  }

  [[nodiscard]] static graph::Driver driver() {
    graph::Driver driver;
    driver.set_context = [](void* context) { return context == nullptr ? 1 : graph::kSuccess; };
    driver.launch = [](void* graph, void* stream) { return static_cast<FakeDevice*>(stream)->launch(graph); };
    driver.copy = [](uint64_t to, uint64_t from, size_t bytes, void* stream) {
      return static_cast<FakeDevice*>(stream)->copy({.to = to, .from = from, .bytes = bytes});
    };
    driver.query = [](void* stream) { return static_cast<FakeDevice*>(stream)->query(); };
    driver.error_name = [](int error, const char** name) {
      *name = error == kIllegalAddress ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_OUT_OF_MEMORY";
      return graph::kSuccess;
    };
    driver.error_text = [](int error, const char** text) {
      *text = error == kIllegalAddress ? "an illegal memory access was encountered" : "out of memory";
      return graph::kSuccess;
    };
    return driver;
  }

  // What has been run; call it when the device is at rest.
  [[nodiscard]] std::vector<Record> records() {
    const std::lock_guard lock(mutex_);
    return records_;
  }
  void forget() {
    const std::lock_guard lock(mutex_);
    records_.clear();
  }
  // How many rounds have been launched in all.
  [[nodiscard]] uint64_t launched() {
    const std::lock_guard lock(mutex_);
    return launched_;
  }
  // Whether what was launched last has no request yet.
  [[nodiscard]] bool waits() {
    const std::lock_guard lock(mutex_);
    return is_awaited(requests_[launched_ % gpu::kRoundSlots]);
  }
  // Rounds up to this one are to be skipped.
  [[nodiscard]] uint64_t cancelled() {
    return std::atomic_ref<uint64_t>(control_.cancelled_through).load(std::memory_order_acquire);
  }
  // Sequence numbers count from the program's start, measuring included: scripts that mean "the nth from now" call
  // this.
  void arm(const std::function<void(Script&, uint64_t next)>& change) {
    const std::lock_guard lock(mutex_);
    change(script_, launched_ + 1);
  }

  // For a part, on the device's thread. The tap that a position's slot of the ring holds: all that the target knew
  // there, the text up to the position that has left it.
  [[nodiscard]] const std::vector<int32_t>& tap(int position) const { return ring_.at(tap_slot(position)); }
  [[nodiscard]] const gpu::State& state() const { return state_; }
  // What the last round has fed and kept, from the position `base` on, and the token behind each; none: it ended the
  // request, or drew nothing.
  struct Kept {
    int base = 0;
    std::vector<int32_t> next;
  };
  [[nodiscard]] Kept kept() const { return state_.stopped != 0 ? Kept{} : kept_; }
  // The tokens up to the root of the last round, of a request with penalties.
  [[nodiscard]] std::vector<int32_t> counted_text() const { return {text_.begin(), text_.begin() + state_.counted}; }

 private:
  // Graphs of rounds of one token, by sampler.
  static constexpr uintptr_t kSingles = 20, kBursts = 30;
  // The wide one's handle is another one's and this.
  static constexpr uintptr_t kWide = 40;
  // What reads a prompt: up to 64 tokens, or a chunk, or one that draws.
  static constexpr uintptr_t kPrefill = 100, kChunk = 101, kLastChunk = 102;
  // What draws again, once or up to 64 times.
  static constexpr uintptr_t kRedraw = 210, kRedraws = 211;

  // What the stream does in turn: a graph, or a copy where there is none.
  struct Work {
    int graph = 0;
    uint64_t to = 0, from = 0;  // addresses
    size_t bytes = 0;
  };

  int launch(void* graph) {
    const std::lock_guard lock(mutex_);
    if (error_ != 0) return error_;
    if (graph == nullptr) std::abort();
    const auto handle = reinterpret_cast<uintptr_t>(graph);
    if (handle >= StreamPart::kFirstGraph) {
      if (const int error = part_->launch(static_cast<int>(handle)); error != graph::kSuccess) return error;
      push({.graph = static_cast<int>(handle)});
      return graph::kSuccess;
    }
    const uint64_t last = launched_ + static_cast<uint64_t>(rounds_of(static_cast<int>(handle)));
    if (script_.launch_error_at > launched_ && script_.launch_error_at <= last) return script_.launch_error;
    if (last - begun_ > gpu::kRoundSlots) std::abort();
    note_launch(requests_[last % gpu::kRoundSlots]);
    launched_ = last;
    push({.graph = static_cast<int>(handle)});
    return graph::kSuccess;
  }

  int copy(const Work& work) {
    const std::lock_guard lock(mutex_);
    if (error_ != 0) return error_;
    if (part_ != nullptr && part_->holds(work.to, work.bytes)) {
      if (const int error = part_->launch(0); error != graph::kSuccess) return error;
    } else if (script_.fails_copies) {
      return kOutOfMemory;
    }
    push(work);
    return graph::kSuccess;
  }

  void push(const Work& work) {
    if (pushed_ - taken_ == queue_.size()) std::abort();
    queue_[pushed_++ % queue_.size()] = work;
    wake_.notify_all();
  }

  // Within the pages.
  void copy_page(const Work& work) {
    const uint64_t first = reinterpret_cast<uintptr_t>(pool_.data()), bytes = pool_.size() * sizeof(int32_t);
    const bool parts = part_ != nullptr && part_->holds(work.to, work.bytes);
    for (const uint64_t address : {work.to, work.from}) {
      const bool own = address >= first && address + work.bytes <= first + bytes;
      if (parts ? !part_->holds(address, work.bytes) : !own) std::abort();
    }
    std::memcpy(reinterpret_cast<void*>(work.to), reinterpret_cast<const void*>(work.from), work.bytes);
  }

  int query() {
    const std::lock_guard lock(mutex_);
    if (error_ != 0) return error_;
    return pushed_ == taken_ && !busy_ ? graph::kSuccess : graph::kNotReady;
  }

  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [this] { return stopping_ || (pushed_ > taken_ && error_ == 0); });
      if (stopping_) return;
      const Work work = queue_[taken_++ % queue_.size()];
      if (work.graph == 0) {
        copy_page(work);
        continue;
      }
      busy_ = true;
      if (work.graph >= StreamPart::kFirstGraph) {
        lock.unlock();
        const int end = part_->run(work.graph);
        lock.lock();
        if (end == StreamPart::kHangs) {
          wake_.wait(lock, [this] { return stopping_; });
          return;
        }
        if (end != graph::kSuccess) error_ = end;
        busy_ = false;
        continue;
      }
      for (int rest = rounds_of(work.graph); rest > 0 && error_ == 0; --rest) {
        ++begun_;
        const uint64_t sequence = state_.sequence + 1;
        if (sequence == script_.hang_at) {
          wake_.wait(lock, [this] { return stopping_; });
          return;
        }
        lock.unlock();
        const size_t slot = sequence % gpu::kRoundSlots;
        const bool asked = await_request(requests_[slot], control_, results_[slot], sequence);
        lock.lock();
        if (!asked) {
          skip(sequence);
          continue;
        }
        const Script script = script_;
        lock.unlock();
        if (script.before) script.before(sequence);
        const Record record = round(narrow(work.graph), sequence, script, narrow(work.graph) != work.graph);
        lock.lock();
        records_.push_back(record);
        if (sequence == script_.stream_error_at) error_ = script_.stream_error;
      }
      busy_ = false;
    }
  }

  [[nodiscard]] static int narrow(int graph) {
    constexpr int kFirst = static_cast<int>(kWide);
    return graph > kFirst && graph < static_cast<int>(kPrefill) ? graph - kFirst : graph;
  }
  [[nodiscard]] static bool is_burst(int graph) { return graph >= static_cast<int>(kBursts) && graph < 100; }
  [[nodiscard]] int rounds_of(int graph) const { return is_burst(narrow(graph)) ? script_.burst_rounds : 1; }
  [[nodiscard]] static bool is_chunk(int graph) {
    return graph == static_cast<int>(kChunk) || graph == static_cast<int>(kLastChunk);
  }
  // Nodes that a graph holds; 0: it is no round's.
  [[nodiscard]] static int nodes_of(int graph) {
    if (is_chunk(graph)) return gpu::kChunkTokens;
    return graph >= 100 ? 0 : graph >= static_cast<int>(kSingles) ? 1 : kCostTokens[graph - 1];
  }
  [[nodiscard]] static graph::Sampler sampler_of(int graph) {
    return static_cast<graph::Sampler>(nodes_of(graph) == 1 && graph > kCostSizes ? graph % 10 : 0);
  }
  [[nodiscard]] static int far_us(int graph, const Script& script, bool is_wide) {
    if (graph < 1 || graph > kCostSizes) return 0;
    const auto size = static_cast<size_t>(graph) - 1;
    return script.far_us[size] + (is_wide ? script.wide_us[size] : 0);
  }
  [[nodiscard]] static int more_us(int graph, const Script& script) {
    if (graph == static_cast<int>(kPrefill)) return script.prefill_us;
    if (graph == static_cast<int>(kLastChunk)) return script.chunk_us + script.drawing_us;
    if (graph >= 100) return graph == static_cast<int>(kChunk) ? script.chunk_us : 0;
    if (sampler_of(graph) == graph::Sampler::kPlain) return script.plain_us;
    if (sampler_of(graph) == graph::Sampler::kScan) return script.scan_us;
    return graph >= static_cast<int>(kSingles) ? script.graph_us[0] : script.graph_us[static_cast<size_t>(graph) - 1];
  }

  // A round that was sent away.
  void skip(uint64_t sequence) {
    ++state_.sequence;
    state_.stopped = 1;
    kept_ = {};
    std::atomic_ref<uint64_t>(results_[sequence % gpu::kRoundSlots].sequence)
        .store(sequence, std::memory_order_release);
  }

  // One graph, as begin ... commit run it.
  Record round(int graph, uint64_t sequence, const Script& script, bool is_wide) {
    const gpu::RoundRequest& request = requests_[sequence % gpu::kRoundSlots];
    gpu::RoundResult& result = results_[sequence % gpu::kRoundSlots];
    Record record{.sequence = sequence,
                  .mode = request.mode,
                  .status = gpu::RoundStatus::kOk,
                  .graph = nodes_of(graph),
                  .sampler = sampler_of(graph),
                  .in_burst = is_burst(graph),
                  .is_wide = is_wide,
                  .count = request.count,
                  .emitted = 0,
                  .setting = request.setting,
                  .position = request.position,
                  .prompt = {}};
    if (is_burst(graph) && request.mode != gpu::RoundMode::kContinue) std::abort();
    if ((graph == 200) != (request.mode == gpu::RoundMode::kMedusa)) std::abort();
    const bool redraws = request.mode == gpu::RoundMode::kRedraw;
    if ((graph >= static_cast<int>(kRedraw)) != redraws) std::abort();
    if (redraws && graph == static_cast<int>(kRedraw) && request.count != 1) std::abort();
    if (request.sequence != sequence) std::abort();  // the block is not this round's
    const int forced = request.mode == gpu::RoundMode::kTake ? request.forced : 0;
    if (forced < 0 || (forced > 0 && forced >= request.count)) std::abort();
    const bool prompts = request.mode == gpu::RoundMode::kPrefill, chunk = is_chunk(graph);
    if (graph == static_cast<int>(kLastChunk) &&
        (request.mode != gpu::RoundMode::kTake || forced != request.count - 1)) {
      std::abort();
    }
    for (int i = 1; i <= forced && !chunk; ++i) {
      if (request.parents[i] != i - 1) std::abort();  // no chain
    }
    if ((graph < 100 || chunk) && request.count > record.graph) std::abort();
    if (graph >= static_cast<int>(kPrefill) && graph <= static_cast<int>(kChunk) && !prompts) std::abort();
    if (prompts) check_prompt(request, chunk ? gpu::kChunkTokens : gpu::kTreeTokens, script.context);
    const int32_t* tokens = chunk ? chunk_of(sequence) : request.tokens;
    for (int i = 0; i < request.count && (prompts || request.mode == gpu::RoundMode::kTake); ++i) {
      if (tokens[i] < 0 || tokens[i] >= script.model.vocabulary) std::abort();  // no such embedding
    }
    ++state_.sequence;
    if (request.mode != gpu::RoundMode::kMedusa) kept_ = {};
    const int64_t start = monotonic_ns();
    const int64_t lasts = (script.round_us + more_us(graph, script)) * int64_t{1000} +
                          int64_t{far_us(graph, script, is_wide)} * std::max(request.position, 0);
    result.begin_ns = static_cast<uint64_t>(start);
    result.count = 0;
    result.stopped = 0;
    const bool continues = request.mode == gpu::RoundMode::kContinue;
    const bool behind = request.mode == gpu::RoundMode::kMedusa && request.position < 0;
    const int position = behind ? state_.position : request.position;
    if (sequence <= cancelled() || sequence == script.skipped_at || ((continues || behind) && state_.stopped != 0)) {
      record.status = gpu::RoundStatus::kSkipped;
    } else if (sequence == script.silent_at) {
      return record;
    } else {
      if (script.begun) script.begun(sequence);
      while (monotonic_ns() - start < lasts) std::this_thread::yield();
      if (request.setting != state_.setting) copy_setting(request);
      if (record.sampler != graph::Sampler::kFull && !is_plain(state_.sampling)) std::abort();
      const int base = continues ? state_.position : position + forced;
      if (state_.sampling.penalises != 0 && !prompts) read_text(request, base + 1);
      if (prompts) {
        record.prompt.assign(tokens, tokens + request.count);
        for (int i = 0; i < request.count; ++i) cached(request.position + i) = tokens[i];
        if (chunk) std::fill_n(chunk_of(sequence), gpu::kChunkTokens, -1);  // nothing of it is the next one's
        leave_taps(request.position, request.count);
        hidden_position_ = -1;
      } else if (request.mode == gpu::RoundMode::kMedusa) {
        record.emitted = hidden_position_ == position ? 1 : 0;
        draft(request, position, result, script.medusa_rank);
      } else if (redraws) {
        redraw(request, result);
        record.emitted = result.count;
        if (result.count == 0) record.status = gpu::RoundStatus::kNotFinite;
      } else if (chunk) {
        record.prompt.assign(tokens, tokens + request.count);
        verify_last(request, tokens, result);
        std::fill_n(chunk_of(sequence), gpu::kChunkTokens, -1);
        record.emitted = result.count;
      } else {
        verify(request, result, continues, forced);
        record.emitted = result.count;
      }
      if (sequence == script.not_finite_at) {
        record.status = gpu::RoundStatus::kNotFinite;
        result.count = 0;
        state_.stopped = 1;
      }
      if (sequence == script.absurd_at) script.absurdity(result);
    }
    result.status = record.status;
    std::atomic_ref<uint64_t>(result.sequence).store(sequence, std::memory_order_release);
    // By its own clock it takes just as long as the script says, whatever else the machine does.
    result.end_ns = static_cast<uint64_t>(lasts > 0 ? start + lasts : monotonic_ns());
    if (sequence == script.stream_error_at) {
      const std::lock_guard lock(mutex_);
      error_ = script.stream_error;
    }
    return record;
  }

  // Of a request for a part of a prompt.
  static void check_prompt(const gpu::RoundRequest& request, int most, int context) {
    if (request.count < 1 || request.count > most || request.max_tokens != 0) std::abort();
    if (request.position < 0 || request.count > context - request.position) std::abort();
  }
  // Where the host has written the tokens of that round's chunk.
  [[nodiscard]] int32_t* chunk_of(uint64_t sequence) {
    return host_chunks_.data() + sequence % gpu::kRoundSlots * gpu::kChunkTokens;
  }

  // What a sampler that is not the full one can do.
  [[nodiscard]] static bool is_plain(const gpu::Sampling& sampling) {
    return (sampling.temperature <= 0.0F || (sampling.top_k == 0 && sampling.top_p >= 1.0F)) &&
           sampling.bias_count == 0 && sampling.penalises == 0 && sampling.top_logprobs < 0;
  }

  void copy_setting(const gpu::RoundRequest& request) {
    state_.setting = request.setting;
    state_.sampling = request.sampling;
    state_.stop_count = request.stop_count;
    std::copy_n(request.stops, request.stop_count, state_.stops);
    std::copy_n(request.biases, request.sampling.bias_count, state_.biases);
    std::copy_n(host_pages_.data(), request.page_count, pages_.data());
  }

  // The text up to the root: the host's where it is new, else what this device has emitted.
  void read_text(const gpu::RoundRequest& request, int count) {
    if (request.text != state_.text) std::copy_n(host_text_.begin(), count, text_.begin());
    state_.text = request.text;
    state_.counted = count;
    state_.prompt_tokens = request.prompt_tokens;
  }

  // The token after `past` by the request's sampling. `way` of its last tokens are a draft's.
  [[nodiscard]] int32_t draw(const std::vector<int32_t>& past, size_t way) const {
    return draw(past, way, [](int32_t) { return true; });
  }
  template <typename Allowed>
  [[nodiscard]] int32_t draw(const std::vector<int32_t>& past, size_t way, const Allowed& allowed) const {
    uint64_t seed = state_.sampling.seed;
    if (state_.sampling.penalises != 0) {
      std::vector<int32_t> text(text_.begin(), text_.begin() + state_.counted);
      text.insert(text.end(), past.end() - static_cast<std::ptrdiff_t>(way), past.end());
      seed = FakeModel::penalised(seed, text, state_.prompt_tokens);
    }
    return script_model().next(past, seed, state_.biases, state_.sampling.bias_count, allowed);
  }

  // The first `forced` nodes are the prompt's.
  void verify(const gpu::RoundRequest& request, gpu::RoundResult& result, bool continues, int forced) {
    const int base = continues ? state_.position : request.position + forced;
    const int32_t root = continues ? state_.token : request.tokens[forced];
    for (int i = 0; i < forced; ++i) cached(request.position + i) = request.tokens[i];
    leave_taps(request.position, forced);
    std::vector<int32_t> past;
    for (int position = 0; position < base; ++position) past.push_back(cached(position));
    leave_rows(request, past, root, continues, forced);
    state_.stopped = 0;
    for (int node = forced; node >= 0;) {
      past.push_back(node == forced ? root : request.tokens[node]);
      cached(base + result.count) = past.back();
      gpu::EmittedToken& out = result.tokens[result.count++];
      out.token = draw(past, static_cast<size_t>(result.count) - 1);
      out.node = node;
      out.logprob = -0.5F;
      out.top_count = std::max(state_.sampling.top_logprobs, 0);
      for (int rank = 0; rank < out.top_count; ++rank) out.top[rank] = {(out.token + rank) % 100, -0.5F};
      if (std::count(state_.stops, state_.stops + state_.stop_count, out.token) > 0) state_.stopped = 1;
      if (state_.stopped != 0 || result.count == request.max_tokens) break;
      int next = -1;
      for (int child = node + 1; child < request.count && !continues; ++child) {
        if (request.parents[child] == node && request.tokens[child] == out.token) next = child;
      }
      node = next;
    }
    leave_taps(base, result.count);
    kept_ = {base - forced, {request.tokens + 1, request.tokens + 1 + forced}};
    for (int i = 0; i < result.count; ++i) kept_.next.push_back(result.tokens[i].token);
    for (int i = 0; i < result.count && state_.sampling.penalises != 0; ++i) {
      text_[static_cast<size_t>(base + 1 + i)] = result.tokens[i].token;
    }
    state_.token = result.tokens[result.count - 1].token;
    state_.position = hidden_position_ = base + result.count;
    result.stopped = state_.stopped;
  }

  // The tokens of a chunk, the last of which is a round of its own.
  void verify_last(const gpu::RoundRequest& request, const int32_t* tokens, gpu::RoundResult& result) {
    gpu::RoundRequest last = request;
    last.count = 1;
    last.position += request.forced;
    last.tokens[0] = tokens[request.forced];
    last.parents[0] = 0;
    for (int i = 0; i < request.forced; ++i) cached(request.position + i) = tokens[i];
    leave_taps(request.position, request.forced);
    verify(last, result, /*continues=*/false, /*forced=*/0);
  }

  // Of positions whose tokens the pages hold.
  void leave_taps(int first, int count) {
    if (part_ == nullptr) return;
    std::vector<int32_t> past;
    for (int position = 0; position < first; ++position) past.push_back(cached(position));
    for (int position = first; position < first + count; ++position) {
      past.push_back(cached(position));
      ring_[tap_slot(position)] = past;
    }
  }
  [[nodiscard]] static size_t tap_slot(int position) { return static_cast<size_t>(position) % gpu::kTapSlots; }

  // What there is to draw from again: what each node knows of the text, the root's and its ancestors' tokens.
  void leave_rows(const gpu::RoundRequest& request, const std::vector<int32_t>& past, int32_t root, bool continues,
                  int forced) {
    rows_.assign(static_cast<size_t>(continues ? 1 : request.count), {});
    for (int node = forced; node < static_cast<int>(rows_.size()); ++node) {
      std::vector<int32_t>& row = rows_[static_cast<size_t>(node)];
      row = node == forced ? past : rows_[request.parents[node]];
      row.push_back(node == forced ? root : request.tokens[node]);
    }
  }

  // One draw under the mask, or the log-probabilities of tokens. No round continues it.
  void redraw(const gpu::RoundRequest& request, gpu::RoundResult& result) {
    state_.stopped = 1;
    result.count = request.count;
    for (int i = 0; i < request.count; ++i) {
      const std::vector<int32_t>& row = rows_.at(request.parents[i]);
      gpu::EmittedToken& out = result.tokens[i];
      out.token = request.tokens[i];
      out.logprob = FakeModel::logprob(row, out.token);
      out.node = i;
      out.top_count = out.token >= 0 ? std::max(state_.sampling.top_logprobs, 0) : 0;
      for (int rank = 0; rank < out.top_count; ++rank) {
        const TokenLogprob top = FakeModel::top(row, rank);
        out.top[rank] = {top.token, top.logprob};
      }
      if (out.token >= 0) continue;
      if (request.count != 1 || static_cast<int>(row.size()) != request.position + 1) std::abort();
      const std::vector<uint32_t> mask = host_mask_;
      out.token = draw(row, 0, [&](int32_t token) { return (mask[token / 32] >> (token % 32) & 1) != 0; });
      out.logprob = -0.25F;
      if (out.token < 0) {
        result.count = 0;
        return;
      }
      if (state_.sampling.penalises != 0) text_[static_cast<size_t>(request.position) + 1] = out.token;
      state_.token = out.token;
      state_.position = hidden_position_ = request.position + 1;
    }
  }

  // Each head's ten candidates, the right one at `right` among them.
  void draft(const gpu::RoundRequest& request, int end, gpu::RoundResult& result, int right) {
    std::vector<int32_t> past;
    for (int position = 0; position < end; ++position) past.push_back(cached(position));
    past.push_back(state_.token);
    result.count = request.count;
    for (int head = 0; head < request.count; ++head) {
      const int32_t next = draw(past, static_cast<size_t>(head));
      past.push_back(next);
      gpu::EmittedToken& out = result.tokens[head];
      out.top_count = gpu::kMedusaRanks;
      for (int rank = 0; rank < gpu::kMedusaRanks; ++rank) {
        const int32_t token = rank == right ? next : (next + 1 + rank) % script_model().vocabulary;
        out.top[rank] = {token, 3.0F - 4.0F * static_cast<float>(rank)};
      }
    }
  }

  [[nodiscard]] const FakeModel& script_model() const { return script_.model; }
  [[nodiscard]] int32_t& cached(int position) {
    const int32_t page = pages_.at(static_cast<size_t>(position / kPageTokens));
    return pool_.at(static_cast<size_t>(page) * kPageTokens + static_cast<size_t>(position % kPageTokens));
  }

  Script script_;
  Kept kept_;
  // Mapped memory.
  std::vector<gpu::RoundRequest> requests_;
  std::vector<gpu::RoundResult> results_;
  gpu::HostControl control_{};
  std::vector<int32_t> host_pages_;
  std::vector<int32_t> host_text_;
  std::vector<uint32_t> host_mask_;
  std::vector<int32_t> host_chunks_;
  // Device memory; the thread's.
  std::vector<int32_t> pool_;   // [page_count, kPageTokens] token fed at each position
  std::vector<int32_t> text_;   // tokens by position, of a request with penalties
  std::vector<int32_t> pages_;  // what the device has copied of host_pages_
  gpu::State state_{};
  std::vector<std::vector<int32_t>> rows_;  // [nodes of the last round] the text that each stands behind, and its own
  std::vector<std::vector<int32_t>> ring_;  // [kTapSlots] taps, where there is a part that reads them
  int hidden_position_ = -1;                // of the token that follows the one whose hidden state was left last

  StreamPart* part_ = nullptr;  // null: there is none
  std::mutex mutex_;
  std::condition_variable wake_;
  std::array<Work, 16> queue_{};  // a launch allocates nothing
  uint64_t pushed_ = 0;           // to the queue
  uint64_t taken_ = 0;            // from it
  std::vector<Record> records_;
  uint64_t launched_ = 0;  // rounds
  uint64_t begun_ = 0;     // likewise
  int error_ = 0;
  bool busy_ = false;
  bool stopping_ = false;
  std::thread thread_;
};

// The draft model is played by a device of its own: nothing of it may depend on the target's. It has the rounds that
// ull/gpu captures for one.
inline graph::GraphProgram program_with_draft(FakeDevice& target, FakeDevice& draft) {
  graph::GraphProgram program = target.program(), own = draft.program();
  for (int i = 0; i < kCostSizes; ++i) {
    if (kCostTokens[i] != 1 && kCostTokens[i] != 8) own.rounds[i] = nullptr;
  }
  own.context = program.context;
  program.draft = std::make_shared<const graph::GraphProgram>(std::move(own));
  return program;
}

}  // namespace ull::test
