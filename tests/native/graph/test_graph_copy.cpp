// Copies of pages on the graph executor: a sequence that goes on in a page which another holds too.
#include "graph_fixture.h"

namespace {

using ull::DrafterKind;
using ull::Status;
using ull::test::FakeDevice;
using ull::test::GraphRig;
using ull::test::HeldRound;
using ull::test::prompt_of;
using ull::test::says;
using Tokens = std::vector<int32_t>;

Status copied(GraphRig& rig, const ull::CopyStep& step) {
  const Status status = rig.executor.start_copy(step);
  return status == Status::kOk ? rig.finish() : status;
}

// Of a prompt of 100 tokens the first 90 become another sequence's, whose page table this is.
std::vector<int32_t> forked(GraphRig& rig) {
  std::vector<int32_t> pages = rig.pages;
  pages[1] = rig.pages[9];
  CHECK(copied(rig, {.from_page = rig.pages[1], .to_page = pages[1], .tokens = 26}) == Status::kOk);
  return pages;
}

TEST(a_session_goes_on_in_a_copy) {
  for (const bool drafts : {false, true}) {
    GraphRig rig({}, {.adaptive = false}, drafts ? std::optional(FakeDevice::Script{}) : std::nullopt);
    CHECK(rig.executor.info().copies_pages);
    if (drafts) rig.speculation = DrafterKind::kDraft, rig.max_tree = 6;
    const Tokens first = prompt_of(100);
    Tokens second(first.begin(), first.begin() + 90);
    for (int32_t token = 0; token < 30; ++token) second.push_back(token);
    const Tokens own = rig.complete(first, 20);
    Tokens tokens = first;
    tokens.insert(tokens.end(), own.begin(), own.end());
    const ull::Drafted drafted = rig.drafted;

    const std::vector<int32_t> mine = rig.pages;
    rig.pages = forked(rig);
    rig.drafted.model = 90;
    CHECK(rig.prefill({second.begin() + 90, second.end() - 1}, 90) == Status::kOk);
    const Tokens expected = rig.model.continuation(second, 20);
    rig.rounds = 0;
    CHECK(rig.decode(second, 20) == Status::kOk);
    CHECK((Tokens{second.end() - 20, second.end()} == expected));
    if (drafts) CHECK_EQ(rig.rounds, 4);  // what the draft model has of the page is right: each chain is accepted

    rig.pages = mine;
    rig.drafted = drafted;
    rig.rounds = 0;
    const Tokens more = rig.model.continuation(tokens, 12);
    CHECK(rig.decode(tokens, 12) == Status::kOk);
    CHECK((Tokens{tokens.end() - 12, tokens.end()} == more));
    if (drafts) CHECK_EQ(rig.rounds, 2);
  }
}

// A round that nobody wants any more is still under way, in the page that is copied and in the one that it goes to.
TEST(a_copy_waits_for_nothing_and_comes_in_its_turn) {
  GraphRig rig;
  Tokens tokens = prompt_of(100);
  CHECK(rig.prefill({tokens.begin(), tokens.end() - 1}) == Status::kOk);
  HeldRound held(rig.device, /*more=*/1, &FakeDevice::Script::begun);
  CHECK(rig.advance(tokens, 20) == Status::kOk);
  while (!held.reached()) std::this_thread::yield();
  rig.pages = forked(rig);
  const Tokens prompt = prompt_of(90);
  CHECK(rig.executor.start_round(rig.step(prompt, 1)) == Status::kOk);
  CHECK(rig.executor.poll(rig.result) == Status::kPending);
  held.release();
  CHECK(rig.finish() == Status::kOk);
  CHECK_EQ(rig.result.tokens[0].token, rig.model.continuation(prompt, 1)[0]);
}

TEST(an_aborted_copy_can_be_made_again) {
  GraphRig rig;
  Tokens tokens = prompt_of(100);
  CHECK(rig.prefill({tokens.begin(), tokens.end() - 1}) == Status::kOk);
  CHECK(rig.executor.start_copy({.from_page = rig.pages[1], .to_page = rig.pages[9], .tokens = 36}) == Status::kOk);
  rig.executor.abort();
  CHECK(rig.finish() == Status::kAborted);
  rig.pages = forked(rig);
  const Tokens expected = rig.model.continuation(tokens, 3);
  CHECK(rig.decode(tokens, 3) == Status::kOk);
  CHECK((Tokens{tokens.end() - 3, tokens.end()} == expected));
}

TEST(copies_that_cannot_be_are_refused) {
  GraphRig rig;
  for (const ull::CopyStep& step :
       {ull::CopyStep{-1, 1, 5}, {1, -1, 5}, {32, 1, 5}, {1, 32, 5}, {1, 1, 5}, {1, 2, 0}, {1, 2, 65}}) {
    CHECK(rig.executor.start_copy(step) == Status::kExecutorFailed);
  }
  CHECK(rig.executor.failure() == nullptr);
  CHECK(copied(rig, {31, 0, 64}) == Status::kOk);
  for (const bool own : {true, false}) {  // one of the models does not say where its pages are
    FakeDevice target({}), draft({});
    ull::graph::GraphProgram program = program_with_draft(target, draft), other = *program.draft;
    (own ? program : other).kv_pages = 0;
    program.draft = std::make_shared<const ull::graph::GraphProgram>(std::move(other));
    ull::graph::GraphExecutor executor(program, FakeDevice::driver(), {});
    executor.prepare();
    CHECK(!executor.info().copies_pages);
    CHECK(executor.start_copy({1, 2, 5}) == Status::kExecutorFailed);
    CHECK(executor.failure() == nullptr);
  }
}

TEST(a_copy_that_fails_ends_the_executor) {
  for (const bool draft_s : {false, true}) {
    GraphRig rig({}, {}, FakeDevice::Script{});
    (draft_s ? *rig.draft_device : rig.device).arm([](FakeDevice::Script& script, uint64_t) {
      script.fails_copies = true;
    });
    CHECK(rig.executor.start_copy({1, 2, 5}) == Status::kExecutorFailed);
    CHECK(says(rig.executor.failure(), "cuMemcpyDtoDAsync failed with CUDA_ERROR_OUT_OF_MEMORY"));
    CHECK(rig.executor.poll(rig.result) == Status::kExecutorFailed);
  }
}

}  // namespace
