// The kernels of every instruction set against plain double arithmetic, and against one another bit by bit.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "base/float_math.h"
#include "base/gumbel.h"
#include "check.h"
#include "cpu/kernels/kernels.h"
#include "cpu/kv_cache.h"

using namespace ull;
using namespace ull::cpu;

namespace {

std::vector<const Kernels*> tables() {
  std::vector<const Kernels*> found;
  for (const char* isa : {"portable", "avx2", "avx512"}) {
    try {
      found.push_back(&select_kernels(isa));
    } catch (const std::invalid_argument&) {  // not on this machine
    }
  }
  return found;
}

std::vector<float> random_floats(size_t count, float spread, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0F, spread);
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

// E4M3: sign, 4 exponent bits (bias 7), 3 mantissa bits; exponent 0 is subnormal.
float f8_value(uint8_t code) {
  const int exponent = code >> 3 & 15;
  const float mantissa = static_cast<float>(code & 7) / 8.0F;
  const float magnitude = exponent == 0 ? std::ldexp(mantissa, -6) : std::ldexp(1.0F + mantissa, exponent - 7);
  return (code & 0x80) != 0 ? -magnitude : magnitude;
}

int row_of(Format format, int position) {
  return format == Format::kF32 ? position : position % 2 == 0 ? position / 2 : 16 + position / 2;
}

// Random packed tiles and what they mean: value[tile][k][row].
struct Tiles {
  std::vector<uint8_t> packed;
  std::vector<float> values;
};

Tiles random_tiles(Format format, int tiles, int depth, uint32_t seed) {
  Tiles result;
  const size_t count = static_cast<size_t>(tiles) * static_cast<size_t>(depth) * kTileRows;
  result.packed.resize(count * format_bytes(format));
  result.values.resize(count);
  std::mt19937 random(seed);
  for (size_t i = 0; i < count; ++i) {
    float value = std::normal_distribution<float>()(random);
    if (format == Format::kF8) {
      const uint8_t code = static_cast<uint8_t>(random() % 0x7F | (random() & 0x80));  // every code but NaN
      result.packed[i] = code;
      value = f8_value(code);
    } else if (format == Format::kBf16) {
      const uint16_t rounded = round_to_bf16(value);
      std::memcpy(result.packed.data() + 2 * i, &rounded, 2);
      value = std::bit_cast<float>(static_cast<uint32_t>(rounded) << 16);
    } else {
      std::memcpy(result.packed.data() + 4 * i, &value, 4);
    }
    result.values[i / kTileRows * kTileRows + static_cast<size_t>(row_of(format, static_cast<int>(i % kTileRows)))] =
        value;
  }
  return result;
}

constexpr Format kAllFormats[] = {Format::kF8, Format::kBf16, Format::kF32};

float stored_factor(Format format) { return format == Format::kF8 ? 0x1.0p-120F : 1.0F; }

// What each slot of every page was written with stands in its own place, and nothing behind the last dimension.
void check_places(size_t element, KvScale scale) {
  const PageLayout layout{2, 3, 20, element};
  KvCache cache(layout, 2, element == 2 ? Format::kBf16 : Format::kF32);
  const auto value_at = [](int page, int layer, int head, int slot, int d, bool key) {  // an integer bf16 can hold
    return static_cast<float>((page * 7 + layer * 3 + head * 5 + slot * 11 + d * 13 + (key ? 1 : 0)) % 251);
  };
  for (int i = 0; i < 2 * 2 * 3 * kPageKeys; ++i) {
    const int page = i % 2, layer = i / 2 % 2, head = i / 4 % 3, slot = i / 12;
    float key[20], value[20];
    for (int d = 0; d < 20; ++d) {
      key[d] = value_at(page, layer, head, slot, d, true);
      value[d] = value_at(page, layer, head, slot, d, false);
    }
    cache.write(page, layer, head, slot, key, value, scale);
  }
  const Kernels& kernels = portable_kernels();
  const auto unpack = kernels.unpack[static_cast<int>(cache.format())];
  for (int i = 0; i < 2 * 2 * 3; ++i) {
    const int page = i % 2, layer = i / 2 % 2, head = i / 4;
    for (int tile = 0; tile < 2; ++tile) {
      std::vector<float> keys(20 * kTileRows);
      unpack(cache.keys(page, layer, head, tile), 20, keys.data());
      for (int d = 0; d < 20; ++d) {
        for (int row = 0; row < kTileRows; ++row) {
          CHECK_EQ(keys[static_cast<size_t>(d * kTileRows + row)],
                   kept_in(scale.key, value_at(page, layer, head, tile * kTileRows + row, d, true)));
        }
      }
    }
    std::vector<float> values(kPageKeys * kTileRows);
    unpack(cache.values(page, layer, head, 0), kPageKeys, values.data());
    for (int slot = 0; slot < kPageKeys; ++slot) {
      for (int d = 0; d < kTileRows; ++d) {
        CHECK_EQ(values[static_cast<size_t>(slot * kTileRows + d)],
                 d < 20 ? kept_in(scale.value, value_at(page, layer, head, slot, d, false)) : 0.0F);
      }
    }
  }
}

}  // namespace

