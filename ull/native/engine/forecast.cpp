#include "engine/forecast.h"

#include <algorithm>
#include <cmath>
#include <tuple>

#include "engine/queue.h"

namespace ull {
namespace {

constexpr int64_t kLookNs = 50'000'000;  // between two looks at the load
constexpr double kMemoryNs = 2e9;        // in which an old load is forgotten
constexpr double kMostShare = 0.9;
constexpr double kMargins = 4.0;  // standard deviations

}  // namespace

Forecast::Forecast(EngineShared& shared, const CachedPages& cached, const ExecutorInfo& info)
    : shared_(shared),
      cached_(cached),
      chunk_(info.prefill_chunk),
      forced_(info.prompt_forced()),
      prefill_draws_(info.prefill_draws) {
  works_.reserve(shared.slots + 1);
}

bool Forecast::reads_last_token(const RequestSlot& request) const noexcept {
  return prefill_draws_ && request.choices == nullptr;
}

Forecast::Work Forecast::work_of(const RequestSlot& request, int from, bool begun) const noexcept {
  Work work{.request = &request, .begun = begun, .due_ns = request.deadline_ns != 0 ? request.deadline_ns : kNever};
  const int prompt = request.prompt_tokens;
  const bool reads_last = reads_last_token(request);
  if (from < prompt - 1 || ((reads_last || request.max_tokens == 0) && from < prompt)) {
    // The last tokens of the prompt, where a round reads several, are read at the price of a chunk.
    const StepCosts::Estimate prefill = costs_.prefill(from, prompt, chunk_);
    work.first_ns += prefill.ns;
    work.margin_ns += prefill.margin;
  }
  if (request.prompt_logprobs != nullptr) {
    const PromptLogprobs& logprobs = *request.prompt_logprobs;
    const int found = logprobs.found();  // a pass stands at the position that the last has reached: this is their mean
    const StepCosts::Estimate scores =
        costs_.scores(logprobs.passes_behind(found), logprobs.size() - found, (found + logprobs.size()) / 2);
    work.first_ns += scores.ns;
    work.margin_ns += scores.margin;
  }
  if (request.max_tokens == 0) return work;
  if (request.choices != nullptr) {  // the answer comes as a whole
    const Choices& choices = *request.choices;
    const StepCosts::Estimate scores = costs_.scores(choices.passes(), choices.nodes(), prompt);
    work.first_ns += scores.ns;
    work.margin_ns += scores.margin;
    return work;
  }
  const int completed = std::max(0, from + 1 - prompt);
  const int left = std::max(0, request.max_tokens - completed);
  const bool read_with_first_round = reads_last ? from < prompt : from < prompt - 1 && forced_ > 0;
  const int rounds_for = std::max(0, left - (read_with_first_round ? 1 : 0));
  const StepCosts::Estimate decode = costs_.decode(request.speculation, std::max(from, prompt), rounds_for);
  const StepCosts::Estimate first = costs_.round(request.speculation, std::max(from, prompt));
  const double first_round = read_with_first_round ? 0.0 : std::min(first.ns, decode.ns);
  work.first_ns += first_round;
  work.rest_ns = decode.ns - first_round;
  work.margin_ns += decode.margin;
  return work;
}

void Forecast::collect(const RequestSlot* except) noexcept {
  costs_ = shared_.costs.load();
  works_.clear();
  for (uint32_t index = 0; index < shared_.slots; ++index) {
    const RequestSlot& request = shared_.slot(index);
    if (&request == except) continue;
    const SlotState state = request.state.load(std::memory_order_acquire);
    if (!is_active(state)) continue;
    works_.push_back(work_of(request, request.reached.load(std::memory_order_relaxed), state != SlotState::kQueued));
  }
}

StepCosts::Estimate Forecast::urgent_share(Priority priority, double ns, int64_t now) noexcept {
  Load& load = loads_[static_cast<size_t>(priority)];
  const int64_t urgent_ns = costs_.urgent_ns(priority);
  if (const int64_t passed = now - load.seen_ns; passed >= kLookNs) {
    const double newest = static_cast<double>(urgent_ns - load.urgent_ns) / static_cast<double>(passed);
    load.share += (std::min(newest, kMostShare) - load.share) * -std::expm1(-static_cast<double>(passed) / kMemoryNs);
    load.urgent_ns = urgent_ns;
    load.seen_ns = now;
  }
  const int64_t requests = costs_.urgent_requests(priority);
  if (requests == 0) return {};
  const double added = ns * load.share / (1.0 - load.share);
  // So many come in that time, each about as long as all have been: their number varies as a Poisson process does.
  const double each = static_cast<double>(urgent_ns) / static_cast<double>(requests);
  return {added, kMargins * std::sqrt(added * each)};
}

Expected Forecast::of(const RequestSlot& request, int64_t now) noexcept {
  collect(&request);
  Expected expected;
  expected.cached = std::min(cached_.likely(request.prompt()), request.prompt_tokens - 1);
  const Work own = work_of(request, expected.cached, false);
  StepCosts::Estimate blocked;  // by the step of something less urgent that is under way, or about to be
  const bool idle = std::ranges::none_of(works_, &Work::begun);
  for (const Work& work : works_) {
    if (work.request->priority <= request.priority || !(work.begun || idle)) continue;
    const int reached = work.request->reached.load(std::memory_order_relaxed);
    const Choices* choices = work.request->choices.get();
    const bool reads = reached < work.request->prompt_tokens - (reads_last_token(*work.request) ? 0 : 1);
    const PromptLogprobs* prompt = work.request->prompt_logprobs.get();
    StepCosts::Estimate step = reads ? costs_.prefill(reached, reached + chunk_, chunk_)
                               : prompt != nullptr && !prompt->scored()
                                   ? costs_.scores(1, prompt->widest(), prompt->found())
                               : choices != nullptr ? costs_.scores(1, choices->widest(), reached)
                                                    : costs_.round(work.request->speculation, reached);
    if (!work.begun) step = {0.0, step.ns + step.margin};
    if (step.ns + step.margin > blocked.ns + blocked.margin) blocked = step;
  }
  std::erase_if(works_, [&](const Work& work) { return work.request->priority > request.priority; });
  works_.push_back(own);
  const auto place = [](const Work& work) {
    return std::tuple(work.request->priority, !work.begun, work.due_ns, work.request->timeline.admitted_ns);
  };
  std::ranges::sort(works_, {}, place);

  double time = blocked.ns, late = blocked.ns + blocked.margin;
  bool behind = false;
  for (const Work& work : works_) {
    const bool is_own = work.request == &request;
    if (is_own) expected.first_ns = now + static_cast<int64_t>(time + work.first_ns);
    time += work.first_ns + work.rest_ns;
    late += work.first_ns + work.rest_ns + work.margin_ns;
    if (is_own) {
      const StepCosts::Estimate urgent = urgent_share(request.priority, late, now);
      expected.first_ns += static_cast<int64_t>(urgent.ns * (time - work.rest_ns) / std::max(late, 1.0));
      expected.done_ns = now + static_cast<int64_t>(time + urgent.ns * time / std::max(late, 1.0));
      expected.late_ns = now + static_cast<int64_t>(late + urgent.ns + urgent.margin);
      behind = true;
      continue;
    }
    if (!behind || work.due_ns == kNever || work.request->priority != request.priority) continue;
    const double without = late - own.first_ns - own.rest_ns - own.margin_ns;
    const auto misses = [&](double ns) { return now + static_cast<int64_t>(ns) > work.due_ns; };
    if (misses(late) && !misses(without)) expected.keeps_promises = false;
  }
  return expected;
}

int64_t Forecast::next_end_ns() noexcept {
  collect(nullptr);
  std::erase_if(works_, [](const Work& work) { return !work.begun; });
  const auto least =
      std::ranges::min_element(works_, {}, [](const Work& work) { return work.first_ns + work.rest_ns; });
  return least == works_.end() ? 0 : static_cast<int64_t>(least->first_ns + least->rest_ns);
}

}  // namespace ull
