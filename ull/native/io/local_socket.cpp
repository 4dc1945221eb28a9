#include "io/local_socket.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <stdexcept>
#include <system_error>

#include "base/clock.h"
#include "io/request_id.h"

namespace ull {
namespace {

constexpr std::array<uint8_t, 8> kHello{'u', 'l', 'l', '1', 0, 0, 0, 0};
constexpr int kBacklog = 256;
constexpr int kEventBatch = 64;
constexpr int kAcceptBatch = 16;           // per event, so that a crowd at the door holds up no token
constexpr size_t kTurnBytes = 256 * 1024;  // read from one client before the others, and the events, have their turn
constexpr int64_t kBudgetMessages = 8;     // of the longest kind; more that are unfinished at once cost the oldest
constexpr int64_t kPauseNs = 100'000'000;  // after the descriptors have run out
constexpr int kMostConnections = 1024;
constexpr uint32_t kIndexBits = 16;
constexpr uint64_t kAlarmTag = UINT64_MAX;  // connections' tags are their ids, listeners' the descriptor after this bit
constexpr uint64_t kListenerTag = uint64_t{1} << 63;
constexpr uint32_t kEvents = EPOLLIN | EPOLLRDHUP | EPOLLET;  // EPOLLOUT only while a rest waits: each read of a client
                                                              // would be an event otherwise
static_assert(kMostConnections <= 1 << kIndexBits);

int connections_for(const LocalSocket::Options& options) {
  if (options.max_connections > 0) return std::min(options.max_connections, 1 << kIndexBits);
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return kMostConnections;
  return static_cast<int>(std::clamp<rlim_t>(limit.rlim_cur / 2, 1, kMostConnections));
}

LocalSocket::Identity identity_of(uint64_t id) noexcept {
  LocalSocket::Identity identity{0, 'L'};
  for (int i = 0; i < 8; ++i) identity[static_cast<size_t>(9 - i)] = static_cast<uint8_t>(id >> (8 * i));
  return identity;
}

uint64_t id_of(std::span<const uint8_t> identity) noexcept {
  uint64_t id = 0;
  for (const uint8_t byte : identity.subspan(2)) id = id << 8 | byte;
  return id;
}

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error(what + ": " + std::generic_category().message(errno));
}

}  // namespace

// ---- opening and closing ------------------------------------------------------------------------------------------

LocalSocket::LocalSocket(const zmq::Api& api, const Options& options)
    : api_(api), options_(options), epoll_(epoll_create1(EPOLL_CLOEXEC)) {
  if (epoll_ < 0) throw std::system_error(errno, std::generic_category(), "epoll_create1");
  const auto count = static_cast<uint32_t>(connections_for(options));
  connections_.resize(count);
  queue_.resize(count);
  thrown_away_.resize(kTurnBytes);
  free_.reserve(count);
  gone_.reserve(count);
  for (uint32_t index = count; index-- > 0;) free_.push_back(index);
  watch(alarm_.fd(), kAlarmTag, EPOLLIN | EPOLLET, EPOLL_CTL_ADD);
}

void LocalSocket::listen(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) {
    errno = ENAMETOOLONG;
    fail(path);
  }
  path.copy(address.sun_path, path.size());
  const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (listener < 0) fail(path);
  if (bind(listener, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0 ||
      ::listen(listener, kBacklog) != 0) {
    const int error = errno;
    ::close(listener);
    errno = error;
    fail(path);
  }
  listeners_.push_back({listener, SocketFile(path)});
  watch_listener(listener);
}

void LocalSocket::watch_listener(int listener) noexcept {
  watch(listener, kListenerTag | static_cast<uint64_t>(listener), EPOLLIN, EPOLL_CTL_ADD);
}

void LocalSocket::look_at_files() noexcept {
  for (Listener& listener : listeners_) {
    if (listener.file.look() != SocketFile::State::kGone) continue;
    const int fd = listener.file.bind_again();
    if (fd < 0) continue;
    ::close(listener.fd);
    listener.fd = fd;
    if (paused_until_ns_ == 0) watch_listener(fd);
  }
}

