// An EAGLE head appended to a ModelFile's weights: random f32, with what it holds kept for a naive reference.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cpu/model_shape.h"
#include "exec_model.h"

namespace ull::check {

using Row = std::vector<double>;

struct EagleOptions {
  bool norm_before_residual = false;
  bool norm_output = false;
  cpu::EagleSpec::TapNorm tap_norm = cpu::EagleSpec::TapNorm::kNone;
  bool own_embedding = false;
  bool mapped = false;
  bool own_shape = false;  // a hidden size and heads of its own; wants own_embedding
  bool qk_norm = false;
  int window = 0;
  std::vector<int> taps = {0, 2, 3};
};

// What a tensor holds: [rows][columns].
struct Dense {
  int rows = 0;
  int columns = 0;
  Row values;

  [[nodiscard]] Row operator()(const Row& x) const {
    Row y(static_cast<size_t>(rows));
    for (size_t r = 0; r < y.size(); ++r) {
      for (size_t k = 0; k < x.size(); ++k) y[r] += values[r * x.size() + k] * x[k];
    }
    return y;
  }
  [[nodiscard]] Row row(int index) const {
    const auto begin = values.begin() + static_cast<std::ptrdiff_t>(index) * columns;
    return {begin, begin + columns};
  }
};

class EagleFile {
 public:
  // The value of tensor `name` at (row, column); a vector has one row.
  using Fill = std::function<float(const std::string& name, int row, int column)>;

  explicit EagleFile(const EagleOptions& wanted = {}, const Fill& fill = nullptr)
      : options(wanted), fill_(fill), file_(std::fopen(model.spec.path.c_str(), "ab")) {
    if (file_ == nullptr || std::fseek(file_, 0, SEEK_END) != 0) std::abort();
    offset_ = std::ftell(file_);
    spec = std::make_shared<cpu::EagleSpec>();
    cpu::ModelSpec& own = spec->model;
    own = model.spec;
    own.tensors.clear();
    own.layers = 1;
    own.windows.assign(1, options.window);
    own.qk_norm = options.qk_norm;
    own.kv_heads = 4;
    own.intermediate = 50;
    if (options.own_shape) {
      own.hidden = 40;
      own.heads = 6;
      own.kv_heads = 2;
      own.head_dim = 20;
      own.inv_freq = {1.0F, 0.7F, 0.5F, 0.3F, 0.2F, 0.1F, 0.07F, 0.05F, 0.03F, 0.02F};
    }
    if (options.mapped) own.vocabulary = 48;
    spec->taps = options.taps;
    spec->norm_before_residual = options.norm_before_residual;
    spec->norm_output = options.norm_output;
    spec->tap_norm = options.tap_norm;
    spec->own_embedding = options.own_embedding;
    spec->mapped = options.mapped;
    write();
    std::fclose(file_);
    model.spec.eagle = spec;
  }

  [[nodiscard]] int taps_width() const { return static_cast<int>(options.taps.size()) * model.spec.hidden; }
  // The target's token of its own.
  [[nodiscard]] int32_t name(int own) const { return options.mapped ? names[static_cast<size_t>(own)] : own; }

  EagleOptions options;
  ModelFile model;
  std::shared_ptr<cpu::EagleSpec> spec;
  std::vector<Row> tap_norms;
  Dense fc, embedding_norm, hidden_norm, qkv, query_norm, key_norm, output, mlp_norm, gate, up, down, norm, lm_head;
  Dense embedding;             // its own
  std::vector<int32_t> names;  // mapped

 private:
  void write() {
    using TapNorm = cpu::EagleSpec::TapNorm;
    const cpu::ModelSpec& own = spec->model;
    const int target = model.spec.hidden;
    fc = matrix("fc", own.hidden, taps_width());
    for (size_t i = 0; options.tap_norm == TapNorm::kEach && i < options.taps.size(); ++i) {
      tap_norms.push_back(vector("tap_norm." + std::to_string(i), target).values);
    }
    if (options.tap_norm == TapNorm::kAll) tap_norms.push_back(vector("tap_norm", taps_width()).values);
    embedding_norm = vector("layers.0.attn_norm", own.hidden);
    hidden_norm = vector("layers.0.hidden_norm", own.hidden);
    qkv = matrix("layers.0.qkv", own.qkv_rows(), 2 * own.hidden);
    if (own.qk_norm) {
      query_norm = vector("layers.0.q_norm", own.head_dim);
      key_norm = vector("layers.0.k_norm", own.head_dim);
    }
    output = matrix("layers.0.o", own.hidden, own.query_rows());
    mlp_norm = vector("layers.0.mlp_norm", own.hidden);
    gate = random("gate", own.intermediate, own.hidden);
    up = random("up", own.intermediate, own.hidden);
    write_gate_up();
    down = matrix("layers.0.down", own.hidden, own.intermediate);
    norm = vector("norm", own.hidden);
    lm_head = matrix("lm_head", own.vocabulary, own.hidden);
    if (options.own_embedding) {
      embedding = random("embed", model.spec.vocabulary, own.hidden);
      const std::vector<float> values(embedding.values.begin(), embedding.values.end());
      put("embed.weight", values.data(), values.size(), {model.spec.vocabulary, own.hidden});
    }
    if (options.mapped) {
      for (int i = 0; i < own.vocabulary; ++i) names.push_back((i * 33 + 5) % model.spec.vocabulary);
      std::vector<float> bits(names.size());
      std::memcpy(bits.data(), names.data(), names.size() * sizeof(int32_t));
      put("d2t", bits.data(), bits.size(), {own.vocabulary});
    }
  }

