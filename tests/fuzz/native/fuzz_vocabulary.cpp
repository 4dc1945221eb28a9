// vocab.bin: whatever is in the file, it is a vocabulary or an error that names the file.
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <stdexcept>
#include <string>

#include "engine/vocabulary.h"
#include "streams.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const int fd = memfd_create("vocabulary", MFD_CLOEXEC);
  static const std::string path = "/proc/self/fd/" + std::to_string(fd);
  ull::fuzz::require(fd >= 0 && ftruncate(fd, static_cast<off_t>(size)) == 0);
  ull::fuzz::require(pwrite(fd, data, size, 0) == static_cast<ssize_t>(size));
  try {
    const ull::Vocabulary vocabulary(path);
    for (int32_t token = -1; token <= vocabulary.size(); ++token) {
      const ull::Piece piece = vocabulary.piece(token);
      ull::fuzz::require(piece.bytes.size() <= vocabulary.longest());
      uint8_t sum = 0;
      for (const char byte : piece.bytes) sum = static_cast<uint8_t>(sum + byte);  // it can be read
      asm volatile("" : : "r"(sum));
    }
  } catch (const std::runtime_error& error) {
    ull::fuzz::require(std::strstr(error.what(), path.c_str()) != nullptr);
  }
  return 0;
}
