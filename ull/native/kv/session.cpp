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

void Session::append(std::span<const int32_t> tokens) noexcept {
  tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
  while ((hashes_.size() + 1) * kPageTokens <= tokens_.size()) {
    const uint64_t before = hashes_.empty() ? 0 : hashes_.back();
    hashes_.push_back(page_hash(before, tokens_.data() + hashes_.size() * kPageTokens));
    cached_->add(hashes_.back());
  }
}

void Session::shorten(int tokens) noexcept {
  tokens_.resize(static_cast<size_t>(tokens));
  drafted_ = std::min(drafted_, tokens);
  while (hashes_.size() * kPageTokens > tokens_.size()) {
    cached_->remove(hashes_.back());
    hashes_.pop_back();
  }
}

SessionCache::SessionCache(const Options& options)
    : pool_(options.page_count),
      sessions_(static_cast<size_t>(options.max_sessions) + static_cast<size_t>(options.max_open) - 1),
      max_sessions_(options.max_sessions),
      reuse_(options.reuse),
      copies_(options.copies),
      shares_open_(options.reuse && options.shares_open) {
  const double bytes = static_cast<double>(sizeof(int32_t)) * static_cast<double>(sessions_.size()) * options.context;
  allocate_for(
      "sessions: " + std::to_string(options.max_sessions) + " of up to " + std::to_string(options.context) + " tokens",
      bytes, [&] {
        wanted_.reserve(static_cast<size_t>(pages_for(options.context)));
        for (Session& session : sessions_) {
          session.tokens_.reserve(static_cast<size_t>(options.context));
          session.hashes_.reserve(static_cast<size_t>(pages_for(options.context)));
          session.pages_.reserve(static_cast<size_t>(pages_for(options.context)));
          session.cached_ = &cached_;
        }
      });
}

// Of max_sessions + max_open - 1 sessions, at most max_open - 1 are open and at most half of max_sessions pinned: one
// is free, or can be evicted.
Session& SessionCache::open(std::span<const int32_t> prompt, uint64_t pin) noexcept {
  ++admissions_;
  const Match match = find(prompt.first(prompt.size() - 1), pin);
  Session* session = nullptr;
  if (!match.continues) {
    session = free_session();
    if (session == nullptr) session = least_recently_used(match.session);
  }
  if (session == nullptr) session = match.continues ? match.session : least_recently_used();
  const bool in_place = session == match.session;  // also where the match is the only one that can be had
  if (!in_place) evict(*session);
  session->used_at_ = admissions_;
  session->open_ = true;
  if (in_place) {
    cut(*session, match.shared);
  } else if (match.session != nullptr) {
    fork(match, *session);
  }
  return *session;
}

SessionCache::Match SessionCache::find(std::span<const int32_t> reusable, uint64_t pin) noexcept {
  wanted_.clear();
  while ((wanted_.size() + 1) * kPageTokens <= reusable.size()) {
    const uint64_t before = wanted_.empty() ? 0 : wanted_.back();
    wanted_.push_back(page_hash(before, reusable.data() + wanted_.size() * kPageTokens));
  }
  Match best;
  for (Session& session : sessions_) {
    if (session.open_ && !shares_open_) continue;
    const int shared = shared_with(session, reusable);
    const int lost = session.size() - shared;
    const bool mostly = 2 * shared >= static_cast<int>(reusable.size());
    const bool ours = !session.open_ && (session.pin_ == 0 || session.pin_ == pin);
    const bool continues = ours && shared > 0 && (lost <= shared || (lost <= kPageTokens && mostly));
    if (!continues && shared < (copies_ ? kLeastCopied : kPageTokens)) continue;
    const bool better = shared > best.shared || (shared == best.shared && session.size() < best.session->size());
    if (better) best = {&session, shared, continues};
  }
  // Equal names are not equal tokens for certain.
  const auto begin = reusable.begin();
  if (best.shared > 0 && !std::equal(begin, begin + best.shared, best.session->tokens_.begin())) return {};
  return best;
}