  Dense random(const std::string& name, int rows, int columns, float mean = 0.0F) {
    std::normal_distribution<float> normal(mean, 0.2F);
    Dense dense{rows, columns, {}};
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < columns; ++c) {
        const float value = normal(random_);
        dense.values.push_back(static_cast<double>(fill_ ? fill_(name, r, c) : value));
      }
    }
    return dense;
  }

  Dense vector(const std::string& name, int length) {
    Dense dense = random(name, 1, length, 1.0F);
    std::vector<float> values(dense.values.begin(), dense.values.end());
    values.resize((values.size() + 15) / 16 * 16);
    put(name, values.data(), values.size(), {static_cast<int64_t>(values.size())});
    return dense;
  }

  Dense matrix(const std::string& name, int rows, int columns) {
    Dense dense = random(name, rows, columns);
    const int tiles = (rows + 31) / 32;
    std::vector<float> packed(static_cast<size_t>(tiles * columns * 32));
    pack(dense, packed, [](int tile) { return tile; });
    put(name + ".weight", packed.data(), packed.size(), {tiles, columns, 32});
    return dense;
  }

  void write_gate_up() {
    const int tiles = 2 * ((gate.rows + 31) / 32);
    std::vector<float> packed(static_cast<size_t>(tiles * gate.columns * 32));
    pack(gate, packed, [](int tile) { return 2 * tile; });
    pack(up, packed, [](int tile) { return 2 * tile + 1; });
    put("layers.0.gate_up.weight", packed.data(), packed.size(), {tiles, gate.columns, 32});
  }

  template <typename Place>
  static void pack(const Dense& dense, std::vector<float>& packed, Place place) {
    for (int r = 0; r < dense.rows; ++r) {
      for (int k = 0; k < dense.columns; ++k) {
        packed[static_cast<size_t>((place(r / 32) * dense.columns + k) * 32 + r % 32)] =
            static_cast<float>(dense.values[static_cast<size_t>(r * dense.columns + k)]);
      }
    }
  }

  void put(const std::string& name, const float* data, size_t count, const std::vector<int64_t>& shape) {
    const size_t bytes = count * sizeof(float);
    spec->model.tensors[name] = {offset_, static_cast<int64_t>(bytes), cpu::Format::kF32, shape};
    if (std::fwrite(data, 1, bytes, file_) != bytes) std::abort();
    offset_ += static_cast<int64_t>(bytes);
  }

  std::mt19937 random_{17};
  Fill fill_;
  FILE* file_ = nullptr;
  int64_t offset_ = 0;
};

// The head by its definition, in double precision: one entry after another, each sees those that it is told to.
class EagleReference {
 public:
  // embed: the target's embedding, where the head has none.
  EagleReference(const EagleFile& file, std::function<Row(int32_t)> embed) : file_(file), embed_(std::move(embed)) {}

  [[nodiscard]] Row of_taps(Row taps) const {
    const size_t count = file_.tap_norms.size(), width = count == 0 ? 0 : taps.size() / count;
    for (size_t i = 0; i < count; ++i) {
      const Row part = normed({taps.begin() + static_cast<std::ptrdiff_t>(i * width),
                               taps.begin() + static_cast<std::ptrdiff_t>((i + 1) * width)},
                              file_.tap_norms[i]);
      std::copy(part.begin(), part.end(), taps.begin() + static_cast<std::ptrdiff_t>(i * width));
    }
    return file_.fc(taps);
  }

