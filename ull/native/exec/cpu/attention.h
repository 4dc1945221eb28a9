// Attention of a chunk of tokens over a session's pages: rotary embedding, KV write, and an online softmax that walks
// the pages in ascending order, the same way whatever the chunk, so the bits never depend on it.
//
// Query heads that share a KV head are packed with neighbouring tokens into panels of up to 12 rows; scores and
// weighted sums are then the same tile products as the linear layers.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "base/aligned.h"
#include "exec/cpu/kernels.h"
#include "exec/cpu/kv_cache.h"
#include "exec/cpu/model_spec.h"
#include "exec/cpu/panels.h"
#include "exec/cpu/thread_team.h"
#include "exec/cpu/weights.h"

namespace ull::cpu {

struct AttentionStep {
  const float* qkv;  // [tokens][qkv_stride]: query heads, key heads, value heads
  int qkv_stride;
  int start;             // position of the first token
  const int32_t* pages;  // page table
  int cache_layer;
  int window;               // tokens a query sees, itself included; 0: all
  const float* query_norm;  // [head_dim] or null
  const float* key_norm;    // [head_dim] or null
  Panels panels;            // of the chunk
  float* out;               // packed activations [panels][heads * head_dim]
  float out_scale;
};

class Attention {
 public:
  // positions: most positions of a session.
  Attention(const ModelSpec& spec, const Kernels& kernels, KvCache& cache, ThreadTeam& team, int positions);

  // Called by every member of the team, behind a barrier that makes step.qkv visible. step.out is complete after the
  // next barrier.
  void run(int member, const AttentionStep& step) noexcept;

  // Called by member 0 before the barrier that precedes run().
  void reset() noexcept { next_item_.store(0, std::memory_order_relaxed); }

 private:
  struct Scratch {
    AlignedArray<float> head;           // [head_dim] a query or key on its way
    AlignedArray<float> queries;        // [head_dim][rows] panel
    AlignedArray<float> scores;         // [2][rows][32]
    AlignedArray<float> probabilities;  // [rows][64]
    AlignedArray<float> sums;           // [value tiles][rows][32]
  };

  // Normalises (if weight is not null) and rotates a head into scratch.head.
  void prepare_head(Scratch& scratch, const float* from, const float* weight, int position) const noexcept;
  void write_cache(Scratch& scratch, const AttentionStep& step, int token, int kv_head) noexcept;
  // Rows [row, row + rows) of a KV head; row r is token r / group, query head r % group of the group.
  void attend(Scratch& scratch, const AttentionStep& step, int kv_head, int row, int rows) const noexcept;
  void attend_page(Scratch& scratch, const AttentionStep& step, int kv_head, int row, int rows, int page,
                   float* maximum, float* total) const noexcept;

  const ModelSpec& spec_;
  const Kernels& kernels_;
  KvCache& cache_;
  ThreadTeam& team_;
  AlignedArray<float> cosine_;  // [positions][head_dim / 2]
  AlignedArray<float> sine_;    // [positions][head_dim / 2]
  float query_scale_;           // 1 / sqrt(head_dim)
  std::vector<Scratch> scratch_;
  alignas(kCacheLine) std::atomic<int> next_item_{0};
};

}  // namespace ull::cpu
