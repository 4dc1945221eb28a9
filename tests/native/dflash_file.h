// A DFlash or DSpark head appended to a ModelFile's weights: random f32, with what it holds kept for a plain reference.
#pragma once

#include <bit>
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

#include "cpu/kv_cache.h"
#include "cpu/model_shape.h"
#include "exec_model.h"
#include "medusa_file.h"

namespace ull::check {

struct DflashShape {
  bool own_embedding = false;
  bool own_lm_head = false;
  bool mapped = false;
  bool anchor_predicts = false;
  int markov = 0;
  bool gated = false;
  bool confidence = false;
  bool reads_markov = false;
  int window = 0;  // of the second layer
  int block = 8;
  int heads = 4;
};

using Vector = std::vector<double>;

class DflashFile {
 public:
  explicit DflashFile(const DflashShape& shape = {}) : shape_(shape), file_(std::fopen(model.spec.path.c_str(), "ab")) {
    if (file_ == nullptr || std::fseek(file_, 0, SEEK_END) != 0) std::abort();
    offset_ = std::ftell(file_);
    head = std::make_shared<cpu::DflashSpec>();
    cpu::ModelSpec& own = head->model;
    own.path = model.spec.path;
    own.hidden = shape.own_embedding && shape.own_lm_head ? 96 : 64;
    own.layers = 2;
    own.heads = shape.heads;
    own.kv_heads = 1;
    own.head_dim = 16;
    own.intermediate = 70;  // not a multiple of a tile's rows
    own.vocabulary = shape.mapped ? 50 : shape.own_lm_head ? 75 : 80;
    own.context = model.spec.context;
    own.rms_epsilon = 1e-5F;
    own.qk_norm = true;
    own.kv_format = cpu::Format::kF32;
    own.inv_freq = model.spec.inv_freq;
    own.windows = {0, shape.window};
    head->taps = {3, 0, 2};  // in an order of the head's own
    head->block = shape.block;
    head->mask_token = 79;
    head->anchor_predicts = shape.anchor_predicts;
    head->own_embedding = shape.own_embedding;
    head->own_lm_head = shape.own_lm_head;
    head->mapped = shape.mapped;
    head->markov = shape.markov;
    head->gated = shape.gated;
    head->confidence = shape.confidence;
    head->confidence_reads_markov = shape.reads_markov;

    fc = add_matrix("fc", own.hidden, 3 * 64, 0.1F, false);
    hidden_norm = add_vector("hidden_norm", own.hidden, 1.0F);
    for (int i = 0; i < own.layers; ++i) {
      const std::string prefix = "layers." + std::to_string(i) + ".";
      Layer layer;
      layer.attention_norm = add_vector(prefix + "attn_norm", own.hidden, 1.0F);
      layer.qkv = add_matrix(prefix + "qkv", own.qkv_rows(), own.hidden, 0.2F, true);
      layer.query_norm = add_vector(prefix + "q_norm", own.head_dim, 1.0F);
      layer.key_norm = add_vector(prefix + "k_norm", own.head_dim, 1.0F);
      layer.output = add_matrix(prefix + "o", own.hidden, own.query_rows(), 0.2F, false);
      layer.mlp_norm = add_vector(prefix + "mlp_norm", own.hidden, 1.0F);
      add_gate_up(prefix + "gate_up", layer);
      layer.down = add_matrix(prefix + "down", own.hidden, own.intermediate, 0.2F, false);
      layers.push_back(layer);
    }
    norm = add_vector("norm", own.hidden, 1.0F);
    if (shape.own_lm_head) lm_head = add_matrix("lm_head", own.vocabulary, own.hidden, 0.3F, false);
    if (shape.own_embedding) embedding = add_rows("embed.weight", 80, own.hidden, 1.0F, false);
    if (shape.mapped) add_map();
    if (shape.markov > 0) {
      markov_embedding = add_rows("markov.embed", 80, shape.markov, 0.5F, true);
      markov_head = add_rows("markov.head", own.vocabulary, shape.markov, 0.5F, true);
    }
    if (shape.gated) gate = add_matrix("markov.gate", shape.markov, own.hidden + shape.markov, 0.2F, true);
    if (shape.confidence) {
      confidence = add_vector("confidence.weight", own.hidden + (shape.reads_markov ? shape.markov : 0), 0.0F, 0.3F);
      confidence_bias = add_vector("confidence.bias", 1, 0.4F)[0];
    }
    std::fclose(file_);
    model.spec.dflash = head;
  }

