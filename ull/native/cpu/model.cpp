#include "cpu/model.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "base/allocation.h"

namespace ull::cpu {
namespace {

constexpr int kUnpackedDepth = 128;  // columns of a tile unpacked at a time: 16 KiB, resident in L1 with a panel of x

ModelSpec validated(ModelSpec spec, const ModelOptions& options) {
  validate(spec);
  if (options.chunk < 1) throw std::invalid_argument("chunk: must be at least 1");
  if (options.pages < 0) throw std::invalid_argument("pages: must be at least 1");
  return spec;
}

PageLayout page_layout(const ModelSpec& spec, const ModelOptions& options) {
  return {options.cache_layers > 0 ? options.cache_layers : spec.layers, spec.kv_heads, spec.head_dim,
          format_bytes(spec.page_format())};
}

const float* tile_of(const AlignedArray<float>& values, int tile) {
  return values.size() == 0 ? nullptr : values.data() + static_cast<size_t>(tile) * kTileRows;
}

const float* data_or_null(const AlignedArray<float>& values) { return values.size() == 0 ? nullptr : values.data(); }

}  // namespace

Model::Model(ModelSpec spec, const ModelOptions& options, std::shared_ptr<ThreadTeam> team)
    : spec_(validated(std::move(spec), options)),
      kernels_(select_kernels(options.isa)),
      chunk_(options.chunk),
      weights_(spec_, options.storage),
      team_(team != nullptr ? std::move(team) : std::make_shared<ThreadTeam>(options.threads, options.cores)),
      cache_(page_layout(spec_, options), options.pages > 0 ? options.pages : pages_for(spec_.context),
             spec_.page_format(), options.trees),
      attention_(spec_, kernels_, cache_, *team_, spec_.context),
      qkv_stride_((spec_.qkv_rows() + kTileRows - 1) / kTileRows * kTileRows),
      taps_(options.taps) {
  const size_t columns = static_cast<size_t>(Panels::most_columns(chunk_));
  const size_t hidden = static_cast<size_t>(spec_.hidden);
  const size_t widest =
      static_cast<size_t>(std::max({spec_.hidden, spec_.query_rows(), spec_.intermediate, options.widest}));
  const size_t of_tokens = static_cast<size_t>(chunk_) * (hidden + static_cast<size_t>(qkv_stride_));
  const size_t of_columns =
      columns * (hidden + widest + static_cast<size_t>(team_->size()) * kMaxTileGroup * kTileRows);
  allocate_for("prefill_chunk: activations of " + std::to_string(chunk_) + " tokens",
               sizeof(float) * static_cast<double>(of_tokens + of_columns),
               [&] { allocate_activations(hidden, columns, widest); });
}

void Model::allocate_activations(size_t hidden, size_t columns, size_t widest) {
  const size_t tokens = static_cast<size_t>(chunk_);
  hidden_ = AlignedArray<float>(tokens * hidden);
  qkv_ = AlignedArray<float>(tokens * static_cast<size_t>(qkv_stride_));
  normed_ = AlignedArray<float>(columns * hidden);
  mixed_ = AlignedArray<float>(columns * widest);
  tapped_ = AlignedArray<float>(tokens * tapped_width());
  for (int member = 0; member < team_->size(); ++member) {
    scratch_.push_back({AlignedArray<float>(hidden), AlignedArray<float>(kUnpackedDepth * kTileRows),
                        AlignedArray<float>(kMaxTileGroup * columns * kTileRows)});
  }
}

Status Model::forward(const ForwardStep& step, const std::atomic<bool>& abort) noexcept {
  set_chunk(hidden_.data(), step.count, step.start, step.pages, step.tree);
  stop_ = false;
  const auto body = [&](int member) {
    embed_tokens(member, step.tokens);
    team_->barrier();
    for (int i = 0; i < spec_.layers; ++i) {
      if (step.tapped) keep_tap(member, i);
      layer(member, i);
      if (member == 0) stop_ = interrupted(abort);
      team_->barrier();
      if (stop_) return;
    }
    if (step.tapped) keep_tap(member, spec_.layers);
    if (step.logits_of == LogitsOf::kLast) {
      const float* last = residual_ + static_cast<size_t>(step.count - 1) * static_cast<size_t>(spec_.hidden);
      logits(member, last, Panels::of(1), step.logits);
    } else if (step.logits_of == LogitsOf::kAll) {
      logits(member, residual_, panels_, step.logits);
    }
  };
  team_->run(body);
  return stop_ ? Status::kAborted : Status::kOk;
}

void Model::embed(const int32_t* tokens, int count, float* hidden) noexcept {
  set_chunk(hidden, count, 0, nullptr);
  const auto body = [&](int member) { embed_tokens(member, tokens); };
  team_->run(body);
}

void Model::run_layer(int index, float* hidden, int count, int start, const int32_t* pages) noexcept {
  set_chunk(hidden, count, start, pages);
  const auto body = [&](int member) { layer(member, index); };
  team_->run(body);
}

Status Model::run_block(float* hidden, int count, int start, int first, const int32_t* pages,
                        const std::atomic<bool>& abort) noexcept {
  set_chunk(hidden, count, start, pages);
  block_ = true;
  first_ = first;
  stop_ = false;
  const auto body = [&](int member) {
    for (int i = 0; i < spec_.layers; ++i) {
      layer(member, i);
      if (member == 0) stop_ = interrupted(abort);
      team_->barrier();
      if (stop_) return;
    }
  };
  team_->run(body);
  return stop_ ? Status::kAborted : Status::kOk;
}

void Model::store(const float* x, int count, int start, const int32_t* pages) noexcept {
  set_chunk(nullptr, count, start, pages);
  const auto body = [&](int member) {
    for (int i = 0; i < spec_.layers; ++i) {
      const Matrix& qkv = weights_.layer(i).qkv;
      const float scale = qkv.input_scale();
      for (int token = member; token < count; token += team_->size()) {
        const float* from = x + static_cast<size_t>(token) * static_cast<size_t>(spec_.hidden);
        float* to = normed_.data() + panels_.offset(token, spec_.hidden);
        for (int k = 0; k < spec_.hidden; ++k) to[static_cast<size_t>(k * panels_.width)] = from[k] * scale;
      }
      team_->barrier();
      project_qkv(member, qkv, normed_.data(), spec_.query_rows() / kTileRows);
      team_->barrier();
      attention_.store(member, attention_step(i));
    }
  };
  team_->run(body);
}

void Model::project(float* hidden, int count, float* out) noexcept {
  set_chunk(hidden, count, 0, nullptr);
  const auto body = [&](int member) { logits(member, residual_, panels_, out); };
  team_->run(body);
}

void Model::project_rows(int row, int count, float* out) noexcept {
  const float* hidden = hidden_.data() + static_cast<size_t>(row) * static_cast<size_t>(spec_.hidden);
  const auto body = [&](int member) { logits(member, hidden, Panels::of(count), out); };
  team_->run(body);
}

void Model::normed_row(int row, float* out) const noexcept {
  kernels_.normalise(hidden_.data() + static_cast<size_t>(row) * static_cast<size_t>(spec_.hidden),
                     weights_.norm().data(), spec_.hidden, spec_.rms_epsilon, 1.0F, out, 1);
}

void Model::multiply(const Matrix& matrix, const float* x, int count, float* out, size_t out_stride,
                     int from) noexcept {
  const Panels panels = Panels::of(count);
  const float scale = matrix.input_scale();
  for (int token = 0; token < count; ++token) {
    const float* row = x + static_cast<size_t>(token) * static_cast<size_t>(matrix.columns);
    float* to = mixed_.data() + panels.offset(token, matrix.columns);
    for (int k = 0; k < matrix.columns; ++k) to[static_cast<size_t>(k * panels.width)] = row[k] * scale;
  }
  const auto body = [&](int member) {
    product(member, matrix, mixed_.data(), panels, matrix.rows, out, out_stride, from);
  };
  team_->run(body);
}

void Model::head_logits(const float* x, int count, float* out) noexcept {
  multiply(weights_.lm_head(), x, count, out, static_cast<size_t>(spec_.vocabulary));
}

void Model::keep_node(int node, int position, const int32_t* pages) noexcept {
  cache_.copy_token(cache_.tree_page(), node, pages[position / kPageTokens], position % kPageTokens);
}

void Model::set_chunk(float* hidden, int count, int start, const int32_t* pages, const TreePaths* tree) noexcept {
  residual_ = hidden;
  panels_ = Panels::of(count);
  start_ = start;
  pages_ = pages;
  tree_ = tree;
  block_ = false;
  first_ = 0;
}

void Model::embed_tokens(int member, const int32_t* tokens) noexcept {
  for (int token = member; token < panels_.tokens; token += team_->size()) {
    weights_.embed(tokens[token], residual_ + static_cast<size_t>(token) * static_cast<size_t>(spec_.hidden));
  }
}

void Model::keep_tap(int member, int layer) noexcept {
  const auto found = std::find(taps_.begin(), taps_.end(), layer);
  if (found == taps_.end()) return;
  const size_t hidden = static_cast<size_t>(spec_.hidden);
  float* to = tapped_.data() + static_cast<size_t>(found - taps_.begin()) * hidden;
  for (int token = member; token < panels_.tokens; token += team_->size()) {
    const float* row = residual_ + static_cast<size_t>(token) * hidden;
    std::copy_n(row, hidden, to + static_cast<size_t>(token) * tapped_width());
  }
}

// One transformer layer over the chunk. The caller separates it from what follows by a barrier.
void Model::layer(int member, int index) noexcept {
  const LayerWeights& weights = weights_.layer(index);

  const float* x = normalise(member, residual_, panels_, weights.attention_norm, weights.qkv);
  tap(member, linear_index(index, Linear::kQkv), weights.qkv, normed_, panels_);
  if (member == 0) attention_.reset();
  project_qkv(member, weights.qkv, x);
  team_->barrier();

  attention_.run(member, attention_step(index));
  team_->barrier();

  tap(member, linear_index(index, Linear::kOutput), weights.output, mixed_, panels_);
  add_to_hidden(member, weights.output, mixed_.data());
  team_->barrier();

  x = normalise(member, residual_, panels_, weights.mlp_norm, weights.gate_up);
  tap(member, linear_index(index, Linear::kGateUp), weights.gate_up, normed_, panels_);
  activate(member, weights, x);
  team_->barrier();

  tap(member, linear_index(index, Linear::kDown), weights.down, mixed_, panels_);
  add_to_hidden(member, weights.down, mixed_.data());
}

void Model::project_qkv(int member, const Matrix& matrix, const float* x, int from) noexcept {
  const auto finish = [&](int tile, const float* sums, size_t) {
    for (int token = 0; token < panels_.tokens; ++token) {
      kernels_.finish_tile(
          sums + token * kTileRows, tile_of(matrix.scale, tile), tile_of(matrix.bias, tile),
          qkv_.data() + static_cast<size_t>(token) * static_cast<size_t>(qkv_stride_) + tile * kTileRows);
    }
  };
  linear(member, matrix, x, panels_, 1, finish, from);
}

AttentionStep Model::attention_step(int index) noexcept {
  const LayerWeights& weights = weights_.layer(index);
  return {.qkv = qkv_.data(),
          .qkv_stride = qkv_stride_,
          .start = start_,
          .pages = pages_,
          .cache_layer = index % cache_.layers(),
          .window = spec_.windows[static_cast<size_t>(index)],
          .query_norm = data_or_null(weights.query_norm),
          .key_norm = data_or_null(weights.key_norm),
          .kv_scale = data_or_null(weights.kv_scale),
          .panels = panels_,
          .out = mixed_.data(),
          .out_scale = weights.output.input_scale(),
          .tree = tree_,
          .block = block_,
          .first = first_};
}

void Model::logits(int member, const float* hidden, const Panels& panels, float* out) noexcept {
  const Matrix& matrix = weights_.lm_head();
  const float* x = normalise(member, hidden, panels, weights_.norm(), matrix);
  tap(member, lm_head_index(spec_.layers), matrix, normed_, panels);
  product(member, matrix, x, panels, spec_.vocabulary, out, static_cast<size_t>(spec_.vocabulary));
}

void Model::tap(int member, int linear, const Matrix& matrix, AlignedArray<float>& x, const Panels& panels) noexcept {
  if (tap_ == nullptr) return;
  for (int token = member; token < panels.tokens; token += team_->size()) {
    tap_->take(linear, member, x.data() + panels.offset(token, matrix.columns), matrix.columns, panels.width,
               matrix.input_scale());
  }
  team_->barrier();
}

void Model::product(int member, const Matrix& matrix, const float* x, const Panels& panels, int rows, float* out,
                    size_t out_stride, int from) noexcept {
  const auto finish = [&](int tile, const float* sums, size_t) {
    const int filled = std::min(kTileRows, rows - tile * kTileRows);
    for (int token = 0; token < panels.tokens; ++token) {
      alignas(64) float row[kTileRows];
      kernels_.finish_tile(sums + token * kTileRows, tile_of(matrix.scale, tile), tile_of(matrix.bias, tile), row);
      std::copy(row, row + filled, out + static_cast<size_t>(token) * out_stride + tile * kTileRows);
    }
  };
  linear(member, matrix, x, panels, 1, finish, from);
}

const float* Model::normalise(int member, const float* hidden, const Panels& panels, const AlignedArray<float>& weight,
                              const Matrix& consumer) noexcept {
  const size_t width = static_cast<size_t>(spec_.hidden);
  if (panels.tokens == 1 && tap_ == nullptr) {  // cheaper than a barrier
    float* out = scratch_[static_cast<size_t>(member)].normed.data();
    kernels_.normalise(hidden, weight.data(), spec_.hidden, spec_.rms_epsilon, consumer.input_scale(), out, 1);
    return out;
  }
  for (int token = member; token < panels.tokens; token += team_->size()) {
    kernels_.normalise(hidden + static_cast<size_t>(token) * width, weight.data(), spec_.hidden, spec_.rms_epsilon,
                       consumer.input_scale(), normed_.data() + panels.offset(token, spec_.hidden), panels.width);
  }
  team_->barrier();
  return normed_.data();
}

template <typename Finish>
void Model::linear(int member, const Matrix& matrix, const float* x, const Panels& panels, int unit, Finish finish,
                   int from) noexcept {
  Scratch& scratch = scratch_[static_cast<size_t>(member)];
  const int units = (matrix.tiles - from) / unit;
  const int begin = from + static_cast<int>(static_cast<int64_t>(units) * member / team_->size()) * unit;
  const int end = from + static_cast<int>(static_cast<int64_t>(units) * (member + 1) / team_->size()) * unit;
  const int group = panels.width == 1 || panels.count > 1 ? kMaxTileGroup : 2;
  const size_t sums_tile = static_cast<size_t>(panels.columns()) * kTileRows;
  const size_t panel_size = static_cast<size_t>(matrix.columns) * static_cast<size_t>(panels.width);
  for (int tile = begin; tile < end; tile += group) {
    const int tiles = std::min(group, end - tile);
    const uint8_t* weights = matrix.data + static_cast<size_t>(tile) * matrix.tile_bytes();
    if (panels.count == 1) {
      multiply_tiles(kernels_, matrix.format, panels.width, tiles, weights, matrix.tile_bytes(), matrix.columns, x,
                     scratch.sums.data(), sums_tile, /*resume=*/false);
    } else {
      // Many panels: unpack a block of a tile once, then use it for every panel. The group's tiles share the block of
      // x, which stays in L2.
      for (int k = 0; k < matrix.columns; k += kUnpackedDepth) {
        const int depth = std::min(kUnpackedDepth, matrix.columns - k);
        for (int t = 0; t < tiles; ++t) {
          const uint8_t* packed = weights + static_cast<size_t>(t) * matrix.tile_bytes() +
                                  static_cast<size_t>(k) * kTileRows * format_bytes(matrix.format);
          kernels_.unpack[static_cast<int>(matrix.format)](packed, depth, scratch.unpacked.data());
          for (int panel = 0; panel < panels.count; ++panel) {
            multiply_tiles(kernels_, Format::kF32, panels.width, 1,
                           reinterpret_cast<const uint8_t*>(scratch.unpacked.data()), 0, depth,
                           x + static_cast<size_t>(panel) * panel_size + k * panels.width,
                           scratch.sums.data() + static_cast<size_t>(t) * sums_tile + panel * panels.width * kTileRows,
                           0, /*resume=*/k > 0);
          }
        }
      }
    }
    for (int t = 0; t < tiles; t += unit) {
      finish(tile + t, scratch.sums.data() + static_cast<size_t>(t) * sums_tile, sums_tile);
    }
  }
}

// hidden += matrix x
void Model::add_to_hidden(int member, const Matrix& matrix, const float* x) noexcept {
  linear(member, matrix, x, panels_, 1, [&](int tile, const float* sums, size_t) {
    const int rows = std::min(kTileRows, matrix.rows - tile * kTileRows);
    for (int token = 0; token < panels_.tokens; ++token) {
      alignas(64) float row[kTileRows];
      kernels_.finish_tile(sums + token * kTileRows, tile_of(matrix.scale, tile), tile_of(matrix.bias, tile), row);
      float* hidden = residual_ + static_cast<size_t>(token) * static_cast<size_t>(spec_.hidden) + tile * kTileRows;
      for (int i = 0; i < rows; ++i) hidden[i] += row[i];
    }
  });
}

// mixed = silu(gate x) * (up x), packed for `down`
void Model::activate(int member, const LayerWeights& weights, const float* x) noexcept {
  const Matrix& matrix = weights.gate_up;
  const float factor = weights.down.input_scale();
  const size_t step = static_cast<size_t>(panels_.width);
  linear(member, matrix, x, panels_, 2, [&](int tile, const float* sums, size_t sums_tile) {
    const int first = tile / 2 * kTileRows;
    const int rows = std::min(kTileRows, spec_.intermediate - first);
    for (int token = 0; token < panels_.tokens; ++token) {
      alignas(64) float gate[kTileRows], up[kTileRows];
      kernels_.finish_tile(sums + token * kTileRows, tile_of(matrix.scale, tile), tile_of(matrix.bias, tile), gate);
      kernels_.finish_tile(sums + sums_tile + token * kTileRows, tile_of(matrix.scale, tile + 1),
                           tile_of(matrix.bias, tile + 1), up);
      kernels_.silu_multiply(gate, up, factor, gate);
      float* out = mixed_.data() + panels_.offset(token, spec_.intermediate) + static_cast<size_t>(first) * step;
      for (int i = 0; i < rows; ++i) out[static_cast<size_t>(i) * step] = gate[i];
    }
  });
}

}  // namespace ull::cpu
