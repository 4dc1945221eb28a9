// The text of a token list, as the io thread would send it: for programs that hold ids and want the same text.
#pragma once

#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/text.h"
#include "engine/vocabulary.h"

namespace ull {

class Detokenizer {
 public:
  // Throws std::runtime_error (the vocabulary) or std::invalid_argument (a stop string).
  Detokenizer(const std::string& vocabulary_path, const std::vector<std::string>& stops)
      : vocabulary_(vocabulary_path) {
    for (const std::string& stop : stops) {
      if (!stops_.add(stop)) throw std::invalid_argument("stop: at most 16 strings, each of 1 to 256 bytes");
    }
    assembler_.reset(&stops_);
  }
  Detokenizer(const Detokenizer&) = delete;
  Detokenizer& operator=(const Detokenizer&) = delete;

  [[nodiscard]] std::string feed(const std::vector<int32_t>& tokens) {
    size_t bound = 0;
    for (const int32_t token : tokens) bound += TextAssembler::text_bound(vocabulary_.text(token).size());
    return collect(bound, [&](TextBuffer& out) {
      for (const int32_t token : tokens) stopped_ = assembler_.feed(vocabulary_.text(token), out);
    });
  }

  [[nodiscard]] std::string finish() {
    return collect(TextAssembler::text_bound(0), [&](TextBuffer& out) { assembler_.finish(out); });
  }

  [[nodiscard]] bool stopped() const noexcept { return stopped_; }

 private:
  template <typename Write>
  std::string collect(size_t bound, Write&& write) {
    std::string text(bound, '\0');
    TextBuffer out{text.data(), 0};
    write(out);
    text.resize(out.size);
    return text;
  }

  const Vocabulary vocabulary_;
  StopSet stops_;
  TextAssembler assembler_;
  bool stopped_ = false;
};

}  // namespace ull
