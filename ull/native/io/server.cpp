#include "io/server.h"

#include <linux/sockios.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>

#include "base/clock.h"

namespace ull {
namespace {

constexpr int kEventBatch = 64;
constexpr int kAcceptBatch = 16;               // per event, so that a crowd at the door holds up no token
constexpr size_t kTurnBytes = 64 * 1024;       // read before tokens have their turn
constexpr size_t kCallBytes = 256;             // that a system call counts for in a turn,
constexpr size_t kAnswerBytes = 1024;          // ... and an answer to a ping
constexpr size_t kLeastRead = 512;             // where a turn is nearly over, it may be exceeded by this
constexpr int64_t kBudgetMessages = 8;         // of the longest kind; more that are unfinished at once cost the oldest
constexpr int64_t kPauseNs = 100'000'000;      // after the descriptors have run out
constexpr int64_t kLeastAlarmNs = 20'000'000;  // between two looks for silence
constexpr int64_t kMsNs = 1'000'000;
constexpr int kMostConnections = 1024;
constexpr uint32_t kIndexBits = 16;
constexpr uint64_t kAlarmTag = UINT64_MAX;  // connections' tags are their ids, doors' the descriptor after this bit
constexpr uint64_t kDoorTag = uint64_t{1} << 63;
constexpr uint32_t kEvents = EPOLLIN | EPOLLRDHUP | EPOLLET;  // EPOLLOUT only while a rest waits: each read of a client
                                                              // would be an event otherwise
static_assert(kMostConnections <= 1 << kIndexBits);

int connections_for(const Server::Options& options) {
  if (options.max_connections > 0) return std::min(options.max_connections, 1 << kIndexBits);
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return kMostConnections;
  return static_cast<int>(std::clamp<rlim_t>(limit.rlim_cur / 2, 1, kMostConnections));
}

// Of so many, those that may come by TCP: who has no right to the files cannot keep out those who have.
size_t remote_share(size_t connections) { return std::max<size_t>(1, connections * 3 / 4); }

bool is_full(int error) noexcept {
  return error == EAGAIN || error == EWOULDBLOCK || error == ENOBUFS || error == ENOMEM;
}

// Who is at the other end of a tcp connection: its address without the port, so that one host is one.
Peer address_of(int fd) noexcept {
  Peer peer;
  sockaddr_storage address{};
  socklen_t size = sizeof(address);
  char text[NI_MAXHOST];
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  if (getpeername(fd, any, &size) == 0 && getnameinfo(any, size, text, sizeof(text), nullptr, 0, NI_NUMERICHOST) == 0) {
    peer.set(text);
  }
  return peer;
}

// ... of a connection on this machine: the user, and the process. Root and the daemon's own user may do everything.
Peer user_of(int fd) noexcept {
  Peer peer;
  ucred who{};
  socklen_t size = sizeof(who);
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &who, &size) != 0) return peer;
  char text[48];
  const int length = std::snprintf(text, sizeof(text), "%u:%d", who.uid, who.pid);
  peer.kind = Peer::kUser;
  peer.set({text, static_cast<size_t>(std::max(length, 0))});
  peer.admin = who.uid == 0 || who.uid == geteuid();
  return peer;
}

// Bytes that a local peer has not read yet.
int untaken(int fd) noexcept {
  int bytes = 0;
  return ioctl(fd, SIOCOUTQ, &bytes) == 0 ? bytes : 0;
}

}  // namespace

// ---- opening and closing ------------------------------------------------------------------------------------------

Server::Server(const zmq::Api& api, const Options& options)
    : api_(api),
      options_(options),
      zmtp_(options.max_message),
      local_(options.max_message),
      curve_(options.curve ? std::make_unique<const Curve>(options.max_message, *options.curve) : nullptr),
      epoll_(epoll_create1(EPOLL_CLOEXEC)) {
  if (epoll_ < 0) throw std::system_error(errno, std::generic_category(), "epoll_create1");
  const auto count = static_cast<uint32_t>(connections_for(options));
  connections_.resize(count);
  queue_.resize(count);
  waste_.resize(kTurnBytes);
  free_.reserve(count);
  gone_.reserve(count);
  for (uint32_t index = count; index-- > 0;) free_.push_back(index);
  watch(alarm_.fd(), kAlarmTag, EPOLLIN | EPOLLET, EPOLL_CTL_ADD);
}

