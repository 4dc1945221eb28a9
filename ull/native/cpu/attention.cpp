#include "cpu/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace ull::cpu {
namespace {

// Below every real score, yet finite, so that a page without visible keys gives exp(0) = 1, not NaN.
constexpr float kNoMaximum = -1e30F;

}  // namespace

Attention::Attention(const ModelSpec& spec, const Kernels& kernels, KvCache& cache, ThreadTeam& team, int positions)
    : spec_(spec),
      kernels_(kernels),
      cache_(cache),
      team_(team),
      cosine_(static_cast<size_t>(positions) * spec.inv_freq.size()),
      sine_(static_cast<size_t>(positions) * spec.inv_freq.size()),
      query_scale_(static_cast<float>(1.0 / std::sqrt(static_cast<double>(spec.head_dim)))) {
  size_t index = 0;
  for (int position = 0; position < positions; ++position) {
    for (const float frequency : spec.inv_freq) {
      const float angle = static_cast<float>(position) * frequency;  // rounded to float, as transformers does
      cosine_[index] = static_cast<float>(std::cos(static_cast<double>(angle))) * spec.attention_factor;
      sine_[index] = static_cast<float>(std::sin(static_cast<double>(angle))) * spec.attention_factor;
      ++index;
    }
  }
  const size_t dim = static_cast<size_t>(spec.head_dim);
  const size_t padded = (dim + kTileRows - 1) / kTileRows * kTileRows;
  for (int member = 0; member < team.size(); ++member) {
    scratch_.push_back({.head = AlignedArray<float>(dim),
                        .queries = AlignedArray<float>(dim * kMaxPanel),
                        .scores = AlignedArray<float>(2 * kMaxPanel * kTileRows),
                        .probabilities = AlignedArray<float>(kMaxPanel * kPageKeys),
                        .sums = AlignedArray<float>(kMaxPanel * padded),
                        .node_scores = AlignedArray<float>(2 * kMaxPanel * kTileRows),
                        .gathered = AlignedArray<uint8_t>(kPageKeys * kTileRows * sizeof(float))});
  }
}

void Attention::run(int member, const AttentionStep& step) noexcept {
  const int tokens = step.panels.tokens;
  const Panels rows = Panels::of(tokens * spec_.group());
  // One token: whoever attends over a KV head first writes its key and value, and nobody else reads them.
  const bool own_writes = tokens == 1 && rows.count == 1;
  if (!own_writes) {
    store(member, step);
    team_.barrier();
  }
  Scratch& scratch = scratch_[static_cast<size_t>(member)];
  const int items = spec_.kv_heads * rows.count;
  // Late tokens cost most: hand them out first.
  for (int i; (i = next_item_.fetch_add(1, std::memory_order_relaxed)) < items;) {
    const int panel = rows.count - 1 - i / spec_.kv_heads;
    const int kv_head = i % spec_.kv_heads;
    if (own_writes) write_cache(scratch, step, 0, kv_head);
    const int row = panel * rows.width;
    attend(scratch, step, kv_head, row, std::min(rows.width, rows.tokens - row));
  }
}

void Attention::store(int member, const AttentionStep& step) noexcept {
  Scratch& scratch = scratch_[static_cast<size_t>(member)];
  for (int i = member; i < step.panels.tokens * spec_.kv_heads; i += team_.size()) {
    write_cache(scratch, step, i / spec_.kv_heads, i % spec_.kv_heads);
  }
}

void Attention::prepare_head(Scratch& scratch, const float* from, const float* weight, int position) const noexcept {
  float* head = scratch.head.data();
  if (weight != nullptr) {
    kernels_.normalise(from, weight, spec_.head_dim, spec_.rms_epsilon, 1.0F, head, 1);
  } else {
    std::copy(from, from + spec_.head_dim, head);
  }
  const size_t row = static_cast<size_t>(position) * spec_.inv_freq.size();
  kernels_.rotate(head, cosine_.data() + row, sine_.data() + row, spec_.head_dim / 2);
}

void Attention::write_cache(Scratch& scratch, const AttentionStep& step, int token, int kv_head) noexcept {
  const int position = step.position(token);
  const float* row = step.qkv + static_cast<size_t>(token) * static_cast<size_t>(step.qkv_stride);
  const float* key = row + spec_.query_rows() + kv_head * spec_.head_dim;
  const float* value = key + spec_.kv_rows();
  prepare_head(scratch, key, step.key_norm, position);
  const int page = step.tree == nullptr ? step.pages[position / kPageKeys] : cache_.tree_page();
  const int slot = step.tree == nullptr ? position % kPageKeys : step.node(token);
  KvScale scale;
  if (step.kv_scale != nullptr) scale = {step.kv_scale[kv_head], step.kv_scale[spec_.kv_heads + kv_head]};
  cache_.write(page, step.cache_layer, kv_head, slot, scratch.head.data(), value, scale);
}

