// What a DFlash head's drafter proposes, and that no text depends on it.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "base/gumbel.h"
#include "check.h"
#include "cpu/dflash.h"
#include "dflash_file.h"
#include "draft/growth.h"
#include "scripted_constraint.h"
#include "testing/local_decoder.h"

using namespace ull;
using namespace ull::cpu;
using check::DflashFile;
using check::DflashShape;
using test::ScriptedConstraint;
using test::some_tokens_until;

namespace {

const std::atomic<bool> kNever{false};
const int32_t kPages[] = {3, 0, 6, 1, 2, 7, 5, 4};
const LogitBias kBias[] = {{11, 4.0F}, {12, -INFINITY}, {40, -2.0F}};

std::vector<int32_t> some_tokens(int count, int salt = 0) {
  std::vector<int32_t> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back((i * 37 + i / 5 + salt) % 80);
  return tokens;
}

TreePlan plan_of(int count, int depth) {
  TreePlan plan;
  plan.count = count;
  plan.depth = depth;
  return plan;
}

// A drafter with taps of `history` in its ring, and what it has read of the sequence.
struct Bench {
  // begin, end: the positions whose taps are there; end -1: all.
  explicit Bench(const DflashFile& file, int length = 100, bool coupled = true, int begin = 0, int end = -1,
                 int64_t most_exact = DflashDrafter::kMostExact)
      : model(file.model.spec, model_options()),
        ring({0, 2, 3}, 64, 160),
        drafter(model, ring, coupled, most_exact),
        history(some_tokens(length + 1)) {
    put_taps(begin, end < 0 ? length : end);
  }

  static ModelOptions model_options() {
    ModelOptions options;
    options.threads = 2;
    options.chunk = 64;
    return options;
  }

  void put_taps(int begin, int end) {
    for (int p = begin; p < end; ++p) {
      std::mt19937 random(static_cast<unsigned>(p));
      std::normal_distribution<float> normal;
      float row[3 * 64];
      for (float& value : row) value = normal(random);
      ring.put(p, history[static_cast<size_t>(p)], kPages[p / kPageTokens], row);
    }
  }

  [[nodiscard]] DraftContext context(const Sampling& sampling, const std::atomic<bool>& abort = kNever) {
    return {.history = history.data(),
            .position = static_cast<int32_t>(history.size()) - 1,
            .pages = kPages,
            .sampling = &sampling,
            .drafted = &drafted,
            .hidden = nullptr,
            .abort = &abort};
  }

  // The tree for a plan, in which there is room for `depth` more tokens.
  DraftTree propose(const Sampling& sampling, const TreePlan& plan, int depth = 63) {
    DraftTree tree;
    tree.reset(history.back(), 80, 64, depth);
    CHECK(drafter.propose(context(sampling), plan, tree) == Status::kOk);
    return tree;
  }

  Model model;
  TapRing ring;
  DflashDrafter drafter;
  std::vector<int32_t> history;
  Drafted drafted;
};

std::vector<int32_t> children_of(const DraftTree& tree, int parent) {
  std::vector<int32_t> tokens;
  for (int node = 1; node < tree.count(); ++node) {
    if (tree.parent(node) == parent) tokens.push_back(tree.token(node));
  }
  return tokens;
}

std::vector<Sampling> samplings() {
  std::vector<Sampling> all(6);
  all[1].temperature = 0.8F;
  all[1].seed = 7;
  all[1].top_k = 20;
  all[2].top_logprobs = 5;
  all[2].bias = kBias;
  all[2].bias_count = 3;
  all[3].temperature = 1.0F;
  all[3].repetition_penalty = 1.7F;
  all[3].frequency_penalty = 0.9F;
  all[3].presence_penalty = -0.4F;
  all[4].temperature = 1.5F;
  all[4].seed = 99;
  all[4].top_p = 0.9F;
  all[4].min_p = 0.02F;
  all[5].temperature = 4.0F;  // the noise decides, which drafts share
  all[5].seed = 5;
  return all;
}

std::vector<DflashShape> shapes() {
  return {{},
          {.own_embedding = true, .own_lm_head = true, .mapped = true, .anchor_predicts = true, .window = 20},
          {.anchor_predicts = true, .markov = 24, .confidence = true, .block = 16},
          {.own_lm_head = true,
           .anchor_predicts = true,
           .markov = 24,
           .gated = true,
           .confidence = true,
           .reads_markov = true,
           .heads = 3}};
}

void check_equal(const Decoded& a, const Decoded& b) {
  CHECK(!a.failed && !b.failed);
  REQUIRE(a.tokens.size() == b.tokens.size());
  for (size_t i = 0; i < a.tokens.size(); ++i) {
    CHECK_EQ(a.tokens[i].token, b.tokens[i].token);
    CHECK_EQ(std::bit_cast<int32_t>(a.tokens[i].logprob), std::bit_cast<int32_t>(b.tokens[i].logprob));
  }
}

int accepted_of(const Decoded& decoded) {
  int accepted = 0;
  for (const DecodeRound& round : decoded.rounds) {
    if (round.drafter == DrafterKind::kDflash) accepted += round.accepted;
  }
  return accepted;
}

}  // namespace