TEST(every_f8_code_is_decoded_exactly) {
  std::vector<uint8_t> codes(256);
  for (size_t i = 0; i < codes.size(); ++i) codes[i] = static_cast<uint8_t>(i);
  for (const Kernels* kernels : tables()) {
    std::vector<float> out(256);
    kernels->unpack[static_cast<int>(Format::kF8)](codes.data(), 8, out.data());
    for (int i = 0; i < 256; ++i) {
      if ((i & 0x7F) == 0x7F) continue;  // NaN, refused when loading
      const int k = i / kTileRows, position = i % kTileRows;
      CHECK_EQ(std::ldexp(out[static_cast<size_t>(k * kTileRows + row_of(Format::kF8, position))], 120),
               f8_value(static_cast<uint8_t>(i)));
    }
  }
}

TEST(products_are_one_chain_of_fma_in_every_format_width_and_isa) {
  for (const Format format : kAllFormats) {
    for (const int depth : {1, 2, 37, 300}) {
      const Tiles tiles = random_tiles(format, 7, depth, 1);
      const size_t tile_bytes = static_cast<size_t>(depth) * kTileRows * format_bytes(format);
      for (int width = 1; width <= kMaxPanel; ++width) {
        const auto x = random_floats(static_cast<size_t>(depth * width), format == Format::kF8 ? 0x1.0p64F : 1.0F, 2);
        std::vector<float> expected(static_cast<size_t>(7 * width * kTileRows));
        double worst = 0.0;
        for (int tile = 0; tile < 7; ++tile) {
          for (int token = 0; token < width; ++token) {
            for (int row = 0; row < kTileRows; ++row) {
              float chain = 0.0F;
              double exact = 0.0, magnitude = 0.0;
              for (int k = 0; k < depth; ++k) {
                const float w =
                    tiles.values[static_cast<size_t>((tile * depth + k) * kTileRows + row)] * stored_factor(format);
                const float activation = x[static_cast<size_t>(k * width + token)];
                chain = std::fma(w, activation, chain);
                exact += static_cast<double>(w) * static_cast<double>(activation);
                magnitude += std::abs(static_cast<double>(w) * static_cast<double>(activation));
              }
              expected[static_cast<size_t>((tile * width + token) * kTileRows + row)] = chain;
              worst = std::max(worst, std::abs(static_cast<double>(chain) - exact) / magnitude);
            }
          }
        }
        CHECK(worst < 2e-6);
        for (const Kernels* kernels : tables()) {
          std::vector<float> sums(expected.size(), -1.0F);
          const size_t sums_tile = static_cast<size_t>(width) * kTileRows;
          multiply_tiles(*kernels, format, width, 7, tiles.packed.data(), tile_bytes, depth, x.data(), sums.data(),
                         sums_tile, false);
          CHECK(same_bits(sums, expected));
          // In two pieces, the second resuming the first's chains.
          const int half = depth / 2;
          const size_t skip = static_cast<size_t>(half) * kTileRows * format_bytes(format);
          multiply_tiles(*kernels, format, width, 7, tiles.packed.data(), tile_bytes, half, x.data(), sums.data(),
                         sums_tile, false);
          multiply_tiles(*kernels, format, width, 7, tiles.packed.data() + skip, tile_bytes, depth - half,
                         x.data() + half * width, sums.data(), sums_tile, true);
          CHECK(same_bits(sums, expected));
        }
      }
    }
  }
}

