// What steps cost, learnt from steps, and how well that tells what requests will take.
#include <cmath>
#include <random>

#include "check.h"
#include "engine/costs.h"

namespace {

using ull::DrafterKind;
using ull::Regression;
using ull::StepCosts;

bool near(double value, double expected, double share) { return std::abs(value - expected) <= share * expected; }

TEST(a_plane_is_found_again) {
  Regression<3> fit({1e3, 1e3, 1e3});
  std::mt19937 random(3);
  std::uniform_real_distribution<double> uniform(0, 4);
  for (int i = 0; i < 500; ++i) {
    const Regression<3>::Vector x{1, uniform(random), uniform(random)};
    fit.add(x, 1e5 + 3e6 * x[1] + 7e5 * x[2]);
  }
  CHECK(near(fit.at({1, 2, 1}), 1e5 + 6e6 + 7e5, 0.001));
  CHECK(fit.spread() < 0.001);
}

TEST(it_follows_a_machine_that_becomes_slower_and_shrugs_off_a_hiccup) {
  Regression<2> fit({1e3, 1e3});
  for (int i = 0; i < 200; ++i) fit.add({1, i / 200.0}, 1e6);
  fit.add({1, 1}, 1e9);
  CHECK(near(fit.at({1, 1}), 1e6, 0.25));
  for (int i = 0; i < 400; ++i) fit.add({1, 1}, 2e6);
  CHECK(near(fit.at({1, 1}), 2e6, 0.05));
}

// Always the same x tells nothing of the other directions: they neither drift nor blow up.
TEST(what_is_always_the_same_stays_known) {
  Regression<3> fit({1e3, 1e3, 1e3});
  for (int i = 0; i < 100'000; ++i) fit.add({1, 4, 0}, 5e6);
  CHECK(near(fit.at({1, 4, 0}), 5e6, 0.001));
  fit.add({1, 0.25, 0}, 1e6);
  for (int i = 0; i < 20; ++i) fit.add({1, i % 2 == 0 ? 0.25 : 4, 0}, i % 2 == 0 ? 1e6 : 5e6);
  CHECK(near(fit.at({1, 4, 0}), 5e6, 0.05));
  CHECK(near(fit.at({1, 0.25, 0}), 1e6, 0.2));
}

TEST(chunks_and_rounds) {
  StepCosts costs;
  CHECK_EQ(costs.prefill(0, 1000, 256).ns, 0.0);  // nothing is known yet
  for (int turn = 0; turn < 30; ++turn) {
    for (const int count : {256, 16, 100}) {
      for (const int position : {0, 512, 2048}) {
        costs.learn_prefill(count, position, 200'000 + 10'000 * count + 5 * count * (position + count / 2));
      }
    }
  }
  const double chunks = 2 * (200'000 + 10'000.0 * 256) + 5 * 256.0 * (128 + 256 + 128);
  CHECK(near(costs.prefill(0, 512, 256).ns, chunks, 0.05));
  CHECK_EQ(costs.prefill(512, 512, 256).ns, 0.0);
  for (int position = 0; position < 400; ++position) {
    costs.learn_round(DrafterKind::kNone, 1, position, 1'000'000 + 100 * position);
    costs.learn_round(DrafterKind::kSuffix, 3, position, 1'500'000);
  }
  CHECK(near(costs.decode(DrafterKind::kNone, 0, 100).ns, 100 * 1'005'000.0, 0.02));
  CHECK(near(costs.decode(DrafterKind::kSuffix, 0, 100).ns, 100 * 500'000.0, 0.02));
  CHECK(near(costs.decode(DrafterKind::kMedusa, 0, 100).ns, 100 * 1'005'000.0,
             0.02));  // as plain ones, until it is known
}

// A few rounds at a text's beginning, which vary, tell nothing of its end.
TEST(what_is_near_does_not_foretell_what_is_far) {
  std::mt19937 random(9);
  for (int turn = 0; turn < 100; ++turn) {
    StepCosts costs;
    for (int position = 10; position < 18; ++position) {
      costs.learn_round(DrafterKind::kNone, 1, position, 800'000 + static_cast<int64_t>(random() % 400'000));
    }
    CHECK(near(costs.decode(DrafterKind::kNone, 20, 900).ns, 900 * 1e6, 0.25));
  }
}

TEST(what_varies_has_a_margin) {
  StepCosts costs;
  for (int i = 0; i < 400; ++i) costs.learn_round(DrafterKind::kNone, 1, i % 50, i % 2 == 0 ? 1'200'000 : 800'000);
  const StepCosts::Estimate one = costs.decode(DrafterKind::kNone, 20, 1),
                            many = costs.decode(DrafterKind::kNone, 20, 100);
  CHECK(near(one.ns, 1e6, 0.1));
  CHECK(one.margin > 0.3 * one.ns);
  CHECK(many.margin < 0.2 * many.ns);
}

}  // namespace