// Best first, each node's chance the product on its way: what asking for every node's candidates at once would give.
TEST(a_tree_grows_by_its_likeliest_paths_and_asks_only_where_it_must) {
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    const int width = 1 + static_cast<int>(random() % 6), depth = 1 + static_cast<int>(random() % 5);
    float shares[64][6];
    int32_t tokens[6] = {4, 9, 2, 7, 1, 5};
    for (auto& row : shares) {
      std::vector<float> scores(static_cast<size_t>(width));
      for (float& score : scores) score = std::uniform_real_distribution<float>(-3.0F, 0.0F)(random);
      std::sort(scores.begin(), scores.end(), std::greater<>());
      share_out(scores.data(), width, 0.9F, row);
      CHECK(std::abs(std::accumulate(row, row + width, 0.0F) - 0.9F) < 1e-5F);
    }
    const auto key = [&](const DraftTree& tree, int node) {  // of the path, whatever the order of nodes
      uint32_t hash = 17;
      for (int at = node; at > 0; at = tree.parent(at)) hash = hash * 31 + static_cast<uint32_t>(tree.token(at));
      return hash % 64;
    };
    const int nodes = 2 + static_cast<int>(random() % 40);
    DraftTree lazy, eager;
    lazy.reset(0, 80, 64, 63);
    eager.reset(0, 80, 64, 63);
    int asked = 0;
    grow(nodes, lazy, [&](int node) -> Branch {
      ++asked;
      if (lazy.depth(node) == depth) return {};
      return {width, tokens, shares[key(lazy, node)]};
    });
    float chances[64] = {1.0F};
    int next[64] = {};
    while (eager.count() < nodes) {
      int best = -1;
      float most = 0.0F;
      for (int node = 0; node < eager.count(); ++node) {
        if (eager.depth(node) == depth || next[node] == width) continue;
        const float chance = chances[node] * shares[key(eager, node)][next[node]];
        if (chance > most) {
          most = chance;
          best = node;
        }
      }
      if (best < 0) break;
      chances[eager.add(best, tokens[next[best]++])] = most;
    }
    REQUIRE(lazy.count() == eager.count());
    CHECK(std::equal(lazy.tokens(), lazy.tokens() + lazy.count(), eager.tokens()));
    CHECK(std::equal(lazy.parents(), lazy.parents() + lazy.count(), eager.parents()));
    CHECK(asked <= lazy.count());
  }
}

