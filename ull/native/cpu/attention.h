// Attention of a chunk of tokens over a sequence's pages: rotary embedding, KV write, and an online softmax that walks
// the pages in ascending order, the same way whatever the chunk, so the bits never depend on it.
//
// Query heads that share a KV head are packed with neighbouring tokens into panels of up to 12 rows; scores and
// weighted sums are then the same tile products as the linear layers.
//
// Nodes of a draft tree stand beside one another in the tree page, but each must see its own way from the root at the
// positions that plain decoding would give it. The pages before the root's are seen by all nodes alike. For those from
// the root's page on, a score belongs to one key, so that scores with the committed keys and with the tree page are
// computed once and every row picks its own in the order of positions (a page that exists only as scores); the values
// of its ancestors are gathered in the same order. So each row's chains are those of plain decoding, bit for bit.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "base/aligned.h"
#include "cpu/kernels/kernels.h"
#include "cpu/kv_cache.h"
#include "cpu/model_shape.h"
#include "cpu/panels.h"
#include "cpu/thread_team.h"
#include "cpu/weights.h"
#include "draft/tree.h"

namespace ull::cpu {

struct AttentionStep {
  const float* qkv;  // [tokens][qkv_stride]: query heads, key heads, value heads
  int qkv_stride;
  int start;             // position of the first token
  const int32_t* pages;  // page table
  int cache_layer;
  int window;                       // tokens a query sees, itself included; 0: all
  const float* query_norm;          // [head_dim] or null
  const float* key_norm;            // [head_dim] or null
  const float* kv_scale = nullptr;  // [2 * kv_heads] of keys, then values, or null: see KvScale
  Panels panels;                    // of the chunk
  float* out;                       // packed activations [panels][heads * head_dim]
  float out_scale;
  const TreePaths* tree;  // null: the tokens follow one another
  int first_node = 0;     // of a tree: token i is node first_node + i; the nodes before it are in the tree page
  bool block = false;     // without a tree: every token sees all of the chunk, those behind it too
  int first = 0;          // the lowest position that is seen, at most `start`: what lies before it is not there

  [[nodiscard]] int node(int token) const noexcept { return first_node + token; }
  [[nodiscard]] int position(int token) const noexcept {
    return start + (tree == nullptr ? token : tree->depths[node(token)]);
  }
  // The position of the last key that a token sees.
  [[nodiscard]] int last_key(int token) const noexcept { return block ? start + panels.tokens - 1 : position(token); }
  // The position of the first key that a token at `position` sees.
  [[nodiscard]] int first_key(int position) const noexcept {
    return window > 0 && position - window + 1 > first ? position - window + 1 : first;
  }
};

class Attention {
 public:
  // positions: most positions of a sequence.
  Attention(const ModelSpec& spec, const Kernels& kernels, KvCache& cache, ThreadTeam& team, int positions);

  // Called by every member of the team, behind a barrier that makes step.qkv visible. step.out is complete after the
  // next barrier.
  void run(int member, const AttentionStep& step) noexcept;

  // Likewise, but only writes the keys and values: no query is looked at, and step.out stays as it is.
  void store(int member, const AttentionStep& step) noexcept;

  // Called by member 0 before the barrier that precedes run().
  void reset() noexcept { next_item_.store(0, std::memory_order_relaxed); }

 private:
  struct Scratch {
    AlignedArray<float> head;           // [head_dim] a query or key on its way
    AlignedArray<float> queries;        // [head_dim][rows] panel
    AlignedArray<float> scores;         // [2][rows][32]
    AlignedArray<float> probabilities;  // [rows][64]
    AlignedArray<float> sums;           // [value tiles][rows][32]
    AlignedArray<float> node_scores;    // [2][rows][32] with the keys of the tree page
    AlignedArray<uint8_t> gathered;     // [64 tokens][32 dims] values of a node's ancestors
  };

  // Normalises (if weight is not null) and rotates a head into scratch.head.
  void prepare_head(Scratch& scratch, const float* from, const float* weight, int position) const noexcept;
  void write_cache(Scratch& scratch, const AttentionStep& step, int token, int kv_head) noexcept;
  // Rows [first, first + count) of a KV head; row r is token r / group, query head r % group of the group.
  struct Rows {
    int kv_head;
    int first;
    int count;
    int lowest;  // position among the rows' tokens
    int highest;
    float maximum[kMaxPanel];  // of the online softmax
    float total[kMaxPanel];
  };
  void attend(Scratch& scratch, const AttentionStep& step, int kv_head, int row, int count) const noexcept;
  void attend_page(Scratch& scratch, const AttentionStep& step, Rows& rows, int page) const noexcept;
  // The pages from the root's on, for nodes of a tree.
  void attend_tree(Scratch& scratch, const AttentionStep& step, Rows& rows) const noexcept;
  // Adds the values of slots [begin, end) of a page to every row's sums.
  void add_values(Scratch& scratch, const AttentionStep& step, const Rows& rows, int physical, int begin,
                  int end) const noexcept;
  // Adds the values of the ancestors that stand in `page`, row by row, node by node.
  void add_ancestors(Scratch& scratch, const AttentionStep& step, const Rows& rows, int page) const noexcept;
  void scores_of(Scratch& scratch, const AttentionStep& step, const Rows& rows, int physical, int begin, int end,
                 float* scores) const noexcept;
  // One row's softmax over a page; scales what it has accumulated.
  void softmax_row(Scratch& scratch, const AttentionStep& step, Rows& rows, int r, int page, const float* low,
                   const float* high) const noexcept;

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