void LocalSocket::close() noexcept {
  if (epoll_ < 0) return;
  for (const Listener& listener : listeners_) ::close(listener.fd);
  listeners_.clear();
  const int64_t until_ns = monotonic_ns() + int64_t{options_.linger_ms} * 1'000'000;
  for (Connection& connection : connections_) {
    if (connection.fd < 0) continue;
    while (flush(connection) && !connection.rest.empty()) {
      const int64_t left_ms = (until_ns - monotonic_ns()) / 1'000'000;
      pollfd item{connection.fd, POLLOUT, 0};
      if (left_ms <= 0 || ::poll(&item, 1, static_cast<int>(left_ms)) <= 0) break;
    }
    ::close(connection.fd);
    connection.fd = -1;
    connection.state = State::kFree;
  }
  ::close(epoll_);
  epoll_ = -1;
}

// ---- events -------------------------------------------------------------------------------------------------------

void LocalSocket::watch(int fd, uint64_t tag, uint32_t events, int operation) noexcept {
  epoll_event event{};
  event.events = events;
  event.data.u64 = tag;
  (void)epoll_ctl(epoll_, operation, fd, &event);
}

void LocalSocket::tend() noexcept {
  epoll_event events[kEventBatch];
  const int count = epoll_wait(epoll_, events, kEventBatch, 0);
  for (int i = 0; i < count; ++i) {
    const uint64_t tag = events[i].data.u64;
    if (tag == kAlarmTag) {
      on_alarm();
    } else if ((tag & kListenerTag) != 0) {
      accept_clients(static_cast<int>(tag & ~kListenerTag));
    } else if (Connection* const connection = find(tag); connection != nullptr) {
      if ((events[i].events & (EPOLLHUP | EPOLLRDHUP | EPOLLERR)) != 0) {
        hang_up(*connection);
        continue;
      }
      if ((events[i].events & EPOLLOUT) != 0 && !flush(*connection)) continue;
      if ((events[i].events & EPOLLIN) != 0) enqueue(*connection);
    }
  }
}

void LocalSocket::accept_clients(int listener) noexcept {
  for (int i = 0; i < kAcceptBatch; ++i) {
    const int fd = accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd >= 0) {
      greet(fd);
    } else if (errno != EINTR && errno != ECONNABORTED) {
      // Out of descriptors or memory: whoever waits at the door would be an event for ever.
      if (errno != EAGAIN && errno != EWOULDBLOCK) pause_listening();
      break;
    }
  }
  set_alarm();
}

void LocalSocket::greet(int fd) noexcept {
  if (free_.empty()) {
    ++counts_.refused;
    ::close(fd);
    return;
  }
  const uint32_t index = free_.back();
  Connection& connection = connections_[index];
  if (::send(fd, kHello.data(), kHello.size(), MSG_DONTWAIT | MSG_NOSIGNAL) != static_cast<ssize_t>(kHello.size())) {
    ::close(fd);
    return;
  }
  free_.pop_back();
  ++counts_.accepted;
  ++counts_.clients;
  connection.fd = fd;
  connection.id = ++serial_ << kIndexBits | index;
  connection.state = State::kHello;
  connection.drained = false;
  connection.hello_by_ns = monotonic_ns() + int64_t{options_.hello_ms} * 1'000'000;
  watch(fd, connection.id, kEvents, EPOLL_CTL_ADD);
}

void LocalSocket::pause_listening() noexcept {
  for (const Listener& listener : listeners_) watch(listener.fd, 0, 0, EPOLL_CTL_DEL);
  paused_until_ns_ = monotonic_ns() + kPauseNs;
}

void LocalSocket::on_alarm() noexcept {
  const int64_t now = monotonic_ns();
  if (paused_until_ns_ != 0 && now >= paused_until_ns_) {
    paused_until_ns_ = 0;
    for (const Listener& listener : listeners_) watch_listener(listener.fd);
  }
  for (Connection& connection : connections_) {
    if (connection.state == State::kHello && now >= connection.hello_by_ns) drop(connection);
  }
  set_alarm();
}

