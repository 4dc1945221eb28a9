// Decoding with an EAGLE head: its drafts change the speed of an output, never the output.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "eagle_file.h"
#include "scripted_constraint.h"
#include "testing/local_decoder.h"

using namespace ull;
using namespace ull::cpu;
using TapNorm = EagleSpec::TapNorm;

namespace {

const int32_t kPages[] = {3, 0, 6, 1, 2, 7, 5, 4};
const LogitBias kBias[] = {{3, 2.0F}, {17, -1.0F}};

std::vector<int32_t> some_tokens(int count) {
  std::vector<int32_t> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back((i * 37 + i / 5) % 80);
  return tokens;
}

std::vector<Sampling> samplings() {
  std::vector<Sampling> all(6);
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
  all[4].temperature = 0.3F;
  all[4].seed = 3;
  all[4].top_p = 0.9F;
  all[4].min_p = 0.02F;
  all[5].frequency_penalty = 1.5F;
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

std::unique_ptr<LocalDecoder> decoder(const ModelSpec& spec, int chunk, int threads, bool adaptive = false) {
  ModelOptions options;
  options.chunk = chunk;
  options.threads = threads;
  return std::make_unique<LocalDecoder>(spec, options, SpeculationOptions{.adaptive = adaptive});
}

int drafted_rounds(const Decoded& out) {
  return static_cast<int>(std::count_if(out.rounds.begin(), out.rounds.end(),
                                        [](const DecodeRound& round) { return round.drafter == DrafterKind::kEagle; }));
}

std::vector<check::EagleOptions> some_options() {
  std::vector<check::EagleOptions> all(3);
  all[1] = {.norm_before_residual = true, .norm_output = true, .tap_norm = TapNorm::kEach, .mapped = true, .window = 9};
  all[2] = {.tap_norm = TapNorm::kAll, .own_embedding = true, .mapped = true, .own_shape = true, .qk_norm = true};
  return all;
}

// Overwrites a tensor of the target with zeros.
void zero(const ModelSpec& spec, const std::string& name) {
  const TensorInfo& tensor = spec.tensors.at(name);
  FILE* file = std::fopen(spec.path.c_str(), "r+b");
  const std::vector<char> zeros(static_cast<size_t>(tensor.bytes));
  if (file == nullptr || std::fseek(file, tensor.offset, SEEK_SET) != 0) std::abort();
  if (std::fwrite(zeros.data(), 1, zeros.size(), file) != zeros.size()) std::abort();
  std::fclose(file);
}

}  // namespace

// Prompts are read in chunks of that many, by so many threads.
static void check_drafted_output(int chunk, int threads) {
  for (const check::EagleOptions& options : some_options()) {
    const check::EagleFile file(options);
    const auto plain = decoder(file.model.spec, 64, 1);
    const auto drafting = decoder(file.model.spec, chunk, threads);
    int drawn = 0;
    for (const Sampling& sampling : samplings()) {
      for (const int length : {1, 2, 17, 64, 65, 150}) {
        const std::vector<int32_t> prompt = some_tokens(length);
        DecodeRequest request{.tokens = prompt, .max_tokens = 20, .sampling = sampling, .pages = kPages};
        const Decoded expected = plain->decode(request);
        request.speculation = DrafterKind::kEagle;
        request.max_tree = ++drawn % 2 == 0 ? 6 : 0;
        const Decoded out = drafting->decode(request);
        check_equal(out, expected, sampling);
        CHECK(drafted_rounds(out) > 0);
        request.speculation = DrafterKind::kAuto;
        request.forced = std::min(drawn, chunk - 1);
        check_equal(drafting->decode(request), expected, sampling);
        // Behind what that request has left in the caches; a cut in a page's midst, at its end, and of all.
        for (const int cached : {length - 1, length / 2, 0}) {
          request.cached = cached;
          request.speculation = cached % 2 == 0 ? DrafterKind::kEagle : DrafterKind::kNone;
          check_equal(drafting->decode(request), expected, sampling);
        }
        request.cached = 0;
      }
    }
  }
}

TEST(drafted_output_is_the_plain_one_to_the_bit_by_two_threads) { check_drafted_output(16, 2); }

TEST(drafted_output_is_the_plain_one_to_the_bit_in_whole_chunks) { check_drafted_output(64, 1); }

TEST(entries_that_nobody_read_are_done_without) {
  const check::EagleFile file;
  const auto plain = decoder(file.model.spec, 64, 1), drafting = decoder(file.model.spec, 64, 1);
  const std::vector<int32_t> prompt = some_tokens(300);
  for (const Sampling& sampling : samplings()) {
    DecodeRequest request{.tokens = prompt, .max_tokens = 10, .sampling = sampling, .pages = kPages};
    const Decoded expected = plain->decode(request);
    check_equal(drafting->decode(request), expected, sampling);  // its prompt is in the target's cache alone
    request.speculation = DrafterKind::kEagle;
    request.cached = 260;
    const Decoded out = drafting->decode(request);
    check_equal(out, expected, sampling);
    CHECK(drafted_rounds(out) > 2);
  }
}

TEST(a_constraint_holds_with_drafts) {
  const check::EagleFile file;
  const auto plain = decoder(file.model.spec, 64, 1), drafting = decoder(file.model.spec, 64, 1);
  const std::vector<int32_t> prompt = some_tokens(40);
  const test::Rule rule = [](const test::Tokens& text) -> test::Tokens {
    if (text.size() == 15) return {};
    if (text.size() % 4 == 3) return {9};
    test::Tokens allowed;
    for (int32_t token = static_cast<int32_t>(text.size()) % 3; token < 80; token += 3) allowed.push_back(token);
    return allowed;
  };
  for (const Sampling& sampling : samplings()) {
    test::ScriptedConstraint first(rule), second(rule);
    DecodeRequest request{
        .tokens = prompt, .max_tokens = 30, .sampling = sampling, .pages = kPages, .constraint = &first};
    const Decoded expected = plain->decode(request);
    CHECK_EQ(expected.tokens.size(), 15U);
    request.constraint = &second;
    request.speculation = DrafterKind::kEagle;
    check_equal(drafting->decode(request), expected, sampling);
  }
}

// The target's layers add nothing, so that the next token depends on the last alone, and a head whose attention hands
// on the embedding of the token to come knows as much.
TEST(what_a_head_proposes_that_knows_the_target_is_accepted) {
  const auto fill = [](const std::string& name, int row, int column) -> float {
    if (name == "layers.0.hidden_norm") return 0.0F;  // and so the residual stream, too, begins with nothing
    if (name.ends_with("norm")) return 1.0F;
    if (name == "layers.0.qkv") return row >= 128 && row - 128 == column ? 1.0F : 0.0F;  // values: the embedding
    if (name == "layers.0.o") return row == column ? 1.0F : 0.0F;
    return 0.0F;
  };
  check::EagleFile file({.norm_before_residual = true, .window = 1}, fill);
  ModelSpec spec = file.model.spec;
  for (int layer = 0; layer < spec.layers; ++layer) {
    zero(spec, "layers." + std::to_string(layer) + ".o.weight");
    zero(spec, "layers." + std::to_string(layer) + ".down.weight");
  }
  // Its lm_head and norm are the target's.
  auto eagle = std::make_shared<EagleSpec>(*file.spec);
  eagle->model.tensors["lm_head.weight"] = spec.tensors.at("lm_head.weight");
  eagle->model.tensors["norm"] = spec.tensors.at("norm");
  spec.eagle = eagle;
  const auto plain = decoder(spec, 64, 1), drafting = decoder(spec, 64, 2);
  const std::vector<int32_t> prompt = some_tokens(70);
  for (const Sampling& sampling : samplings()) {
    DecodeRequest request{.tokens = prompt, .max_tokens = 60, .sampling = sampling, .pages = kPages};
    const Decoded expected = plain->decode(request);
    request.speculation = DrafterKind::kEagle;
    const Decoded out = drafting->decode(request);
    check_equal(out, expected, sampling);
    for (const DecodeRound& round : out.rounds) CHECK(round.accepted >= std::min(round.depth, 1));
    CHECK(out.rounds.size() <= 20);  // by as much as the trees are deep
  }
}

TEST(an_adaptive_executor_names_its_drafter_and_costs) {
  const check::EagleFile file;
  const auto drafting = decoder(file.model.spec, 64, 1, /*adaptive=*/true);
  const auto kind = static_cast<size_t>(DrafterKind::kEagle);
  CHECK(drafting->info().drafters[kind]);
  CHECK(drafting->info().draft_ns[kind] > 0);
  CHECK(drafting->info().drafter_kv_bytes > 0);
  const auto plain = decoder(file.model.spec, 64, 1);
  for (const Sampling& sampling : samplings()) {
    const std::vector<int32_t> prompt = some_tokens(200);
    DecodeRequest request{.tokens = prompt, .max_tokens = 200, .sampling = sampling, .pages = kPages};
    const Decoded expected = plain->decode(request);
    request.speculation = DrafterKind::kEagle;
    check_equal(drafting->decode(request), expected, sampling);
  }
}
