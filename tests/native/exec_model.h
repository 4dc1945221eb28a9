// A small random model on disk for the executor's tests.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "cpu/model_shape.h"

namespace ull::check {

// Writes f32 tensors, packed as the bundle does, to a file that lives as long as this object.
class ModelFile {
 public:
  explicit ModelFile(int layers = 3, float lm_head_value = 0.0F) {
    char name[] = "/tmp/ull-test-XXXXXX";
    const int descriptor = mkstemp(name);
    file_ = fdopen(descriptor, "wb");
    spec.path = name;
    spec.hidden = 64;
    spec.layers = layers;
    spec.heads = 4;
    spec.kv_heads = 2;
    spec.head_dim = 16;
    spec.intermediate = 96;
    spec.vocabulary = 80;
    spec.context = 512;
    spec.rms_epsilon = 1e-5F;
    spec.kv_format = cpu::Format::kF32;
    spec.windows.assign(static_cast<size_t>(layers), 0);
    for (int i = 0; i < 8; ++i) spec.inv_freq.push_back(1.0F / static_cast<float>(1 << i));
    for (int i = 0; i < layers; ++i) {
      const std::string prefix = "layers." + std::to_string(i) + ".";
      add(prefix + "attn_norm", {64});
      add(prefix + "mlp_norm", {64});
      add(prefix + "qkv.weight", {4, 64, 32});
      add(prefix + "o.weight", {2, 64, 32});
      add(prefix + "gate_up.weight", {6, 64, 32});
      add(prefix + "down.weight", {2, 96, 32});
    }
    add("norm", {64});
    add("lm_head.weight", {3, 64, 32}, lm_head_value);
    std::fclose(file_);
  }
  ~ModelFile() { unlink(spec.path.c_str()); }
  ModelFile(const ModelFile&) = delete;
  ModelFile& operator=(const ModelFile&) = delete;

  cpu::ModelSpec spec;

 private:
  // value 0: random.
  void add(const std::string& name, const std::vector<int64_t>& shape, float value = 0.0F) {
    size_t count = 1;
    for (const int64_t extent : shape) count *= static_cast<size_t>(extent);
    std::vector<float> values(count, value);
    std::normal_distribution<float> normal(0.0F, 0.15F);
    if (!(value != 0.0F)) {
      for (float& element : values) element = normal(random_);
    }
    spec.tensors[name] = {offset_, static_cast<int64_t>(count * sizeof(float)), cpu::Format::kF32, shape};
    if (std::fwrite(values.data(), sizeof(float), count, file_) != count) std::abort();
    offset_ += static_cast<int64_t>(count * sizeof(float));
  }

  std::mt19937 random_{42};
  FILE* file_ = nullptr;
  int64_t offset_ = 0;
};

}  // namespace ull::check
