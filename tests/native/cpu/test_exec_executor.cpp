// CpuExecutor as the engine drives it, and the sampler's reports.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "cpu/cpu_executor.h"
#include "cpu/offline/local_session.h"
#include "exec_model.h"

using namespace ull;
using namespace ull::cpu;

namespace {

const int32_t kPages[] = {3, 0, 6, 1, 2, 7, 5, 4};

std::vector<int32_t> some_tokens(int count) {
  std::vector<int32_t> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back(i * 37 % 80);
  return tokens;
}

std::unique_ptr<CpuExecutor> prepared(const ModelSpec& spec, int threads, int chunk) {
  ModelOptions options;
  options.threads = threads;
  options.chunk = chunk;
  auto executor = std::make_unique<CpuExecutor>(spec, options);
  executor->prepare();
  return executor;
}

Status finish(Executor& executor, RoundResult& result) {
  Status status = Status::kPending;
  while (status == Status::kPending) status = executor.poll(result);
  return status;
}

}  // namespace

TEST(rounds_emit_what_a_plain_session_generates) {
  const check::ModelFile model;
  const std::vector<int32_t> prompt = some_tokens(150);
  LocalSession sequence(model.spec, {});
  const std::vector<int32_t> expected = sequence.generate_greedy(prompt, 20);
  for (const int threads : {1, 2}) {
    const auto executor = prepared(model.spec, threads, 64);
    CHECK_EQ(executor->info().vocabulary, 80);
    CHECK_EQ(executor->info().context, 512);
    CHECK_EQ(executor->info().page_count, 8);
    CHECK_EQ(executor->info().prefill_chunk, 64);
    CHECK(executor->info().kv_bytes > 0 && executor->info().weight_bytes > 0);
    RoundResult result;
    for (int start = 0; start < 149; start += 64) {
      REQUIRE(executor->start_prefill({prompt.data() + start, std::min(64, 149 - start), start, kPages}) ==
              Status::kOk);
      REQUIRE(finish(*executor, result) == Status::kOk);
      CHECK_EQ(result.count, 0);
    }
    const Sampling greedy;
    int32_t token = prompt.back();
    for (int i = 0; i < 20; ++i) {
      REQUIRE(executor->start_round({token, 149 + i, kPages, &greedy, 8}) == Status::kOk);
      REQUIRE(finish(*executor, result) == Status::kOk);
      REQUIRE(result.count == 1);
      token = result.tokens[0].token;
      CHECK_EQ(token, expected[static_cast<size_t>(i)]);
    }
  }
}

TEST(sampled_tokens_are_those_of_the_next_position) {
  const check::ModelFile model;
  const auto executor = prepared(model.spec, 1, 64);
  LocalSession sequence(model.spec, {});
  Sampling sampling;
  sampling.temperature = 1.0F;
  sampling.seed = 77;
  for (int position = 0; position < 30; ++position) {
    RoundResult result;
    REQUIRE(executor->start_round({position, position, kPages, &sampling, 1}) == Status::kOk);
    REQUIRE(finish(*executor, result) == Status::kOk);
    const std::vector<float> logits = sequence.decode(position, position);
    const float peak = *std::max_element(logits.begin(), logits.end());
    CHECK_EQ(result.tokens[0].token, portable_kernels().gumbel_argmax(logits.data(), 80, peak, 1.0F, 77, position + 1));
  }
}

TEST(steps_that_make_no_sense_are_refused_and_do_no_harm) {
  const check::ModelFile model;
  const auto executor = prepared(model.spec, 1, 64);
  const std::vector<int32_t> tokens = some_tokens(65), bad = {80}, negative = {-1};
  const Sampling greedy;
  CHECK(executor->start_prefill({tokens.data(), 0, 0, kPages}) == Status::kExecutorFailed);
  CHECK(executor->start_prefill({tokens.data(), 65, 0, kPages}) == Status::kExecutorFailed);
  CHECK(executor->start_prefill({tokens.data(), 2, 511, kPages}) == Status::kExecutorFailed);
  CHECK(executor->start_prefill({tokens.data(), 2, -1, kPages}) == Status::kExecutorFailed);
  CHECK(executor->start_prefill({bad.data(), 1, 0, kPages}) == Status::kExecutorFailed);
  CHECK(executor->start_prefill({negative.data(), 1, 0, kPages}) == Status::kExecutorFailed);
  CHECK(executor->start_round({0, 512, kPages, &greedy, 1}) == Status::kExecutorFailed);
  CHECK(executor->start_round({0, 0, kPages, &greedy, 0}) == Status::kExecutorFailed);
  RoundResult result;
  REQUIRE(executor->start_round({0, 511, kPages, &greedy, 1}) == Status::kOk);
  CHECK(finish(*executor, result) == Status::kOk);
}

