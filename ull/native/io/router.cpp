#include "io/router.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/clock.h"
#include "io/request_id.h"

namespace ull {
namespace {

constexpr int kFrameBatch = 256;  // frames of one message taken before others get their turn
constexpr std::string_view kIpc = "ipc://";
constexpr int kHandshakeMs = 1000;
// A machine that has vanished is noticed within five seconds, and by the kernel: libzmq's own heartbeat would
// disconnect a client whose PONG waits behind its requests, and aborts the process when a client with a backlog hangs
// up.
constexpr int kKeepaliveIdleS = 2;
constexpr int kKeepaliveIntervalS = 1;
constexpr int kKeepaliveCount = 3;
constexpr int kMaxRetransmitMs = 5000;

// Two messages of the longest kind always find room.
size_t backlog_bytes(const Router::Options& options) noexcept {
  constexpr auto kCost = static_cast<int64_t>(Backlog::kMessageCost);
  return static_cast<size_t>(std::max(options.backlog_bytes, 2 * (options.max_message + 2 * kCost)));
}

}  // namespace

Router::Router(const zmq::Api& api, void* context, const Options& options)
    : api_(api), context_(context), options_(options), backlog_(api, backlog_bytes(options)) {
  api_.msg_init(&frame_);
  api_.msg_init(&message_.payload);
}

Router::~Router() {
  close();
  api_.msg_close(&frame_);
  api_.msg_close(&message_.payload);
}

void Router::open(const std::vector<std::string>& listen) {
  try {
    socket_ = api_.socket(context_, zmq::kRouter);
    if (socket_ == nullptr) zmq::fail(api_, "ROUTER socket");
    zmq::set(api_, socket_, zmq::kRouterMandatory, 1, "ROUTER_MANDATORY");
    zmq::set(api_, socket_, zmq::kRouterHandover, 1, "ROUTER_HANDOVER");  // the newest of two has the identity
    zmq::set(api_, socket_, zmq::kSendHighWater, options_.send_high_water, "SNDHWM");
    zmq::set(api_, socket_, zmq::kReceiveHighWater, 0, "RCVHWM");
    zmq::set(api_, socket_, zmq::kHandshakeInterval, kHandshakeMs, "HANDSHAKE_IVL");
    zmq::set(api_, socket_, zmq::kTcpKeepalive, 1, "TCP_KEEPALIVE");
    zmq::set(api_, socket_, zmq::kTcpKeepaliveIdle, kKeepaliveIdleS, "TCP_KEEPALIVE_IDLE");
    zmq::set(api_, socket_, zmq::kTcpKeepaliveInterval, kKeepaliveIntervalS, "TCP_KEEPALIVE_INTVL");
    zmq::set(api_, socket_, zmq::kTcpKeepaliveCount, kKeepaliveCount, "TCP_KEEPALIVE_CNT");
    zmq::set(api_, socket_, zmq::kTcpMaxRetransmit, kMaxRetransmitMs, "TCP_MAXRT");
    zmq::set(api_, socket_, zmq::kLinger, 0, "LINGER");
    zmq::set(api_, socket_, zmq::kMaxMessageSize, std::max(options_.max_message, kLongestRefused), "MAXMSGSIZE");
    for (const std::string& endpoint : listen) bind(endpoint);
  } catch (...) {
    close();
    throw;
  }
}

void Router::close() noexcept {
  if (socket_ == nullptr) return;
  // What was sent last, terminal frames above all, still gets this long to leave; a killed process never gets here.
  (void)api_.setsockopt(socket_, zmq::kLinger, &options_.linger_ms, sizeof(options_.linger_ms));
  api_.close(socket_);
  socket_ = nullptr;
}

void Router::keep_named_clients(bool keep) noexcept {
  if (keep == keeps_named_clients_) return;
  keeps_named_clients_ = keep;
  const int handover = keep ? 0 : 1;
  (void)api_.setsockopt(socket_, zmq::kRouterHandover, &handover, sizeof(handover));
}

Sent Router::send(std::span<const uint8_t> identity, std::span<const uint8_t> payload) noexcept {
  constexpr int kFlags = zmq::kDontWait | zmq::kSendMore;
  if (api_.send(socket_, identity.data(), identity.size(), kFlags) < 0) {
    if (api_.error() == EAGAIN) return Sent::kBlocked;
    backlog_.forget(identity);
    return Sent::kGone;
  }
  // libzmq decides with the first frame whether the peer has room; the others of the message always go with it.
  if (api_.send(socket_, kWireVersion.data(), kWireVersion.size(), kFlags) < 0 ||
      api_.send(socket_, payload.data(), payload.size(), zmq::kDontWait) < 0) {
    return Sent::kGone;
  }
  return Sent::kOk;
}

Received Router::receive(Incoming& message) noexcept {
  if (!backlog_.empty()) {
    (void)drain();
    return backlog_.pop(message) ? Received::kMessage : Received::kNothing;
  }
  int frames_left = kFrameBatch;
  const Received received = take(frames_left);
  if (received != Received::kMessage) return received;
  message.identity = message_.identity;
  message.identity_size = message_.identity_size;
  message.malformed = message_.malformed;
  message.received_ns = message_.received_ns;
  message.id = message_.id;
  message.has_id = message_.has_id;
  api_.msg_move(&message.payload, &message_.payload);
  return received;
}

// Moves what has come to the backlog, a bounded part of it.
Received Router::drain() noexcept {
  int frames_left = kFrameBatch;
  for (;;) {
    const Received received = take(frames_left);
    if (received != Received::kMessage) return received;
    backlog_.push(message_);
  }
}

// Takes frames of the next message until it is whole, there is none, or the batch is used up.
Received Router::take(int& frames_left) noexcept {
  while (frames_left-- > 0) {
    zmq::Message& frame = frames_ == 2 ? message_.payload : frame_;
    if (api_.msg_recv(&frame, socket_, zmq::kDontWait) < 0) return Received::kNothing;
    const std::span<const uint8_t> bytes = zmq::bytes(api_, frame);
    if (frames_ == 0) {
      message_.identity_size = std::min(bytes.size(), message_.identity.size());
      std::copy_n(bytes.begin(), message_.identity_size, message_.identity.begin());
      version_ok_ = false;
    } else if (frames_ == 1) {
      version_ok_ = std::equal(bytes.begin(), bytes.end(), kWireVersion.begin(), kWireVersion.end());
    }
    ++frames_;
    if (api_.msg_more(&frame) != 0) continue;
    message_.malformed = frames_ != 3 ? "bad_frame" : !version_ok_ ? "bad_version" : nullptr;
    message_.has_id = false;
    if (message_.malformed == nullptr) refuse_long();
    if (message_.malformed != nullptr) zmq::clear(api_, message_.payload);
    message_.received_ns = monotonic_ns();
    frames_ = 0;
    return Received::kMessage;
  }
  return Received::kUnfinished;
}

void Router::refuse_long() noexcept {
  const std::span<const uint8_t> payload = zmq::bytes(api_, message_.payload);
  if (payload.size() <= static_cast<size_t>(options_.max_message)) return;
  message_.malformed = kTooLong;
  message_.has_id = find_request_id(payload, message_.id);
}

void Router::bind(const std::string& endpoint) {
  if (api_.bind(socket_, endpoint.c_str()) != 0) zmq::fail(api_, endpoint);
  char resolved[1024];
  size_t size = sizeof(resolved);
  if (api_.getsockopt(socket_, zmq::kLastEndpoint, resolved, &size) != 0) zmq::fail(api_, endpoint);
  endpoints_.emplace_back(resolved);
  if (endpoints_.back().starts_with(kIpc)) {
    files_.push_back({endpoints_.size() - 1, SocketFile(endpoints_.back().substr(kIpc.size()))});
  }
}

void Router::look_at_files() noexcept {
  for (File& file : files_) {
    file.state = file.file.look();
    if (file.state != SocketFile::State::kGone || !bind_again(file)) continue;
    file.state = SocketFile::State::kOurs;
    file.bound_again = true;
    ++bound_again_;
  }
}

void Router::tell_of_files(ControlPair& control) noexcept {
  for (File& file : files_) {
    if (file.state == file.told && !file.bound_again) continue;
    const std::string_view what = file.bound_again ? "bound_again" : socket_file_state_name(file.state);
    if (!control.send_endpoint(endpoints_[file.endpoint], what)) return;
    file.told = file.bound_again ? SocketFile::State::kOurs : file.state;
    file.bound_again = false;
  }
}

// The connections of the socket that is lost go on: libzmq ends them with its listener, so it keeps that, and with it a
// descriptor.
bool Router::bind_again(File& file) noexcept {
  const int listener = file.file.bind_again();
  if (listener < 0) return false;
  constexpr int kNone = -1;
  (void)api_.setsockopt(socket_, zmq::kUseFd, &listener, sizeof(listener));
  const bool bound = api_.bind(socket_, endpoints_[file.endpoint].c_str()) == 0;
  (void)api_.setsockopt(socket_, zmq::kUseFd, &kNone, sizeof(kNone));
  if (!bound) {
    ::close(listener);
    return false;
  }
  return true;
}

uint64_t Router::unreachable() const noexcept {
  return static_cast<uint64_t>(std::count_if(files_.begin(), files_.end(),
                                             [](const File& file) { return file.state != SocketFile::State::kOurs; }));
}

}  // namespace ull
