// Attention over the pages and the round's own tree, and the write of the round's keys and values: see attention.cuh.
// One variant for one token (attention_one.cuh), and one for each tile. Grid: blocks that share rows and positions, by
// kv heads: see attention_place().
#include "attention/attention.cuh"
#include "attention/attention_one.cuh"

namespace ull::gpu {

ULL_KERNEL(ull_attention_1, AttentionParams, kAttentionThreads, 2) { attend_one(params); }
// Blocks that leave room for others. But half loads keep more keys in registers than two leave: NVRTC 13.0 spills for
// heads of 96 dimensions.
template <int kTile>
inline constexpr int kBlocks = AttentionShared<kTile>::kNarrow && !kHalfKeyLoads ? 2 : 1;
ULL_KERNEL(ull_attention_8, AttentionParams, kAttentionThreads, kBlocks<8>) { attend<8>(params); }
ULL_KERNEL(ull_attention_16, AttentionParams, kAttentionThreads, kBlocks<16>) { attend<16>(params); }
ULL_KERNEL(ull_attention_32, AttentionParams, kAttentionThreads, kBlocks<32>) { attend<32>(params); }
ULL_KERNEL(ull_attention_64, AttentionParams, kAttentionThreads, kBlocks<64>) { attend<64>(params); }

}  // namespace ull::gpu
