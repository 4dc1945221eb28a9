// What the blocks of the kernel of all layers wait for. No step waits for the whole grid: it waits for what it reads.
//
//   qkv         all of the residual, so every row tile of down in the layer before
//   attention   the queries, keys and values of its kv head
//   o           each warp the kv heads whose outputs its K slice reads
//   gate_up     all of the residual, so every row tile of o
//   down        each warp the row tiles of gate_up that its K slice reads
//
// Counters only grow, layer after layer. None of the next layer comes to a counter before all of this one have: every
// block waits for all of o and all of down, which follow from everything before them. What a step overwrites (the
// residual, qkv, the outputs of attention and of gate_up) nobody reads any more for the same reason: a row tile of o or
// down is finished when all K slices are there, so when every block that has row tiles of the step before has read its
// input. Blocks without any must not read it.
#pragma once

#include "linear/gate_up.cuh"
#include "linear/layer_shapes.cuh"

namespace ull::gpu {

inline constexpr int kCounterWords = 32;  // each on a line of its own, as many blocks poll

class LayerSteps {
 public:
  ULL_DEVICE LayerSteps(uint32_t* counters, int layer)
      : counters_(counters), layers_(static_cast<uint32_t>(layer) + 1) {}

  // ---- by all threads of a block: what the block has done, whose shared memory is free then ------------------------

  ULL_DEVICE void finish_qkv() const {
    meet();
    constexpr int kHeadTiles = kHeadDim / kRowUnit;
    for (int head = arch::thread(); head < kKvHeads; head += arch::threads()) {
      const int queries = share<Qkv>(head * kGroup * kHeadTiles, (head + 1) * kGroup * kHeadTiles);
      const int keys = share<Qkv>((kHeads + head) * kHeadTiles, (kHeads + head + 1) * kHeadTiles);
      const int first_value = (kHeads + kKvHeads + head) * kHeadTiles;
      add(kQkvAt + head, queries + keys + share<Qkv>(first_value, first_value + kHeadTiles));
    }
  }
  ULL_DEVICE void finish_attention(int kv_head) const {
    meet();
    if (arch::thread() == 0) add(kAttentionAt + kv_head, 1);
  }
  ULL_DEVICE void finish_output() const {
    meet();
    if (arch::thread() == 0) add(kOutputAt, share<Output>(0, Output::kRowTiles));
  }
  ULL_DEVICE void finish_gate_up() const {
    meet();
    const int slice = arch::thread();
    if (slice < kSlices) add(kGateUpAt + slice, share<GateUp>(gate_up_begin(slice), gate_up_begin(slice + 1)));
  }
  ULL_DEVICE void finish_down() const {
    meet();
    if (arch::thread() == 0) add(kDownAt, share<Down>(0, Down::kRowTiles));
  }

  // ---- by all threads of a block: what it may read then
  // --------------------------------------------------------------

  ULL_DEVICE void wait_for_down() const {  // of the layer before
    if (layers_ > 1) wait_with_block(kDownAt, (layers_ - 1) * Down::kRowTiles);
  }
  ULL_DEVICE void wait_for_qkv(int kv_head) const {
    wait_with_block(kQkvAt + kv_head, layers_ * (kGroup + 2) * (kHeadDim / kRowUnit));
  }
  ULL_DEVICE void wait_for_output() const { wait_with_block(kOutputAt, layers_ * Output::kRowTiles); }

  // ---- by all lanes of a warp: of the slice that has its number
  // ------------------------------------------------------

  ULL_DEVICE void wait_for_attention(int blocks) const {  // that share a kv head
    constexpr int kHeadSteps = kGroup * kHeadDim / kColumnUnit;
    const int first = Output::slice_begin(arch::warp()) / kHeadSteps;
    const int end = (Output::slice_begin(arch::warp() + 1) + kHeadSteps - 1) / kHeadSteps;
    if (first + arch::lane() < end) {
      for (int head = first + arch::lane(); head < end; head += 32) {
        arch::await_device(counter(kAttentionAt + head), layers_ * static_cast<uint32_t>(blocks));
      }
      arch::fence_device();
    }
    arch::warp_barrier();
  }
  ULL_DEVICE void wait_for_gate_up() const {
    if (arch::lane() == 0) {
      const int tiles = gate_up_begin(arch::warp() + 1) - gate_up_begin(arch::warp());
      arch::await_device(counter(kGateUpAt + arch::warp()), layers_ * static_cast<uint32_t>(tiles));
      arch::fence_device();
    }
    arch::warp_barrier();
  }

 private:
  static constexpr int kQkvAt = 0;                        // [kv heads] row tiles
  static constexpr int kAttentionAt = kQkvAt + kKvHeads;  // [kv heads] blocks
  static constexpr int kOutputAt = kAttentionAt + kKvHeads;
  static constexpr int kGateUpAt = kOutputAt + 1;  // [slices of down] row tiles
  static constexpr int kDownAt = kGateUpAt + kSlices;
  static_assert(kHeadDim % kRowUnit == 0 && kColumnUnit % (kRowUnit / 2) == 0);

  // The first row tile of gate_up that a slice of down reads.
  ULL_DEVICE static int gate_up_begin(int slice) {
    return smaller(Down::slice_begin(slice) * (kColumnUnit / (kRowUnit / 2)), GateUp::kRowTiles);
  }

  // How many of a layer's row tiles [begin, end) are the block's.
  template <typename Shape>
  ULL_DEVICE static int share(int begin, int end) {
    return larger(0, smaller(Shape::last_tile(), end) - larger(Shape::first_tile(), begin));
  }

  ULL_DEVICE uint32_t* counter(int index) const { return counters_ + index * kCounterWords; }

  ULL_DEVICE static void meet() {
    arch::fence_bulk_copies();
    arch::block_barrier();
  }
  ULL_DEVICE void add(int index, int count) const {
    if (count > 0) arch::arrive_device(counter(index), static_cast<uint32_t>(count));
  }
  ULL_DEVICE void wait_with_block(int index, uint32_t count) const {
    if (arch::thread() == 0) {
      arch::await_device(counter(index), count);
      arch::fence_device();
    }
    arch::block_barrier();
  }

  uint32_t* counters_;
  uint32_t layers_;  // with this one
};

}  // namespace ull::gpu
