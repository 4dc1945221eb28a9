// The draft model as a drafter: its chains, its cache's bookkeeping, and what it refuses.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "check.h"
#include "cpu/draft_model.h"
#include "cpu/offline/local_session.h"
#include "exec_model.h"

using namespace ull;
using namespace ull::cpu;

namespace {

const std::atomic<bool> kNever{false};
const int32_t kPages[] = {3, 0, 6, 1, 2, 7, 5, 4};

// A target whose draft model is the target itself, or that with fewer layers or tokens.
class Pair {
 public:
  explicit Pair(int threads = 1, int layers = 3, int vocabulary = 80, int chunk = 64) {
    auto draft = std::make_shared<ModelSpec>(file_.spec);
    draft->layers = layers;
    draft->windows.resize(static_cast<size_t>(layers));
    draft->vocabulary = vocabulary;
    spec = file_.spec;
    spec.draft = draft;
    ModelOptions options;
    options.threads = threads;
    options.chunk = chunk;
    target = std::make_unique<Model>(spec, options);
    drafter = std::make_unique<DraftModel>(*target);
  }

  ModelSpec spec;
  std::unique_ptr<Model> target;
  std::unique_ptr<DraftModel> drafter;

 private:
  check::ModelFile file_;
};

std::vector<int32_t> some_tokens(int count) {
  std::vector<int32_t> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back((i * 37 + i / 5) % 80);
  return tokens;
}

// A chain with `width` candidates at each depth.
TreePlan chain_plan(int depth, int width = 1) {
  TreePlan plan;
  for (int d = 1, parent = 0; d <= depth; ++d) {
    const int first = plan.count;
    for (int rank = 0; rank < width; ++rank, ++plan.count) {
      plan.parents[plan.count] = static_cast<uint8_t>(parent);
      plan.ranks[plan.count] = static_cast<uint8_t>(rank);
      plan.depths[plan.count] = static_cast<uint8_t>(d);
    }
    parent = first;
  }
  plan.depth = depth;
  return plan;
}

// The chain proposed after `history`.
std::vector<int32_t> propose(DraftModel& drafter, const std::vector<int32_t>& history, Drafted* drafted,
                             const Sampling& sampling, const TreePlan& plan) {
  TokenCounts counts(80, 400);
  const int size = static_cast<int>(history.size());
  counts.follow(history.data(), size, size);
  const DraftContext context{history.data(), size - 1, kPages, &sampling, drafted, nullptr, &kNever, &counts};
  DraftTree tree;
  tree.reset(history.back(), 80, kMaxTreeTokens, kMaxTreeTokens);
  const int distinct = counts.size();
  if (drafter.propose(context, plan, tree) != Status::kOk) return {-1};
  CHECK_EQ(counts.size(), distinct);  // what it added is gone
  std::vector<int32_t> chain;
  for (int node = 1, parent = 0; node < tree.count(); ++node) {
    if (tree.parent(node) != parent || tree.rank(node) != 0) continue;
    chain.push_back(tree.token(node));
    parent = node;
  }
  return chain;
}

// What plain decoding emits after `history`.
std::vector<int32_t> decode(const ModelSpec& spec, std::vector<int32_t> history, const Sampling& sampling, int count) {
  LocalSession sequence(spec, {});
  TokenCounts counts(spec.vocabulary, spec.context);
  const int prompt = static_cast<int>(history.size());
  Sampler sampler(sequence.model().kernels(), spec.vocabulary);
  sequence.prefill(history, 64);
  std::vector<int32_t> out;
  while (static_cast<int>(out.size()) < count) {
    const int position = static_cast<int>(history.size()) - 1;
    std::vector<float> logits = sequence.decode(history.back(), position);
    RoundToken token{};
    counts.follow(history.data(), position + 1, prompt);
    if (sampler.sample(logits.data(), position + 1, sampling, token, &counts) != Status::kOk) return {};
    history.push_back(token.token);
    out.push_back(token.token);
  }
  return out;
}

Sampling sampled(float temperature) {
  Sampling sampling;
  sampling.temperature = temperature;
  sampling.seed = 99;
  return sampling;
}

}  // namespace

