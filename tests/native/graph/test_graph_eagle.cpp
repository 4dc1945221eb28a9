// An EAGLE head on the graph executor: its tree grows level by level from what the target's rounds have left, and is
// verified like any other.
#include <cmath>
#include <string>
#include <string_view>
#include <utility>

#include "head_fixture.h"

namespace {

using ull::Drafted;
using ull::DrafterKind;
using ull::Status;
using ull::gpu::RoundStatus;
using ull::graph::EagleProgram;
using ull::graph::GraphOptions;
using ull::graph::GraphProgram;
using ull::test::AbortedRound;
using ull::test::behind;
using ull::test::FakeDevice;
using ull::test::FakeEagle;
using ull::test::FakeModel;
using ull::test::GraphRig;
using ull::test::HeadRig;
using ull::test::program_with_eagle;
using ull::test::prompt_of;
using ull::test::says;
using ull::test::Sequence;
using ull::test::wrong;
using Tokens = std::vector<int32_t>;
using Passes = HeadRig::Passes;

const GraphOptions kAlways{.adaptive = false};
const FakeEagle::Script kInChunks{.chunks = true, .fill_us = 2000};  // whatever the machine is doing, these are faster
constexpr int kEagle = static_cast<int>(DrafterKind::kEagle);

struct EagleRig : HeadRig {
  explicit EagleRig(const FakeEagle::Script& head = {}, const FakeDevice::Script& script = {},
                    const GraphOptions& options = kAlways)
      : HeadRig(DrafterKind::kEagle, head, script, options) {}
};

int ranking(const Passes& passes) {
  return static_cast<int>(std::count_if(passes.begin(), passes.end(), [](const auto& pass) {
    return pass.ranked > 0 && pass.status == RoundStatus::kOk;
  }));
}

// ---- what is offered ------------------------------------------------------------------------------------------------

TEST(a_head_is_offered_with_what_it_costs) {
  EagleRig rig;
  const ull::ExecutorInfo& info = rig.executor.info();
  CHECK(info.drafters[kEagle]);
  CHECK(info.draft_ns[kEagle] > 0);
  CHECK_EQ(info.drafter_weight_bytes, int64_t{50});
  CHECK_EQ(info.weight_bytes, int64_t{1050});
  CHECK_EQ(info.drafter_kv_bytes, int64_t{32 * 64 * 4});
  CHECK_EQ(info.kv_bytes, int64_t{2 * 32 * 64 * 4});
  CHECK(info.copies_pages);
  GraphRig without;
  CHECK(!without.executor.info().drafters[kEagle]);
  FakeDevice device({});
  try {
    ull::graph::GraphExecutor(device.program(), FakeDevice::driver(), {.drafter = DrafterKind::kEagle});
    CHECK(false);
  } catch (const std::invalid_argument& error) {
    CHECK(says(error.what(), "drafter: "));
  }
}

TEST(a_program_whose_head_does_not_fit_is_refused_by_the_field) {
  FakeEagle eagle({}, {});
  FakeDevice target({});
  GraphProgram program = program_with_eagle(target, eagle);
  const EagleProgram good = *program.eagle;
  const auto refusal = [&](auto change) -> std::string {
    EagleProgram other = good;
    change(other);
    program.eagle = std::make_shared<const EagleProgram>(other);
    try {
      program.check();
    } catch (const std::invalid_argument& error) {
      const std::string_view what = error.what();
      return std::string(what.substr(0, what.find(':', what.find(':') + 1)));
    }
    return "";
  };
  CHECK_EQ(refusal([](EagleProgram&) {}), "");
  CHECK_EQ(refusal([](EagleProgram& head) { head.fill = nullptr; }), "eagle: fill");
  CHECK_EQ(refusal([](EagleProgram& head) { head.first = nullptr; }), "eagle: first");
  for (int i = 0; i < ull::graph::kEagleSizes; ++i) {
    CHECK_EQ(refusal([&](EagleProgram& head) { head.levels[i] = nullptr; }), "eagle: levels");
  }
  CHECK_EQ(refusal([](EagleProgram& head) { head.stream = nullptr; }), "eagle: stream");
  CHECK_EQ(refusal([](EagleProgram& head) { head.stream = &head; }), "eagle: stream");  // no order between the two
  CHECK_EQ(refusal([](EagleProgram& head) { head.context = &head; }), "eagle: context");
  CHECK_EQ(refusal([](EagleProgram& head) { head.requests = nullptr; }), "eagle: requests");
  CHECK_EQ(refusal([&](EagleProgram& head) { head.requests = program.requests; }), "eagle: requests");
  CHECK_EQ(refusal([&](EagleProgram& head) { head.results = program.results; }), "eagle: requests");
  CHECK_EQ(refusal([](EagleProgram& head) { head.control = nullptr; }), "eagle: control");
  CHECK_EQ(refusal([](EagleProgram& head) { head.pages = nullptr; }), "eagle: pages");
  CHECK_EQ(refusal([](EagleProgram& head) { head.text = nullptr; }), "eagle: text");
  CHECK_EQ(refusal([](EagleProgram& head) { head.chunk = &head; }), "eagle: chunks");
  CHECK_EQ(refusal([](EagleProgram& head) { head.vocabulary = 0; }), "eagle: vocabulary");
  CHECK_EQ(refusal([](EagleProgram& head) { head.context_tokens = 1023; }), "eagle: context_tokens");
  CHECK_EQ(refusal([](EagleProgram& head) { head.page_count = 31, head.kv_bytes = 31; }), "eagle: page_count");
  CHECK_EQ(refusal([](EagleProgram& head) { head.kv_bytes = 33; }), "eagle: kv_bytes");
  CHECK_EQ(refusal([](EagleProgram& head) { head.weight_bytes = -1; }), "eagle: weight_bytes");
}

TEST(a_head_gets_ready_within_a_short_context) {
  for (const int context : {2, 9, 40, 100}) {
    EagleRig rig({.chunks = true}, {.context = context});
    const Tokens prompt = prompt_of(1);
    Tokens text = prompt;
    CHECK(rig.answer(text, context - 1) == Status::kOk);
    CHECK(behind(text, 1) == rig.model.continuation(prompt, context - 1));
  }
}

// ---- speed, not tokens ----------------------------------------------------------------------------------------------

TEST(a_head_changes_the_speed_not_the_tokens) {
  for (const int rank : {-1, 0, 2, 9}) {
    for (const int max_tree : {2, 3, 16, 64}) {
      EagleRig rig({.rank = rank, .gap = rank > 0 ? 0.01F : 4.0F});
      rig.max_tree = max_tree;
      for (int turn = 0; turn < 3; ++turn) {
        rig.sampling.seed = static_cast<uint64_t>(turn);
        rig.sampling.temperature = turn == 2 ? 0.7F : 0.0F;
        rig.drafted = {};
        rig.rounds = 0;
        const Tokens prompt = prompt_of(90 + turn, turn);
        Tokens text = prompt;
        CHECK(rig.answer(text, 100) == Status::kOk);
        CHECK(behind(text, prompt.size()) == rig.model.continuation(prompt, 100, rig.sampling));
        if (rank < 0) CHECK_EQ(rig.rounds, 100);
        // A prompt's hidden states draft nothing; from then on all is accepted: as many nodes as are to be had, a path
        // of eight at most.
        const int depth = std::min(max_tree - 1, 8);
        if (rank == 0 && depth <= 2) CHECK_EQ(rig.rounds, 1 + (99 + depth) / (depth + 1));
        if (rank == 0 && depth > 2) CHECK(rig.rounds <= 40);
        if (rank == 9 && max_tree == 64) CHECK(rig.rounds <= 60);  // it is among the first level's
        const Passes passes = rig.passes();
        CHECK_EQ(wrong(passes), 0);
        CHECK(ranking(passes) > 0);
      }
    }
  }
}

TEST(every_way_to_ask_gives_the_same_tokens) {
  const ull::LogitBias bans[] = {{4, -INFINITY}, {17, -INFINITY}};
  for (const bool adaptive : {false, true}) {
    for (const auto speculation : {DrafterKind::kEagle, DrafterKind::kAuto}) {
      for (const int rank : {-1, 0, 1}) {
        EagleRig rig({.rank = rank, .gap = 0.5F}, {.model = {.period = 7}}, {.adaptive = adaptive});
        rig.speculation = speculation;
        rig.max_tree = 0;
        for (int turn = 0; turn < 4; ++turn) {
          rig.sampling = {};
          rig.sampling.seed = static_cast<uint64_t>(turn);
          if (turn == 1) rig.sampling.bias = bans, rig.sampling.bias_count = 2;
          if (turn == 2) rig.sampling.presence_penalty = 0.5F;
          if (turn == 3) rig.sampling.top_logprobs = 3;
          rig.drafted = {};
          const Tokens prompt = prompt_of(130, turn);
          Tokens text = prompt;
          CHECK(rig.answer(text, 300) == Status::kOk);
          CHECK(behind(text, prompt.size()) == rig.model.continuation(prompt, 300, rig.sampling));
          CHECK_EQ(wrong(rig.passes()), 0);
        }
      }
    }
  }
}

// Where it has a graph of chunks: all entries of a step at once (its last one waits for the token behind it), and what
// is left over as it was.
TEST(a_prompt_is_read_along_in_chunks) {
  const std::pair<int, Tokens> cases[] = {{65, {63}},   {66, {64}},      {67, {65}},       {500, {498}},
                                          {512, {510}}, {514, {510, 2}}, {700, {510, 188}}};
  for (const auto& [length, parts] : cases) {
    EagleRig rig(kInChunks, {.chunks = true});
    const Tokens prompt = prompt_of(length);
    Tokens text = prompt;
    CHECK(rig.read(text, 0, length - 1) == Status::kOk);
    Tokens read;
    for (const auto& pass : rig.passes()) {
      CHECK_EQ(pass.graph, pass.read > 64 ? ull::gpu::kChunkTokens : FakeEagle::kFill);
      read.push_back(pass.read);
    }
    CHECK(read == parts);
    CHECK_EQ(rig.drafted.eagle.through, length - 2);
    CHECK(rig.decode(text, 60) == Status::kOk);
    CHECK_EQ(rig.result.accepted, rig.result.depth);
    const Passes passes = rig.passes();
    CHECK_EQ(wrong(passes), 0);
    for (const auto& pass : passes) CHECK_EQ(pass.from, 0);
    CHECK(behind(text, prompt.size()) == rig.model.continuation(prompt, 60));
  }
}

TEST(what_has_waited_for_a_proposal_is_read_in_a_chunk) {
  EagleRig rig(kInChunks, {.chunks = true});
  Tokens text = prompt_of(300);
  rig.speculation = DrafterKind::kNone;
  CHECK(rig.read(text, 0, 299) == Status::kOk);
  rig.speculation = DrafterKind::kEagle;
  CHECK(rig.advance(text, 1) == Status::kOk);  // its taps are the target's; it proposes nothing yet
  CHECK(rig.passes().empty());
  CHECK(rig.advance(text, 30) == Status::kOk);
  CHECK(rig.result.drafter == DrafterKind::kEagle);
  const Passes passes = rig.passes();
  REQUIRE(passes.size() >= 2);
  CHECK_EQ(passes[0].graph, ull::gpu::kChunkTokens);
  CHECK_EQ(passes[0].read, 300);
  CHECK_EQ(passes[1].graph, ull::graph::kEagleFirst);
  CHECK_EQ(passes[1].start, 299);
  CHECK_EQ(wrong(passes), 0);
}

TEST(a_chunk_that_costs_more_than_passes_of_64_is_not_taken) {
  EagleRig rig({.chunks = true, .chunk_us = 200'000}, {.chunks = true});
  const Tokens text = prompt_of(400);
  CHECK(rig.read(text, 0, 399) == Status::kOk);
  const Passes passes = rig.passes();
  CHECK_EQ(passes.size(), size_t{7});
  for (const auto& pass : passes) CHECK_EQ(pass.graph, FakeEagle::kFill);
}

TEST(a_proposal_repeats_its_first_entries_and_grows_by_levels) {
  EagleRig rig;
  Tokens text = prompt_of(150);
  CHECK(rig.read(text, 0, 149) == Status::kOk);
  Passes passes = rig.passes();
  // The last entry of a prompt waits for the token behind it.
  REQUIRE(passes.size() == 3);
  int end = 0;
  for (const auto& pass : passes) {
    CHECK_EQ(pass.graph, FakeEagle::kFill);
    CHECK_EQ(pass.start, end);
    CHECK_EQ(pass.ranked, 0);
    end += pass.read;
  }
  CHECK_EQ(end, 148);
  CHECK_EQ(rig.drafted.eagle.through, 148);
  CHECK(rig.advance(text, 30) == Status::kOk);
  CHECK(rig.passes().empty());
  CHECK(rig.advance(text, 30) == Status::kOk);
  CHECK(rig.result.drafter == DrafterKind::kEagle);
  CHECK_EQ(rig.result.accepted, rig.result.depth);
  passes = rig.passes();
  REQUIRE(passes.size() >= 3);
  CHECK(passes.back().behind);  // the next proposal's
  passes.pop_back();
  CHECK_EQ(passes[0].graph, ull::graph::kEagleFirst);
  CHECK_EQ(passes[0].read, 2);
  CHECK_EQ(passes[0].ranked, 1);
  for (size_t i = 0; i < passes.size(); ++i) {
    CHECK_EQ(passes[i].start, 148);
    CHECK_EQ(passes[i].from, 0);
    CHECK_EQ(passes[i].read, 2);
    if (i == 0) continue;
    CHECK(passes[i].ranked >= 1 && passes[i].ranked <= 8);
    CHECK_EQ(passes[i].count, passes[i - 1].count + passes[i].ranked);
    CHECK_EQ(passes[i].graph, passes[i].count <= 16 ? 16 : passes[i].count <= 32 ? 32 : 64);
  }
  CHECK_EQ(rig.drafted.eagle.through, 150);
}

// The device knows which entries the accepted nodes make; the next proposal takes that pass for its own.
TEST(a_first_pass_is_launched_behind_the_round_that_verifies_a_tree) {
  for (const int rank : {0, -1}) {
    EagleRig rig({.rank = rank});
    rig.max_tree = 6;
    const Tokens prompt = prompt_of(50);
    Tokens text = prompt;
    CHECK(rig.answer(text, 60) == Status::kOk);
    CHECK(behind(text, prompt.size()) == rig.model.continuation(prompt, 60));
    int asked = 0, found = 0;
    for (const auto& pass : rig.passes()) {
      if (pass.graph != ull::graph::kEagleFirst) continue;
      (pass.behind ? found : asked)++;
      CHECK(pass.status == RoundStatus::kOk);
      CHECK_EQ(pass.wrong, 0);
    }
    CHECK(asked <= 3);  // behind the first round, which nobody had drafted, and where a round may be the last
    CHECK(found >= 6);
  }
}

TEST(a_first_pass_that_finds_nothing_to_make_is_asked_for_again) {
  EagleRig rig;
  rig.max_tree = 64;
  const Tokens prompt = prompt_of(50);
  Tokens text = prompt;
  CHECK(rig.answer(text, 100) == Status::kOk);  // all is accepted: nine tokens, more than such a pass makes entries
  CHECK(behind(text, prompt.size()) == rig.model.continuation(prompt, 100));
  CHECK_EQ(rig.result.accepted, rig.result.depth);
  int skipped = 0;
  for (const auto& pass : rig.passes()) {
    CHECK(pass.behind || pass.status == RoundStatus::kOk);
    if (pass.status == RoundStatus::kSkipped) ++skipped;
  }
  CHECK(skipped > 3);
}

TEST(all_levels_of_the_widest_tree_fit) {
  EagleRig rig({.gap = 0.0F});  // candidates alike: every level is as wide as may be
  rig.max_tree = 64;
  const Tokens prompt = prompt_of(40);
  Tokens text = prompt;
  CHECK(rig.answer(text, 300) == Status::kOk);
  CHECK(behind(text, prompt.size()) == rig.model.continuation(prompt, 300));
  int widest = 0;
  for (const auto& pass : rig.passes()) widest = std::max(widest, pass.ranked);
  CHECK_EQ(widest, 8);
}

TEST(drafts_end_with_the_context) {
  for (const int length : {20, 24, 25, 29}) {
    EagleRig rig({}, {.context = 128});
    rig.max_tree = 64;
    const Tokens prompt = prompt_of(length);
    Tokens text = prompt;
    CHECK(rig.answer(text, 128 - length) == Status::kOk);
    CHECK(behind(text, prompt.size()) == rig.model.continuation(prompt, 128 - length));
    CHECK_EQ(wrong(rig.passes()), 0);
  }
}

// ---- what its cache holds -------------------------------------------------------------------------------------------

TEST(turns_go_on_in_cached_prefixes) {
  EagleRig rig;
  Tokens text = prompt_of(70);
  int cached = 0;
  for (int turn = 0; turn < 5; ++turn) {
    const Tokens prompt = text;
    CHECK(rig.answer(text, 60, cached) == Status::kOk);
    CHECK(behind(text, prompt.size()) == rig.model.continuation(prompt, 60));
    const Passes passes = rig.passes();
    CHECK_EQ(wrong(passes), 0);
    for (const auto& pass : passes) CHECK_EQ(pass.from, 0);
    CHECK_EQ(rig.result.accepted, rig.result.depth);
    // Then something else is said: the next turn keeps all but the answer's last tokens, or half of everything.
    text.resize(turn % 2 == 0 ? text.size() - 3 : text.size() / 2);
    cached = static_cast<int>(text.size());
    for (int i = 0; i < 40; ++i) text.push_back((7 * i + turn) % 97);
  }
}

TEST(what_others_left_unread_in_a_prefix_is_a_hole) {
  EagleRig rig;
  const Tokens prompt = prompt_of(700);
  Tokens text = prompt;
  rig.speculation = DrafterKind::kNone;
  CHECK(rig.answer(text, 20) == Status::kOk);
  CHECK(rig.passes().empty());
  CHECK_EQ(rig.drafted.eagle.through, 0);
  // It drafts from the newest positions whose taps are still there.
  rig.speculation = DrafterKind::kEagle;
  CHECK(rig.decode(text, 1) == Status::kOk);
  CHECK(rig.result.drafter == DrafterKind::kNone);
  CHECK(rig.decode(text, 40) == Status::kOk);
  CHECK(rig.result.drafter == DrafterKind::kEagle);
  const Passes passes = rig.passes();
  REQUIRE(ranking(passes) > 0);
  CHECK_EQ(wrong(passes), 0);
  for (const auto& pass : passes) CHECK(pass.from > 0 && pass.from >= 720 - ull::gpu::kTapSlots);
  CHECK(behind(text, prompt.size()) == rig.model.continuation(prompt, 61));
}

TEST(a_request_that_does_not_speculate_leaves_no_gap_while_the_ring_lasts) {
  EagleRig rig;
  Tokens text = prompt_of(50);
  CHECK(rig.answer(text, 40) == Status::kOk);
  (void)rig.passes();
  rig.speculation = DrafterKind::kNone;
  CHECK(rig.decode(text, 200) == Status::kOk);
  CHECK(rig.passes().empty());
  rig.speculation = DrafterKind::kEagle;
  CHECK(rig.decode(text, 1) == Status::kOk);
  CHECK(rig.decode(text, 30) == Status::kOk);
  Passes passes = rig.passes();
  CHECK(ranking(passes) > 0);
  CHECK_EQ(wrong(passes), 0);
  for (const auto& pass : passes) CHECK_EQ(pass.from, 0);
  // Longer than the ring: it begins behind the hole.
  rig.speculation = DrafterKind::kNone;
  CHECK(rig.decode(text, 600) == Status::kOk);
  rig.speculation = DrafterKind::kEagle;
  CHECK(rig.decode(text, 60) == Status::kOk);
  passes = rig.passes();
  CHECK(ranking(passes) > 0);
  CHECK_EQ(wrong(passes), 0);
  for (const auto& pass : passes) CHECK(pass.from > 320);
  CHECK(behind(text, 50) == rig.model.continuation(prompt_of(50), 40 + 200 + 31 + 600 + 60));
}

// The ring holds the newest positions of all sequences: what another has overwritten before the head has read it, it
// does without, which costs no more than these entries.
TEST(sequences_take_turns) {
  EagleRig rig({.heals = 2});
  Sequence sequences[3];
  Tokens expected[3];
  for (int i = 0; i < 3; ++i) {
    Sequence& sequence = sequences[i];
    sequence.tokens = prompt_of(60 + 45 * i, i);
    for (int page = 0; page < 10; ++page) sequence.pages.push_back(31 - 3 * page - i);
    expected[i] = sequence.tokens;
    const Tokens more = rig.model.continuation(sequence.tokens, 450);
    expected[i].insert(expected[i].end(), more.begin(), more.end());
    rig.enter(sequence);
    const Tokens& text = sequence.tokens;
    CHECK(rig.read(text, 0, static_cast<int>(text.size()) - 1) == Status::kOk);
    rig.leave(sequence);
  }
  int drafted = 0;
  for (int visit = 0; visit < 27; ++visit) {
    Sequence& sequence = sequences[visit * 7 % 3];
    rig.enter(sequence);
    // What another has left is no state of its own: nothing is proposed until a round has been.
    CHECK(rig.advance(sequence.tokens, 20) == Status::kOk);
    CHECK(rig.result.drafter == DrafterKind::kNone);
    for (int round = 0; round < 4; ++round) {
      CHECK(rig.advance(sequence.tokens, 20) == Status::kOk);
      CHECK(rig.result.drafter == DrafterKind::kEagle);
      CHECK_EQ(rig.result.accepted, rig.result.depth);
      ++drafted;
    }
    rig.leave(sequence);
  }
  CHECK_EQ(drafted, 27 * 4);
  for (int i = 0; i < 3; ++i) {
    REQUIRE(sequences[i].tokens.size() <= expected[i].size());
    CHECK(std::equal(sequences[i].tokens.begin(), sequences[i].tokens.end(), expected[i].begin()));
  }
}

// Alike in tokens and positions but for the first token, so that nothing but the page tells their taps apart.
TEST(taps_of_another_sequence_are_not_taken_for_ones_own) {
  EagleRig rig;
  Sequence mine{prompt_of(60), {}}, other{prompt_of(60), {}};
  for (int page = 0; page < 8; ++page) mine.pages.push_back(2 * page), other.pages.push_back(2 * page + 1);
  other.tokens[0] = 50;
  rig.enter(mine);
  CHECK(rig.read(mine.tokens, 0, 59) == Status::kOk);
  CHECK(rig.advance(mine.tokens, 1) == Status::kOk);
  rig.leave(mine);
  rig.enter(other);
  CHECK(rig.read(other.tokens, 0, 59) == Status::kOk);
  CHECK(rig.advance(other.tokens, 1) == Status::kOk);
  (void)rig.passes();
  // The one that came last drafts at once; the first one's newest tap is gone.
  CHECK(rig.advance(other.tokens, 20) == Status::kOk);
  CHECK(rig.result.drafter == DrafterKind::kEagle);
  CHECK(rig.result.accepted > 0);
  CHECK_EQ(wrong(rig.passes()), 0);
  rig.enter(mine);
  const Tokens before = mine.tokens;
  CHECK(rig.advance(mine.tokens, 20) == Status::kOk);
  CHECK(rig.result.drafter == DrafterKind::kNone);
  CHECK(rig.passes().empty());
  CHECK(behind(mine.tokens, before.size()) == rig.model.continuation(before, 1));
}

TEST(a_round_that_was_scored_or_forced_is_accounted_for) {
  EagleRig rig;
  const Tokens prompt = prompt_of(100);
  Tokens text = prompt;
  CHECK(rig.answer(text, 20) == Status::kOk);
  // Forced tokens: one pass for a prompt's end and its first token, whose hidden states are kept too.
  for (int i = 0; i < 9; ++i) text.push_back(3 * i);
  const Tokens before = text;
  Tokens expected = rig.model.continuation(text, 40);
  ull::RoundStep step = rig.step(text, 1);
  step.forced = 9;
  step.position -= 9;
  step.token = text[static_cast<size_t>(step.position)];
  CHECK(rig.executor.start_round(step) == Status::kOk);
  CHECK(rig.finish() == Status::kOk);
  text.push_back(rig.result.tokens[0].token);
  (void)rig.passes();
  CHECK(rig.advance(text, 20) == Status::kOk);
  CHECK(rig.result.drafter == DrafterKind::kEagle);
  CHECK(rig.result.accepted > 0);
  // Scores leave the taps of their tree's root alone, which is not of the sequence.
  const Tokens other = {5, 6, 7};
  const uint8_t parents[] = {0, 0, 1};
  const ull::ScoreQuery query{2, 9};
  float logprob = 0.0F;
  const auto root = static_cast<int32_t>(text.size()) - 2;
  CHECK(rig.executor.start_scores({other.data(), parents, 3, root, rig.pages.data(), &query, 1, &logprob}) ==
        Status::kOk);
  CHECK(rig.finish() == Status::kOk);
  CHECK(rig.advance(text, 20) == Status::kOk);
  CHECK(rig.result.drafter == DrafterKind::kNone);
}

// All but the last of them, which knows what followed it in the other sequence.
TEST(a_copied_page_holds_the_heads_entries) {
  EagleRig rig({.heals = 8});
  const Tokens first = prompt_of(100);
  Tokens text = first;
  CHECK(rig.answer(text, 20) == Status::kOk);
  const std::vector<int32_t> mine = rig.pages;
  const Drafted drafted = rig.drafted;
  CHECK_EQ(wrong(rig.passes()), 0);
  // Of the first 100 tokens 90 become another sequence's, which has the second page to itself.
  rig.pages[1] = rig.pages[9];
  CHECK(rig.executor.start_copy({.from_page = mine[1], .to_page = rig.pages[1], .tokens = 26}) == Status::kOk);
  CHECK(rig.finish() == Status::kOk);
  Tokens second(first.begin(), first.begin() + 90);
  for (int32_t token = 0; token < 30; ++token) second.push_back(token);
  const Tokens expected = rig.model.continuation(second, 30);
  CHECK(rig.answer(second, 30, 90) == Status::kOk);
  CHECK(behind(second, 120) == expected);
  CHECK_EQ(rig.result.accepted, rig.result.depth);
  Passes passes = rig.passes();
  CHECK(ranking(passes) > 0);
  for (const auto& pass : passes) {
    CHECK_EQ(pass.from, 0);
    if (pass.status == RoundStatus::kOk) CHECK_EQ(pass.wrong, pass.ranked);
  }
  // And the first goes on in its own, but for what it had not read when the other overwrote the taps.
  rig.pages = mine;
  rig.drafted = drafted;
  const Tokens more = rig.model.continuation(text, 30);
  const size_t held = text.size();
  const int unread = static_cast<int>(held) - 1 - drafted.eagle.through;
  CHECK(rig.decode(text, 30) == Status::kOk);
  CHECK(behind(text, held) == more);
  CHECK_EQ(rig.result.accepted, rig.result.depth);
  passes = rig.passes();
  CHECK(ranking(passes) > 0);
  for (const auto& pass : passes) {
    if (pass.status == RoundStatus::kOk) CHECK_EQ(pass.wrong, unread * pass.ranked);
  }
}

TEST(a_head_that_is_not_asked_rests) {
  EagleRig rig;
  Tokens text = prompt_of(80);
  CHECK(rig.answer(text, 40) == Status::kOk);
  (void)rig.passes();
  rig.max_tree = 1;  // nothing can be proposed, but it may be asked again
  for (int i = 0; i < 170; ++i) CHECK(rig.advance(text, 10) == Status::kOk);
  CHECK(rig.passes().empty());
  rig.max_tree = 16;
  const auto root = static_cast<int>(text.size()) - 1;
  CHECK(rig.advance(text, 10) == Status::kOk);
  CHECK(rig.result.drafter == DrafterKind::kEagle);
  CHECK(rig.result.accepted > 0);
  CHECK(rig.decode(text, 30) == Status::kOk);
  const Passes passes = rig.passes();
  REQUIRE(!passes.empty());
  CHECK_EQ(passes[0].start, root - 16);
  for (const auto& pass : passes) CHECK_EQ(pass.from, root - 16);
  CHECK_EQ(wrong(passes), 0);
  CHECK(behind(text, 80) == rig.model.continuation(prompt_of(80), static_cast<int>(text.size()) - 80));
}

// ---- what ends it early ---------------------------------------------------------------------------------------------

TEST(an_abort_ends_any_pass_and_the_next_draft_is_right) {
  for (const uint64_t more : {0, 1, 2, 3, 4}) {  // what it lacks, in two passes; the first; levels
    EagleRig rig;
    const Tokens prompt = prompt_of(140);
    Tokens text = prompt;
    rig.speculation = DrafterKind::kNone;
    CHECK(rig.read(text, 0, 139) == Status::kOk);
    rig.speculation = DrafterKind::kEagle;
    rig.max_tree = 2;
    CHECK(rig.advance(text, 1) == Status::kOk);  // its taps are the target's; it proposes nothing yet
    (void)rig.passes();
    rig.max_tree = 64;
    {
      AbortedRound aborted(rig.executor, *rig.eagle, more);
      CHECK(rig.executor.start_round(rig.step(text, 30)) == Status::kOk);
      CHECK(rig.finish() == Status::kAborted);
    }
    const Passes passes = rig.passes();
    CHECK_EQ(static_cast<uint64_t>(std::count_if(passes.begin(), passes.end(),
                                                 [](const auto& pass) { return pass.status == RoundStatus::kOk; })),
             more);
    CHECK(rig.advance(text, 30) == Status::kOk);
    CHECK(rig.result.drafter == DrafterKind::kNone);
    CHECK(rig.decode(text, 40) == Status::kOk);
    CHECK(rig.result.drafter == DrafterKind::kEagle);
    CHECK_EQ(wrong(rig.passes()), 0);
    CHECK(behind(text, 140) == rig.model.continuation(prompt, static_cast<int>(text.size()) - 140));
  }
}

TEST(an_abort_ends_what_it_reads_along_with_a_prompt) {
  for (const uint64_t more : {0, 2, 5}) {
    EagleRig rig;
    const Tokens prompt = prompt_of(600);
    Tokens text = prompt;
    {
      AbortedRound aborted(rig.executor, *rig.eagle, more);
      CHECK(rig.read(text, 0, 599) == Status::kAborted);
    }
    const int kept = more < 4 ? 0 : 255;  // of whole steps
    CHECK_EQ(rig.drafted.eagle.through, kept);
    (void)rig.passes();
    CHECK(rig.read(text, more < 4 ? 0 : 256, 599) == Status::kOk);
    CHECK_EQ(rig.drafted.eagle.through, 598);
    CHECK(rig.decode(text, 40) == Status::kOk);
    const Passes passes = rig.passes();
    CHECK_EQ(wrong(passes), 0);
    for (const auto& pass : passes) CHECK_EQ(pass.from, 0);
    CHECK(behind(text, 600) == rig.model.continuation(prompt, 40));
  }
}

TEST(a_chunk_that_is_cancelled_is_read_again) {
  EagleRig rig(kInChunks, {.chunks = true});
  const Tokens prompt = prompt_of(600);
  Tokens text = prompt;
  {
    AbortedRound aborted(rig.executor, *rig.eagle, 0);
    CHECK(rig.read(text, 0, 599) == Status::kAborted);
  }
  CHECK_EQ(rig.drafted.eagle.through, 0);
  const Passes cancelled = rig.passes();
  REQUIRE(cancelled.size() == 1);
  CHECK(cancelled[0].status == RoundStatus::kSkipped);
  CHECK(rig.read(text, 0, 599) == Status::kOk);
  CHECK_EQ(rig.drafted.eagle.through, 598);
  CHECK(rig.decode(text, 40) == Status::kOk);
  CHECK_EQ(rig.result.accepted, rig.result.depth);
  CHECK_EQ(wrong(rig.passes()), 0);
  CHECK(behind(text, 600) == rig.model.continuation(prompt, 40));
}

TEST(an_aborted_round_leaves_no_tap_that_is_trusted) {
  EagleRig rig;
  const Tokens prompt = prompt_of(100);
  Tokens text = prompt;
  CHECK(rig.answer(text, 20) == Status::kOk);
  for (int turn = 0; turn < 12; ++turn) {
    {
      AbortedRound aborted(rig.executor, rig.device, 0);
      CHECK(rig.executor.start_round(rig.step(text, 30)) == Status::kOk);
      CHECK(rig.finish() == Status::kAborted);
    }
    CHECK(rig.advance(text, 30) == Status::kOk);
    CHECK(rig.result.drafter == DrafterKind::kNone);
    CHECK(rig.advance(text, 30) == Status::kOk);
    CHECK(rig.result.drafter == DrafterKind::kEagle);
  }
  CHECK_EQ(wrong(rig.passes()), 0);
  CHECK(behind(text, 100) == rig.model.continuation(prompt, static_cast<int>(text.size()) - 100));
}

TEST(a_pass_that_fails_ends_the_executor_with_its_reason) {
  struct Fault {
    uint64_t FakeEagle::Script::* at;
    const char* what;
    bool restart;
  };
  // Of a prompt so long, so many passes later: in a chunk, in a pass of 64, in the first, in levels.
  const std::pair<int, uint64_t> moments[] = {{130, 0}, {30, 0}, {30, 1}, {30, 2}, {30, 4}};
  for (const Fault& fault :
       {Fault{&FakeEagle::Script::launch_error_at, "cuGraphLaunch failed with CUDA_ERROR_OUT_OF_MEMORY", true},
        Fault{&FakeEagle::Script::stream_error_at, "a round failed with CUDA_ERROR_ILLEGAL_ADDRESS", false},
        Fault{&FakeEagle::Script::hang_at, "has not answered", false},
        Fault{&FakeEagle::Script::silent_at, "without an answer", true},
        Fault{&FakeEagle::Script::skipped_at, "has not run a pass of a head", true}}) {
    const int watchdog_ms = fault.at == &FakeEagle::Script::hang_at ? 300 : 60'000;
    for (const auto& [length, more] : moments) {
      EagleRig rig(kInChunks, {.chunks = true}, {.watchdog_ms = watchdog_ms, .adaptive = false});
      rig.max_tree = 64;
      rig.eagle->arm([&](FakeEagle::Script& script, uint64_t next) { script.*fault.at = next + more; });
      Tokens text = prompt_of(length);
      Status status = rig.read(text, 0, length - 1);
      CHECK(status == (more == 0 ? Status::kExecutorFailed : Status::kOk));
      for (int round = 0; status == Status::kOk && round < 2; ++round) status = rig.advance(text, 30);
      CHECK(status == Status::kExecutorFailed);
      CHECK(says(rig.executor.failure(), fault.what));
      CHECK_EQ(rig.executor.restart_helps(), fault.restart);
      CHECK(rig.advance(text, 30) == Status::kExecutorFailed);
      CHECK(rig.executor.poll(rig.result) == Status::kExecutorFailed);
    }
  }
}

TEST(nonsense_from_a_pass_is_not_passed_on) {
  using Absurdity = std::function<void(ull::gpu::RoundResult&)>;
  const Absurdity absurdities[] = {
      [](auto& answer) { answer.count = 0; },
      [](auto& answer) { ++answer.count; },
      [](auto& answer) { answer.tokens[0].node = 7; },
      [](auto& answer) { answer.tokens[0].top_count = 0; },
      [](auto& answer) { answer.tokens[0].top_count = 11; },
      [](auto& answer) { answer.tokens[0].top[3].token = -1; },
      [](auto& answer) { answer.tokens[0].top[9].token = 100; },
  };
  for (const Absurdity& absurdity : absurdities) {
    for (const uint64_t more : {1, 2, 4}) {
      EagleRig rig;
      rig.max_tree = 64;
      Tokens text = prompt_of(30);
      rig.eagle->arm([&](FakeEagle::Script& script, uint64_t next) {
        script.absurd_at = next + more;
        script.absurdity = absurdity;
      });
      CHECK(rig.read(text, 0, 29) == Status::kOk);
      CHECK(rig.advance(text, 30) == Status::kOk);
      CHECK(rig.advance(text, 30) == Status::kExecutorFailed);
      CHECK(says(rig.executor.failure(), "impossible answer to a draft"));
      CHECK(rig.executor.restart_helps());
    }
  }
}

// A head's scores may be anything: they choose what is verified.
TEST(scores_that_are_no_numbers_cost_nothing_but_speed) {
  for (const float score : {NAN, INFINITY, -INFINITY}) {
    for (const int rank : {0, 1, 9}) {
      EagleRig rig;
      const Tokens prompt = prompt_of(30);
      Tokens text = prompt;
      CHECK(rig.read(text, 0, 29) == Status::kOk);
      CHECK(rig.advance(text, 30) == Status::kOk);
      rig.eagle->arm([&](FakeEagle::Script& script, uint64_t next) {
        script.absurd_at = next;
        script.absurdity = [=](ull::gpu::RoundResult& answer) { answer.tokens[0].top[rank].logprob = score; };
      });
      CHECK(rig.decode(text, 40) == Status::kOk);
      CHECK(behind(text, 30) == rig.model.continuation(prompt, static_cast<int>(text.size()) - 30));
    }
  }
}

TEST(a_copy_that_fails_ends_the_executor) {
  EagleRig rig;
  rig.eagle->arm([](FakeEagle::Script& script, uint64_t) { script.fails_copies = true; });
  CHECK(rig.executor.start_copy({1, 2, 5}) == Status::kExecutorFailed);
  CHECK(says(rig.executor.failure(), "cuMemcpyDtoDAsync failed with CUDA_ERROR_OUT_OF_MEMORY"));
}

}  // namespace
