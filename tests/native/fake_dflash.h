// A DFlash head for the graph executor, played on the stream of the device that plays the target (fake_device.h). Its
// passes behave as kernels/params.h says of RoundMode::kDflashContext, kDflashBlock and kDflashNodes. An entry of its
// pages is a function of the tap that it was made of, and what a block names is right only if all that it attends to is
// of its own text.
#pragma once

#include "draft/eagle_tree.h"
#include "fake_head.h"

namespace ull::test {

class FakeDflash final : public FakeHead {
 public:
  // Record::graph: a context's is the most positions that it takes.
  static constexpr int kBlock = 1, kNodes = 2;
  static constexpr int32_t kMask = 5;

  FakeDflash(Script script, const FakeDevice::Script& target) : FakeHead(std::move(script), target) {}

  // For the executor of that device's program.
  [[nodiscard]] graph::DflashProgram program(FakeDevice& device) {
    graph::DflashProgram program;
    describe(device, program);
    for (int i = 0; i < 2; ++i) program.contexts[i] = handle(i);
    program.block = handle(2);
    if (script_.nodes) program.nodes = handle(3);
    program.block_tokens = script_.block;
    program.mask_token = kMask;
    program.anchor_predicts = script_.anchor_predicts;
    return program;
  }

 private:
  static uint32_t entry_of(const Tokens& tap) { return FakeModel::hash_of(tap, 2); }
  [[nodiscard]] uint32_t entry(const Tokens& tap, int32_t) const override { return entry_of(tap); }

  Record pass(int kind, uint64_t sequence, const Script& script, gpu::RoundResult& result) override {
    gpu::RoundRequest request = requests_[sequence % gpu::kRoundSlots];
    const bool behind = request.position < 0, nothing = behind && !take_kept(request);
    Record record{.sequence = sequence,
                  .status = gpu::RoundStatus::kOk,
                  .graph = kind < 2    ? graph::kDflashContexts[kind]
                           : kind == 2 ? kBlock
                                       : kNodes,
                  .count = request.count,
                  .read = kind < 2 ? request.count : 0,
                  .ranked = request.max_tokens,
                  .start = request.position,
                  .from = request.first,
                  .wrong = 0,
                  .behind = behind};
    result.count = result.stopped = 0;
    const bool skipped = sequence <= cancelled() || sequence == script.skipped_at;
    if (nothing || skipped) record.status = gpu::RoundStatus::kSkipped;
    result.status = record.status;
    if (nothing) return record;
    check(request, sequence, kind);
    if (skipped) return record;
    copy_setting(request);
    if (kind == 1) take(script.fill_us);
    if (kind < 2) {
      for (int i = 0; i < request.count; ++i) {
        cached(request.position + i) = entry_of(device_->tap(request.position + i));
      }
    } else if (kind == 2) {
      record.wrong = run_block(request, script, result);
    } else {
      rank_nodes(request, script, result);
    }
    if (sequence == script.absurd_at) script.absurdity(result);
    return record;
  }

  // Makes a request behind a round one that knows what the round has left; false: it left nothing, or too much.
  bool take_kept(gpu::RoundRequest& request) const {
    const FakeDevice::Kept kept = device_->kept();
    const int count = static_cast<int>(kept.next.size());
    if (count < 1) return false;
    if (request.mode == gpu::RoundMode::kDflashBlock) {
      request.position = kept.base + count;
      request.tokens[0] = kept.next.back();
      return true;
    }
    if (count > request.count) return false;
    request.position = kept.base;
    request.count = count;
    return true;
  }

