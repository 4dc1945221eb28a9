// Passes that score a tree: the bits of the logprobs that rounds report for the same tokens, and nothing of them stays.
#include <bit>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "cpu/cpu_executor.h"
#include "engine/choices.h"
#include "engine/prompt_logprobs.h"
#include "exec_model.h"
#include "medusa_file.h"

using namespace ull;
using namespace ull::cpu;

namespace {

const int32_t kPages[] = {3, 0, 6, 1, 2, 7, 5, 4};

std::vector<int32_t> some_tokens(int count) {
  std::vector<int32_t> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back((i * 37 + i / 5) % 80);
  return tokens;
}

std::unique_ptr<CpuExecutor> executor(const ModelSpec& spec, int chunk = 64, int threads = 1) {
  ModelOptions options;
  options.chunk = chunk;
  options.threads = threads;
  auto made = std::make_unique<CpuExecutor>(spec, options, SpeculationOptions{.adaptive = false});
  made->prepare();
  return made;
}

Status finish(CpuExecutor& on, Status status, RoundResult& result) {
  return status == Status::kOk ? on.poll(result) : status;
}

// Reads all of the text but its last token.
void prefill(CpuExecutor& on, std::span<const int32_t> text) {
  RoundResult result;
  for (int start = 0; start + 1 < static_cast<int>(text.size()); start += on.info().prefill_chunk) {
    const int count = std::min(on.info().prefill_chunk, static_cast<int>(text.size()) - 1 - start);
    CHECK(finish(on, on.start_prefill({.tokens = text.data() + start, .count = count, .start = start, .pages = kPages}),
                 result) == Status::kOk);
  }
}

// What a round reports of `token` behind the text, which a bias makes it emit.
RoundToken emitted(CpuExecutor& on, std::span<const int32_t> text, int32_t token, int top_logprobs = 0) {
  const LogitBias bias{token, 1e6F};
  const Sampling sampling{.top_logprobs = top_logprobs, .bias_count = 1, .bias = &bias};
  const auto last = static_cast<int32_t>(text.size()) - 1;
  RoundResult result;
  CHECK(finish(on,
               on.start_round({.token = text[static_cast<size_t>(last)],
                               .position = last,
                               .pages = kPages,
                               .sampling = &sampling,
                               .max_tokens = 1,
                               .history = text.data()}),
               result) == Status::kOk);
  CHECK_EQ(result.tokens[0].token, token);
  return result.tokens[0];
}

float reported(CpuExecutor& on, std::span<const int32_t> text, int32_t token) {
  return emitted(on, text, token).logprob;
}

void check_equal(const TokenLogprob& a, const TokenLogprob& b) {
  CHECK_EQ(a.token, b.token);
  CHECK_EQ(std::bit_cast<uint32_t>(a.logprob), std::bit_cast<uint32_t>(b.logprob));
}

std::vector<std::vector<int32_t>> random_labels(int count, int longest) {
  std::mt19937 random(3);
  std::vector<std::vector<int32_t>> labels;
  for (int i = 0; i < count; ++i) {
    std::vector<int32_t> label(1 + random() % static_cast<uint32_t>(longest));
    for (int32_t& token : label) token = static_cast<int32_t>(random() % 3);
    label.push_back(10 + i);  // no two are the same
    labels.push_back(label);
  }
  return labels;
}

// Scores the labels behind the prompt, whose tokens but the last the cache holds.
void score(CpuExecutor& on, Choices& choices, std::span<const int32_t> prompt) {
  RoundResult result;
  while (!choices.scored()) {
    const ScoreStep step = choices.next_step(prompt.back(), static_cast<int32_t>(prompt.size()) - 1, kPages);
    CHECK(finish(on, on.start_scores(step), result) == Status::kOk);
    CHECK(choices.accept());
  }
  choices.choose({}, static_cast<int32_t>(prompt.size()));
}

TEST(a_label_is_worth_the_logprobs_that_rounds_report_of_its_tokens) {
  const check::ModelFile model;
  const auto labels = random_labels(12, 4);
  for (const int length : {1, 2, 60, 64, 65, 200}) {
    const std::vector<int32_t> prompt = some_tokens(length);
    const auto rounds = executor(model.spec);
    prefill(*rounds, prompt);
    std::vector<double> expected;
    for (const auto& label : labels) {
      std::vector<int32_t> text = prompt;
      double sum = 0.0;
      for (const int32_t token : label) {
        sum += static_cast<double>(reported(*rounds, text, token));
        text.push_back(token);
      }
      expected.push_back(sum);
    }
    for (const int threads : {1, 2}) {
      for (const int chunk : {16, 64, 256}) {
        const auto scores = executor(model.spec, chunk, threads);
        CHECK_EQ(scores->info().score_nodes, kMaxTreeTokens);
        prefill(*scores, prompt);
        for (const int score_nodes : {5, 9, 64}) {
          Choices choices(labels, {}, score_nodes);
          score(*scores, choices, prompt);
          for (size_t i = 0; i < labels.size(); ++i) {
            CHECK_EQ(std::bit_cast<uint64_t>(choices.logprobs()[i]), std::bit_cast<uint64_t>(expected[i]));
          }
        }
      }
    }
  }
}

// Every node of a wide and of a deep tree, every token.
TEST(every_token_behind_every_node_has_the_bits_that_a_round_reports) {
  const check::ModelFile model;
  const std::vector<int32_t> prompt = some_tokens(70);
  for (const bool deep : {false, true}) {
    std::vector<int32_t> tokens(kMaxTreeTokens, prompt.back());
    std::vector<uint8_t> parents(kMaxTreeTokens, 0);
    for (int node = 1; node < kMaxTreeTokens; ++node) {
      tokens[static_cast<size_t>(node)] = (node * 7) % 80;
      parents[static_cast<size_t>(node)] = static_cast<uint8_t>(deep ? node - 1 : node / 9);
    }
    std::vector<ScoreQuery> queries;
    for (int node = kMaxTreeTokens - 1; node >= 0; node -= 3) {  // some are not asked, in no order
      for (int32_t token = 79; token >= 0; token -= 13) queries.push_back({node, token});
    }
    std::vector<float> logprobs(queries.size(), NAN);
    const auto on = executor(model.spec);
    prefill(*on, prompt);
    RoundResult result;
    const ScoreStep step{.tokens = tokens.data(),
                         .parents = parents.data(),
                         .count = kMaxTreeTokens,
                         .position = 69,
                         .pages = kPages,
                         .queries = queries.data(),
                         .query_count = static_cast<int32_t>(queries.size()),
                         .logprobs = logprobs.data()};
    CHECK(finish(*on, on->start_scores(step), result) == Status::kOk);
    const auto rounds = executor(model.spec);
    for (size_t i = 0; i < queries.size(); ++i) {
      std::vector<int32_t> text(prompt.begin(), prompt.end());
      std::vector<int32_t> way;
      for (int node = queries[i].node; node != 0; node = parents[static_cast<size_t>(node)]) {
        way.insert(way.begin(), tokens[static_cast<size_t>(node)]);
      }
      text.insert(text.end(), way.begin(), way.end());
      prefill(*rounds, text);
      CHECK_EQ(std::bit_cast<uint32_t>(logprobs[i]),
               std::bit_cast<uint32_t>(reported(*rounds, text, queries[i].token)));
    }
  }
}

TEST(a_pass_changes_nothing_that_follows) {
  const check::MedusaFile file(2, 1, /*own_lm_head=*/false, /*fp8=*/false);
  const std::vector<int32_t> prompt = some_tokens(90);
  const auto text_of = [&](bool scores) {
    const auto on = executor(file.model.spec);
    prefill(*on, prompt);
    std::vector<int32_t> text = prompt;
    const Sampling sampling;
    while (text.size() < 110) {
      if (scores) {
        Choices choices(random_labels(12, 4), {}, 64);
        score(*on, choices, text);
      }
      const auto last = static_cast<int32_t>(text.size()) - 1;
      RoundResult result;
      CHECK(finish(*on,
                   on->start_round({.token = text.back(),
                                    .position = last,
                                    .pages = kPages,
                                    .sampling = &sampling,
                                    .max_tokens = 4,
                                    .history = text.data(),
                                    .speculation = DrafterKind::kMedusa,
                                    .max_tree = 8}),
                   result) == Status::kOk);
      for (int i = 0; i < result.count; ++i) text.push_back(result.tokens[i].token);
    }
    return text;
  };
  CHECK(text_of(true) == text_of(false));
}

class Interrupting final : public Pulse {
 public:
  explicit Interrupting(int beats) : left_(beats) {}
  bool beat() noexcept override { return left_-- > 0; }