// The local sockets first: whoever finds an endpoint of ZeroMQ finds them too.
void Server::open() {
  for (const std::string& path : options_.local) doors_.push_back({Listener("ipc://" + path), &local_});
  for (const std::string& endpoint : options_.zeromq) {
    doors_.push_back({Listener(endpoint), nullptr});
    doors_.back().protocol = protocol_of(doors_.back());
    endpoints_.push_back(doors_.back().listener.endpoint());
  }
  for (const Door& door : doors_) watch_door(door);
}

void Server::close() noexcept {
  if (epoll_ < 0) return;
  doors_.clear();
  const int64_t until_ns = monotonic_ns() + options_.linger_ms * kMsNs;
  for (Connection& connection : connections_) {
    if (connection.fd < 0) continue;
    while (flush(connection) && !connection.rest.empty()) {
      const int64_t left_ms = (until_ns - monotonic_ns()) / kMsNs;
      pollfd item{connection.fd, POLLOUT, 0};
      if (left_ms <= 0 || ::poll(&item, 1, static_cast<int>(left_ms)) <= 0) break;
    }
    // No more will come: a client that takes its time reads on and sees the end behind the last frame.
    if (connection.fd >= 0) (void)::shutdown(connection.fd, SHUT_WR);
  }
  for (Connection& connection : connections_) {
    if (connection.fd < 0) continue;
    // A local client hears of a closed descriptor at once, and libzmq then leaves unread what it had no room for.
    while (!connection.tcp && untaken(connection.fd) > 0 && monotonic_ns() < until_ns) {
      pollfd item{connection.fd, 0, 0};
      if (::poll(&item, 1, 1) != 0) break;  // it has hung up
    }
    // Closing over unread input would reset the connection, and what is on its way to the client with it.
    while (::recv(connection.fd, waste_.data(), waste_.size(), MSG_DONTWAIT) > 0 && monotonic_ns() < until_ns) {
    }
    ::close(connection.fd);
    connection.fd = -1;
    connection.state = State::kFree;
  }
  ::close(epoll_);
  epoll_ = -1;
}

// ---- a successor --------------------------------------------------------------------------------------------------

// Of ZeroMQ's doors.
const Protocol* Server::protocol_of(const Door& door) const noexcept {
  if (door.listener.tcp() && curve_ != nullptr) return curve_.get();
  return &zmtp_;
}

Transport::Estate Server::hand_over() const {
  Estate estate;
  for (const Door& door : doors_) {
    StateWriter writer;
    writer.flag(door.protocol == &local_);
    door.listener.save(writer);
    estate.doors.push_back({.fd = door.listener.fd(), .identity = {}, .state = writer.take(), .payloads = {}});
  }
  for (const Connection& connection : connections_) {
    if (connection.fd < 0) continue;
    const Identity identity = identity_of(connection);
    estate.clients.push_back({.fd = connection.fd,
                              .identity = {identity.begin(), identity.end()},
                              .state = save(connection),
                              .payloads = {}});
  }
  return estate;
}

// What is not saved, its successor sees for itself, or begins anew: how long it has been silent.
std::vector<uint8_t> Server::save(const Connection& connection) const {
  StateWriter writer;
  writer.flag(connection.protocol == &local_);
  writer.flag(connection.protocol == curve_.get());
  writer.flag(connection.tcp);
  writer.flag(connection.state == State::kOpen);
  writer.flag(connection.asked);
  connection.protocol->save(connection.progress, writer);
  writer.bytes(connection.input.bytes());
  writer.bytes(std::span(connection.rest).subspan(connection.rest_sent));
  return writer.take();
}

bool Server::restore(Connection& connection, StateReader& reader) {
  if (reader.flag()) connection.state = State::kOpen;
  connection.asked = reader.flag();
  if (!connection.protocol->restore(connection.progress, reader)) return false;
  const std::span<const uint8_t> input = reader.bytes(), rest = reader.bytes();
  if (!reader.whole() || connection.progress.open != (connection.state == State::kOpen)) return false;
  connection.rest.assign(rest.begin(), rest.end());
  connection.input.want(input.size());
  for (size_t done = 0; done < input.size();) {
    if (!make_room(connection)) return false;
    const std::span<uint8_t> room = connection.input.room();
    if (room.empty()) return false;
    const auto more = input.subspan(done, std::min(room.size(), input.size() - done));
    std::copy(more.begin(), more.end(), room.begin());
    connection.input.add(more.size());
    done += more.size();
  }
  return true;
}