  // What the kernels rely on.
  void check(const gpu::RoundRequest& request, uint64_t sequence, int kind) const {
    constexpr gpu::RoundMode modes[] = {gpu::RoundMode::kDflashContext, gpu::RoundMode::kDflashContext,
                                        gpu::RoundMode::kDflashBlock, gpu::RoundMode::kDflashNodes};
    const int capacity = kind < 2 ? graph::kDflashContexts[kind] : kind == 2 ? script_.block : gpu::kTreeTokens;
    const int count = request.count, ranked = request.max_tokens;
    if (request.sequence != sequence || request.mode != modes[kind]) std::abort();
    if (count < 1 || count > capacity || request.sampling.penalises != 0 || request.first < 0) std::abort();
    if (kind < 3 && request.position + count > context_) std::abort();  // there is no such rotation
    if (kind < 2) {
      if (ranked != 0) std::abort();
      return;
    }
    for (int i = 0; i < count; ++i) {
      if (request.tokens[i] < 0 || request.tokens[i] >= model_.vocabulary) std::abort();
      if (kind == 2 && i > 0 && request.tokens[i] != kMask) std::abort();
      if (kind == 3 && i > 0 && request.parents[i] >= i) std::abort();
    }
    const int predicted = script_.anchor_predicts ? count : count - 1;
    if (kind == 2 && (script_.nodes ? ranked != 0 : ranked < std::min(1, predicted) || ranked > predicted))
      std::abort();
    if (kind == 3 && (ranked < 1 || ranked > kMaxEagleWidth || ranked > count)) std::abort();
  }

  // The block's text; how many of the entries that it attends to are not of that.
  int run_block(const gpu::RoundRequest& request, const Script& script, gpu::RoundResult& result) {
    const int root = request.position;
    text_ = root == 0 ? Tokens{} : device_->tap(root - 1);
    int wrong = static_cast<int>(text_.size()) == root ? 0 : root;
    Tokens prefix;
    for (int position = 0; position < root && wrong < root; ++position) {
      prefix.push_back(text_[static_cast<size_t>(position)]);
      if (position >= request.first && cached(position) != entry_of(prefix)) ++wrong;
    }
    text_.push_back(request.tokens[0]);
    root_ = root;
    depths_ = script_.anchor_predicts ? request.count : request.count - 1;
    knows_ = knows(wrong, root - request.first, script);
    result.count = request.max_tokens;
    Tokens past = text_;
    for (int i = 0; i < result.count; ++i) {
      gpu::EmittedToken& out = result.tokens[i];
      out.node = script_.anchor_predicts ? i : i + 1;
      out.logprob = script.chance;
      past.push_back(next(past));
      name(past.back(), knows_, script, out);
    }
    return wrong;
  }

  void rank_nodes(const gpu::RoundRequest& request, const Script& script, gpu::RoundResult& result) const {
    if (request.position != root_ || request.tokens[0] != text_.back()) std::abort();  // of another block
    result.count = request.max_tokens;
    for (int i = 0; i < result.count; ++i) {
      const int node = request.count - result.count + i;
      Tokens past = text_, way;
      for (int above = node; above > 0; above = request.parents[above]) way.push_back(request.tokens[above]);
      if (static_cast<int>(way.size()) >= depths_) std::abort();  // the block says nothing of what follows
      past.insert(past.end(), way.rbegin(), way.rend());
      gpu::EmittedToken& out = result.tokens[i];
      out.node = node;
      out.logprob = script.chance;
      name(next(past), knows_, script, out);
    }
  }

  // Penalties are those of the text up to the root.
  [[nodiscard]] int32_t next(const Tokens& past) const {
    const gpu::State& state = device_->state();
    uint64_t seed = state.sampling.seed;
    if (state.sampling.penalises != 0) seed = FakeModel::penalised(seed, text_, state.prompt_tokens);
    return model_.next(past, seed, state.biases, state.sampling.bias_count);
  }

  // What the last block has left to its nodes.
  Tokens text_;  // up to the root
  int root_ = -1;
  int depths_ = 0;
  bool knows_ = false;
};

inline graph::GraphProgram program_with_dflash(FakeDevice& target, FakeDflash& dflash) {
  graph::GraphProgram program = target.program();
  program.dflash = std::make_shared<const graph::DflashProgram>(dflash.program(target));
  return program;
}

}  // namespace ull::test
