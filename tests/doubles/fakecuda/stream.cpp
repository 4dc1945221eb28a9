// Streams, each with a thread that runs its operations in turn, so that the host really waits; events; capture.
#include <atomic>
#include <chrono>
#include <thread>

#include "fake.h"

namespace fakecuda {

namespace {

struct Event {
  std::mutex lock;
  std::condition_variable changed;
  int64_t recorded = 0;  // how often record() was called
  int64_t completed = 0;
  std::chrono::steady_clock::time_point time;
};

Handles<Event>& events() {
  static auto* handles = new Handles<Event>;
  return *handles;
}

void work(const std::shared_ptr<Stream>& stream) {
  std::unique_lock guard(stream->lock);
  while (true) {
    stream->changed.wait(guard, [&] { return !stream->queue.empty() || stream->ended; });
    if (stream->queue.empty()) return;
    const auto operation = std::move(stream->queue.front());
    stream->queue.pop_front();
    stream->running = true;
    guard.unlock();
    if (sticky_error() == kSuccess) operation();  // after a sticky error, work is discarded
    guard.lock();
    stream->running = false;
    stream->changed.notify_all();
  }
}

std::shared_ptr<Stream> start_stream(bool blocking) {
  auto stream = std::make_shared<Stream>();
  stream->blocking = blocking;
  std::thread(work, stream).detach();
  return stream;
}

const std::shared_ptr<Stream>& default_stream() {
  static auto* stream = new std::shared_ptr<Stream>(start_stream(true));
  return *stream;
}

void drain(Stream& stream) {
  std::unique_lock guard(stream.lock);
  stream.changed.wait(guard, [&] { return stream.queue.empty() && !stream.running; });
}

Result create(void** handle, unsigned flags) {
  if (const Result result = ready(); result != kSuccess) return result;
  *handle = streams().add(start_stream((flags & 1U) == 0));  // CU_STREAM_NON_BLOCKING
  return kSuccess;
}

Result create_with_priority(void** handle, unsigned flags, int /*priority*/) { return create(handle, flags); }

Result destroy(void* handle) {
  const auto stream = streams().remove(handle);
  if (stream == nullptr) return kInvalidHandle;
  const std::lock_guard guard(stream->lock);
  stream->ended = true;
  stream->changed.notify_all();
  return ready();
}

Result synchronise(void* handle) {
  if (const Result result = ready(); result != kSuccess) return result;
  const auto stream = find_stream(handle);
  return stream == nullptr ? kInvalidHandle : wait_for(stream);
}

// Who asks spins, on a core that the work needs here: the answer comes when the work is done, or after some time.
constexpr std::chrono::milliseconds kQuery{50};

Result query(void* handle) {
  if (const Result result = ready(); result != kSuccess) return result;
  const auto stream = find_stream(handle);
  if (stream == nullptr) return kInvalidHandle;
  std::unique_lock guard(stream->lock);
  if (stream->capture != nullptr) {
    stream->capture_broken = true;
    return kCaptureUnsupported;
  }
  guard.unlock();
  const bool done = rests(*stream, kQuery);
  if (const Result result = ready(); result != kSuccess) return result;  // the work may have failed meanwhile
  return done ? kSuccess : kNotReady;
}

Result begin_capture(void* handle, int /*mode*/) {
  if (const Result result = ready(); result != kSuccess) return result;
  const auto stream = find_stream(handle);
  if (stream == nullptr) return kInvalidHandle;
  if (stream == default_stream()) return kCaptureUnsupported;
  if (stream->capture != nullptr) return kIllegalState;
  stream->capture = std::make_shared<Graph>();
  stream->capture_broken = false;
  return kSuccess;
}

Result is_capturing(void* handle, int* status) {
  const auto stream = find_stream(handle);
  if (stream == nullptr) return kInvalidHandle;
  *status = stream->capture == nullptr ? 0 : stream->capture_broken ? 2 : 1;
  return ready();
}

Result create_event(void** handle, unsigned /*flags*/) {
  if (const Result result = ready(); result != kSuccess) return result;
  *handle = events().add(std::make_shared<Event>());
  return kSuccess;
}

Result destroy_event(void* handle) { return events().remove(handle) == nullptr ? kInvalidHandle : ready(); }

Result record(void* handle, void* stream_handle) {
  if (const Result result = ready(); result != kSuccess) return result;
  const auto event = events().find(handle);
  const auto stream = find_stream(stream_handle);
  if (event == nullptr || stream == nullptr) return kInvalidHandle;
  const auto run = [event] {
    const std::lock_guard guard(event->lock);
    event->time = std::chrono::steady_clock::now();
    ++event->completed;
    event->changed.notify_all();
  };
  if (stream->capture == nullptr) {
    const std::lock_guard guard(event->lock);
    ++event->recorded;
  }
  return submit(stream, {NodeType::kEventRecord, run, nullptr});
}

Result event_query(void* handle) {
  if (const Result result = ready(); result != kSuccess) return result;
  const auto event = events().find(handle);
  if (event == nullptr) return kInvalidHandle;
  const std::lock_guard guard(event->lock);
  return event->completed >= event->recorded ? kSuccess : kNotReady;
}

void wait_for_event(Event& event) {
  std::unique_lock guard(event.lock);
  const int64_t goal = event.recorded;
  while (event.completed < goal && sticky_error() == kSuccess) {
    event.changed.wait_for(guard, std::chrono::milliseconds(10));
  }
}

Result event_synchronise(void* handle) {
  if (const Result result = ready(); result != kSuccess) return result;
  const auto event = events().find(handle);
  if (event == nullptr) return kInvalidHandle;
  wait_for_event(*event);
  return sticky_error();
}

Result stream_wait_event(void* stream_handle, void* handle, unsigned /*flags*/) {
  if (const Result result = ready(); result != kSuccess) return result;
  const auto event = events().find(handle);
  const auto stream = find_stream(stream_handle);
  if (event == nullptr || stream == nullptr) return kInvalidHandle;
  if (stream->capture != nullptr) return kNotSupported;  // forks within a capture: ull has none
  enqueue(stream, [event] { wait_for_event(*event); });
  return kSuccess;
}

Result elapsed_time(float* milliseconds, void* start, void* end) {
  if (const Result result = ready(); result != kSuccess) return result;
  const auto first = events().find(start);
  const auto second = events().find(end);
  if (first == nullptr || second == nullptr) return kInvalidHandle;
  if (event_query(start) != kSuccess || event_query(end) != kSuccess) return kNotReady;
  *milliseconds = std::chrono::duration<float, std::milli>(second->time - first->time).count();
  return kSuccess;
}

const Exports exports{
    {"cuStreamCreate", address_of(create)},
    {"cuStreamCreateWithPriority", address_of(create_with_priority)},
    {"cuStreamDestroy", address_of(destroy)},
    {"cuStreamSynchronize", address_of(synchronise)},
    {"cuStreamQuery", address_of(query)},
    {"cuStreamBeginCapture", address_of(begin_capture)},
    {"cuStreamIsCapturing", address_of(is_capturing)},
    {"cuStreamWaitEvent", address_of(stream_wait_event)},
    {"cuEventCreate", address_of(create_event)},
    {"cuEventDestroy", address_of(destroy_event)},
    {"cuEventRecord", address_of(record)},
    {"cuEventQuery", address_of(event_query)},
    {"cuEventSynchronize", address_of(event_synchronise)},
    {"cuEventElapsedTime", address_of(elapsed_time)},
};

}  // namespace

Handles<Stream>& streams() {
  static auto* handles = new Handles<Stream>;
  return *handles;
}

std::shared_ptr<Stream> find_stream(void* handle) {
  return reinterpret_cast<uint64_t>(handle) <= 2 ? default_stream() : streams().find(handle);
}

void enqueue(const std::shared_ptr<Stream>& stream, std::function<void()> operation) {
  // The legacy stream and blocking streams wait for each other; here the host waits for them.
  if (stream == default_stream()) {
    for (const auto& other : streams().all()) {
      if (other->blocking) drain(*other);
    }
  } else if (stream->blocking) {
    drain(*default_stream());
  }
  const std::lock_guard guard(stream->lock);
  stream->queue.push_back(std::move(operation));
  stream->changed.notify_all();
}

Result submit(const std::shared_ptr<Stream>& stream, Node node) {
  if (stream->capture != nullptr) {
    if (stream->capture_broken) return kCaptureInvalidated;
    stream->capture->nodes.push_back(std::make_shared<Node>(std::move(node)));
  } else {
    enqueue(stream, std::move(node.run));
  }
  return kSuccess;
}

Result wait_for(const std::shared_ptr<Stream>& stream) {
  if (stream->capture != nullptr) {
    stream->capture_broken = true;
    return kCaptureUnsupported;
  }
  drain(*stream);
  return sticky_error();
}

bool rests(Stream& stream, std::chrono::milliseconds patience) {
  std::unique_lock guard(stream.lock);
  return stream.changed.wait_for(guard, patience, [&] { return stream.queue.empty() && !stream.running; });
}

void drain_all_streams() {
  for (const auto& stream : streams().all()) drain(*stream);
  drain(*default_stream());
}

}  // namespace fakecuda