std::vector<std::vector<uint8_t>> Server::take_over(const Estate& estate) {
  doors_.clear();
  endpoints_.clear();
  paused_until_ns_ = 0;
  for (const Handed& handed : estate.doors) {
    StateReader reader(handed.state);
    const bool local = reader.flag();
    doors_.push_back({Listener(handed.fd, reader), &local_});
    if (local) continue;
    doors_.back().protocol = protocol_of(doors_.back());
    endpoints_.push_back(doors_.back().listener.endpoint());
  }
  if (free_.size() < estate.clients.size()) {
    throw std::runtime_error("io: there is room for " + std::to_string(free_.size()) + " of the " +
                             std::to_string(estate.clients.size()) + " connections that were handed over");
  }
  std::vector<std::vector<uint8_t>> identities;
  for (const Handed& handed : estate.clients) {
    StateReader reader(handed.state);
    const bool local = reader.flag(), curve = reader.flag(), tcp = reader.flag();
    if (curve && curve_ == nullptr) throw std::runtime_error("io: a connection with a key was handed over");
    const Protocol* protocol = &zmtp_;
    if (local) protocol = &local_;
    if (curve) protocol = curve_.get();
    Connection& connection = seat(handed.fd, protocol, tcp);
    if (!restore(connection, reader)) throw std::runtime_error("io: a connection that was handed over is none");
    watch(connection.fd, connection.id, connection.rest.empty() ? kEvents : kEvents | EPOLLOUT, EPOLL_CTL_ADD);
    enqueue(connection);
    const Identity identity = identity_of(connection);
    identities.emplace_back(identity.begin(), identity.end());
  }
  for (const Door& door : doors_) watch_door(door);
  // Whoever is in the list of clients no longer is looked for with the next look at it.
  guests_ = 0;
  set_alarm();
  return identities;
}

void Server::abandon() noexcept {
  if (epoll_ < 0) return;
  doors_.clear();
  for (Connection& connection : connections_) {
    if (connection.fd >= 0) ::close(connection.fd);
    connection.fd = -1;
    connection.state = State::kFree;
  }
  ::close(epoll_);
  epoll_ = -1;
}

// ---- doors --------------------------------------------------------------------------------------------------------

void Server::watch(int fd, uint64_t tag, uint32_t events, int operation) noexcept {
  epoll_event event{};
  event.events = events;
  event.data.u64 = tag;
  (void)epoll_ctl(epoll_, operation, fd, &event);
}

void Server::watch_door(const Door& door) noexcept {
  const int fd = door.listener.fd();
  watch(fd, kDoorTag | static_cast<uint64_t>(fd), EPOLLIN, EPOLL_CTL_ADD);
}

void Server::look_at_files() noexcept {
  for (Door& door : doors_) {
    if (door.listener.look_at_file() && paused_until_ns_ == 0) watch_door(door);
  }
}

// The first listener of ZeroMQ's whose file has changed without anybody having been told; null: none.
Listener* Server::untold() noexcept {
  for (Door& door : doors_) {
    if (door.protocol != &local_ && !door.listener.news().empty()) return &door.listener;
  }
  return nullptr;
}

bool Server::news(EndpointNews& news) noexcept {
  const Listener* const listener = untold();
  if (listener != nullptr) news = {listener->endpoint(), listener->news()};
  return listener != nullptr;
}

void Server::pop_news() noexcept {
  if (Listener* const listener = untold()) listener->told();
}

void Server::accept_clients(int listener) noexcept {
  const auto door =
      std::find_if(doors_.begin(), doors_.end(), [&](const Door& each) { return each.listener.fd() == listener; });
  if (door == doors_.end()) return;
  for (int i = 0; i < kAcceptBatch; ++i) {
    const int fd = accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (fd >= 0) {
      greet(fd, *door);
    } else if (errno != EINTR && errno != ECONNABORTED) {
      // Out of descriptors or memory: whoever waits at the door would be an event for ever.
      if (errno != EAGAIN && errno != EWOULDBLOCK) pause_listening();
      break;
    }
  }
  set_alarm();
}

