// The text of token ids, as the io thread would send it: for programs that hold ids and want the same text.
#pragma once

#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/text.h"
#include "engine/vocabulary.h"

namespace ull {

// Bytes that feeding these tokens and finishing the text can append.
inline size_t text_bound(const Vocabulary& vocabulary, std::span<const int32_t> tokens) {
  size_t bound = TextAssembler::text_bound(0);
  for (const int32_t token : tokens) {
    const Piece piece = vocabulary.piece(token);
    bound += piece.kind == PieceKind::kText ? piece.bytes.size() : 3 * piece.bytes.size();
  }
  return bound;
}

// What `write(out)` appends, `bound` bytes at most.
template <typename Write>
std::string collect_text(size_t bound, Write&& write) {
  std::string text(bound, '\0');
  TextBuffer out{text.data(), 0};
  write(out);
  text.resize(out.size);
  return text;
}

// The whole text of `tokens` behind those of `prompt`; special tokens and ids outside the vocabulary have none.
inline std::string text_of(const Vocabulary& vocabulary, std::span<const int32_t> tokens,
                           std::span<const int32_t> prompt = {}) {
  StopSet none;
  TextAssembler assembler;
  assembler.reset(&none, vocabulary.leading_spaces(prompt));
  return collect_text(text_bound(vocabulary, tokens), [&](TextBuffer& out) {
    for (const int32_t token : tokens) assembler.feed(vocabulary.piece(token), out);
    assembler.finish(out);
  });
}

class Detokenizer {
 public:
  // `prompt`: the tokens that the text goes on behind. Throws std::runtime_error (the vocabulary) or
  // std::invalid_argument (a stop string).
  Detokenizer(const std::string& vocabulary_path, const std::vector<std::string>& stops,
              const std::vector<int32_t>& prompt)
      : vocabulary_(vocabulary_path) {
    for (const std::string& stop : stops) {
      if (!stops_.add(stop)) throw std::invalid_argument("stop: at most 16 strings, each of 1 to 256 bytes");
    }
    assembler_.reset(&stops_, vocabulary_.leading_spaces(prompt));
  }
  Detokenizer(const Detokenizer&) = delete;
  Detokenizer& operator=(const Detokenizer&) = delete;

  [[nodiscard]] std::string feed(const std::vector<int32_t>& tokens) {
    return collect_text(text_bound(vocabulary_, tokens), [&](TextBuffer& out) {
      for (const int32_t token : tokens) stopped_ = assembler_.feed(vocabulary_.piece(token), out);
    });
  }

  [[nodiscard]] std::string finish() {
    return collect_text(TextAssembler::text_bound(0), [&](TextBuffer& out) { assembler_.finish(out); });
  }

  [[nodiscard]] bool stopped() const noexcept { return stopped_; }

 private:
  const Vocabulary vocabulary_;
  StopSet stops_;
  TextAssembler assembler_;
  bool stopped_ = false;
};

}  // namespace ull
