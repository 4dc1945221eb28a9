// msgpack byte for byte, and the packing of token, done and ended frames.
#include <string>
#include <vector>

#include "engine_fixture.h"
#include "io/frames.h"
#include "io/msgpack.h"
#include "msgpack_reader.h"
#include "scripted_constraint.h"

namespace {

using ull::test::MsgpackReader;
using ull::test::Value;

std::string text_of(std::span<const uint8_t> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

template <typename Write>
std::string packed(Write&& write) {
  static std::vector<uint8_t> buffer(1 << 18);
  ull::MsgpackWriter out(buffer);
  write(out);
  CHECK(out.ok());
  return text_of(out.bytes());
}

std::string bytes(std::initializer_list<int> values) { return {values.begin(), values.end()}; }

TEST(msgpack_uses_the_shortest_form) {
  using W = ull::MsgpackWriter;
  CHECK_EQ(packed([](W& w) { w.nil(), w.boolean(false), w.boolean(true); }), bytes({0xC0, 0xC2, 0xC3}));
  CHECK_EQ(packed([](W& w) { w.integer(0), w.integer(127); }), bytes({0, 0x7F}));
  CHECK_EQ(packed([](W& w) { w.integer(128), w.integer(255); }), bytes({0xCC, 0x80, 0xCC, 0xFF}));
  CHECK_EQ(packed([](W& w) { w.integer(256), w.integer(65535); }), bytes({0xCD, 1, 0, 0xCD, 0xFF, 0xFF}));
  CHECK_EQ(packed([](W& w) { w.integer(65536); }), bytes({0xCE, 0, 1, 0, 0}));
  CHECK_EQ(packed([](W& w) { w.integer(0x0102030405060708); }), bytes({0xCF, 1, 2, 3, 4, 5, 6, 7, 8}));
  CHECK_EQ(packed([](W& w) { w.real(-1.5F); }), bytes({0xCA, 0xBF, 0xC0, 0, 0}));
  CHECK_EQ(packed([](W& w) { w.real(2.5); }), bytes({0xCB, 0x40, 0x04, 0, 0, 0, 0, 0, 0}));
  CHECK_EQ(packed([](W& w) { w.text("hi"); }), bytes({0xA2, 'h', 'i'}));
  CHECK_EQ(packed([](W& w) { w.text(std::string(32, 'x')); }).substr(0, 2), bytes({0xD9, 32}));
  CHECK_EQ(packed([](W& w) { w.text(std::string(256, 'x')); }).substr(0, 3), bytes({0xDA, 1, 0}));
  CHECK_EQ(packed([](W& w) { w.text(std::string(65536, 'x')); }).substr(0, 5), bytes({0xDB, 0, 1, 0, 0}));
  CHECK_EQ(packed([](W& w) { w.binary({}); }), bytes({0xC4, 0}));
  CHECK_EQ(packed([](W& w) { w.binary(std::vector<uint8_t>(300)); }).substr(0, 3), bytes({0xC5, 1, 44}));
  CHECK_EQ(packed([](W& w) { w.binary(std::vector<uint8_t>(70000)); }).substr(0, 5), bytes({0xC6, 0, 1, 0x11, 0x70}));
  CHECK_EQ(packed([](W& w) { w.array(15), w.array(16), w.array(70000); }),
           bytes({0x9F, 0xDC, 0, 16, 0xDD, 0, 1, 0x11, 0x70}));
  CHECK_EQ(packed([](W& w) { w.map(15), w.map(16); }), bytes({0x8F, 0xDE, 0, 16}));
}

TEST(msgpack_never_writes_past_its_buffer) {
  std::vector<uint8_t> buffer(8, 0xAA);
  ull::MsgpackWriter out(std::span<uint8_t>(buffer).first(6));
  out.text("abc");
  CHECK(out.ok());
  out.text("defg");
  CHECK(!out.ok());
  out.nil();  // not even what would fit: the frame is spoilt
  CHECK(!out.ok());
  CHECK_EQ(buffer[6], 0xAA);
}

// A request of 26 prompt tokens whose completion is the given text.
struct Fixture {
  ull::test::AsciiVocabulary file;
  ull::Vocabulary vocabulary{file.path()};
  std::vector<ull::LogprobRecord> records{ull::kLogprobRecords};
  ull::FramePacker packer{vocabulary, records.data(), std::string(ull::kMaxDigest, 'd')};
  ull::RequestSlot request;
  ull::Delivery delivery;

  explicit Fixture(std::string_view completion) {
    request.id = 0xFFFF'FFFF'FFFF'FFFF;
    request.prompt_tokens = 26;
    request.tokens = std::make_unique<int32_t[]>(26 + completion.size());
    for (size_t i = 0; i < completion.size(); ++i) request.tokens[26 + i] = completion[i];
    delivery.assembler.reset(&request.stops);
    delivery.available = static_cast<int32_t>(completion.size());
    delivery.pending_ns = 77;
  }

  // Packs frames until everything pending is in one, as the io thread does.
  std::vector<Value> all() {
    std::vector<Value> frames;
    while (delivery.pending()) {
      const auto frame = packer.tokens(request, delivery);
      if (frame.count > 0 || frame.text) frames.push_back(MsgpackReader::read(text_of(frame.bytes)));
      delivery.assembler = frame.assembler;
      delivery.sent += frame.count;
      delivery.flushed = frame.flushes;
      delivery.first_logprob = frame.next_logprob;
    }
    return frames;
  }
};

TEST(a_token_frame) {
  Fixture f("hello");
  const auto frames = f.all();
  REQUIRE(frames.size() == 1);
  const Value& frame = frames[0];
  CHECK_EQ(frame.members.size(), 6U);
  CHECK_EQ(frame["type"].text, "token");
  CHECK_EQ(frame["id"].integer, f.request.id);
  CHECK_EQ(frame["index"].integer, 0U);
  CHECK_EQ(frame["ids"].items.size(), 5U);
  CHECK_EQ(frame["ids"].items[4].integer, static_cast<uint64_t>('o'));
  CHECK_EQ(frame["text"].text, "hello");
  CHECK_EQ(frame["time_ns"].integer, 77U);
}

TEST(a_packed_frame_that_was_not_sent_is_packed_again) {
  Fixture f("hello");
  const std::string first = text_of(f.packer.tokens(f.request, f.delivery).bytes);
  const std::string second = text_of(f.packer.tokens(f.request, f.delivery).bytes);
  CHECK_EQ(first, second);
}

TEST(a_long_backlog_takes_several_frames) {
  std::string long_text;
  for (int i = 0; i < 20'000; ++i) long_text += static_cast<char>('a' + i % 26);
  Fixture f(long_text);
  f.delivery.ended = true;
  const auto frames = f.all();
  CHECK_EQ(frames.size(), 5U);
  std::string text;
  uint64_t index = 0;
  for (const Value& frame : frames) {
    CHECK_EQ(frame["index"].integer, index);
    index += frame["ids"].items.size();
    text += frame["text"].text;
  }
  CHECK_EQ(index, 20'000U);
  CHECK_EQ(text, long_text);
}

TEST(held_back_text_comes_with_the_last_frame) {
  Fixture f("abcST");
  CHECK(f.request.stops.add("STOP"));
  CHECK_EQ(f.all().back()["text"].text, "abc");
  f.delivery.ended = true;
  const auto frames = f.all();
  REQUIRE(frames.size() == 1);
  CHECK_EQ(frames[0]["ids"].items.size(), 0U);
  CHECK_EQ(frames[0]["index"].integer, 5U);
  CHECK_EQ(frames[0]["text"].text, "ST");

  Fixture together("abcST");
  CHECK(together.request.stops.add("STOP"));
  together.delivery.ended = true;
  CHECK_EQ(together.all().back()["text"].text, "abcST");
}

TEST(a_stop_id_has_no_text_and_a_stop_string_ends_it) {
  Fixture f("hello!");
  f.delivery.ended = true;
  f.delivery.silent_last = true;
  CHECK_EQ(f.all().back()["text"].text, "hello");

  Fixture g("helloxx");
  CHECK(g.request.stops.add("lo"));
  g.delivery.ended = true;
  const auto frames = g.all();
  CHECK_EQ(frames.back()["text"].text, "hel");
  CHECK_EQ(frames.back()["ids"].items.size(), 7U);
}

TEST(logprobs_are_packed_in_order_and_split_frames_at_their_limit) {
  const int count = 600;
  Fixture f(std::string(count, 'x'));
  f.request.sampling.top_logprobs = ull::kMaxTopLogprobs;
  for (int i = 0; i < count; ++i) {
    ull::RoundToken& token = f.records[static_cast<size_t>(i)].token;
    token.token = 'x';
    token.logprob = -static_cast<float>(i);
    token.top_count = ull::kMaxTopLogprobs;
    for (int rank = 0; rank < token.top_count; ++rank)
      token.top[rank] = {70'000 + rank, -1.0F - static_cast<float>(rank)};
    f.records[static_cast<size_t>(i)].next = i + 1 < count ? i + 1 : -1;
  }
  f.delivery.first_logprob = 0;
  const auto frames = f.all();
  CHECK_EQ(frames.size(), 3U);
  int index = 0;
  for (const Value& frame : frames) {
    CHECK_EQ(frame["ids"].items.size(), frame["logprobs"].items.size());
    for (const Value& logprob : frame["logprobs"].items) {
      CHECK_EQ(logprob["token"].integer, static_cast<uint64_t>('x'));
      CHECK_EQ(logprob["logprob"].real, -static_cast<float>(index++));
      CHECK_EQ(logprob["top"].items.size(), 20U);
      CHECK_EQ(logprob["top"].items[19].items[0].integer, 70'019U);
      CHECK_EQ(logprob["top"].items[19].items[1].real, -20.0F);
    }
  }
  CHECK_EQ(index, count);
  CHECK_EQ(f.delivery.first_logprob, -1);
}

// The prompt's first token has none, so that of the 26 there are 25.
TEST(a_prompt_s_logprobs_come_in_frames_of_their_own) {
  for (const auto& [tokens, frames] : {std::pair(26, 1), std::pair(ull::kMaxFramePromptLogprobs + 1, 1),
                                       std::pair(5'000, 3), std::pair(131'072, 64)}) {
    Fixture f("");
    f.request.prompt_tokens = tokens;
    f.request.prompt_logprobs = std::make_unique<ull::PromptLogprobs>(tokens, 64);
    const std::vector<int32_t> prompt(static_cast<size_t>(tokens), 'x');
    while (!f.request.prompt_logprobs->scored()) {
      const ull::ScoreStep step = f.request.prompt_logprobs->next_step(prompt.data(), nullptr);
      for (int i = 0; i < step.count; ++i) step.logprobs[i] = -0.25F * static_cast<float>(step.position + i);
      CHECK(f.request.prompt_logprobs->accept());
    }
    CHECK(!f.delivery.prompt_logprobs_pending());
    f.delivery.prompt_logprobs_available = tokens - 1;
    CHECK(f.delivery.pending());
    int packed = 0;
    for (int found = 0; f.delivery.prompt_logprobs_pending(); ++packed) {
      const auto frame = f.packer.prompt_logprobs(f.request, f.delivery);
      CHECK(frame.bytes.size() < 16 * 1024);
      const Value value = MsgpackReader::read(text_of(frame.bytes));
      CHECK_EQ(value.members.size(), 4U);
      CHECK_EQ(value["type"].text, "prompt_logprobs");
      CHECK_EQ(value["id"].integer, f.request.id);
      CHECK_EQ(value["index"].integer, static_cast<uint64_t>(found + 1));
      CHECK_EQ(value["logprobs"].items.size(), static_cast<size_t>(frame.count));
      for (const Value& each : value["logprobs"].items) CHECK_EQ(each.real, -0.25 * found++);
      f.delivery.prompt_logprobs_sent += frame.count;
    }
    CHECK_EQ(packed, frames);
    CHECK(!f.delivery.pending());
  }
}

TEST(a_prompt_s_log_probabilities_with_the_likeliest_tokens) {
  constexpr int kTokens = 1000;
  for (const auto& [top_count, frames] : {std::pair(1, 2), std::pair(5, 6)}) {
    Fixture f("");
    f.request.prompt_tokens = kTokens;
    f.request.prompt_logprobs = std::make_unique<ull::PromptLogprobs>(kTokens, 64, top_count);
    const std::vector<int32_t> prompt(kTokens, 'x');
    while (!f.request.prompt_logprobs->scored()) {
      const ull::ScoreStep step = f.request.prompt_logprobs->next_step(prompt.data(), nullptr);
      for (int i = 0; i < step.count; ++i) {
        step.logprobs[i] = -1.0F;
        for (int rank = 0; rank < top_count; ++rank) {
          step.top[i * top_count + rank] = {(step.position + i) * 100 + rank, -0.5F * static_cast<float>(rank)};
        }
      }
      CHECK(f.request.prompt_logprobs->accept());
    }
    f.delivery.prompt_logprobs_available = kTokens - 1;
    int packed = 0, found = 0;
    for (; f.delivery.prompt_logprobs_pending(); ++packed) {
      const auto frame = f.packer.prompt_logprobs(f.request, f.delivery);
      CHECK(frame.bytes.size() < 16 * 1024);
      const Value value = MsgpackReader::read(text_of(frame.bytes));
      CHECK_EQ(value.members.size(), 5U);
      CHECK_EQ(value["logprobs"].items.size(), value["top"].items.size());
      for (const Value& top : value["top"].items) {
        CHECK_EQ(top.items.size(), static_cast<size_t>(top_count));
        for (int rank = 0; rank < top_count; ++rank) {
          const Value& pair = top.items[static_cast<size_t>(rank)];
          CHECK_EQ(pair.items[0].integer, static_cast<uint64_t>(found * 100 + rank));
          CHECK_EQ(pair.items[1].real, -0.5 * rank);
        }
        ++found;
      }
      f.delivery.prompt_logprobs_sent += frame.count;
    }
    CHECK_EQ(found, kTokens - 1);
    CHECK_EQ(packed, frames);
  }
}

TEST(the_done_frame_and_the_record) {
  Fixture f("hello");
  const std::string client = "client";
  std::copy(client.begin(), client.end(), f.request.identity.begin());
  f.request.identity_size = 6;
  f.request.sampling.seed = 42;
  f.request.timeline = {1, 2, 3, 4, 5, 6, 7};
  f.request.outcome = {ull::FinishReason::kError, 10, 5, "internal", "the executor failed"};
  const Value done = MsgpackReader::read(text_of(f.packer.done(f.request, f.delivery)));
  CHECK_EQ(done.members.size(), 10U);
  CHECK_EQ(done["warnings"].items.size(), 0U);
  CHECK_EQ(done["type"].text, "done");
  CHECK_EQ(done["id"].integer, f.request.id);
  CHECK_EQ(done["finish_reason"].text, "error");
  CHECK_EQ(done["usage"]["prompt_tokens"].integer, 26U);
  CHECK_EQ(done["usage"]["cached_tokens"].integer, 10U);
  CHECK_EQ(done["usage"]["completion_tokens"].integer, 5U);
  uint64_t expected = 0;
  for (const char* name :
       {"received_ns", "admitted_ns", "started_ns", "prefilled_ns", "first_token_ns", "last_token_ns", "done_ns"}) {
    CHECK_EQ(done["timeline"][name].integer, ++expected);
  }
  CHECK_EQ(done["seed"].integer, 42U);
  CHECK_EQ(done["bundle"].text, std::string(ull::kMaxDigest, 'd'));
  CHECK_EQ(done["error"]["code"].text, "internal");
  CHECK_EQ(done["error"]["message"].text, "the executor failed");

  f.request.outcome.error_code = nullptr;
  f.delivery.client = ull::ClientState::kStalled;
  const Value record = MsgpackReader::read(text_of(f.packer.ended(f.request, f.delivery)));
  CHECK_EQ(record.members.size(), 10U);
  CHECK_EQ(record["identity"].text, client);
  CHECK(record["error"].kind == Value::kNil);
  CHECK_EQ(record["delivered"].integer, 0U);
  CHECK_EQ(record["client"].text, "stalled");
  CHECK_EQ(record["usage"]["prompt_tokens"].integer, 26U);
  CHECK_EQ(record["speculation"]["rounds"].integer, 0U);
}

TEST(the_done_frame_tells_what_the_rounds_did) {
  Fixture f("hello, hello");
  f.request.outcome = {ull::FinishReason::kLength, 0, 12, nullptr, nullptr};
  const auto round = [&](ull::DrafterKind drafter, int32_t tree_tokens, int32_t accepted) {
    ull::RoundResult result;
    result.count = accepted + 1;
    result.drafter = drafter;
    result.tree_tokens = tree_tokens;
    result.accepted = accepted;
    f.request.rounds.count(result);
  };
  const Value none = MsgpackReader::read(text_of(f.packer.done(f.request, f.delivery)))["speculation"];
  CHECK_EQ(none["tokens_per_round"].real, 0.0);
  CHECK_EQ(none["by_drafter"].members.size(), 0U);
  round(ull::DrafterKind::kNone, 1, 0);
  round(ull::DrafterKind::kMedusa, 16, 3);
  round(ull::DrafterKind::kMedusa, 8, 0);
  round(ull::DrafterKind::kSuffix, 5, 4);
  const Value done = MsgpackReader::read(text_of(f.packer.done(f.request, f.delivery)))["speculation"];
  CHECK_EQ(done.members.size(), 6U);
  CHECK_EQ(done["rounds"].integer, 4U);
  CHECK_EQ(done["drafted_tokens"].integer, 26U);
  CHECK_EQ(done["accepted_tokens"].integer, 7U);
  CHECK_EQ(done["tokens_per_round"].real, 3.0);
  CHECK_EQ(done["by_drafter"].members.size(), 3U);
  CHECK_EQ(done["by_drafter"]["none"].integer, 1U);
  CHECK_EQ(done["by_drafter"]["suffix"].integer, 1U);
  CHECK_EQ(done["by_drafter"]["medusa"].integer, 2U);
  REQUIRE(done["accepted_by_depth"].items.size() == 4);
  CHECK_EQ(done["accepted_by_depth"].items[2].integer, 2U);
  CHECK_EQ(done["accepted_by_depth"].items[3].integer, 1U);
}

TEST(a_request_with_a_constraint_has_one_pair_more) {
  Fixture f("hello");
  f.request.constraint = std::make_shared<ull::test::ScriptedConstraint>(ull::test::one_of({"x"}));
  f.request.outcome = {ull::FinishReason::kStop, 0, 5, nullptr, nullptr, 3, 2};
  const Value done = MsgpackReader::read(text_of(f.packer.done(f.request, f.delivery)));
  CHECK_EQ(done.members.size(), 11U);
  const Value record = MsgpackReader::read(text_of(f.packer.ended(f.request, f.delivery)));
  CHECK_EQ(record.members.size(), 11U);
  for (const Value& frame : {done, record}) {
    CHECK_EQ(frame["grammar"].members.size(), 2U);
    CHECK_EQ(frame["grammar"]["masks"].integer, 3U);
    CHECK_EQ(frame["grammar"]["forced_tokens"].integer, 2U);
  }
}

TEST(the_done_frame_names_what_was_ignored) {
  Fixture f("x");
  CHECK(f.request.warnings.add("max_token"));
  CHECK(f.request.warnings.add(""));
  CHECK(!f.request.warnings.add(std::string(65, 'x')));
  const std::string packed = text_of(f.packer.done(f.request, f.delivery));
  const Value warnings = MsgpackReader::read(packed)["warnings"];
  REQUIRE(warnings.items.size() == 2);
  CHECK_EQ(warnings.items[0].text, "max_token");
  CHECK_EQ(warnings.items[1].text, "");
  CHECK_EQ(packed.find("warnings"), packed.size() - std::string("warnings\x92\xa9max_token\xa0").size());
  f.request.warnings.clear();
  CHECK_EQ(MsgpackReader::read(text_of(f.packer.done(f.request, f.delivery)))["warnings"].items.size(), 0U);
}

TEST(the_done_frame_tells_what_became_of_the_choices) {
  Fixture f("x");
  f.request.outcome = {ull::FinishReason::kStop, 0, 1, nullptr, nullptr};
  const Value plain = MsgpackReader::read(text_of(f.packer.done(f.request, f.delivery)));
  CHECK_EQ(plain.members.size(), 10U);
  CHECK_EQ(plain["usage"].members.size(), 4U);
  f.request.choices =
      std::make_unique<ull::Choices>(std::vector<std::vector<int32_t>>{{5}, {6, 7, 8}}, std::span<const int32_t>(), 64);
  ull::Choices& choices = *f.request.choices;
  for (const bool chosen : {false, true}) {
    if (chosen) {
      const ull::ScoreStep step = choices.next_step(1, 0, nullptr);
      for (int i = 0; i < step.query_count; ++i) step.logprobs[i] = step.queries[i].token == 5 ? -3.0F : -0.5F;
      CHECK(choices.accept());
      choices.choose({}, 1);
    }
    for (const Value& frame : {MsgpackReader::read(text_of(f.packer.done(f.request, f.delivery))),
                               MsgpackReader::read(text_of(f.packer.ended(f.request, f.delivery)))}) {
      CHECK_EQ(frame.members.size(), 11U);
      CHECK_EQ(frame["usage"].members.size(), 6U);
      CHECK_EQ(frame["usage"]["scored_tokens"].integer, chosen ? 3U : 0U);
      REQUIRE(frame["usage"]["choice_tokens"].items.size() == 2);
      CHECK_EQ(frame["usage"]["choice_tokens"].items[1].integer, 3U);
      const Value& choice = frame["choice"];
      if (!chosen) {
        CHECK(choice.kind == Value::kNil);
        continue;
      }
      CHECK_EQ(choice.members.size(), 4U);
      CHECK_EQ(choice["index"].integer, 1U);
      REQUIRE(choice["logprobs"].items.size() == 2 && choice["probabilities"].items.size() == 2);
      CHECK_EQ(choice["logprobs"].items[0].real, -3.0);
      CHECK_EQ(choice["logprobs"].items[1].real, -1.5);
      CHECK_EQ(choice["probabilities"].items[1].real, choices.probabilities()[1]);
      CHECK_EQ(choice["margin"].real, choices.margin());
    }
  }
}

TEST(the_longest_done_frame_fits) {
  Fixture f("x");
  for (int i = 0; i < ull::kMaxWarnings; ++i) CHECK(f.request.warnings.add(std::string(ull::kMaxWarningBytes, 'w')));
  CHECK(!f.request.warnings.add("one more"));
  f.request.identity_size = ull::kMaxIdentity;
  f.request.sampling.seed = 0xFFFF'FFFF'FFFF'FFFF;
  f.request.timeline = {INT64_MAX, INT64_MAX, INT64_MAX, INT64_MAX, INT64_MAX, INT64_MAX, INT64_MAX};
  f.request.outcome = {ull::FinishReason::kError, INT32_MAX, INT32_MAX, "internal", "the executor failed"};
  f.request.rounds.rounds = f.request.rounds.drafted_tokens = f.request.rounds.accepted_tokens = INT32_MAX;
  f.request.rounds.by_drafter.fill(INT32_MAX);
  f.request.rounds.accepted_by_depth.fill(INT32_MAX);
  const Value done = MsgpackReader::read(text_of(f.packer.done(f.request, f.delivery)));
  CHECK_EQ(done["speculation"]["accepted_by_depth"].items.size(), static_cast<size_t>(ull::kMaxDraftDepth));
  CHECK_EQ(done["warnings"].items.size(), static_cast<size_t>(ull::kMaxWarnings));
  std::vector<std::vector<int32_t>> labels(ull::kMaxChoices, std::vector<int32_t>(ull::kMaxChoiceTokens, 1));
  for (size_t i = 0; i < labels.size(); ++i) labels[i][0] = static_cast<int32_t>(i);
  f.request.choices = std::make_unique<ull::Choices>(labels, std::span<const int32_t>(), 64);
  while (!f.request.choices->scored()) {
    (void)f.request.choices->next_step(1, 0, nullptr);
    CHECK(f.request.choices->accept());
  }
  f.request.choices->choose({}, 1);
  const Value chosen = MsgpackReader::read(text_of(f.packer.done(f.request, f.delivery)));
  CHECK_EQ(chosen["choice"]["probabilities"].items.size(), static_cast<size_t>(ull::kMaxChoices));
  CHECK_EQ(chosen["warnings"].items.size(), static_cast<size_t>(ull::kMaxWarnings));
  const Value record = MsgpackReader::read(text_of(f.packer.ended(f.request, f.delivery)));
  CHECK_EQ(record["speculation"]["by_drafter"].members.size(), static_cast<size_t>(ull::kDrafterKinds));
  CHECK_EQ(record["client"].text, "ok");
}

}  // namespace