void Server::greet(int fd, const Door& door) noexcept {
  const bool tcp = door.listener.tcp();
  if (door.protocol->laborious() && !doorkeeper_.admits(address_of(fd), monotonic_ns())) {
    ++counts_.denied;
    ::close(fd);
    return;
  }
  if (free_.empty() || (tcp && remote_ >= remote_share(connections_.size()))) {
    ++counts_.refused;
    ::close(fd);
    return;
  }
  const std::span<const uint8_t> greeting = door.protocol->greeting();
  if (::send(fd, greeting.data(), greeting.size(), MSG_DONTWAIT | MSG_NOSIGNAL) !=
      static_cast<ssize_t>(greeting.size())) {
    ::close(fd);
    return;
  }
  const Connection& connection = seat(fd, door.protocol, tcp);
  watch(fd, connection.id, kEvents, EPOLL_CTL_ADD);
}

// Gives a connection that has come a place, of which there must be one.
Server::Connection& Server::seat(int fd, const Protocol* protocol, bool tcp) noexcept {
  const uint32_t index = free_.back();
  free_.pop_back();
  ++counts_.accepted;
  ++counts_.clients;
  if (protocol == &local_) ++counts_.local_clients;
  if (tcp) ++remote_;
  Connection& connection = connections_[index];
  connection.fd = fd;
  connection.id = ++serial_ << kIndexBits | index;
  connection.protocol = protocol;
  connection.tcp = tcp;
  connection.state = State::kHandshake;
  connection.drained = false;
  connection.heard_ns = monotonic_ns();
  return connection;
}

void Server::pause_listening() noexcept {
  for (const Door& door : doors_) watch(door.listener.fd(), 0, 0, EPOLL_CTL_DEL);
  paused_until_ns_ = monotonic_ns() + kPauseNs;
}

// ---- events -------------------------------------------------------------------------------------------------------

void Server::tend() noexcept {
  epoll_event events[kEventBatch];
  const int count = epoll_wait(epoll_, events, kEventBatch, 0);
  bool alarm = false;
  for (int i = 0; i < count; ++i) {
    const uint64_t tag = events[i].data.u64;
    if (tag == kAlarmTag) {
      alarm = true;
    } else if ((tag & kDoorTag) != 0) {
      accept_clients(static_cast<int>(tag & ~kDoorTag));
    } else if (Connection* const connection = find(tag); connection != nullptr) {
      if ((events[i].events & (EPOLLHUP | EPOLLRDHUP | EPOLLERR)) != 0) {
        // One that leaves without having come in may have said why it could not: the log is to have that.
        if (connection->state == State::kHandshake && connection->protocol->laborious()) {
          connection->drained = false;
          enqueue(*connection);
        } else {
          hang_up(*connection);
        }
        continue;
      }
      if ((events[i].events & EPOLLOUT) != 0 && !flush(*connection)) continue;
      if ((events[i].events & EPOLLIN) == 0) continue;
      connection->drained = false;
      enqueue(*connection);
    }
  }
  if (curve_ != nullptr && curve_->guests() != guests_) look_at_guests();
  // Last: if this thread was held up, who has answered in time may be an event of the same batch.
  if (alarm) on_alarm();
}

void Server::on_alarm() noexcept {
  const int64_t now = monotonic_ns();
  if (paused_until_ns_ != 0 && now >= paused_until_ns_) {
    paused_until_ns_ = 0;
    for (const Door& door : doors_) watch_door(door);
  }
  for (Connection& connection : connections_) {
    if (connection.fd >= 0) look_at(connection, now);
  }
  looked_ns_ = now;
  set_alarm();
}

// When a connection that stays silent is to be looked at; INT64_MAX: never.
int64_t Server::due_ns(const Connection& connection) const noexcept {
  if (connection.state == State::kHandshake) return connection.heard_ns + options_.handshake_ms * kMsNs;
  if (connection.state != State::kOpen || !connection.protocol->pings()) return INT64_MAX;
  if (connection.asked && !connection.progress.pings) return INT64_MAX;
  return connection.heard_ns + (connection.pinged ? options_.mute_ms : options_.ping_ms) * kMsNs;
}

// Drops a connection that does not shake hands, or does not answer. One to which something was sent, or that has sent
// what was not read yet, is not judged: a client that is paused still gets what it is owed, and one that nobody reads
// while there is no room for requests is not to blame. Of clients whose protocol knows no ping only one that has never
// asked for anything is judged: it loses nothing.
void Server::look_at(Connection& connection, int64_t now) noexcept {
  if (due_ns(connection) > now) return;
  if (connection.state == State::kHandshake) {
    if (!connection.queued) drop(connection);
    return;
  }
  if (connection.told || connection.queued || !connection.rest.empty()) {
    connection.told = false;
    connection.pinged = false;
    connection.heard_ns = now;
  } else if (connection.pinged) {
    drop(connection);
  } else {
    connection.pinged = true;
    (void)transmit(connection, connection.protocol->ping(connection.progress), {});
  }
}

