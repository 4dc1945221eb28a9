// Scores on the graph executor: a pass over a tree, then the log-probabilities of tokens behind its nodes.
#include <functional>

#include "graph_fixture.h"

namespace {

using ull::ScoreQuery;
using ull::ScoreStep;
using ull::Status;
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

// A tree behind a text whose last token is its root, and what is asked of it.
struct Pass {
  Pass(const Tokens& text, int nodes, int query_count, int top_count = 0)
      : text(text), queries(static_cast<size_t>(query_count)), top_count(top_count) {
    for (int i = 0; i < nodes; ++i) {
      tokens.push_back(i == 0 ? text.back() : (i * 31 + 7) % 100);
      parents.push_back(static_cast<uint8_t>(i == 0 ? 0 : (i - 1) / 2));
    }
    for (int i = 0; i < query_count; ++i) queries[static_cast<size_t>(i)] = {(i * 5) % nodes, (i * 17 + 3) % 100};
    logprobs.assign(static_cast<size_t>(query_count), 1.0F);
    top.assign(static_cast<size_t>(query_count * top_count), {-1, 1.0F});
  }

  [[nodiscard]] ScoreStep step(const GraphRig& rig) {
    return {.tokens = tokens.data(),
            .parents = parents.data(),
            .count = static_cast<int32_t>(tokens.size()),
            .position = static_cast<int32_t>(text.size()) - 1,
            .pages = rig.pages.data(),
            .queries = queries.data(),
            .query_count = static_cast<int32_t>(queries.size()),
            .logprobs = logprobs.data(),
            .top_count = top_count,
            .top = top.data()};
  }

  // What each query's token is behind: the text and the node's way.
  [[nodiscard]] Tokens past(const ScoreQuery& query) const {
    Tokens way;
    for (int node = query.node; node > 0; node = parents[static_cast<size_t>(node)]) {
      way.insert(way.begin(), tokens[static_cast<size_t>(node)]);
    }
    Tokens past = text;
    past.insert(past.end(), way.begin(), way.end());
    return past;
  }
  [[nodiscard]] std::vector<float> expected() const {
    std::vector<float> found;
    for (const ScoreQuery& query : queries) found.push_back(FakeModel::logprob(past(query), query.token));
    return found;
  }
  [[nodiscard]] bool has_expected_top() const {
    for (size_t i = 0; i < top.size(); ++i) {
      const auto ranks = static_cast<size_t>(top_count);
      const ull::TokenLogprob expected = FakeModel::top(past(queries[i / ranks]), static_cast<int>(i % ranks));
      if (top[i].token != expected.token || top[i].logprob != expected.logprob) return false;
    }
    return true;
  }

