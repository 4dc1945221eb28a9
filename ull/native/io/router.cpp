#include "io/router.h"

#include <cerrno>
#include <stdexcept>
#include <string_view>

namespace ull {
namespace {

constexpr std::string_view kVersion = "ull1";
constexpr int kReceiveHighWater = 64;  // messages that one client may have waiting for the io thread
constexpr int kHandshakeMs = 1000;
constexpr int kHeartbeatMs = 1000;
constexpr int kHeartbeatTimeoutMs = 3000;

}  // namespace

Router::Router(const zmq::Api& api, void* context, const Options& options)
    : api_(api), context_(context), options_(options) {}

void Router::open(const std::vector<std::string>& listen, const std::string& control) {
  try {
    clients_ = api_.socket(context_, zmq::kRouter);
    if (clients_ == nullptr) fail("ROUTER socket");
    set(clients_, zmq::kRouterMandatory, 1, "ROUTER_MANDATORY");
    set(clients_, zmq::kRouterHandover, 0, "ROUTER_HANDOVER");
    set(clients_, zmq::kSendHighWater, options_.send_high_water, "SNDHWM");
    set(clients_, zmq::kReceiveHighWater, kReceiveHighWater, "RCVHWM");
    set(clients_, zmq::kHandshakeInterval, kHandshakeMs, "HANDSHAKE_IVL");
    set(clients_, zmq::kHeartbeatInterval, kHeartbeatMs, "HEARTBEAT_IVL");
    set(clients_, zmq::kHeartbeatTimeout, kHeartbeatTimeoutMs, "HEARTBEAT_TIMEOUT");
    set(clients_, zmq::kHeartbeatTtl, kHeartbeatTimeoutMs, "HEARTBEAT_TTL");
    set(clients_, zmq::kLinger, 0, "LINGER");
    if (api_.setsockopt(clients_, zmq::kMaxMessageSize, &options_.max_message, sizeof(options_.max_message)) != 0) {
      fail("MAXMSGSIZE");
    }
    control_ = api_.socket(context_, zmq::kPair);
    if (control_ == nullptr) fail("PAIR socket");
    set(control_, zmq::kLinger, 0, "LINGER");
    bind(control_, control);
    for (const std::string& endpoint : listen) {
      bind(clients_, endpoint);
      char resolved[1024];
      size_t size = sizeof(resolved);
      if (api_.getsockopt(clients_, zmq::kLastEndpoint, resolved, &size) != 0) fail(endpoint);
      endpoints_.emplace_back(resolved);
    }
  } catch (...) {
    close();
    throw;
  }
}

void Router::close() noexcept {
  for (void** socket : {&clients_, &control_}) {
    if (*socket == nullptr) continue;
    // What was sent last, terminal frames above all, still gets this long to leave; a killed process never gets here.
    (void)api_.setsockopt(*socket, zmq::kLinger, &options_.linger_ms, sizeof(options_.linger_ms));
    api_.close(*socket);
    *socket = nullptr;
  }
}

Sent Router::send(std::span<const uint8_t> identity, std::span<const uint8_t> payload) noexcept {
  constexpr int kFlags = zmq::kDontWait | zmq::kSendMore;
  if (api_.send(clients_, identity.data(), identity.size(), kFlags) < 0) {
    return api_.error() == EAGAIN ? Sent::kBlocked : Sent::kGone;
  }
  // libzmq decides with the first frame whether the peer has room; the others of the message always go with it.
  if (api_.send(clients_, kVersion.data(), kVersion.size(), kFlags) < 0 ||
      api_.send(clients_, payload.data(), payload.size(), zmq::kDontWait) < 0) {
    return Sent::kGone;
  }
  return Sent::kOk;
}

void Router::set(void* socket, int option, int value, const char* name) {
  if (api_.setsockopt(socket, option, &value, sizeof(value)) != 0) fail(name);
}

void Router::bind(void* socket, const std::string& endpoint) {
  if (api_.bind(socket, endpoint.c_str()) != 0) fail(endpoint);
}

void Router::fail(const std::string& what) const {
  throw std::runtime_error(what + ": " + api_.error_text(api_.error()));
}

}  // namespace ull