  // The states of a block [root, mask ...] of `count` positions at position `start`, behind the final norm, where
  // taps[p] ([3 * 64], in the order of head->taps) are those of position p and context is seen from `first` on.
  [[nodiscard]] std::vector<Vector> states(const std::vector<Vector>& taps, int first, int start, int count,
                                           const std::function<Vector(int32_t)>& embed, int32_t root) const {
    const cpu::ModelSpec& own = head->model;
    std::vector<Vector> context(static_cast<size_t>(start)), block;
    for (int p = 0; p < start; ++p) {
      context[static_cast<size_t>(p)] = normalised(fc(taps[static_cast<size_t>(p)]), hidden_norm);
    }
    for (int i = 0; i < count; ++i) block.push_back(embed(i == 0 ? root : head->mask_token));
    for (size_t l = 0; l < layers.size(); ++l) {
      const Layer& layer = layers[l];
      std::vector<Vector> keys, values, queries;
      for (int p = 0; p < start + count; ++p) {
        const bool in_block = p >= start;
        const Vector x = in_block ? normalised(block[static_cast<size_t>(p - start)], layer.attention_norm)
                                  : context[static_cast<size_t>(p)];
        const Vector qkv = layer.qkv(x);
        const auto part = [&](int from, int to) { return Vector(qkv.begin() + from, qkv.begin() + to); };
        const int query_rows = own.query_rows(), dim = own.head_dim;
        keys.push_back(rotated(normalised(part(query_rows, query_rows + dim), layer.key_norm), p));
        values.push_back(part(query_rows + dim, query_rows + 2 * dim));
        if (!in_block) continue;
        Vector all;
        for (int h = 0; h < own.heads; ++h) {
          const Vector query = rotated(normalised(part(h * dim, (h + 1) * dim), layer.query_norm), p);
          all.insert(all.end(), query.begin(), query.end());
        }
        queries.push_back(all);
      }
      const int window = own.windows[l];
      for (int i = 0; i < count; ++i) {
        const int lowest = window > 0 ? std::max(first, start + i - window + 1) : first;
        const Vector mixed = attend(queries[static_cast<size_t>(i)], keys, values, lowest);
        add_to(block[static_cast<size_t>(i)], layer.output(mixed));
        const Vector x = normalised(block[static_cast<size_t>(i)], layer.mlp_norm);
        Vector gated = layer.gate(x);
        const Vector up = layer.up(x);
        for (size_t k = 0; k < gated.size(); ++k) gated[k] *= up[k] / (1.0 + std::exp(-gated[k]));
        add_to(block[static_cast<size_t>(i)], layer.down(gated));
      }
    }
    for (Vector& x : block) x = normalised(x, norm);
    return block;
  }

  // What `parent` adds to the logit of its own token `child` in a slot of that state.
  [[nodiscard]] double markov(const Vector& state, int32_t parent, int32_t child) const {
    Vector factor = markov_embedding[static_cast<size_t>(parent)];
    if (shape_.gated) {
      Vector x = state;
      x.insert(x.end(), factor.begin(), factor.end());
      const Vector gates = gate(x);
      for (size_t k = 0; k < factor.size(); ++k) factor[k] /= 1.0 + std::exp(-gates[k]);
    }
    double sum = 0.0;
    for (size_t k = 0; k < factor.size(); ++k) sum += factor[k] * markov_head[static_cast<size_t>(child)][k];
    return sum;
  }

  [[nodiscard]] double survival(const Vector& state, int32_t parent) const {
    Vector x = state;
    if (shape_.reads_markov) {
      const Vector& embedded = markov_embedding[static_cast<size_t>(parent)];
      x.insert(x.end(), embedded.begin(), embedded.end());
    }
    double sum = confidence_bias;
    for (size_t k = 0; k < x.size(); ++k) sum += x[k] * confidence[k];
    return 1.0 / (1.0 + std::exp(-sum));
  }

