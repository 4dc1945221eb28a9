// A DFlash head on the graph executor: a block behind the root, its context made of what the target's rounds have left,
// and with a Markov term levels of nodes. The tree is verified like any other.
#include <cmath>
#include <string>
#include <string_view>

#include "head_fixture.h"

namespace {

using ull::DrafterKind;
using ull::Status;
using ull::gpu::RoundStatus;
using ull::graph::DflashProgram;
using ull::graph::GraphOptions;
using ull::graph::GraphProgram;
using ull::test::AbortedRound;
using ull::test::behind;
using ull::test::FakeDevice;
using ull::test::FakeDflash;
using ull::test::GraphRig;
using ull::test::HeadRig;
using ull::test::program_with_dflash;
using ull::test::prompt_of;
using ull::test::says;
using ull::test::Sequence;
using ull::test::wrong;
using Script = FakeDflash::Script;
using Passes = HeadRig::Passes;
using Tokens = std::vector<int32_t>;

const GraphOptions kAlways{.adaptive = false};
constexpr int kDflash = static_cast<int>(DrafterKind::kDflash);

struct DflashRig : HeadRig {
  explicit DflashRig(const Script& head = {}, const FakeDevice::Script& script = {},
                     const GraphOptions& options = kAlways)
      : HeadRig(DrafterKind::kDflash, head, script, options) {}
};

Passes of_graph(const Passes& passes, int graph) {
  Passes found;
  std::copy_if(passes.begin(), passes.end(), std::back_inserter(found),
               [&](const auto& pass) { return pass.graph == graph; });
  return found;
}

// ---- what is offered ------------------------------------------------------------------------------------------------

TEST(a_head_is_offered_with_what_it_costs) {
  for (const bool nodes : {false, true}) {
    DflashRig rig({.nodes = nodes});
    const ull::ExecutorInfo& info = rig.executor.info();
    CHECK(info.drafters[kDflash]);
    CHECK(info.draft_ns[kDflash] > 0);
    CHECK_EQ(info.drafter_weight_bytes, int64_t{50});
    CHECK_EQ(info.drafter_kv_bytes, int64_t{32 * 64 * 4});
    CHECK(info.copies_pages);
  }
  FakeDevice device({});
  try {
    ull::graph::GraphExecutor(device.program(), FakeDevice::driver(), {.drafter = DrafterKind::kDflash});
    CHECK(false);
  } catch (const std::invalid_argument& error) {
    CHECK(says(error.what(), "drafter: the program holds no DFlash head"));
  }
}

TEST(a_program_whose_head_does_not_fit_is_refused_by_the_field) {
  FakeDflash dflash({.nodes = true}, {});
  FakeDevice target({});
  GraphProgram program = program_with_dflash(target, dflash);
  const DflashProgram good = *program.dflash;
  const auto refusal = [&](auto change) -> std::string {
    DflashProgram other = good;
    change(other);
    program.dflash = std::make_shared<const DflashProgram>(other);
    try {
      program.check();
    } catch (const std::invalid_argument& error) {
      const std::string_view what = error.what();
      return std::string(what.substr(0, what.find(':', what.find(':') + 1)));
    }
    return "";
  };
  CHECK_EQ(refusal([](DflashProgram&) {}), "");
  CHECK_EQ(refusal([](DflashProgram& head) { head.nodes = nullptr; }), "");  // it has no Markov term
  for (int i = 0; i < 2; ++i) {
    CHECK_EQ(refusal([&](DflashProgram& head) { head.contexts[i] = nullptr; }), "dflash: contexts");
  }
  CHECK_EQ(refusal([](DflashProgram& head) { head.block = nullptr; }), "dflash: block");
  CHECK_EQ(refusal([](DflashProgram& head) { head.block_tokens = 1; }), "dflash: block_tokens");
  CHECK_EQ(refusal([](DflashProgram& head) { head.block_tokens = 33; }), "dflash: block_tokens");
  CHECK_EQ(refusal([](DflashProgram& head) { head.mask_token = -1; }), "dflash: mask_token");
  CHECK_EQ(refusal([](DflashProgram& head) { head.mask_token = 100; }), "dflash: mask_token");
  CHECK_EQ(refusal([](DflashProgram& head) { head.stream = &head; }), "dflash: stream");  // no order between the two
  CHECK_EQ(refusal([](DflashProgram& head) { head.context = &head; }), "dflash: context");
  CHECK_EQ(refusal([&](DflashProgram& head) { head.requests = program.requests; }), "dflash: requests");
  CHECK_EQ(refusal([](DflashProgram& head) { head.context_tokens = 1023; }), "dflash: context_tokens");
}

TEST(a_head_gets_ready_within_a_short_context) {
  for (const int context : {2, 3, 9, 40}) {
    DflashRig rig({}, {.context = context});
    const Tokens prompt = prompt_of(1);
    Tokens text = prompt;
    CHECK(rig.answer(text, context - 1) == Status::kOk);
    CHECK(behind(text, 1) == rig.model.continuation(prompt, context - 1));
  }
}

// ---- speed, not tokens ----------------------------------------------------------------------------------------------

TEST(a_head_changes_the_speed_not_the_tokens) {
  for (const bool nodes : {false, true}) {
    for (const bool anchor : {false, true}) {
      for (const int rank : {-1, 0, 2}) {
        for (const int max_tree : {2, 16, 64}) {
          DflashRig rig({.rank = rank, .gap = rank > 0 ? 0.01F : 4.0F, .nodes = nodes, .anchor_predicts = anchor});
          rig.max_tree = max_tree;
          rig.sampling.temperature = anchor ? 0.7F : 0.0F;
          const Tokens prompt = prompt_of(90);
          Tokens text = prompt;
          CHECK(rig.answer(text, 100) == Status::kOk);
          CHECK(behind(text, prompt.size()) == rig.model.continuation(prompt, 100, rig.sampling));
          // A prompt's hidden states draft nothing; from then on all is accepted, as deep as a block goes.
          const int depth = std::min(max_tree - 1, anchor ? 8 : 7);
          if (rank < 0) CHECK_EQ(rig.rounds, 100);
          if (rank == 0 && max_tree != 16) CHECK_EQ(rig.rounds, 1 + (99 + depth) / (depth + 1));
          if (rank == 2 && max_tree == 64) CHECK(rig.rounds <= 60);
          const Passes passes = rig.passes();
          CHECK_EQ(wrong(passes), 0);
          CHECK(!of_graph(passes, FakeDflash::kBlock).empty());
          CHECK_EQ(of_graph(passes, FakeDflash::kNodes).empty(), !nodes);
        }
      }
    }
  }
}

TEST(every_way_to_ask_gives_the_same_tokens) {
  const ull::LogitBias bans[] = {{4, -INFINITY}, {17, -INFINITY}};
  for (const bool adaptive : {false, true}) {
    for (const auto speculation : {DrafterKind::kDflash, DrafterKind::kAuto}) {
      for (const bool nodes : {false, true}) {
        DflashRig rig({.nodes = nodes}, {.model = {.period = 7}}, {.adaptive = adaptive});
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

// Where it has a graph of chunks: 512 positions at once, and what is left over as it was.
TEST(a_prompt_is_read_along_in_chunks) {
  const std::pair<int, Tokens> cases[] = {{64, {63}},   {65, {64}},      {66, {65}},
                                          {512, {511}}, {514, {512, 1}}, {700, {512, 187}}};
  for (const auto& [length, parts] : cases) {
    DflashRig rig({.chunks = true, .fill_us = 2000}, {.chunks = true});
    const Tokens prompt = prompt_of(length);
    Tokens text = prompt;
    CHECK(rig.read(text, 0, length - 1) == Status::kOk);
    Tokens read;
    for (const auto& pass : rig.passes()) {
      CHECK_EQ(pass.graph, pass.read > 64 ? ull::gpu::kChunkTokens : pass.read > 8 ? 64 : 8);
      read.push_back(pass.read);
    }
    CHECK(read == parts);
    CHECK(rig.decode(text, 60) == Status::kOk);
    CHECK_EQ(rig.result.accepted, rig.result.depth);
    const Passes passes = rig.passes();
    CHECK_EQ(wrong(passes), 0);
    for (const auto& pass : of_graph(passes, FakeDflash::kBlock)) CHECK_EQ(pass.from, 0);
    CHECK(behind(text, prompt.size()) == rig.model.continuation(prompt, 60));
  }
}

TEST(a_chunk_that_costs_more_than_passes_of_64_is_not_taken) {
  DflashRig rig({.chunks = true, .chunk_us = 200'000}, {.chunks = true});
  const Tokens text = prompt_of(400);
  CHECK(rig.read(text, 0, 399) == Status::kOk);
  const Passes passes = rig.passes();
  CHECK_EQ(passes.size(), size_t{7});
  for (const auto& pass : passes) CHECK_EQ(pass.graph, 64);
}

TEST(context_is_read_along_with_a_prompt_and_a_block_stands_behind_the_root) {
  DflashRig rig;
  rig.max_tree = 64;
  Tokens text = prompt_of(150);
  CHECK(rig.read(text, 0, 149) == Status::kOk);
  Passes passes = rig.passes();
  REQUIRE(passes.size() == 3);
  int end = 0;
  for (const auto& pass : passes) {
    CHECK_EQ(pass.start, end);
    CHECK_EQ(pass.graph, pass.count <= 8 ? 8 : 64);
    end += pass.read;
  }
  CHECK_EQ(end, 149);
  CHECK_EQ(rig.drafted.dflash.through, 149);
  CHECK(rig.advance(text, 30) == Status::kOk);
  CHECK(rig.passes().empty());
  CHECK(rig.advance(text, 30) == Status::kOk);
  CHECK(rig.result.drafter == DrafterKind::kDflash);
  CHECK_EQ(rig.result.accepted, 7);
  passes = rig.passes();
  REQUIRE(passes.size() == 4);
  CHECK_EQ(passes[0].start, 149);
  CHECK_EQ(passes[0].read, 1);
  CHECK_EQ(passes[1].graph, FakeDflash::kBlock);
  CHECK_EQ(passes[1].start, 150);
  CHECK_EQ(passes[1].count, 8);
  CHECK_EQ(passes[1].ranked, 7);
  CHECK_EQ(passes[1].from, 0);
  // The next proposal's, behind the round.
  CHECK(passes[2].behind && passes[3].behind);
  CHECK_EQ(passes[2].start, 150);
  CHECK_EQ(passes[2].read, 8);
  CHECK_EQ(passes[3].graph, FakeDflash::kBlock);
  CHECK_EQ(passes[3].start, 158);
  CHECK_EQ(passes[3].ranked, 7);
}

TEST(context_and_block_are_made_behind_the_round_that_verifies_a_tree) {
  for (const bool nodes : {false, true}) {
    for (const int rank : {0, -1}) {
      DflashRig rig({.rank = rank, .nodes = nodes});
      rig.max_tree = 6;
      const Tokens prompt = prompt_of(50);
      Tokens text = prompt;
      CHECK(rig.answer(text, 60) == Status::kOk);
      CHECK(behind(text, prompt.size()) == rig.model.continuation(prompt, 60));
      int asked = 0, found = 0;
      for (const auto& pass : of_graph(rig.passes(), FakeDflash::kBlock)) {
        (pass.behind ? found : asked)++;
        CHECK(pass.status == RoundStatus::kOk);
        CHECK_EQ(pass.wrong, 0);
      }
      CHECK(asked <= 3);  // behind the first round, which nobody had drafted, and where a round may be the last
      CHECK(found >= 6);
    }
  }
}

// What was launched behind a round is of no use to a proposal that comes later: the entries are made then.
TEST(a_proposal_some_rounds_later_makes_all_that_is_missing) {
  DflashRig rig;
  Tokens text = prompt_of(40);
  CHECK(rig.answer(text, 20) == Status::kOk);
  rig.max_tree = 1;
  for (int round = 0; round < 5; ++round) CHECK(rig.advance(text, 9) == Status::kOk);
  (void)rig.passes();
  rig.max_tree = 16;
  const auto root = static_cast<int>(text.size()) - 1;
  CHECK(rig.advance(text, 20) == Status::kOk);
  CHECK_EQ(rig.result.accepted, 7);
  const Passes passes = rig.passes();
  REQUIRE(passes.size() >= 2);
  CHECK(!passes[0].behind && passes[0].start + passes[0].read == root);
  CHECK_EQ(passes[1].start, root);
  CHECK_EQ(wrong(passes), 0);
  CHECK(behind(text, 40) == rig.model.continuation(prompt_of(40), static_cast<int>(text.size()) - 40));
}

TEST(levels_of_nodes_are_as_wide_as_may_be_and_as_deep_as_the_block) {
  for (const int block : {4, 16}) {
    DflashRig rig({.gap = 1.0F, .nodes = true, .block = block});
    rig.max_tree = 64;
    const Tokens prompt = prompt_of(40);
    Tokens text = prompt;
    CHECK(rig.answer(text, 200) == Status::kOk);
    CHECK(behind(text, prompt.size()) == rig.model.continuation(prompt, 200));
    int widest = 0, most = 0;
    for (const auto& pass : of_graph(rig.passes(), FakeDflash::kNodes)) {
      widest = std::max(widest, pass.ranked);
      most = std::max(most, pass.count);
    }
    CHECK_EQ(widest, 8);
    const int full = 1 + 8 * (std::min(block - 1, 8) - 1);  // the last level's nodes are ranked by nobody
    CHECK(most >= full - 8 && most <= full);
  }
}

TEST(a_head_that_is_unsure_of_a_depth_drafts_no_deeper) {
  int nodes[2];
  for (const bool sure : {false, true}) {
    DflashRig rig({.gap = 1.0F, .chance = sure ? 1.0F : 0.1F});
    Tokens text = prompt_of(40);
    CHECK(rig.answer(text, 2) == Status::kOk);
    CHECK(rig.advance(text, 30) == Status::kOk);
    nodes[sure] = rig.result.depth;
  }
  CHECK(nodes[0] < nodes[1]);
}

TEST(drafts_end_with_the_context) {
  for (const bool nodes : {false, true}) {
    for (const int length : {20, 24, 25, 29}) {
      DflashRig rig({.nodes = nodes}, {.context = 128});
      rig.max_tree = 64;
      const Tokens prompt = prompt_of(length);
      Tokens text = prompt;
      CHECK(rig.answer(text, 128 - length) == Status::kOk);
      CHECK(behind(text, prompt.size()) == rig.model.continuation(prompt, 128 - length));
      CHECK_EQ(wrong(rig.passes()), 0);
    }
  }
}

// ---- what its cache holds -------------------------------------------------------------------------------------------

TEST(turns_go_on_in_cached_prefixes) {
  DflashRig rig;
  Tokens text = prompt_of(70);
  int cached = 0;
  for (int turn = 0; turn < 5; ++turn) {
    const Tokens prompt = text;
    CHECK(rig.answer(text, 60, cached) == Status::kOk);
    CHECK(behind(text, prompt.size()) == rig.model.continuation(prompt, 60));
    const Passes passes = rig.passes();
    CHECK_EQ(wrong(passes), 0);
    for (const auto& pass : passes) CHECK_EQ(pass.from, 0);
    text.resize(turn % 2 == 0 ? text.size() - 3 : text.size() / 2);
    cached = static_cast<int>(text.size());
    for (int i = 0; i < 40; ++i) text.push_back((7 * i + turn) % 97);
  }
}

TEST(what_others_left_unread_in_a_prefix_is_a_hole) {
  DflashRig rig;
  const Tokens prompt = prompt_of(700);
  Tokens text = prompt;
  rig.speculation = DrafterKind::kNone;
  CHECK(rig.answer(text, 20) == Status::kOk);
  CHECK(rig.passes().empty());
  rig.speculation = DrafterKind::kDflash;
  CHECK(rig.decode(text, 41) == Status::kOk);
  const Passes blocks = of_graph(rig.passes(), FakeDflash::kBlock);
  CHECK(!blocks.empty());
  CHECK_EQ(wrong(blocks), 0);
  // It drafts from the newest positions whose taps were there when it was asked.
  for (const auto& pass : blocks) CHECK_EQ(pass.from, 719 - ull::gpu::kTapSlots);
  CHECK(behind(text, prompt.size()) == rig.model.continuation(prompt, 61));
}

TEST(sequences_take_turns) {
  DflashRig rig({.heals = 2});
  Sequence sequences[2];
  Tokens prompts[2];
  for (int i = 0; i < 2; ++i) {
    Sequence& sequence = sequences[i];
    prompts[i] = sequence.tokens = prompt_of(60 + 45 * i, i);
    for (int page = 0; page < 10; ++page) sequence.pages.push_back(31 - 3 * page - i);
    rig.enter(sequence);
    CHECK(rig.read(sequence.tokens, 0, static_cast<int>(sequence.tokens.size()) - 1) == Status::kOk);
    rig.leave(sequence);
  }
  for (int visit = 0; visit < 12; ++visit) {
    Sequence& sequence = sequences[visit % 2];
    rig.enter(sequence);
    // What another has left is no state of its own: nothing is proposed until a round has been.
    CHECK(rig.advance(sequence.tokens, 20) == Status::kOk);
    CHECK(rig.result.drafter == DrafterKind::kNone);
    for (int round = 0; round < 4; ++round) {
      CHECK(rig.advance(sequence.tokens, 20) == Status::kOk);
      CHECK(rig.result.drafter == DrafterKind::kDflash);
      CHECK_EQ(rig.result.accepted, rig.result.depth);
    }
    rig.leave(sequence);
  }
  for (int i = 0; i < 2; ++i) {
    const Tokens found = behind(sequences[i].tokens, prompts[i].size());
    CHECK(found == rig.model.continuation(prompts[i], static_cast<int>(found.size())));
  }
}

TEST(a_copied_page_holds_the_heads_entries) {
  DflashRig rig;
  const Tokens first = prompt_of(100);
  Tokens text = first;
  CHECK(rig.answer(text, 20) == Status::kOk);
  const int32_t mine = rig.pages[1];
  rig.pages[1] = rig.pages[9];
  CHECK(rig.executor.start_copy({.from_page = mine, .to_page = rig.pages[1], .tokens = 26}) == Status::kOk);
  CHECK(rig.finish() == Status::kOk);
  Tokens second(first.begin(), first.begin() + 90);
  for (int32_t token = 0; token < 30; ++token) second.push_back(token);
  const Tokens expected = rig.model.continuation(second, 30);
  (void)rig.passes();
  CHECK(rig.answer(second, 30, 90) == Status::kOk);
  CHECK(behind(second, 120) == expected);
  const Passes passes = rig.passes();
  CHECK_EQ(wrong(passes), 0);
  for (const auto& pass : passes) CHECK_EQ(pass.from, 0);
}

// ---- what ends it early ---------------------------------------------------------------------------------------------

TEST(an_abort_ends_any_pass_and_the_next_draft_is_right) {
  for (const bool nodes : {false, true}) {
    for (const uint64_t more : {0, 1, 2, 3}) {  // what it lacks, in three passes; the block
      DflashRig rig({.nodes = nodes});
      const Tokens prompt = prompt_of(140);
      Tokens text = prompt;
      rig.speculation = DrafterKind::kNone;
      CHECK(rig.read(text, 0, 139) == Status::kOk);
      rig.speculation = DrafterKind::kDflash;
      rig.max_tree = 1;
      CHECK(rig.advance(text, 5) == Status::kOk);
      (void)rig.passes();
      rig.max_tree = 64;
      {
        AbortedRound aborted(rig.executor, rig.head(), more);
        CHECK(rig.executor.start_round(rig.step(text, 30)) == Status::kOk);
        CHECK(rig.finish() == Status::kAborted);
      }
      (void)rig.passes();
      CHECK(rig.advance(text, 30) == Status::kOk);
      CHECK(rig.result.drafter == DrafterKind::kNone);
      CHECK(rig.decode(text, 40) == Status::kOk);
      CHECK(rig.result.drafter == DrafterKind::kDflash);
      CHECK_EQ(wrong(rig.passes()), 0);
      CHECK(behind(text, 140) == rig.model.continuation(prompt, static_cast<int>(text.size()) - 140));
    }
  }
}

// The context behind the round has been made, but the block behind it has not.
TEST(an_abort_of_what_runs_behind_a_round_is_made_good) {
  for (const bool nodes : {false, true}) {
    for (const uint64_t more : {0, 1}) {
      DflashRig rig({.nodes = nodes});
      const Tokens prompt = prompt_of(50);
      Tokens text = prompt;
      CHECK(rig.answer(text, 30) == Status::kOk);
      rig.max_tree = 2;
      CHECK(rig.advance(text, 30) == Status::kOk);
      (void)rig.passes();
      // From now on all runs behind a round, but for one level of nodes before it.
      ull::test::HeldRound<ull::test::FakeHead> held(rig.head(), more + (nodes ? 1 : 0));
      CHECK(rig.advance(text, 30) == Status::kOk);
      std::thread aborting([&] {
        while (rig.head().cancelled() < held.sequence()) rig.executor.abort();
        held.release();
      });
      CHECK(rig.executor.start_round(rig.step(text, 30)) == Status::kOk);
      CHECK(rig.finish() == Status::kAborted);
      aborting.join();
      CHECK(rig.decode(text, 30) == Status::kOk);
      CHECK(rig.advance(text, 30) == Status::kOk);
      CHECK(rig.result.drafter == DrafterKind::kDflash);
      CHECK_EQ(wrong(rig.passes()), 0);
      CHECK(behind(text, 50) == rig.model.continuation(prompt, static_cast<int>(text.size()) - 50));
    }
  }
}

TEST(an_aborted_round_leaves_no_tap_that_is_trusted) {
  DflashRig rig;
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
    CHECK(rig.result.drafter == DrafterKind::kDflash);
  }
  CHECK_EQ(wrong(rig.passes()), 0);
  CHECK(behind(text, 100) == rig.model.continuation(prompt, static_cast<int>(text.size()) - 100));
}

TEST(a_pass_that_fails_ends_the_executor_with_its_reason) {
  struct Fault {
    uint64_t Script::* at;
    const char* what;
    bool restart;
  };
  for (const Fault& fault :
       {Fault{&Script::launch_error_at, "cuGraphLaunch failed with CUDA_ERROR_OUT_OF_MEMORY", true},
        Fault{&Script::stream_error_at, "failed with CUDA_ERROR_ILLEGAL_ADDRESS", false},
        Fault{&Script::hang_at, "has not answered", false}, Fault{&Script::silent_at, "without an answer", true},
        Fault{&Script::skipped_at, "has not run a pass of a head", true}}) {
    const int watchdog_ms = fault.at == &Script::hang_at ? 300 : 60'000;
    for (const uint64_t more : {0, 1, 2, 3}) {  // while it reads along, its context, its block, nodes
      DflashRig rig({.nodes = true}, {}, {.watchdog_ms = watchdog_ms, .adaptive = false});
      rig.head().arm([&](Script& script, uint64_t next) { script.*fault.at = next + more; });
      Tokens text = prompt_of(30);
      Status status = rig.read(text, 0, 29);
      CHECK(status == (more == 0 ? Status::kExecutorFailed : Status::kOk));
      for (int round = 0; status == Status::kOk && round < 2; ++round) status = rig.advance(text, 30);
      CHECK(status == Status::kExecutorFailed);
      CHECK(says(rig.executor.failure(), fault.what));
      CHECK_EQ(rig.executor.restart_helps(), fault.restart);
      CHECK(rig.advance(text, 30) == Status::kExecutorFailed);
    }
  }
}

TEST(nonsense_from_a_pass_is_not_passed_on) {
  using Absurdity = std::function<void(ull::gpu::RoundResult&)>;
  const Absurdity absurdities[] = {
      [](auto& answer) { answer.count = 0; },
      [](auto& answer) { answer.tokens[0].node = 7; },
      [](auto& answer) { answer.tokens[0].top_count = 0; },
      [](auto& answer) { answer.tokens[0].top_count = 11; },
      [](auto& answer) { answer.tokens[0].logprob = NAN; },
      [](auto& answer) { answer.tokens[0].top[3].token = -1; },
      [](auto& answer) { answer.tokens[0].top[9].token = 100; },
  };
  for (const bool nodes : {false, true}) {
    for (const Absurdity& absurdity : absurdities) {
      DflashRig rig({.nodes = nodes});
      Tokens text = prompt_of(30);
      rig.head().arm([&](Script& script, uint64_t next) {
        script.absurd_at = next + (nodes ? 3 : 2);  // behind the prompt's, its context and, of nodes, its block
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

TEST(a_copy_that_fails_ends_the_executor) {
  DflashRig rig;
  rig.head().arm([](Script& script, uint64_t) { script.fails_copies = true; });
  CHECK(rig.executor.start_copy({1, 2, 5}) == Status::kExecutorFailed);
  CHECK(says(rig.executor.failure(), "cuMemcpyDtoDAsync failed with CUDA_ERROR_OUT_OF_MEMORY"));
}

}  // namespace