  // A new entry, `seen` are the ones before it in its text; its number.
  int add(int32_t token, const Row& state, int position, const std::vector<int>& seen) {
    const cpu::ModelSpec& own = file_.spec->model;
    const Row hidden = normed(state, file_.hidden_norm.values);
    Row x =
        normed(file_.options.own_embedding ? file_.embedding.row(token) : embed_(token), file_.embedding_norm.values);
    x.insert(x.end(), hidden.begin(), hidden.end());
    const Row qkv = file_.qkv(x);
    Entry entry{.position = position, .keys = {}, .values = {}, .residual = {}};
    std::vector<Row> queries;
    for (int head = 0; head < own.heads; ++head) queries.push_back(turned(qkv, head, file_.query_norm, position));
    for (int head = 0; head < own.kv_heads; ++head) {
      entry.keys.push_back(turned(qkv, own.heads + head, file_.key_norm, position));
      entry.values.push_back(part(qkv, own.heads + own.kv_heads + head));
    }
    entries_.push_back(entry);
    std::vector<int> visible = seen;
    visible.push_back(static_cast<int>(entries_.size()) - 1);
    Row attended;
    for (int head = 0; head < own.heads; ++head) {
      const Row mixed = attend(queries[static_cast<size_t>(head)], head / own.group(), position, visible);
      attended.insert(attended.end(), mixed.begin(), mixed.end());
    }
    Row residual = file_.options.norm_before_residual ? hidden : state;
    residual = sum(residual, file_.output(attended));
    const Row normed_residual = normed(residual, file_.mlp_norm.values);
    Row gate = file_.gate(normed_residual);
    const Row up = file_.up(normed_residual);
    for (size_t i = 0; i < gate.size(); ++i) gate[i] = gate[i] / (1.0 + std::exp(-gate[i])) * up[i];
    entries_.back().residual = sum(residual, file_.down(gate));
    return static_cast<int>(entries_.size()) - 1;
  }

  // What an entry below it is made of.
  [[nodiscard]] Row output(int entry) const {
    const Row& residual = entries_[static_cast<size_t>(entry)].residual;
    return file_.options.norm_output ? normed(residual, file_.norm.values) : residual;
  }
  [[nodiscard]] Row logits(int entry) const {
    return file_.lm_head(normed(entries_[static_cast<size_t>(entry)].residual, file_.norm.values));
  }

 private:
  struct Entry {
    int position;
    std::vector<Row> keys, values;  // [kv_heads][head_dim]
    Row residual;
  };

  [[nodiscard]] static Row normed(const Row& x, const Row& weight) {
    double squares = 0.0;
    for (const double value : x) squares += value * value;
    const double scale = 1.0 / std::sqrt(squares / static_cast<double>(x.size()) + 1e-5);
    Row y(x.size());
    for (size_t i = 0; i < x.size(); ++i) y[i] = x[i] * scale * weight[i];
    return y;
  }
  [[nodiscard]] static Row sum(Row a, const Row& b) {
    for (size_t i = 0; i < a.size(); ++i) a[i] += b[i];
    return a;
  }
  [[nodiscard]] Row part(const Row& qkv, int head) const {
    const auto begin = qkv.begin() + static_cast<std::ptrdiff_t>(head) * file_.spec->model.head_dim;
    return {begin, begin + file_.spec->model.head_dim};
  }
  [[nodiscard]] Row turned(const Row& qkv, int head, const Dense& norm, int position) const {
    Row x = part(qkv, head);
    if (file_.options.qk_norm) x = normed(x, norm.values);
    const size_t half = x.size() / 2;
    for (size_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(file_.spec->model.inv_freq[i]) * position;
      const double a = x[i], b = x[half + i];
      x[i] = a * std::cos(angle) - b * std::sin(angle);
      x[half + i] = b * std::cos(angle) + a * std::sin(angle);
    }
    return x;
  }
  [[nodiscard]] Row attend(const Row& query, int kv_head, int position, const std::vector<int>& visible) const {
    const size_t head = static_cast<size_t>(kv_head);
    Row mixed(query.size());
    double total = 0.0;
    for (const int other : visible) {
      const Entry& entry = entries_[static_cast<size_t>(other)];
      if (file_.options.window > 0 && entry.position <= position - file_.options.window) continue;
      double score = 0.0;
      for (size_t i = 0; i < query.size(); ++i) score += query[i] * entry.keys[head][i];
      const double weight = std::exp(score / std::sqrt(static_cast<double>(query.size())));
      total += weight;
      for (size_t i = 0; i < mixed.size(); ++i) mixed[i] += weight * entry.values[head][i];
    }
    for (double& value : mixed) value /= total;
    return mixed;
  }

  const EagleFile& file_;
  std::function<Row(int32_t)> embed_;
  std::vector<Entry> entries_;
};

}  // namespace ull::check