TEST(row_major_products_equal_panel_products) {
  for (const Format format : {Format::kBf16, Format::kF32}) {
    const Tiles tile = random_tiles(format, 1, kPageKeys, 3);
    for (int width = 1; width <= kMaxPanel; ++width) {
      const auto rows = random_floats(static_cast<size_t>(width * kPageKeys), 1.0F, 4);
      std::vector<float> panel(rows.size());
      for (int token = 0; token < width; ++token) {
        for (int k = 0; k < kPageKeys; ++k) {
          panel[static_cast<size_t>(k * width + token)] = rows[static_cast<size_t>(token * kPageKeys + k)];
        }
      }
      for (const Kernels* kernels : tables()) {
        std::vector<float> a(static_cast<size_t>(width * kTileRows)), b(a.size());
        multiply_tiles(*kernels, format, width, 1, tile.packed.data(), 0, kPageKeys, panel.data(), a.data(), 0, false);
        kernels->multiply_rows[static_cast<int>(format)][width - 1](tile.packed.data(), 0, kPageKeys, rows.data(),
                                                                    b.data(), 0, false);
        CHECK(same_bits(a, b));
      }
    }
  }
}

TEST(unpacked_weights_are_the_values) {
  for (const Format format : kAllFormats) {
    const Tiles tile = random_tiles(format, 1, 50, 5);
    for (const Kernels* kernels : tables()) {
      std::vector<float> out(50 * kTileRows);
      kernels->unpack[static_cast<int>(format)](tile.packed.data(), 50, out.data());
      for (size_t i = 0; i < out.size(); ++i) CHECK_EQ(out[i], tile.values[i] * stored_factor(format));
    }
  }
}

TEST(exp_and_log_are_accurate_and_the_same_in_every_lane) {
  std::vector<float> x;
  for (float value = -100.0F; value < 100.0F; value += 0.0137F) x.push_back(value);
  double worst = 0.0;
  for (const float value : x) {
    const double exact = std::exp(static_cast<double>(std::min(value, 88.0F)));
    const double got = static_cast<double>(exp_lanes<ScalarMath>(value));
    if (value < -86.0F) {
      CHECK_EQ(got, 0.0);
    } else {
      worst = std::max(worst, std::abs(got - exact) / exact);
    }
  }
  CHECK(worst < 3e-7);
  CHECK(std::isnan(exp_lanes<ScalarMath>(std::nanf(""))));
  CHECK_EQ(exp_lanes<ScalarMath>(0.0F), 1.0F);
  for (const Kernels* kernels : tables()) {
    std::vector<float> out(x.size());
    kernels->exponentials(x.data(), static_cast<int>(x.size()), 0.5F, 0.75F, out.data());
    for (size_t i = 0; i < x.size(); ++i) CHECK_EQ(out[i], exp_lanes<ScalarMath>((x[i] - 0.5F) * 0.75F));
  }
  worst = 0.0;
  for (float value = 6e-8F; value < 20.0F; value *= 1.00037F) {
    const double exact = std::log(static_cast<double>(value));
    worst = std::max(
        worst, std::abs(static_cast<double>(log_lanes<ScalarMath>(value)) - exact) / std::max(std::abs(exact), 1e-30));
  }
  CHECK(worst < 3e-7);
  CHECK_EQ(log_lanes<ScalarMath>(1.0F), 0.0F);
}

