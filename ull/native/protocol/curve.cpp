#include "protocol/curve.h"

#include <algorithm>
#include <array>
#include <new>
#include <stdexcept>
#include <string_view>

namespace ull {
namespace {

using namespace zmtp;
using Kind = Step::Kind;

// Signature, version 3.1, mechanism, a server of security, filler.
constexpr auto kOurGreeting = literal(
    "\xff\0\0\0\0\0\0\0\1\x7f\3\1CURVE\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"
    "\1\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
static_assert(kOurGreeting.size() == kGreeting);
constexpr auto kReadyProperties = literal("\13Socket-Type\0\0\0\6ROUTER\10Identity\0\0\0\0");

constexpr size_t kKey = std::tuple_size_v<CurveKey>;
constexpr size_t kShortNonce = 8, kLongNonce = 16;  // bytes of a nonce that are sent
constexpr size_t kCookie = 96;
constexpr size_t kVouch = kLongNonce + 2 * kKey + Sodium::kMac;
constexpr size_t kHello = 6 + 2 + 72 + kKey + kShortNonce + 64 + Sodium::kMac;
constexpr size_t kWelcome = 8 + kLongNonce + kKey + kCookie + Sodium::kMac;
constexpr size_t kLeastInitiate = 9 + kCookie + kShortNonce + kKey + kVouch + Sodium::kMac;
static_assert(kHello == 200 && kWelcome == 168 && kLeastInitiate == 257);
constexpr std::string_view kMessageName = "\7MESSAGE";
constexpr size_t kMessageHead = kMessageName.size() + kShortNonce;
constexpr size_t kOverhead = kMessageHead + Sodium::kMac + 1;  // of a frame: name, nonce, box, flags
constexpr uint8_t kInnerMore = 1, kInnerCommand = 2;           // bits of the flags in a box
constexpr size_t kLargeScratch = 1 << 20;                      // bytes that are not kept

using Nonce = std::array<uint8_t, Sodium::kNonce>;

// A purpose in words, and the bytes of the nonce that make it one of its kind.
Nonce nonce_of(std::string_view purpose, Bytes own) noexcept {
  Nonce nonce{};
  std::copy(own.begin(), own.end(), std::copy(purpose.begin(), purpose.end(), nonce.begin()));
  return nonce;
}

std::array<uint8_t, kShortNonce> big_endian_bytes(uint64_t value) noexcept {
  std::array<uint8_t, kShortNonce> bytes;
  for (size_t i = 0; i < bytes.size(); ++i) bytes[bytes.size() - 1 - i] = static_cast<uint8_t>(value >> (8 * i));
  return bytes;
}

// A command of the handshake as a frame, in `at`, which has room for it; returns its size.
size_t frame_command(uint8_t* at, Bytes body) noexcept {
  uint8_t* const begin = at;
  at = put_frame_header(at, kCommandFlag, body.size());
  return static_cast<size_t>(std::copy(body.begin(), body.end(), at) - begin);
}

}  // namespace

struct Curve::Session final : Protocol::Session {
  explicit Session(const Sodium& functions) : sodium(functions) {}
  ~Session() override {
    sodium.zero(secret.data(), secret.size());
    sodium.zero(key.data(), key.size());
  }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  [[nodiscard]] std::array<uint8_t, kShortNonce> next_nonce() noexcept { return big_endian_bytes(++sent); }
  // False if it is not above those before: somebody plays a message again.
  [[nodiscard]] bool accept(Bytes nonce) noexcept {
    const uint64_t value = big_endian(nonce);
    if (value <= seen) return false;
    seen = value;
    return true;
  }

