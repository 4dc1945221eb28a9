// Medusa heads against a naive evaluation, and the trees that their drafter proposes.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

#include "base/gumbel.h"
#include "check.h"
#include "cpu/medusa.h"
#include "medusa_file.h"

using namespace ull;
using namespace ull::cpu;

namespace {

const std::atomic<bool> kNever{false};

ModelOptions options(int threads, int chunk = 64) {
  ModelOptions result;
  result.threads = threads;
  result.chunk = chunk;
  return result;
}

std::vector<float> some_hidden(unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> hidden(64);
  for (float& value : hidden) value = normal(random);
  return hidden;
}

// The model's lm_head, row by row, from its own products with unit vectors.
check::DenseMatrix dense_lm_head(Model& model) {
  const int rows = model.spec().vocabulary, columns = model.spec().hidden;
  check::DenseMatrix dense{rows, columns, std::vector<double>(static_cast<size_t>(rows * columns)),
                           std::vector<double>(static_cast<size_t>(rows))};
  std::vector<float> unit(static_cast<size_t>(columns)), logits(static_cast<size_t>(rows));
  for (int k = 0; k < columns; ++k) {
    unit.assign(unit.size(), 0.0F);
    unit[static_cast<size_t>(k)] = 1.0F;
    model.head_logits(unit.data(), 1, logits.data());
    for (int r = 0; r < rows; ++r) {
      dense.values[static_cast<size_t>(r * columns + k)] = static_cast<double>(logits[static_cast<size_t>(r)]);
    }
  }
  return dense;
}

// A complete tree of `width` candidates per node.
TreePlan full_plan(int depth, int width, int most) {
  TreePlan plan;
  for (int i = 0; i < plan.count; ++i) {
    if (plan.depths[i] == depth) continue;
    for (int rank = 0; rank < width && plan.count < most; ++rank) {
      plan.parents[plan.count] = static_cast<uint8_t>(i);
      plan.ranks[plan.count] = static_cast<uint8_t>(rank);
      plan.depths[plan.count] = static_cast<uint8_t>(plan.depths[i] + 1);
      ++plan.count;
    }
  }
  plan.depth = plan.depths[plan.count - 1];
  return plan;
}

DraftContext context_of(const int32_t* history, int32_t position, const Sampling& sampling, const float* hidden) {
  static const int32_t pages[] = {0, 1, 2, 3, 4, 5, 6, 7};
  return {history, position, pages, &sampling, nullptr, hidden, &kNever};
}

}  // namespace

TEST(heads_agree_with_a_naive_evaluation) {
  for (const bool own_lm_head : {false, true}) {
    for (const bool fp8 : {false, true}) {
      for (const int layers : {1, 2, 3}) {
        const check::MedusaFile file(4, layers, own_lm_head, fp8);
        std::vector<float> first;
        for (const int threads : {1, 2, 3}) {
          Model model(file.model.spec, options(threads, threads == 3 ? 3 : 64));  // a chunk of 3: fewer than heads
          const check::DenseMatrix lm_head = dense_lm_head(model);
          MedusaHeads heads(model);
          REQUIRE(heads.heads() == 4);
          CHECK(heads.bytes() > 4 * layers * 64 * 64);
          const std::vector<float> hidden = some_hidden(3);
          for (const int count : {1, 3, 4}) {
            std::vector<float> logits(static_cast<size_t>(count) * 80, -1.0F);
            heads.run(hidden.data(), count, logits.data());
            for (int head = 0; head < count; ++head) {
              const std::vector<double> expected = file.reference(head, hidden, lm_head);
              double largest = 0.0;
              for (const double value : expected) largest = std::max(largest, std::abs(value));
              for (size_t token = 0; token < 80; ++token) {
                const double actual = static_cast<double>(logits[static_cast<size_t>(head) * 80 + token]);
                CHECK(std::abs(actual - expected[token]) < 2e-5 * largest);
              }
            }
            if (count == 4 && first.empty()) first = logits;
            if (count == 4) CHECK(logits == first);  // to the bit, for any number of threads
          }
        }
      }
    }
  }
}

TEST(candidates_are_ranked_by_the_rule_with_the_request_s_noise) {
  const check::MedusaFile file(3, 1, false, true);
  Model model(file.model.spec, options(2));
  MedusaHeads heads(model);
  MedusaDrafter drafter(model), uncoupled(model, false);
  const std::vector<float> hidden = some_hidden(5);
  std::vector<float> logits(3 * 80);
  heads.run(hidden.data(), 3, logits.data());
  const std::vector<int32_t> history(41, 7);
  const LogitBias bias[] = {{11, 4.0F}, {12, -INFINITY}};
  for (const float temperature : {0.0F, 0.8F}) {
    for (const bool coupled : {true, false}) {
      Sampling sampling;
      sampling.temperature = temperature;
      sampling.seed = 1234567890123;
      sampling.bias = bias;
      sampling.bias_count = 2;
      DraftTree tree;
      tree.reset(7, 80, 64, 63);
      Drafter& chosen = coupled ? drafter : uncoupled;
      REQUIRE(chosen.propose(context_of(history.data(), 40, sampling, hidden.data()), full_plan(3, 3, 40), tree) ==
              Status::kOk);
      CHECK_EQ(tree.count(), 40);
      for (int node = 1; node < tree.count(); ++node) {
        const int depth = tree.depth(node);
        std::vector<double> score(80);
        for (int token = 0; token < 80; ++token) {
          double value = static_cast<double>(logits[static_cast<size_t>((depth - 1) * 80 + token)]);
          for (const LogitBias& one : bias) value += token == one.token ? static_cast<double>(one.bias) : 0.0;
          if (temperature > 0.0F && coupled) {
            value = value / static_cast<double>(temperature) +
                    static_cast<double>(gumbel(sampling.seed, 40 + depth, token));
          }
          score[static_cast<size_t>(token)] = value;
        }
        std::vector<int> order(80);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(),
                         [&](int a, int b) { return score[static_cast<size_t>(a)] > score[static_cast<size_t>(b)]; });
        CHECK_EQ(tree.token(node), order[static_cast<size_t>(tree.rank(node))]);
      }
    }
  }
}

