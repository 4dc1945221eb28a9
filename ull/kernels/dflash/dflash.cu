// The context of a DFlash head: what each of its layers attends to at a position that the target has read. It is made
// of one vector, the norm of fc's output, without queries, attention or MLP. A block's entries need nothing of this:
// they pass the layers as a model's tokens do.
#include "attention/attention_heads.cuh"
#include "dflash/dflash.cuh"
#include "linear/head_rows.cuh"
#include "linear/layer_shapes.cuh"
#include "linear/linear_narrow.cuh"
#include "linear/linear_wide.cuh"

namespace ull::gpu {
namespace {

using Fc = TapsLinear<kTargetHidden, kRead>;
template <int kTokens>
using NarrowFc = NarrowPlan<Fc, kTokens>;
template <int kTokens>
using WideFc = WidePlan<Fc, kTokens, false>;

template <int kTokens>
using WideKv = WidePlan<KvLinear<kHidden>, kTokens, true>;

}  // namespace

ULL_KERNEL(ull_dflash_taps, TapsParams, kNormThreads, 2) { read_taps<kTargetHidden, kRead, TapNorm::kNone>(params); }

ULL_KERNEL(ull_dflash_fc_8, LinearParams, kNarrowThreads, NarrowFc<8>::kBlocks) {
  linear_narrow<NarrowFc<8>, TapsEpilogue>(params);
}
ULL_KERNEL(ull_dflash_fc_64, LinearParams, WideFc<64>::kBoundThreads, WideFc<64>::kBlocks) {
  linear_wide<WideFc<64>, TapsEpilogue>(params);
}

// Sums of a layer's keys and values, in slices.
ULL_KERNEL(ull_dflash_kv_16, LinearParams, WideKv<16>::kBoundThreads, WideKv<16>::kBlocks) {
  linear_wide<WideKv<16>, StoreRows<kKvRows>>(params);
}
ULL_KERNEL(ull_dflash_kv_64, LinearParams, WideKv<64>::kBoundThreads, WideKv<64>::kBlocks) {
  linear_wide<WideKv<64>, StoreRows<kKvRows>>(params);
}

// Finishes those: QK norm, rotary embedding and conversion, into the tree scratch, from where commit() copies them to
// the pages. Grid: x = entries; y: so that there are kHeadLanes threads for each key and value.
ULL_KERNEL(ull_dflash_store, DflashStoreParams, kNormThreads, 2) {
  arch::release_dependents();
  arch::wait_for_predecessor();
  const int entry = arch::block_x();
  if (entry >= token_count(params.round)) return;
  const int at = arch::block_y() * kNormThreads + arch::thread();
  const int head = at / kHeadLanes, part = at % kHeadLanes;
  const bool active = head < 2 * kKvHeads && part < kHeadParts, is_value = head >= kKvHeads;
  HeadPart x{};
  if (active) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = head * kHeadDim + half * (kHeadDim / 2) + 4 * part;
      SliceSums sums;
      sums.load<kKvRows>(params.partial, entry, row);
      const Four four = scaled(sums.total(), load_row_scale(params.scale, params.bias, row));
#pragma unroll
      for (int i = 0; i < 4; ++i) (half == 0 ? x.low : x.high)[i] = four.value[i];
    }
  }
  if constexpr (kQkNorm) {
    const float sum = square_sum(x);
    if (active && !is_value) normalise_head(x, sum, load_head(params.k_norm, part));
  }
  if (!active) return;
  if (!is_value) {
    rotate_head(x, load_turn(params.rope + static_cast<int64_t>(params.round->base + entry) * kHeadDim, part));
  }
  const float inverse_scale = kKvBits == 8 ? arch::reciprocal(params.kv_scale[head]) : 1.0F;
  auto* tree = static_cast<unsigned char*>(is_value ? params.tree_values : params.tree_keys);
  unsigned char* to = tree + (head % kKvHeads * kTreeTokens + entry) * kHeadDim * kKvBytes;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = (half == 0 ? x.low : x.high)[i] * inverse_scale;
    *reinterpret_cast<StoredQuad*>(to + (half * (kHeadDim / 2) + 4 * part) * kKvBytes) = to_stored(v);
  }
}

}  // namespace ull::gpu
