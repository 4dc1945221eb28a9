// Prompts whose graph reads a chunk: how they are cut, which tokens arrive where, what ends them early, and what drafts
// behind them.
#include <array>
#include <string>
#include <vector>

#include "head_fixture.h"

namespace {

using ull::DrafterKind;
using ull::Status;
using ull::gpu::kChunkTokens;
using ull::gpu::kTapSlots;
using ull::gpu::RoundMode;
using ull::gpu::RoundStatus;
using ull::graph::GraphExecutor;
using ull::graph::GraphOptions;
using ull::graph::GraphProgram;
using ull::test::AbortedRound;
using ull::test::count_of;
using ull::test::FakeDevice;
using ull::test::FakeHead;
using ull::test::GraphRig;
using ull::test::HeadRig;
using ull::test::HeldRound;
using ull::test::prompt_of;
using ull::test::says;
using ull::test::wrong;
using Records = std::vector<FakeDevice::Record>;
using Tokens = std::vector<int32_t>;

const GraphOptions kAlways{.adaptive = false};

FakeDevice::Script chunked(FakeDevice::Script script = {}) {
  script.context = 2048;
  script.chunks = true;
  // What reads a part is chosen by costs: by the script's, not by what else this machine does.
  if (script.prefill_us == 0) script.prefill_us = 1;
  if (script.chunk_us == 0) script.chunk_us = 1;
  return script;
}

struct ChunkRig : GraphRig {
  explicit ChunkRig(const FakeDevice::Script& script = {}, const GraphOptions& options = {},
                    const std::optional<FakeDevice::Script>& draft = std::nullopt)
      : GraphRig(chunked(script), options, draft) {}