// For the earliest of what must not wait for an event.
void Server::set_alarm() noexcept {
  int64_t when = paused_until_ns_ != 0 ? paused_until_ns_ : INT64_MAX;
  for (const Connection& connection : connections_) {
    if (connection.fd >= 0) when = std::min(when, due_ns(connection));
  }
  if (when != INT64_MAX) alarm_.set(std::max(when, looked_ns_ + kLeastAlarmNs));
}

// ---- receiving ----------------------------------------------------------------------------------------------------

Server::Connection* Server::find(uint64_t id) noexcept {
  const uint64_t index = id & ((uint64_t{1} << kIndexBits) - 1);
  if (index >= connections_.size() || connections_[index].id != id || connections_[index].fd < 0) return nullptr;
  return &connections_[index];
}

uint32_t Server::index_of(const Connection& connection) const noexcept {
  return static_cast<uint32_t>(&connection - connections_.data());
}

Server::Identity Server::identity_of(const Connection& connection) noexcept {
  Identity identity{0, static_cast<uint8_t>(connection.protocol->letter())};
  for (size_t i = 0; i < 8; ++i) identity[9 - i] = static_cast<uint8_t>(connection.id >> (8 * i));
  return identity;
}

void Server::enqueue(Connection& connection) noexcept {
  if (connection.queued) return;
  connection.queued = true;
  queue_[(queue_head_ + queue_size_++) % queue_.size()] = index_of(connection);
}

Server::Connection& Server::dequeue() noexcept {
  Connection& connection = connections_[queue_[queue_head_]];
  queue_head_ = (queue_head_ + 1) % queue_.size();
  --queue_size_;
  connection.queued = false;
  return connection;
}

bool Server::receive(Incoming& message) noexcept {
  tend();
  for (size_t budget = kTurnBytes; queue_size_ > 0 && budget > 0;) {
    Connection& connection = dequeue();
    if (connection.fd < 0) continue;
    switch (read(connection, message, budget)) {
      case Read::kMessage:
        if (connection.input.filled() > 0 || !connection.drained) enqueue(connection);
        return true;
      case Read::kNothing:
        break;
      case Read::kTurnOver:
        enqueue(connection);
        break;
      case Read::kHungUp:
        if (connection.state == State::kHandshake && connection.protocol->laborious()) {
          deny(connection, kNoKey);
        } else {
          hang_up(connection);
        }
        break;
      case Read::kUnfit:
        drop(connection);
        break;
      case Read::kRefused:
        deny(connection, connection.refused);
        break;
    }
  }
  return false;
}

// Reads until there is a whole message, nothing more, or the turn is over.
Server::Read Server::read(Connection& connection, Incoming& message, size_t& budget) noexcept {
  for (;;) {
    const Step step = connection.protocol->step(connection.progress, connection.input.bytes());
    switch (step.kind) {
      case Step::Kind::kUnfit:
        return Read::kUnfit;
      case Step::Kind::kMessage: {
        const bool passed = pass_on(connection, step, message);
        consume(connection, step.consumed);
        return passed ? Read::kMessage : Read::kUnfit;
      }
      case Step::Kind::kOpened:
        connection.state = State::kOpen;
        consume(connection, step.consumed);
        continue;
      case Step::Kind::kAnswer:
        // What finds no room is left out: the peer does not read.
        if (connection.rest.empty() && transmit(connection, step.payload, {}) == Sent::kGone) return Read::kNothing;
        if (step.opened) connection.state = State::kOpen;
        consume(connection, step.consumed);
        // A step of a handshake with keys takes as long as a round: what is sent in between has its turn.
        budget -= connection.state != State::kOpen || step.opened ? budget : std::min(budget, kAnswerBytes);
        if (budget == 0) return Read::kTurnOver;
        continue;
      case Step::Kind::kRefused:
        connection.refused = step.malformed;
        if (!step.payload.empty() && transmit(connection, step.payload, {}) == Sent::kGone) return Read::kNothing;
        return Read::kRefused;
      case Step::Kind::kMore:
        consume(connection, step.consumed);
        connection.input.want(step.wanted);
        break;
    }
    if (connection.drained) return Read::kNothing;
    if (budget == 0) return Read::kTurnOver;
    const std::span<uint8_t> room = room_for(connection);
    if (room.empty()) return Read::kUnfit;
    if (!read_bytes(connection, room.first(std::min(room.size(), std::max(budget, kLeastRead))), budget)) {
      return Read::kHungUp;
    }
  }
}

