// Norms, activations, rotary embedding, softmax and the sampler's scans over a vector set S. Included once per
// instruction set; everything is in an unnamed namespace (see kernels_matrix.h).
#pragma once

#include <cstdint>

#include "base/float_math.h"
#include "base/philox.h"
#include "cpu/kernels/kernels.h"

namespace ull::cpu {
namespace {

struct OneLane : ScalarMath {};  // a type of this file alone, so that its instantiations are too

inline constexpr float kMinusInfinity = -__builtin_inff();

// Lane numbers 0 .. 63.
alignas(64) inline constexpr float kLaneNumbers[64] = {0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
                                                       16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31,
                                                       32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47,
                                                       48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};

// Calls body(pointer, index) for blocks of 64 values; the last block is a copy filled up with `filler`.
template <typename Body>
inline void for_blocks_of_64(const float* values, int count, float filler, Body body) {
  int i = 0;
  for (; i + 64 <= count; i += 64) body(values + i, i);
  if (i < count) {
    alignas(64) float tail[64];
    for (int j = 0; j < 64; ++j) tail[j] = i + j < count ? values[i + j] : filler;
    body(tail, i);
  }
}

template <class S>
void finish_tile(const float* sums, const float* scale, const float* bias, float* out) noexcept {
  for (int i = 0; i < kTileRows; i += kLanes) {
    auto y = S::load(sums + i);
    if (scale != nullptr) y = S::mul(y, S::load(scale + i));
    if (bias != nullptr) y = S::add(y, S::load(bias + i));
    S::store(out + i, y);
  }
}

template <class S>
void silu_multiply(const float* gate, const float* up, float factor, float* out) noexcept {
  for (int i = 0; i < kTileRows; i += kLanes) {
    const auto g = S::load(gate + i);
    const auto denominator = S::add(S::set(1.0F), exp_lanes<S>(S::sub(S::zero(), g)));
    S::store(out + i, S::mul(S::mul(S::div(g, denominator), S::load(up + i)), S::set(factor)));
  }
}

template <class S>
void normalise(const float* x, const float* weight, int count, float epsilon, float factor, float* out,
               int stride) noexcept {
  static_assert(kNormPartials == 4 * kLanes);
  typename S::F partial[4] = {S::zero(), S::zero(), S::zero(), S::zero()};
  for_blocks_of_64(x, count, 0.0F, [&](const float* block, int) {
    for (int j = 0; j < 4; ++j) {
      const auto value = S::load(block + j * kLanes);
      partial[j] = S::fma(value, value, partial[j]);
    }
  });
  const float squares = S::add_lanes(S::add(S::add(partial[0], partial[1]), S::add(partial[2], partial[3])));
  const float inverse = 1.0F / __builtin_sqrtf(squares / static_cast<float>(count) + epsilon);
  const auto scale = S::set(inverse);
  const auto power = S::set(factor);
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const auto y = S::mul(S::mul(S::mul(S::load(x + i), scale), S::load(weight + i)), power);
    if (stride == 1) {
      S::store(out + i, y);
    } else {
      alignas(64) float lane[kLanes];
      S::store(lane, y);
      for (int j = 0; j < kLanes; ++j) out[static_cast<size_t>(i + j) * stride] = lane[j];
    }
  }
  for (; i < count; ++i) out[static_cast<size_t>(i) * stride] = x[i] * inverse * weight[i] * factor;
}

template <class S>
void rotate(float* head, const float* cosine, const float* sine, int half) noexcept {
  int i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const auto a = S::load(head + i), b = S::load(head + half + i);
    const auto c = S::load(cosine + i), s = S::load(sine + i);
    S::store(head + i, S::fma(S::sub(S::zero(), b), s, S::mul(a, c)));
    S::store(head + half + i, S::fma(a, s, S::mul(b, c)));
  }
  for (; i < half; ++i) {
    const float a = head[i], b = head[half + i];
    head[i] = __builtin_fmaf(0.0F - b, sine[i], a * cosine[i]);
    head[half + i] = __builtin_fmaf(a, sine[i], b * cosine[i]);
  }
}

