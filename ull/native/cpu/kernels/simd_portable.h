// Sixteen single-precision lanes in an array: any machine, same bits as the vector sets, speed as it comes.
#pragma once

#include <bit>
#include <cstdint>

#include "cpu/kernels/kernels.h"

namespace ull::cpu {
namespace {

struct Portable {
  struct F {
    float lane[kLanes];
  };
  struct I {
    uint32_t lane[kLanes];
  };
  struct M {
    bool lane[kLanes];
  };
  static constexpr const char* kName = "portable";
  static constexpr int kWholeTileTokens = 1;
  static constexpr int kHalfTileTokens = 1;
  static constexpr int kDecodeTiles = 1;

  template <typename R, typename Function>
  static R map(Function function) {
    R result;
    for (int i = 0; i < kLanes; ++i) result.lane[i] = function(i);
    return result;
  }

  static F zero() { return set(0.0F); }
  static F set(float value) {
    return map<F>([=](int) { return value; });
  }
  static F load(const float* p) {
    return map<F>([=](int i) { return p[i]; });
  }
  static void store(float* p, const F& a) {
    for (int i = 0; i < kLanes; ++i) p[i] = a.lane[i];
  }
  static F add(const F& a, const F& b) {
    return map<F>([&](int i) { return a.lane[i] + b.lane[i]; });
  }
  static F sub(const F& a, const F& b) {
    return map<F>([&](int i) { return a.lane[i] - b.lane[i]; });
  }
  static F mul(const F& a, const F& b) {
    return map<F>([&](int i) { return a.lane[i] * b.lane[i]; });
  }
  static F div(const F& a, const F& b) {
    return map<F>([&](int i) { return a.lane[i] / b.lane[i]; });
  }
  static F fma(const F& a, const F& b, const F& c) {
    return map<F>([&](int i) { return __builtin_fmaf(a.lane[i], b.lane[i], c.lane[i]); });
  }
  static F max(const F& a, const F& b) {  // b if either is NaN, as x86 does
    return map<F>([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
  }
  static F min(const F& a, const F& b) {
    return map<F>([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
  }
  static M less(const F& a, const F& b) {
    return map<M>([&](int i) { return a.lane[i] < b.lane[i]; });
  }
  static F select(const M& mask, const F& yes, const F& no) {
    return map<F>([&](int i) { return mask.lane[i] ? yes.lane[i] : no.lane[i]; });
  }
  static I iselect(const M& mask, const I& yes, const I& no) {
    return map<I>([&](int i) { return mask.lane[i] ? yes.lane[i] : no.lane[i]; });
  }

  // Over all lanes, by the fixed tree: lanes i and i + 8, then + 4, + 2, + 1.
  static float add_lanes(F a) {
    for (int step = kLanes / 2; step > 0; step /= 2) {
      for (int i = 0; i < step; ++i) a.lane[i] += a.lane[i + step];
    }
    return a.lane[0];
  }
  static float max_lanes(F a) {
    for (int step = kLanes / 2; step > 0; step /= 2) {
      for (int i = 0; i < step; ++i) a.lane[i] = a.lane[i] > a.lane[i + step] ? a.lane[i] : a.lane[i + step];
    }
    return a.lane[0];
  }

  static I bits(const F& a) {
    return map<I>([&](int i) { return std::bit_cast<uint32_t>(a.lane[i]); });
  }
  static F from_bits(const I& a) {
    return map<F>([&](int i) { return std::bit_cast<float>(a.lane[i]); });
  }
  static I iset(uint32_t value) {
    return map<I>([=](int) { return value; });
  }
  static I iload(const uint32_t* p) {
    return map<I>([=](int i) { return p[i]; });
  }
  static void istore(uint32_t* p, const I& a) {
    for (int i = 0; i < kLanes; ++i) p[i] = a.lane[i];
  }
  static I iadd(const I& a, const I& b) {
    return map<I>([&](int i) { return a.lane[i] + b.lane[i]; });
  }
  static I isub(const I& a, const I& b) {
    return map<I>([&](int i) { return a.lane[i] - b.lane[i]; });
  }
  static I ixor(const I& a, const I& b) {
    return map<I>([&](int i) { return a.lane[i] ^ b.lane[i]; });
  }
  template <int kBits>
  static I shift_left(const I& a) {
    return map<I>([&](int i) { return a.lane[i] << kBits; });
  }
  template <int kBits>
  static I shift_right(const I& a) {
    return map<I>([&](int i) { return a.lane[i] >> kBits; });
  }
  template <int kBits>
  static I shift_right_signed(const I& a) {
    return map<I>([&](int i) { return static_cast<uint32_t>(static_cast<int32_t>(a.lane[i]) >> kBits); });
  }
  static F to_float(const I& a) {
    return map<F>([&](int i) { return static_cast<float>(static_cast<int32_t>(a.lane[i])); });
  }

  static void multiply_wide(const I& a, uint32_t b, I& high, I& low) {
    const I copy = a;
    for (int i = 0; i < kLanes; ++i) {
      const uint64_t product = static_cast<uint64_t>(copy.lane[i]) * b;
      high.lane[i] = static_cast<uint32_t>(product >> 32);
      low.lane[i] = static_cast<uint32_t>(product);
    }
  }

  // Transposes the 4 x 4 blocks that the four arrays form within each group of four lanes.
  static void transpose4(I& a, I& b, I& c, I& d) {
    I* row[4] = {&a, &b, &c, &d};
    const I copy[4] = {a, b, c, d};
    for (int i = 0; i < kLanes; ++i) {
      for (int r = 0; r < 4; ++r) row[r]->lane[i] = copy[i % 4].lane[i / 4 * 4 + r];
    }
  }

  // 32 packed elements -> rows 0..15 and rows 16..31 (see Format in kernels.h).
  static void decode_f8(const uint8_t* p, F& low, F& high) {
    const auto element = [](uint8_t code) { return std::bit_cast<float>((code & 0x80U) << 24 | (code & 0x7FU) << 20); };
    for (int i = 0; i < kLanes; ++i) {
      low.lane[i] = element(p[2 * i]);
      high.lane[i] = element(p[2 * i + 1]);
    }
  }
  static void decode_bf16(const uint8_t* p, F& low, F& high) {
    const auto element = [](const uint8_t* q) {
      return std::bit_cast<float>(static_cast<uint32_t>(q[0]) << 16 | static_cast<uint32_t>(q[1]) << 24);
    };
    for (int i = 0; i < kLanes; ++i) {
      low.lane[i] = element(p + 4 * i);
      high.lane[i] = element(p + 4 * i + 2);
    }
  }
};

}  // namespace
}  // namespace ull::cpu