// Reads once. False if the client has hung up.
bool Server::read_bytes(Connection& connection, std::span<uint8_t> room, size_t& budget) noexcept {
  const ssize_t got = recv(connection.fd, room.data(), room.size(), MSG_DONTWAIT);
  if (got == 0) return false;
  if (got < 0) {
    budget -= std::min(budget, kCallBytes);
    connection.drained = errno != EINTR;
    return errno == EINTR || is_full(errno);
  }
  const auto bytes = static_cast<size_t>(got);
  budget -= std::min(budget, std::max(bytes, kCallBytes));
  if (connection.progress.throwing) {
    connection.progress.left -= bytes;
  } else {
    connection.input.add(bytes);
  }
  connection.drained = bytes < room.size();
  if (connection.state == State::kOpen) connection.heard_ns = monotonic_ns();
  connection.pinged = false;
  return true;
}

// Copies a message out. False if there is no memory for it.
bool Server::pass_on(Connection& connection, const Step& step, Incoming& message) noexcept {
  api_.msg_close(&message.payload);
  if (api_.msg_init_size(&message.payload, step.payload.size()) != 0) {
    api_.msg_init(&message.payload);
    return false;
  }
  std::copy(step.payload.begin(), step.payload.end(), static_cast<uint8_t*>(api_.msg_data(&message.payload)));
  const Identity identity = identity_of(connection);
  message.identity_size = identity.size();
  std::copy(identity.begin(), identity.end(), message.identity.begin());
  message.malformed = step.malformed;
  message.has_id = step.has_id;
  message.id = step.id;
  message.received_ns = monotonic_ns();
  message.first = !connection.asked;
  if (message.first) introduce(connection, message.peer);
  connection.asked = true;
  return true;
}

void Server::introduce(const Connection& connection, Peer& peer) const noexcept {
  peer = connection.tcp ? address_of(connection.fd) : user_of(connection.fd);
  connection.protocol->introduce(connection.progress, peer);
}

void Server::consume(Connection& connection, size_t bytes) noexcept {
  const size_t large = connection.input.large();
  connection.input.drop(bytes);
  if (connection.input.large() == large) return;
  large_ -= large;
  connection.grown = 0;
}

// Where the next bytes go; empty if there is no memory for them.
std::span<uint8_t> Server::room_for(Connection& connection) noexcept {
  if (connection.progress.throwing) return std::span(waste_).first(std::min(waste_.size(), connection.progress.left));
  return make_room(connection) ? connection.input.room() : std::span<uint8_t>{};
}

