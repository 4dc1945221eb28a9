// A completion under way.
#pragma once

#include <cstddef>
#include <exception>
#include <iterator>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "ull/connection.hpp"

namespace ull {

// Reading it waits for tokens; where it is destroyed before its end it is cancelled.
class Stream {
 public:
  Stream(Stream&& other) noexcept
      : connection_(std::move(other.connection_)),
        id_(other.id_),
        epoch_(other.epoch_),
        is_open_(std::exchange(other.is_open_, false)),
        error_(std::move(other.error_)),
        result_(std::move(other.result_)) {}
  Stream& operator=(Stream&&) = delete;
  ~Stream() { abandon(); }

  // The next tokens; nothing once it has ended. Throws Refused where the daemon did not take it, Failed where it failed
  // on the way, Disconnected and ProtocolError, and the same again from then on.
  std::optional<Tokens> next() {
    if (error_) std::rethrow_exception(error_);
    try {
      while (is_open_) {
        if (std::optional<Tokens> tokens = read()) return tokens;
      }
    } catch (const Error&) {
      error_ = std::current_exception();
      close();
      throw;
    }
    return std::nullopt;
  }

  // Has the daemon end it within one round. Tokens that are on their way still come, and then its end, "cancelled".
  void cancel() {
    if (!is_open_) return;
    connection_->require(epoch_);
    connection_->tell("cancel", id_);
  }

  // Releases the answer of a request with `hold`. Throws Refused ("not_held") where nothing is held any more.
  void commit() {
    connection_->require(epoch_);
    (void)connection_->answer(connection_->ask("commit", {{"request", id_}}), "ack");
  }

  // What came, once it has ended: reads what is left first.
  const Result& result() {
    while (next()) {
    }
    return result_;
  }

  class Iterator {
   public:
    using value_type = Tokens;
    using difference_type = std::ptrdiff_t;
    explicit Iterator(Stream& stream) : stream_(&stream), tokens_(stream.next()) {}
    const Tokens& operator*() const { return *tokens_; }
    const Tokens* operator->() const { return &*tokens_; }
    Iterator& operator++() {
      tokens_ = stream_->next();
      return *this;
    }
    void operator++(int) { ++*this; }
    bool operator==(std::default_sentinel_t) const { return !tokens_; }

   private:
    Stream* stream_;
    std::optional<Tokens> tokens_;
  };
  // Once: what was read is gone.
  [[nodiscard]] Iterator begin() { return Iterator(*this); }
  [[nodiscard]] static std::default_sentinel_t end() { return {}; }

 private:
  friend class Client;
  friend class Session;

  Stream(std::shared_ptr<detail::Connection> connection, Value::Map fields)
      : connection_(std::move(connection)),
        id_(connection_->ask("generate", std::move(fields))),
        epoch_(connection_->epoch()) {}

  // Takes one message: tokens, or what else comes.
  std::optional<Tokens> read() {
    connection_->require(epoch_);
    Value message = connection_->next(id_);
    try {
      const std::string& type = message["type"].as_text();
      if (type == "token") return add(message);
      if (type == "prompt_logprobs") {
        detail::add_prompt_logprobs(result_, message);
      } else if (type == "done") {
        close();
        detail::finish(result_, std::move(message));
      } else if (type != "ack") {  // of `cancel`: it bears the id of the request
        throw ProtocolError("a completion goes on with a message of type " + type);
      }
    } catch (const ProtocolError&) {
      connection_->close();
      throw;
    }
    if (!is_open_ && !result_.done["error"].is_nil()) {
      const Value& error = result_.done["error"];
      throw Failed(error["code"].as_text(), error["message"].as_text());
    }
    return std::nullopt;
  }

  Tokens add(const Value& message) {
    Tokens tokens = detail::tokens_of(message);
    result_.token_ids.insert(result_.token_ids.end(), tokens.ids.begin(), tokens.ids.end());
    result_.text += tokens.text;
    return tokens;
  }

  void close() noexcept {
    is_open_ = false;
    connection_->forget(id_);
  }

  void abandon() noexcept {
    if (!is_open_) return;
    try {
      if (connection_->is_live(epoch_)) connection_->tell("cancel", id_);
    } catch (...) {  // then the connection has ended, and the request with it
    }
    close();
  }

  std::shared_ptr<detail::Connection> connection_;
  uint64_t id_;
  uint64_t epoch_;
  bool is_open_ = true;
  std::exception_ptr error_;
  Result result_;
};

}  // namespace ull