TEST(candidates_are_ranked_by_the_rule_with_the_request_s_noise) {
  for (const bool mapped : {false, true}) {
    const DflashFile file({.own_lm_head = mapped, .mapped = mapped});
    for (const bool coupled : {true, false}) {
      for (const float temperature : {0.0F, 0.3F, 1.0F}) {
        Bench bench(file, 100, coupled);
        Sampling sampling;
        sampling.temperature = temperature;
        sampling.seed = 1234567890123;
        sampling.bias = kBias;
        sampling.bias_count = 3;
        const DraftTree tree = bench.propose(sampling, plan_of(60, 7));
        CHECK_EQ(tree.count(), 60);
        DflashHead head(bench.model);
        REQUIRE(head.read(bench.ring, 100, 0, kPages, kNever) == Status::kOk);
        REQUIRE(head.run(bench.history[100], 8, 100, 0, kPages, kNever) == Status::kOk);
        head.predict(7);
        for (int node = 0; node < tree.count(); ++node) {
          const int depth = tree.depth(node) + 1;
          std::vector<std::pair<double, int32_t>> best;
          for (int32_t token = 0; token < 80 && depth <= 7; ++token) {
            double score = static_cast<double>(head.logits(depth)[token]);
            if (!head.knows(token)) continue;
            for (const LogitBias& one : kBias) score += one.token == token ? static_cast<double>(one.bias) : 0.0;
            if (temperature > 0.0F && coupled) {
              score = score / static_cast<double>(temperature) +
                      static_cast<double>(gumbel(sampling.seed, 100 + depth, token));
            }
            best.emplace_back(-score, token);
          }
          std::sort(best.begin(), best.end());
          const std::vector<int32_t> children = children_of(tree, node);
          REQUIRE(children.size() <= best.size());
          for (size_t rank = 0; rank < children.size(); ++rank) CHECK_EQ(children[rank], best[rank].second);
        }
      }
    }
  }
}

// Below every node all tokens are scored with what its own adds, or where that is too much, the best of the depth.
void check_markov(int64_t most_exact) {
  for (const bool gated : {false, true}) {
    const DflashFile file({.anchor_predicts = true, .markov = 24, .gated = gated});
    for (const float temperature : {0.0F, 0.7F}) {
      Bench bench(file, 100, true, 0, -1, most_exact);
      Sampling sampling;
      sampling.temperature = temperature;
      sampling.seed = 5;
      sampling.bias = kBias;
      sampling.bias_count = 3;
      const DraftTree tree = bench.propose(sampling, plan_of(64, 8));
      CHECK_EQ(tree.count(), 64);
      DflashHead head(bench.model);
      REQUIRE(head.read(bench.ring, 100, 0, kPages, kNever) == Status::kOk);
      REQUIRE(head.run(bench.history[100], 8, 100, 0, kPages, kNever) == Status::kOk);
      head.predict(8);
      Sampler sampler(bench.model.kernels(), 80);
      int reordered = 0;
      for (int node = 0; node < tree.count(); ++node) {
        const int depth = tree.depth(node) + 1;
        const std::vector<int32_t> children = children_of(tree, node);
        if (children.empty()) continue;
        int32_t base[32];
        REQUIRE(sampler.rank(head.logits(depth), 100 + depth, sampling, 32, base) == 32);
        const float* factor = head.markov_factor(depth, tree.token(node));
        std::vector<std::pair<float, int32_t>> best;
        for (int32_t token = 0; token < 80; ++token) {
          if (most_exact == 0 && std::find(base, base + 32, token) == base + 32) continue;
          float score = head.logits(depth)[token] + head.markov_term(factor, token);
          for (const LogitBias& one : kBias) score += one.token == token ? one.bias : 0.0F;
          if (temperature > 0.0F) score = score * (1.0F / temperature) + gumbel(sampling.seed, 100 + depth, token);
          best.emplace_back(-score, token);
        }
        std::sort(best.begin(), best.end());
        for (size_t rank = 0; rank < children.size(); ++rank) {
          CHECK_EQ(children[rank], best[rank].second);
          reordered += children[rank] != base[rank] ? 1 : 0;
        }
      }
      CHECK(reordered > 0);
    }
  }
}

TEST(a_markov_term_orders_the_children_of_each_parent) { check_markov(DflashDrafter::kMostExact); }

TEST(in_a_large_vocabulary_a_markov_term_orders_the_best_children) { check_markov(0); }

