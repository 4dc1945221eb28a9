// Text assembly against a straightforward reference: concatenate, find the stop string, repair the rest.
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "engine/text.h"
#include "engine/vocabulary.h"

namespace {

using ull::Piece;
using ull::PieceKind;
using ull::StopSet;
using ull::TextAssembler;
using ull::TextBuffer;

// Feeds the pieces and returns the text; `stopped` says whether a stop string was found.
std::string assemble_pieces(const std::vector<Piece>& pieces, const std::vector<std::string>& stops, bool& stopped,
                            ull::LeadingSpaces leading = {}) {
  StopSet set;
  for (const std::string& stop : stops) CHECK(set.add(stop));
  TextAssembler assembler;
  assembler.reset(&set, leading);
  std::string text;
  stopped = false;
  for (const Piece& piece : pieces) {
    std::string room(TextAssembler::text_bound(piece.bytes.size()), '\0');
    TextBuffer out{room.data(), 0};
    TextAssembler unsent = assembler;  // a frame that cannot be sent is packed again
    unsent.feed(piece, out);
    unsent.finish(out);
    CHECK(out.size <= room.size());
    out.size = 0;
    stopped = assembler.feed(piece, out);
    text.append(room.data(), out.size);
  }
  std::string room(TextAssembler::text_bound(0), '\0');
  TextBuffer out{room.data(), 0};
  assembler.finish(out);
  text.append(room.data(), out.size);
  return text;
}

// Parts of characters, as a byte-level vocabulary has them.
std::string assemble(const std::vector<std::string>& parts, const std::vector<std::string>& stops, bool& stopped) {
  std::vector<Piece> pieces;
  for (const std::string& part : parts) pieces.push_back({part, PieceKind::kBytes});
  return assemble_pieces(pieces, stops, stopped);
}

std::string assemble(const std::vector<std::string>& pieces, const std::vector<std::string>& stops = {}) {
  bool stopped = false;
  return assemble(pieces, stops, stopped);
}

TEST(characters_are_never_split) {
  CHECK_EQ(assemble({"gr", "\xC3", "\xBC", "n \xF0\x9F", "\x98", "\x80!"}), "grün 😀!");
}

TEST(invalid_bytes_become_replacement_characters_like_pythons) {
  // Expected values: bytes.decode("utf-8", errors="replace").
  CHECK_EQ(assemble({"a\xFF", "b"}), "a\uFFFDb");
  CHECK_EQ(assemble({"\xE2\x82"}), "\uFFFD");
  CHECK_EQ(assemble({"\xE2\x82", "A"}), "\uFFFDA");
  CHECK_EQ(assemble({"\xE2\xE2\x82\xAC"}), "\uFFFD€");
  CHECK_EQ(assemble({"\xC0\x80"}), "\uFFFD\uFFFD");
  CHECK_EQ(assemble({"\xED\xA0\x80"}), "\uFFFD\uFFFD\uFFFD");  // a surrogate
  CHECK_EQ(assemble({"\xF0\x80\x80\x80"}), "\uFFFD\uFFFD\uFFFD\uFFFD");
  CHECK_EQ(assemble({"\xF4\x90\x80\x80"}), "\uFFFD\uFFFD\uFFFD\uFFFD");
  CHECK_EQ(assemble({"\xF1\x80\x80", "\xE1\x80", "\xC2", "\x62\x80"}), "\uFFFD\uFFFD\uFFFDb\uFFFD");
}

TEST(stop_strings_end_the_text_wherever_tokens_are_cut) {
  bool stopped = false;
  CHECK_EQ(assemble({"one, t", "w", "o, three"}, {"two"}, stopped), "one, ");
  CHECK(stopped);
  CHECK_EQ(assemble({"one, t", "wi", "ce"}, {"two"}, stopped), "one, twice");
  CHECK(!stopped);
  CHECK_EQ(assemble({"aaaaaaab"}, {"aaab"}, stopped), "aaaa");  // the automaton must fall back, not start over
  CHECK_EQ(assemble({"abab", "abc"}, {"ababc"}, stopped), "ab");
  CHECK_EQ(assemble({"x\xE2\x82", "\xAC!"}, {"€"}, stopped), "x");
}

TEST(of_several_stop_strings_the_first_to_end_wins_and_of_those_the_longest) {
  bool stopped = false;
  CHECK_EQ(assemble({"abcdef"}, {"bcdef", "cd"}, stopped), "ab");
  CHECK_EQ(assemble({"abcdef"}, {"cd", "bcd"}, stopped), "a");
  CHECK_EQ(assemble({"abcX"}, {"abcd", "bc"}, stopped), "a");
}

TEST(what_may_become_a_stop_string_is_held_back_and_no_more) {
  StopSet set;
  CHECK(set.add("STOP"));
  TextAssembler assembler;
  assembler.reset(&set);
  char room[2048];
  TextBuffer out{room, 0};
  const auto feed = [&](std::string_view piece) { return assembler.feed({piece, PieceKind::kBytes}, out); };
  CHECK(!feed("abcST"));
  CHECK_EQ(std::string(room, out.size), "abc");
  CHECK(!feed("S"));
  CHECK_EQ(std::string(room, out.size), "abcST");
  CHECK(feed("TOPxyz"));
  CHECK(feed("more"));
  assembler.finish(out);
  CHECK_EQ(std::string(room, out.size), "abcST");
}

TEST(stop_sets_are_bounded) {
  StopSet set;
  CHECK(!set.add(""));
  CHECK(!set.add(std::string(257, 'x')));
  for (int i = 0; i < ull::kMaxStops; ++i) CHECK(set.add(std::string(256, static_cast<char>('a' + i))));
  CHECK(!set.add("one too many"));
  CHECK_EQ(assemble({std::string(600, 'a')}, {std::string(256, 'a')}), "");
}

// Every step of the automaton of every stop string of up to nine letters a and b: what has matched afterwards is the
// longest beginning of the string that the bytes so far end with.
TEST(the_automaton_falls_back_to_the_longest_beginning) {
  for (size_t length = 1; length <= 9; ++length) {
    for (unsigned letters = 0; letters < 1U << length; ++letters) {
      std::string stop;
      for (size_t i = 0; i < length; ++i) stop += (letters >> i & 1U) != 0 ? 'b' : 'a';
      StopSet set;
      REQUIRE(set.add(stop));
      for (size_t matched = 0; matched < length; ++matched) {
        for (const char next : {'a', 'b'}) {
          const std::string seen = stop.substr(0, matched) + next;
          size_t expected = seen.size();
          while (!seen.ends_with(stop.substr(0, expected))) --expected;
          REQUIRE(set.step(0, static_cast<int>(matched), static_cast<uint8_t>(next)) == static_cast<int>(expected));
        }
      }
    }
  }
}

// Random cuts of random bytes from a small alphabet, so that partial matches, overlaps and broken characters abound.
TEST(random_streams_agree_with_the_reference) {
  std::mt19937 random(11);
  const auto below = [&](size_t limit) { return random() % limit; };
  const std::vector<std::string> atoms{"a", "b", "ab", "\xC3\xA9", "\xC3", "\xA9", "\xF0\x9F\x98\x80", "\x9F", "\xFF"};
  const std::vector<std::string> letters{"a", "b", "\xC3\xA9"};
  int found = 0;
  for (int trial = 0; trial < 4000; ++trial) {
    std::string stream;
    for (size_t i = below(30); i-- > 0;) stream += atoms[below(atoms.size())];
    std::vector<std::string> stops;
    for (size_t i = below(4); i-- > 0;) {
      std::string stop;
      for (size_t n = 1 + below(4); n-- > 0;) stop += letters[below(letters.size())];
      stops.push_back(stop);
    }
    size_t end = std::string::npos;
    size_t start = stream.size();
    for (const std::string& stop : stops) {
      const size_t at = stream.find(stop);
      if (at == std::string::npos) continue;
      const size_t last = at + stop.size();
      if (end == std::string::npos || last < end || (last == end && at < start)) {
        end = last;
        start = at;
      }
    }
    std::vector<std::string> pieces;
    for (size_t at = 0; at < stream.size();) {
      const size_t length = 1 + below(5);
      pieces.push_back(stream.substr(at, length));
      at += length;
    }
    bool stopped = false;
    const std::string text = assemble(pieces, stops, stopped);
    CHECK_EQ(stopped, end != std::string::npos);
    CHECK_EQ(text, assemble({stream.substr(0, start)}));
    found += stopped ? 1 : 0;
  }
  CHECK(found > 500);
}

// A SentencePiece stream: "<E2>" is a byte token, "<>" a special one; everything else is text, a token per character.
std::vector<Piece> sentencepiece(std::string_view stream) {
  static std::string bytes = [] {
    std::string all;
    for (int byte = 0; byte < 256; ++byte) all += static_cast<char>(byte);
    return all;
  }();
  std::vector<Piece> pieces;
  while (!stream.empty()) {
    if (stream.starts_with("<>")) {
      pieces.push_back({});
      stream.remove_prefix(2);
    } else if (stream.front() == '<') {
      const auto byte = static_cast<size_t>(std::stoi(std::string(stream.substr(1, 2)), nullptr, 16));
      pieces.push_back({std::string_view(bytes).substr(byte, 1), PieceKind::kByteToken});
      stream.remove_prefix(4);
    } else {
      pieces.push_back({stream.substr(0, 1), PieceKind::kText});
      stream.remove_prefix(1);
    }
  }
  return pieces;
}

std::string runs(std::string_view stream, const std::vector<std::string>& stops = {}, ull::LeadingSpaces leading = {}) {
  bool stopped = false;
  return assemble_pieces(sentencepiece(stream), stops, stopped, leading);
}

TEST(a_run_of_byte_tokens_is_valid_as_a_whole_or_each_byte_is_replaced) {
  CHECK_EQ(runs("a<E2><82><AC>b"), "a€b");
  CHECK_EQ(runs("<E2><82>"), "\uFFFD\uFFFD");
  CHECK_EQ(runs("<E2><82>A"), "\uFFFD\uFFFDA");
  CHECK_EQ(runs("<0A><E2><82>A<0A>"), "\uFFFD\uFFFD\uFFFDA\n");  // the line end is part of the broken run
  CHECK_EQ(runs("<0A><FF><41><42>A"), "\uFFFD\uFFFD\uFFFD\uFFFDA");
  CHECK_EQ(runs("<E2><82><><AC>"), "€");  // a special token does not end a run
  CHECK_EQ(runs("<C3><A9><F0><9F><98><80>"), "é😀");
  CHECK_EQ(runs("<ED><A0><80>"), "\uFFFD\uFFFD\uFFFD");  // a surrogate
}

// What the stream has released after each token.
std::vector<std::string> progress(std::string_view stream, const std::vector<std::string>& stops = {}) {
  StopSet set;
  for (const std::string& stop : stops) CHECK(set.add(stop));
  TextAssembler assembler;
  assembler.reset(&set);
  char room[4096];
  TextBuffer out{room, 0};
  std::vector<std::string> shown;
  for (const Piece& piece : sentencepiece(stream)) {
    assembler.feed(piece, out);
    shown.emplace_back(room, out.size);
  }
  return shown;
}

TEST(a_run_is_held_until_it_ends_or_is_broken) {
  CHECK(progress("a<C3><A9><0A>b") == (std::vector<std::string>{"a", "a", "a", "a", "aé\nb"}));
  CHECK(progress("<41><FF><42>") == (std::vector<std::string>{"", "\uFFFD\uFFFD", "\uFFFD\uFFFD\uFFFD"}));
}

TEST(a_run_that_was_valid_for_long_is_released_and_then_decided_by_characters) {
  std::string stream;
  std::string text;
  for (size_t i = 0; i + 3 <= ull::kTrustedRunBytes; i += 3) {
    stream += "<E2><82><AC>";
    text += "€";
  }
  CHECK_EQ(progress(stream).back(), "");  // 63 bytes
  stream += "<C3>";
  CHECK_EQ(progress(stream).back(), "");
  CHECK_EQ(runs(stream).size(), 3 * 64U);
  stream += "<A9>";
  text += "é";
  CHECK_EQ(progress(stream).back(), text);
  CHECK_EQ(progress(stream + "<C3>").back(), text);
  CHECK_EQ(progress(stream + "<C3><A9>").back(), text + "é");
  CHECK_EQ(runs(stream + "<F0><9F>"), text + "\uFFFD\uFFFD");
  CHECK_EQ(runs(stream + "<F0><9F><41><42>c<41>"), text + "\uFFFD\uFFFD\uFFFD\uFFFDcA");
}

TEST(a_stop_string_that_the_bytes_so_far_complete_ends_the_text_at_once) {
  CHECK(progress("ab<0A><C3>", {"\n"}) == (std::vector<std::string>{"a", "ab", "ab", "ab"}));
  bool stopped = false;
  CHECK_EQ(assemble_pieces(sentencepiece("ab<0A>"), {"\n"}, stopped), "ab");
  CHECK(stopped);
  CHECK_EQ(assemble_pieces(sentencepiece("x<41><C3><A9>"), {"é"}, stopped), "xA");
  CHECK(stopped);
  CHECK_EQ(assemble_pieces(sentencepiece("x<41>yz"), {"Ay"}, stopped), "x");  // across the end of a run
  CHECK(stopped);
  CHECK_EQ(assemble_pieces(sentencepiece("x<41><FF>yz"), {"Ay"}, stopped), "x\uFFFD\uFFFDyz");
  CHECK(!stopped);
  CHECK_EQ(assemble_pieces(sentencepiece("a<41><FF>b"), {"A\uFFFD", "\uFFFDb"}, stopped), "a\uFFFD");
  CHECK(stopped);
}

TEST(leading_spaces_are_dropped_where_the_text_begins) {
  bool stopped = false;
  CHECK_EQ(runs("  a b", {}, {.count = 1}), " a b");
  CHECK_EQ(runs("<>  a", {}, {.count = 9}), "a");
  CHECK_EQ(runs("<20><41>", {}, {.count = 1}), "A");
  CHECK_EQ(runs("<20><FF>", {}, {.count = 1}), "\uFFFD\uFFFD");
  CHECK_EQ(runs("   a", {}, {.count = 0xFFFF'FFFF, .first_token_only = true}), "  a");
  CHECK_EQ(runs("a   b", {}, {.count = 0xFFFF'FFFF, .first_token_only = true}), "a   b");
  CHECK_EQ(assemble_pieces(sentencepiece(" ab"), {" a"}, stopped, {.count = 1}), "ab");
  CHECK(!stopped);
}

class VocabularyFile {
 public:
  explicit VocabularyFile(const std::string& bytes)
      : path_(std::filesystem::temp_directory_path() / ("ull-test-text-" + std::to_string(::getpid()) + ".bin")) {
    std::ofstream(path_, std::ios::binary) << bytes;
  }
  ~VocabularyFile() { std::filesystem::remove(path_); }
  [[nodiscard]] std::string path() const { return path_.string(); }

 private:
  std::filesystem::path path_;
};

std::string u32(uint32_t value) { return {reinterpret_cast<const char*>(&value), sizeof(value)}; }

// vocab.bin of version 2.
std::string vocabulary_file(const std::vector<uint32_t>& offsets, const std::string& flags, const std::string& bytes,
                            uint32_t leading_spaces = 0) {
  std::string file = "ULLVOCAB" + u32(2) + u32(static_cast<uint32_t>(flags.size())) + u32(leading_spaces);
  for (const uint32_t offset : offsets) file += u32(offset);
  return file + flags + bytes;
}

TEST(vocabularies_are_read) {
  const VocabularyFile file(
      vocabulary_file({0, 2, 6, 7, 8, 10, 10}, std::string("\0\1\0\2\0\0", 6), "hi<eos!\xE2\xC3\xC3", 3));
  const ull::Vocabulary vocabulary(file.path());
  const auto is = [&](int32_t token, PieceKind kind, std::string_view bytes) {
    const Piece piece = vocabulary.piece(token);
    CHECK(piece.kind == kind);
    CHECK_EQ(std::string(piece.bytes), std::string(bytes));
  };
  CHECK_EQ(vocabulary.size(), 6);
  is(0, PieceKind::kText, "hi");
  is(1, PieceKind::kSkipped, "");  // special
  is(2, PieceKind::kText, "!");
  is(3, PieceKind::kByteToken, "\xE2");
  is(4, PieceKind::kBytes, "\xC3\xC3");
  is(5, PieceKind::kText, "");
  is(6, PieceKind::kSkipped, "");
  is(-1, PieceKind::kSkipped, "");
  CHECK_EQ(vocabulary.longest(), 2U);
  CHECK_EQ(vocabulary.leading_spaces().count, 3U);
  CHECK(!vocabulary.leading_spaces().first_token_only);
}

TEST(a_text_behind_a_prompt_keeps_the_spaces_that_the_prompt_has_not_used_up) {
  const std::string flags("\0\0\0\1", 4);  // "  ", "a", "", special
  const auto left = [&](uint32_t leading, const std::vector<int32_t>& prompt) {
    const VocabularyFile file(vocabulary_file({0, 2, 3, 3, 4}, flags, "  as", leading));
    return ull::Vocabulary(file.path()).leading_spaces(prompt).count;
  };
  CHECK_EQ(left(0, {}), 0U);
  CHECK_EQ(left(1, {}), 1U);
  CHECK_EQ(left(1, {3, 2, 9, -1}), 1U);
  CHECK_EQ(left(1, {3, 1}), 0U);
  CHECK_EQ(left(1, {0}), 0U);
  CHECK_EQ(left(5, {3, 0, 0}), 1U);
  constexpr uint32_t kFirstTokens = 0xFFFF'FFFF;
  CHECK_EQ(left(kFirstTokens, {3}), kFirstTokens);
  CHECK_EQ(left(kFirstTokens, {3, 2}), 0U);
  CHECK_EQ(left(kFirstTokens, {0}), 0U);
}

TEST(broken_vocabularies_are_refused) {
  const std::string good = vocabulary_file({0, 1, 3}, std::string(2, '\0'), "abc");
  CHECK_EQ(ull::Vocabulary(VocabularyFile(good).path()).size(), 2);
  const auto refused = [](const std::string& bytes) {
    const VocabularyFile file(bytes);
    CHECK_THROWS(ull::Vocabulary(file.path()), std::runtime_error);
  };
  for (size_t size = 0; size < good.size(); ++size) refused(good.substr(0, size));
  refused(good + "x");
  refused("NOTVOCAB" + good.substr(8));
  refused("ULLVOCAB" + u32(1) + good.substr(12));
  refused("ULLVOCAB" + u32(2) + u32(0xFFFF'FFFF) + good.substr(16));
  refused(vocabulary_file({0, 3, 1}, std::string(2, '\0'), "abc"));
  refused(vocabulary_file({1, 2, 3}, std::string(2, '\0'), "abc"));
  refused(vocabulary_file({0, 1, 3}, std::string("\0\2", 2), "abc"));  // a byte token of two bytes
  CHECK_THROWS(ull::Vocabulary("/nonexistent/vocab.bin"), std::runtime_error);
}

}  // namespace