  [[nodiscard]] int32_t token_of(int own) const { return shape_.mapped ? map[static_cast<size_t>(own)] : own; }

  struct Layer {
    Vector attention_norm, query_norm, key_norm, mlp_norm;
    DenseMatrix qkv, output, gate, up, down;
  };

  ModelFile model;
  std::shared_ptr<cpu::DflashSpec> head;
  DenseMatrix fc, lm_head, gate;
  Vector hidden_norm, norm, confidence;
  std::vector<Layer> layers;
  std::vector<Vector> embedding, markov_embedding, markov_head;  // by row
  std::vector<int32_t> map;
  double confidence_bias = 0.0;

 private:
  static Vector normalised(const Vector& x, const Vector& weight) {
    double square = 0.0;
    for (const double value : x) square += value * value;
    const double factor = 1.0 / std::sqrt(square / static_cast<double>(x.size()) + 1e-5);
    Vector out(x.size());
    for (size_t k = 0; k < x.size(); ++k) out[k] = x[k] * factor * weight[k];
    return out;
  }
  static void add_to(Vector& x, const Vector& more) {
    for (size_t k = 0; k < x.size(); ++k) x[k] += more[k];
  }
  [[nodiscard]] Vector rotated(const Vector& head_values, int position) const {
    const size_t half = head_values.size() / 2;
    Vector out(head_values.size());
    for (size_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(static_cast<float>(position) * model.spec.inv_freq[i]);
      const double a = head_values[i], b = head_values[half + i];
      out[i] = a * std::cos(angle) - b * std::sin(angle);
      out[half + i] = b * std::cos(angle) + a * std::sin(angle);
    }
    return out;
  }
  // All heads share the one key head.
  [[nodiscard]] Vector attend(const Vector& queries, const std::vector<Vector>& keys, const std::vector<Vector>& values,
                              int lowest) const {
    const size_t dim = static_cast<size_t>(head->model.head_dim);
    Vector out(queries.size());
    for (size_t h = 0; h * dim < queries.size(); ++h) {
      Vector weights(keys.size());
      double most = -1e300, total = 0.0;
      for (size_t p = static_cast<size_t>(lowest); p < keys.size(); ++p) {
        for (size_t k = 0; k < dim; ++k) weights[p] += queries[h * dim + k] * keys[p][k] / 4.0;  // sqrt(head_dim)
        most = std::max(most, weights[p]);
      }
      for (size_t p = static_cast<size_t>(lowest); p < keys.size(); ++p)
        total += weights[p] = std::exp(weights[p] - most);
      for (size_t p = static_cast<size_t>(lowest); p < keys.size(); ++p) {
        for (size_t k = 0; k < dim; ++k) out[h * dim + k] += weights[p] / total * values[p][k];
      }
    }
    return out;
  }

  float normal(float scale) { return std::normal_distribution<float>(0.0F, scale)(random_); }

