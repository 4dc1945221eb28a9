// The dozen libzmq functions that the io thread uses, found at run time in the libzmq that pyzmq has already loaded.
// libzmq is never linked: a second copy in one process would know nothing of pyzmq's contexts.
// Constants and signatures: zmq.h of libzmq 4.3 (its ABI has been stable since 4.2).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace ull::zmq {

inline constexpr int kPair = 0;

inline constexpr int kLinger = 17;            // int, ms
inline constexpr int kSendHighWater = 23;     // int, messages
inline constexpr int kReceiveHighWater = 24;  // int, messages

inline constexpr int kDontWait = 1;
inline constexpr int kSendMore = 2;
inline constexpr short kPollIn = 1;
inline constexpr short kPollOut = 2;

struct alignas(void*) Message {  // zmq_msg_t
  unsigned char opaque[64];
};
static_assert(sizeof(Message) == 64);

struct PollItem {  // zmq_pollitem_t
  void* socket;
  int fd;
  short events;
  short revents;
};

struct Api {
  void* (*socket)(void* context, int type);
  int (*close)(void* socket);
  int (*setsockopt)(void* socket, int option, const void* value, size_t size);
  int (*bind)(void* socket, const char* endpoint);
  int (*send)(void* socket, const void* data, size_t size, int flags);
  int (*msg_init)(Message* message);
  int (*msg_init_size)(Message* message, size_t size);  // ENOMEM
  int (*msg_close)(Message* message);
  int (*msg_recv)(Message* message, void* socket, int flags);
  int (*msg_send)(Message* message, void* socket, int flags);
  int (*msg_more)(const Message* message);
  void* (*msg_data)(Message* message);
  size_t (*msg_size)(const Message* message);
  int (*poll)(PollItem* items, int count, long timeout_ms);
  int (*socket_monitor)(void* socket, const char* address, int events);
  int (*error)();  // zmq_errno
  const char* (*error_text)(int error);
};

// `path` is that of the libzmq already in this process. Throws std::runtime_error if it is not loaded or lacks a
// function.
[[nodiscard]] Api load(const std::string& path);

// Throws std::runtime_error: `what`, and libzmq's last error.
[[noreturn]] void fail(const Api& api, const std::string& what);

// Gives back what the message holds.
inline void clear(const Api& api, Message& message) noexcept {
  api.msg_close(&message);
  api.msg_init(&message);
}

template <typename Value>
void set(const Api& api, void* socket, int option, Value value, const char* name) {
  if (api.setsockopt(socket, option, &value, sizeof(value)) != 0) fail(api, name);
}

[[nodiscard]] inline std::span<const uint8_t> bytes(const Api& api, Message& message) noexcept {
  return {static_cast<const uint8_t*>(api.msg_data(&message)), api.msg_size(&message)};
}

}  // namespace ull::zmq