  Tokens text;
  Tokens tokens;
  std::vector<uint8_t> parents;
  std::vector<ScoreQuery> queries;
  std::vector<float> logprobs;
  int top_count;
  std::vector<ull::TokenLogprob> top;
};

Status score(GraphRig& rig, Pass& pass) {
  if (rig.executor.start_scores(pass.step(rig)) != Status::kOk) return Status::kExecutorFailed;
  return rig.finish();
}

TEST(queries_are_answered_in_order) {
  GraphRig rig;
  const Tokens prompt = prompt_of(70);
  CHECK(rig.prefill({prompt.begin(), prompt.end() - 1}) == Status::kOk);
  for (const int queries : {1, 2, 64, 65, 128, 129, 1000}) {
    for (const int nodes : {1, 2, 17, 64}) {
      (void)rig.rest();
      Pass pass(prompt, nodes, queries);
      CHECK(score(rig, pass) == Status::kOk);
      CHECK(pass.logprobs == pass.expected());
      const auto records = rig.rest();
      CHECK_EQ(count_of(records, RoundMode::kTake, RoundStatus::kOk), 1);
      CHECK_EQ(count_of(records, RoundMode::kRedraw, RoundStatus::kOk), (queries + 63) / 64);
      CHECK_EQ(records[0].count, nodes);
    }
  }
}

// In passes with and without them by turns: what a pass wants is no matter of the next one's.
TEST(the_likeliest_tokens_are_told_where_they_are_asked_for) {
  GraphRig rig;
  const Tokens prompt = prompt_of(70);
  CHECK(rig.prefill({prompt.begin(), prompt.end() - 1}) == Status::kOk);
  for (const int top_count : {1, 0, 5, 20, 0}) {
    for (const int queries : {1, 64, 65, 200}) {
      for (const int nodes : {1, 17}) {
        Pass pass(prompt, nodes, queries, top_count);
        CHECK(score(rig, pass) == Status::kOk);
        CHECK(pass.logprobs == pass.expected());
        CHECK(pass.has_expected_top());
      }
    }
    CHECK(rig.complete(prompt, 5) == rig.model.continuation(prompt, 5));
  }
}

// A pass of one node leaves the logits of all tokens, whichever sampler is the cheapest.
TEST(logits_of_a_coarser_scan_are_not_scored) {
  FakeDevice::Script script{.has_plain = true, .plain_us = 2000, .has_scan = true, .scan_us = 1000};
  script.graph_us.fill(3000);
  GraphRig rig(script);
  Pass pass(prompt_of(1), 1, 3);
  CHECK(score(rig, pass) == Status::kOk);
  CHECK(pass.logprobs == pass.expected());
  const auto records = rig.rest();
  CHECK(records[0].sampler == ull::graph::Sampler::kPlain);
  Pass likeliest(prompt_of(1), 1, 3, 2);
  CHECK(score(rig, likeliest) == Status::kOk);
  CHECK(likeliest.has_expected_top());
  (void)rig.rest();
  Tokens tokens = prompt_of(1);
  CHECK(rig.advance(tokens, 1) == Status::kOk);
  CHECK(rig.rest()[0].sampler == ull::graph::Sampler::kScan);
}

TEST(they_change_nothing_for_the_rounds_around_them) {
  GraphRig rig({.burst_rounds = 0});
  rig.sampling.temperature = 0.9F;
  rig.sampling.seed = 5;
  rig.sampling.presence_penalty = 0.5F;
  rig.stops = {99};
  Tokens tokens = prompt_of(70);
  rig.prompt_tokens = 70;
  const Tokens expected = rig.model.continuation(tokens, 60, rig.sampling);
  CHECK(rig.prefill({tokens.begin(), tokens.end() - 1}) == Status::kOk);
  for (int turn = 0; tokens.size() < 130; ++turn) {
    tokens.reserve(tokens.size() + 1);
    CHECK(rig.advance(tokens, 30) == Status::kOk);
    if (turn % 3 != 0) continue;
    Pass pass(tokens, 1 + turn, 70);  // behind the newest token, which no round has fed
    CHECK(score(rig, pass) == Status::kOk);
    CHECK(pass.logprobs == pass.expected());
  }
  CHECK((Tokens{tokens.begin() + 70, tokens.end()} == expected));
}

TEST(a_program_without_trees_scores_node_by_node) {
  const auto offered = [](auto change, FakeDevice::Script script = {}) {
    FakeDevice device(script);
    ull::graph::GraphProgram program = device.program();
    change(program);
    ull::graph::GraphExecutor executor(program, FakeDevice::driver(), {});
    executor.prepare();
    return executor.info().score_nodes;
  };
  using Program = ull::graph::GraphProgram;
  CHECK_EQ(offered([](Program&) {}), 64);
  CHECK_EQ(offered([](Program& program) { std::fill(program.rounds + 1, program.rounds + 7, nullptr); }), 1);
  CHECK_EQ(offered([](Program&) {}, {.redraws = false}), 0);
}

TEST(passes_that_cannot_be_are_refused) {
  GraphRig rig;
  const Tokens prompt = prompt_of(5);
  const std::vector<std::function<void(Pass&, ScoreStep&)>> mistakes = {
      [](Pass&, ScoreStep& step) { step.query_count = 0; },
      [](Pass&, ScoreStep& step) { step.count = 0; },
      [](Pass&, ScoreStep& step) { step.count = 65; },
      [](Pass&, ScoreStep& step) { step.position = 1020; },
      [](Pass& pass, ScoreStep&) { pass.queries[2].node = 8; },
      [](Pass& pass, ScoreStep&) { pass.queries[2].node = -1; },
      [](Pass& pass, ScoreStep&) { pass.queries[2].token = 100; },
      [](Pass& pass, ScoreStep&) { pass.tokens[3] = 100; },
      [](Pass& pass, ScoreStep&) { pass.parents[3] = 3; },
      [](Pass&, ScoreStep& step) { step.top_count = -1; },
      [](Pass&, ScoreStep& step) { step.top_count = 21; },
  };
  for (const auto& mistake : mistakes) {
    Pass pass(prompt, 8, 5);
    ScoreStep step = pass.step(rig);
    mistake(pass, step);
    CHECK(rig.executor.start_scores(step) == Status::kExecutorFailed);
    CHECK(rig.executor.failure() == nullptr);
  }
  CHECK(rig.complete(prompt, 5) == rig.model.continuation(prompt, 5));
}

TEST(an_aborted_pass_can_be_run_again) {
  GraphRig rig;
  const Tokens prompt = prompt_of(70);
  CHECK(rig.prefill({prompt.begin(), prompt.end() - 1}) == Status::kOk);
  for (const uint64_t later : {0U, 1U, 3U}) {
    Pass pass(prompt, 20, 300);
    {
      const AbortedRound aborted(rig.executor, rig.device, later);
      CHECK(score(rig, pass) == Status::kAborted);
    }
    rig.device.arm([](FakeDevice::Script& script, uint64_t) { script.before = nullptr; });
    CHECK(score(rig, pass) == Status::kOk);
    CHECK(pass.logprobs == pass.expected());
  }
}

TEST(a_device_that_fails_while_it_scores_is_given_up) {
  struct Fault {
    std::function<void(FakeDevice::Script&, uint64_t)> arm;
    const char* words;
  };
  const Fault faults[] = {
      {[](auto& script, uint64_t at) { script.launch_error_at = at; }, "cuGraphLaunch failed"},
      {[](auto& script, uint64_t at) { script.hang_at = at; }, "has not answered"},
      {[](auto& script, uint64_t at) { script.not_finite_at = at; }, "not finite"},
      {[](auto& script, uint64_t at) {
         script.absurd_at = at;
         script.absurdity = [](auto& answer) { answer.tokens[1].token = (answer.tokens[1].token + 1) % 100; };
       },
       "impossible answer"},
      {[](auto& script, uint64_t at) {
         script.absurd_at = at;
         script.absurdity = [](auto& answer) { --answer.count; };
       },
       "impossible answer"},
      {[](auto& script, uint64_t at) {
         script.absurd_at = at;
         script.absurdity = [](auto& answer) { --answer.tokens[1].top_count; };
       },
       "impossible answer"},
      {[](auto& script, uint64_t at) {
         script.absurd_at = at;
         script.absurdity = [](auto& answer) { answer.tokens[1].top[1].token = 100; };
       },
       "impossible answer"},
  };
  for (const Fault& fault : faults) {
    for (const uint64_t later : {1U, 5U}) {  // the first 64 queries, and the last
      GraphRig rig({}, {.watchdog_ms = 1000});
      rig.device.arm([&](FakeDevice::Script& script, uint64_t next) { fault.arm(script, next + later); });
      Pass pass(prompt_of(1), 8, 300, 2);
      CHECK(score(rig, pass) == Status::kExecutorFailed);
      CHECK(says(rig.executor.failure(), fault.words));
      CHECK(score(rig, pass) == Status::kExecutorFailed);
    }
  }
}

}  // namespace
