// What evaluations tap a pass with: E4M3 rounding against its table of values, scales by name, what is counted.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "cpu/e4m3.h"
#include "cpu/offline/evaluate.h"
#include "cpu/offline/fake_quantiser.h"
#include "cpu/offline/observe.h"
#include "exec_model.h"

using namespace ull;
using namespace ull::cpu;

namespace {

// The values of codes 0 .. 126, ascending: 4 bits of exponent with bias 7, 3 of mantissa, subnormals.
std::vector<float> e4m3_values() {
  std::vector<float> values;
  for (int code = 0; code < 127; ++code) {
    const int exponent = code >> 3;
    const auto mantissa = static_cast<float>(code & 7);
    values.push_back(exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8.0F + mantissa, exponent - 10));
  }
  return values;
}

// The nearest of them; of two that are equally near, the one with an even code.
float nearest(const std::vector<float>& values, float magnitude) {
  size_t best = 0;
  for (size_t code = 1; code < values.size(); ++code) {
    const float closer = std::fabs(values[code] - magnitude) - std::fabs(values[best] - magnitude);
    if (closer < 0.0F || (!(closer > 0.0F) && code % 2 == 0)) best = code;
  }
  return values[best];
}

std::vector<int32_t> some_tokens(int count) {
  std::vector<int32_t> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back(i * 37 % 80);
  return tokens;
}

Evaluation quantised_by_token(const ModelSpec& spec, int window, int threads) {
  FakeQuantiser tap(spec.layers);
  return evaluate(spec, some_tokens(150), window, threads, nullptr, &tap);
}

Evaluation quantised(const ModelSpec& spec, const std::map<std::string, float>& scales, int window, int threads) {
  FakeQuantiser tap(scales, spec.layers);
  return evaluate(spec, some_tokens(150), window, threads, nullptr, &tap);
}

}  // namespace

TEST(e4m3_rounds_to_the_nearest_value_ties_to_even_and_saturates) {
  const std::vector<float> values = e4m3_values();
  CHECK_EQ(values.back(), 448.0F);
  const auto check = [&](float value) {
    const float expected = nearest(values, std::fabs(value));
    CHECK_EQ(round_to_e4m3(value), value < 0.0F ? -expected : expected);
  };
  for (size_t code = 0; code + 1 < values.size(); ++code) {
    const float middle = (values[code] + values[code + 1]) / 2.0F;
    for (const float value : {values[code], middle, std::nextafter(middle, 0.0F), std::nextafter(middle, 1e9F)}) {
      check(value);
      check(-value);
    }
  }
  std::mt19937 random(5);
  for (int i = 0; i < 100'000; ++i) {
    const auto value = std::bit_cast<float>(static_cast<uint32_t>(random()));
    if (std::isfinite(value)) check(value);
  }
  CHECK_EQ(round_to_e4m3(std::numeric_limits<float>::infinity()), 448.0F);
  CHECK_EQ(round_to_e4m3(-1e30F), -448.0F);
  CHECK(std::isnan(round_to_e4m3(std::numeric_limits<float>::quiet_NaN())));
}

TEST(fake_quantisation_depends_on_neither_threads_nor_windows_of_other_tokens) {
  const check::ModelFile model;
  const std::map<std::string, float> scales{{"layers.0.qkv", 0.01F},
                                            {"layers.1.o", 0.004F},
                                            {"layers.0.gate_up", 0.02F},
                                            {"layers.2.down", 1e-3F},
                                            {"lm_head", 0.01F}};
  const Evaluation one = quantised(model.spec, scales, 150, 1);
  const Evaluation plain = quantised(model.spec, {}, 150, 1);
  CHECK(one.nll != plain.nll);
  for (const int threads : {2, 3}) CHECK(quantised(model.spec, scales, 150, threads).nll == one.nll);
  const Evaluation by_token = quantised_by_token(model.spec, 150, 1);
  CHECK(by_token.nll != plain.nll && by_token.nll != one.nll);
  for (const int threads : {2, 3}) CHECK(quantised_by_token(model.spec, 150, threads).nll == by_token.nll);
  const Evaluation part = quantised_by_token(model.spec, 50, 2);
  CHECK(std::equal(part.nll.begin(), part.nll.begin() + 49, by_token.nll.begin()));
  // A window of 50: its first 49 predictions are those of the whole text. The last chunk has one token.
  const Evaluation windows = quantised(model.spec, scales, 50, 2);
  CHECK(std::equal(windows.nll.begin(), windows.nll.begin() + 49, one.nll.begin()));
  const Evaluation short_window = quantised(model.spec, scales, 149, 2);
  CHECK(std::equal(short_window.nll.begin(), short_window.nll.end(), one.nll.begin()));
}