TEST(a_draft_that_is_the_target_proposes_what_decoding_emits) {
  const LogitBias bias[] = {{3, 2.0F}, {17, -1.0F}};
  for (const int threads : {1, 2}) {
    Pair pair(threads);
    for (int variant = 0; variant < 7; ++variant) {
      Sampling sampling = sampled(variant == 0 || variant == 5 ? 0.0F : 0.2F * static_cast<float>(variant));
      if (variant == 2) sampling.top_k = 5;
      if (variant == 3) sampling.top_p = 0.8F;
      if (variant == 3) sampling.min_p = 0.05F;
      if (variant == 4) sampling.bias = bias, sampling.bias_count = 2;
      if (variant >= 5) sampling.repetition_penalty = 1.5F, sampling.frequency_penalty = 0.8F;
      if (variant == 6) sampling.presence_penalty = -1.0F;
      const std::vector<int32_t> history = some_tokens(150);
      Drafted drafted;
      const std::vector<int32_t> chain = propose(*pair.drafter, history, &drafted, sampling, chain_plan(8));
      CHECK(chain == decode(pair.spec, history, sampling, 8));
      CHECK_EQ(drafted.model, 149);  // the root is not in the target's cache yet
      CHECK(propose(*pair.drafter, history, nullptr, sampling, chain_plan(8)) == chain);  // no cache to lean on
    }
  }
}

TEST(the_cache_follows_acceptance_and_rejection) {
  Pair pair(1, 2);
  const Sampling sampling = sampled(0.9F);
  for (int agreed = 0; agreed <= 5; ++agreed) {
    std::vector<int32_t> history = some_tokens(70);
    Drafted drafted;
    const std::vector<int32_t> chain = propose(*pair.drafter, history, &drafted, sampling, chain_plan(5, 3));
    REQUIRE(chain.size() == 5);
    // The round emits `agreed` tokens of the chain, then another one.
    history.insert(history.end(), chain.begin(), chain.begin() + agreed);
    history.push_back(agreed < 5 ? (chain[static_cast<size_t>(agreed)] + 1) % 80 : 8);
    pair.drafter->observe({history.data() + 70, agreed + 1, 69, true});
    CHECK_EQ(drafted.model, 70 + std::min(agreed, 4));  // the chain's last token was never fed
    // A cache that was rolled back proposes what one made from scratch does.
    const std::vector<int32_t> next = propose(*pair.drafter, history, &drafted, sampling, chain_plan(5));
    Pair fresh(1, 2);
    Drafted nothing;
    CHECK(next == propose(*fresh.drafter, history, &nothing, sampling, chain_plan(5)));
  }
}

TEST(a_round_that_others_drafted_or_that_was_cut_leaves_the_cache_right) {
  Pair pair;
  const Sampling greedy;
  std::vector<int32_t> history = some_tokens(70);
  Drafted drafted;
  (void)propose(*pair.drafter, history, &drafted, greedy, chain_plan(4));
  CHECK_EQ(drafted.model, 69);
  history.push_back(5);
  history.push_back(6);
  pair.drafter->observe({history.data() + 51, 2, 50, true});  // of another round
  CHECK_EQ(drafted.model, 69);
  const std::vector<int32_t> chain = propose(*pair.drafter, history, &drafted, greedy, chain_plan(4));
  CHECK_EQ(drafted.model, 71);
  std::vector<int32_t> emitted = history;
  emitted.insert(emitted.end(), chain.begin(), chain.begin() + 2);
  pair.drafter->observe({emitted.data() + 72, 2, 71, true});  // cut after two tokens of the chain
  CHECK_EQ(drafted.model, 73);                                // the last one is not in the target's cache
  pair.drafter->observe({emitted.data() + 72, 2, 71, true});  // once only
  CHECK_EQ(drafted.model, 73);
}

TEST(prefill_fills_the_draft_s_cache_only_for_requests_that_may_use_it) {
  Pair pair(2);
  const std::vector<int32_t> tokens = some_tokens(130);
  const Sampling greedy;
  Drafted drafted;
  const auto feed = [&](int start, int count, DrafterKind speculation, Drafted* where) {
    return pair.drafter->prefill({tokens.data() + start, count, start, kPages, where, speculation}, kNever);
  };
  CHECK(feed(0, 64, DrafterKind::kNone, &drafted) == Status::kOk);
  CHECK(feed(0, 64, DrafterKind::kSuffix, &drafted) == Status::kOk);
  CHECK(feed(0, 64, DrafterKind::kMedusa, &drafted) == Status::kOk);
  CHECK(feed(0, 64, DrafterKind::kDraft, nullptr) == Status::kOk);
  CHECK_EQ(drafted.model, 0);
  CHECK(feed(10, 54, DrafterKind::kDraft, &drafted) == Status::kOk);  // a gap: left to propose()
  CHECK_EQ(drafted.model, 0);
  CHECK(feed(0, 64, DrafterKind::kDraft, &drafted) == Status::kOk);
  CHECK_EQ(drafted.model, 64);
  CHECK(feed(50, 50, DrafterKind::kAuto, &drafted) == Status::kOk);  // overlaps what is there
  CHECK_EQ(drafted.model, 100);
  CHECK(feed(60, 20, DrafterKind::kAuto, &drafted) == Status::kOk);
  CHECK_EQ(drafted.model, 100);
  CHECK(propose(*pair.drafter, tokens, &drafted, greedy, chain_plan(6)) == decode(pair.spec, tokens, greedy, 6));
  CHECK_EQ(drafted.model, 129);
}

