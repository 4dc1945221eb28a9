// How bytes of a connection become messages and back: the local transport's protocol, or ZeroMQ's. A protocol looks at
// what has come and says what to do next; reading, writing and memory are the server's.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "protocol/peer.h"
#include "protocol/saved_state.h"

namespace ull {

// What a mechanism keeps of one connection beside ProtocolState.
struct ProtocolSession {
  ProtocolSession() = default;
  ProtocolSession(const ProtocolSession&) = delete;
  ProtocolSession& operator=(const ProtocolSession&) = delete;
  virtual ~ProtocolSession() = default;
};

// How far one connection has come; begins empty.
struct ProtocolState {
  bool open = false;     // hands have been shaken
  bool greeted = false;  // the first half of that is done
  bool pings = false;    // the peer's protocol knows pings

  // Of the message that is being received.
  uint8_t frames = 0;  // that have come, up to two
  bool version_ok = false;
  bool throwing = false;            // a part of it is thrown away as it arrives
  const char* malformed = nullptr;  // ... which is the last: why
  bool has_id = false;
  uint64_t id = 0;
  size_t left = 0;    // bytes of that part that have not come
  size_t thrown = 0;  // bytes of all such parts

  std::array<uint8_t, 32> answer = {};  // the one that is to be sent
  std::unique_ptr<ProtocolSession> session;
};

struct Step {
  enum class Kind : uint8_t {
    kMore,     // nothing to do before there are `wanted` bytes, or the connection ends
    kOpened,   // hands have been shaken
    kMessage,  // `payload`, or why there is none: `malformed`, `has_id` and `id` as in Incoming
    kAnswer,   // `payload` is to be sent
    kUnfit,    // nothing more can be understood
    kRefused,  // the peer may not come in: `malformed` says why; `payload`, if any, is to be sent before the end
  };
  Kind kind = Kind::kMore;
  size_t consumed = 0;  // bytes from the first that nobody needs after this step
  size_t wanted = 1;    // bytes behind those
  std::span<const uint8_t> payload = {};
  const char* malformed = nullptr;
  bool has_id = false;
  uint64_t id = 0;
  bool opened = false;  // hands have been shaken with this answer
};

// Why a peer may not come in.
inline constexpr char kNoKey[] = "no_key";                     // it has shown none, or has left before that
inline constexpr char kWrongServerKey[] = "wrong_server_key";  // it takes us for another daemon
inline constexpr char kUnknownKey[] = "unknown_key";           // its own is not in the list

class Protocol {
 public:
  using Session = ProtocolSession;
  // A payload as it leaves; not valid: there was no memory for it.
  struct Packed {
    std::span<const uint8_t> header = {};
    std::span<const uint8_t> payload = {};
    bool valid = true;
  };

  static constexpr size_t kLongestHeader = 16;
  using Header = std::array<uint8_t, kLongestHeader>;

  virtual ~Protocol() = default;
  // What a new connection is told first.
  [[nodiscard]] virtual std::span<const uint8_t> greeting() const noexcept = 0;
  // Looks at what has come and has not been consumed.
  [[nodiscard]] virtual Step step(ProtocolState& state, std::span<const uint8_t> input) const noexcept = 0;
  // Writes what goes before a payload of `size` bytes; returns its length.
  virtual size_t pack_header(size_t size, Header& header) const noexcept = 0;
  // The payload as it leaves, with what goes before it. Of use until the next call.
  [[nodiscard]] virtual Packed pack(ProtocolState& state, std::span<const uint8_t> payload,
                                    Header& header) const noexcept;
  // What a peer that is alive answers. Of use until the next call.
  [[nodiscard]] virtual std::span<const uint8_t> ping(ProtocolState& state) const noexcept;
  // Whether there is such a thing.
  [[nodiscard]] virtual bool pings() const noexcept { return false; }
  // What the protocol knows of who a peer is, hands shaken.
  virtual void introduce(const ProtocolState& state, Peer& peer) const noexcept;
  // Whether a peer that was let in still would be.
  [[nodiscard]] virtual bool welcome(const ProtocolState& state) const noexcept;
  // Another number whenever welcome() may have changed.
  [[nodiscard]] virtual uint64_t guests() const noexcept { return 0; }
  // Whether a step of the handshake takes so long that tokens have their turn after each.
  [[nodiscard]] virtual bool laborious() const noexcept { return false; }
  // Writes how far a connection has come, for a process that goes on with it.
  virtual void save(const ProtocolState& state, StateWriter& writer) const;
  // Reads into an empty state what save() wrote. False if it is none.
  [[nodiscard]] virtual bool restore(ProtocolState& state, StateReader& reader) const;
  // Tells the clients of one protocol from those of others.
  [[nodiscard]] virtual char letter() const noexcept = 0;

 protected:
  static constexpr size_t kLook = 2048;  // bytes of a payload that is too long in which its request's id is looked for

  explicit Protocol(int64_t max_message)
      : max_message_(static_cast<size_t>(max_message)),
        max_refused_(static_cast<size_t>(std::max(max_message, kLongestRefused))) {}

  // The next `size` bytes are thrown away as they arrive. `malformed`: why, if they are the last of their message.
  static void throw_away(ProtocolState& state, size_t size, const char* malformed) noexcept;
  // Takes what has come of them, from `at` on; false if there is more to come.
  static bool thrown_away(ProtocolState& state, std::span<const uint8_t> input, size_t& at) noexcept;
  // The message of which all or a part was thrown away has ended.
  static Step refused(ProtocolState& state, size_t consumed) noexcept;
  static void look_for_id(ProtocolState& state, std::span<const uint8_t> payload) noexcept;

  const size_t max_message_;  // bytes of a payload
  const size_t max_refused_;  // ... of one that is thrown away; a longer one ends the connection
};

}  // namespace ull