TEST(abort_ends_the_step_in_flight_and_no_later_one) {
  const check::ModelFile model(40);
  const auto executor = prepared(model.spec, 2, 256);
  const std::vector<int32_t> tokens = some_tokens(256);
  RoundResult result;
  executor->abort();  // nothing is in flight: without effect
  REQUIRE(executor->start_prefill({tokens.data(), 256, 0, kPages}) == Status::kOk);
  CHECK(finish(*executor, result) == Status::kOk);
  std::atomic<bool> over{false};
  std::thread aborter([&] {
    while (!over.load(std::memory_order_relaxed)) {
      executor->abort();
      std::this_thread::yield();
    }
  });
  Status status = Status::kOk;
  for (int attempt = 0; attempt < 1000 && status == Status::kOk; ++attempt) {
    if (executor->start_prefill({tokens.data(), 256, 0, kPages}) != Status::kOk) break;
    status = finish(*executor, result);
  }
  over.store(true, std::memory_order_relaxed);
  aborter.join();
  CHECK(status == Status::kAborted);
  REQUIRE(executor->start_prefill({tokens.data(), 256, 0, kPages}) == Status::kOk);
  CHECK(finish(*executor, result) == Status::kOk);
}

// A page's first tokens serve from another page as they did from their own, in the draft model's cache too.
TEST(a_copied_page_gives_the_same_bits) {
  const check::ModelFile model;
  for (const Format format : {Format::kF32, Format::kBf16}) {
    for (const int shared : {129, 150, 160, 161, 191, 192}) {
      ModelSpec spec = model.spec;
      spec.kv_format = format;
      spec.draft = std::make_shared<ModelSpec>(spec);
      ModelOptions options;
      options.chunk = 256;
      CpuExecutor executor(spec, options, {.adaptive = false});
      executor.prepare();
      const std::vector<int32_t> tokens = some_tokens(240);
      Drafted drafted;
      RoundResult result;
      Sampling sampling;
      sampling.top_logprobs = 5;
      const auto round = [&](const int32_t* pages) {
        drafted.model = shared;
        RoundStep step{tokens[static_cast<size_t>(shared)], shared, pages, &sampling, 8, tokens.data()};
        step.speculation = DrafterKind::kDraft;
        step.max_tree = 6;
        step.drafted = &drafted;
        REQUIRE(executor.start_round(step) == Status::kOk);
        CHECK(finish(executor, result) == Status::kOk);
      };
      const auto prefill = [&](const int32_t* first, const int32_t* pages) {
        drafted = {};
        REQUIRE(executor.start_prefill({first, 200, 0, pages, &drafted, DrafterKind::kDraft}) == Status::kOk);
        REQUIRE(finish(executor, result) == Status::kOk);
      };
      // The pages that are copied to hold something else before; afterwards the page copied from does.
      const int32_t other[] = {3, 0, 7, 5};
      prefill(tokens.data() + 30, other);
      prefill(tokens.data(), kPages);
      REQUIRE(executor.start_copy({kPages[2], 7, shared - 128}) == Status::kOk);
      REQUIRE(finish(executor, result) == Status::kOk);
      round(kPages);
      const RoundResult expected = result;
      const int32_t third[] = {1, 2, kPages[2], 4};
      prefill(tokens.data() + 30, third);
      round(other);
      CHECK(result.depth > 2);
      CHECK_EQ(result.accepted, result.depth);  // a draft model that is the target is right
      for (int i = 0; i < std::min(result.count, expected.count); ++i) {
        CHECK_EQ(result.tokens[i].token, expected.tokens[i].token);
        CHECK(std::bit_cast<int32_t>(result.tokens[i].logprob) == std::bit_cast<int32_t>(expected.tokens[i].logprob));
      }
    }
  }
  const auto executor = prepared(model.spec, 1, 64);
  CHECK(executor->info().copies_pages);
  for (const CopyStep& wrong :
       {CopyStep{0, 0, 1}, CopyStep{-1, 0, 1}, CopyStep{0, 8, 1}, CopyStep{0, 1, 0}, CopyStep{0, 1, kPageTokens + 1}}) {
    CHECK(executor->start_copy(wrong) == Status::kExecutorFailed);
  }
}

