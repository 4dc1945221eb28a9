// The peer of bench/transport.py: the least that ZeroMQ costs. A ROUTER process streams stamped messages to a DEALER
// process, both plain C calls of the same libzmq, and the receiver prints the one-way time of each message in ns.
//
//   zmq_ping_pong LIBZMQ ENDPOINT PAYLOAD_BYTES COUNT INTERVAL_US
//
// The sender paces its messages as an engine paces its tokens; `stamp` is CLOCK_MONOTONIC, which both processes share.
#include <dlfcn.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

constexpr int kDealer = 5, kRouter = 6;  // zmq.h: ZMQ_DEALER, ZMQ_ROUTER
constexpr int kSendMore = 2;             // ZMQ_SNDMORE

struct Zmq {
  void* (*ctx_new)();
  void* (*socket)(void*, int);
  int (*bind)(void*, const char*);
  int (*connect)(void*, const char*);
  int (*send)(void*, const void*, size_t, int);
  int (*recv)(void*, void*, size_t, int);
} zmq;

int64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

template <typename Function>
void resolve(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) {
    std::fprintf(stderr, "libzmq has no %s\n", name);
    std::exit(2);
  }
}

[[noreturn]] void receive(const char* endpoint, size_t bytes, int count) {
  void* socket = zmq.socket(zmq.ctx_new(), kDealer);
  zmq.connect(socket, endpoint);
  zmq.send(socket, "go", 2, 0);
  std::vector<char> payload(bytes);
  std::vector<int64_t> one_way(count);
  for (int64_t& sample : one_way) {
    zmq.recv(socket, payload.data(), 16, 0);             // version frame
    zmq.recv(socket, payload.data(), payload.size(), 0);
    int64_t stamp = 0;
    std::memcpy(&stamp, payload.data(), sizeof(stamp));
    sample = now_ns() - stamp;
  }
  for (const int64_t sample : one_way) std::printf("%lld\n", static_cast<long long>(sample));
  std::fflush(stdout);
  std::_Exit(0);
}

void stream(const char* endpoint, size_t bytes, int count, int64_t interval_ns) {
  void* socket = zmq.socket(zmq.ctx_new(), kRouter);
  if (zmq.bind(socket, endpoint) != 0) std::exit(3);
  char identity[256];
  const int identity_bytes = zmq.recv(socket, identity, sizeof(identity), 0);
  char hello[8];
  zmq.recv(socket, hello, sizeof(hello), 0);
  std::vector<char> payload(bytes, 'x');
  int64_t due = now_ns();
  for (int i = 0; i < count; ++i) {
    due += interval_ns;
    while (now_ns() < due) {
    }
    const int64_t stamp = now_ns();
    std::memcpy(payload.data(), &stamp, sizeof(stamp));
    zmq.send(socket, identity, identity_bytes, kSendMore);
    zmq.send(socket, "ull1", 4, kSendMore);
    zmq.send(socket, payload.data(), payload.size(), 0);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 6) {
    std::fprintf(stderr, "usage: %s LIBZMQ ENDPOINT PAYLOAD_BYTES COUNT INTERVAL_US\n", argv[0]);
    return 2;
  }
  void* library = dlopen(argv[1], RTLD_NOW);
  if (library == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 2;
  }
  resolve(library, "zmq_ctx_new", zmq.ctx_new);
  resolve(library, "zmq_socket", zmq.socket);
  resolve(library, "zmq_bind", zmq.bind);
  resolve(library, "zmq_connect", zmq.connect);
  resolve(library, "zmq_send", zmq.send);
  resolve(library, "zmq_recv", zmq.recv);
  const size_t bytes = std::strtoul(argv[3], nullptr, 10);
  const int count = std::atoi(argv[4]);
  const int64_t interval_ns = std::atoll(argv[5]) * 1000;
  const pid_t receiver = fork();
  if (receiver == 0) receive(argv[2], bytes, count);
  stream(argv[2], bytes, count, interval_ns);
  waitpid(receiver, nullptr, 0);
  std::_Exit(0);
}