TEST(filters_hold_for_candidates_that_are_scored_anew) {
  const DflashFile file({.anchor_predicts = true, .markov = 24});
  Bench bench(file);
  Sampling sampling;
  sampling.temperature = 1.0F;
  sampling.seed = 5;
  const std::vector<int32_t> free = children_of(bench.propose(sampling, plan_of(11, 1)), 0);
  sampling.top_k = 1;
  const std::vector<int32_t> strict = children_of(bench.propose(sampling, plan_of(11, 1)), 0);
  sampling.top_k = 0;
  sampling.top_p = 1e-6F;
  const std::vector<int32_t> nucleus = children_of(bench.propose(sampling, plan_of(11, 1)), 0);
  sampling.top_p = 1.0F;
  sampling.min_p = 1.0F;
  const std::vector<int32_t> least = children_of(bench.propose(sampling, plan_of(11, 1)), 0);
  REQUIRE(free.size() == 10 && strict.size() == 10 && nucleus.size() == 10 && least.size() == 10);
  const Sampling greedy;
  const std::vector<int32_t> by_logit = children_of(bench.propose(greedy, plan_of(11, 1)), 0);
  CHECK(free[0] != by_logit[0]);  // with this seed
  CHECK(strict[0] == by_logit[0] && nucleus[0] == by_logit[0] && least[0] == by_logit[0]);
}

TEST(a_confidence_head_says_how_far_it_pays_to_go) {
  for (const bool reads_markov : {false, true}) {
    DflashFile file({.anchor_predicts = true, .markov = 24, .confidence = true, .reads_markov = reads_markov});
    Bench bench(file);
    const Sampling greedy;
    TreePlan plan = plan_of(64, 8);
    const DraftTree tree = bench.propose(greedy, plan);
    CHECK_EQ(tree.count(), 64);
    DflashHead head(bench.model);
    REQUIRE(head.read(bench.ring, 100, 0, kPages, kNever) == Status::kOk);
    REQUIRE(head.run(bench.history[100], 8, 100, 0, kPages, kNever) == Status::kOk);
    const float accepted = head.confidence(1, bench.history[100]);
    const DraftTree first = bench.propose(greedy, plan_of(11, 1));
    float sum = 0.0F;
    for (int node = 1; node < first.count(); ++node) sum += first.chance(node);
    CHECK_EQ(first.count(), 11);
    CHECK(std::abs(sum - accepted) < 1e-5F);
    for (int node = 1; node < tree.count(); ++node) {
      const int parent = tree.parent(node), depth = tree.depth(node);
      CHECK(tree.chance(node) > 0.0F);
      CHECK(tree.chance(node) <= head.confidence(depth, tree.token(parent)) + 1e-6F);
    }
  }
}

TEST(the_tree_stays_within_the_block_the_plan_and_the_room_that_there_is) {
  for (const bool anchor : {false, true}) {
    const DflashFile file({.anchor_predicts = anchor});
    Bench bench(file);
    bench.drafter.prepare();
    CHECK_EQ(bench.drafter.max_depth(), anchor ? 8 : 7);
    CHECK_EQ(bench.drafter.max_rank(), 10);
    CHECK(bench.drafter.branches());
    CHECK(bench.drafter.kind() == DrafterKind::kDflash);
    CHECK_EQ(bench.drafter.cost_ns(0), 0);
    for (int depth = 1; depth <= bench.drafter.max_depth(); ++depth) {
      CHECK(bench.drafter.cost_ns(depth) >= bench.drafter.cost_ns(depth - 1));
    }
    CHECK(bench.drafter.cost_ns(1) > 0 && bench.drafter.cost_ns(99) == bench.drafter.cost_ns(8));
    CHECK(bench.drafter.weight_bytes() > 0);
    // 8 pages of 2 layers: keys of 16 dimensions, and values that are padded to a tile of 32.
    CHECK_EQ(bench.drafter.kv_bytes(), int64_t{8} * 2 * kPageTokens * (16 + 32) * 4);
    Sampling sure;  // of its best candidates: trees are deep
    sure.temperature = 0.01F;
    const int deepest = anchor ? 8 : 7;
    CHECK_EQ(bench.propose(sure, plan_of(64, 40)).deepest(), deepest);
    CHECK_EQ(bench.propose(sure, plan_of(64, 3)).deepest(), 3);
    for (int room = 0; room < 10; ++room) {
      CHECK_EQ(bench.propose(sure, plan_of(64, 40), room).deepest(), std::min(room, deepest));
    }
  }
  // The last positions of the context.
  const DflashFile file;
  Bench bench(file, 511, true, 400);
  CHECK(bench.drafter.confidence(bench.context({})) >= 0);
  CHECK_EQ(bench.propose({}, plan_of(64, 40), 0).count(), 1);
}

