// What is at the io thread's two ends, in memory: a libzmq with the PAIR to the control plane (only what io/ calls,
// with libzmq's own return values and errors), and clients that can be full or gone at will.
#pragma once

#include <poll.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/event_fd.h"
#include "io/transport.h"
#include "io/zmq_api.h"

namespace ull::test {

using Frames = std::vector<std::string>;

class FakeZmq {
 public:
  [[nodiscard]] static zmq::Api api() {
    zmq::Api api{};
    api.socket = [](void* context, int) -> void* { return &static_cast<FakeZmq*>(context)->pair_; };
    api.close = [](void* socket) {
      const std::lock_guard lock(of(socket).net->mutex_);
      of(socket).closed = true;
      return 0;
    };
    api.setsockopt = [](void*, int, const void*, size_t) { return 0; };
    api.bind = [](void*, const char*) { return 0; };
    api.send = [](void* socket, const void* data, size_t size, int flags) {
      return of(socket).net->send(of(socket), {static_cast<const char*>(data), size}, flags);
    };
    api.msg_init = [](zmq::Message* message) {
      content(message) = nullptr;
      return 0;
    };
    api.msg_init_size = [](zmq::Message* message, size_t size) {
      content(message) = new Content{std::string(size, '\0'), false};
      return 0;
    };
    api.msg_close = [](zmq::Message* message) {
      delete content(message);
      content(message) = nullptr;
      return 0;
    };
    api.msg_recv = [](zmq::Message* message, void* socket, int) {
      return of(socket).net->receive(message, of(socket));
    };
    api.msg_send = [](zmq::Message* message, void* socket, int flags) {
      std::string bytes = content(message) == nullptr ? "" : content(message)->bytes;
      const int sent = of(socket).net->send(of(socket), std::move(bytes), flags);
      if (sent >= 0) {  // the message is empty afterwards
        delete content(message);
        content(message) = nullptr;
      }
      return sent;
    };
    api.msg_more = [](const zmq::Message* message) {
      return content(const_cast<zmq::Message*>(message))->more ? 1 : 0;
    };
    api.msg_data = [](zmq::Message* message) -> void* {
      return content(message) ? content(message)->bytes.data() : nullptr;
    };
    api.msg_size = [](const zmq::Message* message) {
      const Content* found = content(const_cast<zmq::Message*>(message));
      return found == nullptr ? size_t{0} : found->bytes.size();
    };
    api.poll = [](zmq::PollItem* items, int count, long timeout_ms) {
      for (int i = 0; i < count; ++i) {
        if (items[i].socket == nullptr) continue;
        FakeZmq& net = *of(items[i].socket).net;
        const std::lock_guard lock(net.hook_mutex_);
        if (net.before_poll_) net.before_poll_(items[0].fd);
        break;
      }
      const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
      for (;;) {
        for (int i = 0; i < count; ++i) {
          if (items[i].socket == nullptr) {
            pollfd item{items[i].fd, POLLIN, 0};
            if (::poll(&item, 1, 0) > 0) return 1;
          } else {
            const std::lock_guard lock(of(items[i].socket).net->mutex_);
            const Socket& socket = of(items[i].socket);
            if ((items[i].events & zmq::kPollIn) != 0 && !socket.inbox.empty()) return 1;
            if ((items[i].events & zmq::kPollOut) != 0 && socket.net->control_.size() < socket.net->control_room_)
              return 1;
          }
        }
        if (timeout_ms >= 0 && std::chrono::steady_clock::now() >= end) return 0;
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
    };
    api.error = [] { return error_; };
    api.error_text = [](int error) -> const char* { return std::strerror(error); };
    return api;
  }

  // The clients, as a transport; an endpoint that is called fake://taken cannot be opened.
  [[nodiscard]] std::unique_ptr<Transport> clients(const std::string& endpoint = "fake://clients") {
    return std::make_unique<Clients>(*this, endpoint);
  }

  // ---- the test's side ----
  // A message of the wire: ull1 and a payload, or something malformed.
  void send_as(const std::string& client, Frames frames) {
    const std::lock_guard lock(mutex_);
    frames.insert(frames.begin(), client);
    inbox_.push_back(std::move(frames));
    arrived_.raise();
  }
  void send_as_control(Frames frames) {
    const std::lock_guard lock(mutex_);
    pair_.inbox.push_back(std::move(frames));
  }
  std::optional<Frames> take(const std::string& client) {
    const std::lock_guard lock(mutex_);
    return pop(clients_[client]);
  }
  std::optional<Frames> take_control() {
    const std::lock_guard lock(mutex_);
    return pop(control_);
  }
  size_t waiting(const std::string& client) {
    const std::lock_guard lock(mutex_);
    return clients_[client].size();
  }
  void set_gone(const std::string& client) {
    const std::lock_guard lock(mutex_);
    gone_.insert(client);
  }
  // Messages that a client, or the control plane, has room for.
  void set_room(size_t messages) {
    const std::lock_guard lock(mutex_);
    room_ = messages;
  }
  void set_control_room(size_t messages) {
    const std::lock_guard lock(mutex_);
    control_room_ = messages;
  }
  // Of one client; the others have what set_room() says.
  void set_room_of(const std::string& client, size_t messages) {
    const std::lock_guard lock(mutex_);
    rooms_[client] = messages;
  }
  // Called by the polling thread with the first item's descriptor.
  void before_poll(std::function<void(int)> hook) {
    const std::lock_guard lock(hook_mutex_);
    before_poll_ = std::move(hook);
  }
  // Called by the io thread before each look for a client's message.
  void before_receive(std::function<void()> hook) {
    const std::lock_guard lock(hook_mutex_);
    before_receive_ = std::move(hook);
  }
  // Replies that the io thread has not taken.
  size_t replies_left() {
    const std::lock_guard lock(mutex_);
    return pair_.inbox.size();
  }

  bool closed() {
    const std::lock_guard lock(mutex_);
    return clients_closed_ && pair_.closed;
  }

 private:
  struct Socket {
    FakeZmq* net;
    std::deque<Frames> inbox;
    Frames outgoing;                  // frames of the message being sent
    std::deque<std::string> partial;  // frames of the message being received
    bool closed = false;
  };
  struct Content {
    std::string bytes;
    bool more;
  };

  class Clients final : public Transport {
   public:
    Clients(FakeZmq& net, std::string endpoint) : net_(net), endpoints_{std::move(endpoint)} {}

    void open() override {
      if (endpoints_.front() == "fake://taken") throw std::runtime_error("fake://taken: Address already in use");
    }
    void close() noexcept override {
      const std::lock_guard lock(net_.mutex_);
      net_.clients_closed_ = true;
    }
    const std::vector<std::string>& endpoints() const noexcept override { return endpoints_; }
    Sent send(std::span<const uint8_t> identity, std::span<const uint8_t> payload) noexcept override {
      const std::lock_guard lock(net_.mutex_);
      const std::string client = text(identity);
      if (net_.gone_.count(client) > 0) return Sent::kGone;
      if (net_.clients_[client].size() >= net_.room_of(client)) return Sent::kBlocked;
      net_.clients_[client].push_back({std::string(kWireVersion), text(payload)});
      return Sent::kOk;
    }
    bool receive(Incoming& message) noexcept override {
      {
        const std::lock_guard lock(net_.hook_mutex_);
        if (net_.before_receive_) net_.before_receive_();
      }
      const std::lock_guard lock(net_.mutex_);
      net_.arrived_.clear();
      const auto frames = pop(net_.inbox_);
      if (!frames) return false;
      if (!net_.inbox_.empty()) net_.arrived_.raise();
      const std::string& client = frames->front();
      message.identity_size = client.size();
      std::copy(client.begin(), client.end(), message.identity.begin());
      const bool whole = frames->size() == 3 && (*frames)[1] == kWireVersion;
      message.malformed = whole ? nullptr : "bad_frame";
      message.received_ns = monotonic_ns();
      delete content(&message.payload);
      content(&message.payload) = whole ? new Content{frames->back(), false} : nullptr;
      return true;
    }
    void tend() noexcept override {}
    bool ready() const noexcept override { return false; }
    int fd() const noexcept override { return net_.arrived_.fd(); }
    std::span<const uint8_t> gone() noexcept override { return {}; }
    void pop_gone() noexcept override {}
    void look_at_files() noexcept override {}
    bool news(EndpointNews&) noexcept override { return false; }
    void pop_news() noexcept override {}
    Counts counts() const noexcept override { return {}; }

   private:
    static std::string text(std::span<const uint8_t> bytes) {
      return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
    }

    FakeZmq& net_;
    const std::vector<std::string> endpoints_;
  };

  static Socket& of(void* socket) { return *static_cast<Socket*>(socket); }
  static Content*& content(zmq::Message* message) { return *reinterpret_cast<Content**>(message->opaque); }

  static std::optional<Frames> pop(std::deque<Frames>& queue) {
    if (queue.empty()) return std::nullopt;
    Frames frames = std::move(queue.front());
    queue.pop_front();
    return frames;
  }

  size_t room_of(const std::string& client) const {
    const auto found = rooms_.find(client);
    return found == rooms_.end() ? room_ : found->second;
  }

  int send(Socket& socket, std::string bytes, int flags) {
    const std::lock_guard lock(mutex_);
    if (socket.outgoing.empty() && control_.size() >= control_room_) {
      error_ = EAGAIN;
      return -1;
    }
    const auto size = static_cast<int>(bytes.size());
    socket.outgoing.push_back(std::move(bytes));
    if ((flags & zmq::kSendMore) == 0) {
      Frames frames = std::move(socket.outgoing);
      socket.outgoing.clear();
      control_.push_back(std::move(frames));
    }
    return size;
  }

  int receive(zmq::Message* message, Socket& socket) {
    const std::lock_guard lock(mutex_);
    if (socket.partial.empty()) {
      auto frames = pop(socket.inbox);
      if (!frames) {
        error_ = EAGAIN;
        return -1;
      }
      socket.partial.assign(frames->begin(), frames->end());
    }
    delete content(message);
    content(message) = new Content{std::move(socket.partial.front()), socket.partial.size() > 1};
    socket.partial.pop_front();
    return static_cast<int>(content(message)->bytes.size());
  }

  static inline thread_local int error_ = 0;
  std::mutex mutex_;
  std::mutex hook_mutex_;
  std::function<void(int)> before_poll_;
  std::function<void()> before_receive_;
  Socket pair_{this, {}, {}, {}, false};
  bool clients_closed_ = false;
  std::deque<Frames> inbox_;  // of clients: their name first
  EventFd arrived_;           // there is something in it
  std::map<std::string, std::deque<Frames>> clients_;
  std::deque<Frames> control_;
  std::set<std::string> gone_;
  size_t room_ = 64;
  std::map<std::string, size_t> rooms_;
  size_t control_room_ = 1000;
};

}  // namespace ull::test