// For the earliest of what must not wait for an event.
void LocalSocket::set_alarm() noexcept {
  int64_t when = paused_until_ns_;
  for (const Connection& connection : connections_) {
    if (connection.state == State::kHello && (when == 0 || connection.hello_by_ns < when)) {
      when = connection.hello_by_ns;
    }
  }
  if (when != 0) alarm_.set(when);
}

// ---- receiving ----------------------------------------------------------------------------------------------------

LocalSocket::Connection* LocalSocket::find(uint64_t id) noexcept {
  const uint64_t index = id & ((uint64_t{1} << kIndexBits) - 1);
  if (index >= connections_.size() || connections_[index].id != id || connections_[index].fd < 0) return nullptr;
  return &connections_[index];
}

uint32_t LocalSocket::index_of(const Connection& connection) const noexcept {
  return static_cast<uint32_t>(&connection - connections_.data());
}

void LocalSocket::enqueue(Connection& connection) noexcept {
  connection.drained = false;
  if (connection.queued || index_of(connection) == current_) return;
  connection.queued = true;
  queue_[(queue_head_ + queue_size_++) % queue_.size()] = index_of(connection);
}

const LocalSocket::Message* LocalSocket::front() noexcept {
  while (current_ == kNone && queue_size_ > 0) {
    Connection& connection = connections_[queue_[queue_head_]];
    queue_head_ = (queue_head_ + 1) % queue_.size();
    --queue_size_;
    connection.queued = false;
    if (connection.fd < 0) continue;
    switch (read(connection)) {
      case Read::kMessage:
        current_ = index_of(connection);
        message_ = {.client = identity_of(connection.id), .payload = connection.input.payload()};
        break;
      case Read::kThrownAway:
        current_ = index_of(connection);
        message_ = {.client = identity_of(connection.id),
                    .payload = {},
                    .too_long = true,
                    .has_id = connection.refusal.has_id,
                    .id = connection.refusal.id};
        break;
      case Read::kNothing:
        break;
      case Read::kTurnOver:
        enqueue(connection);
        return nullptr;
      case Read::kHungUp:
        hang_up(connection);
        break;
      case Read::kUnfit:
        drop(connection);
        break;
    }
  }
  return current_ == kNone ? nullptr : &message_;
}

void LocalSocket::pop() noexcept {
  Connection& connection = connections_[current_];
  current_ = kNone;
  if (connection.fd < 0) return;  // it has hung up meanwhile
  if (connection.refusal.active) {
    connection.refusal = {};
  } else {
    const size_t large = std::max(connection.input.capacity(), LocalInput::kChunk) - LocalInput::kChunk;
    connection.input.drop(LocalInput::kHeader + message_.payload.size());
    large_ -= large;
    if (large > 0) connection.grown = 0;
  }
  if (connection.input.filled() > 0 || !connection.drained) enqueue(connection);
}

Received LocalSocket::receive(Incoming& message) noexcept {
  tend();
  const Message* const next = front();
  if (next == nullptr) return Received::kNothing;
  api_.msg_close(&message.payload);
  const bool room = api_.msg_init_size(&message.payload, next->payload.size()) == 0;
  if (room) {
    std::copy(next->payload.begin(), next->payload.end(), static_cast<uint8_t*>(api_.msg_data(&message.payload)));
    message.identity_size = next->client.size();
    std::copy(next->client.begin(), next->client.end(), message.identity.begin());
    message.malformed = next->too_long ? kTooLong : nullptr;
    message.has_id = next->has_id;
    message.id = next->id;
    message.received_ns = monotonic_ns();
  } else {
    api_.msg_init(&message.payload);
    drop(connections_[current_]);
  }
  pop();
  return room ? Received::kMessage : Received::kNothing;
}