TEST(entries_are_read_as_they_come_and_what_is_missing_is_passed_over) {
  const DflashFile file;
  const Sampling greedy;
  Bench all(file);
  const DraftTree expected = all.propose(greedy, plan_of(30, 7));
  CHECK_EQ(all.drafted.dflash.from, 0);
  CHECK_EQ(all.drafted.dflash.through, 100);
  // With the prompt, in pieces.
  Bench pieces(file);
  for (int at = 0; at < 90; at += 30) {
    CHECK(pieces.drafter.prefill({.tokens = pieces.history.data() + at,
                                  .count = 30,
                                  .start = at,
                                  .pages = kPages,
                                  .drafted = &pieces.drafted,
                                  .speculation = DrafterKind::kDflash,
                                  .history = pieces.history.data()},
                                 kNever) == Status::kOk);
    CHECK_EQ(pieces.drafted.dflash.through, at + 30);
  }
  const DraftTree same = pieces.propose(greedy, plan_of(30, 7));
  CHECK(
      std::equal(same.tokens(), same.tokens() + same.count(), expected.tokens(), expected.tokens() + expected.count()));
  // A prefix that nobody has read, and that has left the ring.
  Bench holed(file, 100, true, 60);
  const DraftTree shorter = holed.propose(greedy, plan_of(30, 7));
  CHECK_EQ(holed.drafted.dflash.from, 60);
  CHECK_EQ(holed.drafted.dflash.through, 100);
  CHECK_EQ(shorter.count(), 30);
  // The tap of the last token is not there: nothing to propose.
  Bench blind(file, 100, true, 0, 99);
  CHECK_EQ(blind.drafter.confidence(blind.context(greedy)), -1);
  CHECK_EQ(blind.propose(greedy, plan_of(30, 7)).count(), 1);
}

TEST(an_abort_leaves_drafted_as_it_was) {
  const DflashFile file;
  const Sampling greedy;
  Bench bench(file);
  const std::atomic<bool> aborted{true};
  DraftTree tree;
  tree.reset(bench.history.back(), 80, 64, 63);
  CHECK(bench.drafter.propose(bench.context(greedy, aborted), plan_of(30, 7), tree) == Status::kAborted);
  CHECK(bench.drafter.keep_up(bench.context(greedy, aborted)) == Status::kAborted);
  CHECK_EQ(bench.drafted.dflash.through, 0);
  CHECK_EQ(bench.propose(greedy, plan_of(30, 7)).count(), 30);
}

TEST(taps_that_are_not_finite_propose_nothing) {
  const DflashFile file({.anchor_predicts = true, .markov = 24, .confidence = true});
  Bench bench(file);
  float row[3 * 64];
  std::fill_n(row, 3 * 64, NAN);
  bench.ring.put(99, bench.history[99], kPages[1], row);
  CHECK_EQ(bench.propose({}, plan_of(30, 7)).count(), 1);
}

TEST(a_copied_page_serves_as_well) {
  const DflashFile file;
  const Sampling greedy;
  Bench bench(file, 50);
  const DraftTree expected = bench.propose(greedy, plan_of(30, 7));
  bench.drafter.copy_page({kPages[0], kPages[2], 50});
  DraftTree tree;
  tree.reset(bench.history.back(), 80, 64, 63);
  const int32_t pages[] = {kPages[2], kPages[1]};
  DraftContext context = bench.context(greedy);
  context.pages = pages;
  REQUIRE(bench.drafter.propose(context, plan_of(30, 7), tree) == Status::kOk);
  CHECK(
      std::equal(tree.tokens(), tree.tokens() + tree.count(), expected.tokens(), expected.tokens() + expected.count()));
}

