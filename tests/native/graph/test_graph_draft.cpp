// A draft model on the graph executor: a program of its own, whose chains are verified like any other tree.
#include "graph_fixture.h"

#include <cmath>

namespace {

using ull::DrafterKind;
using ull::Status;
using ull::gpu::RoundMode;
using ull::gpu::RoundStatus;
using ull::graph::GraphOptions;
using ull::test::AbortedRound;
using ull::test::count_of;
using ull::test::FakeDevice;
using ull::test::FakeModel;
using ull::test::GraphRig;
using ull::test::HeldRound;
using ull::test::program_with_draft;
using ull::test::prompt_of;
using ull::test::says;
using Tokens = std::vector<int32_t>;

const GraphOptions kAlways{.adaptive = false};

// Drafts of up to `depth` tokens in every round.
struct DraftRig : GraphRig {
  explicit DraftRig(FakeModel draft = {}, int depth = 7, FakeDevice::Script script = {}, GraphOptions options = kAlways)
      : GraphRig(script, options, FakeDevice::Script{.model = draft}) {
    speculation = DrafterKind::kDraft;
    max_tree = depth + 1;
  }

  // What the draft model did since the last call.
  [[nodiscard]] std::vector<FakeDevice::Record> drafts() {
    executor.rest();
    return rest(*draft_device);
  }
};

TEST(a_draft_model_is_offered_with_what_it_costs) {
  DraftRig rig;
  const ull::ExecutorInfo& info = rig.executor.info();
  CHECK(info.drafters[static_cast<int>(DrafterKind::kDraft)]);
  CHECK(info.draft_ns[static_cast<int>(DrafterKind::kDraft)] > 0);
  CHECK_EQ(info.drafter_weight_bytes, int64_t{1000});
  CHECK_EQ(info.weight_bytes, int64_t{2000});
  CHECK(info.drafter_kv_bytes > 0);
  GraphRig without;
  CHECK(!without.executor.info().drafters[static_cast<int>(DrafterKind::kDraft)]);
  FakeDevice device({});
  const auto drafting = [&] {
    ull::graph::GraphExecutor(device.program(), FakeDevice::driver(), {.drafter = DrafterKind::kDraft});
  };
  CHECK_THROWS(drafting(), std::invalid_argument);
}

TEST(a_program_whose_draft_model_does_not_fit_is_refused) {
  FakeDevice target({}), draft({});
  const auto refused = [&](auto change) {
    ull::graph::GraphProgram program = program_with_draft(target, draft), other = *program.draft;
    change(other);
    program.draft = std::make_shared<const ull::graph::GraphProgram>(std::move(other));
    try {
      program.check();
    } catch (const std::invalid_argument& error) {
      return std::string_view(error.what()).starts_with("draft: ");
    }
    return false;
  };
  using Program = ull::graph::GraphProgram;
  CHECK(!refused([](Program&) {}));
  CHECK(refused([](Program& program) { program.rounds[0] = nullptr; }));
  CHECK(refused([](Program& program) { program.context = &program; }));
  CHECK(refused([](Program& program) { program.context_tokens = 1023; }));
  CHECK(refused([](Program& program) { program.page_count = 33; }));
  CHECK(refused([&](Program& program) { program.requests = target.program().requests; }));
  CHECK(refused([&](Program& program) { program.results = target.program().results; }));
  CHECK(refused([](Program& program) { program.medusa_heads = 1, program.medusa = &program; }));
  CHECK(refused([](Program& program) { program.draft = std::make_shared<const Program>(program); }));
}

TEST(a_draft_model_like_the_target_is_accepted_whole) {
  const ull::LogitBias bans[] = {{4, -INFINITY}, {17, -INFINITY}, {50, -INFINITY}};
  for (const int depth : {1, 4, 7, 15}) {
    DraftRig rig({}, depth);
    for (int turn = 0; turn < 4; ++turn) {
      rig.sampling = {};
      rig.sampling.seed = static_cast<uint64_t>(turn);
      if (turn == 1) rig.sampling.temperature = 0.7F;
      if (turn == 2) rig.sampling.bias = bans, rig.sampling.bias_count = 3;
      if (turn == 3) rig.sampling.repetition_penalty = 1.5F;
      const Tokens prompt = prompt_of(150, turn);
      rig.rounds = 0;
      CHECK(rig.complete(prompt, 160) == rig.model.continuation(prompt, 160, rig.sampling));
      CHECK_EQ(rig.rounds, (160 + depth) / (depth + 1));
      CHECK(rig.result.drafter == DrafterKind::kDraft);
    }
  }
}

TEST(a_flawed_draft_is_accepted_as_far_as_it_is_right) {
  for (const int flaw : {1, 2, 5, -5}) {  // -5: with penalties
    const FakeModel flawed{.flaw = std::abs(flaw)};
    DraftRig rig(flawed, 6);
    rig.sampling.seed = 11;
    if (flaw < 0) rig.sampling.presence_penalty = 0.5F;
    rig.prompt_tokens = 100;
    const Tokens prompt = prompt_of(100);
    const Tokens expected = rig.model.continuation(prompt, 300, rig.sampling);
    Tokens tokens = prompt;
    CHECK(rig.prefill({prompt.begin(), prompt.end() - 1}) == Status::kOk);
    CHECK_EQ(rig.drafted.model, 99);
    while (tokens.size() < 390) {
      const Tokens chain = flawed.continuation(tokens, 6, rig.sampling, 100);
      const auto* truth = expected.data() + (tokens.size() - prompt.size());
      const auto agreed = std::mismatch(chain.begin(), chain.end(), truth).first - chain.begin();
      const int32_t root = static_cast<int32_t>(tokens.size()) - 1;
      CHECK(rig.advance(tokens, 30) == Status::kOk);
      CHECK_EQ(rig.result.depth, 6);
      CHECK_EQ(rig.result.accepted, static_cast<int32_t>(agreed));
      // The root and what was accepted of the tokens that it was fed: the chain's last was not.
      CHECK_EQ(rig.drafted.model, root + 1 + std::min<int32_t>(static_cast<int32_t>(agreed), 5));
    }
    CHECK(std::equal(tokens.begin() + 100, tokens.end(), expected.begin()));
  }
}

TEST(a_chain_follows_itself_without_the_host) {
  DraftRig rig({}, 7);
  Tokens tokens = prompt_of(1);
  CHECK(rig.advance(tokens, 30) == Status::kOk);
  const auto records = rig.drafts();
  REQUIRE(records.size() == 7);
  CHECK(records[0].mode == RoundMode::kTake);
  CHECK_EQ(count_of(records, RoundMode::kContinue, RoundStatus::kOk), 6);
  for (const auto& record : records) CHECK_EQ(record.graph, 1);
}

TEST(what_the_draft_model_lacks_is_read_first) {
  DraftRig rig({}, 4);
  Tokens tokens = prompt_of(300);
  // Its cache holds nothing of a sequence that others drafted for, or none: it reads all of it.
  rig.speculation = DrafterKind::kSuffix;
  CHECK(rig.prefill({tokens.begin(), tokens.end() - 1}) == Status::kOk);
  CHECK_EQ(rig.drafted.model, 0);
  CHECK(rig.drafts().empty());
  rig.speculation = DrafterKind::kDraft;
  CHECK(rig.advance(tokens, 30) == Status::kOk);
  auto records = rig.drafts();
  CHECK_EQ(count_of(records, RoundMode::kPrefill, RoundStatus::kOk), 5);  // 299 tokens by 64
  CHECK_EQ(rig.result.accepted, 4);
  // The whole chain was accepted: its last token was never fed.
  CHECK_EQ(rig.drafted.model, 304 - 1);
  CHECK(rig.advance(tokens, 30) == Status::kOk);
  records = rig.drafts();
  CHECK_EQ(count_of(records, RoundMode::kPrefill, RoundStatus::kOk), 1);
  CHECK_EQ(records[0].graph, 1);
  CHECK_EQ(records[0].count, 1);
  // Plain rounds in between leave a gap: a few tokens by the smaller graph.
  rig.speculation = DrafterKind::kNone;
  for (int i = 0; i < 4; ++i) CHECK(rig.advance(tokens, 1) == Status::kOk);
  CHECK(rig.drafts().empty());
  rig.speculation = DrafterKind::kDraft;
  CHECK(rig.advance(tokens, 30) == Status::kOk);
  records = rig.drafts();
  CHECK_EQ(records[0].count, 5);
  CHECK_EQ(records[0].graph, 8);
  CHECK_EQ(rig.result.accepted, 4);
}

// Where the draft model has a graph of chunks: 512 tokens at once, and what is left over as it was.
TEST(what_it_lacks_is_read_in_chunks) {
  const std::pair<int, Tokens> cases[] = {{64, {64}}, {65, {65}}, {300, {300}}, {520, {512, 8}}, {620, {512, 108}}};
  for (const auto& [missing, parts] : cases) {
    GraphRig rig({.chunks = true}, kAlways, FakeDevice::Script{.chunks = true});
    rig.speculation = DrafterKind::kDraft;
    rig.max_tree = 5;
    Tokens tokens = prompt_of(missing + 1);
    CHECK(rig.prefill({tokens.begin(), tokens.end() - 1}) == Status::kOk);
    rig.executor.rest();
    Tokens read;
    for (const auto& record : GraphRig::rest(*rig.draft_device)) {
      if (record.mode == RoundMode::kPrefill) read.push_back(record.count);
    }
    CHECK(read == parts);
    CHECK(rig.advance(tokens, 30) == Status::kOk);
    CHECK_EQ(rig.result.accepted, 4);
  }
}

TEST(sessions_take_turns) {
  // Each has pages of its own in both caches.
  DraftRig rig({.flaw = 3}, 5, {.page_count = 32});
  std::vector<int32_t> tables[2];
  for (int page = 0; page < 16; ++page) {
    tables[0].push_back(31 - 2 * page);
    tables[1].push_back(30 - 2 * page);
  }
  Tokens tokens[2] = {prompt_of(70), prompt_of(129, 5)};
  Tokens expected[2];
  ull::Drafted drafted[2];
  for (int sequence = 0; sequence < 2; ++sequence) {
    rig.sampling.seed = static_cast<uint64_t>(sequence);
    expected[sequence] = tokens[sequence];
    const Tokens more = rig.model.continuation(tokens[sequence], 400, rig.sampling);
    expected[sequence].insert(expected[sequence].end(), more.begin(), more.end());
  }
  for (int turn = 0; turn < 80; ++turn) {
    const int sequence = turn % 3 == 0 ? 0 : 1;
    rig.pages = tables[sequence];
    rig.drafted = drafted[sequence];
    rig.sampling.seed = static_cast<uint64_t>(sequence);
    if (turn < 2) {
      const Tokens& prompt = tokens[sequence];
      CHECK(rig.prefill({prompt.begin(), prompt.end() - 1}) == Status::kOk);
    }
    rig.speculation = turn % 5 == 4 ? DrafterKind::kNone : DrafterKind::kDraft;
    Tokens& text = tokens[sequence];
    const Tokens chain = FakeModel{.flaw = 3}.continuation(text, 5, rig.sampling);
    const auto agreed = std::mismatch(chain.begin(), chain.end(), expected[sequence].data() + text.size()).first;
    CHECK(rig.advance(text, 30) == Status::kOk);
    if (rig.speculation == DrafterKind::kDraft) CHECK_EQ(rig.result.accepted, agreed - chain.begin());
    drafted[sequence] = rig.drafted;
  }
  for (int sequence = 0; sequence < 2; ++sequence) {
    CHECK(std::equal(tokens[sequence].begin(), tokens[sequence].end(), expected[sequence].begin()));
  }
}

TEST(an_abort_ends_a_chain_and_the_next_one_is_right) {
  for (const uint64_t more : {0, 1, 5}) {  // while it reads what it lacks, at the chain's first token, within it
    DraftRig rig({}, 7);
    Tokens tokens = prompt_of(30);
    const Tokens expected = rig.model.continuation(tokens, 60);
    rig.speculation = DrafterKind::kNone;
    CHECK(rig.prefill({tokens.begin(), tokens.end() - 1}) == Status::kOk);
    rig.speculation = DrafterKind::kDraft;
    AbortedRound aborted(rig.executor, *rig.draft_device, more);
    CHECK(rig.executor.start_round(rig.step(tokens, 30)) == Status::kOk);
    CHECK(rig.finish() == Status::kAborted);
    CHECK_EQ(count_of(rig.drafts(), RoundMode::kContinue, RoundStatus::kOk), std::max(static_cast<int>(more) - 2, 0));
    while (tokens.size() < 80) CHECK(rig.advance(tokens, 30) == Status::kOk);
    CHECK_EQ(rig.result.accepted, 7);
    CHECK(std::equal(tokens.begin() + 30, tokens.end(), expected.begin()));
  }
}

TEST(an_abort_ends_what_it_reads_along_with_a_prompt) {
  DraftRig rig;
  Tokens tokens = prompt_of(600);
  AbortedRound aborted(rig.executor, *rig.draft_device, 0);
  CHECK(rig.prefill({tokens.begin(), tokens.end() - 1}) == Status::kAborted);
  CHECK_EQ(rig.drafted.model, 0);
  CHECK(rig.prefill({tokens.begin(), tokens.end() - 1}) == Status::kOk);
  CHECK_EQ(rig.drafted.model, 599);
  CHECK(rig.advance(tokens, 30) == Status::kOk);
  CHECK_EQ(rig.result.accepted, 7);
}

TEST(a_device_that_fails_in_a_draft_ends_the_executor) {
  struct Fault {
    uint64_t FakeDevice::Script::* at;
    const char* what;
    bool restart;
  };
  for (const Fault& fault : {Fault{&FakeDevice::Script::launch_error_at, "CUDA_ERROR_OUT_OF_MEMORY", true},
                             Fault{&FakeDevice::Script::stream_error_at, "CUDA_ERROR_ILLEGAL_ADDRESS", false},
                             Fault{&FakeDevice::Script::hang_at, "has not answered", false},
                             Fault{&FakeDevice::Script::silent_at, "without an answer", true}}) {
    const int watchdog_ms = fault.at == &FakeDevice::Script::hang_at ? 500 : 60'000;
    for (const uint64_t more : {0, 3}) {
      DraftRig rig({}, 7, {}, {.watchdog_ms = watchdog_ms, .adaptive = false});
      rig.draft_device->arm([&](FakeDevice::Script& script, uint64_t next) { script.*fault.at = next + more; });
      Tokens tokens = prompt_of(1);
      CHECK(rig.advance(tokens, 30) == Status::kExecutorFailed);
      CHECK(says(rig.executor.failure(), fault.what));
      CHECK_EQ(rig.executor.restart_helps(), fault.restart);
      CHECK(rig.advance(tokens, 30) == Status::kExecutorFailed);
    }
  }
  DraftRig rig;  // while it reads along
  rig.draft_device->arm([](FakeDevice::Script& script, uint64_t next) { script.stream_error_at = next + 1; });
  CHECK(rig.prefill(prompt_of(500)) == Status::kExecutorFailed);
  CHECK(says(rig.executor.failure(), "CUDA_ERROR_ILLEGAL_ADDRESS"));
}

TEST(a_chain_ends_where_the_draft_model_has_nothing_to_say) {
  for (const uint64_t more : {0, 3, 6}) {
    DraftRig rig;
    Tokens tokens = prompt_of(1);
    const Tokens expected = rig.model.continuation(tokens, 40);
    rig.draft_device->arm([&](FakeDevice::Script& script, uint64_t next) { script.not_finite_at = next + more; });
    CHECK(rig.advance(tokens, 30) == Status::kOk);
    CHECK_EQ(rig.result.accepted, static_cast<int32_t>(more));
    CHECK(rig.result.drafter == (more > 0 ? DrafterKind::kDraft : DrafterKind::kNone));
    CHECK(rig.advance(tokens, 30) == Status::kOk);
    CHECK_EQ(rig.result.accepted, 7);
    CHECK(std::equal(tokens.begin() + 1, tokens.end(), expected.begin()));
  }
}

TEST(nonsense_in_a_draft_is_not_passed_on) {
  for (int kind = 0; kind < 3; ++kind) {
    DraftRig rig;
    rig.draft_device->arm([&](FakeDevice::Script& script, uint64_t next) {
      script.absurd_at = next + 2;
      script.absurdity = [kind](ull::gpu::RoundResult& answer) {
        if (kind == 0) answer.count = 0;
        if (kind == 1) answer.tokens[0].token = -1;
        if (kind == 2) answer.tokens[0].token = 100;
      };
    });
    Tokens tokens = prompt_of(1);
    CHECK(rig.advance(tokens, 30) == Status::kExecutorFailed);
    CHECK(says(rig.executor.failure(), "impossible answer to a draft"));
  }
}

TEST(vocabularies_may_be_padded_differently) {
  for (const int vocabulary : {80, 120}) {
    DraftRig rig({.vocabulary = vocabulary}, 6);
    const ull::LogitBias bans[] = {{3, -INFINITY}, {90, -INFINITY}};
    for (const bool penalised : {false, true}) {
      rig.sampling = {};
      rig.sampling.bias = bans, rig.sampling.bias_count = 2;
      if (penalised) rig.sampling.presence_penalty = 0.5F;
      const Tokens prompt = prompt_of(200);  // of tokens up to 96
      CHECK(rig.complete(prompt, 200) == rig.model.continuation(prompt, 200, rig.sampling));
    }
    CHECK(count_of(rig.drafts(), RoundMode::kTake, RoundStatus::kOk) > 0);
  }
}

TEST(drafts_end_with_the_context) {
  DraftRig rig({}, 7, {.context = 128});
  const Tokens prompt = prompt_of(20);
  CHECK(rig.complete(prompt, 108) == rig.model.continuation(prompt, 108));
}

}  // namespace
