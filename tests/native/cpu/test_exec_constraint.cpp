// A constraint on the cpu executor: what is drawn is allowed, and is what plain rounds draw, whoever drafts.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "check.h"
#include "cpu/sampler.h"
#include "medusa_file.h"
#include "scripted_constraint.h"
#include "testing/local_decoder.h"
#include "testing/scripted_drafter.h"

using namespace ull;
using namespace ull::cpu;
using test::ScriptedConstraint;
using test::some_tokens_until;
using test::Tokens;

namespace {

constexpr int kVocabulary = 80;

Tokens prompt_of(int count) {
  Tokens tokens;
  for (int i = 0; i < count; ++i) tokens.push_back((i * 37 + i / 5) % kVocabulary);
  return tokens;
}

std::vector<Sampling> samplings() {
  std::vector<Sampling> all(4);
  all[1].temperature = 0.8F;
  all[1].seed = 7;
  all[2].temperature = 1.3F;
  all[2].top_k = 20;
  all[2].top_p = 0.9F;
  all[2].top_logprobs = 3;
  all[3].temperature = 1.0F;
  all[3].min_p = 0.05F;
  all[3].repetition_penalty = 1.7F;
  return all;
}

Tokens tokens_of(const Decoded& decoded) {
  Tokens tokens;
  for (const RoundToken& token : decoded.tokens) tokens.push_back(token.token);
  return tokens;
}

void check_equal(const Decoded& a, const Decoded& b) {
  CHECK(tokens_of(a) == tokens_of(b));
  CHECK_EQ(a.failed, b.failed);
  for (size_t i = 0; i < std::min(a.tokens.size(), b.tokens.size()); ++i) {
    CHECK_EQ(std::bit_cast<int32_t>(a.tokens[i].logprob), std::bit_cast<int32_t>(b.tokens[i].logprob));
  }
}

struct Drawn {
  Decoded decoded;
  Tokens taken;
  int masks = 0;
};

Drawn draw(LocalDecoder& decoder, DecodeRequest request, size_t length, int fails_behind = -1) {
  ScriptedConstraint constraint(some_tokens_until(length, kVocabulary), fails_behind);
  request.constraint = &constraint;
  Drawn drawn;
  drawn.decoded = decoder.decode(request);
  drawn.taken = constraint.text;
  drawn.masks = constraint.masks;
  return drawn;
}

ModelSpec with_every_drafter(const check::MedusaFile& file) {
  ModelSpec spec = file.model.spec;
  auto draft = std::make_shared<ModelSpec>(spec);
  draft->medusa = nullptr;
  draft->layers = 2;
  draft->windows.resize(2);
  spec.draft = draft;
  return spec;
}

}  // namespace

// The second draw is the one of a request that bans what is not allowed.
TEST(a_masked_draw_is_that_of_a_ban) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal(0.0F, 3.0F);
  Sampler sampler(select_kernels("auto"), kVocabulary);
  for (int round = 0; round < 400; ++round) {
    std::vector<float> logits(kVocabulary);
    for (float& logit : logits) logit = normal(random);
    std::vector<uint32_t> mask((kVocabulary + 31) / 32);
    std::vector<LogitBias> bans;
    const unsigned kept = 1 + random() % 100;
    for (int32_t token = 0; token < kVocabulary; ++token) {
      if (random() % 100 < kept || (token == kVocabulary - 1 && bans.size() == kVocabulary - 1U)) {
        mask[static_cast<size_t>(token / 32)] |= 1U << (token % 32);
      } else {
        bans.push_back({token, -std::numeric_limits<float>::infinity()});
      }
    }
    for (Sampling sampling : samplings()) {
      std::vector<float> scratch = logits;
      RoundToken masked{}, banned{};
      CHECK(sampler.sample(scratch.data(), round, sampling, masked, nullptr, mask.data()) == Status::kOk);
      CHECK(scratch == logits);
      sampling.bias = bans.data();
      sampling.bias_count = static_cast<int32_t>(bans.size());
      CHECK(sampler.sample(scratch.data(), round, sampling, banned) == Status::kOk);
      CHECK_EQ(masked.token, banned.token);
      CHECK_EQ(std::bit_cast<int32_t>(masked.logprob), std::bit_cast<int32_t>(banned.logprob));
      CHECK((mask[static_cast<size_t>(masked.token / 32)] >> (masked.token % 32) & 1U) != 0);
    }
  }
}