TEST(what_was_missed_can_be_read_ahead_of_a_proposal) {
  Pair pair;
  const Sampling greedy;
  const std::vector<int32_t> history = some_tokens(150);
  Drafted drafted;
  const auto at = [&](int32_t position, Drafted* where) {
    return DraftContext{history.data(), position, kPages, &greedy, where, nullptr, &kNever};
  };
  CHECK_EQ(pair.drafter->missed(at(149, nullptr)), 0);  // nothing would be kept
  CHECK_EQ(pair.drafter->missed(at(8, &drafted)), 0);   // read with the root
  CHECK_EQ(pair.drafter->missed(at(149, &drafted)), 149);
  CHECK(pair.drafter->catch_up(at(149, &drafted)) == Status::kOk);
  CHECK_EQ(drafted.model, 149);
  CHECK_EQ(pair.drafter->missed(at(149, &drafted)), 0);
  CHECK(propose(*pair.drafter, history, &drafted, greedy, chain_plan(6)) == decode(pair.spec, history, greedy, 6));
  pair.drafter->prepare();
  CHECK(pair.drafter->catch_up_ns(10) > 0.0);
}

TEST(an_abort_leaves_drafted_as_it_was) {
  Pair pair(1, 3, 80, 16);
  const std::vector<int32_t> history = some_tokens(90);
  const std::atomic<bool> aborted{true};
  const Sampling greedy;
  Drafted drafted{.model = 20, .eagle = {}, .dflash = {}};
  const DraftContext context{history.data(), 89, kPages, &greedy, &drafted, nullptr, &aborted};
  DraftTree tree;
  tree.reset(history.back(), 80, 64, 63);
  CHECK(pair.drafter->propose(context, chain_plan(3), tree) == Status::kAborted);
  CHECK_EQ(drafted.model, 20);
  CHECK(pair.drafter->prefill({history.data() + 20, 16, 20, kPages, &drafted, DrafterKind::kDraft}, aborted) ==
        Status::kAborted);
  CHECK_EQ(drafted.model, 20);
}

TEST(alternatives_hang_off_the_chain_and_are_the_next_by_the_rule) {
  Pair pair;
  const std::vector<int32_t> history = some_tokens(20);
  const Sampling sampling = sampled(1.0F);
  const DraftContext context{history.data(), 19, kPages, &sampling, nullptr, nullptr, &kNever};
  TreePlan plan = chain_plan(3, 3);
  plan.parents[plan.count] = 2;  // below an alternative: the draft knows nothing there
  plan.ranks[plan.count] = 0;
  plan.depths[plan.count++] = 2;
  DraftTree tree;
  tree.reset(history.back(), 80, 64, 63);
  REQUIRE(pair.drafter->propose(context, plan, tree) == Status::kOk);
  CHECK_EQ(tree.count(), 10);
  CHECK_EQ(tree.deepest(), 3);
  // With the better ones banned, decoding emits the alternative.
  LogitBias bias[2];
  for (int rank = 0; rank < 3; ++rank) {
    Sampling banned = sampling;
    banned.bias = bias;
    banned.bias_count = rank;
    CHECK_EQ(decode(pair.spec, history, banned, 1)[0], tree.token(1 + rank));
    if (rank < 2) bias[rank] = {tree.token(1 + rank), -1e30F};
  }
}

TEST(a_chain_that_no_longer_pays_stops) {
  Pair pair;
  const std::vector<int32_t> history = some_tokens(20);
  const Sampling greedy;
  TreePlan plan = chain_plan(6);
  CHECK_EQ(propose(*pair.drafter, history, nullptr, greedy, plan).size(), 6U);
  plan.least_survival = 0.6F;  // at first every lead counts as 0.8
  CHECK_EQ(propose(*pair.drafter, history, nullptr, greedy, plan).size(), 3U);
  plan.least_survival = 1.1F;
  CHECK_EQ(propose(*pair.drafter, history, nullptr, greedy, plan).size(), 1U);
}

