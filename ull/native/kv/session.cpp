#include "kv/session.h"

#include <algorithm>
#include <string>

#include "base/allocation.h"

namespace ull {
namespace {

constexpr int kLeastCopied = 8;  // tokens; fewer are read with the rest of the prompt in less than a step's time

}  // namespace

PagePool::PagePool(int page_count) : holders_(static_cast<size_t>(page_count), uint16_t{0}) {
  free_.reserve(static_cast<size_t>(page_count));
  for (int32_t page = page_count - 1; page >= 0; --page) free_.push_back(page);
}

int32_t PagePool::take() noexcept {
  if (free_.empty()) return -1;
  const int32_t page = free_.back();
  free_.pop_back();
  holders_[static_cast<size_t>(page)] = 1;
  return page;
}

void PagePool::release(int32_t page) noexcept {
  if (--holders_[static_cast<size_t>(page)] == 0) free_.push_back(page);
}

SessionCache::SessionCache(const Options& options)
    : pool_(options.page_count),
      sessions_(static_cast<size_t>(options.max_sessions)),
      reuse_(options.reuse),
      copies_(options.copies) {
  const double bytes = static_cast<double>(sizeof(int32_t)) * options.max_sessions * options.context;
  allocate_for(
      "sessions: " + std::to_string(options.max_sessions) + " of up to " + std::to_string(options.context) + " tokens",
      bytes, [&] {
        for (Session& session : sessions_) {
          session.tokens_.reserve(static_cast<size_t>(options.context));
          session.pages_.reserve(static_cast<size_t>(pages_for(options.context)));
        }
      });
}

Session& SessionCache::open(std::span<const int32_t> prompt) noexcept {
  ++admissions_;
  const Match match = find(prompt.first(prompt.size() - 1));
  Session* session = nullptr;
  if (!match.continues) {
    session = free_session();
    if (session == nullptr) session = least_recently_used(match.session);
  }
  if (session == nullptr) {  // or it is the only one there is
    match.session->used_at_ = admissions_;
    cut(*match.session, match.shared);
    return *match.session;
  }
  evict(*session);
  session->used_at_ = admissions_;
  if (match.session != nullptr) fork(match, *session);
  return *session;
}

SessionCache::Match SessionCache::find(std::span<const int32_t> reusable) noexcept {
  Match best;
  for (Session& session : sessions_) {
    const auto ends = std::mismatch(session.tokens_.begin(), session.tokens_.end(), reusable.begin(), reusable.end());
    const int shared = static_cast<int>(ends.second - reusable.begin());
    const int lost = session.size() - shared;
    const bool mostly = 2 * shared >= static_cast<int>(reusable.size());
    const bool continues = shared > 0 && (lost <= shared || (lost <= kPageTokens && mostly));
    if (!continues && shared < (copies_ ? kLeastCopied : kPageTokens)) continue;
    const bool better = shared > best.shared || (shared == best.shared && session.size() < best.session->size());
    if (better) best = {&session, shared, continues};
  }
  return best;
}

// Shares the match's prefix with a session that holds nothing yet.
void SessionCache::fork(const Match& match, Session& session) noexcept {
  Session& source = *match.session;
  source.used_at_ = admissions_;  // its prefix is in use: the last to be evicted
  int taken = match.shared / kPageTokens * kPageTokens;
  session.pages_.assign(source.pages_.begin(), source.pages_.begin() + pages_for(taken));
  for (const int32_t page : session.pages_) pool_.hold(page);
  if (const int rest = match.shared - taken; copies_ && rest >= kLeastCopied) {
    if (const int32_t page = take_page(&session, &source); page >= 0) {
      session.copy_ = {source.pages_[static_cast<size_t>(pages_for(taken))], page, rest};
      session.pages_.push_back(page);
      taken = match.shared;
    }
  }
  session.append(source.tokens().first(static_cast<size_t>(taken)));
  session.drafted_ = std::min(source.drafted_, taken);
}

Status SessionCache::reserve(Session& session, int tokens) noexcept {
  while (static_cast<int>(session.pages_.size()) < pages_for(tokens)) {
    const int32_t page = take_page(&session);
    if (page < 0) return Status::kOutOfPages;
    session.pages_.push_back(page);
  }
  return Status::kOk;
}

void SessionCache::close(Session& session, int kept) noexcept {
  const int whole = session.size() - session.copy_.tokens;  // without what was to be copied and has not been
  session.copied();
  truncate(session, reuse_ ? std::min(kept, whole) : 0);  // and gives back what was reserved ahead
  Session* other = session.size() > 0 ? that_begins_with(session) : nullptr;
  if (other != nullptr) other->used_at_ = session.used_at_;
  if (other != nullptr || session.size() == 0) evict(session);
}

int SessionCache::resident() const noexcept {
  return static_cast<int>(
      std::count_if(sessions_.begin(), sessions_.end(), [](const Session& session) { return session.used_at_ != 0; }));
}

Session* SessionCache::free_session() noexcept {
  for (Session& session : sessions_) {
    if (session.used_at_ == 0) return &session;
  }
  return nullptr;
}

Session* SessionCache::that_begins_with(const Session& session) noexcept {
  for (Session& other : sessions_) {
    if (&other == &session || other.size() < session.size()) continue;
    if (std::equal(session.tokens_.begin(), session.tokens_.end(), other.tokens_.begin())) return &other;
  }
  return nullptr;
}

Session* SessionCache::least_recently_used(const Session* except, const Session* other) noexcept {
  Session* oldest = nullptr;
  for (Session& session : sessions_) {
    if (&session == except || &session == other || session.used_at_ == 0) continue;
    if (oldest == nullptr || session.used_at_ < oldest->used_at_) oldest = &session;
  }
  return oldest;
}

int32_t SessionCache::take_page(const Session* except, const Session* other) noexcept {
  for (;;) {
    if (const int32_t page = pool_.take(); page >= 0) return page;
    Session* victim = least_recently_used(except, other);
    if (victim == nullptr) return -1;
    evict(*victim);
  }
}

// Keeps the first `tokens` tokens. If the cut falls inside a page that another session holds too, and which must not be
// written, the session gets a page of its own, into which they are to be copied.
void SessionCache::cut(Session& session, int tokens) noexcept {
  const size_t last = static_cast<size_t>(tokens / kPageTokens);
  if (copies_ && tokens % kPageTokens >= kLeastCopied && pool_.shared(session.pages_[last])) {
    const int32_t shared = session.pages_[last];
    const int32_t own = take_page(&session);
    if (own >= 0 && pool_.shared(shared)) {
      session.copy_ = {shared, own, tokens % kPageTokens};
      session.pages_[last] = own;
      pool_.release(shared);
    } else if (own >= 0) {  // the other session had to go for it: the page has become this one's own
      pool_.release(own);
    }
  }
  truncate(session, tokens);
}

// Keeps the first `tokens` tokens, or fewer: a page that another session holds too must not be written, so if the cut
// falls inside one it moves down to that page's start.
void SessionCache::truncate(Session& session, int tokens) noexcept {
  const int last = tokens / kPageTokens;
  if (tokens % kPageTokens != 0 && pool_.shared(session.pages_[static_cast<size_t>(last)])) {
    tokens = last * kPageTokens;
  }
  session.tokens_.resize(static_cast<size_t>(tokens));
  session.drafted_ = std::min(session.drafted_, tokens);
  while (static_cast<int>(session.pages_.size()) > pages_for(tokens)) {
    pool_.release(session.pages_.back());
    session.pages_.pop_back();
  }
}

void SessionCache::evict(Session& session) noexcept {
  truncate(session, 0);
  session.used_at_ = 0;
}

}  // namespace ull