// One of the failures of other servers: tokens outside of the grammar, from trees that the draft model shapes.
TEST(no_tree_lets_a_token_outside_of_the_grammar_through) {
  const check::ModelFile model;
  const Tokens prompt = prompt_of(30);
  LocalDecoder plain(model.spec, {}, {});
  for (const Sampling& sampling : samplings()) {
    DecodeRequest request{.tokens = prompt, .max_tokens = 60, .sampling = sampling};
    const Drawn expected = draw(plain, request, 50);
    CHECK(!expected.decoded.failed);
    CHECK_EQ(expected.decoded.tokens.size(), 50U);  // the text was whole
    CHECK(expected.taken == tokens_of(expected.decoded));
    CHECK(expected.masks > 0 && expected.masks < 50);  // none where the winner was allowed
    Tokens truth = prompt;
    truth.insert(truth.end(), expected.taken.begin(), expected.taken.end());
    const Tokens unconstrained = tokens_of(plain.decode(request));
    Tokens lure = prompt;  // right for a request without the grammar
    lure.insert(lure.end(), unconstrained.begin(), unconstrained.end());
    using Mode = ScriptedDrafter::Mode;
    for (const Mode mode :
         {Mode::kRight, Mode::kWrong, Mode::kRandom, Mode::kMixed, Mode::kDuplicates, Mode::kBeyond}) {
      for (const Tokens& known : {truth, lure}) {
        SpeculationOptions options{.adaptive = false};
        options.in_place_of_draft_model = scripted_drafter(mode, known, kVocabulary, 11);
        LocalDecoder decoder(model.spec, {}, std::move(options));
        request.speculation = DrafterKind::kDraft;
        for (const int max_tree : {2, 9, 64}) {
          request.max_tree = max_tree;
          const Drawn drawn = draw(decoder, request, 50);
          check_equal(drawn.decoded, expected.decoded);
          CHECK(drawn.taken == expected.taken);
          CHECK_EQ(drawn.masks, expected.masks);
        }
        // A round that begins where the last one ended has taken what that one emitted, and no more.
        if (mode == Mode::kRight && known == truth) CHECK(draw(decoder, request, 50).decoded.rounds.size() == 1);
      }
    }
  }
}

TEST(every_drafter_gives_the_same_answer) {
  const check::MedusaFile file(2, 1, /*own_lm_head=*/false, /*fp8=*/false);
  const ModelSpec spec = with_every_drafter(file);
  const Tokens prompt = prompt_of(70);
  ModelOptions options;
  options.chunk = 64;
  LocalDecoder decoder(spec, options, {.adaptive = false});
  for (const Sampling& sampling : samplings()) {
    DecodeRequest request{.tokens = prompt, .max_tokens = 40, .sampling = sampling, .max_tree = 8};
    for (const size_t length : {1, 2, 25, 100}) {
      const Drawn expected = draw(decoder, request, length);
      CHECK_EQ(expected.decoded.tokens.size(), std::min<size_t>(length, 40));
      for (const DrafterKind kind :
           {DrafterKind::kNone, DrafterKind::kSuffix, DrafterKind::kMedusa, DrafterKind::kDraft, DrafterKind::kAuto}) {
        for (const int forced : {0, 20}) {
          DecodeRequest drafted = request;
          drafted.speculation = kind;
          drafted.forced = forced;
          const Drawn drawn = draw(decoder, drafted, length);
          check_equal(drawn.decoded, expected.decoded);
          CHECK(drawn.taken == expected.taken);
        }
      }
    }
  }
}

// The round that meets the failure says what it had before; the next one fails.
TEST(a_constraint_that_fails_ends_the_text_where_it_fails) {
  const check::ModelFile model;
  const Tokens prompt = prompt_of(20);
  const DecodeRequest request{.tokens = prompt, .max_tokens = 40};
  LocalDecoder plain(model.spec, {}, {});
  const Tokens whole = draw(plain, request, 40).taken;
  for (const int behind : {0, 1, 7, 39}) {
    const Drawn alone = draw(plain, request, 40, behind);
    CHECK(alone.decoded.failed);
    CHECK(tokens_of(alone.decoded) == Tokens(whole.begin(), whole.begin() + behind));
    Tokens truth = prompt;
    truth.insert(truth.end(), whole.begin(), whole.end());
    SpeculationOptions options{.adaptive = false};
    options.in_place_of_draft_model = scripted_drafter(ScriptedDrafter::Mode::kRight, truth, kVocabulary, 1);
    LocalDecoder decoder(model.spec, {}, std::move(options));
    DecodeRequest drafted = request;
    drafted.speculation = DrafterKind::kDraft;
    check_equal(draw(decoder, drafted, 40, behind).decoded, alone.decoded);
    check_equal(draw(decoder, drafted, 40).decoded, draw(plain, request, 40).decoded);  // the executor goes on
  }
}

TEST(after_an_aborted_round_the_constraint_stands_where_it_stood) {
  struct Nothing final : Pulse {
    bool beat() noexcept override { return false; }
  } nothing;
  const check::ModelFile model;
  CpuExecutor executor(model.spec, {});
  executor.prepare();
  std::vector<int32_t> pages(static_cast<size_t>(executor.info().page_count));
  std::iota(pages.begin(), pages.end(), 0);
  const Tokens history = prompt_of(20);
  const Sampling greedy;
  ScriptedConstraint constraint(some_tokens_until(9, kVocabulary));
  const RoundStep step{.token = history[0],
                       .position = 0,
                       .pages = pages.data(),
                       .sampling = &greedy,
                       .max_tokens = 5,
                       .history = history.data(),
                       .forced = 19,
                       .constraint = &constraint};
  RoundResult result;
  executor.set_pulse(&nothing);
  CHECK(executor.start_round(step) == Status::kOk);
  CHECK(executor.poll(result) == Status::kAborted);
  CHECK(constraint.text.empty());
  CHECK_EQ(constraint.takes, 0);
  executor.set_pulse(nullptr);
  CHECK(executor.start_round(step) == Status::kOk);
  CHECK(executor.poll(result) == Status::kOk);
  CHECK(constraint.text == Tokens{result.tokens[0].token});
}