TEST(statistics_learn_and_forget) {
  LeadStatistics statistics;
  CHECK(LeadStatistics::classify(0.0F) < LeadStatistics::classify(1.0F));
  CHECK(LeadStatistics::classify(1.0F) < LeadStatistics::classify(3.0F));
  CHECK_EQ(LeadStatistics::classify(100.0F), LeadStatistics::classify(1e30F));
  for (int i = 0; i < 2000; ++i) statistics.record(3, true);
  CHECK(statistics.acceptance(3) > 0.97F);
  CHECK(statistics.acceptance(4) < 0.9F);
  for (int i = 0; i < 600; ++i) statistics.record(3, false);
  CHECK(statistics.acceptance(3) < 0.1F);
}

TEST(tokens_and_biases_beyond_the_draft_s_vocabulary_do_no_harm) {
  Pair pair(1, 3, 70);
  std::vector<int32_t> history = some_tokens(40);
  history[5] = 79;
  history[39] = 75;
  const LogitBias bias[] = {{75, 9.0F}, {60, 30.0F}};
  Sampling sampling = sampled(0.7F);
  sampling.bias = bias;
  sampling.bias_count = 2;
  Drafted drafted;
  const std::vector<int32_t> chain = propose(*pair.drafter, history, &drafted, sampling, chain_plan(4));
  CHECK(chain == std::vector<int32_t>(4, 60));
}

TEST(a_vocabulary_that_is_padded_further_proposes_only_what_the_target_knows) {
  Pair pair(1, 3, 96);  // rows 80 to 95 of the lm_head: padding that wins against half of the others
  for (int start = 0; start < 20; ++start) {
    const std::vector<int32_t> history(30, start * 3);
    CHECK_EQ(propose(*pair.drafter, history, nullptr, sampled(1.5F), chain_plan(4)).size(), 4U);
  }
}

TEST(near_the_end_of_the_context_the_chain_is_shorter) {
  Pair pair;
  const Sampling greedy;
  const std::vector<int32_t> history = some_tokens(510);
  CHECK_EQ(propose(*pair.drafter, history, nullptr, greedy, chain_plan(6)).size(), 3U);
  CHECK_EQ(propose(*pair.drafter, some_tokens(512), nullptr, greedy, chain_plan(6)).size(), 1U);
}

TEST(costs_are_measured_and_the_team_and_pages_are_the_target_s) {
  Pair pair(2);
  pair.drafter->prepare();
  CHECK(pair.drafter->cost_ns(1) > 0);
  CHECK_EQ(pair.drafter->cost_ns(5), 5 * pair.drafter->cost_ns(1));
  CHECK_EQ(pair.drafter->cost_ns(0), 0);
  CHECK(pair.drafter->model().team() == pair.target->team());
  CHECK_EQ(pair.drafter->model().cache().pages(), pair.target->cache().pages());
  CHECK(!pair.drafter->branches());
}

TEST(bad_drafts_are_refused_by_name) {
  const auto refusal = [](auto change) -> std::string {
    const check::ModelFile file;
    ModelSpec spec = file.spec;
    auto draft = std::make_shared<ModelSpec>(file.spec);
    change(*draft);
    spec.draft = draft;
    try {
      const Model target(spec, {});
      const DraftModel drafter(target);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "accepted";
  };
  CHECK_EQ(refusal([](ModelSpec&) {}), "accepted");
  CHECK_EQ(refusal([](ModelSpec& draft) { draft.tensors.erase("layers.1.qkv.weight"); }),
           "draft: tensor layers.1.qkv.weight: missing");
  CHECK_EQ(refusal([](ModelSpec& draft) { draft.context = 511; }),
           "draft.context: must not be shorter than the target's");
  CHECK_EQ(refusal([](ModelSpec& draft) { draft.head_dim = 15; }), "draft.head_dim: must be even, 2 to 1024");
  CHECK_EQ(refusal([](ModelSpec& draft) { draft.draft = std::make_shared<ModelSpec>(); }),
           "draft: must not have drafters of its own");
  const check::ModelFile file;
  const Model alone(file.spec, {});
  CHECK_THROWS(DraftModel(alone), std::invalid_argument);
}