void Attention::attend(Scratch& scratch, const AttentionStep& step, int kv_head, int row, int count) const noexcept {
  const int group = spec_.group();
  const int dim = spec_.head_dim;
  Rows rows{.kv_head = kv_head,
            .first = row,
            .count = count,
            .lowest = step.position(row / group),
            .highest = step.last_key(row / group),
            .maximum = {},
            .total = {}};
  std::fill_n(rows.maximum, kMaxPanel, kNoMaximum);
  for (int r = 0; r < count; ++r) {
    const int token = (row + r) / group;
    const int head = kv_head * group + (row + r) % group;
    const int position = step.position(token);
    rows.lowest = std::min(rows.lowest, position);
    rows.highest = std::max(rows.highest, step.last_key(token));
    const float* query = step.qkv + static_cast<size_t>(token) * static_cast<size_t>(step.qkv_stride) + head * dim;
    prepare_head(scratch, query, step.query_norm, position);
    for (int d = 0; d < dim; ++d) scratch.queries[static_cast<size_t>(d * count + r)] = scratch.head[d] * query_scale_;
  }
  std::fill_n(scratch.sums.data(), scratch.sums.size(), 0.0F);
  const int last_page = step.tree == nullptr ? rows.highest / kPageKeys : step.start / kPageKeys - 1;
  for (int page = step.first_key(rows.lowest) / kPageKeys; page <= last_page; ++page) {
    attend_page(scratch, step, rows, page);
  }
  if (step.tree != nullptr) attend_tree(scratch, step, rows);
  for (int r = 0; r < count; ++r) {
    const int token = (row + r) / group;
    const int head = kv_head * group + (row + r) % group;
    const float factor = step.out_scale / rows.total[r];
    float* out = step.out + step.panels.offset(token, spec_.query_rows()) +
                 static_cast<size_t>(head * dim) * static_cast<size_t>(step.panels.width);
    for (int d = 0; d < dim; ++d) {
      const int tile = d / kTileRows;
      out[static_cast<size_t>(d) * static_cast<size_t>(step.panels.width)] =
          scratch.sums[static_cast<size_t>((tile * count + r) * kTileRows + d % kTileRows)] * factor;
    }
  }
}

// Scores of all rows with the keys of slots [begin, end) of a page, and of those that share their tiles.
void Attention::scores_of(Scratch& scratch, const AttentionStep& step, const Rows& rows, int physical, int begin,
                          int end, float* scores) const noexcept {
  for (int tile = begin / kTileRows; tile * kTileRows < end; ++tile) {
    multiply_tiles(kernels_, cache_.format(), rows.count, 1,
                   cache_.keys(physical, step.cache_layer, rows.kv_head, tile), 0, spec_.head_dim,
                   scratch.queries.data(), scores + tile * rows.count * kTileRows, 0,
                   /*resume=*/false);
  }
}

void Attention::softmax_row(Scratch& scratch, const AttentionStep& step, Rows& rows, int r, int page, const float* low,
                            const float* high) const noexcept {
  const int token = (rows.first + r) / spec_.group();
  const int base = page * kPageKeys;
  const float correction =
      kernels_.softmax_page(low, high, step.first_key(step.position(token)) - base, step.last_key(token) - base,
                            scratch.probabilities.data() + r * kPageKeys, rows.maximum + r, rows.total + r);
  if (correction == 1.0F) return;
  for (int tile = 0; tile * kTileRows < spec_.head_dim; ++tile) {
    float* sums = scratch.sums.data() + (tile * rows.count + r) * kTileRows;
    for (int i = 0; i < kTileRows; ++i) sums[i] *= correction;
  }
}

void Attention::add_values(Scratch& scratch, const AttentionStep& step, const Rows& rows, int physical, int begin,
                           int end) const noexcept {
  const auto multiply = kernels_.multiply_rows[static_cast<int>(cache_.format())][rows.count - 1];
  for (int tile = 0; tile * kTileRows < spec_.head_dim; ++tile) {
    multiply(cache_.value_row(physical, step.cache_layer, rows.kv_head, tile, begin), 0, end - begin,
             scratch.probabilities.data() + begin, scratch.sums.data() + tile * rows.count * kTileRows, 0,
             /*resume=*/true);
  }
}

