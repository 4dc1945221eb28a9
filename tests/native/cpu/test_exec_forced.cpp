// A round that takes the prompt's end with it gives the bits of a prefill and a plain round.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <memory>
#include <vector>

#include "check.h"
#include "medusa_file.h"
#include "testing/local_decoder.h"

using namespace ull;
using namespace ull::cpu;

namespace {

const int32_t kPages[] = {3, 0, 6, 1, 2, 7, 5, 4};
const LogitBias kBias[] = {{3, 2.0F}, {17, -1.0F}};

std::vector<int32_t> some_tokens(int count) {
  std::vector<int32_t> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back((i * 37 + i / 5) % 80);
  return tokens;
}

// Greedy, sampled, with logprobs, a bias, and penalties that look at the prompt.
std::vector<Sampling> samplings() {
  std::vector<Sampling> all(4);
  all[1].temperature = 0.8F;
  all[1].seed = 7;
  all[1].top_k = 20;
  all[2].top_logprobs = 5;
  all[2].bias = kBias;
  all[2].bias_count = 2;
  all[3].temperature = 1.0F;
  all[3].top_logprobs = 0;
  all[3].repetition_penalty = 1.7F;
  all[3].frequency_penalty = 0.9F;
  all[3].presence_penalty = -0.4F;
  return all;
}

void check_equal(const Decoded& a, const Decoded& b, const Sampling& sampling) {
  CHECK(!a.failed && !b.failed);
  REQUIRE(a.tokens.size() == b.tokens.size());
  for (size_t i = 0; i < a.tokens.size(); ++i) {
    CHECK_EQ(a.tokens[i].token, b.tokens[i].token);
    if (sampling.top_logprobs < 0) continue;
    CHECK_EQ(std::bit_cast<int32_t>(a.tokens[i].logprob), std::bit_cast<int32_t>(b.tokens[i].logprob));
    for (int rank = 0; rank < sampling.top_logprobs; ++rank) {
      CHECK_EQ(a.tokens[i].top[rank].token, b.tokens[i].top[rank].token);
    }
  }
}

std::unique_ptr<LocalDecoder> decoder(const ModelSpec& spec, int chunk, int threads) {
  ModelOptions options;
  options.chunk = chunk;
  options.threads = threads;
  return std::make_unique<LocalDecoder>(spec, options, SpeculationOptions{.adaptive = false});
}

}  // namespace

TEST(forced_rounds_keep_every_bit) {
  const check::MedusaFile file(2, 1, /*own_lm_head=*/false, /*fp8=*/false);
  ModelSpec spec = file.model.spec;
  auto draft = std::make_shared<ModelSpec>(spec);
  draft->medusa = nullptr;
  draft->layers = 2;
  draft->windows.resize(2);
  spec.draft = draft;
  const auto plain = decoder(spec, 64, 1);
  for (const int chunk : {16, 64}) {
    for (const int threads : {1, 2}) {
      const auto forcing = decoder(spec, chunk, threads);
      CHECK_EQ(forcing->info().forced_tokens, chunk - 1);
      int drawn = 0;
      for (const int length : {1, 2, 3, 16, 17, 18, 64, 65, 100, 150}) {
        const std::vector<int32_t> prompt = some_tokens(length);
        const Sampling sampling = samplings()[static_cast<size_t>(drawn++ % 4)];
        DecodeRequest request{.tokens = prompt, .max_tokens = 12, .sampling = sampling, .max_tree = 6, .pages = kPages};
        const Decoded expected = plain->decode(request);
        for (const auto speculation : {DrafterKind::kNone, DrafterKind::kSuffix, DrafterKind::kMedusa,
                                       DrafterKind::kDraft, DrafterKind::kAuto}) {
          request.speculation = speculation;
          request.forced = std::min(drawn * 5, chunk - 1);
          request.cached = 0;
          check_equal(forcing->decode(request), expected, sampling);
          // The rest of the prompt behind what that request has left in the cache.
          request.cached = std::max(0, length - 1 - drawn);
          check_equal(forcing->decode(request), expected, sampling);
        }
      }
    }
  }
}

TEST(penalties_see_the_forced_tokens) {
  const check::ModelFile model;
  const auto each = decoder(model.spec, 64, 1);
  Sampling sampling;
  sampling.repetition_penalty = 5.0F;
  for (int length = 40; length < 60; ++length) {
    const std::vector<int32_t> prompt = some_tokens(length);
    DecodeRequest request{.tokens = prompt, .max_tokens = 2, .sampling = sampling, .pages = kPages};
    const Decoded expected = each->decode(request);
    request.forced = 35;
    check_equal(each->decode(request), expected, sampling);
  }
}

// After a forced round drafts are as good as after a prefill: each drafter knows the prompt.
TEST(drafters_know_what_a_forced_round_has_read) {
  const check::ModelFile model;
  ModelSpec spec = model.spec;
  spec.draft = std::make_shared<ModelSpec>(spec);
  const auto forcing = decoder(spec, 64, 1);
  const std::vector<int32_t> prompt = some_tokens(60);
  DecodeRequest request{.tokens = prompt, .max_tokens = 20, .speculation = DrafterKind::kDraft, .max_tree = 6};
  request.forced = 63;
  const Decoded decoded = forcing->decode(request);
  CHECK(decoded.rounds[0].drafter == DrafterKind::kNone);
  CHECK_EQ(decoded.rounds[0].tree_tokens, 1);
  for (size_t round = 1; round < decoded.rounds.size(); ++round) {
    if (static_cast<int>(round) + 1 == static_cast<int>(decoded.rounds.size())) continue;  // cut by the end
    CHECK(decoded.rounds[round].drafter == DrafterKind::kDraft);
    CHECK_EQ(decoded.rounds[round].accepted, decoded.rounds[round].depth);  // the draft model is the target
  }

  const check::MedusaFile file(2, 1, /*own_lm_head=*/false, /*fp8=*/false);
  const auto medusa = decoder(file.model.spec, 64, 1);
  request.speculation = DrafterKind::kMedusa;
  const Decoded with_heads = medusa->decode(request);
  REQUIRE(with_heads.rounds.size() > 1);
  CHECK(with_heads.rounds[1].drafter == DrafterKind::kMedusa);  // the last node's hidden state is known
}

TEST(forced_rounds_that_make_no_sense_are_refused) {
  const check::ModelFile model;
  ModelOptions options;
  options.chunk = 64;
  CpuExecutor executor(model.spec, options);
  executor.prepare();
  std::vector<int32_t> history = some_tokens(512);
  const Sampling greedy;
  RoundStep good{.token = history[10],
                 .position = 10,
                 .pages = kPages,
                 .sampling = &greedy,
                 .max_tokens = 1,
                 .history = history.data(),
                 .prompt_tokens = 74,
                 .forced = 63};
  CHECK(executor.start_round(good) == Status::kOk);
  const auto refused = [&](auto&& spoil) {
    RoundStep step = good;
    spoil(step);
    CHECK(executor.start_round(step) == Status::kExecutorFailed);
  };
  refused([](RoundStep& step) { step.forced = 64; });
  refused([](RoundStep& step) { step.forced = -1; });
  refused([](RoundStep& step) { step.history = nullptr; });
  refused([](RoundStep& step) { step.token += 1; });
  refused([&](RoundStep& step) { step.position = 480, step.token = history[480]; });  // beyond the context
  history[40] = 80;
  refused([](RoundStep&) {});
}