// Whatever the head proposes, the text is the one of plain rounds, to the bit of its logprobs.
TEST(drafted_texts_are_plain_texts) {
  int accepted = 0;
  for (const DflashShape& shape : shapes()) {
    const DflashFile file(shape);
    LocalDecoder plain(file.model.spec, Bench::model_options(), {});
    LocalDecoder drafting(file.model.spec, Bench::model_options(), SpeculationOptions{.adaptive = false});
    int drawn = 0;
    for (const int length : {1, 2, 65, 150}) {
      for (Sampling sampling : samplings()) {
        sampling.top_logprobs = std::max(sampling.top_logprobs, 0);
        const std::vector<int32_t> prompt = some_tokens(length, drawn++);
        DecodeRequest request{.tokens = prompt, .max_tokens = 40, .sampling = sampling, .pages = kPages};
        const Decoded expected = plain.decode(request);
        request.speculation = drawn % 5 == 0 ? DrafterKind::kAuto : DrafterKind::kDflash;
        request.max_tree = drawn % 2 == 0 ? 0 : 9;
        request.forced = drawn % 3 == 0 ? std::min(length - 1, 12) : 0;
        const Decoded decoded = drafting.decode(request);
        check_equal(decoded, expected);
        accepted += accepted_of(decoded);
        // The same prompt once more, behind the part of it that is in the cache; and one that goes on differently.
        request.cached = (length - 1) / 2;
        check_equal(drafting.decode(request), expected);
      }
    }
  }
  CHECK(accepted > 300);
}

// A prefix that a request without a drafter has left: the head begins behind it.
TEST(a_prefix_without_entries_changes_no_token) {
  const DflashFile file({.anchor_predicts = true, .markov = 24, .confidence = true});
  LocalDecoder decoder(file.model.spec, Bench::model_options(), SpeculationOptions{.adaptive = false});
  Sampling sampling;
  sampling.temperature = 4.0F;
  const std::vector<int32_t> prompt = some_tokens(130);
  DecodeRequest request{.tokens = prompt, .max_tokens = 60, .sampling = sampling};
  const Decoded expected = decoder.decode(request);
  request.speculation = DrafterKind::kDflash;
  for (const int cached : {129, 100, 64, 1}) {
    request.cached = cached;
    const Decoded decoded = decoder.decode(request);
    check_equal(decoded, expected);
    CHECK(accepted_of(decoded) > 0);
    request.speculation = DrafterKind::kNone;
    request.cached = 0;
    check_equal(decoder.decode(request), expected);
    request.speculation = DrafterKind::kDflash;
  }
}

TEST(constrained_texts_are_those_of_plain_rounds) {
  for (const DflashShape& shape : shapes()) {
    const DflashFile file(shape);
    LocalDecoder plain(file.model.spec, Bench::model_options(), {});
    LocalDecoder drafting(file.model.spec, Bench::model_options(), SpeculationOptions{.adaptive = false});
    const std::vector<int32_t> prompt = some_tokens(30);
    for (const Sampling& sampling : samplings()) {
      DecodeRequest request{.tokens = prompt, .max_tokens = 60, .sampling = sampling};
      ScriptedConstraint rule(some_tokens_until(50, 80)), again(some_tokens_until(50, 80));
      request.constraint = &rule;
      const Decoded expected = plain.decode(request);
      request.constraint = &again;
      request.speculation = DrafterKind::kDflash;
      const Decoded decoded = drafting.decode(request);
      CHECK_EQ(decoded.tokens.size(), 50U);
      CHECK(rule.text == again.text);
      CHECK(std::any_of(decoded.rounds.begin(), decoded.rounds.end(),
                        [](const DecodeRound& round) { return round.drafter == DrafterKind::kDflash; }));
    }
  }
}

// The planner decides here, as it does in an engine.
TEST(the_planner_s_choices_change_no_token) {
  const DflashFile file({.anchor_predicts = true, .markov = 24, .confidence = true});
  LocalDecoder plain(file.model.spec, Bench::model_options(), {});
  LocalDecoder planned(file.model.spec, Bench::model_options(), {});
  CHECK(planned.info().drafters[static_cast<size_t>(DrafterKind::kDflash)]);
  CHECK(planned.info().draft_ns[static_cast<size_t>(DrafterKind::kDflash)] > 0);
  CHECK(planned.info().drafter_kv_bytes > 0 && planned.info().drafter_weight_bytes > 0);
  for (const Sampling& sampling : samplings()) {
    const std::vector<int32_t> prompt = some_tokens(70);
    DecodeRequest request{.tokens = prompt, .max_tokens = 200, .sampling = sampling};
    const Decoded expected = plain.decode(request);
    for (const auto speculation : {DrafterKind::kDflash, DrafterKind::kAuto}) {
      request.speculation = speculation;
      check_equal(planned.decode(request), expected);
    }
  }
}