  Status start(const Tokens& tokens, int position, int count) {
    return executor.start_prefill({tokens.data() + position, count, position, pages.data()});
  }
};

// That the device has read `text` from position `start` on, in parts of so many tokens, each with its graph.
void check_parts(const Records& records, const Tokens& text, int start, const std::vector<int>& parts) {
  REQUIRE(records.size() == parts.size());
  for (size_t i = 0; i < parts.size(); ++i) {
    const FakeDevice::Record& record = records[i];
    CHECK(record.mode == RoundMode::kPrefill && record.status == RoundStatus::kOk);
    CHECK_EQ(record.graph == kChunkTokens, parts[i] > ull::kMaxTreeTokens);
    CHECK_EQ(record.count, parts[i]);
    CHECK_EQ(record.position, start);
    CHECK((record.prompt == Tokens{text.begin() + start, text.begin() + start + parts[i]}));
    start += parts[i];
  }
}

// ---- how a prompt is cut --------------------------------------------------------------------------------------------

TEST(a_prompt_is_cut_into_chunks_and_a_small_rest) {
  ChunkRig rig;
  CHECK_EQ(rig.executor.info().prefill_chunk, kChunkTokens);
  const std::pair<int, std::vector<int>> cases[] = {{1, {1}},
                                                    {64, {64}},
                                                    {65, {65}},
                                                    {200, {200}},
                                                    {512, {512}},
                                                    {513, {512, 1}},
                                                    {576, {512, 64}},
                                                    {577, {512, 65}},
                                                    {1024, {512, 512}},
                                                    {1100, {512, 512, 76}},
                                                    {1900, {512, 512, 512, 364}}};
  for (const auto& [length, parts] : cases) {
    const Tokens prompt = prompt_of(length, length);
    CHECK(rig.prefill(prompt) == Status::kOk);
    check_parts(rig.rest(), prompt, 0, parts);
  }
}

TEST(a_completion_behind_chunks_is_the_model_s) {
  ChunkRig rig;
  for (const int length : {2, 65, 66, 200, 513, 514, 577, 578, 1025, 1900, 300}) {
    const Tokens prompt = prompt_of(length, 3 * length);
    CHECK(rig.complete(prompt, 20) == rig.model.continuation(prompt, 20));
  }
}

TEST(a_chunk_goes_on_anywhere_in_a_text) {
  ChunkRig rig;
  const Tokens text = prompt_of(2000, 7);
  CHECK(rig.prefill({text.begin(), text.begin() + 70}) == Status::kOk);
  (void)rig.rest();
  CHECK(rig.prefill({text.begin() + 70, text.end() - 1}, 70) == Status::kOk);
  check_parts(rig.rest(), text, 70, {512, 512, 512, 393});
  Tokens all = text;
  CHECK(rig.decode(all, 20) == Status::kOk);
  CHECK((Tokens{all.end() - 20, all.end()} == rig.model.continuation(text, 20)));
}

TEST(a_prompt_is_cut_as_before_where_no_graph_reads_a_chunk) {
  GraphRig rig({.context = 2048});
  CHECK_EQ(rig.executor.info().prefill_chunk, 256);
  const Tokens prompt = prompt_of(577);
  CHECK(rig.prefill(prompt) == Status::kOk);
  check_parts(rig.rest(), prompt, 0, {64, 64, 64, 64, 64, 64, 64, 64, 64, 1});
}

// By the measured costs: a round of 64 tokens takes 0.1 ms here, a chunk of any length half of one.
TEST(a_prompt_is_read_the_cheaper_way) {
  ChunkRig rig({.prefill_us = 100, .chunk_us = 500});
  const std::pair<int, std::vector<int>> cases[] = {
      {65, {64, 1}}, {190, {64, 64, 62}}, {320, {320}}, {512, {512}}, {512 + 128, {512, 64, 64}}};
  for (const auto& [length, parts] : cases) {
    const Tokens prompt = prompt_of(length, length);
    CHECK(rig.prefill(prompt) == Status::kOk);
    check_parts(rig.rest(), prompt, 0, parts);
  }
  ChunkRig dear({.prefill_us = 100, .chunk_us = 2000});
  const Tokens prompt = prompt_of(600);
  CHECK(dear.prefill(prompt) == Status::kOk);
  check_parts(dear.rest(), prompt, 0, {64, 64, 64, 64, 64, 64, 64, 64, 64, 24});
}

TEST(a_few_tokens_behind_a_long_cache_are_no_chunk) {
  using ull::graph::PromptCosts;
  using Chunks = std::array<PromptCosts::Measured, PromptCosts::kTiles>;
  const auto costs_of = [](const PromptCosts::Measured& round, const PromptCosts::Measured& few,
                           const PromptCosts::Measured& many, int far) {
    Chunks chunks;
    for (int i = 0; i < PromptCosts::kTiles; ++i) {
      const auto between = [&](int64_t first, int64_t last) { return first + (last - first) * i / 3; };
      chunks[static_cast<size_t>(i)] = {between(few.near_ns, many.near_ns), between(few.far_ns, many.far_ns)};
    }
    return PromptCosts(round, chunks, far);
  };
  const PromptCosts unknown, unmeasured = costs_of({3'000'000, 3'100'000}, {0, 0}, {12'000'000, 12'500'000}, 1024);
  CHECK(unknown.prefers_chunk(65, 100'000) && unmeasured.prefers_chunk(65, 100'000));
  // A chunk's attention takes as long for 128 tokens as for 512 there; what a round's takes more is little.
  const PromptCosts costs = costs_of({3'000'000, 3'050'000}, {3'500'000, 4'500'000}, {12'000'000, 13'000'000}, 1024);
  CHECK(costs.prefers_chunk(100, 0) && costs.prefers_chunk(100, 2000));
  CHECK(!costs.prefers_chunk(100, 4000) && !costs.prefers_chunk(65, 4000));
  CHECK(costs.prefers_chunk(512, 4000) && costs.prefers_chunk(512, 8000) && !costs.prefers_chunk(512, 32'000));
  // Nothing was measured behind a cache, or by chance it took less there.
  const PromptCosts flat = costs_of({3'000'000, 0}, {3'500'000, 0}, {12'000'000, 0}, 0);
  const PromptCosts shrinking =
      costs_of({3'000'000, 2'900'000}, {3'500'000, 3'400'000}, {12'000'000, 11'000'000}, 1024);
  CHECK(flat.prefers_chunk(100, 100'000) && shrinking.prefers_chunk(100, 100'000));
  // Each number of tiles has a line of its own: blocks share out the pages of one or two, and of more they do not.
  const Chunks shared{
      {{3'500'000, 3'600'000}, {6'500'000, 6'700'000}, {9'500'000, 16'000'000}, {12'000'000, 18'500'000}}};
  const PromptCosts uneven({3'000'000, 3'050'000}, shared, 1024);
  CHECK(uneven.prefers_chunk(128, 1024) && uneven.prefers_chunk(256, 1024));
  CHECK(!uneven.prefers_chunk(257, 1024) && uneven.prefers_chunk(512, 1024));
}

// Where a chunk has other bits than rounds: however long a prompt is, so that its bits do not depend on how it is cut.
TEST(a_prompt_is_read_in_chunks_alone) {
  ChunkRig rig({.prefill_us = 1, .chunk_us = 500, .fast = true});
  CHECK(rig.executor.info().reuse == ull::Reuse::kPrompt && rig.executor.info().forced_tokens == 0);
  const std::pair<int, std::vector<int>> cases[] = {{1, {1}}, {64, {64}}, {200, {200}}, {513, {512, 1}}};
  for (const auto& [length, parts] : cases) {
    const Tokens prompt = prompt_of(length, length);
    CHECK(rig.prefill(prompt) == Status::kOk);
    int start = 0;
    const Records records = rig.rest();
    REQUIRE(records.size() == parts.size());
    for (size_t i = 0; i < parts.size(); start += parts[i++]) {
      CHECK(records[i].graph == kChunkTokens && records[i].count == parts[i] && records[i].position == start);
      CHECK(std::equal(records[i].prompt.begin(), records[i].prompt.end(), prompt.begin() + start));
    }
  }
  for (const int length : {2, 65, 300, 1100}) {
    const Tokens prompt = prompt_of(length, 3 * length);
    CHECK(rig.complete(prompt, 20) == rig.model.continuation(prompt, 20));
  }
}

// The figures are of an H100 and an 8B model: of up to 128 tokens a chunk and a round of one token are cheaper than a
// round of 64 behind another, or behind a chunk.
TEST(a_first_round_takes_the_end_of_a_prompt_where_that_is_cheaper) {
  using ull::graph::FirstRound;
  using ull::graph::PromptCosts;
  const auto is_single = [](const PromptCosts& costs, int count, int start) {
    return costs.first(count, start, /*last=*/0) == FirstRound::kSingle;
  };
  const std::array<PromptCosts::Measured, PromptCosts::kTiles> chunks{
      {{5'000'000, 5'200'000}, {9'000'000, 9'300'000}, {12'500'000, 12'900'000}, {15'800'000, 16'300'000}}};
  const PromptCosts costs({5'300'000, 5'400'000}, chunks, 1024, {{5'800'000, 0}, {3'000'000, 0}, 0});
  const auto single = [&](int count) { return is_single(costs, count, 0); };
  CHECK(!single(1) && !single(64));                 // one round reads it all
  CHECK(single(65) && single(128) && single(129));  // 128 behind: one tile
  CHECK(!single(130) && !single(192));              // a tile less to read
  CHECK(single(193) && single(257));                // as many tiles either way
  CHECK(!single(258) && !single(512 + 64));         // nothing but chunks before the last 64
  CHECK(single(512 + 65) && single(1024 + 128));
  CHECK(!is_single(PromptCosts(), 100, 0));
  CHECK(!is_single(PromptCosts({5'300'000, 5'400'000}, chunks, 1024), 100, 0));  // the rounds' costs are unknown
  CHECK(!is_single(PromptCosts({5'300'000, 5'400'000}, chunks, 1024, {{2'500'000, 0}, {3'000'000, 0}, 0}), 70, 0));
  // Behind a long cache a round of many tokens takes longer than one of a single one does.
  const PromptCosts sloped({5'300'000, 5'400'000}, chunks, 1024,
                           {{5'800'000, 6'700'000}, {3'000'000, 3'100'000}, 1000});
  CHECK(!is_single(sloped, 130, 0) && is_single(sloped, 130, 4000));

  for (const int full_us : {1000, 40'000}) {
    ChunkRig rig({.graph_us = {0, 0, 0, 0, 0, 0, full_us}, .prefill_us = 4000, .chunk_us = 12'000});
    const int most = rig.executor.info().forced_tokens;
    CHECK_EQ(most, 63);
    CHECK_EQ(rig.executor.first_forced(100, 0), full_us == 1000 ? most : 0);
    CHECK_EQ(rig.executor.first_forced(64, 0), most);
  }
}

// The same, where a chunk may draw: in one pass over the weights where there would be two.
TEST(a_last_chunk_draws_where_that_is_cheaper) {
  using ull::graph::FirstRound;
  using ull::graph::PromptCosts;
  const std::array<PromptCosts::Measured, PromptCosts::kTiles> chunks{
      {{5'000'000, 6'000'000}, {9'000'000, 10'100'000}, {12'500'000, 13'800'000}, {15'800'000, 17'300'000}}};
  const PromptCosts costs({5'300'000, 5'400'000}, chunks, 1024,
                          {{5'800'000, 5'900'000}, {3'000'000, 3'020'000}, 1024, 600'000});
  const auto first = [&](int count, int start = 0) { return costs.first(count, start, (count - 1) % 512 + 1); };
  for (const int count : {1, 64}) CHECK(first(count) == FirstRound::kFull);
  for (const int count : {65, 128, 140, 300, 512, 577, 1024, 1100}) CHECK(first(count) == FirstRound::kChunk);
  CHECK(first(129) == FirstRound::kSingle);                                      // a tile less to read
  CHECK(first(513) == FirstRound::kSingle && first(540) != FirstRound::kChunk);  // what is left is no chunk
  // Behind a long cache few tokens are no chunk, but many are.
  CHECK(first(100, 2000) == FirstRound::kChunk && first(100, 16'000) != FirstRound::kChunk);
  CHECK(first(512, 16'000) == FirstRound::kChunk);
  // A vocabulary so large that the lm_head takes longer than reading the layers twice.
  const PromptCosts dear({5'300'000, 5'400'000}, chunks, 1024, {{5'800'000, 0}, {3'000'000, 0}, 0, 8'000'000});
  CHECK(dear.first(512, 0, 512) == FirstRound::kSingle);
  // Nothing is known: whatever may be a chunk is one.
  CHECK(PromptCosts().first(100, 0, 100) == FirstRound::kChunk);
  CHECK(PromptCosts().first(513, 0, 1) == FirstRound::kFull && PromptCosts().first(100, 0, 0) == FirstRound::kFull);

  FakeDevice::Script script{
      .graph_us = {1000, 0, 0, 0, 0, 0, 5000}, .prefill_us = 4000, .chunk_us = 4000, .last_chunks = true};
  for (const int drawing_us : {200, 40'000}) {
    script.drawing_us = drawing_us;
    ChunkRig rig(script);
    CHECK_EQ(rig.executor.info().forced_tokens, kChunkTokens - 1);
    CHECK_EQ(rig.executor.first_forced(200, 0), drawing_us == 200 ? 199 : 0);
    CHECK_EQ(rig.executor.first_forced(700, 0), drawing_us == 200 ? 187 : 0);
    CHECK_EQ(rig.executor.first_forced(1024, 0), drawing_us == 200 ? 511 : 0);
    CHECK_EQ(rig.executor.first_forced(64, 0), 63);
  }
}

TEST(a_step_takes_no_more_than_a_chunk) {
  ChunkRig rig;
  const Tokens prompt = prompt_of(1000);
  CHECK(rig.start(prompt, 0, kChunkTokens + 1) == Status::kExecutorFailed);
  CHECK(rig.executor.failure() == nullptr);
  CHECK(rig.start(prompt, 0, kChunkTokens) == Status::kOk);
  CHECK(rig.finish() == Status::kOk);
}

// A cancel and more urgent requests wait for a step: who wants them sooner has shorter ones.
TEST(steps_may_be_shorter_than_a_chunk) {
  for (const auto& [fast, most] : {std::pair{false, 128}, {false, 20}, {true, 100}, {true, 4000}}) {
    GraphOptions options;
    options.prefill_chunk = most;
    ChunkRig rig({.last_chunks = true, .fast = fast}, options);
    const int step = std::min(most, kChunkTokens), forced = std::max(step, fast ? 0 : ull::kMaxTreeTokens) - 1;
    CHECK_EQ(rig.executor.info().prefill_chunk, step);
    CHECK_EQ(rig.executor.info().prompt_forced(), forced);
    for (const int length : {1, 64, 65, 200, 700}) {
      const int first = rig.executor.first_forced(length, 0);
      CHECK(first >= 0 && (first <= forced || length <= ull::kMaxTreeTokens));
      if (fast) CHECK_EQ(first, (length - 1) % step);
      const Tokens prompt = prompt_of(length, length);
      CHECK(rig.complete(prompt, 5) == rig.model.continuation(prompt, 5));
      for (const FakeDevice::Record& record : rig.rest()) CHECK(record.count <= std::max(step, ull::kMaxTreeTokens));
    }
  }
  FakeDevice device(chunked());
  GraphOptions none;
  none.prefill_chunk = 0;
  CHECK_THROWS(GraphExecutor(device.program(), FakeDevice::driver(), none), std::invalid_argument);
}

TEST(a_context_may_be_shorter_than_a_chunk) {
  for (const int context : {20, 64, 128, 300}) {
    FakeDevice::Script script{.context = context};
    script.chunks = true;
    GraphRig rig(script);
    const Tokens prompt = prompt_of(context - 10, context);
    CHECK(rig.complete(prompt, 10) == rig.model.continuation(prompt, 10));
    CHECK(rig.executor.start_prefill({prompt.data(), 5, context - 4, rig.pages.data()}) == Status::kExecutorFailed);
  }
}

// ---- getting ready --------------------------------------------------------------------------------------------------

TEST(a_chunk_is_run_before_a_request_waits_for_it) {
  for (const auto& [context, page_count, tokens, fast] :
       {std::tuple{1024, 32, 512, false}, {1024, 32, 512, true}, {300, 32, 300, false}, {1024, 2, 128, false}}) {
    FakeDevice device({.context = context, .page_count = page_count, .chunks = true, .fast = fast});
    GraphExecutor executor(device.program(), FakeDevice::driver(), {});
    executor.prepare();
    int runs = 0;
    for (const auto& record : GraphRig::rest(device)) {
      if (record.graph != kChunkTokens) continue;
      runs += record.count == tokens ? 1 : 0;  // others are of fewer tokens, or behind some
      CHECK(record.count <= tokens && record.position + record.count <= context);
      CHECK(record.status == RoundStatus::kOk);
    }
    CHECK(runs >= 1);
  }
}

// The driver is asked about a device that answers later than the dearest graph would.
TEST(a_chunk_may_take_its_time) {
  static std::atomic<int> asked{0};
  ull::graph::Driver driver = FakeDevice::driver();
  driver.query = [](void* stream) {
    ++asked;
    return FakeDevice::driver().query(stream);
  };
  FakeDevice device(chunked({.chunk_us = 40'000}));
  GraphExecutor executor(device.program(), driver, {});
  executor.prepare();
  const Tokens prompt = prompt_of(300);
  const Tokens pages = {0, 1, 2, 3, 4};
  int least = 1000;
  for (int turn = 0; turn < 5 && least > 0; ++turn) {  // on a machine that is busy with something else it may be late
    asked = 0;
    CHECK(executor.start_prefill({prompt.data(), 300, 0, pages.data()}) == Status::kOk);
    ull::RoundResult result;
    Status status = Status::kPending;
    while (status == Status::kPending) status = executor.poll(result);
    CHECK(status == Status::kOk);
    least = std::min<int>(least, asked);
  }
  CHECK_EQ(least, 0);
}

TEST(programs_whose_chunk_cannot_be_are_refused) {
  FakeDevice target(chunked()), draft({.context = 2048});
  const auto refused = [](const GraphProgram& program, const char* field) {
    try {
      program.check();
      ull::check::fail(__FILE__, __LINE__, std::string(field) + " was taken");
    } catch (const std::invalid_argument& error) {
      CHECK(std::string(error.what()).starts_with(field));
    }
  };
  GraphProgram program = target.program();
  program.check();
  program.chunks = nullptr;
  refused(program, "chunks");
  program.chunks = reinterpret_cast<int32_t*>(6);
  refused(program, "chunks");
  program.chunk = nullptr;
  program.check();
  program.last_chunk = target.program().chunk;
  refused(program, "last_chunk");
  program = target.program();
  program.last_chunk = program.chunk;
  program.check();
  program.reuse = ull::Reuse::kNothing;
  refused(program, "last_chunk");
  program.prefill = program.chunk;  // no round reads prompts
  program.check();
  program = program_with_draft(target, draft);
  program.check();
  GraphProgram own = *program.draft;
  own.chunk = own.prefill;
  own.chunks = target.program().chunks;
  program.draft = std::make_shared<const GraphProgram>(own);
  refused(program, "draft: reuse");
  own.reuse = ull::Reuse::kNothing;
  program.draft = std::make_shared<const GraphProgram>(std::move(own));
  refused(program, "draft: chunk");
  program = target.program();
  program.prefill = program.chunk;
  refused(program, "reuse");
}

// ---- what comes between ---------------------------------------------------------------------------------------------

TEST(a_page_table_is_longer_than_one_chunk) {
  ChunkRig rig;
  for (int turn = 0; turn < 4; ++turn) {
    const Tokens prompt = prompt_of(1500, turn);
    CHECK(rig.complete(prompt, 5) == rig.model.continuation(prompt, 5));
    const Records records = rig.rest();
    // Each step brings the pages that it adds.
    for (size_t i = 1; i < 3; ++i) CHECK_EQ(records[i].setting, records[i - 1].setting + 1);
    std::rotate(rig.pages.begin(), rig.pages.begin() + 5, rig.pages.end());
  }
}

TEST(a_chunk_s_page_table_is_not_written_while_a_round_may_read_it) {
  ChunkRig rig;
  HeldRound held(rig.device, /*more=*/2);
  Tokens tokens = prompt_of(1);
  for (const int most : {2, 100}) {  // the continuation behind the second round is the first to see a second page
    CHECK(rig.advance(tokens, most) == Status::kOk);
  }
  const uint64_t launched = rig.device.launched();
  std::reverse(rig.pages.begin(), rig.pages.end());
  const Tokens prompt = prompt_of(400, 5);
  CHECK(rig.start(prompt, 0, 400) == Status::kOk);
  for (int i = 0; i < 1000; ++i) CHECK(rig.executor.poll(rig.result) == Status::kPending);
  CHECK_EQ(rig.device.launched(), launched);
  held.release();
  CHECK(rig.finish() == Status::kOk);
  CHECK(rig.complete(prompt, 5) == rig.model.continuation(prompt, 5));
}

TEST(a_chunk_is_launched_behind_a_continuation_that_is_still_under_way) {
  ChunkRig rig;
  const Tokens prompt = prompt_of(400, 5);
  CHECK(rig.prefill(prompt) == Status::kOk);  // the page table that all of this needs is there
  (void)rig.rest();
  HeldRound held(rig.device, /*more=*/1);
  const Tokens tokens = prompt_of(1);
  CHECK(rig.executor.start_round(rig.step(tokens, 100)) == Status::kOk);
  CHECK(rig.finish() == Status::kOk);
  CHECK(rig.start(prompt, 0, 400) == Status::kOk);
  CHECK_EQ(rig.device.launched(), held.sequence() + 1);
  held.release();
  CHECK(rig.finish() == Status::kOk);
  const Records records = rig.rest();
  REQUIRE(records.size() == 3);
  CHECK(records[1].status == RoundStatus::kSkipped);
  check_parts({records[2]}, prompt, 0, {400});
}

// What waits has the slot that would be the chunk's.
TEST(a_chunk_comes_behind_what_is_sent_away) {
  ChunkRig rig({.round_us = 1000}, kAlways);
  rig.speculation = DrafterKind::kSuffix;
  rig.max_tree = 4;
  rig.prompt_tokens = 60;
  Tokens text = prompt_of(60);
  const Tokens expected = rig.model.continuation(text, 400);
  CHECK(rig.prefill({text.begin(), text.end() - 1}) == Status::kOk);
  const Tokens other = prompt_of(1700, 9);
  for (int turn = 0; turn < 5; ++turn) {
    for (int i = 0; i < 9 || (!rig.device.waits() && i < 50); ++i) CHECK(rig.advance(text, 4) == Status::kOk);
    CHECK(rig.device.waits());
    const int sent_away = rig.device.sent_away();
    CHECK(rig.start(other, 1000, 500 + turn) == Status::kOk);  // behind what is in use
    CHECK(rig.finish() == Status::kOk);
    CHECK_EQ(rig.device.sent_away(), sent_away + 1);
    check_parts({rig.rest().back()}, other, 1000, {500 + turn});
  }
  CHECK(std::equal(text.begin() + 60, text.end(), expected.begin()));
}

// ---- aborts and failures --------------------------------------------------------------------------------------------

TEST(an_abort_skips_a_chunk_that_has_not_begun) {
  ChunkRig rig;
  const Tokens prompt = prompt_of(1200, 4);
  for (const int position : {0, 512}) {  // the first, and one between others
    {
      AbortedRound aborted(rig.executor, rig.device, 0);
      CHECK(rig.start(prompt, position, 512) == Status::kOk);
      CHECK(rig.finish() == Status::kAborted);
    }
    const uint64_t launched = rig.device.launched();
    const Records records = rig.rest();
    CHECK_EQ(records.size(), 1U);
    CHECK_EQ(count_of(records, RoundMode::kPrefill, RoundStatus::kSkipped), 1);
    // The step is run again, with tokens and pages that the device has not looked at.
    CHECK(rig.start(prompt, position, 512) == Status::kOk);
    CHECK_EQ(rig.device.launched(), launched + 1);  // at once: nothing is in its way
    CHECK(rig.finish() == Status::kOk);
    check_parts(rig.rest(), prompt, position, {512});
  }
  CHECK(rig.prefill({prompt.begin() + 1024, prompt.end() - 1}, 1024) == Status::kOk);
  Tokens text = prompt;
  CHECK(rig.decode(text, 10) == Status::kOk);
  CHECK((Tokens{text.end() - 10, text.end()} == rig.model.continuation(prompt, 10)));
}

TEST(a_chunk_that_has_begun_is_waited_for_when_it_is_aborted) {
  ChunkRig rig;
  const Tokens prompt = prompt_of(1200, 4);
  for (const int position : {0, 512}) {
    HeldRound held(rig.device, 0, &FakeDevice::Script::begun);
    CHECK(rig.start(prompt, position, 512) == Status::kOk);
    while (!held.reached()) std::this_thread::yield();
    rig.executor.abort();
    for (int i = 0; i < 1000; ++i) CHECK(rig.executor.poll(rig.result) == Status::kPending);
    held.release();
    CHECK(rig.finish() == Status::kAborted);
    const uint64_t launched = rig.device.launched();
    CHECK_EQ(launched, held.sequence());
    CHECK(rig.start(prompt, position, 512) == Status::kOk);
    CHECK_EQ(rig.device.launched(), launched + 1);  // at once: nothing is in its way
    CHECK(rig.finish() == Status::kOk);
  }
  CHECK(rig.prefill({prompt.begin() + 1024, prompt.end() - 1}, 1024) == Status::kOk);
  Tokens text = prompt;
  CHECK(rig.decode(text, 10) == Status::kOk);
  CHECK((Tokens{text.end() - 10, text.end()} == rig.model.continuation(prompt, 10)));
}

TEST(an_abort_before_a_chunk_is_launched_leaves_nothing_to_run) {
  ChunkRig rig;
  HeldRound held(rig.device, /*more=*/2);
  Tokens tokens = prompt_of(1);
  for (const int most : {2, 100}) {
    CHECK(rig.advance(tokens, most) == Status::kOk);
  }
  const uint64_t launched = rig.device.launched();
  std::reverse(rig.pages.begin(), rig.pages.end());  // so that the chunk waits for the round that reads the table
  const Tokens prompt = prompt_of(500, 5);
  CHECK(rig.start(prompt, 0, 500) == Status::kOk);
  rig.executor.abort();
  CHECK(rig.executor.poll(rig.result) == Status::kPending);
  held.release();
  CHECK(rig.finish() == Status::kAborted);
  CHECK_EQ(rig.device.launched(), launched);
  CHECK(rig.complete(prompt, 5) == rig.model.continuation(prompt, 5));
}

TEST(an_abort_between_chunks_is_for_nobody) {
  ChunkRig rig;
  const Tokens prompt = prompt_of(1100, 2);
  for (const int position : {0, 512}) {
    CHECK(rig.start(prompt, position, 512) == Status::kOk);
    CHECK(rig.finish() == Status::kOk);
    rig.executor.abort();
  }
  CHECK(rig.start(prompt, 1024, 75) == Status::kOk);
  CHECK(rig.finish() == Status::kOk);
  check_parts(rig.rest(), prompt, 0, {512, 512, 75});
}

TEST(a_chunk_that_fails_ends_the_executor) {
  struct Fault {
    uint64_t FakeDevice::Script::* at;
    const char* what;
  };
  for (const Fault& fault : {Fault{&FakeDevice::Script::launch_error_at, "cuGraphLaunch failed"},
                             Fault{&FakeDevice::Script::stream_error_at, "CUDA_ERROR_ILLEGAL_ADDRESS"},
                             Fault{&FakeDevice::Script::silent_at, "without an answer"},
                             Fault{&FakeDevice::Script::hang_at, "has not answered"},
                             Fault{&FakeDevice::Script::skipped_at, "has not run a chunk of a prompt"},
                             Fault{&FakeDevice::Script::not_finite_at, "has not run a chunk of a prompt"}}) {
    for (const uint64_t later : {0U, 1U}) {
      ChunkRig rig({}, {.watchdog_ms = fault.at == &FakeDevice::Script::hang_at ? 1000 : 60'000});
      rig.device.arm([&](FakeDevice::Script& script, uint64_t next) {
        script.*fault.at = next + later;
        if (fault.at == &FakeDevice::Script::stream_error_at) script.silent_at = next + later;
      });
      const Tokens prompt = prompt_of(1100);
      CHECK(rig.prefill(prompt) == Status::kExecutorFailed);
      CHECK(says(rig.executor.failure(), fault.what));
      const uint64_t launched = rig.device.launched();
      CHECK(rig.prefill(prompt) == Status::kExecutorFailed);
      CHECK_EQ(rig.device.launched(), launched);
    }
  }
}

TEST(settling_waits_for_a_chunk) {
  ChunkRig rig({.chunk_us = 3000});
  const Tokens prompt = prompt_of(300, 8);
  CHECK(rig.start(prompt, 0, 300) == Status::kOk);
  rig.executor.settle();
  CHECK_EQ(FakeDevice::driver().query(&rig.device), ull::graph::kSuccess);
  CHECK(rig.complete(prompt, 3) == rig.model.continuation(prompt, 3));
}

TEST(whatever_comes_between_chunks_the_tokens_are_the_model_s) {
  for (uint32_t seed = 0; seed < 6; ++seed) {
    ChunkRig rig({.burst_rounds = seed % 2 == 0 ? 0 : 3}, {.adaptive = false});
    uint32_t random = seed * 2654435761U + 1;
    const auto below = [&](uint32_t limit) {
      random = random * 1664525U + 1013904223U;
      return static_cast<int>((random >> 8) % limit);
    };
    for (int turn = 0; turn < 12; ++turn) {
      Tokens text = prompt_of(2 + below(1900), below(97));
      const Tokens expected = rig.model.continuation(text, 12);
      rig.speculation = below(3) == 0 ? DrafterKind::kSuffix : DrafterKind::kNone;
      if (below(2) == 0) std::rotate(rig.pages.begin(), rig.pages.begin() + below(31), rig.pages.end());
      const int end = static_cast<int>(text.size()) - 1;
      for (int done = 0; done < end;) {
        const int count = std::min(1 + below(kChunkTokens), end - done);
        CHECK(rig.start(text, done, count) == Status::kOk);
        if (below(3) == 0) rig.executor.abort();
        const Status status = rig.finish();
        CHECK(status == Status::kOk || status == Status::kAborted);
        if (status == Status::kOk) done += count;
      }
      CHECK(rig.decode(text, 12) == Status::kOk);
      CHECK((Tokens{text.end() - 12, text.end()} == expected));
    }
    (void)rig.rest();
  }
}

// ---- drafters -------------------------------------------------------------------------------------------------------

TEST(a_draft_model_reads_a_chunk_in_rounds_of_its_own) {
  ChunkRig rig({}, kAlways, FakeDevice::Script{.context = 2048});
  (void)GraphRig::rest(*rig.draft_device);
  rig.speculation = DrafterKind::kDraft;
  rig.max_tree = 8;
  const Tokens prompt = prompt_of(1300, 6);
  CHECK(rig.complete(prompt, 40) == rig.model.continuation(prompt, 40));
  CHECK(rig.rounds <= 10);  // what it proposes is what the model says
  int read = 0;
  for (const auto& record : GraphRig::rest(*rig.draft_device)) {
    if (record.mode == RoundMode::kPrefill) read += record.count;
    CHECK(record.count <= ull::kMaxTreeTokens);
  }
  CHECK(read >= 1299);
}

// A head that has read all of a prompt drafts from all of it: no tap is overwritten before it is read.
TEST(heads_miss_nothing_between_chunks) {
  for (const auto& [kind, draws] : {std::pair{DrafterKind::kEagle, false},
                                    {DrafterKind::kEagle, true},
                                    {DrafterKind::kDflash, false},
                                    {DrafterKind::kDflash, true}}) {
    HeadRig rig(kind, {}, chunked({.last_chunks = draws}), kAlways);
    if (draws) CHECK_EQ(rig.executor.info().forced_tokens, rig.executor.info().prefill_chunk - 1);
    CHECK_EQ(rig.executor.info().prefill_chunk, kind == DrafterKind::kEagle ? kTapSlots - 1 : kChunkTokens);
    for (const int length : {66, 513, 1025, 1900}) {
      rig.drafted = {};
      Tokens text = prompt_of(length, length);
      const Tokens expected = rig.model.continuation(text, 40);
      const int forced = draws ? std::min(length, rig.executor.info().prefill_chunk) - 1 : 0;
      CHECK(rig.answer(text, 40, /*cached=*/0, forced) == Status::kOk);
      CHECK((Tokens{text.end() - 40, text.end()} == expected));
      CHECK_EQ(rig.result.accepted, rig.result.depth);
      const HeadRig::Passes passes = rig.passes();
      CHECK(!passes.empty());
      CHECK_EQ(wrong(passes), 0);
      for (const auto& pass : passes) CHECK_EQ(pass.from, 0);
      const ull::CachedRange& range = kind == DrafterKind::kEagle ? rig.drafted.eagle : rig.drafted.dflash;
      CHECK_EQ(range.lacking, 0);
      CHECK(range.through >= length - 1);
    }
  }
}

// An aborted chunk has overwritten the ring, of another sequence: what that has not read of its taps is lost.
TEST(a_chunk_that_was_aborted_leaves_its_taps_to_nobody) {
  HeadRig rig(DrafterKind::kEagle, {}, chunked(), kAlways);
  Tokens text = prompt_of(60);
  const Tokens expected = rig.model.continuation(text, 150), own = rig.pages;
  CHECK(rig.answer(text, 10) == Status::kOk);
  rig.speculation = DrafterKind::kNone;
  CHECK(rig.decode(text, 40) == Status::kOk);
  (void)rig.passes();
  {
    std::rotate(rig.pages.begin(), rig.pages.begin() + 8, rig.pages.end());
    const Tokens other = prompt_of(400, 5);
    HeldRound held(rig.device, 0, &FakeDevice::Script::begun);
    CHECK(rig.executor.start_prefill({other.data(), 400, 0, rig.pages.data()}) == Status::kOk);
    while (!held.reached()) std::this_thread::yield();
    rig.executor.abort();
    CHECK(rig.executor.poll(rig.result) == Status::kPending);
    held.release();
    CHECK(rig.finish() == Status::kAborted);
  }
  rig.pages = own;
  rig.speculation = DrafterKind::kEagle;
  CHECK(rig.decode(text, 100) == Status::kOk);
  CHECK(std::equal(text.begin() + 60, text.end(), expected.begin()));
  const HeadRig::Passes passes = rig.passes();
  CHECK(!passes.empty());
  CHECK_EQ(wrong(passes), 0);
}

}  // namespace