  const Sodium& sodium;
  CurveKey peer_transient{};  // C'
  CurveKey secret{};          // s', until the client has proved who it is
  CurveKey key{};             // of the boxes behind the handshake
  CurveKey client{};          // C
  std::array<uint8_t, kCookie> cookie{};
  uint64_t sent = 0;  // nonces
  uint64_t seen = 0;
  AllowList::Client known;
  std::array<uint8_t, 256> answer{};  // a command of the handshake, as a frame
};

Curve::Curve(int64_t max_message, const Options& options)
    : Mechanism(max_message, "CURVE", {.kind = Kind::kRefused, .malformed = kNoKey}), options_(options) {
  if (options_.clients == nullptr) throw std::invalid_argument("curve: needs a list of clients");
  if (options_.sodium.public_of(public_.data(), options_.secret.data()) != 0) {
    throw std::invalid_argument("curve: the server's key is none");
  }
}

Curve::~Curve() = default;

Bytes Curve::greeting() const noexcept { return kOurGreeting; }

Curve::Session& Curve::session_of(const ProtocolState& state) noexcept { return static_cast<Session&>(*state.session); }

void Curve::introduce(const ProtocolState& state, Peer& peer) const noexcept {
  const Session& session = session_of(state);
  peer.admin = session.known.admin;
  peer.kind = Peer::kKey;
  peer.set(session.known.name);
}

bool Curve::welcome(const ProtocolState& state) const noexcept {
  try {
    return options_.clients->find(session_of(state).client).has_value();
  } catch (const std::bad_alloc&) {
    return false;
  }
}

void Curve::save(const ProtocolState& state, StateWriter& writer) const {
  Mechanism::save(state, writer);
  writer.flag(state.session != nullptr);
  if (state.session == nullptr) return;
  const Session& session = session_of(state);
  for (const CurveKey* key : {&session.peer_transient, &session.secret, &session.key, &session.client}) {
    writer.bytes(*key);
  }
  writer.bytes(session.cookie);
  writer.number(session.sent);
  writer.number(session.seen);
  writer.text(session.known.name);
  writer.flag(session.known.admin);
}

bool Curve::restore(ProtocolState& state, StateReader& reader) const {
  if (!Mechanism::restore(state, reader)) return false;
  if (!reader.flag()) return !state.open;
  auto session = std::make_unique<Session>(options_.sodium);
  for (CurveKey* key : {&session->peer_transient, &session->secret, &session->key, &session->client}) {
    reader.fill(*key);
  }
  reader.fill(session->cookie);
  session->sent = reader.number();
  session->seen = reader.number();
  session->known.name = reader.text();
  session->known.admin = reader.flag();
  state.session = std::move(session);
  return true;
}

// ---- the handshake ------------------------------------------------------------------------------------------------

Step Curve::hear(ProtocolState& state, Bytes command) const noexcept {
  return state.session == nullptr ? hear_hello(state, command) : hear_initiate(state, command);
}

// The client knows our key: HELLO is boxed for it. Answered by WELCOME, with a key for this connection only.
Step Curve::hear_hello(ProtocolState& state, Bytes body) const noexcept {
  const Sodium& sodium = options_.sodium;
  if (body.size() != kHello || as_text(body.first(6)) != "\5HELLO" || body[6] != 1) return {.kind = Kind::kUnfit};
  std::unique_ptr<Session> session(new (std::nothrow) Session(sodium));
  if (session == nullptr) return {.kind = Kind::kUnfit};
  const Bytes transient = body.subspan(80, kKey), nonce = body.subspan(112, kShortNonce), box = body.subspan(120);
  std::copy(transient.begin(), transient.end(), session->peer_transient.begin());
  CurveKey key;  // of C' and s
  std::array<uint8_t, 64> zeros;
  if (sodium.shared(key.data(), transient.data(), options_.secret.data()) != 0 || !session->accept(nonce) ||
      sodium.open(zeros.data(), box.data(), box.size(), nonce_of("CurveZMQHELLO---", nonce).data(), key.data()) != 0) {
    return {.kind = Kind::kRefused, .malformed = kWrongServerKey};
  }
  std::array<uint8_t, kKey + kCookie> text;
  (void)sodium.keypair(text.data(), session->secret.data());
  sodium.random(session->cookie.data(), session->cookie.size());
  std::copy(session->cookie.begin(), session->cookie.end(), text.begin() + kKey);

  std::array<uint8_t, kWelcome> welcome;
  constexpr std::string_view kName = "\7WELCOME";
  uint8_t* const own = std::copy(kName.begin(), kName.end(), welcome.data());
  sodium.random(own, kLongNonce);
  const Nonce sealing = nonce_of("WELCOME-", {own, kLongNonce});
  (void)sodium.seal(own + kLongNonce, text.data(), text.size(), sealing.data(), key.data());
  sodium.zero(key.data(), key.size());
  const size_t size = frame_command(session->answer.data(), welcome);
  const Bytes answer = std::span(session->answer).first(size);
  state.session = std::move(session);
  return {.kind = Kind::kAnswer, .payload = answer};
}

// The client proves that it has the secret of the key that it names: INITIATE has a box of that key's for us. It is
// told READY, or why not.
Step Curve::hear_initiate(ProtocolState& state, Bytes body) const noexcept {
  const Sodium& sodium = options_.sodium;
  Session& session = session_of(state);
  if (body.size() < kLeastInitiate || as_text(body.first(9)) != "\10INITIATE") return {.kind = Kind::kUnfit};
  const Bytes cookie = body.subspan(9, kCookie), nonce = body.subspan(9 + kCookie, kShortNonce);
  const Bytes box = body.subspan(9 + kCookie + kShortNonce);
  if (sodium.equal(cookie.data(), session.cookie.data(), kCookie) != 0 || !session.accept(nonce) ||
      sodium.shared(session.key.data(), session.peer_transient.data(), session.secret.data()) != 0) {
    return {.kind = Kind::kUnfit};
  }
  std::array<uint8_t, kLongestCommand> text;
  const Nonce opening = nonce_of("CurveZMQINITIATE", nonce);
  if (sodium.open(text.data(), box.data(), box.size(), opening.data(), session.key.data()) != 0) {
    return {.kind = Kind::kUnfit};
  }
  const Bytes opened = std::span(text).first(box.size() - Sodium::kMac);
  const Bytes client = opened.first(kKey), vouch = opened.subspan(kKey, kVouch);
  const Bytes properties = opened.subspan(kKey + kVouch);
  std::copy(client.begin(), client.end(), session.client.begin());

  // The vouch: C' and our key, boxed with C, so that this connection is the client's own and meant for us.
  CurveKey key;  // of C and s'
  std::array<uint8_t, 2 * kKey> vouched;
  const Bytes voucher = vouch.subspan(kLongNonce);
  const bool proved = sodium.shared(key.data(), client.data(), session.secret.data()) == 0 &&
                      sodium.open(vouched.data(), voucher.data(), voucher.size(),
                                  nonce_of("VOUCH---", vouch.first(kLongNonce)).data(), key.data()) == 0 &&
                      sodium.equal(vouched.data(), session.peer_transient.data(), kKey) == 0 &&
                      sodium.equal(vouched.data() + kKey, public_.data(), kKey) == 0;
  sodium.zero(key.data(), key.size());
  sodium.zero(session.secret.data(), session.secret.size());
  if (!proved || !is_fit(properties)) return {.kind = Kind::kUnfit};

  std::optional<AllowList::Client> known;
  try {
    known = options_.clients->find(session.client);
  } catch (const std::bad_alloc&) {
    return {.kind = Kind::kUnfit};
  }
  if (!known) {
    static constexpr auto kError = literal("\5ERROR\003400");  // as a ZAP handler's verdict is passed on
    const size_t size = frame_command(session.answer.data(), kError);
    return {.kind = Kind::kRefused, .payload = std::span(session.answer).first(size), .malformed = kUnknownKey};
  }
  session.known = std::move(*known);

  std::array<uint8_t, 6 + kShortNonce + kReadyProperties.size() + Sodium::kMac> ready;
  constexpr std::string_view kName = "\5READY";
  uint8_t* at = std::copy(kName.begin(), kName.end(), ready.data());
  const auto own = session.next_nonce();
  at = std::copy(own.begin(), own.end(), at);
  const Nonce sealing = nonce_of("CurveZMQREADY---", own);
  (void)sodium.seal(at, kReadyProperties.data(), kReadyProperties.size(), sealing.data(), session.key.data());
  const size_t size = frame_command(session.answer.data(), ready);
  state.open = true;
  return {.kind = Kind::kAnswer, .payload = std::span(session.answer).first(size), .opened = true};
}

// ---- messages -----------------------------------------------------------------------------------------------------

// As Zmtp::take_frames, of frames that are each in a box. A frame that is longer than a payload may be is not opened:
// in its beginning, which is read without proof of who has written it, the request's id is looked for.
Step Curve::take_frames(ProtocolState& state, Bytes input) const noexcept {
  const Sodium& sodium = options_.sodium;
  Session& session = session_of(state);
  const size_t longest = std::max(max_message_, kLongestCommand);  // that is opened
  for (size_t at = 0;;) {
    if (state.throwing) {
      if (!thrown_away(state, input, at)) return {.consumed = at};
      if (state.malformed != nullptr) return refused(state, at);
    }
    const Bytes rest = input.subspan(at);
    if (rest.size() < 2) return {.consumed = at, .wanted = 2};
    const Frame outer = Frame::of(rest);
    if (!outer.valid || outer.more) return {.kind = Kind::kUnfit};
    if (rest.size() < outer.header) return {.consumed = at, .wanted = outer.header};
    if (outer.size < kOverhead || outer.size - kOverhead > max_refused_) return {.kind = Kind::kUnfit};
    const size_t text_size = outer.size - kOverhead + 1;  // with the flags
    const bool whole = text_size - 1 <= longest;
    const size_t seen = whole ? text_size : 1 + std::min(kLook, text_size - 1);
    const size_t needed = outer.header + kMessageHead + Sodium::kMac + seen;
    if (rest.size() < needed) return {.consumed = at, .wanted = needed};
    const Bytes body = rest.subspan(outer.header, needed - outer.header);
    const Bytes nonce = body.subspan(kMessageName.size(), kShortNonce), box = body.subspan(kMessageHead);
    if (as_text(body.first(kMessageName.size())) != kMessageName || !session.accept(nonce)) {
      return {.kind = Kind::kUnfit};
    }
    constexpr size_t kStreamHead = 32;  // of the cipher's stream, which a box uses for its MAC
    uint8_t* const text = scratch(kStreamHead + seen);
    if (text == nullptr) return {.kind = Kind::kUnfit};
    const Nonce opening = nonce_of("CurveZMQMESSAGEC", nonce);
    if (whole) {
      if (sodium.open(text + kStreamHead, box.data(), box.size(), opening.data(), session.key.data()) != 0) {
        return {.kind = Kind::kUnfit};
      }
    } else {
      std::copy_n(box.data() + Sodium::kMac, seen, text + kStreamHead);
      (void)sodium.stream(text, text, kStreamHead + seen, opening.data(), session.key.data());
    }
    const uint8_t flags = text[kStreamHead];
    const Frame frame{
        .size = text_size - 1, .more = (flags & kInnerMore) != 0, .command = (flags & kInnerCommand) != 0};
    if (flags > (kInnerMore | kInnerCommand) || (frame.more && frame.command) || (frame.command && !whole)) {
      return {.kind = Kind::kUnfit};
    }
    const Bytes inner{text + kStreamHead + 1, seen - 1};
    at += needed;
    switch (const Role role = role_of(frame, state, max_message_); role) {
      case Role::kCommand:
        if (const Obeyed obeyed = obey(inner); obeyed.kind == Kind::kAnswer) {
          if (!seal(session, kInnerCommand, std::span(obeyed.answer).first(obeyed.size))) return {.kind = Kind::kUnfit};
          return {.kind = Kind::kAnswer, .consumed = at, .payload = sealed_};
        } else if (obeyed.kind == Kind::kUnfit) {
          return {.kind = Kind::kUnfit, .consumed = at};
        }
        break;
      case Role::kVersion:
        take_version(state, inner);
        break;
      case Role::kPayload:
        state.frames = 0;
        return {.kind = Kind::kMessage, .consumed = at, .payload = inner};
      case Role::kLongPayload:
      case Role::kWaste:
        if (!waste(state, frame, role, inner, outer.header + outer.size, text_size - seen)) {
          return {.kind = Kind::kUnfit};
        }
        break;
    }
  }
}

uint8_t* Curve::scratch(size_t size) const noexcept {
  try {
    if (opened_.size() > kLargeScratch && size <= kLargeScratch) opened_ = {};
    if (opened_.size() < size) opened_.resize(size);
    return opened_.data();
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

// Puts a frame behind what is in `sealed_`, which begins anew with a command or a message's first frame.
bool Curve::seal(Session& session, uint8_t flags, Bytes body) const noexcept {
  const size_t size = body.size() + kOverhead;
  try {
    const size_t before = flags == 0 ? sealed_.size() : 0;
    if (before == 0 && sealed_.capacity() > kLargeScratch && size <= kLargeScratch) sealed_ = {};
    sealed_.resize(before + 9 + size);
    uint8_t* at = put_frame_header(sealed_.data() + before, 0, size);
    at = std::copy(kMessageName.begin(), kMessageName.end(), at);
    const auto own = session.next_nonce();
    at = std::copy(own.begin(), own.end(), at);
    const Nonce sealing = nonce_of("CurveZMQMESSAGES", own);
    // The text lies where its box ends, and is sealed in place.
    uint8_t* const text = at + Sodium::kMac;
    text[0] = flags;
    std::copy(body.begin(), body.end(), text + 1);
    (void)options_.sodium.seal(at, text, body.size() + 1, sealing.data(), session.key.data());
    sealed_.resize(static_cast<size_t>(at - sealed_.data()) + Sodium::kMac + 1 + body.size());
    return true;
  } catch (const std::bad_alloc&) {
    return false;
  }
}

Protocol::Packed Curve::pack(ProtocolState& state, Bytes payload, Header& /*header*/) const noexcept {
  Session& session = session_of(state);
  sealed_.clear();
  static constexpr auto kVersion = literal("ull1");
  if (!seal(session, kInnerMore, kVersion) || !seal(session, 0, payload)) return {.valid = false};
  return {.payload = sealed_};
}

size_t Curve::pack_header(size_t /*size*/, Header& /*header*/) const noexcept { return 0; }

Bytes Curve::ping(ProtocolState& state) const noexcept {
  static constexpr auto kPing = literal("\4PING\0\0");  // with no time to live
  return seal(session_of(state), kInnerCommand, kPing) ? Bytes(sealed_) : Bytes{};
}

}  // namespace ull
