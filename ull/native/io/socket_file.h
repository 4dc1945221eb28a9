// The file of a listening unix socket, which others may delete or replace while the socket lives on, unreachable.
#pragma once

#include <sys/stat.h>

#include <optional>
#include <string>
#include <string_view>

namespace ull {

// A listening socket, non-blocking, at a path that does not exist, or at @name in the abstract namespace. Its file has
// the mode that the umask leaves, or `mode`. -1: errno says why not.
[[nodiscard]] int listen_unix(const std::string& path, std::optional<mode_t> mode) noexcept;

class SocketFile {
 public:
  enum class State : uint8_t {
    kOurs,
    kGone,     // there is no file: bind_again() helps
    kForeign,  // somebody else's file is there
  };

  // A file as the kernel knows it.
  struct Identity {
    dev_t device = 0;
    ino_t inode = 0;
    mode_t mode = 0;
  };

  // Takes what is at `path` now for ours.
  explicit SocketFile(std::string path) : path_(std::move(path)) { (void)adopt(); }
  // ... if it is this one, which another process has bound.
  SocketFile(std::string path, const Identity& identity) : path_(std::move(path)), identity_(identity) {}

  // Looks at the file; costs one system call.
  [[nodiscard]] State look() noexcept;
  // A listening socket with a new file of the old one's mode, which is ours from now on. -1: errno says why not.
  [[nodiscard]] int bind_again() noexcept;

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] const Identity& identity() const noexcept { return identity_; }

 private:
  [[nodiscard]] bool adopt() noexcept;

  std::string path_;
  Identity identity_;
};

[[nodiscard]] constexpr std::string_view socket_file_state_name(SocketFile::State state) noexcept {
  switch (state) {
    case SocketFile::State::kOurs:
      return "ours";
    case SocketFile::State::kGone:
      return "gone";
    case SocketFile::State::kForeign:
      return "foreign";
  }
  return "unknown";
}

}  // namespace ull