TEST(nan_logits_fail_instead_of_emitting_a_token) {
  const check::ModelFile model(2, std::numeric_limits<float>::quiet_NaN());
  const auto executor = prepared(model.spec, 1, 64);
  const Sampling greedy;
  RoundResult result;
  REQUIRE(executor->start_round({0, 0, kPages, &greedy, 1}) == Status::kOk);
  CHECK(finish(*executor, result) == Status::kExecutorFailed);
  CHECK_EQ(result.count, 0);
}

TEST(a_missing_file_is_reported_by_prepare) {
  check::ModelFile model;
  ModelSpec spec = model.spec;
  spec.path += ".gone";
  CHECK_THROWS(prepared(spec, 1, 64), std::invalid_argument);
}

TEST(logprobs_are_log_softmax_of_the_raw_logits) {
  std::mt19937 random(3);
  std::normal_distribution<float> normal(0.0F, 3.0F);
  const int vocabulary = 1000;
  std::vector<float> logits(vocabulary);
  for (float& logit : logits) logit = normal(random);
  logits[500] = logits[20];  // a tie among the alternatives, if it comes to that
  const std::vector<float> before = logits;
  double total = 0.0;
  for (const float logit : logits) total += std::exp(static_cast<double>(logit));
  std::vector<int> order(vocabulary);
  for (int i = 0; i < vocabulary; ++i) order[static_cast<size_t>(i)] = i;
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return before[static_cast<size_t>(a)] > before[static_cast<size_t>(b)]; });

  Sampler sampler(select_kernels("auto"), vocabulary);
  const LogitBias bias[] = {{3, 30.0F}, {4, -1e9F}, {3, 1.0F}};  // the same token twice: both count
  for (const int top : {-1, 0, 5, 20}) {
    Sampling sampling;
    sampling.temperature = 0.7F;
    sampling.top_k = 50;
    sampling.top_logprobs = top;
    sampling.bias = bias;
    sampling.bias_count = 3;
    RoundToken token{};
    REQUIRE(sampler.sample(logits.data(), 9, sampling, token) == Status::kOk);
    CHECK_EQ(token.token, 3);
    CHECK(logits == before);  // the bias is gone again, to the bit
    CHECK_EQ(token.top_count, std::max(top, 0));
    if (top < 0) continue;
    const auto exact = [&](int id) { return static_cast<double>(before[static_cast<size_t>(id)]) - std::log(total); };
    CHECK(std::abs(static_cast<double>(token.logprob) - exact(3)) < 1e-5);
    for (int i = 0; i < token.top_count; ++i) {
      CHECK_EQ(token.top[i].token, order[static_cast<size_t>(i)]);
      CHECK(std::abs(static_cast<double>(token.top[i].logprob) - exact(order[static_cast<size_t>(i)])) < 1e-5);
    }
  }
  const LogitBias outside[] = {{vocabulary, 1.0F}};
  Sampling sampling;
  sampling.bias = outside;
  sampling.bias_count = 1;
  RoundToken token{};
  CHECK(sampler.sample(logits.data(), 0, sampling, token) == Status::kExecutorFailed);
  CHECK(logits == before);
}

TEST(filters_keep_the_smaller_id_of_a_tie) {
  std::vector<float> logits(100, 0.0F);
  Sampler sampler(select_kernels("auto"), 100);
  for (uint64_t seed = 0; seed < 300; ++seed) {
    Sampling sampling;
    sampling.temperature = 1.0F;
    sampling.seed = seed;
    RoundToken token{};
    sampling.top_k = 3;
    REQUIRE(sampler.sample(logits.data(), 0, sampling, token) == Status::kOk);
    CHECK(token.token < 3);
    sampling.top_k = 0;
    sampling.top_p = 0.095F;  // ten of a hundred equal tokens
    REQUIRE(sampler.sample(logits.data(), 0, sampling, token) == Status::kOk);
    CHECK(token.token < 10);
  }
}