// Accounts for the growth of one input. Where all that is unfinished exceeds its budget, the connection that has been
// at it for longest is dropped: an honest message is read whole in a few turns.
bool Server::make_room(Connection& connection) noexcept {
  const size_t growth = connection.input.growth();
  if (growth == 0) return true;
  const size_t budget = static_cast<size_t>(options_.max_message) * kBudgetMessages;
  while (large_ + growth > budget) {
    Connection* oldest = nullptr;
    for (Connection& other : connections_) {
      if (other.fd < 0 || other.grown == 0 || &other == &connection) continue;
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

Sent Server::send(std::span<const uint8_t> identity, std::span<const uint8_t> payload) noexcept {
  if (identity.size() != kIdentity || identity[0] != 0) return Sent::kGone;
  uint64_t id = 0;
  for (const uint8_t byte : identity.subspan(2)) id = id << 8 | byte;
  Connection* const connection = find(id);
  if (connection == nullptr || connection->state != State::kOpen || connection->protocol->letter() != identity[1]) {
    return Sent::kGone;
  }
  connection->told = true;
  if (!connection->rest.empty()) {
    if (!flush(*connection)) return Sent::kGone;
    if (!connection->rest.empty()) return Sent::kBlocked;
  }
  Protocol::Header header;
  const Protocol::Packed packed = connection->protocol->pack(connection->progress, payload, header);
  if (!packed.valid) {
    drop(*connection);
    return Sent::kGone;
  }
  return transmit(*connection, packed.header, packed.payload);
}

// Hands bytes to the kernel, all of them or none; what it takes no part of at once follows later.
Sent Server::transmit(Connection& connection, std::span<const uint8_t> header,
                      std::span<const uint8_t> payload) noexcept {
  iovec parts[2] = {{const_cast<uint8_t*>(header.data()), header.size()},
                    {const_cast<uint8_t*>(payload.data()), payload.size()}};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  ssize_t sent = -1;
  do {
    sent = sendmsg(connection.fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  if (sent < 0) {
    if (is_full(errno)) return Sent::kBlocked;
    hang_up(connection);
    return Sent::kGone;
  }
  auto done = static_cast<size_t>(sent);
  if (done == header.size() + payload.size()) return Sent::kOk;
  // Only of frames beyond some ten kilobytes does the kernel take a part; the rest is kept until there is room.
  try {
    connection.rest.assign(header.begin() + std::min(done, header.size()), header.end());
    done -= std::min(done, header.size());
    connection.rest.insert(connection.rest.end(), payload.begin() + done, payload.end());
  } catch (const std::bad_alloc&) {
    drop(connection);
    return Sent::kGone;
  }
  connection.rest_sent = 0;
  watch(connection.fd, connection.id, kEvents | EPOLLOUT, EPOLL_CTL_MOD);
  return Sent::kOk;
}

// Sends what is left of a frame; false if the client has gone.
bool Server::flush(Connection& connection) noexcept {
  while (connection.rest_sent < connection.rest.size()) {
    const ssize_t sent = ::send(connection.fd, connection.rest.data() + connection.rest_sent,
                                connection.rest.size() - connection.rest_sent, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent >= 0) {
      connection.rest_sent += static_cast<size_t>(sent);
    } else if (is_full(errno)) {
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
void Server::hang_up(Connection& connection) noexcept {
  ::close(connection.fd);
  connection.fd = -1;
  --counts_.clients;
  if (connection.protocol == &local_) --counts_.local_clients;
  if (connection.tcp) --remote_;
  large_ -= connection.input.large();
  connection.input = {};
  connection.rest = {};
  connection.grown = 0;
  if (connection.state == State::kOpen) {
    connection.state = State::kGone;
    gone_.push_back(index_of(connection));
  } else {
    release(connection);
  }
}

void Server::drop(Connection& connection) noexcept {
  ++counts_.dropped;
  hang_up(connection);
}

// Who is not let in hears why, if there is anything to hear, and is remembered.
void Server::deny(Connection& connection, const char* why) noexcept {
  ++counts_.denied;
  doorkeeper_.note(why, address_of(connection.fd), monotonic_ns());
  // Closing over unread input would reset the connection, and with it the reason that is on its way.
  (void)::shutdown(connection.fd, SHUT_WR);
  while (::recv(connection.fd, waste_.data(), waste_.size(), MSG_DONTWAIT) > 0) {
  }
  hang_up(connection);
}

// The list of those who may come in has changed: who is no longer in it goes.
void Server::look_at_guests() noexcept {
  guests_ = curve_->guests();
  for (Connection& connection : connections_) {
    if (connection.fd < 0 || connection.state != State::kOpen || connection.protocol != curve_.get()) continue;
    if (!curve_->welcome(connection.progress)) deny(connection, kUnknownKey);
  }
}

bool Server::denial(Denial& denial) noexcept { return doorkeeper_.untold(denial); }

void Server::pop_denial() noexcept { doorkeeper_.told(); }

void Server::release(Connection& connection) noexcept {
  const bool queued = connection.queued;
  connection = Connection{};
  connection.queued = queued;  // receive() takes it out, and finds nobody or the place's next client
  free_.push_back(index_of(connection));
}

std::span<const uint8_t> Server::gone() noexcept {
  if (gone_.empty()) return {};
  gone_identity_ = identity_of(connections_[gone_.front()]);
  return gone_identity_;
}

void Server::pop_gone() noexcept {
  release(connections_[gone_.front()]);
  gone_.erase(gone_.begin());
}

Transport::Counts Server::counts() const noexcept {
  Counts counts = counts_;
  for (const Door& door : doors_) {
    counts.bound_again += door.listener.bound_again();
    counts.unreachable += door.listener.state() != SocketFile::State::kOurs ? 1 : 0;
  }
  return counts;
}

}  // namespace ull
