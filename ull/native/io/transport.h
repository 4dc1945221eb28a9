// The way to clients, as the io thread sees it: takes their messages one by one, sends them frames, never waits.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/request.h"
#include "io/zmq_api.h"
#include "protocol/peer.h"

namespace ull {

enum class Sent : uint8_t {
  kOk,
  kBlocked,  // the peer has room for nothing more: try again later
  kGone,     // there is no such peer (any more)
};

// One message of a client.
struct Incoming {
  std::array<uint8_t, kMaxIdentity> identity;
  size_t identity_size = 0;
  zmq::Message payload;             // initialised by whoever owns this; moved on, not copied
  const char* malformed = nullptr;  // why it is no request, see protocol/peer.h; null: it is one
  int64_t received_ns = 0;          // CLOCK_MONOTONIC
  uint64_t id = 0;                  // of a refused request, where it could be found
  bool has_id = false;
  bool first = false;  // of its client: `peer` says who that is
  Peer peer;

  [[nodiscard]] std::span<const uint8_t> client() const noexcept { return {identity.data(), identity_size}; }
};

class Sender {
 public:
  virtual ~Sender() = default;
  // Sends one frame of the wire to a client.
  [[nodiscard]] virtual Sent send(std::span<const uint8_t> identity, std::span<const uint8_t> payload) noexcept = 0;
};

// A client is known by its identity, 1 to kMaxIdentity bytes that the transport chooses and never uses again.
class Transport : public Sender {
 public:
  struct Counts {
    uint64_t clients = 0;        // connected now, their handshake done or not
    uint64_t local_clients = 0;  // ... by the local transport
    uint64_t accepted = 0;       // connections since the start
    uint64_t refused = 0;        // turned away: no room for another connection
    uint64_t denied = 0;         // ... of them, those that may not come in, or had tried that too often
    uint64_t dropped = 0;        // disconnected: not our protocol, late, mute, too long a message, memory short
    uint64_t bound_again = 0;    // endpoints whose file was gone and that have a new one
    uint64_t unreachable = 0;    // endpoints whose file is not ours, now
  };
  struct EndpointNews {
    std::string_view endpoint;
    std::string_view what;  // has become of its file: "bound_again", "ours", "gone" or "foreign"
  };

  // A peer that was not let in.
  struct Denial {
    const char* why = nullptr;
    Peer peer;  // its address
  };

  // Opens every endpoint. Throws std::runtime_error naming the one that cannot be opened.
  virtual void open() = 0;
  // Gives what has been sent time to leave, then closes everything.
  virtual void close() noexcept = 0;
  // As bound: tcp port 0 is resolved.
  [[nodiscard]] virtual const std::vector<std::string>& endpoints() const noexcept = 0;

  // Takes the next message, of each client in turn; false if there is none. A bounded amount of work: see ready().
  [[nodiscard]] virtual bool receive(Incoming& message) noexcept = 0;
  // To be called now and then while nothing is received: notices who comes and who goes.
  virtual void tend() noexcept = 0;
  // Whether receive() may have more without an event at fd(): not the time to sleep.
  [[nodiscard]] virtual bool ready() const noexcept = 0;
  [[nodiscard]] virtual int fd() const noexcept = 0;

  // A client that has gone and whose requests are to be ended; empty: none. The same until pop_gone().
  [[nodiscard]] virtual std::span<const uint8_t> gone() noexcept = 0;
  virtual void pop_gone() noexcept = 0;

  // Looks whether the file of each ipc endpoint is still there, and binds it again if not.
  virtual void look_at_files() noexcept = 0;
  // What of that has not been told; false if nothing. The same until pop_news().
  [[nodiscard]] virtual bool news(EndpointNews& news) noexcept = 0;
  virtual void pop_news() noexcept = 0;

  // A peer that was not let in and that nobody has been told of; false if there is none. The same until pop_denial().
  [[nodiscard]] virtual bool denial(Denial& /*denial*/) noexcept { return false; }
  virtual void pop_denial() noexcept {}

  // What a successor of this process goes on with: its listening sockets, and who is connected. All of it stays open
  // here, so that it can be gone on with here as well, but not by both.
  struct Handed {
    int fd = -1;
    std::vector<uint8_t> identity;               // of a client, here
    std::vector<uint8_t> state;                  // what only another transport of this kind understands
    std::vector<std::vector<uint8_t>> payloads;  // that wait for a client
  };
  struct Estate {
    std::vector<Handed> doors;
    std::vector<Handed> clients;
  };
  [[nodiscard]] virtual Estate hand_over() const { return {}; }
  // Goes on with that, in place of its own doors. The descriptors are this one's from now on; returns the clients'
  // identities here. Throws std::runtime_error: what then is left is of no use.
  [[nodiscard]] virtual std::vector<std::vector<uint8_t>> take_over(const Estate& /*estate*/) { return {}; }
  // Closes everything as if it had never been open here: a successor has it.
  virtual void abandon() noexcept {}

  [[nodiscard]] virtual Counts counts() const noexcept = 0;
};

}  // namespace ull
