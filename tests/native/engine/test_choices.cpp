// Choices: the tree of the labels, its passes, what is made of their results, and requests whose answer is a label.
#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <stdexcept>

#include "base/gumbel.h"
#include "engine_fixture.h"

namespace {

using ull::Choices;
using ull::FinishReason;
using ull::Priority;
using ull::ScoreStep;
using ull::ScriptedExecutor;
using ull::Submission;
using ull::test::Harness;
using ull::test::ids;

using Labels = std::vector<std::vector<int32_t>>;

constexpr int32_t kRoot = 7;
constexpr int32_t kStop = 0;
const std::vector<int32_t> kPrompt = ids("once upon a time there was");

Labels labels(std::initializer_list<const char*> texts) {
  Labels all;
  for (const char* text : texts) all.push_back(ids(text));
  return all;
}

// The tokens from the root to a node of a pass, the root's left out.
std::vector<int32_t> way_to(const ScoreStep& step, int node) {
  std::vector<int32_t> way;
  for (; node != 0; node = step.parents[node]) way.insert(way.begin(), step.tokens[node]);
  return way;
}

// Makes all passes with what `logprob(way, token)` says; checks each pass and that nothing is asked twice. Returns what
// was asked.
template <typename Logprob>
std::set<std::vector<int32_t>> score(Choices& choices, int score_nodes, Logprob&& logprob) {
  const int32_t page = 0;
  std::set<std::vector<int32_t>> asked;
  int fed = 0;
  while (!choices.scored()) {
    const ScoreStep step = choices.next_step(kRoot, 5, &page);
    CHECK(step.count >= 1 && step.count <= score_nodes && step.count <= choices.widest());
    CHECK(step.query_count >= 1);
    CHECK_EQ(step.tokens[0], kRoot);
    CHECK_EQ(static_cast<int>(step.parents[0]), 0);
    CHECK_EQ(step.position, 5);
    std::set<std::vector<int32_t>> ways;
    for (int node = 0; node < step.count; ++node) {
      CHECK(node == 0 || step.parents[node] < node);
      CHECK(ways.insert(way_to(step, node)).second);  // no node is there twice
    }
    for (int i = 0; i < step.query_count; ++i) {
      std::vector<int32_t> way = way_to(step, step.queries[i].node);
      step.logprobs[i] = logprob(way, step.queries[i].token);
      way.push_back(step.queries[i].token);
      CHECK(asked.insert(way).second);
    }
    fed += step.count;
    CHECK(choices.accept());
    CHECK_EQ(choices.scored_tokens(), fed);
  }
  CHECK_EQ(choices.nodes(), fed);
  return asked;
}

float hashed(const std::vector<int32_t>& way, int32_t token) { return ScriptedExecutor::scripted_logprob(way, token); }

// What a label is worth, computed from its tokens alone.
double worth(const Labels& all, size_t index, std::span<const int32_t> stops, const auto& logprob) {
  std::vector<int32_t> way;
  double sum = 0.0;
  for (const int32_t token : all[index]) {
    sum += static_cast<double>(logprob(way, token));
    way.push_back(token);
  }
  const bool goes_on = std::ranges::any_of(all, [&](const std::vector<int32_t>& other) {
    return other.size() > way.size() && std::equal(way.begin(), way.end(), other.begin());
  });
  if (!goes_on) return sum;
  double end = 0.0;
  for (const int32_t stop : stops) end += std::exp(static_cast<double>(logprob(way, stop)));
  return sum + std::log(end);
}

Labels random_labels(std::mt19937& random, int count, int longest, int alphabet) {
  std::set<std::vector<int32_t>> all;
  for (int tries = 0; static_cast<int>(all.size()) < count && tries < 10 * count; ++tries) {
    std::vector<int32_t> label(1 + random() % static_cast<uint32_t>(longest));
    for (int32_t& token : label) token = 1 + static_cast<int32_t>(random() % static_cast<uint32_t>(alphabet));
    all.insert(label);
  }
  Labels shuffled(all.begin(), all.end());
  std::ranges::shuffle(shuffled, random);
  return shuffled;
}

std::string refusal(const Labels& all, std::span<const int32_t> stops, int score_nodes) {
  try {
    const Choices choices(all, stops, score_nodes);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

TEST(shared_beginnings_are_fed_once) {
  Choices choices(labels({"buy now", "buy later", "sell"}), {}, 64);
  CHECK_EQ(choices.passes(), 1);
  CHECK_EQ(choices.longest(), 9);
  // The root, "buy ", "no", "late" and "sel": no label's last token.
  CHECK_EQ(choices.nodes(), 1 + 4 + 2 + 4 + 3);
  CHECK_EQ(choices.widest(), choices.nodes());
  const auto asked = score(choices, 64, hashed);
  CHECK_EQ(asked.size(), 4U + 3 + 5 + 4);
  CHECK(asked.contains(ids("buy now")) && asked.contains(ids("buy later")) && asked.contains(ids("s")));
}

TEST(one_token_labels_need_the_root_alone) {
  Choices choices(labels({"a", "b", "c"}), {}, 1);
  CHECK_EQ(choices.passes(), 1);
  CHECK_EQ(choices.nodes(), 1);
  CHECK_EQ(score(choices, 1, hashed).size(), 3U);
}

TEST(one_label_is_certain) {
  for (const float temperature : {0.0F, 1.0F}) {
    Choices choices(labels({"only"}), {}, 64);
    (void)score(choices, 64, hashed);
    CHECK(!choices.chosen());
    choices.choose({.temperature = temperature}, 9);
    CHECK_EQ(choices.choice(), 0U);
    CHECK_EQ(choices.probabilities()[0], 1.0);
    CHECK_EQ(choices.margin(), 1.0);
    CHECK_EQ(choices.logprobs()[0], worth(labels({"only"}), 0, {}, hashed));
  }
}

TEST(a_label_that_others_go_on_from_is_worth_its_end_too) {
  const Labels all = labels({"ab", "a", "abc", "b"});
  const std::vector<int32_t> stops = {kStop, 3, kStop};  // twice the same
  Choices choices(all, stops, 64);
  const auto asked = score(choices, 64, hashed);
  for (const auto* before : {"a", "ab"}) {
    for (const int32_t stop : {kStop, 3}) {
      std::vector<int32_t> end = ids(before);
      end.push_back(stop);
      CHECK(asked.contains(end));
    }
  }
  CHECK_EQ(asked.size(), 4U + 4);
  choices.choose({}, 9);
  const std::vector<int32_t> different = {kStop, 3};
  for (size_t i = 0; i < all.size(); ++i) {
    CHECK(std::abs(choices.logprobs()[i] - worth(all, i, different, hashed)) < 1e-12);
  }
  CHECK_EQ(refusal(all, {}, 64), "label 0 is the beginning of another one, and the request has no stop ids");
}

TEST(a_stop_id_that_a_label_goes_on_with_is_asked_for_once) {
  const Labels all = {{5}, {5, kStop}, {5, 6}};
  const std::vector<int32_t> stops = {kStop};
  Choices choices(all, stops, 64);
  CHECK_EQ(score(choices, 64, hashed).size(), 3U);
  choices.choose({}, 9);
  CHECK_EQ(choices.logprobs()[0], choices.logprobs()[1]);
}

TEST(however_the_passes_are_cut_every_question_is_asked_once_and_the_answer_is_the_same) {
  std::mt19937 random(15);
  const std::vector<int32_t> stops = {kStop};
  for (int round = 0; round < 300; ++round) {
    const int longest = 1 + static_cast<int>(random() % 12);
    const Labels all =
        random_labels(random, 1 + static_cast<int>(random() % 40), longest, 1 + static_cast<int>(random() % 4));
    Choices whole(all, stops, 64);
    const auto asked = score(whole, 64, hashed);
    const ull::Sampling sampling{.temperature = round % 2 == 0 ? 0.0F : 0.7F, .seed = random()};
    whole.choose(sampling, 9);
    for (size_t i = 0; i < all.size(); ++i) {
      CHECK(std::abs(whole.logprobs()[i] - worth(all, i, stops, hashed)) < 1e-9);
    }
    for (const int score_nodes : {whole.longest() + 1, whole.longest() + 2, 20, 33}) {
      if (score_nodes <= whole.longest()) continue;
      Choices cut(all, stops, score_nodes);
      CHECK(score(cut, score_nodes, hashed) == asked);
      cut.choose(sampling, 9);
      CHECK_EQ(cut.choice(), whole.choice());
      CHECK_EQ(cut.margin(), whole.margin());
      CHECK(std::ranges::equal(cut.logprobs(), whole.logprobs()));
      CHECK(std::ranges::equal(cut.probabilities(), whole.probabilities()));
      CHECK(cut.passes() >= (whole.nodes() + score_nodes - 1) / score_nodes || whole.passes() > 1);
    }
  }
}

// A pass that is not the last is full: no other packing of the nodes in that order needs fewer.
TEST(passes_are_filled) {
  std::mt19937 random(16);
  const Labels all = random_labels(random, 200, 20, 3);
  const std::vector<int32_t> stops = {kStop};
  Choices choices(all, stops, 24);
  CHECK(choices.passes() > 1);
  const int32_t page = 0;
  while (!choices.scored()) {
    const ScoreStep step = choices.next_step(kRoot, 5, &page);
    std::fill_n(step.logprobs, step.query_count, -1.0F);
    CHECK(choices.accept());
    if (!choices.scored()) CHECK_EQ(step.count, 24);
  }
}

TEST(the_most_labels_of_the_most_tokens) {
  Labels all(ull::kMaxChoices, std::vector<int32_t>(ull::kMaxChoiceTokens));
  std::mt19937 random(17);
  for (auto& label : all) {
    for (int32_t& token : label) token = 1 + static_cast<int32_t>(random() % 100);
  }
  for (size_t i = 0; i < all.size(); ++i) all[i][63] = 101 + static_cast<int32_t>(i);  // no two are the same
  Choices choices(all, {}, ull::kMaxTreeTokens);
  CHECK_EQ(choices.widest(), ull::kMaxTreeTokens);
  CHECK(choices.passes() <= ull::kMaxChoices);
  const auto asked = score(choices, ull::kMaxTreeTokens, hashed);
  CHECK(asked.size() <= all.size() * 64);
  for (const auto& label : all) CHECK(asked.contains(label));
  choices.choose({}, 1);
  const double sum = std::accumulate(choices.probabilities().begin(), choices.probabilities().end(), 0.0);
  CHECK(std::abs(sum - 1.0) < 1e-12);
  all.push_back(ids("one more"));
  CHECK_EQ(refusal(all, {}, 64), "has 257 labels; at most 256 are taken");
}

TEST(labels_that_make_no_sense_are_refused) {
  CHECK_EQ(refusal({}, {}, 64), "is empty: give at least one label");
  CHECK_EQ(refusal({{1}, {}}, {}, 64), "label 1 has no tokens");
  CHECK_EQ(refusal({std::vector<int32_t>(65, 1)}, {}, 64), "label 0 has 65 tokens; at most 64 are taken");
  CHECK_EQ(refusal({{1, 2}, {3}, {1, 2}}, {}, 64), "label 2 is the same as label 0");
  CHECK_EQ(refusal({{1}, {1, 2, 3, 4}}, std::vector<int32_t>{9}, 3),
           "label 1 has 4 tokens; this engine scores at most 3");
  CHECK_EQ(refusal({std::vector<int32_t>(64, 1)}, {}, 64), "");
}

TEST(of_equal_labels_the_first_is_chosen) {
  const Labels all = labels({"d", "c", "b", "a"});
  Choices choices(all, {}, 64);
  (void)score(choices, 64, [](const auto&, int32_t token) { return token == 'd' ? -2.0F : -1.0F; });
  choices.choose({}, 9);
  CHECK_EQ(choices.choice(), 1U);
  CHECK_EQ(choices.margin(), 0.0);
}

TEST(a_temperature_draws_by_the_one_rule) {
  const Labels all = labels({"one", "two", "three", "four", "five"});
  std::map<size_t, int> drawn;
  for (uint64_t seed = 0; seed < 500; ++seed) {
    Choices choices(all, {}, 64);
    (void)score(choices, 64, [](const auto& way, int32_t token) { return hashed(way, token) / 8.0F; });
    const ull::Sampling sampling{.temperature = 1.5F, .seed = seed};
    choices.choose(sampling, 1234);
    const double greatest = *std::ranges::max_element(choices.logprobs());
    size_t best = 0;
    double most = -1e9;
    for (size_t i = 0; i < all.size(); ++i) {
      const double score = (choices.logprobs()[i] - greatest) / 1.5 +
                           static_cast<double>(ull::gumbel(seed, 1234, static_cast<int32_t>(i)));
      if (score > most) {
        most = score;
        best = i;
      }
    }
    CHECK_EQ(choices.choice(), best);
    ++drawn[choices.choice()];
    // What is reported does not depend on the draw.
    std::vector<double> sorted(choices.probabilities().begin(), choices.probabilities().end());
    std::ranges::sort(sorted, std::greater());
    CHECK_EQ(choices.margin(), sorted[0] - sorted[1]);
  }
  CHECK(drawn.size() > 1);
}

TEST(what_is_no_logprob_is_not_accepted) {
  for (const float answer : {NAN, INFINITY, -INFINITY}) {
    Choices choices(labels({"a", "b"}), {}, 64);
    const int32_t page = 0;
    const ScoreStep step = choices.next_step(kRoot, 5, &page);
    step.logprobs[0] = -1.0F;
    step.logprobs[1] = answer;
    CHECK(!choices.accept());
  }
}

// On the scripted executor.

Submission choose(uint64_t id, std::span<const int32_t> prompt, Labels all,
                  Priority priority = Priority::kInteractive) {
  Submission request = Harness::request(id, prompt, 0);
  request.choices = std::move(all);
  request.stop_ids = {kStop};
  request.priority = priority;
  return request;
}

// What the request's slot holds of its labels once it has ended, until another request takes the slot.
const Choices& found(Harness& engine, uint64_t id) {
  for (uint32_t i = 0; i < engine.engine.shared().slots; ++i) {
    const ull::RequestSlot& slot = engine.engine.shared().slot(i);
    if (slot.id == id && slot.choices != nullptr) return *slot.choices;
  }
  std::abort();
}

// Nodes that a request of these labels feeds in all.
uint64_t nodes_of(const Labels& all, int score_nodes) {
  return static_cast<uint64_t>(Choices(all, std::vector<int32_t>{kStop}, score_nodes).nodes());
}

// Checks that a request of these labels has ended as the script says.
void check_answer(Harness& engine, uint64_t id, std::span<const int32_t> prompt, const Labels& all) {
  const auto& result = engine.wait(id);
  CHECK(result.outcome.reason == FinishReason::kStop);
  const Choices& choices = found(engine, id);
  const std::vector<int32_t> stops = {kStop};
  const auto logprob = [&](const std::vector<int32_t>& way, int32_t token) {
    std::vector<int32_t> past(prompt.begin(), prompt.end());
    past.insert(past.end(), way.begin(), way.end());
    return ScriptedExecutor::scripted_logprob(past, token);
  };
  size_t best = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    CHECK(std::abs(choices.logprobs()[i] - worth(all, i, stops, logprob)) < 1e-9);
    if (choices.logprobs()[i] > choices.logprobs()[best]) best = i;
  }
  CHECK_EQ(choices.choice(), best);
  CHECK(result.tokens == all[best]);
  const ull::Timeline& timeline = result.timeline;
  CHECK(timeline.prefilled_ns > 0 && timeline.first_token_ns >= timeline.prefilled_ns);
  CHECK_EQ(timeline.first_token_ns, timeline.last_token_ns);
  CHECK(timeline.done_ns >= timeline.last_token_ns);
}

// Labels that need many passes of 16 nodes.
Labels many() {
  std::mt19937 random(18);
  return random_labels(random, 100, 12, 4);
}

TEST(a_label_is_the_answer) {
  const Labels all = labels({"yes", "no", "yes, but", "maybe"});
  for (const int forced : {0, 31}) {
    Harness running({.from_past = true, .forced_tokens = forced});
    for (uint64_t id = 1; id < 4; ++id) {  // cold, warm, and behind what has generated
      running.submit(choose(id, kPrompt, all));
      check_answer(running, id, kPrompt, all);
      CHECK_EQ(running.results[id].outcome.cached_tokens, id == 1 ? 0 : static_cast<int>(kPrompt.size()) - 1);
      running.submit(Harness::request(id + 10, kPrompt, 20));
      CHECK_EQ(running.wait(id + 10).tokens.size(), 20U);
    }
    running.engine.stop();
    const ull::EngineCounters counters = running.engine.stats().counters;
    CHECK_EQ(counters.score_passes, 3U);
    CHECK_EQ(counters.scored_tokens, 3 * nodes_of(all, 64));
    CHECK_EQ(counters.stopped, 3U);
    CHECK_EQ(counters.rounds, 60U);
  }
}

TEST(a_label_that_ends_with_a_stop_id_shows_no_text_of_it) {
  Harness engine({});
  engine.submit(choose(1, kPrompt, {{'a', kStop}}));
  CHECK_EQ(engine.wait(1).tokens.size(), 2U);
  CHECK(engine.results[1].silent_last);
  engine.submit(choose(2, kPrompt, {{'a', 'b'}}));
  CHECK_EQ(engine.wait(2).tokens.size(), 2U);
  CHECK(!engine.results[2].silent_last);
}

TEST(many_passes_find_what_one_finds) {
  const Labels all = many();
  for (const int score_nodes : {13, 16, 40, 64}) {
    Harness engine({.score_nodes = score_nodes});
    engine.submit(choose(1, kPrompt, all));
    check_answer(engine, 1, kPrompt, all);
    CHECK_EQ(engine.engine.stats().counters.rounds, 0U);
  }
}

TEST(a_prompt_of_one_token) {
  Harness engine({});
  const auto prompt = ids("x");
  const Labels all = labels({"one", "other"});
  engine.submit(choose(1, prompt, all));
  check_answer(engine, 1, prompt, all);
}

TEST(a_realtime_request_comes_between_two_passes) {
  const Labels all = many();
  Harness engine({.from_past = true, .score_nodes = 16});
  Submission rounds = Harness::request(3, kPrompt, 5);
  rounds.priority = Priority::kRealtime;
  engine.submit_within(choose(1, kPrompt, all, Priority::kBatch), 3,
                       choose(2, kPrompt, labels({"now"}), Priority::kRealtime), rounds);
  check_answer(engine, 2, kPrompt, labels({"now"}));
  engine.wait(3);
  CHECK_EQ(engine.results[1].finals, 0);
  check_answer(engine, 1, kPrompt, all);
  engine.engine.stop();
  CHECK(engine.engine.stats().counters.suspensions >= 1);
  // Nothing was scored twice.
  CHECK_EQ(engine.engine.stats().counters.scored_tokens, nodes_of(all, 16) + nodes_of(labels({"now"}), 16));
}

// Pages for one long text only: the request gives its own up between two passes, reads its prompt again, and goes on.
TEST(a_request_whose_pages_are_taken_between_two_passes_finds_the_same) {
  const Labels all = many();
  for (const int forced : {0, 31}) {
    Harness engine({.from_past = true, .context = 512, .page_count = 8, .forced_tokens = forced, .score_nodes = 16});
    const std::vector<int32_t> first(300, 'a'), second(400, 'b');
    Submission urgent = Harness::request(2, second, 20);
    urgent.priority = Priority::kRealtime;
    engine.submit_within(choose(1, first, all, Priority::kBatch), 4, urgent);
    CHECK_EQ(engine.wait(2).tokens.size(), 20U);
    CHECK_EQ(engine.results[1].finals, 0);
    check_answer(engine, 1, first, all);
    engine.engine.stop();
    CHECK(engine.engine.stats().counters.prefill_chunks > 4U);  // two each, and those that were read again
    CHECK_EQ(engine.engine.stats().counters.scored_tokens, nodes_of(all, 16));
  }
}

TEST(a_request_is_cancelled_between_two_passes_or_within_one) {
  for (const int64_t hang_step : {int64_t{-1}, int64_t{4}}) {
    Harness engine({.round_ns = 20'000'000, .hang_step = hang_step, .score_nodes = 16});
    engine.submit(choose(1, kPrompt, many()));
    engine.wait_for_steps(5);
    CHECK(engine.cancel(1));
    CHECK(engine.wait(1).outcome.reason == FinishReason::kCancelled);
    CHECK(engine.results[1].tokens.empty());
    CHECK(!found(engine, 1).chosen());
    CHECK(found(engine, 1).scored_tokens() < found(engine, 1).nodes());
    engine.submit(choose(2, kPrompt, labels({"a", "b"})));
    check_answer(engine, 2, kPrompt, labels({"a", "b"}));
  }
}

TEST(a_deadline_ends_a_request_between_two_passes) {
  Harness engine({.round_ns = 2'000'000, .score_nodes = 16});
  Submission request = choose(1, kPrompt, many());
  request.timeout_ns = ull::monotonic_ns() + 10'000'000;
  engine.submit(request);
  CHECK(engine.wait(1).outcome.reason == FinishReason::kTimeout);
  CHECK(!found(engine, 1).chosen());
}

TEST(a_pass_that_fails_ends_the_request) {
  Harness engine({.fail_step = 3, .failure = "it broke", .score_nodes = 16});
  engine.submit(choose(1, kPrompt, many()));
  CHECK(engine.wait(1).outcome.reason == FinishReason::kError);
  CHECK_EQ(std::string(engine.results[1].outcome.error_message), "it broke");
  CHECK(!found(engine, 1).chosen());
}

TEST(what_a_request_with_choices_leaves_behind_serves_others_where_it_may) {
  for (const auto& [reuse, cached] :
       {std::pair(ull::Reuse::kAll, 25), std::pair(ull::Reuse::kPrompt, 25), std::pair(ull::Reuse::kNothing, 0)}) {
    Harness engine({.from_past = true, .reuse = reuse});
    const Labels all = labels({"yes", "no"});
    engine.submit(choose(1, kPrompt, all));
    check_answer(engine, 1, kPrompt, all);
    engine.submit(Harness::request(2, kPrompt, 5));
    engine.wait(2);
    CHECK_EQ(engine.results[2].outcome.cached_tokens, cached);
    Harness alone({.from_past = true, .reuse = reuse});
    alone.submit(Harness::request(2, kPrompt, 5));
    CHECK(alone.wait(2).tokens == engine.results[2].tokens);
  }
}

TEST(a_held_request_and_a_rehearsal_with_choices) {
  Harness engine({});
  Submission held = choose(1, kPrompt, labels({"yes", "no"}));
  held.hold = true;
  engine.submit(held);
  check_answer(engine, 1, kPrompt, held.choices);
  Submission rehearsal = choose(2, kPrompt, labels({"yes", "no"}));
  rehearsal.rehearsal = true;
  engine.submit(rehearsal);
  check_answer(engine, 2, kPrompt, rehearsal.choices);
  engine.engine.stop();
  CHECK_EQ(engine.engine.stats().counters.score_passes, 1U);
}

TEST(what_it_will_take_is_known_from_earlier_ones) {
  Harness engine({.round_ns = 5'000'000, .score_nodes = 16});
  for (uint64_t id = 1; id < 4; ++id) {
    engine.submit(choose(id, kPrompt, many()));
    engine.wait(id);
  }
  const int64_t passes = Choices(many(), std::vector<int32_t>{kStop}, 16).passes();
  const int64_t now = ull::monotonic_ns();
  Submission late = choose(4, kPrompt, many());
  late.deadline_ns = now + passes * 5'000'000 / 2;
  CHECK_THROWS(engine.submit(late), ull::DeadlineUnreachable);
  late.deadline_ns = now + 60'000'000'000;
  engine.submit(late);
  CHECK(engine.wait(4).outcome.reason == FinishReason::kStop);
  const ull::Timeline& timeline = engine.results[4].timeline;
  CHECK(timeline.expected_first_ns - now >= passes * 5'000'000 / 2);
  CHECK_EQ(timeline.expected_first_ns, timeline.expected_done_ns);
}

TEST(what_contradicts_choices_is_refused_by_name) {
  Harness engine({.context = 64, .page_count = 1});
  const auto field = [&](const Submission& request) -> std::string {
    try {
      engine.submit(request);
    } catch (const ull::InvalidRequest& error) {
      return error.field;
    }
    return "";
  };
  const ull::LogitBias bias{1, 1.0F};
  const Submission fine = choose(1, kPrompt, labels({"a", "b"}));
  const auto refused = [&](auto&& change) {
    Submission request = fine;
    change(request);
    return field(request);
  };
  CHECK_EQ(refused([](Submission& s) { s.sampling.top_k = 3; }), "top_k");
  CHECK_EQ(refused([](Submission& s) { s.sampling.top_p = 0.5F; }), "top_p");
  CHECK_EQ(refused([](Submission& s) { s.sampling.min_p = 0.5F; }), "min_p");
  CHECK_EQ(refused([](Submission& s) { s.sampling.top_logprobs = 0; }), "logprobs");
  CHECK_EQ(refused([](Submission& s) { s.stops = {"x"}; }), "stop");
  CHECK_EQ(refused([&](Submission& s) {
             s.sampling.bias = &bias;
             s.sampling.bias_count = 1;
           }),
           "logit_bias");
  CHECK_EQ(refused([](Submission& s) { s.choices = {{1}, {1}}; }), "choices");
  CHECK_EQ(refused([](Submission& s) { s.choices = {{128}}; }), "choices");
  CHECK_EQ(refused([](Submission& s) { s.choices = {{-1}}; }), "choices");
  CHECK_EQ(refused([](Submission& s) { s.choices = {std::vector<int32_t>(38, 1)}; }), "");
  CHECK_EQ(refused([](Submission& s) { s.id = 2, s.choices = {std::vector<int32_t>(39, 1)}; }), "choices");
  CHECK_EQ(refused([](Submission& s) { s.id = 2; }), "");
  CHECK_EQ(engine.wait(1).tokens.size(), 38U);
  CHECK_EQ(engine.wait(2).tokens.size(), 1U);
  Harness none({.score_nodes = 0});
  CHECK_THROWS(none.submit(fine), ull::InvalidRequest);
}

}  // namespace
