// The graph executor on a played device: rounds of one token by what their sampler can do, and several in one graph.
#include <iterator>
#include <limits>

#include "graph_fixture.h"
#include "testing/scripted_drafter.h"

namespace {

using ull::Sampling;
using ull::Status;
using ull::gpu::RoundMode;
using ull::gpu::RoundStatus;
using ull::graph::GraphProgram;
using ull::graph::Sampler;
using ull::test::count_of;
using ull::test::FakeDevice;
using ull::test::GraphRig;
using ull::test::HeldRound;
using ull::test::prompt_of;
using Tokens = std::vector<int32_t>;

FakeDevice::Script plain_script() {
  FakeDevice::Script script;
  script.graph_us.fill(200);
  script.has_plain = true;
  script.plain_us = 50;
  return script;
}

FakeDevice::Script burst_script(int rounds = 2) {
  FakeDevice::Script script = plain_script();
  script.burst_rounds = rounds;
  return script;
}

int rounds_in_bursts(const std::vector<FakeDevice::Record>& records) {
  return static_cast<int>(
      std::count_if(records.begin(), records.end(), [](const auto& record) { return record.in_burst; }));
}

// ---- samplers -----------------------------------------------------------------------------------------------------

TEST(a_request_gets_the_least_sampler_that_serves_it) {
  GraphRig rig(plain_script());
  const ull::LogitBias bias{3, 1.0F};
  const std::pair<Sampling, Sampler> cases[] = {
      {{}, Sampler::kPlain},
      {{.temperature = 0.7F, .seed = 5}, Sampler::kPlain},
      {{.temperature = 0.7F, .min_p = 0.1F}, Sampler::kPlain},
      {{.temperature = 0.0F, .top_k = 5, .top_p = 0.5F}, Sampler::kPlain},  // nothing is drawn
      {{.temperature = 0.7F, .top_k = 5}, Sampler::kFull},
      {{.temperature = 0.7F, .top_p = 0.9F}, Sampler::kFull},
      {{.top_logprobs = 0}, Sampler::kFull},
      {{.bias_count = 1, .bias = &bias}, Sampler::kFull},
      {{.repetition_penalty = 1.5F}, Sampler::kFull},
      {{.frequency_penalty = -0.5F}, Sampler::kFull},
      {{.presence_penalty = 0.5F}, Sampler::kFull},
  };
  const Tokens prompt = prompt_of(5);
  for (const auto& [sampling, sampler] : cases) {
    rig.sampling = sampling;
    CHECK(rig.complete(prompt, 6) == rig.model.continuation(prompt, 6, sampling));
    for (const FakeDevice::Record& record : rig.rest()) {
      if (record.mode != RoundMode::kPrefill) CHECK(record.sampler == sampler);
    }
  }
}

TEST(min_p_is_not_for_the_scan) {
  FakeDevice::Script script = plain_script();
  script.plain_us = 100;
  script.has_scan = true;
  script.scan_us = 50;
  GraphRig rig(script);
  const std::pair<Sampling, Sampler> cases[] = {
      {{.temperature = 0.7F, .seed = 5}, Sampler::kScan},
      {{.temperature = 0.0F, .min_p = 0.1F}, Sampler::kScan},  // nothing is drawn
      {{.temperature = 0.7F, .min_p = 0.1F}, Sampler::kPlain},
      {{.temperature = 0.7F, .top_p = 0.9F}, Sampler::kFull},
      {{.top_logprobs = 0}, Sampler::kFull},
      {{.repetition_penalty = 1.5F}, Sampler::kFull},
  };
  const Tokens prompt = prompt_of(5);
  for (const auto& [sampling, sampler] : cases) {
    rig.sampling = sampling;
    CHECK(rig.complete(prompt, 6) == rig.model.continuation(prompt, 6, sampling));
    for (const FakeDevice::Record& record : rig.rest()) {
      if (record.mode != RoundMode::kPrefill) CHECK(record.sampler == sampler);
    }
  }
}

TEST(of_samplers_that_serve_the_cheapest_is_taken) {
  struct Case {
    int plain_us, scan_us;
    Sampler sampler;
  };
  for (const Case& wanted :
       {Case{50, 900, Sampler::kPlain}, Case{900, 50, Sampler::kScan}, Case{900, 1200, Sampler::kFull}}) {
    FakeDevice::Script script = plain_script();
    script.graph_us.fill(500);
    script.plain_us = wanted.plain_us;
    script.has_scan = true;
    script.scan_us = wanted.scan_us;
    GraphRig rig(script);
    const int least = std::min({500, wanted.plain_us, wanted.scan_us});
    CHECK_EQ(rig.executor.info().verify_ns[0], int64_t{least} * 1000);
    Tokens tokens = prompt_of(3);
    CHECK(rig.decode(tokens, 4) == Status::kOk);
    for (const FakeDevice::Record& record : rig.rest()) CHECK(record.sampler == wanted.sampler);
  }
}

TEST(a_tree_takes_the_full_sampler) {
  FakeDevice::Script script = burst_script();
  script.model.period = 4;
  GraphRig rig(script, {.adaptive = false});
  rig.speculation = ull::DrafterKind::kSuffix;
  const Tokens prompt = prompt_of(40);
  CHECK(rig.complete(prompt, 60) == rig.model.continuation(prompt, 60));
  const auto records = rig.rest();
  CHECK(std::any_of(records.begin(), records.end(), [](const auto& record) { return record.count > 1; }));
  CHECK_EQ(rounds_in_bursts(records), 0);
}

// ---- bursts -------------------------------------------------------------------------------------------------------

TEST(a_completion_in_bursts_is_the_model_s) {
  for (const int rounds : {2, 3}) {
    GraphRig rig(burst_script(rounds));
    CHECK(rig.executor.info().tokens_per_round > rounds);
    for (const int length : {1, 2, 64, 65, 130}) {
      for (const int count : {1, 2, 3, 4, 5, 100}) {
        const Tokens prompt = prompt_of(length, length);
        CHECK(rig.complete(prompt, count) == rig.model.continuation(prompt, count));
      }
    }
  }
}

// The first round is asked for as it is, the last ones are too few for a burst.
TEST(plain_rounds_come_in_bursts_as_long_as_the_request_wants_them_all) {
  for (const int rounds : {2, 3}) {
    GraphRig rig(burst_script(rounds));
    for (int count = 1; count < 20; ++count) {
      Tokens tokens = prompt_of(1);
      CHECK(rig.decode(tokens, count) == Status::kOk);
      const auto records = rig.rest();
      CHECK_EQ(records.size(), static_cast<size_t>(count));  // none that is not wanted
      CHECK_EQ(count_of(records, RoundMode::kTake, RoundStatus::kOk), 1);
      CHECK_EQ(count_of(records, RoundMode::kContinue, RoundStatus::kOk), count - 1);
      CHECK_EQ(rounds_in_bursts(records), (count - 1) / rounds * rounds);
    }
  }
}

TEST(a_token_does_not_wait_for_its_burst) {
  GraphRig rig(burst_script());
  Tokens tokens = prompt_of(1);
  CHECK(rig.advance(tokens, 10) == Status::kOk);  // the burst is queued
  HeldRound held(rig.device, /*more=*/0);         // the one behind that, which is launched with its last round
  CHECK(rig.advance(tokens, 10) == Status::kOk);
  CHECK(rig.advance(tokens, 10) == Status::kOk);
  CHECK((Tokens{tokens.begin() + 1, tokens.end()} == rig.model.continuation(prompt_of(1), 3)));
  held.release();
  CHECK(rig.decode(tokens, 5) == Status::kOk);
}

TEST(the_second_round_of_a_burst_is_not_waited_for_by_the_first) {
  GraphRig rig(burst_script());
  Tokens tokens = prompt_of(1);
  HeldRound held(rig.device, /*more=*/2);  // the burst's second
  CHECK(rig.advance(tokens, 10) == Status::kOk);
  CHECK(rig.advance(tokens, 10) == Status::kOk);
  CHECK_EQ(tokens.size(), 3U);
  held.release();
  CHECK(rig.decode(tokens, 7) == Status::kOk);
  CHECK((Tokens{tokens.begin() + 1, tokens.end()} == rig.model.continuation(prompt_of(1), 9)));
}

TEST(a_stop_in_any_round_of_a_burst_skips_what_follows) {
  GraphRig rig(burst_script());
  for (size_t at = 0; at < 9; ++at) {
    Tokens tokens = prompt_of(1, static_cast<int>(at));
    const Tokens expected = rig.model.continuation(tokens, 40);
    const auto first =
        static_cast<size_t>(std::find(expected.begin(), expected.end(), expected[at]) - expected.begin());
    rig.stops = {expected[at]};
    for (size_t i = 0; i <= first; ++i) {
      CHECK(rig.advance(tokens, 100) == Status::kOk);
      CHECK_EQ(tokens.back(), expected[i]);
    }
    const auto records = rig.rest();
    const int ran = count_of(records, RoundMode::kTake, RoundStatus::kOk) +
                    count_of(records, RoundMode::kContinue, RoundStatus::kOk);
    CHECK_EQ(ran, static_cast<int>(first) + 1);
    // Whoever goes on all the same gets the right token.
    rig.stops.clear();
    CHECK(rig.decode(tokens, 5) == Status::kOk);
    CHECK(std::equal(tokens.end() - 5, tokens.end(), expected.begin() + static_cast<std::ptrdiff_t>(first) + 1));
    (void)rig.rest();
  }
}

// A stop text, which the host alone sees, or a caller who interrupts.
TEST(rounds_of_a_burst_that_have_not_begun_are_skipped_once_they_are_not_wanted) {
  GraphRig rig(burst_script());
  for (int turn = 0; turn < 30; ++turn) {
    Tokens tokens = prompt_of(70 + turn, turn);
    rig.sampling.seed = static_cast<uint64_t>(turn);
    const int emitted = 1 + turn % 7;
    const Tokens expected = rig.model.continuation(tokens, emitted, rig.sampling);
    CHECK(rig.prefill({tokens.begin(), tokens.end() - 1}) == Status::kOk);
    for (int i = 0; i < emitted; ++i) CHECK(rig.advance(tokens, 100) == Status::kOk);
    CHECK((Tokens{tokens.end() - emitted, tokens.end()} == expected));
  }
}

TEST(an_abort_skips_the_rest_of_a_burst) {
  for (const int before : {1, 2}) {  // rounds: the burst's first follows, or its second
    GraphRig rig(burst_script());
    const Tokens prompt = prompt_of(1);
    Tokens tokens = prompt;
    HeldRound held(rig.device, static_cast<uint64_t>(before));
    for (int i = 0; i < before; ++i) CHECK(rig.advance(tokens, 100) == Status::kOk);
    CHECK(rig.executor.start_round(rig.step(tokens, 100)) == Status::kOk);
    while (!held.reached()) std::this_thread::yield();
    rig.executor.abort();
    CHECK(rig.executor.poll(rig.result) == Status::kPending);
    CHECK(rig.device.cancelled() >= held.sequence());
    held.release();
    CHECK(rig.finish() == Status::kAborted);
    const auto records = rig.rest();
    const int ran = count_of(records, RoundMode::kTake, RoundStatus::kOk) +
                    count_of(records, RoundMode::kContinue, RoundStatus::kOk);
    CHECK_EQ(ran, before);
    CHECK(rig.decode(tokens, 10) == Status::kOk);
    CHECK((Tokens{tokens.begin() + 1, tokens.end()} == rig.model.continuation(prompt, 10 + before)));
  }
}

TEST(settings_change_between_bursts) {
  GraphRig rig(burst_script());
  std::vector<ull::LogitBias> biases;
  for (int32_t token = 0; token < 50; ++token) biases.push_back({token, -std::numeric_limits<float>::infinity()});
  Tokens tokens = prompt_of(1);
  for (int turn = 0; turn < 24; ++turn) {
    rig.sampling.bias = biases.data();
    rig.sampling.bias_count = turn % 4 == 1 ? 50 : 0;
    rig.sampling.seed = static_cast<uint64_t>(turn % 3);
    if (turn % 5 == 0) rig.stops = {turn % 2 == 0 ? 98 : 99};
    const Tokens before = tokens;
    const int count = 1 + turn % 6;
    for (int i = 0; i < count; ++i) CHECK(rig.advance(tokens, 50) == Status::kOk);
    CHECK((Tokens{tokens.begin() + static_cast<std::ptrdiff_t>(before.size()), tokens.end()} ==
           rig.model.continuation(before, count, rig.sampling)));
  }
}

TEST(a_burst_ends_with_the_context_and_its_pages) {
  for (int length = 1; length < 8; ++length) {
    GraphRig rig(burst_script());
    Tokens tokens = prompt_of(1024 - 8 + length);
    rig.prompt_tokens = static_cast<int>(tokens.size());
    CHECK(rig.prefill({tokens.begin(), tokens.end() - 1}) == Status::kOk);
    CHECK(rig.decode(tokens, 8 - length) == Status::kOk);
    for (const FakeDevice::Record& record : rig.rest()) CHECK(record.status == RoundStatus::kOk);
  }
  // The step's pages cover its own tokens alone.
  GraphRig rig(burst_script());
  Tokens tokens = prompt_of(62);
  CHECK(rig.prefill({tokens.begin(), tokens.end() - 1}) == Status::kOk);
  const Tokens expected = rig.model.continuation(tokens, 3);
  const std::vector<int32_t> pages = rig.pages;
  std::fill(rig.pages.begin() + 1, rig.pages.end(), -1);
  CHECK(rig.advance(tokens, 3) == Status::kOk);  // positions 61 .. 63
  rig.pages = pages;
  CHECK(rig.decode(tokens, 2) == Status::kOk);
  CHECK((Tokens{tokens.end() - 3, tokens.end()} == expected));
}

TEST(each_round_of_a_burst_has_the_watchdog_s_time) {
  FakeDevice::Script script = burst_script();
  GraphRig rig(script, {.watchdog_ms = 700});
  Tokens tokens = prompt_of(1);
  rig.device.arm([](FakeDevice::Script& late, uint64_t) { late.plain_us = 400'000; });  // two last longer than 700 ms
  CHECK(rig.decode(tokens, 3) == Status::kOk);
  rig.device.arm([](FakeDevice::Script& hung, uint64_t next) { hung.hang_at = next + 2; });  // the burst's second
  CHECK(rig.advance(tokens, 9) == Status::kOk);
  CHECK(rig.advance(tokens, 9) == Status::kOk);
  CHECK(rig.advance(tokens, 9) == Status::kExecutorFailed);
  CHECK(ull::test::says(rig.executor.failure(), "the device has not answered round "));
}

TEST(a_burst_that_cannot_be_launched_is_a_failure) {
  GraphRig rig(burst_script());
  Tokens tokens = prompt_of(1);
  rig.device.arm([](FakeDevice::Script& script, uint64_t next) { script.launch_error_at = next + 2; });
  CHECK(rig.advance(tokens, 9) == Status::kExecutorFailed);
  CHECK(ull::test::says(rig.executor.failure(), "cuGraphLaunch failed"));
}

// ---- attention with more blocks -----------------------------------------------------------------------------------

// A context of 1,024: it is measured behind 960 positions.
FakeDevice::Script wide_script(int more_us) {
  FakeDevice::Script script = burst_script();
  script.far_us.fill(3000);
  script.wide_from = 300;
  script.wide_us.fill(more_us);
  return script;
}

TEST(behind_a_long_cache_rounds_of_one_token_take_the_wide_graphs_where_these_are_cheaper) {
  for (const int more_us : {-2000, 2000}) {
    for (const Sampling& sampling : {Sampling{}, Sampling{.repetition_penalty = 1.5F}}) {
      GraphRig rig(wide_script(more_us));
      rig.sampling = sampling;
      const Tokens prompt = prompt_of(280);
      CHECK(rig.complete(prompt, 40) == rig.model.continuation(prompt, 40, sampling));
      int wide = 0, bursts = 0;
      for (const FakeDevice::Record& record : rig.rest()) {
        if (record.mode == RoundMode::kPrefill || record.status != RoundStatus::kOk) continue;
        CHECK(record.in_burst || record.is_wide == (more_us < 0 && record.position >= 300));
        wide += record.is_wide ? 1 : 0;
        bursts += record.is_wide && record.in_burst ? 1 : 0;
      }
      CHECK_EQ(wide > 0, more_us < 0);
      CHECK_EQ(bursts > 0, more_us < 0);
    }
  }
}

TEST(where_no_request_gets_so_far_wide_graphs_are_not_taken) {
  FakeDevice::Script script = wide_script(-2000);
  script.wide_from = 1000;
  GraphRig rig(script);
  const Tokens prompt = prompt_of(990);
  CHECK(rig.complete(prompt, 30) == rig.model.continuation(prompt, 30));
  for (const FakeDevice::Record& record : rig.rest()) CHECK(!record.is_wide);
}

// Each size by what was measured of it; and what it costs there is what is expected of it.
TEST(a_tree_takes_a_wide_graph_where_that_is_cheaper) {
  for (const int length : {200, 800}) {
    ull::graph::GraphOptions options{.adaptive = false};
    const Tokens prompt = prompt_of(length);
    Tokens truth = prompt;
    const Tokens more = ull::test::FakeModel{100}.continuation(prompt, 60);
    truth.insert(truth.end(), more.begin(), more.end());
    options.in_place_of_draft_model = ull::scripted_drafter(ull::ScriptedDrafter::Mode::kRight, truth, 100, 3);
    FakeDevice::Script script = wide_script(2000);
    script.graph_us = {100, 200, 300, 2000, 3000, 4000, 5000};
    script.wide_us[2] = -2000;
    GraphRig rig(script, options);
    rig.speculation = ull::DrafterKind::kDraft;
    rig.max_tree = 4;
    CHECK(rig.prefill({prompt.begin(), prompt.end() - 1}) == Status::kOk);
    (void)rig.rest();
    Tokens tokens = prompt;
    CHECK(rig.advance(tokens, 60) == Status::kOk);
    const auto records = rig.rest();
    REQUIRE(records.size() == 1);
    CHECK_EQ(records[0].graph, 4);
    CHECK_EQ(records[0].is_wide, length == 800);
  }
}

// A program that was spoiled; the message begins with the field.
void refused(FakeDevice& device, void (*spoil)(GraphProgram&), const char* field) {
  GraphProgram program = device.program();
  program.check();
  spoil(program);
  try {
    program.check();
    ull::check::fail(__FILE__, __LINE__, std::string(field) + " was taken");
  } catch (const std::invalid_argument& error) {
    CHECK(std::string(error.what()).starts_with(field));
  }
}

TEST(programs_whose_bursts_cannot_be_are_refused) {
  FakeDevice device(burst_script());
  refused(device, [](GraphProgram& program) { program.singles[0].round = program.rounds[0]; }, "singles");
  refused(device, [](GraphProgram& program) { program.singles[1].round = nullptr; }, "bursts");
  refused(device, [](GraphProgram& program) { program.burst_rounds = 1; }, "burst_rounds");
  refused(device, [](GraphProgram& program) { program.burst_rounds = 4; }, "burst_rounds");
  refused(device, [](GraphProgram& program) { program.singles[0] = program.singles[1] = {}; }, "burst_rounds");
}

TEST(programs_whose_wide_graphs_cannot_be_are_refused) {
  FakeDevice device(wide_script(0));
  refused(device, [](GraphProgram& program) { program.wide.from = -1; }, "wide");
  refused(device, [](GraphProgram& program) { program.wide.from = 0; }, "wide");
  refused(device, [](GraphProgram& program) { program.wide.rounds[0] = nullptr; }, "wide");
  refused(device, [](GraphProgram& program) { program.wide.singles[1].burst = nullptr; }, "wide");
  refused(device, [](GraphProgram& program) { program.rounds[3] = nullptr; }, "wide");
}

}  // namespace
