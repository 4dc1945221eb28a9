// Medusa heads appended to a ModelFile's weights: random, f32 or fp8, with what they hold kept for a naive reference.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cpu/model_shape.h"
#include "exec_model.h"

namespace ull::check {

// The value of an E4M3 code that is not NaN.
inline double decode_e4m3(uint8_t code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const double magnitude = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return code & 0x80 ? -magnitude : magnitude;
}

struct DenseMatrix {
  int rows = 0;
  int columns = 0;
  std::vector<double> values;  // [rows][columns]
  std::vector<double> bias;    // [rows]

  [[nodiscard]] std::vector<double> operator()(const std::vector<double>& x) const {
    std::vector<double> y(bias);
    for (size_t r = 0; r < y.size(); ++r) {
      for (size_t k = 0; k < x.size(); ++k) y[r] += values[r * x.size() + k] * x[k];
    }
    return y;
  }
};

class MedusaFile {
 public:
  MedusaFile(int heads, int layers, bool own_lm_head, bool fp8) : file_(std::fopen(model.spec.path.c_str(), "ab")) {
    if (file_ == nullptr || std::fseek(file_, 0, SEEK_END) != 0) std::abort();
    offset_ = std::ftell(file_);
    auto spec = std::make_shared<cpu::MedusaSpec>();
    spec->heads = heads;
    spec->layers = layers;
    spec->own_lm_head = own_lm_head;
    const int hidden = model.spec.hidden;
    for (int i = 0; i < heads; ++i) {
      const std::string prefix = "medusa." + std::to_string(i) + ".";
      blocks.emplace_back();
      for (int j = 0; j < layers; ++j) {
        blocks.back().push_back(add(*spec, prefix + std::to_string(j), hidden, hidden, fp8, true));
      }
      if (own_lm_head) lm_heads.push_back(add(*spec, prefix + "lm_head", model.spec.vocabulary, hidden, fp8, false));
    }
    std::fclose(file_);
    medusa = spec;
    model.spec.medusa = spec;
  }

  // Logits of head `head` on `hidden`, by the definition. lm_head: the model's, for version 2.
  [[nodiscard]] std::vector<double> reference(int head, const std::vector<float>& hidden,
                                              const DenseMatrix& lm_head) const {
    std::vector<double> x(hidden.begin(), hidden.end());
    for (const DenseMatrix& block : blocks[static_cast<size_t>(head)]) {
      const std::vector<double> y = block(x);
      for (size_t k = 0; k < x.size(); ++k) x[k] += y[k] / (1.0 + std::exp(-y[k]));
    }
    return lm_heads.empty() ? lm_head(x) : lm_heads[static_cast<size_t>(head)](x);
  }

  ModelFile model;
  std::shared_ptr<cpu::MedusaSpec> medusa;
  std::vector<std::vector<DenseMatrix>> blocks;  // [head][layer]
  std::vector<DenseMatrix> lm_heads;             // [head], version 1

 private:
  DenseMatrix add(cpu::MedusaSpec& spec, const std::string& name, int rows, int columns, bool fp8, bool bias) {
    const int tiles = (rows + 31) / 32;
    DenseMatrix dense{rows, columns, std::vector<double>(static_cast<size_t>(rows * columns)),
                      std::vector<double>(static_cast<size_t>(rows))};
    const size_t count = static_cast<size_t>(tiles * columns * 32);
    std::vector<float> floats(count), scale(static_cast<size_t>(tiles * 32), 1.0F), biases(scale.size(), 0.0F);
    std::vector<uint8_t> codes(count);
    std::uniform_int_distribution<int> code(0, 0x6F);
    std::normal_distribution<float> normal(0.0F, 0.2F);
    for (float& value : scale) value = 0.002F * (1.5F + normal(random_));
    for (int r = 0; r < rows; ++r) {
      const int in_tile = r % 32;
      const int position = !fp8 ? in_tile : in_tile < 16 ? 2 * in_tile : 2 * (in_tile - 16) + 1;
      for (int k = 0; k < columns; ++k) {
        const size_t at = static_cast<size_t>((r / 32 * columns + k) * 32 + position);
        double& value = dense.values[static_cast<size_t>(r * columns + k)];
        if (fp8) {
          codes[at] = static_cast<uint8_t>(code(random_) | (random_() % 2 ? 0x80 : 0));
          value = decode_e4m3(codes[at]) * static_cast<double>(scale[static_cast<size_t>(r)]);
        } else {
          floats[at] = normal(random_);
          value = static_cast<double>(floats[at]);
        }
      }
      if (bias) biases[static_cast<size_t>(r)] = normal(random_);
      dense.bias[static_cast<size_t>(r)] = static_cast<double>(biases[static_cast<size_t>(r)]);
    }
    const std::vector<int64_t> shape{tiles, columns, 32}, padded{tiles * 32};
    if (fp8) {
      write(spec, name + ".weight", codes.data(), codes.size(), cpu::Format::kF8, shape);
      write(spec, name + ".scale", scale.data(), scale.size() * sizeof(float), cpu::Format::kF32, padded);
    } else {
      write(spec, name + ".weight", floats.data(), floats.size() * sizeof(float), cpu::Format::kF32, shape);
    }
    if (bias) write(spec, name + ".bias", biases.data(), biases.size() * sizeof(float), cpu::Format::kF32, padded);
    return dense;
  }

  void write(cpu::MedusaSpec& spec, const std::string& name, const void* data, size_t bytes, cpu::Format format,
             const std::vector<int64_t>& shape) {
    spec.tensors[name] = {offset_, static_cast<int64_t>(bytes), format, shape};
    if (std::fwrite(data, 1, bytes, file_) != bytes) std::abort();
    offset_ += static_cast<int64_t>(bytes);
  }

  std::mt19937 random_{7};
  FILE* file_ = nullptr;
  int64_t offset_ = 0;
};

}  // namespace ull::check