int SessionCache::shared_with(const Session& session, std::span<const int32_t> text) const noexcept {
  size_t same = 0;  // pages; where one differs, so do all behind it
  size_t beyond = std::min(session.hashes_.size(), wanted_.size()) + 1;
  while (beyond - same > 1) {
    const size_t middle = same + (beyond - same) / 2;
    (session.hashes_[middle - 1] == wanted_[middle - 1] ? same : beyond) = middle;
  }
  const auto at = static_cast<ptrdiff_t>(same * kPageTokens);
  const auto ends = std::mismatch(session.tokens_.begin() + at, session.tokens_.end(), text.begin() + at, text.end());
  return static_cast<int>(ends.second - text.begin());
}

// Shares the match's prefix with a session that holds nothing yet.
void SessionCache::fork(const Match& match, Session& session) noexcept {
  Session& source = *match.session;
  source.used_at_ = admissions_;  // its prefix is in use: the last to be evicted
  int taken = match.shared / kPageTokens * kPageTokens;
  session.pages_.assign(source.pages_.begin(), source.pages_.begin() + pages_for(taken));
  for (const int32_t page : session.pages_) pool_.hold(page);
  if (const int rest = match.shared - taken; copies_ && rest >= kLeastCopied) {
    if (const int32_t page = take_page(&source); page >= 0) {
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
    const int32_t page = take_page();
    if (page < 0) return Status::kOutOfPages;
    session.pages_.push_back(page);
  }
  return Status::kOk;
}

void SessionCache::close(Session& session, int kept, uint64_t pin) noexcept {
  const int whole = session.size() - session.copy_.tokens;  // without what was to be copied and has not been
  session.copied();
  truncate(session, reuse_ ? std::min(kept, whole) : 0);  // and gives back what was reserved ahead
  session.open_ = false;
  if (pin != 0) {
    unpin(pin);
    session.pin_ = session.size() > 0 && pinned() < max_sessions_ / 2 ? pin : 0;
  }
  Session* other = session.size() > 0 && session.pin_ == 0 ? that_begins_with(session) : nullptr;
  if (other != nullptr) other->used_at_ = session.used_at_;
  if (other != nullptr || session.size() == 0) evict(session);
  const auto idle =
      std::ranges::count_if(sessions_, [](const Session& each) { return each.used_at_ != 0 && !each.open_; });
  if (idle > max_sessions_) {  // those that are open have places of their own
    if (Session* oldest = least_recently_used(); oldest != nullptr) evict(*oldest);
  }
}

void SessionCache::unpin(uint64_t pin) noexcept {
  for (Session& session : sessions_) {
    if (session.pin_ == pin) session.pin_ = 0;
  }
}

void SessionCache::unpin_all() noexcept {
  for (Session& session : sessions_) session.pin_ = 0;
}

int SessionCache::resident() const noexcept {
  return static_cast<int>(
      std::count_if(sessions_.begin(), sessions_.end(), [](const Session& session) { return session.used_at_ != 0; }));
}

int SessionCache::pinned() const noexcept {
  return static_cast<int>(
      std::count_if(sessions_.begin(), sessions_.end(), [](const Session& session) { return session.pin_ != 0; }));
}

int SessionCache::pages_pinned() const noexcept {
  int pages = 0;
  for (const Session& session : sessions_) pages += session.pin_ != 0 ? static_cast<int>(session.pages_.size()) : 0;
  return pages;
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
    if (const size_t pages = session.hashes_.size(); pages > 0 && other.hashes_[pages - 1] != session.hashes_.back()) {
      continue;
    }
    if (std::equal(session.tokens_.begin(), session.tokens_.end(), other.tokens_.begin())) return &other;
  }
  return nullptr;
}

Session* SessionCache::least_recently_used(const Session* except) noexcept {
  Session* oldest = nullptr;
  for (Session& session : sessions_) {
    if (&session == except || !session.evictable()) continue;
    if (oldest == nullptr || session.used_at_ < oldest->used_at_) oldest = &session;
  }
  return oldest;
}

int32_t SessionCache::take_page(const Session* except) noexcept {
  for (;;) {
    if (const int32_t page = pool_.take(); page >= 0) return page;
    Session* victim = least_recently_used(except);
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
    const int32_t own = take_page();
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
  session.shorten(tokens);
  while (static_cast<int>(session.pages_.size()) > pages_for(tokens)) {
    pool_.release(session.pages_.back());
    session.pages_.pop_back();
  }
}

void SessionCache::evict(Session& session) noexcept {
  truncate(session, 0);
  session.used_at_ = 0;
  session.pin_ = 0;
}

}  // namespace ull
