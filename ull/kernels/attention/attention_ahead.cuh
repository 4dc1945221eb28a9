// What attention of a few tokens, which has no weights of its own, asks L2 for: see ahead.cuh. Its blocks deal those of
// the linear layers behind it out among themselves.
#pragma once

#include "linear/ahead.cuh"
#include "linear/gate_up.cuh"
#include "linear/layer_shapes.cuh"

namespace ull::gpu {

template <typename Shape>
ULL_DEVICE void prefetch_behind_attention(const void* weights, int blocks) {
  if (kAheadBytes == 0 || arch::thread() != 0) return;
  const int first = arch::block_y() * arch::grid_x() + arch::block_x();
  prefetch_shares<Shape>(weights, first, arch::grid_x() * arch::grid_y(), blocks);
}

// By every block, before it waits: qkv's rings are full by then, and behind qkv nobody else can ask yet.
ULL_DEVICE void prefetch_output(const AttentionParams& params) {
  prefetch_behind_attention<Output>(params.o_weights, params.linear_blocks);
}

// By a block that turns out to have nothing to do, which at a short context most have.
ULL_DEVICE void prefetch_gate_up(const AttentionParams& params) {
  prefetch_behind_attention<GateUp>(params.gate_up_weights, params.linear_blocks);
}

}  // namespace ull::gpu