TEST(each_token_s_inputs_are_rounded_in_a_scale_of_its_own) {
  FakeQuantiser tap(1);
  const std::vector<float> values = e4m3_values();
  for (const float largest : {1e-20F, 0.3F, 448.0F, 7e8F}) {
    std::vector<float> x{0.25F * largest, -largest, 0.013F * largest, 0.0F};
    const std::vector<float> before = x;
    tap.take(2, 0, x.data(), 4, 1, 1.0F);
    const float scale = largest / kLargestE4m3;
    for (size_t i = 0; i < x.size(); ++i) {
      const float rounded = nearest(values, std::fabs(before[i]) / scale) * scale;
      CHECK(std::fabs(std::fabs(x[i]) - rounded) <= 1e-6F * rounded && std::signbit(x[i]) == std::signbit(before[i]));
    }
    CHECK_EQ(x[1], before[1]);
  }
  std::vector<float> zeros(3, 0.0F), scaled{3.0F * 0x1p64F, 1.0F * 0x1p64F}, plain{3.0F, 1.0F};
  tap.take(0, 0, zeros.data(), 3, 1, 1.0F);
  CHECK(zeros == std::vector<float>(3, 0.0F));
  tap.take(3, 0, scaled.data(), 2, 1, 0x1p64F);
  tap.take(3, 0, plain.data(), 2, 1, 1.0F);
  CHECK(scaled[1] == plain[1] * 0x1p64F && plain[1] != 1.0F);
  tap.take(4, 0, plain.data(), 2, 1, 1.0F);  // the lm_head's
  CHECK_EQ(scaled[1], plain[1] * 0x1p64F);
}

TEST(each_name_is_one_linear) {
  const check::ModelFile model;
  const Evaluation plain = quantised(model.spec, {}, 150, 2);
  std::vector<std::vector<float>> seen{plain.nll};
  for (const std::string& name : linear_names(3)) {
    const std::vector<float> nll = quantised(model.spec, {{name, 0.5F}}, 150, 2).nll;
    CHECK(std::find(seen.begin(), seen.end(), nll) == seen.end());
    seen.push_back(nll);
  }
  CHECK_EQ(seen.size(), 14U);
}

TEST(scales_that_cannot_be_are_named) {
  const auto complaint = [](const std::map<std::string, float>& scales) -> std::string {
    try {
      const FakeQuantiser tap(scales, 3);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "";
  };
  CHECK_EQ(complaint({{"layers.2.o", 1.0F}}), "");
  CHECK_EQ(complaint({{"layers.3.o", 1.0F}, {"head", 1.0F}, {"lm_head", 1.0F}}),
           "input_scales: the model has no linear named head, layers.3.o");
  for (const float scale : {0.0F, -1.0F, std::numeric_limits<float>::infinity(), std::nanf("")}) {
    CHECK_EQ(complaint({{"lm_head", scale}}), "input_scales: that of lm_head must be positive and finite");
  }
}

TEST(every_input_is_counted_once) {
  const check::ModelFile model;
  const Observation one = observe(model.spec, some_tokens(131), 50, 1, nullptr);
  const Observation two = observe(model.spec, some_tokens(131), 50, 2, nullptr);
  CHECK_EQ(one.inputs.size(), 13U);
  CHECK_EQ(one.keys_values.size(), 3U);
  CHECK(one.keys_values == two.keys_values);
  for (size_t i = 0; i < one.inputs.size(); ++i) {
    const ObservedInput& input = one.inputs[i];
    CHECK_EQ(input.name, linear_names(3)[i]);
    CHECK(input.histogram == two.inputs[i].histogram);
    CHECK_EQ(input.largest, two.inputs[i].largest);
    uint64_t total = 0;
    for (const uint64_t count : input.histogram) total += count;
    CHECK_EQ(total, uint64_t{131} * (input.name.ends_with("down") ? 96 : 64));
    CHECK_EQ(input.histogram[std::bit_cast<uint32_t>(input.largest) >> 16] > 0, true);
  }
  for (const std::vector<float>& layer : one.keys_values) {
    CHECK_EQ(layer.size(), 4U);
    for (const float largest : layer) CHECK(largest > 0.0F);
  }
}

TEST(what_is_not_finite_ends_the_observation) {
  const check::ModelFile model(1, std::numeric_limits<float>::infinity());
  CHECK_THROWS(observe(model.spec, some_tokens(10), 10, 1, nullptr), std::runtime_error);
}
