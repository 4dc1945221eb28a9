// The watchdog against a service manager made of a datagram socket: it is fed while engine thread, io thread and
// control plane all give their signs of life, and not once any of them hangs.
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <atomic>
#include <cstdlib>

#include "engine_fixture.h"
#include "fake_zmq.h"
#include "io/io.h"
#include "yields.h"

namespace {
std::atomic<bool> engine_slow{false};  // takes 700 ms between its sign of life and its sleep
}

void on_yield(std::string_view thread) noexcept {
  if (engine_slow && thread == "ull-engine") std::this_thread::sleep_for(std::chrono::milliseconds(700));
}

namespace {

using ull::test::FakeZmq;
using ull::test::ids;

// $NOTIFY_SOCKET, with a watchdog of a second.
class ServiceManager {
 public:
  ServiceManager()
      : path_(std::filesystem::temp_directory_path() / ("ull-test-notify-" + std::to_string(getpid()))),
        socket_(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0)) {
    std::filesystem::remove(path_);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path_.string().copy(address.sun_path, sizeof(address.sun_path) - 1);
    CHECK_EQ(bind(socket_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    setenv("NOTIFY_SOCKET", path_.c_str(), 1);
    setenv("WATCHDOG_USEC", "1000000", 1);
    unsetenv("WATCHDOG_PID");
  }
  ~ServiceManager() {
    unsetenv("NOTIFY_SOCKET");
    unsetenv("WATCHDOG_USEC");
    close(socket_);
    std::filesystem::remove(path_);
  }
  ServiceManager(const ServiceManager&) = delete;
  ServiceManager& operator=(const ServiceManager&) = delete;

  // Waits until the daemon has said `count` times that it lives. A busy machine may make a thread late meanwhile.
  void hear_of_life(int count) const {
    while (count > 0) {
      const std::string said = hear(20'000);
      REQUIRE(!said.empty());
      count -= said == "WATCHDOG=1" ? 1 : 0;
    }
  }

  // Waits until `thread` is said to be late and no sign of life comes after that, of which two are due in a second. A
  // busy machine may have made it late before.
  void hear_late(const std::string& thread) const {
    bool late = false;
    for (std::string said = hear(20'000); !said.empty(); said = hear(late ? 800 : 20'000)) {
      late = said.starts_with("STATUS=the " + thread + " has given no sign of life") || (late && said != "WATCHDOG=1");
    }
    CHECK(late);
  }

 private:
  // The next message; empty if none comes within `limit_ms`.
  [[nodiscard]] std::string hear(int limit_ms) const {
    pollfd item{socket_, POLLIN, 0};
    if (poll(&item, 1, limit_ms) != 1) return {};
    char text[512];
    const ssize_t size = recv(socket_, text, sizeof(text), 0);
    return {text, static_cast<size_t>(size > 0 ? size : 0)};
  }

  std::filesystem::path path_;
  int socket_;
};

// A libzmq in which the io thread hangs while `io_stuck` is set.
std::atomic<bool> io_stuck{false};

ull::zmq::Api stoppable_api() {
  ull::zmq::Api api = FakeZmq::api();
  static decltype(api.poll) poll_fake = nullptr;
  poll_fake = api.poll;
  api.poll = [](ull::zmq::PollItem* items, int count, long timeout_ms) {
    while (io_stuck) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return poll_fake(items, count, timeout_ms);
  };
  return api;
}

// Engine and io thread, and a thread in the place of the control plane's event loop.
class LiveDaemon {
 public:
  explicit LiveDaemon(ull::ScriptedExecutor::Options script = {}) : harness(std::move(script), {}, false) {
    io = std::make_unique<ull::Io>(harness.engine, stoppable_api(), &net, ull::IoOptions{}, net.clients());
    harness.engine.start();
    io->start();
    control_ = std::thread([this] { control(); });
  }
  ~LiveDaemon() {
    stopping_ = true;
    control_.join();
    harness.engine.stop();
    io->stop();
  }
  LiveDaemon(const LiveDaemon&) = delete;
  LiveDaemon& operator=(const LiveDaemon&) = delete;

  ServiceManager manager;
  FakeZmq net;
  ull::test::Harness harness;
  std::unique_ptr<ull::Io> io;
  std::atomic<bool> control_stuck{false};

 private:
  void control() {
    ull::Engine& engine = harness.engine;
    engine.beat();
    while (!stopping_) {
      pollfd item{engine.control_call(), POLLIN, 0};
      if (poll(&item, 1, 10) == 1 && !control_stuck) engine.beat();
    }
    engine.end_beat();
  }

  std::atomic<bool> stopping_{false};
  std::thread control_;
};

}  // namespace

TEST(an_idle_daemon_is_alive_because_its_sleeping_threads_are_asked) {
  const LiveDaemon daemon;
  daemon.manager.hear_of_life(4);
}

// The watchdog asks twice a second: here always while the engine is awake, and has given its last sign of life before
// it sleeps. Asked before it announces that it will sleep, it is not woken.
TEST(a_question_to_a_thread_that_is_about_to_sleep_is_answered) {
  engine_slow = true;
  {
    const LiveDaemon daemon;
    daemon.manager.hear_of_life(4);
  }
  engine_slow = false;
}

TEST(a_control_plane_that_hangs_stops_the_signs_of_life) {
  LiveDaemon daemon;
  daemon.manager.hear_of_life(1);
  daemon.control_stuck = true;
  daemon.manager.hear_late("control plane");
  CHECK(daemon.harness.engine.stats().late_threads > 0);
  daemon.control_stuck = false;
  daemon.manager.hear_of_life(2);
}

TEST(an_io_thread_that_hangs_stops_the_signs_of_life) {
  LiveDaemon daemon;
  daemon.manager.hear_of_life(1);
  io_stuck = true;
  daemon.manager.hear_late("io thread");
  io_stuck = false;
  daemon.manager.hear_of_life(2);
}

TEST(an_engine_that_hangs_stops_the_signs_of_life) {
  ull::ScriptedExecutor::Options script;
  script.hang_step = 0;
  LiveDaemon daemon(script);
  daemon.manager.hear_of_life(1);
  daemon.harness.submit(ull::test::Harness::request(1, ids("ab"), 4));
  daemon.manager.hear_late("engine thread");
  CHECK(daemon.harness.cancel(1));
  daemon.manager.hear_of_life(2);
}

TEST(a_control_plane_that_has_ended_is_not_waited_for) {
  const ServiceManager manager;
  ull::test::Harness harness({});  // neither io thread nor control plane
  manager.hear_of_life(1);
  harness.engine.beat();
  harness.engine.end_beat();
  manager.hear_of_life(3);
}
