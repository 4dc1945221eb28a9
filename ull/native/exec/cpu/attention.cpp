#include "exec/cpu/attention.h"

#include <algorithm>
#include <cmath>

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
      cosine_[index] = static_cast<float>(std::cos(static_cast<double>(angle)));
      sine_[index] = static_cast<float>(std::sin(static_cast<double>(angle)));
      ++index;
    }
  }
  const size_t dim = static_cast<size_t>(spec.head_dim);
  const size_t padded = (dim + kTileRows - 1) / kTileRows * kTileRows;
  for (int member = 0; member < team.size(); ++member) {
    scratch_.push_back({AlignedArray<float>(dim), AlignedArray<float>(dim * kMaxPanel),
                        AlignedArray<float>(2 * kMaxPanel * kTileRows), AlignedArray<float>(kMaxPanel * kPageKeys),
                        AlignedArray<float>(kMaxPanel * padded)});
  }
}

void Attention::run(int member, const AttentionStep& step) noexcept {
  Scratch& scratch = scratch_[static_cast<size_t>(member)];
  const int tokens = step.panels.tokens;
  const Panels rows = Panels::of(tokens * spec_.group());
  // One token: whoever attends over a KV head first writes its key and value, and nobody else reads them.
  const bool own_writes = tokens == 1 && rows.count == 1;
  if (!own_writes) {
    for (int i = member; i < tokens * spec_.kv_heads; i += team_.size()) {
      write_cache(scratch, step, i / spec_.kv_heads, i % spec_.kv_heads);
    }
    team_.barrier();
  }
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

void Attention::prepare_head(Scratch& scratch, const float* from, const float* weight, int position) const noexcept {
  float* head = scratch.head.data();
  if (weight != nullptr) {
    kernels_.normalize(from, weight, spec_.head_dim, spec_.rms_epsilon, 1.0F, head, 1);
  } else {
    std::copy(from, from + spec_.head_dim, head);
  }
  const size_t row = static_cast<size_t>(position) * spec_.inv_freq.size();
  kernels_.rotate(head, cosine_.data() + row, sine_.data() + row, spec_.head_dim / 2);
}

void Attention::write_cache(Scratch& scratch, const AttentionStep& step, int token, int kv_head) noexcept {
  const int position = step.start + token;
  const float* row = step.qkv + static_cast<size_t>(token) * static_cast<size_t>(step.qkv_stride);
  const float* key = row + spec_.query_rows() + kv_head * spec_.head_dim;
  const float* value = key + spec_.kv_rows();
  prepare_head(scratch, key, step.key_norm, position);
  cache_.write(step.pages[position / kPageKeys], step.cache_layer, kv_head, position % kPageKeys, scratch.head.data(),
               value);
}

void Attention::attend(Scratch& scratch, const AttentionStep& step, int kv_head, int row, int rows) const noexcept {
  const int group = spec_.group();
  const int dim = spec_.head_dim;
  for (int r = 0; r < rows; ++r) {
    const int token = (row + r) / group;
    const int head = kv_head * group + (row + r) % group;
    const float* query = step.qkv + static_cast<size_t>(token) * static_cast<size_t>(step.qkv_stride) + head * dim;
    prepare_head(scratch, query, step.query_norm, step.start + token);
    for (int d = 0; d < dim; ++d) scratch.queries[static_cast<size_t>(d * rows + r)] = scratch.head[d] * query_scale_;
  }
  float maximum[kMaxPanel], total[kMaxPanel];
  std::fill_n(maximum, kMaxPanel, kNoMaximum);
  std::fill_n(total, kMaxPanel, 0.0F);
  std::fill_n(scratch.sums.data(), scratch.sums.size(), 0.0F);
  const int first_position = step.start + row / group;
  const int last_position = step.start + (row + rows - 1) / group;
  const int first_key = step.window > 0 ? std::max(0, first_position - step.window + 1) : 0;
  for (int page = first_key / kPageKeys; page <= last_position / kPageKeys; ++page) {
    attend_page(scratch, step, kv_head, row, rows, page, maximum, total);
  }
  for (int r = 0; r < rows; ++r) {
    const int token = (row + r) / group;
    const int head = kv_head * group + (row + r) % group;
    const float factor = step.out_scale / total[r];
    float* out = step.out + step.panels.offset(token, spec_.query_rows()) +
                 static_cast<size_t>(head * dim) * static_cast<size_t>(step.panels.width);
    for (int d = 0; d < dim; ++d) {
      const int tile = d / kTileRows;
      out[static_cast<size_t>(d) * static_cast<size_t>(step.panels.width)] =
          scratch.sums[static_cast<size_t>((tile * rows + r) * kTileRows + d % kTileRows)] * factor;
    }
  }
}

void Attention::attend_page(Scratch& scratch, const AttentionStep& step, int kv_head, int row, int rows, int page,
                            float* maximum, float* total) const noexcept {
  const int group = spec_.group();
  const int base = page * kPageKeys;
  const int physical = step.pages[page];
  const auto first_key = [&](int position) { return step.window > 0 ? std::max(0, position - step.window + 1) : 0; };
  // Keys of this page that any row sees: [begin, end).
  const int begin = std::max(first_key(step.start + row / group) - base, 0);
  const int end = std::min(step.start + (row + rows - 1) / group - base, kPageKeys - 1) + 1;

  float* scores = scratch.scores.data();
  const int score_tile = rows * kTileRows;
  for (int tile = begin / kTileRows; tile <= (end - 1) / kTileRows; ++tile) {
    multiply_tiles(kernels_, cache_.format(), rows, 1, cache_.keys(physical, step.cache_layer, kv_head, tile), 0,
                   spec_.head_dim, scratch.queries.data(), scores + tile * score_tile, 0, /*resume=*/false);
  }
  const int value_tiles = (spec_.head_dim + kTileRows - 1) / kTileRows;
  for (int r = 0; r < rows; ++r) {
    const int position = step.start + (row + r) / group;
    const float correction =
        kernels_.softmax_page(scores + r * kTileRows, scores + score_tile + r * kTileRows, first_key(position) - base,
                              position - base, scratch.probabilities.data() + r * kPageKeys, maximum + r, total + r);
    if (correction == 1.0F) continue;
    for (int tile = 0; tile < value_tiles; ++tile) {
      float* sums = scratch.sums.data() + (tile * rows + r) * kTileRows;
      for (int i = 0; i < kTileRows; ++i) sums[i] *= correction;
    }
  }
  const size_t skipped = static_cast<size_t>(begin) * kTileRows * format_bytes(cache_.format());
  const auto multiply = kernels_.multiply_rows[static_cast<int>(cache_.format())][rows - 1];
  for (int tile = 0; tile < value_tiles; ++tile) {
    multiply(cache_.values(physical, step.cache_layer, kv_head, tile) + skipped, 0, end - begin,
             scratch.probabilities.data() + begin, scratch.sums.data() + tile * score_tile, 0, /*resume=*/true);
  }
}

}  // namespace ull::cpu