template <class S>
float softmax_page(const float* low, const float* high, int first, int last, float* probabilities, float* maximum,
                   float* sum) noexcept {
  const auto lower = S::set(static_cast<float>(first)), upper = S::set(static_cast<float>(last));
  const auto masked = S::set(kMinusInfinity);
  typename S::F score[4];
  for (int j = 0; j < 4; ++j) {
    const auto key = S::load(kLaneNumbers + j * kLanes);
    score[j] = S::load(j < 2 ? low + j * kLanes : high + (j - 2) * kLanes);
    score[j] = S::select(S::less(key, lower), masked, score[j]);
    score[j] = S::select(S::less(upper, key), masked, score[j]);
  }
  const float page_maximum = S::max_lanes(S::max(S::max(score[0], score[1]), S::max(score[2], score[3])));
  const float new_maximum = *maximum > page_maximum ? *maximum : page_maximum;
  const auto shift = S::set(new_maximum);
  for (int j = 0; j < 4; ++j) {
    score[j] = exp_lanes<S>(S::sub(score[j], shift));
    S::store(probabilities + j * kLanes, score[j]);
  }
  const float page_sum = S::add_lanes(S::add(S::add(score[0], score[1]), S::add(score[2], score[3])));
  const float correction = exp_lanes<OneLane>(*maximum - new_maximum);
  *maximum = new_maximum;
  *sum = *sum * correction + page_sum;
  return correction;
}

template <class S>
bool scan(const float* logits, int count, float* maximum) noexcept {
  auto largest = S::set(kMinusInfinity);
  auto poison = S::zero();  // x - x is 0, or NaN if x is not finite
  for_blocks_of_64(logits, count, logits[0], [&](const float* block, int) {
    for (int j = 0; j < 4; ++j) {
      const auto x = S::load(block + j * kLanes);
      largest = S::max(largest, x);
      poison = S::add(poison, S::sub(x, x));
    }
  });
  *maximum = S::max_lanes(largest);
  return S::add_lanes(poison) == 0.0F;
}

// The best (value, index) per lane, and over all lanes: larger value, then smaller index.
template <class S>
struct Best {
  typename S::F value = S::set(kMinusInfinity);
  typename S::I index = S::iset(0xFFFFFFFFU);

  void offer(typename S::F candidate, typename S::I candidate_index) {
    const auto better = S::less(value, candidate);
    value = S::select(better, candidate, value);
    index = S::iselect(better, candidate_index, index);
  }
  int winner() const {
    alignas(64) float values[kLanes];
    alignas(64) uint32_t indices[kLanes];
    S::store(values, value);
    S::istore(indices, index);
    int best = 0;
    for (int i = 1; i < kLanes; ++i) {
      if (values[i] > values[best] || (values[i] == values[best] && indices[i] < indices[best])) best = i;
    }
    return static_cast<int>(indices[best]);
  }
};

template <class S>
typename S::I lane_indices() {
  alignas(64) uint32_t lane[kLanes];
  for (uint32_t i = 0; i < kLanes; ++i) lane[i] = i;
  return S::iload(lane);
}

template <class S>
int argmax(const float* values, int count) noexcept {
  Best<S> best;
  const auto lanes = lane_indices<S>();
  for_blocks_of_64(values, count, kMinusInfinity, [&](const float* block, int i) {
    for (int j = 0; j < 4; ++j) {
      best.offer(S::load(block + j * kLanes), S::iadd(lanes, S::iset(static_cast<uint32_t>(i + j * kLanes))));
    }
  });
  return best.winner();
}

template <class S>
void exponentials(const float* logits, int count, float shift, float inverse_temperature, float* out) noexcept {
  const auto offset = S::set(shift), factor = S::set(inverse_temperature);
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    S::store(out + i, exp_lanes<S>(S::mul(S::sub(S::load(logits + i), offset), factor)));
  }
  for (; i < count; ++i) out[i] = exp_lanes<OneLane>((logits[i] - shift) * inverse_temperature);
}

