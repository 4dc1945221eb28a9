// One client's connection: sends messages, and sorts what comes by the request that it belongs to.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include "ull/request.hpp"
#include "ull/transport.hpp"

namespace ull {

enum class TransportKind {
  kAuto,   // of an ipc endpoint the local socket, where it is there and answers; else ZeroMQ
  kLocal,  // the local socket of an ipc endpoint
  kZeroMq,
};

struct ClientOptions {
  TransportKind transport = TransportKind::kAuto;
  Milliseconds connect_timeout{5000};
  // A request that nothing was heard of for so long is asked after, and so long the daemon may take for an answer to
  // that and to everything but completions.
  Milliseconds silence_timeout{10000};
  std::optional<CurveKeys> keys = std::nullopt;  // for a daemon that asks for them, by tcp
};

namespace detail {

class Connection {
 public:
  Connection(std::string url, ClientOptions options) : url_(std::move(url)), options_(std::move(options)) {}

  // Sends a message of this type, under an id of its own, which is returned. Connects where there is no connection.
  uint64_t ask(const char* type, Value::Map fields) {
    connect();
    const uint64_t id = ++last_id_;
    waiting_.try_emplace(id);
    send(type, id, fields);
    return id;
  }

  // A message about request `of`, whose id it bears, such as "cancel": nothing waits for its answer.
  void tell(const char* type, uint64_t of) { send(type, of, {}); }

  // The next message for a request. Asks after it where there is nothing for a while. Throws Refused for `error`.
  Value next(uint64_t id) {
    for (;;) {
      const auto deadline = Clock::now() + options_.silence_timeout;
      if (std::optional<Value> message = take(id, deadline)) return checked(std::move(*message));
      // What comes meanwhile for the request is queued. An answer shows that the daemon is alive.
      const Value health = answer(ask("health", {{"request", id}}), "health");
      const bool is_live = trusted([&] { return health["live"].is_nil() || health["live"].as_bool(); });
      if (!is_live && !has_message(id)) give_up("knows nothing of a request that has not ended");
    }
  }

  // The one answer to a question, which must be of this type.
  Value answer(uint64_t id, std::string_view type) {
    std::optional<Value> message = take(id, Clock::now() + options_.silence_timeout);
    if (!message) give_up("does not answer");
    return of_type(id, std::move(*message), type);
  }
  // The same for a question that waits for others: the daemon is asked after a while whether it is alive.
  Value wait_answer(uint64_t id, std::string_view type) {
    for (;;) {
      if (std::optional<Value> message = take(id, Clock::now() + options_.silence_timeout)) {
        return of_type(id, std::move(*message), type);
      }
      (void)answer(ask("health", {}), "health");
    }
  }

  // A number for a session of this connection.
  uint64_t new_session() { return ++last_session_; }

  // Connects where there is no connection, or one that nobody uses has ended.
  void connect() {
    if (transport_ != nullptr && waiting_.empty() && !transport_->is_there()) close();
    if (transport_ == nullptr) open();
  }

  // Answers to it are thrown away from now on.
  void forget(uint64_t id) noexcept { waiting_.erase(id); }

  // Which connection this is: another one knows nothing of what was asked of this one.
  [[nodiscard]] uint64_t epoch() const { return epoch_; }
  void require(uint64_t epoch) const {
    if (!is_live(epoch)) throw Disconnected("the connection of this request or session has ended");
  }
  [[nodiscard]] bool is_live(uint64_t epoch) const noexcept { return transport_ != nullptr && epoch == epoch_; }

  void close() noexcept {
    transport_.reset();
    waiting_.clear();
    ++epoch_;
  }

 private:
  void open() {
    const std::string_view ipc = "ipc://";
    const bool is_ipc = url_.starts_with(ipc);
    if (options_.transport == TransportKind::kLocal && !is_ipc) {
      throw UsageError("the local transport is for ipc:// only");
    }
    if (is_ipc && options_.transport != TransportKind::kZeroMq) {
      transport_ = LocalTransport::connect(url_.substr(ipc.size()) + ".local");
      if (transport_ == nullptr && options_.transport == TransportKind::kLocal) {
        throw Disconnected("no daemon answers at " + url_ + ".local");
      }
    }
    if (transport_ == nullptr) {
      if (context_ == nullptr) context_ = std::make_unique<zmq::context_t>(1);
      transport_ = std::make_unique<ZmqTransport>(*context_, url_, is_ipc ? std::nullopt : options_.keys,
                                                  Clock::now() + options_.connect_timeout);
    }
  }

