// Runs a fuzzer where there is no libFuzzer: mutates a corpus with a seeded generator, counts what was run, and leaves
// the input that ends the process in `crash-NAME`.
//
//     fuzz_zmtp CORPUS [executions [seed]]
#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include <fcntl.h>
#include <unistd.h>
#include <csignal>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

using Bytes = std::vector<uint8_t>;

constexpr size_t kLongest = 4096;
Bytes current;
std::string crash_file;

// Only what a signal handler may do.
extern "C" void keep_input(int signal) {
  const int fd = open(crash_file.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
  if (fd >= 0) {
    [[maybe_unused]] const ssize_t written = write(fd, current.data(), current.size());
    close(fd);
  }
  std::signal(signal, SIG_DFL);
  raise(signal);
}

class Mutator {
 public:
  Mutator(std::vector<Bytes> corpus, uint64_t seed) : corpus_(std::move(corpus)), random_(seed) {
    if (corpus_.empty()) corpus_.emplace_back();
  }

  void next(Bytes& input) {
    input = corpus_[below(corpus_.size())];
    for (size_t changes = below(5); changes > 0; --changes) change(input);
    if (input.size() > kLongest) input.resize(kLongest);
  }

 private:
  size_t below(size_t limit) { return limit == 0 ? 0 : random_() % limit; }

  void change(Bytes& input) {
    static constexpr std::array<uint8_t, 12> kOdd = {0, 1, 2, 3, 4, 5, 7, 0x7f, 0x80, 0xc1, 0xfe, 0xff};
    const size_t at = below(input.size() + 1);
    const auto here = input.begin() + static_cast<ptrdiff_t>(at);
    switch (below(8)) {
      case 0:
        if (at < input.size()) input[at] ^= static_cast<uint8_t>(1U << below(8));
        break;
      case 1:
        if (at < input.size()) input[at] = kOdd[below(kOdd.size())];
        break;
      case 2:
        input.insert(here, kOdd[below(kOdd.size())]);
        break;
      case 3:
        input.erase(here, here + static_cast<ptrdiff_t>(std::min(below(16), input.size() - at)));
        break;
      case 4: {  // a part of another
        const Bytes& other = corpus_[below(corpus_.size())];
        const size_t from = below(other.size() + 1), count = below(other.size() - from + 1);
        const Bytes part(other.begin() + static_cast<ptrdiff_t>(from),
                         other.begin() + static_cast<ptrdiff_t>(from + count));
        input.insert(input.begin() + static_cast<ptrdiff_t>(at), part.begin(), part.end());
        break;
      }
      case 5: {  // a length that lies, of eight, four or two bytes
        const size_t bytes = size_t{2} << below(3);
        const uint64_t value = below(4) == 0 ? random_() : uint64_t{1} << below(64);
        for (size_t i = 0; i < bytes && at + i < input.size(); ++i) {
          input[at + i] = static_cast<uint8_t>(value >> (8 * (bytes - 1 - i)));
        }
        break;
      }
      case 6:
        input.resize(at);
        break;
      default: {  // a part once more
        const size_t count = std::min(below(64), input.size() - at);
        const Bytes part(here, here + static_cast<ptrdiff_t>(count));
        input.insert(input.begin() + static_cast<ptrdiff_t>(at), part.begin(), part.end());
      }
    }
  }

  std::vector<Bytes> corpus_;
  std::mt19937_64 random_;
};

std::vector<Bytes> read_corpus(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> files;
  if (std::filesystem::is_directory(folder)) {
    for (const auto& entry : std::filesystem::directory_iterator(folder)) files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  std::vector<Bytes> corpus;
  for (const auto& file : files) {
    std::ifstream in(file, std::ios::binary);
    corpus.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
  }
  return corpus;
}

uint64_t number(const char* text) {
  uint64_t value = 0;
  const char* const end = text + std::strlen(text);
  if (const auto [at, error] = std::from_chars(text, end, value); error != std::errc{} || at != end) {
    std::fprintf(stderr, "%s is no number\n", text);
    std::exit(2);
  }
  return value;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr, "usage: %s CORPUS [executions [seed]]\n", argv[0]);
    return 2;
  }
  const std::string name = std::filesystem::path(argv[0]).filename();
  crash_file = "crash-" + name;
  for (const int signal : {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL}) std::signal(signal, keep_input);
  const std::vector<Bytes> corpus = read_corpus(argv[1]);
  const uint64_t executions = argc > 2 ? number(argv[2]) : 1'000'000;
  const uint64_t seed = argc > 3 ? number(argv[3]) : 1;
  for (const Bytes& each : corpus) {
    current = each;
    LLVMFuzzerTestOneInput(current.data(), current.size());
  }
  Mutator mutator(corpus, seed);
  for (uint64_t i = 0; i < executions; ++i) {
    mutator.next(current);
    LLVMFuzzerTestOneInput(current.data(), current.size());
  }
  std::printf("%s: %llu executions, seed %llu, corpus of %zu\n", name.c_str(),
              static_cast<unsigned long long>(executions + corpus.size()), static_cast<unsigned long long>(seed),
              corpus.size());
  return 0;
}