void Attention::attend_page(Scratch& scratch, const AttentionStep& step, Rows& rows, int page) const noexcept {
  const int base = page * kPageKeys;
  const int physical = step.pages[page];
  // Keys of this page that any row sees: [begin, end).
  const int begin = std::max(step.first_key(rows.lowest) - base, 0);
  const int end = std::min(rows.highest - base, kPageKeys - 1) + 1;
  float* scores = scratch.scores.data();
  scores_of(scratch, step, rows, physical, begin, end, scores);
  for (int r = 0; r < rows.count; ++r) {
    softmax_row(scratch, step, rows, r, page, scores + r * kTileRows, scores + (rows.count + r) * kTileRows);
  }
  add_values(scratch, step, rows, physical, begin, end);
}

void Attention::attend_tree(Scratch& scratch, const AttentionStep& step, Rows& rows) const noexcept {
  const TreePaths& tree = *step.tree;
  const int root_page = step.start / kPageKeys;
  const int committed = step.start % kPageKeys;  // keys of the root's page before the root
  if (committed > 0) {
    scores_of(scratch, step, rows, step.pages[root_page], 0, committed, scratch.scores.data());
  }
  scores_of(scratch, step, rows, cache_.tree_page(), 0, tree.count, scratch.node_scores.data());

  for (int page = root_page; page <= rows.highest / kPageKeys; ++page) {
    const int before = page == root_page ? committed : 0;
    std::fill_n(scratch.probabilities.data(), rows.count * kPageKeys, 0.0F);  // of rows that end before this page
    for (int r = 0; r < rows.count; ++r) {
      const int node = step.node((rows.first + r) / spec_.group());
      const int last = step.start + tree.depths[node] - page * kPageKeys;
      if (last < 0) continue;
      alignas(64) float own[kPageKeys] = {};
      for (int slot = 0; slot < before; ++slot) {
        own[slot] =
            scratch.scores[static_cast<size_t>((slot / kTileRows * rows.count + r) * kTileRows + slot % kTileRows)];
      }
      for (int slot = before; slot <= std::min(last, kPageKeys - 1); ++slot) {
        const int ancestor = tree.path[node][page * kPageKeys + slot - step.start];
        own[slot] = scratch.node_scores[static_cast<size_t>((ancestor / kTileRows * rows.count + r) * kTileRows +
                                                            ancestor % kTileRows)];
      }
      softmax_row(scratch, step, rows, r, page, own, own + kTileRows);
    }
    if (before > 0) add_values(scratch, step, rows, step.pages[page], 0, before);
    add_ancestors(scratch, step, rows, page);
  }
}

// Each node's ancestors (and the node itself) that stand in `page`, in the order of positions.
void Attention::add_ancestors(Scratch& scratch, const AttentionStep& step, const Rows& rows, int page) const noexcept {
  const int group = spec_.group();
  const int first_slot = std::max(step.start - page * kPageKeys, 0);
  const int first_depth = page * kPageKeys + first_slot - step.start;
  for (int r = 0; r < rows.count;) {
    const int token = (rows.first + r) / group;
    const int width = std::min((token + 1) * group - rows.first, rows.count) - r;  // rows of this node
    const int node = step.node(token);
    const uint8_t* path = step.tree->path[node];
    const int end_depth = std::min(step.tree->depths[node] + 1, first_depth + kPageKeys - first_slot);
    const auto multiply = kernels_.multiply_rows[static_cast<int>(cache_.format())][width - 1];
    for (int tile = 0; tile * kTileRows < spec_.head_dim && first_depth < end_depth; ++tile) {
      uint8_t* to = scratch.gathered.data();
      for (int depth = first_depth; depth < end_depth; ++depth, to += cache_.value_row_bytes()) {
        std::memcpy(to, cache_.value_row(cache_.tree_page(), step.cache_layer, rows.kv_head, tile, path[depth]),
                    cache_.value_row_bytes());
      }
      multiply(scratch.gathered.data(), 0, end_depth - first_depth,
               scratch.probabilities.data() + r * kPageKeys + first_slot,
               scratch.sums.data() + (tile * rows.count + r) * kTileRows, 0, /*resume=*/true);
    }
    r += width;
  }
}

}  // namespace ull::cpu