TEST(a_plan_deeper_than_the_heads_is_cut_and_without_a_hidden_state_nothing_is_proposed) {
  const check::MedusaFile file(2, 1, true, false);
  Model model(file.model.spec, options(1));
  MedusaDrafter drafter(model);
  drafter.prepare();
  CHECK_EQ(drafter.max_depth(), 2);
  CHECK(drafter.branches());
  CHECK(drafter.kind() == DrafterKind::kMedusa);
  CHECK_EQ(drafter.cost_ns(0), 0);
  CHECK(drafter.cost_ns(1) > 0 && drafter.cost_ns(99) == drafter.cost_ns(2));
  const std::vector<int32_t> history(10, 7);
  const std::vector<float> hidden = some_hidden(1);
  const Sampling greedy;
  DraftTree tree;
  tree.reset(7, 80, 64, 63);
  REQUIRE(drafter.propose(context_of(history.data(), 9, greedy, hidden.data()), full_plan(5, 1, 64), tree) ==
          Status::kOk);
  CHECK_EQ(tree.deepest(), 2);
  CHECK(drafter.confidence(context_of(history.data(), 9, greedy, hidden.data())) >= 0);
  CHECK_EQ(drafter.confidence(context_of(history.data(), 9, greedy, nullptr)), -1);
  tree.reset(7, 80, 64, 63);
  REQUIRE(drafter.propose(context_of(history.data(), 9, greedy, nullptr), full_plan(2, 1, 64), tree) == Status::kOk);
  CHECK_EQ(tree.count(), 1);
  tree.reset(7, 80, 3, 63);  // the tree's own limit wins over the plan
  REQUIRE(drafter.propose(context_of(history.data(), 9, greedy, hidden.data()), full_plan(2, 4, 21), tree) ==
          Status::kOk);
  CHECK_EQ(tree.count(), 3);
  std::atomic<bool> aborted{true};
  DraftContext context = context_of(history.data(), 9, greedy, hidden.data());
  context.abort = &aborted;
  CHECK(drafter.propose(context, full_plan(2, 1, 64), tree) == Status::kAborted);
}

TEST(logits_that_are_not_finite_propose_nothing) {
  const check::MedusaFile file(2, 1, true, false);
  Model model(file.model.spec, options(1));
  MedusaDrafter drafter(model);
  std::vector<float> hidden = some_hidden(1);
  hidden[5] = NAN;
  const std::vector<int32_t> history(10, 7);
  const Sampling greedy;
  DraftTree tree;
  tree.reset(7, 80, 64, 63);
  REQUIRE(drafter.propose(context_of(history.data(), 9, greedy, hidden.data()), full_plan(2, 2, 64), tree) ==
          Status::kOk);
  CHECK_EQ(tree.count(), 1);
}

TEST(corrupt_heads_are_refused_by_name) {
  const auto refusal = [](auto change) -> std::string {
    const check::MedusaFile file(2, 1, true, true);
    change(*file.medusa);
    try {
      Model model(file.model.spec, options(1));
      const MedusaHeads heads(model);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "accepted";
  };
  CHECK_EQ(refusal([](MedusaSpec&) {}), "accepted");
  CHECK_EQ(refusal([](MedusaSpec& spec) { spec.heads = 3; }), "tensor medusa.2.0.weight: missing");
  CHECK_EQ(refusal([](MedusaSpec& spec) { spec.layers = 2; }), "tensor medusa.0.1.weight: missing");
  CHECK_EQ(refusal([](MedusaSpec& spec) { spec.tensors.erase("medusa.1.0.scale"); }),
           "tensor medusa.1.0.scale: missing");
  CHECK_EQ(refusal([](MedusaSpec& spec) { spec.tensors["medusa.1.0.weight"].shape = {1, 128, 32}; }),
           "tensor medusa.1.0.weight: shape [1, 128, 32], expected [2, 64, 32]");
  CHECK_EQ(refusal([](MedusaSpec& spec) { spec.heads = 0; }), "medusa.heads: must be 1 to 12");
  CHECK_EQ(refusal([](MedusaSpec& spec) { spec.heads = 13; }), "medusa.heads: must be 1 to 12");
  CHECK_EQ(refusal([](MedusaSpec& spec) { spec.layers = 0; }), "medusa.layers: must be 1 to 16");
  CHECK_EQ(refusal([](MedusaSpec& spec) {
             spec.tensors["medusa.0.lm_head.weight"].offset = 1 << 30;
           }).starts_with("tensor medusa.0.lm_head.weight: reaches beyond the end"),
           true);
}