// Gumbel noise of the 64 tokens from `token` (a multiple of 64): noise[j] holds tokens token + 16 j + lane.
template <class S>
inline void gumbel_block(uint32_t token, uint64_t seed, uint32_t position, typename S::F noise[4]) {
  using I = typename S::I;
  // Counter 16 j + 4 i + r (in units of four tokens: 4 r + i) sits so that transpose4 leaves the tokens in order.
  alignas(64) static constexpr uint32_t kCounterOrder[kLanes] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
  I word[4] = {S::iadd(S::iload(kCounterOrder), S::iset(token / 4)), S::iset(position), S::iset(0), S::iset(0)};
  uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    I high0, low0, high1, low1;
    S::multiply_wide(word[0], kPhiloxMultiplier0, high0, low0);
    S::multiply_wide(word[2], kPhiloxMultiplier1, high1, low1);
    word[0] = S::ixor(S::ixor(high1, word[1]), S::iset(key0));
    word[1] = low1;
    word[2] = S::ixor(S::ixor(high0, word[3]), S::iset(key1));
    word[3] = low0;
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
  S::transpose4(word[0], word[1], word[2], word[3]);
  for (int j = 0; j < 4; ++j) {
    noise[j] = gumbel_from_unit<S>(S::to_float(S::template shift_right<9>(word[j])));
  }
}

template <class S>
int gumbel_argmax(const float* logits, int count, float shift, float inverse_temperature, uint64_t seed,
                  int32_t position) noexcept {
  Best<S> best;
  const auto lanes = lane_indices<S>();
  const auto offset = S::set(shift), factor = S::set(inverse_temperature);
  for_blocks_of_64(logits, count, kMinusInfinity, [&](const float* block, int i) {
    typename S::F noise[4];
    gumbel_block<S>(static_cast<uint32_t>(i), seed, static_cast<uint32_t>(position), noise);
    for (int j = 0; j < 4; ++j) {
      const auto adjusted = S::mul(S::sub(S::load(block + j * kLanes), offset), factor);
      best.offer(S::add(adjusted, noise[j]), S::iadd(lanes, S::iset(static_cast<uint32_t>(i + j * kLanes))));
    }
  });
  return best.winner();
}

template <class S>
void gumbel_scores(const float* logits, int count, float shift, float inverse_temperature, uint64_t seed,
                   int32_t position, float* out) noexcept {
  const auto offset = S::set(shift), factor = S::set(inverse_temperature);
  for_blocks_of_64(logits, count, 0.0F, [&](const float* block, int i) {
    typename S::F noise[4];
    gumbel_block<S>(static_cast<uint32_t>(i), seed, static_cast<uint32_t>(position), noise);
    alignas(64) float scores[64];
    float* to = i + 64 <= count ? out + i : scores;
    for (int j = 0; j < 4; ++j) {
      const auto adjusted = S::mul(S::sub(S::load(block + j * kLanes), offset), factor);
      S::store(to + j * kLanes, S::add(adjusted, noise[j]));
    }
    for (int j = i; to == scores && j < count; ++j) out[j] = scores[j - i];
  });
}

template <class S>
constexpr void fill_vector_kernels(Kernels& table) {
  table.name = S::kName;
  table.finish_tile = finish_tile<S>;
  table.silu_multiply = silu_multiply<S>;
  table.normalise = normalise<S>;
  table.rotate = rotate<S>;
  table.softmax_page = softmax_page<S>;
  table.scan = scan<S>;
  table.argmax = argmax<S>;
  table.exponentials = exponentials<S>;
  table.gumbel_argmax = gumbel_argmax<S>;
  table.gumbel_scores = gumbel_scores<S>;
}

}  // namespace
}  // namespace ull::cpu
