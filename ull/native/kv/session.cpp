#include "kv/session.h"

#include <algorithm>

namespace ull {

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
    : pool_(options.page_count), sessions_(static_cast<size_t>(options.max_sessions)), reuse_(options.reuse) {
  for (Session& session : sessions_) {
    session.tokens_.reserve(static_cast<size_t>(options.context));
    session.pages_.reserve(static_cast<size_t>(pages_for(options.context)));
  }
}

Session& SessionCache::open(std::span<const int32_t> prompt) noexcept {
  Session* best = nullptr;
  int shared = 0;
  const std::span<const int32_t> reusable = prompt.first(prompt.size() - 1);
  for (Session& session : sessions_) {
    const auto ends = std::mismatch(session.tokens_.begin(), session.tokens_.end(), reusable.begin(), reusable.end());
    const int common = static_cast<int>(ends.second - reusable.begin());
    if (common > shared) {
      best = &session;
      shared = common;
    }
  }

  ++admissions_;
  if (best != nullptr && 2 * shared >= best->size()) {
    truncate(*best, shared);
    best->used_at_ = admissions_;
    return *best;
  }

  if (best != nullptr) best->used_at_ = admissions_;  // its prefix is in use: the last to be evicted
  Session* session = free_session();
  if (session == nullptr) {
    session = least_recently_used(nullptr);
    if (session == best) best = nullptr;  // the only session there is
    evict(*session);
  }
  session->used_at_ = admissions_;
  if (best != nullptr) {
    for (int page = 0; page < shared / kPageTokens; ++page) {
      pool_.hold(best->pages_[static_cast<size_t>(page)]);
      session->pages_.push_back(best->pages_[static_cast<size_t>(page)]);
    }
    session->append(best->tokens().first(static_cast<size_t>(shared / kPageTokens * kPageTokens)));
    session->drafted_ = std::min(best->drafted_, session->size());
  }
  return *session;
}

Status SessionCache::reserve(Session& session, int tokens) noexcept {
  while (static_cast<int>(session.pages_.size()) < pages_for(tokens)) {
    const int32_t page = pool_.take();
    if (page >= 0) {
      session.pages_.push_back(page);
      continue;
    }
    Session* victim = least_recently_used(&session);
    if (victim == nullptr) return Status::kOutOfPages;
    evict(*victim);
  }
  return Status::kOk;
}

void SessionCache::close(Session& session, int kept) noexcept {
  const int tokens = reuse_ ? std::min(kept, session.size()) : 0;
  if (tokens > 0) {
    truncate(session, tokens);  // and gives back what was reserved ahead
  } else {
    evict(session);
  }
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

Session* SessionCache::least_recently_used(const Session* except) noexcept {
  Session* oldest = nullptr;
  for (Session& session : sessions_) {
    if (&session == except || session.used_at_ == 0) continue;
    if (oldest == nullptr || session.used_at_ < oldest->used_at_) oldest = &session;
  }
  return oldest;
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
