// The peer of bench/transport.py: the least that ZeroMQ costs, as plain C calls of the same libzmq between two processes.
//
//   zmq_ping_pong LIBZMQ ENDPOINT PAYLOAD_BYTES COUNT INTERVAL_US
//
// A DEALER sends every INTERVAL_US (0: at once), spinning in between as an engine that computes would; a ROUTER echoes.
// Both block in zmq_recv. Prints half of each round trip in ns.
#include <dlfcn.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
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

[[noreturn]] void ping(void* socket, std::vector<char>& payload, int count, int64_t interval_ns) {
  char version[16];
  std::vector<int64_t> samples(count);
  int64_t due = now_ns();
  for (int64_t& sample : samples) {
    due += interval_ns;
    while (now_ns() < due) {
    }
    const int64_t started = now_ns();
    zmq.send(socket, "ull1", 4, kSendMore);
    zmq.send(socket, payload.data(), payload.size(), 0);
    zmq.recv(socket, version, sizeof(version), 0);
    zmq.recv(socket, payload.data(), payload.size(), 0);
    sample = (now_ns() - started) / 2;
  }
  for (const int64_t sample : samples) std::printf("%lld\n", static_cast<long long>(sample));
  std::fflush(stdout);
  std::_Exit(0);
}

void echo(void* socket, std::vector<char>& payload, int count) {
  char identity[256];
  char version[16];
  for (int i = 0; i < count; ++i) {
    const int identity_bytes = zmq.recv(socket, identity, sizeof(identity), 0);
    zmq.recv(socket, version, sizeof(version), 0);
    zmq.recv(socket, payload.data(), payload.size(), 0);
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
  std::vector<char> payload(bytes, 'x');
  const pid_t pinger = fork();
  void* socket = zmq.socket(zmq.ctx_new(), pinger == 0 ? kDealer : kRouter);
  if (pinger == 0) {
    zmq.connect(socket, argv[2]);
    ping(socket, payload, count, interval_ns);
  }
  if (zmq.bind(socket, argv[2]) != 0) return 3;
  echo(socket, payload, count);
  waitpid(pinger, nullptr, 0);
  std::_Exit(0);
}
