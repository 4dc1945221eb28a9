// An EAGLE head for the graph executor, played on the stream of the device that plays the target (fake_device.h). Its
// passes behave as kernels/params.h says of RoundMode::kEagle. An entry of its pages is a function of the tap and the
// token that it was made of, and what a ranked entry names is right only if every entry that it attends to is one of
// its own text: one that is missing, stale or foreign shows as a draft that names nothing right.
#pragma once

#include <iterator>
#include <memory>

#include "draft/eagle_tree.h"
#include "fake_head.h"

namespace ull::test {

class FakeEagle final : public FakeHead {
 public:
  // Record::graph: the most entries that the pass's graph holds, or kFill: it is the one that ranks nothing.
  static constexpr int kFill = 0;

  FakeEagle(Script script, const FakeDevice::Script& target) : FakeHead(std::move(script), target) {}

  // For the executor of that device's program.
  [[nodiscard]] graph::EagleProgram program(FakeDevice& device) {
    graph::EagleProgram program;
    describe(device, program);
    program.fill = handle(0);
    program.first = handle(1);
    for (int i = 0; i < graph::kEagleSizes; ++i) program.levels[i] = handle(2 + i);
    return program;
  }

 private:
  // What an entry is made of: a tap, which knows the text up to the entry's position, and the token behind it.
  static uint32_t entry_of(const Tokens& tap, int32_t token) {
    return (FakeModel::hash_of(tap, 1) ^ static_cast<uint32_t>(token)) * 16777619U;
  }

  [[nodiscard]] uint32_t entry(const Tokens& tap, int32_t token) const override { return entry_of(tap, token); }

  // kind: 0: fill, 1: first, then the levels.
  Record pass(int kind, uint64_t sequence, const Script& script, gpu::RoundResult& result) override {
    gpu::RoundRequest request = requests_[sequence % gpu::kRoundSlots];
    const bool behind = request.position < 0, nothing = behind && !take_kept(request);
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
    if (kind == 0) take(script.fill_us);
    copy_setting(request);
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
    name(next, knows(wrong, attended, script), script, out);
    return wrong;
  }

  int depths_[gpu::kTreeTokens] = {};
};

inline graph::GraphProgram program_with_eagle(FakeDevice& target, FakeEagle& eagle) {
  graph::GraphProgram program = target.program();
  program.eagle = std::make_shared<const graph::EagleProgram>(eagle.program(target));
  return program;
}

}  // namespace ull::test
