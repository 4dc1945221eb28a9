// The model that the kernels are specialised to: every dimension is a compile-time constant that ull-build defines.
#pragma once

#include <cstdint>

#include "arch.cuh"
#include "base/inline.h"
#include "params.h"

namespace ull::gpu {

inline constexpr int kHidden = ULL_HIDDEN;
inline constexpr int kLayers = ULL_LAYERS;
inline constexpr int kHeads = ULL_HEADS;
inline constexpr int kKvHeads = ULL_KV_HEADS;
inline constexpr int kHeadDim = ULL_HEAD_DIM;
inline constexpr int kIntermediate = ULL_INTERMEDIATE;
inline constexpr int kVocabulary = ULL_VOCABULARY;
inline constexpr bool kQkNorm = ULL_QK_NORM != 0;
inline constexpr float kRmsEpsilon = ULL_RMS_EPSILON;
inline constexpr int kWeightBits = ULL_WEIGHT_BITS;  // 8: e4m3, 16: f16 with a power-of-two scale per row
inline constexpr int kHeadBits = ULL_HEAD_BITS;      // of the lm_head
inline constexpr int kKvBits = ULL_KV_BITS;          // 16: bf16, 8: e4m3
inline constexpr bool kMayLack = ULL_MAY_LACK != 0;  // a head, whose pages may lack positions before Round::first
inline constexpr int kTaps = ULL_TAPS;               // layers whose residual is kept for heads that draft
inline constexpr bool kBlock = ULL_BLOCK != 0;       // entries of a round see each other, whatever their paths
inline constexpr bool kWarpgroupTrees = ULL_WARPGROUP_TREES != 0;  // rounds of 16 and more: products of warpgroups
inline constexpr bool kFastPrefill = ULL_FAST_PREFILL != 0;        // chunks of a prompt: e4m3 activations, other bits

inline constexpr int kGroup = kHeads / kKvHeads;           // query heads that share a kv head
inline constexpr int kAttentionWidth = kHeads * kHeadDim;  // A
inline constexpr int kQkvWidth = kAttentionWidth + 2 * kKvHeads * kHeadDim;

ULL_HOST_DEVICE constexpr int smaller(int a, int b) { return a < b ? a : b; }
ULL_HOST_DEVICE constexpr int larger(int a, int b) { return a > b ? a : b; }
ULL_HOST_DEVICE constexpr int round_up(int value, int unit) { return (value + unit - 1) / unit * unit; }
inline constexpr int kColumnUnit = 32;  // activations and packed weights are padded to this many columns
inline constexpr int kRowUnit = 16;     // packed weights and f32 outputs to this many rows

static_assert(ULL_INTERFACE == kInterface);
static_assert(kHeads % kKvHeads == 0 && kHeadDim % 32 == 0 && kHeadDim <= 256);
static_assert(kWeightBits == 8 || kWeightBits == 16);
static_assert(kHeadBits == 8 || kHeadBits == 16);
static_assert(kKvBits == 8 || kKvBits == 16);
static_assert(!kFastPrefill || kWeightBits == 8, "products of e4m3 have two such factors");

}  // namespace ull::gpu