// Reads until there is a whole message, nothing more, or the turn is over.
LocalSocket::Read LocalSocket::read(Connection& connection) noexcept {
  for (size_t taken = 0;;) {
    if (const Read found = examine(connection); found != Read::kNothing) return found;
    if (connection.drained) return Read::kNothing;
    if (taken >= kTurnBytes) return Read::kTurnOver;
    const std::span<uint8_t> room = room_for(connection);
    if (room.empty()) return Read::kUnfit;
    const ssize_t got = recv(connection.fd, room.data(), std::min(room.size(), kTurnBytes), MSG_DONTWAIT);
    if (got > 0) {
      if (connection.refusal.active) {
        connection.refusal.left -= static_cast<size_t>(got);
      } else {
        connection.input.add(static_cast<size_t>(got));
      }
      taken += static_cast<size_t>(got);
      connection.drained = static_cast<size_t>(got) < std::min(room.size(), kTurnBytes);
    } else if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      connection.drained = true;
      return Read::kNothing;
    } else if (got == 0 || errno != EINTR) {
      return Read::kHungUp;
    }
  }
}

// Looks at what has arrived: the hello first, then messages.
LocalSocket::Read LocalSocket::examine(Connection& connection) noexcept {
  if (connection.refusal.active) return connection.refusal.left == 0 ? Read::kThrownAway : Read::kNothing;
  LocalInput& input = connection.input;
  if (connection.state == State::kHello) {
    const size_t seen = std::min(input.filled(), kHello.size());
    if (!std::equal(kHello.begin(), kHello.begin() + seen, input.bytes().begin())) return Read::kUnfit;
    if (seen < kHello.size()) return Read::kNothing;
    input.drop(kHello.size());
    connection.state = State::kOpen;
  }
  const std::optional<uint32_t> length = input.length();
  if (length && *length > options_.max_message) {
    if (*length > kLongestRefused) return Read::kUnfit;
    begin_refusal(connection, *length);
    return connection.refusal.left == 0 ? Read::kThrownAway : Read::kNothing;
  }
  return input.complete() ? Read::kMessage : Read::kNothing;
}

// Looks for the request's id in what has arrived of a message that is too long, and throws that away.
void LocalSocket::begin_refusal(Connection& connection, size_t length) noexcept {
  LocalInput& input = connection.input;
  const size_t here = std::min(input.filled() - LocalInput::kHeader, length);
  Refusal& refusal = connection.refusal;
  refusal.active = true;
  refusal.has_id = find_request_id(input.bytes().subspan(LocalInput::kHeader, here), refusal.id);
  refusal.left = length - here;
  input.drop(LocalInput::kHeader + here);
}

// Where the next bytes go; empty if there is no memory for them.
std::span<uint8_t> LocalSocket::room_for(Connection& connection) noexcept {
  if (connection.refusal.active)
    return std::span(thrown_away_).first(std::min(thrown_away_.size(), connection.refusal.left));
  return make_room(connection) ? connection.input.room() : std::span<uint8_t>{};
}

// Accounts for the growth of one input. Where all that is unfinished exceeds its budget, the connection that has been
// at it for longest is dropped: an honest message is read whole in a few turns.
bool LocalSocket::make_room(Connection& connection) noexcept {
  const size_t growth = connection.input.growth();
  if (growth == 0) return true;
  const size_t budget = static_cast<size_t>(options_.max_message) * kBudgetMessages;
  while (large_ + growth > budget) {
    Connection* oldest = nullptr;
    for (Connection& other : connections_) {
      if (other.fd < 0 || other.grown == 0 || &other == &connection || index_of(other) == current_) continue;
      if (oldest == nullptr || other.grown < oldest->grown) oldest = &other;
    }
    if (oldest == nullptr) break;  // one message is always allowed
    drop(*oldest);
  }
  large_ += growth;
  if (connection.grown == 0) connection.grown = ++growths_;
  return true;
}

// ---- sending ------------------------------------------------------------------------------------------------------

