// A libzmq for tests of the io thread: one ROUTER and one PAIR in memory, with clients that can be full or gone at
// will. Only what io/ calls, with libzmq's own return values and errors.
#pragma once

#include <poll.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "io/zmq_api.h"

namespace ull::test {

using Frames = std::vector<std::string>;

class FakeZmq {
 public:
  [[nodiscard]] static zmq::Api api() {
    zmq::Api api{};
    api.socket = [](void* context, int type) -> void* {
      auto* net = static_cast<FakeZmq*>(context);
      return type == zmq::kRouter ? &net->router_ : &net->pair_;
    };
    api.close = [](void* socket) {
      const std::lock_guard lock(of(socket).net->mutex_);
      of(socket).closed = true;
      return 0;
    };
    api.setsockopt = [](void* socket, int option, const void* value, size_t size) {
      int64_t number = 0;
      std::memcpy(&number, value, size);
      const std::lock_guard lock(of(socket).net->mutex_);
      of(socket).options[option] = number;
      return 0;
    };
    api.getsockopt = [](void*, int, void* value, size_t* size) {
      std::memcpy(value, "fake://bound", 13);
      *size = 13;
      return 0;
    };
    api.bind = [](void*, const char* endpoint) {
      if (std::string_view(endpoint) != "fake://taken") return 0;
      error_ = EADDRINUSE;
      return -1;
    };
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
    api.msg_move = [](zmq::Message* target, zmq::Message* source) {
      delete content(target);
      content(target) = std::exchange(content(source), nullptr);
      return 0;
    };
    api.msg_recv = [](zmq::Message* message, void* socket, int) {
      FakeZmq& net = *of(socket).net;
      if (&of(socket) == &net.router_) {
        const std::lock_guard lock(net.hook_mutex_);
        if (net.before_receive_) net.before_receive_();
      }
      return net.receive(message, of(socket));
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

  // ---- the test's side ----
  void send_as(const std::string& client, Frames frames) {
    const std::lock_guard lock(mutex_);
    frames.insert(frames.begin(), client);
    router_.inbox.push_back(std::move(frames));
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
  // What the ROUTER was told last, by option; little endian.
  std::map<int, int64_t> client_options() {
    const std::lock_guard lock(mutex_);
    return router_.options;
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
  // Replies that the io thread has not taken, and clients' frames.
  size_t replies_left() {
    const std::lock_guard lock(mutex_);
    return pair_.inbox.size();
  }
  size_t frames_left() {
    const std::lock_guard lock(mutex_);
    size_t frames = router_.partial.size();
    for (const Frames& message : router_.inbox) frames += message.size();
    return frames;
  }

  bool closed() {
    const std::lock_guard lock(mutex_);
    return router_.closed && pair_.closed;
  }

 private:
  struct Socket {
    FakeZmq* net;
    std::deque<Frames> inbox;
    Frames outgoing;                  // frames of the message being sent
    std::deque<std::string> partial;  // frames of the message being received
    bool closed = false;
    std::map<int, int64_t> options = {};
  };
  struct Content {
    std::string bytes;
    bool more;
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
    if (socket.outgoing.empty()) {
      const bool to_client = &socket == &router_;
      if (to_client && gone_.count(bytes) > 0) {
        error_ = EHOSTUNREACH;
        return -1;
      }
      if (to_client ? clients_[bytes].size() >= room_of(bytes) : control_.size() >= control_room_) {
        error_ = EAGAIN;
        return -1;
      }
    }
    const auto size = static_cast<int>(bytes.size());
    socket.outgoing.push_back(std::move(bytes));
    if ((flags & zmq::kSendMore) == 0) {
      Frames frames = std::move(socket.outgoing);
      socket.outgoing.clear();
      if (&socket == &router_) {
        const std::string client = frames.front();
        frames.erase(frames.begin());
        clients_[client].push_back(std::move(frames));
      } else {
        control_.push_back(std::move(frames));
      }
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
  Socket router_{this, {}, {}, {}, false};
  Socket pair_{this, {}, {}, {}, false};
  std::map<std::string, std::deque<Frames>> clients_;
  std::deque<Frames> control_;
  std::set<std::string> gone_;
  size_t room_ = 64;
  std::map<std::string, size_t> rooms_;
  size_t control_room_ = 1000;
};

}  // namespace ull::test
