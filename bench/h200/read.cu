// Read-only bandwidth, in the two ways in which the engine could read its weights. Not part of the engine: the floor
// that its figures are compared with.
#include "arch.cuh"

namespace {

using namespace ull::arch;

struct ReadParams {
  const unsigned char* data;
  int64_t bytes;       // a multiple of kStageBytes
  uint32_t* checksum;  // written only if the data sum to one certain value, so that nothing is optimised away
};

constexpr int kStageBytes = 8192;
constexpr int kStages = 24;  // 192 KB in flight per SM with one block each
constexpr int kUnroll = 8;

}  // namespace

// One thread per block keeps kStages bulk copies in flight; blocks take stages in turn, so that the chip reads one
// front.
ULL_KERNEL(ull_read_bulk, ReadParams, 32, 1) {
  wait_for_predecessor();
  auto* stages = shared_memory();
  auto* barriers = reinterpret_cast<Barrier*>(stages + kStages * kStageBytes);
  if (thread() != 0) return;
  for (int i = 0; i < kStages; ++i) barrier_init(barriers + i, 1);
  fence_barrier_init();
  const int64_t total = params.bytes / kStageBytes;
  int64_t waited = 0;
  int64_t issued = 0;
  for (int64_t stage = block_x(); stage < total; stage += grid_x(), ++issued) {
    const int slot = static_cast<int>(issued % kStages);
    if (issued >= kStages) {
      barrier_wait(barriers + slot, static_cast<uint32_t>(waited / kStages) & 1U);
      ++waited;
    }
    barrier_arrive_expect(barriers + slot, kStageBytes);
    bulk_copy_stream(stages + slot * kStageBytes, params.data + stage * kStageBytes, kStageBytes, barriers + slot);
  }
  for (; waited < issued; ++waited) {
    barrier_wait(barriers + waited % kStages, static_cast<uint32_t>(waited / kStages) & 1U);
  }
}

// All threads read 16 bytes at a time, kUnroll loads in flight each.
ULL_KERNEL(ull_read_loads, ReadParams, 512, 2) {
  wait_for_predecessor();
  const int64_t vectors = params.bytes / 16;
  const int64_t stride = static_cast<int64_t>(grid_x()) * threads();
  uint32_t sum = 0;
  int64_t at = static_cast<int64_t>(block_x()) * threads() + thread();
  for (; at + (kUnroll - 1) * stride < vectors; at += kUnroll * stride) {
    Vector4 v[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) v[i] = load_stream(params.data + (at + i * stride) * 16);
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) sum ^= v[i].word[0] ^ v[i].word[1] ^ v[i].word[2] ^ v[i].word[3];
  }
  for (; at < vectors; at += stride) sum ^= load_stream(params.data + at * 16).word[0];
  if (sum == 0x9E3779B9U) *params.checksum = sum;
}