 private:
  int left_;
};

TEST(a_pass_that_is_aborted_can_be_run_again) {
  const check::ModelFile model;
  const std::vector<int32_t> prompt = some_tokens(40);
  const auto labels = random_labels(12, 4);
  const auto on = executor(model.spec);
  prefill(*on, prompt);
  Choices whole(labels, {}, 64);
  score(*on, whole, prompt);
  for (int beats = 0; beats < 3; ++beats) {  // the model has three layers
    Choices again(labels, {}, 64);
    Interrupting pulse(beats);
    on->set_pulse(&pulse);
    RoundResult result;
    CHECK(finish(*on, on->start_scores(again.next_step(prompt.back(), 39, kPages)), result) == Status::kAborted);
    on->set_pulse(nullptr);
    score(*on, again, prompt);
    for (size_t i = 0; i < labels.size(); ++i) CHECK_EQ(again.logprobs()[i], whole.logprobs()[i]);
  }
}

// Chains of tokens that stand in the cache already.
TEST(passes_over_a_prompt_have_the_bits_of_rounds_and_leave_it_as_it_was) {
  const check::ModelFile model;
  for (const int length : {2, 63, 64, 65, 66, 200}) {
    const std::vector<int32_t> text = some_tokens(length);
    const auto rounds = executor(model.spec);
    constexpr int kTop = 5;
    std::vector<RoundToken> expected;
    for (int place = 1; place < length; ++place) {
      const std::span<const int32_t> before = std::span(text).first(static_cast<size_t>(place));
      prefill(*rounds, before);
      expected.push_back(emitted(*rounds, before, text[static_cast<size_t>(place)], kTop));
    }
    const float next = reported(*rounds, text, 5);
    for (const int score_nodes : {1, 7, 64}) {
      const auto on = executor(model.spec);
      CHECK(on->info().scores_prompts());
      prefill(*on, text);
      PromptLogprobs logprobs(length, score_nodes, kTop);
      while (!logprobs.scored()) {
        const ScoreStep step = logprobs.next_step(text.data(), kPages);
        RoundResult result;
        Interrupting pulse(logprobs.found() % 3);
        on->set_pulse(&pulse);
        CHECK(finish(*on, on->start_scores(step), result) == Status::kAborted);
        on->set_pulse(nullptr);
        CHECK(finish(*on, on->start_scores(step), result) == Status::kOk);
        CHECK(logprobs.accept());
      }
      for (size_t i = 0; i < expected.size(); ++i) {
        CHECK_EQ(std::bit_cast<uint32_t>(logprobs.values()[i]), std::bit_cast<uint32_t>(expected[i].logprob));
        CHECK_EQ(expected[i].top_count, kTop);
        for (size_t rank = 0; rank < kTop; ++rank) check_equal(logprobs.top()[i * kTop + rank], expected[i].top[rank]);
      }
      CHECK_EQ(std::bit_cast<uint32_t>(reported(*on, text, 5)), std::bit_cast<uint32_t>(next));
    }
  }
}

TEST(passes_that_make_no_sense_are_refused) {
  const check::ModelFile model;
  const auto on = executor(model.spec);
  const std::vector<int32_t> tokens(65, 1);
  std::vector<uint8_t> parents(65, 0);
  const ScoreQuery query{0, 1};
  float logprob = 0.0F;
  const ScoreStep fine{.tokens = tokens.data(),
                       .parents = parents.data(),
                       .count = 64,
                       .position = 448,
                       .pages = kPages,
                       .queries = &query,
                       .query_count = 1,
                       .logprobs = &logprob};
  CHECK(on->start_scores(fine) == Status::kOk);
  const auto refused = [&](auto&& change) {
    ScoreStep step = fine;
    change(step);
    return on->start_scores(step) == Status::kExecutorFailed;
  };
  CHECK(refused([](ScoreStep& step) { step.count = 0; }));
  CHECK(refused([](ScoreStep& step) { step.count = 65, step.position = 0; }));
  CHECK(refused([](ScoreStep& step) { step.position = 449; }));
  CHECK(refused([](ScoreStep& step) { step.position = -1; }));
  CHECK(refused([](ScoreStep& step) { step.query_count = 0; }));
  CHECK(refused([](ScoreStep& step) { step.top_count = -1; }));
  CHECK(refused([](ScoreStep& step) { step.top_count = 21; }));
  for (const ScoreQuery& wrong : {ScoreQuery{64, 1}, ScoreQuery{-1, 1}, ScoreQuery{0, 80}, ScoreQuery{0, -1}}) {
    CHECK(refused([&](ScoreStep& step) { step.queries = &wrong; }));
  }
  parents[5] = 5;
  CHECK(refused([](ScoreStep&) {}));
  parents[5] = 0;
  parents[0] = 1;
  CHECK(refused([](ScoreStep&) {}));
}

TEST(a_logit_that_is_not_finite_fails_the_pass) {
  const check::ModelFile model(3, NAN);
  const auto on = executor(model.spec);
  Choices choices({{1}, {2}}, {}, 64);
  RoundResult result;
  CHECK(finish(*on, on->start_scores(choices.next_step(1, 0, kPages)), result) == Status::kExecutorFailed);
}

}  // namespace
