// A client of ulld: C++20, header-only, on cppzmq and msgpack-cxx. See clients/cpp/README.md.
//
//   ull::Client client("ipc:///run/ull/ull.sock");
//   auto stream = client.generate({.prompt = "import os\n", .max_tokens = 32});
//   for (const ull::Tokens& tokens : stream) std::cout << tokens.text;
//
// A client, and the streams and sessions of it, are one thread's at a time. Many streams may be open at once: what
// comes for one while another is read waits for it, at most a whole answer each.
#pragma once

#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ull/stream.hpp"

namespace ull {

// A session of a client (see "Sessions" in docs/wire.md): its prompt is kept, and only what is new is computed. Closed
// when it is destroyed. Throws Disconnected once the connection that it was opened on has ended.
class Session {
 public:
  Session(Session&& other) noexcept
      : connection_(std::move(other.connection_)),
        number_(other.number_),
        epoch_(other.epoch_),
        is_open_(std::exchange(other.is_open_, false)) {}
  Session& operator=(Session&&) = delete;
  ~Session() {
    try {
      if (is_open_ && connection_->is_live(epoch_)) {
        connection_->forget(connection_->ask("close_session", {{"session", number_}}));
      }
    } catch (...) {  // then the connection has ended, and the session with it
    }
  }

  [[nodiscard]] uint64_t number() const { return number_; }

  Stream generate(const Request& request) {
    connection_->require(epoch_);
    Value::Map fields = detail::fields_of(request);
    fields.insert_or_assign("session", number_);
    return {connection_, std::move(fields)};
  }
  Result complete(const Request& request) { return generate(request).result(); }

  // Reads a prompt behind what the session holds, ahead of the request that needs it. Waits until it is read, and
  // returns the tokens that the session then holds.
  uint64_t append(Request request) {
    request.max_tokens = 0;
    return complete(request).usage.prompt_tokens;
  }

  // Another session that holds the same.
  Session fork() {
    connection_->require(epoch_);
    const uint64_t to = connection_->new_session();
    (void)change("fork", {{"to", to}});
    return {connection_, to, epoch_};
  }

  // Each returns the tokens that the session holds afterwards.
  uint64_t rollback(uint64_t tokens) { return change("rollback", {{"tokens", tokens}}); }
  uint64_t truncate_to_tokens(uint64_t tokens) { return change("truncate", {{"tokens", tokens}}); }
  uint64_t truncate_to_characters(uint64_t characters) { return change("truncate", {{"characters", characters}}); }
  uint64_t close() {
    is_open_ = false;
    return change("close_session", {});
  }

 private:
  friend class Client;

  Session(std::shared_ptr<detail::Connection> connection, uint64_t number, uint64_t epoch)
      : connection_(std::move(connection)), number_(number), epoch_(epoch) {}

  uint64_t change(const char* type, Value::Map fields) {
    connection_->require(epoch_);
    fields.insert_or_assign("session", number_);
    // It is carried out once what runs in the session has ended: that may take a while.
    return connection_->wait_answer(connection_->ask(type, std::move(fields)), "session")["tokens"].as_unsigned();
  }

  std::shared_ptr<detail::Connection> connection_;
  uint64_t number_;
  uint64_t epoch_;
  bool is_open_ = true;
};

// Where daemon and clients of one user meet where nothing is configured: in a directory that is this user's own. Throws
// UsageError where there is none.
inline std::string default_url() {
  const uid_t user = ::geteuid();
  const char* given = std::getenv("XDG_RUNTIME_DIR");
  const std::string number = std::to_string(user);
  for (const std::string& directory :
       {std::string(given == nullptr ? "" : given), "/run/user/" + number, "/tmp/ull-" + number}) {
    struct stat found{};
    const bool is_own = directory.starts_with('/') && ::lstat(directory.c_str(), &found) == 0 &&
                        S_ISDIR(found.st_mode) && found.st_uid == user && (found.st_mode & (S_IWGRP | S_IWOTH)) == 0;
    if (is_own) return "ipc://" + directory + "/ull.sock";
  }
  throw UsageError("no directory of the user's own has a default socket: name the daemon's endpoint");
}

class Client {
 public:
  // `url` is an endpoint that the daemon's READY names, such as ipc:///run/ull/ull.sock or tcp://host:5555. Connects
  // with the first request, and again with the next one where the connection has ended.
  explicit Client(std::string url = default_url(), ClientOptions options = {})
      : connection_(std::make_shared<detail::Connection>(std::move(url), options)) {}

  Stream generate(const Request& request) { return {connection_, detail::fields_of(request)}; }
  Result complete(const Request& request) { return generate(request).result(); }

  // `pin`: its KV cache is never given up for others'.
  Session open_session(bool pin = false) {
    connection_->connect();
    const uint64_t number = connection_->new_session();
    (void)ask("open_session", {{"session", number}, {"pin", pin}}, "session");
    return {connection_, number, connection_->epoch()};
  }

  // The ids that a request of the same `prompt` or `messages` would use, or how many they are.
  TokenIds tokenize(const Request& request) {
    return detail::ids_of(ask("tokenize", detail::fields_of(request), "tokenize")["token_ids"]);
  }
  uint64_t count_tokens(const Request& request) {
    Value::Map fields = detail::fields_of(request);
    fields.insert_or_assign("count_only", true);
    return ask("tokenize", std::move(fields), "tokenize")["count"].as_unsigned();
  }
  // The text that a stream of these ids would give.
  std::string detokenize(const TokenIds& ids) {
    return ask("detokenize", {{"token_ids", ids}}, "detokenize")["text"].as_text();
  }

  // The daemon's answers, with the fields of docs/wire.md.
  Value health() { return ask("health", {}, "health"); }
  Value info() { return ask("info", {}, "info"); }
  Value stats() { return ask("stats", {}, "stats"); }

 private:
  Value ask(const char* type, Value::Map fields, const char* answer) {
    return connection_->answer(connection_->ask(type, std::move(fields)), answer);
  }

  std::shared_ptr<detail::Connection> connection_;
};

}  // namespace ull
