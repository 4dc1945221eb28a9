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

using ull::StopSet;
using ull::TextAssembler;
using ull::TextBuffer;

// Feeds the pieces and returns the text; `stopped` says whether a stop string was found.
std::string assemble(const std::vector<std::string>& pieces, const std::vector<std::string>& stops, bool& stopped) {
  StopSet set;
  for (const std::string& stop : stops) CHECK(set.add(stop));
  TextAssembler assembler;
  assembler.reset(&set);
  std::string text;
  stopped = false;
  for (const std::string& piece : pieces) {
    std::string room(TextAssembler::text_bound(piece.size()), '\0');
    TextBuffer out{room.data(), 0};
    stopped = assembler.feed({reinterpret_cast<const uint8_t*>(piece.data()), piece.size()}, out);
    CHECK(out.size <= room.size());
    text.append(room.data(), out.size);
  }
  std::string room(TextAssembler::text_bound(0), '\0');
  TextBuffer out{room.data(), 0};
  assembler.finish(out);
  text.append(room.data(), out.size);
  return text;
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
  const auto feed = [&](std::string_view piece) {
    return assembler.feed({reinterpret_cast<const uint8_t*>(piece.data()), piece.size()}, out);
  };
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

TEST(vocabularies_are_read) {
  const VocabularyFile file("ULLVOCAB" + u32(1) + u32(3) + u32(0) + u32(2) + u32(6) + u32(7) +
                            std::string("\0\1\0", 3) + "hi<eos!");
  const ull::Vocabulary vocabulary(file.path());
  const auto text = [&](int32_t token) {
    const auto bytes = vocabulary.text(token);
    return std::string(bytes.begin(), bytes.end());
  };
  CHECK_EQ(vocabulary.size(), 3);
  CHECK_EQ(text(0), "hi");
  CHECK_EQ(text(1), "");  // special
  CHECK_EQ(text(2), "!");
  CHECK_EQ(text(3), "");
  CHECK_EQ(text(-1), "");
  CHECK_EQ(vocabulary.longest(), 2U);
}

TEST(broken_vocabularies_are_refused) {
  const std::string good = "ULLVOCAB" + u32(1) + u32(2) + u32(0) + u32(1) + u32(3) + std::string(2, '\0') + "abc";
  CHECK_EQ(ull::Vocabulary(VocabularyFile(good).path()).size(), 2);
  const auto refused = [](const std::string& bytes) {
    const VocabularyFile file(bytes);
    CHECK_THROWS(ull::Vocabulary(file.path()), std::runtime_error);
  };
  for (size_t size = 0; size < good.size(); ++size) refused(good.substr(0, size));
  refused(good + "x");
  refused("NOTVOCAB" + good.substr(8));
  refused("ULLVOCAB" + u32(2) + good.substr(12));
  refused("ULLVOCAB" + u32(1) + u32(0xFFFF'FFFF) + good.substr(16));
  refused("ULLVOCAB" + u32(1) + u32(2) + u32(0) + u32(3) + u32(1) + std::string(2, '\0') + "abc");
  refused("ULLVOCAB" + u32(1) + u32(2) + u32(1) + u32(2) + u32(3) + std::string(2, '\0') + "abc");
  CHECK_THROWS(ull::Vocabulary("/nonexistent/vocab.bin"), std::runtime_error);
}

}  // namespace