Sent LocalSocket::send(std::span<const uint8_t> identity, std::span<const uint8_t> payload) noexcept {
  Connection* const connection = owns(identity) ? find(id_of(identity)) : nullptr;
  if (connection == nullptr || connection->state != State::kOpen) return Sent::kGone;
  if (!connection->rest.empty()) {
    if (!flush(*connection)) return Sent::kGone;
    if (!connection->rest.empty()) return Sent::kBlocked;
  }
  const auto length = static_cast<uint32_t>(payload.size());
  std::array<uint8_t, LocalInput::kHeader> header;
  for (size_t i = 0; i < header.size(); ++i) header[i] = static_cast<uint8_t>(length >> (8 * i));
  iovec parts[2] = {{header.data(), header.size()}, {const_cast<uint8_t*>(payload.data()), payload.size()}};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  ssize_t sent = -1;
  do {
    sent = sendmsg(connection->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  if (sent < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS || errno == ENOMEM) return Sent::kBlocked;
    hang_up(*connection);
    return Sent::kGone;
  }
  const size_t whole = header.size() + payload.size();
  if (static_cast<size_t>(sent) == whole) return Sent::kOk;
  // Only of frames beyond some ten kilobytes does the kernel take a part; the rest is kept until there is room.
  try {
    const size_t kept = whole - static_cast<size_t>(sent);
    if (kept > payload.size()) connection->rest.assign(header.end() - (kept - payload.size()), header.end());
    connection->rest.insert(connection->rest.end(), payload.end() - std::min(kept, payload.size()), payload.end());
  } catch (const std::bad_alloc&) {
    drop(*connection);
    return Sent::kGone;
  }
  connection->rest_sent = 0;
  watch(connection->fd, connection->id, kEvents | EPOLLOUT, EPOLL_CTL_MOD);
  return Sent::kOk;
}

// Sends what is left of a frame; false if the client has gone.
bool LocalSocket::flush(Connection& connection) noexcept {
  while (connection.rest_sent < connection.rest.size()) {
    const ssize_t sent = ::send(connection.fd, connection.rest.data() + connection.rest_sent,
                                connection.rest.size() - connection.rest_sent, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent >= 0) {
      connection.rest_sent += static_cast<size_t>(sent);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS || errno == ENOMEM) {
      return true;
    } else if (errno != EINTR) {
      hang_up(connection);
      return false;
    }
  }
  if (!connection.rest.empty()) {
    connection.rest = {};
    connection.rest_sent = 0;
    watch(connection.fd, connection.id, kEvents, EPOLL_CTL_MOD);
  }
  return true;
}

// ---- ends ---------------------------------------------------------------------------------------------------------

// The client has gone. One that may have requests keeps its place until pop_gone().
void LocalSocket::hang_up(Connection& connection) noexcept {
  ::close(connection.fd);
  connection.fd = -1;
  --counts_.clients;
  if (connection.state == State::kOpen) {
    connection.state = State::kGone;
    gone_.push_back(index_of(connection));
  } else {
    release(connection);
  }
}

void LocalSocket::drop(Connection& connection) noexcept {
  ++counts_.dropped;
  hang_up(connection);
}

void LocalSocket::release(Connection& connection) noexcept {
  large_ -= std::max(connection.input.capacity(), LocalInput::kChunk) - LocalInput::kChunk;
  const bool queued = connection.queued;
  connection = Connection{};
  connection.queued = queued;  // front() takes it out, and finds nobody or the place's next client
  free_.push_back(index_of(connection));
}

const LocalSocket::Identity* LocalSocket::gone() noexcept {
  if (gone_.empty() || gone_.front() == current_) return nullptr;  // its last message comes before the news
  gone_identity_ = identity_of(connections_[gone_.front()].id);
  return &gone_identity_;
}

void LocalSocket::pop_gone() noexcept {
  release(connections_[gone_.front()]);
  gone_.erase(gone_.begin());
}

}  // namespace ull