  void write(const std::string& name, const void* data, size_t bytes, cpu::Format format,
             const std::vector<int64_t>& shape) {
    head->model.tensors[name] = {offset_, static_cast<int64_t>(bytes), format, shape};
    if (bytes % 64 != 0 || std::fwrite(data, 1, bytes, file_) != bytes) std::abort();
    offset_ += static_cast<int64_t>(bytes);
  }
  Vector add_vector(const std::string& name, int length, float middle, float scale = 0.1F) {
    std::vector<float> values(static_cast<size_t>((length + 15) / 16 * 16));
    for (int i = 0; i < length; ++i) values[static_cast<size_t>(i)] = middle + normal(scale);
    write(name, values.data(), values.size() * sizeof(float), cpu::Format::kF32, {static_cast<int64_t>(values.size())});
    return Vector(values.begin(), values.begin() + length);
  }
  DenseMatrix random_matrix(int rows, int columns, float scale, bool bias) {
    DenseMatrix dense{rows, columns, Vector(static_cast<size_t>(rows * columns)), Vector(static_cast<size_t>(rows))};
    for (double& value : dense.values) value = static_cast<double>(normal(scale));
    for (double& value : dense.bias) value = bias ? static_cast<double>(normal(scale)) : 0.0;
    return dense;
  }
  // Row r of the matrix goes to row place(r) of the tiles.
  static void pack(const DenseMatrix& dense, std::vector<float>& tiles, const std::function<int(int)>& place) {
    for (int r = 0; r < dense.rows; ++r) {
      const int at = place(r);
      for (int k = 0; k < dense.columns; ++k) {
        tiles[static_cast<size_t>((at / 32 * dense.columns + k) * 32 + at % 32)] =
            static_cast<float>(dense.values[static_cast<size_t>(r * dense.columns + k)]);
      }
    }
  }
  DenseMatrix add_matrix(const std::string& name, int rows, int columns, float scale, bool bias) {
    const DenseMatrix dense = random_matrix(rows, columns, scale, bias);
    const int tiles = (rows + 31) / 32;
    std::vector<float> packed(static_cast<size_t>(tiles * columns * 32)), biases(static_cast<size_t>(tiles * 32));
    pack(dense, packed, [](int r) { return r; });
    write(name + ".weight", packed.data(), packed.size() * sizeof(float), cpu::Format::kF32, {tiles, columns, 32});
    if (!bias) return dense;
    for (int r = 0; r < rows; ++r)
      biases[static_cast<size_t>(r)] = static_cast<float>(dense.bias[static_cast<size_t>(r)]);
    write(name + ".bias", biases.data(), biases.size() * sizeof(float), cpu::Format::kF32, {tiles * 32});
    return dense;
  }
  void add_gate_up(const std::string& name, Layer& layer) {
    const cpu::ModelSpec& own = head->model;
    layer.gate = random_matrix(own.intermediate, own.hidden, 0.2F, false);
    layer.up = random_matrix(own.intermediate, own.hidden, 0.2F, false);
    const int tiles = 2 * ((own.intermediate + 31) / 32);
    std::vector<float> packed(static_cast<size_t>(tiles * own.hidden * 32));
    pack(layer.gate, packed, [](int r) { return r / 32 * 64 + r % 32; });
    pack(layer.up, packed, [](int r) { return r / 32 * 64 + 32 + r % 32; });
    write(name + ".weight", packed.data(), packed.size() * sizeof(float), cpu::Format::kF32, {tiles, own.hidden, 32});
  }
  std::vector<Vector> add_rows(const std::string& name, int rows, int columns, float scale, bool bf16) {
    const int stored = (rows + 31) / 32 * 32;
    std::vector<float> floats(static_cast<size_t>(stored * columns));
    std::vector<uint16_t> halves(floats.size());
    std::vector<Vector> dense(static_cast<size_t>(rows));
    for (size_t i = 0; i < floats.size(); ++i) {
      floats[i] = normal(scale);
      halves[i] = cpu::round_to_bf16(floats[i]);
      if (bf16) floats[i] = std::bit_cast<float>(static_cast<uint32_t>(halves[i]) << 16U);
      if (i < static_cast<size_t>(rows * columns)) {
        dense[i / static_cast<size_t>(columns)].push_back(static_cast<double>(floats[i]));
      }
    }
    const void* data = bf16 ? static_cast<const void*>(halves.data()) : static_cast<const void*>(floats.data());
    write(name, data, floats.size() * (bf16 ? 2 : 4), bf16 ? cpu::Format::kBf16 : cpu::Format::kF32, {stored, columns});
    return dense;
  }
  void add_map() {
    for (int i = 0; i < head->model.vocabulary; ++i) map.push_back((i * 37 + 11) % 80);
    std::vector<int32_t> padded(map);
    padded.resize((padded.size() + 15) / 16 * 16);
    write("d2t", padded.data(), padded.size() * sizeof(int32_t), cpu::Format::kF32,
          {static_cast<int64_t>(padded.size())});
  }

  DflashShape shape_;
  std::mt19937 random_{11};
  FILE* file_ = nullptr;
  int64_t offset_ = 0;
};

}  // namespace ull::check