TEST(norms_follow_the_definition) {
  for (const int count : {1, 15, 20, 64, 100, 257}) {
    const auto x = random_floats(static_cast<size_t>(count), 3.0F, 6), weight = random_floats(x.size(), 1.0F, 7);
    double squares = 0.0;
    for (const float value : x) squares += static_cast<double>(value) * static_cast<double>(value);
    const double inverse = 1.0 / std::sqrt(squares / count + 1e-5);
    std::vector<float> first;
    for (const Kernels* kernels : tables()) {
      for (const int stride : {1, 5}) {
        std::vector<float> out(static_cast<size_t>(count * stride)), packed;
        kernels->normalise(x.data(), weight.data(), count, 1e-5F, 4.0F, out.data(), stride);
        for (size_t i = 0; i < x.size(); ++i) {
          const float value = out[i * static_cast<size_t>(stride)];
          const double exact = 4.0 * static_cast<double>(x[i]) * inverse * static_cast<double>(weight[i]);
          CHECK(std::abs(static_cast<double>(value) - exact) <= 1e-6 * std::abs(exact));
          packed.push_back(value);
        }
        if (first.empty()) first = packed;
        CHECK(same_bits(packed, first));
      }
    }
  }
}

TEST(silu_and_tile_finish_follow_the_definition) {
  const auto gate = random_floats(kTileRows, 20.0F, 8), up = random_floats(kTileRows, 1.0F, 9);
  std::vector<float> first_silu, first_finish;
  for (const Kernels* kernels : tables()) {
    std::vector<float> out(kTileRows), finished(kTileRows);
    kernels->silu_multiply(gate.data(), up.data(), 2.0F, out.data());
    kernels->finish_tile(gate.data(), up.data(), gate.data(), finished.data());
    for (size_t i = 0; i < kTileRows; ++i) {
      const double g = static_cast<double>(gate[i]);
      const double exact = g / (1.0 + std::exp(-g)) * static_cast<double>(up[i]) * 2.0;
      CHECK(std::abs(static_cast<double>(out[i]) - exact) <= 1e-6 * std::abs(exact) + 1e-30);
      CHECK_EQ(finished[i], gate[i] * up[i] + gate[i]);
    }
    if (first_silu.empty()) first_silu = out, first_finish = finished;
    CHECK(same_bits(out, first_silu));
    CHECK(same_bits(finished, first_finish));
  }
}

TEST(rotation_keeps_pairs_and_follows_the_definition) {
  for (const int half : {1, 10, 16, 40, 64}) {
    const auto head = random_floats(static_cast<size_t>(2 * half), 1.0F, 10);
    std::vector<float> cosine, sine, first;
    for (int i = 0; i < half; ++i) {
      cosine.push_back(std::cos(0.3F * static_cast<float>(i)));
      sine.push_back(std::sin(0.3F * static_cast<float>(i)));
    }
    for (const Kernels* kernels : tables()) {
      std::vector<float> out = head;
      kernels->rotate(out.data(), cosine.data(), sine.data(), half);
      for (size_t i = 0; i < static_cast<size_t>(half); ++i) {
        const size_t j = i + static_cast<size_t>(half);
        CHECK(std::abs(out[i] - (head[i] * cosine[i] - head[j] * sine[i])) < 1e-6F);
        CHECK(std::abs(out[j] - (head[j] * cosine[i] + head[i] * sine[i])) < 1e-6F);
      }
      if (first.empty()) first = out;
      CHECK(same_bits(out, first));
    }
  }
}

TEST(online_softmax_over_pages_is_softmax) {
  const int pages = 5;
  const auto scores = random_floats(pages * kPageKeys, 8.0F, 11);
  const int first_key = 70, last_key = 290;
  double peak = -1e300, total = 0.0;
  for (int key = first_key; key <= last_key; ++key) peak = std::max(peak, static_cast<double>(scores[key]));
  for (int key = first_key; key <= last_key; ++key) total += std::exp(static_cast<double>(scores[key]) - peak);
  std::vector<float> first;
  for (const Kernels* kernels : tables()) {
    float maximum = -1e30F, sum = 0.0F;
    std::vector<float> weights;
    for (int page = 0; page < pages; ++page) {  // page 0 is masked entirely
      float probabilities[kPageKeys];
      const float* low = scores.data() + page * kPageKeys;
      const float correction = kernels->softmax_page(low, low + kTileRows, first_key - page * kPageKeys,
                                                     last_key - page * kPageKeys, probabilities, &maximum, &sum);
      for (float& weight : weights) weight *= correction;
      weights.insert(weights.end(), probabilities, probabilities + kPageKeys);
    }
    CHECK(std::abs(static_cast<double>(sum) - total) < 1e-6 * total);
    for (int key = 0; key < pages * kPageKeys; ++key) {
      const bool visible = key >= first_key && key <= last_key;
      const double exact = visible ? std::exp(static_cast<double>(scores[static_cast<size_t>(key)]) - peak) : 0.0;
      CHECK(std::abs(static_cast<double>(weights[static_cast<size_t>(key)]) - exact) <=
            1e-5 * exact + 1e-37);  // scores near 50 round by 4e-6
    }
    weights.push_back(maximum);
    weights.push_back(sum);
    if (first.empty()) first = weights;
    CHECK(same_bits(weights, first));
  }
}