  // The id goes first: the daemon looks for it at the beginning of a message that is too long.
  void send(const char* type, uint64_t id, Value::Map fields) {
    fields.erase("id");
    fields.erase("type");
    msgpack::sbuffer buffer;
    msgpack::packer<msgpack::sbuffer> packer(buffer);
    packer.pack_map(static_cast<uint32_t>(fields.size() + 2));
    packer.pack("id");
    packer.pack(id);
    packer.pack("type");
    packer.pack(type);
    for (const auto& [key, value] : fields) {
      packer.pack(key);
      value.pack(packer);
    }
    guarded([&] { transport_->send({buffer.data(), buffer.size()}, Clock::now() + options_.silence_timeout); });
  }

  // The next message for `id`, queued or new, by the deadline. Others are queued where somebody waits for them.
  std::optional<Value> take(uint64_t id, Clock::time_point deadline) {
    auto& queue = waiting_.at(id);
    while (queue.empty()) {
      std::optional<std::string> payload;
      guarded([&] { payload = transport_->receive(deadline); });
      if (!payload) return std::nullopt;
      guarded([&] { sort(unpack(*payload)); });
    }
    Value message = std::move(queue.front());
    queue.pop_front();
    return message;
  }

  [[nodiscard]] bool has_message(uint64_t id) const { return !waiting_.at(id).empty(); }

  static Value unpack(const std::string& payload) {
    try {
      const msgpack::unpack_limit limit(1 << 20, 1 << 16, kMaxMessageBytes, kMaxMessageBytes, kMaxMessageBytes, 64);
      return Value::of(msgpack::unpack(payload.data(), payload.size(), nullptr, nullptr, limit).get());
    } catch (const msgpack::unpack_error& error) {
      throw ProtocolError(std::string("a message of the daemon is no msgpack: ") + error.what());
    }
  }

  void sort(Value message) {
    const Value& id = message["id"];
    if (id.is_nil()) throw ProtocolError("the daemon did not understand a message: " + message["message"].as_text());
    const auto found = waiting_.find(id.as_unsigned());
    if (found != waiting_.end()) found->second.push_back(std::move(message));
  }

  // The message, unless it is an `error`.
  Value checked(Value message) {
    if (trusted([&] { return message["type"].as_text() != "error"; })) return message;
    throw trusted([&] {
      Refused refused(message["code"].as_text(), message["message"].as_text());
      if (!message["field"].is_nil()) refused.field = message["field"].as_text();
      if (!message["retry_after_ms"].is_nil()) refused.retry_after_ms = message["retry_after_ms"].as_unsigned();
      if (!message["queue_length"].is_nil()) refused.queue_length = message["queue_length"].as_unsigned();
      if (!message["expected_ms"].is_nil()) refused.expected_ms = message["expected_ms"].as_number();
      return refused;
    });
  }

  // What reading a message gives. One of a wrong form ends the connection.
  template <typename Read>
  std::invoke_result_t<Read> trusted(Read&& read) {
    try {
      return read();
    } catch (const ProtocolError&) {
      close();
      throw;
    }
  }

  // A transport that failed is of no further use, and what it brought is no more to be trusted.
  template <typename Body>
  void guarded(Body&& body) {
    try {
      body();
    } catch (const Error&) {
      close();
      throw;
    } catch (const zmq::error_t& error) {
      close();
      throw Disconnected(error.what());
    }
  }

  [[noreturn]] void give_up(const char* why) {
    close();
    throw Disconnected("the daemon at " + url_ + " " + why);
  }

  Value of_type(uint64_t id, Value message, std::string_view type) {
    forget(id);
    Value found = checked(std::move(message));
    if (found["type"].as_text() == type) return found;
    close();
    throw ProtocolError("an answer is of another type than " + std::string(type));
  }

  std::string url_;
  ClientOptions options_;
  std::unique_ptr<zmq::context_t> context_;
  std::unique_ptr<Transport> transport_;
  std::unordered_map<uint64_t, std::deque<Value>> waiting_;  // messages by the request that they are for
  uint64_t last_id_ = 0;
  uint64_t last_session_ = 0;
  uint64_t epoch_ = 0;
};

}  // namespace detail
}  // namespace ull
