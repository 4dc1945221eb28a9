// Rounds under a constraint on the graph executor: what it refuses is drawn again from the same logits, whoever drafts.
#include <functional>

#include "graph_fixture.h"
#include "testing/scripted_drafter.h"

namespace {

using ull::DrafterKind;
using ull::Sampling;
using ull::ScriptedDrafter;
using ull::Status;
using ull::TokenConstraint;
using ull::gpu::RoundMode;
using ull::gpu::RoundStatus;
using ull::test::AbortedRound;
using ull::test::count_of;
using ull::test::FakeDevice;
using ull::test::FakeModel;
using ull::test::GraphRig;
using ull::test::prompt_of;
using ull::test::says;
using Tokens = std::vector<int32_t>;

// Behind `taken` tokens one may come or not; the completion is whole once it has `whole` tokens.
class Rule final : public TokenConstraint {
 public:
  using Allows = std::function<bool(const Tokens& taken, int32_t token)>;

  explicit Rule(Allows allows, size_t whole = 100'000) : allows_(std::move(allows)), whole_(whole) {}

  bool take(int32_t token) noexcept override {
    if (taken.size() == fails_at) reason_ = "the rule is lost";
    if (reason_ != nullptr || complete() || !allows_(taken, token)) return false;
    taken.push_back(token);
    return true;
  }
  void give_back(int32_t count) noexcept override {
    taken.resize(taken.size() - static_cast<size_t>(count));
    given_back += count;
  }
  const uint32_t* mask() noexcept override {
    ++masks;
    if (mask_fails) reason_ = "the rule has no mask";
    if (reason_ != nullptr) return nullptr;
    mask_.assign(4, 0);
    for (int32_t token = 0; token < 100; ++token) {
      if (allows_(taken, token)) mask_[static_cast<size_t>(token) / 32] |= uint32_t{1} << (token % 32);
    }
    return mask_.data();
  }
  int32_t forced(int32_t*, int32_t) noexcept override { return 0; }
  [[nodiscard]] bool complete() const noexcept override { return taken.size() >= whole_; }
  [[nodiscard]] const char* failure() const noexcept override { return reason_; }

  Tokens taken;
  int masks = 0;
  int given_back = 0;
  size_t fails_at = 1'000'000;  // taking the token behind so many
  bool mask_fails = false;

 private:
  const Allows allows_;
  const size_t whole_;
  std::vector<uint32_t> mask_;
  const char* reason_ = nullptr;
};

// About every other token, which ones depends on how many came before.
bool every_other(const Tokens& taken, int32_t token) {
  return (token * 7 + static_cast<int32_t>(taken.size())) % 5 < 3;
}
// One alone.
bool one_token(const Tokens& taken, int32_t token) { return token == static_cast<int32_t>(taken.size() * 13 % 100); }

// By the rule: drawn as though there were no constraint, and again among the allowed where that is refused.
Tokens completion(const FakeModel& model, Tokens text, int count, const Sampling& sampling,
                  const Rule::Allows& allows) {
  const size_t prompt = text.size();
  Tokens taken;
  while (static_cast<int>(taken.size()) < count) {
    const uint64_t seed =
        sampling.penalises() ? FakeModel::penalised(sampling.seed, text, static_cast<int>(prompt)) : sampling.seed;
    int32_t token = model.next(text, seed, sampling.bias, sampling.bias_count);
    if (!allows(taken, token)) {
      token = model.next(text, seed, sampling.bias, sampling.bias_count,
                         [&](int32_t other) { return allows(taken, other); });
    }
    text.push_back(token);
    taken.push_back(token);
  }
  return taken;
}

// `count` tokens behind a prompt, of whose end the first round takes `forced` tokens along.
Tokens complete(GraphRig& rig, Rule& rule, const Tokens& prompt, int count, int forced = 0) {
  rig.prompt_tokens = static_cast<int>(prompt.size());
  rig.drafted.model = 0;
  CHECK(rig.prefill({prompt.begin(), prompt.end() - 1 - forced}) == Status::kOk);
  Tokens tokens = prompt;
  tokens.reserve(prompt.size() + static_cast<size_t>(count) + 1);
  while (tokens.size() < prompt.size() + static_cast<size_t>(count)) {
    const int left = count - static_cast<int>(tokens.size() - prompt.size());
    ull::RoundStep step = rig.step(tokens, std::min(left, rig.executor.info().tokens_per_round));
    step.constraint = &rule;
    step.forced = std::exchange(forced, 0);
    step.position -= step.forced;
    step.token = tokens[static_cast<size_t>(step.position)];
    const size_t before = rule.taken.size();
    if (rig.executor.start_round(step) != Status::kOk || rig.finish() != Status::kOk) return {};
    const ull::RoundResult& result = rig.result;
    CHECK(result.count >= 1 && result.accepted == result.count - 1 && result.tree_tokens > result.accepted);
    CHECK_EQ(rule.taken.size(), before + static_cast<size_t>(result.count));
    for (int i = 0; i < result.count; ++i) tokens.push_back(result.tokens[i].token);
  }
  const Tokens said(tokens.begin() + static_cast<std::ptrdiff_t>(prompt.size()), tokens.end());
  CHECK(rule.taken == said);
  return said;
}

Tokens joined(Tokens prompt, const Tokens& more) {
  prompt.insert(prompt.end(), more.begin(), more.end());
  return prompt;
}

TEST(they_are_offered_where_there_are_graphs_that_draw_again) {
  GraphRig rig;
  CHECK(rig.executor.info().constraints);
  GraphRig without({.redraws = false});
  CHECK(!without.executor.info().constraints && without.executor.info().score_nodes == 0);
  Rule rule(every_other);
  const Tokens tokens = prompt_of(1);
  ull::RoundStep step = without.step(tokens, 5);
  step.constraint = &rule;
  CHECK(without.executor.start_round(step) == Status::kExecutorFailed);
  CHECK(without.complete(tokens, 5) == without.model.continuation(tokens, 5));
}

TEST(what_is_refused_is_drawn_again) {
  const ull::LogitBias biases[] = {{7, -INFINITY}, {70, -INFINITY}};
  for (const auto& allows : {every_other, one_token}) {
    for (int turn = 0; turn < 4; ++turn) {
      // Every sampler, and bursts of rounds: what the rounds of others are queued as.
      GraphRig rig(
          {.chunks = true, .last_chunks = true, .has_plain = true, .has_scan = turn % 2 == 1, .burst_rounds = 2});
      rig.sampling.temperature = turn % 2 == 0 ? 0.0F : 0.7F;
      rig.sampling.seed = static_cast<uint64_t>(turn);
      if (turn >= 2 && allows == every_other) rig.sampling.bias_count = 2;
      rig.sampling.bias = biases;
      if (turn == 3) rig.sampling.presence_penalty = 0.5F;
      const Tokens prompt = prompt_of(170, turn);
      Rule rule(allows);
      constexpr int kForced[] = {0, 100, 30, 0};  // in a round, and in a chunk that draws
      const Tokens said = complete(rig, rule, prompt, 120, kForced[turn]);
      CHECK(said == completion(rig.model, prompt, 120, rig.sampling, allows));
      CHECK(rule.masks > 20 && rule.masks <= 120);
      const auto records = rig.rest();
      CHECK_EQ(count_of(records, RoundMode::kContinue, RoundStatus::kOk), 0);  // a token ahead may be refused
      CHECK_EQ(count_of(records, RoundMode::kContinue, RoundStatus::kSkipped), 0);
      CHECK_EQ(count_of(records, RoundMode::kRedraw, RoundStatus::kOk), rule.masks);
      for (const auto& record : records) CHECK(record.sampler != ull::graph::Sampler::kScan);
      CHECK(rig.complete(prompt, 20) == rig.model.continuation(prompt, 20, rig.sampling));
    }
  }
}

TEST(what_was_queued_for_another_request_is_not_taken) {
  GraphRig rig({.has_scan = true, .burst_rounds = 2});
  const Tokens prompt = prompt_of(1);
  Tokens tokens = prompt;
  tokens.reserve(200);
  CHECK(rig.advance(tokens, 50) == Status::kOk);  // with rounds behind it
  Rule rule(every_other);
  ull::RoundStep step = rig.step(tokens, 50);
  step.constraint = &rule;
  CHECK(rig.executor.start_round(step) == Status::kOk);
  CHECK(rig.finish() == Status::kOk);
  CHECK(rule.taken == completion(rig.model, tokens, 1, rig.sampling, every_other));
}

TEST(drafters_change_the_speed_not_the_tokens) {
  using Mode = ScriptedDrafter::Mode;
  const FakeModel model{100};
  const Tokens prompt = prompt_of(70);
  const Tokens expected = completion(model, prompt, 150, {}, every_other);
  int rounds[2] = {};
  for (const Mode mode : {Mode::kRight, Mode::kMixed, Mode::kRandom, Mode::kWrong}) {
    for (const bool penalised : {false, true}) {
      ull::graph::GraphOptions options{.adaptive = false};
      Sampling sampling;
      if (penalised) sampling.frequency_penalty = 0.5F;
      const Tokens said = penalised ? completion(model, prompt, 150, sampling, every_other) : expected;
      options.in_place_of_draft_model = ull::scripted_drafter(mode, joined(prompt, said), 100, 7);
      GraphRig rig({.model = model}, options);
      rig.speculation = DrafterKind::kDraft;
      rig.max_tree = 12;
      rig.sampling = sampling;
      Rule rule(every_other);
      CHECK(complete(rig, rule, prompt, 150) == said);
      const auto records = rig.rest();
      CHECK_EQ(count_of(records, RoundMode::kRedraw, RoundStatus::kOk), rule.masks);
      if (mode == Mode::kRight) rounds[penalised ? 1 : 0] = count_of(records, RoundMode::kTake, RoundStatus::kOk);
      if (mode == Mode::kWrong) CHECK_EQ(count_of(records, RoundMode::kTake, RoundStatus::kOk), 150);
    }
  }
  CHECK(rounds[0] < 100 && rounds[1] < 100);
}

TEST(medusa_heads_go_on_from_the_token_that_was_drawn_again) {
  GraphRig rig({.medusa_heads = 4, .medusa_rank = 0}, {.adaptive = false});
  rig.speculation = DrafterKind::kMedusa;
  Rule rule(every_other);
  const Tokens prompt = prompt_of(70);
  CHECK(complete(rig, rule, prompt, 100) == completion(rig.model, prompt, 100, {}, every_other));
  const auto records = rig.rest();
  int drafts = 0, fresh = 0;
  for (const auto& record : records) {
    if (record.mode != RoundMode::kMedusa) continue;
    ++drafts;
    fresh += record.emitted;
  }
  CHECK(drafts > 20 && fresh == drafts);
}

// A tree that holds what the model would say without the constraint, which refuses the fourth of that.
TEST(a_tree_ends_where_a_token_is_refused) {
  const FakeModel model{100};
  const Tokens prompt = prompt_of(40);
  const Tokens unbound = model.continuation(prompt, 20);
  const auto allows = [&](const Tokens& taken, int32_t token) { return taken.size() != 3 || token != unbound[3]; };
  ull::graph::GraphOptions options{.adaptive = false};
  options.in_place_of_draft_model =
      ull::scripted_drafter(ScriptedDrafter::Mode::kRight, joined(prompt, unbound), 100, 7);
  GraphRig rig({.model = model}, options);
  rig.speculation = DrafterKind::kDraft;
  CHECK(rig.prefill({prompt.begin(), prompt.end() - 1}) == Status::kOk);
  Rule rule(allows);
  ull::RoundStep step = rig.step(prompt, 15);
  step.constraint = &rule;
  CHECK(rig.executor.start_round(step) == Status::kOk);
  CHECK(rig.finish() == Status::kOk);
  CHECK(rig.result.count == 4 && rig.result.accepted == 3 && rig.result.tree_tokens > 10);
  const Tokens expected = completion(model, prompt, 4, {}, allows);
  CHECK(rule.taken == expected && expected[3] != unbound[3]);
  for (int i = 0; i < 4; ++i) CHECK_EQ(rig.result.tokens[i].token, expected[static_cast<size_t>(i)]);
}

TEST(a_tree_ends_with_the_completion) {
  const FakeModel model{100};
  const Tokens prompt = prompt_of(40);
  const Tokens expected = model.continuation(prompt, 20);
  ull::graph::GraphOptions options{.adaptive = false};
  options.in_place_of_draft_model =
      ull::scripted_drafter(ScriptedDrafter::Mode::kRight, joined(prompt, expected), 100, 7);
  for (const size_t whole : {1U, 5U, 15U}) {
    GraphRig rig({.model = model}, options);
    rig.speculation = DrafterKind::kDraft;
    CHECK(rig.prefill({prompt.begin(), prompt.end() - 1}) == Status::kOk);
    Rule rule([](const Tokens&, int32_t) { return true; }, whole);
    ull::RoundStep step = rig.step(prompt, 15);
    step.constraint = &rule;
    CHECK(rig.executor.start_round(step) == Status::kOk);
    CHECK(rig.finish() == Status::kOk);
    CHECK_EQ(rig.result.count, static_cast<int>(whole));
    CHECK_EQ(rig.result.accepted, rig.result.count - 1);
    CHECK((rule.taken == Tokens{expected.begin(), expected.begin() + static_cast<std::ptrdiff_t>(whole)}));
    CHECK_EQ(rule.masks, 0);
  }
}

TEST(an_aborted_round_leaves_the_constraint_where_it_stood) {
  const FakeModel model{100};
  const Tokens prompt = prompt_of(40);
  const Tokens unbound = model.continuation(prompt, 20);
  const auto allows = [&](const Tokens& taken, int32_t token) { return taken.size() != 3 || token != unbound[3]; };
  ull::graph::GraphOptions options{.adaptive = false};
  options.in_place_of_draft_model =
      ull::scripted_drafter(ScriptedDrafter::Mode::kRight, joined(prompt, unbound), 100, 7);
  for (const int later : {0, 1}) {  // the tree, or the draw behind it
    GraphRig rig({.model = model}, options);
    rig.speculation = DrafterKind::kDraft;
    CHECK(rig.prefill({prompt.begin(), prompt.end() - 1}) == Status::kOk);
    Rule rule(allows);
    ull::RoundStep step = rig.step(prompt, 15);
    step.constraint = &rule;
    {
      const AbortedRound aborted(rig.executor, rig.device, static_cast<uint64_t>(later));
      CHECK(rig.executor.start_round(step) == Status::kOk);
      CHECK(rig.finish() == Status::kAborted);
    }
    CHECK(rule.taken.empty());
    CHECK_EQ(rule.given_back, later == 0 ? 0 : 3);
    CHECK(rig.executor.start_round(step) == Status::kOk);
    CHECK(rig.finish() == Status::kOk);
    CHECK(rule.taken == completion(model, prompt, 4, {}, allows));
  }
}

TEST(a_constraint_that_fails_ends_its_round_and_nothing_else) {
  for (int kind = 0; kind < 2; ++kind) {
    GraphRig rig;
    const Tokens prompt = prompt_of(5);
    CHECK(rig.prefill({prompt.begin(), prompt.end() - 1}) == Status::kOk);
    Rule rule([&](const Tokens&, int32_t token) { return kind == 0 || token == 3; });
    if (kind == 0) rule.fails_at = 0;
    if (kind == 1) rule.mask_fails = true;
    ull::RoundStep step = rig.step(prompt, 5);
    step.constraint = &rule;
    CHECK(rig.executor.start_round(step) == Status::kOk);
    CHECK(rig.finish() == Status::kExecutorFailed);
    CHECK(rule.failure() != nullptr);
    CHECK(rig.executor.failure() == nullptr);
    CHECK(rule.taken.empty());
    CHECK(rig.complete(prompt, 20) == rig.model.continuation(prompt, 20));
    Rule other(every_other);
    CHECK(complete(rig, other, prompt, 20) == completion(rig.model, prompt, 20, {}, every_other));
  }
}

// As without a draft: the round that begins with the token that fails is the one that fails.
TEST(what_came_before_a_failure_stands) {
  const FakeModel model{100};
  const Tokens prompt = prompt_of(40);
  const Tokens expected = model.continuation(prompt, 20);
  ull::graph::GraphOptions options{.adaptive = false};
  options.in_place_of_draft_model =
      ull::scripted_drafter(ScriptedDrafter::Mode::kRight, joined(prompt, expected), 100, 7);
  GraphRig rig({.model = model}, options);
  rig.speculation = DrafterKind::kDraft;
  CHECK(rig.prefill({prompt.begin(), prompt.end() - 1}) == Status::kOk);
  Rule rule([](const Tokens&, int32_t) { return true; });
  rule.fails_at = 3;
  Tokens tokens = prompt;
  tokens.reserve(60);
  ull::RoundStep step = rig.step(tokens, 15);
  step.constraint = &rule;
  CHECK(rig.executor.start_round(step) == Status::kOk);
  CHECK(rig.finish() == Status::kOk);
  CHECK_EQ(rig.result.count, 3);
  for (int i = 0; i < 3; ++i) tokens.push_back(rig.result.tokens[i].token);
  step = rig.step(tokens, 15);
  step.constraint = &rule;
  CHECK(rig.executor.start_round(step) == Status::kOk);
  CHECK(rig.finish() == Status::kExecutorFailed);
  CHECK(rig.executor.failure() == nullptr);
  CHECK((rule.taken == Tokens{expected.begin(), expected.begin() + 3}));
}

TEST(a_device_that_fails_while_it_draws_again_is_given_up) {
  struct Fault {
    std::function<void(FakeDevice::Script&, uint64_t)> arm;
    const char* words;
  };
  const Fault faults[] = {
      {[](auto& script, uint64_t at) { script.launch_error_at = at; }, "cuGraphLaunch failed"},
      {[](auto& script, uint64_t at) { script.hang_at = at; }, "has not answered"},
      {[](auto& script, uint64_t at) { script.silent_at = at; }, "without an answer"},
      {[](auto& script, uint64_t at) { script.stream_error_at = script.silent_at = at; }, "CUDA_ERROR_ILLEGAL_ADDRESS"},
      {[](auto& script, uint64_t at) { script.not_finite_at = at; }, "is banned"},
      {[](auto& script, uint64_t at) {
         script.absurd_at = at;
         script.absurdity = [](auto& answer) { answer.tokens[0].token = 4; };  // which is not allowed
       },
       "impossible answer"},
      {[](auto& script, uint64_t at) {
         script.absurd_at = at;
         script.absurdity = [](auto& answer) { answer.count = 2; };
       },
       "impossible answer"},
  };
  for (const Fault& fault : faults) {
    GraphRig rig({}, {.watchdog_ms = 1000});
    const Tokens prompt = prompt_of(5);
    CHECK(rig.prefill({prompt.begin(), prompt.end() - 1}) == Status::kOk);
    rig.device.arm([&](FakeDevice::Script& script, uint64_t next) { fault.arm(script, next + 1); });
    Rule rule([](const Tokens&, int32_t token) { return token == 3; });
    ull::RoundStep step = rig.step(prompt, 5);
    step.constraint = &rule;
    CHECK(rig.executor.start_round(step) == Status::kOk);
    CHECK(rig.finish() == Status::kExecutorFailed);
    CHECK(says(rig.executor.failure(), fault.words));
    CHECK(rig.executor.start_round(step) == Status::kExecutorFailed);
  }
}

TEST(aborts_from_another_thread_never_change_a_token) {
  GraphRig rig({.model = {100, 17}}, {.adaptive = false});
  rig.speculation = DrafterKind::kSuffix;
  std::atomic<bool> done{false};
  std::thread other([&] {
    for (int us = 200; !done; us = std::min(us + 10, 5000)) {
      rig.executor.abort();
      std::this_thread::sleep_for(std::chrono::microseconds(us));
    }
  });
  for (int turn = 0; turn < 5; ++turn) {
    Tokens tokens = prompt_of(60, turn);
    tokens.reserve(300);
    const Tokens expected = completion(rig.model, tokens, 60, {}, every_other);
    Status status = Status::kAborted;
    while (status == Status::kAborted) status = rig.prefill({tokens.begin(), tokens.end() - 1});
    Rule rule(every_other);
    while (rule.taken.size() < 60) {
      ull::RoundStep step = rig.step(tokens, 60 - static_cast<int>(rule.taken.size()));
      step.constraint = &rule;
      const size_t before = rule.taken.size();
      CHECK(rig.executor.start_round(step) == Status::kOk);
      status = rig.finish();
      if (status == Status::kAborted) {
        CHECK_EQ(rule.taken.size(), before);
        continue;
      }
      REQUIRE(status == Status::kOk);
      for (int i = 0; i < rig.result.count; ++i) tokens.push_back(rig.result.tokens[i].token);
    }
    CHECK(rule.taken == expected);
  }
  done = true;
  other.join();
}

}  // namespace
