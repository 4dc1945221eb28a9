// The peer of bench/transport.py: the least that ZeroMQ costs one way, as plain C calls of the same libzmq between two
// processes, while the sender has better things to do than to wait for the message to arrive.
//
//   zmq_one_way LIBZMQ ENDPOINT PAYLOAD_BYTES COUNT INTERVAL_US SENDER_CORES OTHER_CORES RECEIVER_CORES
//
// A ROUTER sends a message every INTERVAL_US and spins in between, as an engine computes between two tokens. A DEALER in
// another process blocks in zmq_recv. Each message carries CLOCK_MONOTONIC of the moment before its send; the receiver
// prints how many ns later it had it, one line per message. The lists of cores (such as 0,2) say where the sending
// thread, the rest of its process (libzmq's threads) and the receiving process may run.
#include <dlfcn.h>
#include <sched.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
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

// The calling thread, and what it starts from here on, runs on these cores only.
void stay_on(const char* cores) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  for (const char* at = cores;; ++at) {
    char* end = nullptr;
    CPU_SET(std::strtoul(at, &end, 10), &allowed);
    if (*(at = end) != ',') break;
  }
  if (sched_setaffinity(0, sizeof(allowed), &allowed) != 0) {
    std::perror(cores);
    std::exit(2);
  }
}

[[noreturn]] void receive(const char* endpoint, size_t payload_bytes, int count) {
  void* socket = zmq.socket(zmq.ctx_new(), kDealer);
  zmq.connect(socket, endpoint);
  zmq.send(socket, "ready", 5, 0);
  char version[16];
  std::vector<char> payload(payload_bytes);
  std::vector<int64_t> samples(count);
  for (int64_t& sample : samples) {
    zmq.recv(socket, version, sizeof(version), 0);
    zmq.recv(socket, payload.data(), payload.size(), 0);
    const int64_t received = now_ns();
    int64_t sent;
    std::memcpy(&sent, payload.data(), sizeof(sent));
    sample = received - sent;
  }
  for (const int64_t sample : samples) std::printf("%lld\n", static_cast<long long>(sample));
  std::fflush(stdout);
  std::_Exit(0);
}

void send_all(void* socket, size_t payload_bytes, int count, int64_t interval_ns) {
  char identity[256];
  char ready[16];
  const int identity_bytes = zmq.recv(socket, identity, sizeof(identity), 0);
  zmq.recv(socket, ready, sizeof(ready), 0);
  std::vector<char> payload(payload_bytes, 'x');
  int64_t due = now_ns();
  for (int i = 0; i < count; ++i) {
    due += interval_ns;
    while (now_ns() < due) {
    }
    const int64_t sent = now_ns();
    std::memcpy(payload.data(), &sent, sizeof(sent));
    zmq.send(socket, identity, identity_bytes, kSendMore);
    zmq.send(socket, "ull1", 4, kSendMore);
    zmq.send(socket, payload.data(), payload.size(), 0);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 9) {
    std::fprintf(stderr, "usage: %s LIBZMQ ENDPOINT PAYLOAD_BYTES COUNT INTERVAL_US SENDER OTHER RECEIVER\n", argv[0]);
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
  const size_t payload_bytes = std::max<size_t>(std::strtoul(argv[3], nullptr, 10), sizeof(int64_t));
  const int count = std::atoi(argv[4]);
  const int64_t interval_ns = std::atoll(argv[5]) * 1000;
  const pid_t receiver = fork();
  if (receiver == 0) {
    stay_on(argv[8]);
    receive(argv[2], payload_bytes, count);
  }
  stay_on(argv[7]);
  void* socket = zmq.socket(zmq.ctx_new(), kRouter);
  if (zmq.bind(socket, argv[2]) != 0) return 3;
  stay_on(argv[6]);
  send_all(socket, payload_bytes, count, interval_ns);
  // It goes on computing until the last message has arrived.
  int status = 0;
  while (waitpid(receiver, &status, WNOHANG) == 0) {
  }
  std::_Exit(WIFEXITED(status) ? WEXITSTATUS(status) : 4);
}