TEST(scans_find_maxima_ties_and_poison_at_every_index) {
  for (const int count : {1, 16, 63, 64, 65, 200}) {
    for (int at = 0; at < count; at += 7) {
      std::vector<float> values(static_cast<size_t>(count), -2.0F);
      values[static_cast<size_t>(at)] = 5.0F;
      if (at + 20 < count) values[static_cast<size_t>(at + 20)] = 5.0F;  // a tie: the smaller index wins
      for (const Kernels* kernels : tables()) {
        float maximum = 0.0F;
        CHECK(kernels->scan(values.data(), count, &maximum));
        CHECK_EQ(maximum, 5.0F);
        CHECK_EQ(kernels->argmax(values.data(), count), at);
        for (const float poison : {std::nanf(""), INFINITY, -INFINITY}) {
          std::vector<float> poisoned = values;
          poisoned[static_cast<size_t>(count - 1 - at)] = poison;
          CHECK(!kernels->scan(poisoned.data(), count, &maximum));
        }
      }
    }
  }
}

TEST(vectorised_noise_is_the_scalar_noise) {
  for (const int count : {1, 64, 100, 1000}) {
    for (uint64_t seed = 0; seed < 40; ++seed) {
      const int32_t position = static_cast<int32_t>(seed * 31);
      const uint64_t key = seed * 0x9E3779B97F4A7C15ULL;
      const auto logits = random_floats(static_cast<size_t>(count), 2.0F, static_cast<uint32_t>(seed));
      int best = 0;
      std::vector<float> scores;
      for (int token = 0; token < count; ++token) {
        scores.push_back((logits[static_cast<size_t>(token)] - 1.5F) * 0.8F + gumbel(key, position, token));
        if (scores.back() > scores[static_cast<size_t>(best)]) best = token;
      }
      for (const Kernels* kernels : tables()) {
        CHECK_EQ(kernels->gumbel_argmax(logits.data(), count, 1.5F, 0.8F, key, position), best);
        std::vector<float> out(static_cast<size_t>(count) + 1, 7.0F);
        kernels->gumbel_scores(logits.data(), count, 1.5F, 0.8F, key, position, out.data());
        CHECK_EQ(out.back(), 7.0F);  // nothing is written behind the last one
        out.pop_back();
        CHECK(out == scores);
      }
    }
  }
}

TEST(bf16_rounds_to_nearest_even) {
  const auto bits = [](uint32_t value) { return round_to_bf16(std::bit_cast<float>(value)); };
  CHECK_EQ(bits(0x3F808000U), 0x3F80U);  // halfway, even below
  CHECK_EQ(bits(0x3F818000U), 0x3F82U);  // halfway, even above
  CHECK_EQ(bits(0x3F808001U), 0x3F81U);
  CHECK_EQ(bits(0xBF807FFFU), 0xBF80U);
  CHECK_EQ(bits(0x7F7FFFFFU), 0x7F80U);        // overflows to infinity
  CHECK_EQ(bits(0x7F800001U) & 0x7FU, 0x40U);  // NaN stays NaN
}

TEST(every_element_of_a_page_has_its_own_place) {
  for (const size_t element : {size_t{2}, size_t{4}}) {
    check_places(element, KvScale{});
    // Pages that hold what FP8 ones do: one scale for keys, under which some of them saturate, another for values.
    check_places(element, KvScale{.key = 0.5F, .value = 2.0F});
  }
}
