// A client's messages over a ZeroMQ socket of pyzmq's, and the end of that socket's monitoring.
#include <unistd.h>

#include <cerrno>

#include "io/zmq_api.h"
#include "module/bindings.h"

namespace ull::module {
namespace {

// One frame on its way in or out; gives back what it holds.
class Frame {
 public:
  explicit Frame(const zmq::Api& api) : api_(api) { api_.msg_init(&message); }
  ~Frame() { api_.msg_close(&message); }
  Frame(const Frame&) = delete;
  Frame& operator=(const Frame&) = delete;

  zmq::Message message;

 private:
  const zmq::Api& api_;
};

// Python runs signal handlers between two bytecodes and where pyzmq asks it to, never within these calls: whatever a
// handler raises, a message is in the socket or in the caller's list, and it is sent whole or not at all.
class MessageSocket {
 public:
  MessageSocket(uintptr_t socket, const std::string& libzmq)
      : api_(zmq::load(libzmq)), socket_(reinterpret_cast<void*>(socket)) {}

  // Appends the next message to `messages`, as the list of its frames. Returns 0, or zmq_errno().
  int receive(nb::list messages, bool wait) {
    nb::list frames;
    Frame frame(api_);
    if (const int error = receive_frame(frame, wait); error != 0) return error;
    bool whole = false;
    try {
      while (true) {
        const auto bytes = zmq::bytes(api_, frame.message);
        frames.append(nb::bytes(bytes.data(), bytes.size()));
        whole = api_.msg_more(&frame.message) == 0;
        if (whole) break;
        if (const int error = receive_frame(frame, false); error != 0) return error;
      }
      messages.append(frames);
    } catch (...) {  // no memory: the message is lost as a whole, and the next one begins with its first frame
      while (!whole && receive_frame(frame, false) == 0) whole = api_.msg_more(&frame.message) == 0;
      throw;
    }
    return 0;
  }

  // Sends a message of these frames without waiting. Returns 0, or zmq_errno().
  int send(const std::vector<nb::bytes>& frames) {
    for (size_t at = 0; at < frames.size(); ++at) {
      const int flags = zmq::kDontWait | (at + 1 < frames.size() ? zmq::kSendMore : 0);
      const auto frame = [&] { return api_.send(socket_, frames[at].c_str(), frames[at].size(), flags); };
      if (const int error = whatever_signals(frame); error != 0) return error;
    }
    return 0;
  }

 private:
  // A call that does not wait, until no signal has cut it short: even these end with EINTR while one is pending. A
  // message that began would be left without its other frames.
  template <typename Call>
  int whatever_signals(const Call& call) {
    while (call() < 0) {
      if (const int error = api_.error(); error != EINTR) return error;
    }
    return 0;
  }

  int receive_frame(Frame& frame, bool wait) {
    if (!wait) return whatever_signals([&] { return api_.msg_recv(&frame.message, socket_, zmq::kDontWait); });
    const nb::gil_scoped_release unlocked;
    return api_.msg_recv(&frame.message, socket_, 0) < 0 ? api_.error() : 0;
  }

  zmq::Api api_;
  void* socket_;
};

// Ends the monitoring of a socket of pyzmq's, at the latest when it goes itself. libzmq's thread, which all sockets of
// a context share, would wait forever to tell a reader that has gone what becomes of the connection.
class MonitoredSocket {
 public:
  MonitoredSocket(nb::object socket, const std::string& libzmq)
      : api_(zmq::load(libzmq)),
        socket_(std::move(socket)),
        handle_(reinterpret_cast<void*>(nb::cast<uintptr_t>(socket_.attr("underlying")))),
        process_(getpid()) {}
  MonitoredSocket(const MonitoredSocket&) = delete;
  MonitoredSocket& operator=(const MonitoredSocket&) = delete;
  ~MonitoredSocket() {
    const nb::error_scope raised;  // it may be what ended whoever held this
    try {
      end();
    } catch (...) {  // while Python ends there may be no attributes any more
    }
  }

  // In a fork's child it does nothing: the socket is the parent's.
  void end() {
    void* const handle = std::exchange(handle_, nullptr);
    if (handle == nullptr || process_ != getpid() || nb::cast<bool>(socket_.attr("closed"))) return;
    (void)api_.socket_monitor(handle, nullptr, 0);
  }

 private:
  zmq::Api api_;
  nb::object socket_;
  void* handle_;  // null: it has ended
  pid_t process_;
};

}  // namespace

void bind_messages(nb::module_& m) {
  nb::class_<MessageSocket>(m, "MessageSocket",
                            "Whole messages over a ZeroMQ socket, in calls that nothing interrupts.")
      .def(nb::init<uintptr_t, const std::string&>(), "socket"_a, nb::kw_only(), "libzmq"_a)
      .def("receive", &MessageSocket::receive, "messages"_a, "wait"_a,
           "Appends the next message's frames to `messages`; waits for it, at most RCVTIMEO, if `wait`. Returns 0, or "
           "the errno (EAGAIN: none has come; EINTR: a signal came first).")
      .def("send", &MessageSocket::send, "frames"_a, "Sends one message without waiting. Returns 0, or the errno.");
  nb::class_<MonitoredSocket>(m, "MonitoredSocket",
                              "Ends the monitoring of a pyzmq socket, at the latest when it is collected itself.")
      .def(nb::init<nb::object, const std::string&>(), "socket"_a, nb::kw_only(), "libzmq"_a)
      .def("end", &MonitoredSocket::end);
}

}  // namespace ull::module
