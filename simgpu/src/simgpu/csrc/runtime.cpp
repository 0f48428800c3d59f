#include "runtime.h"

#include <Python.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include <new>
#include <utility>

namespace simgpu {

// NOTE [GIL and the runtime lock]
// A change of the reference count of a tensor that has a Python object may take the GIL. Two rules follow:
//   1. No thread waits for the runtime's lock while it holds the GIL (Lock lets go of it first).
//   2. No tensor is created, copied or destroyed while the lock is held, except aliases that Python never saw.
//      Finished work goes to the graveyard, which the outermost Lock empties after it has unlocked.
// Then "lock, then GIL" never happens, and "GIL, then lock" never waits.

Runtime& runtime() {
  static Runtime* instance = new Runtime();  // leaked on purpose: tensors may outlive static destructors
  return *instance;
}

namespace {

void lock_without_gil(std::recursive_mutex& mutex) {
  if (mutex.try_lock()) return;
  if (Py_IsInitialized() && PyGILState_Check()) {
    PyThreadState* state = PyEval_SaveThread();
    mutex.lock();
    PyEval_RestoreThread(state);
  } else {
    mutex.lock();
  }
}

// A fork (a DataLoader worker) must not copy a lock that another thread holds.
void before_fork() { lock_without_gil(runtime().mutex); }
void after_fork_in_parent() { runtime().mutex.unlock(); }
void after_fork_in_child() {
  runtime().in_forked_child = true;
  // Not unlock(): the owner it remembers is the thread of the parent, so it would refuse and stay locked for ever.
  new (&runtime().mutex) std::recursive_mutex();
}
[[maybe_unused]] const int fork_handlers = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);

thread_local int tls_device = 0;
thread_local std::array<int, kMaxDevices> tls_streams{};

}  // namespace

Lock::Lock() {
  lock_without_gil(runtime().mutex);
  runtime().lock_depth++;
}

Lock::~Lock() {
  std::vector<DeferredItem> dead;
  if (--runtime().lock_depth == 0) dead.swap(runtime().graveyard);
  runtime().mutex.unlock();
}

int current_device() { return tls_device; }
int exchange_device(int device) { return std::exchange(tls_device, device); }
int current_stream(int device) { return tls_streams.at(device); }
int exchange_stream(int device, int stream) { return std::exchange(tls_streams.at(device), stream); }

void check_device_index(int device) {
  TORCH_CHECK(device >= 0 && device < kMaxDevices, "simgpu: invalid device index ", device, "; there are ", kMaxDevices,
              " devices");
}

void refuse_in_forked_child() {
  TORCH_CHECK(!runtime().in_forked_child,
              "Cannot use simgpu in a forked subprocess: as with a real device, use the 'spawn' start method, or "
              "touch the device in the parent only");
}

bool Block::has_pending_on_recorded_lane() const {
  for (int lane = 0; lane < kLanes; ++lane) {
    if (recorded[lane] && pending[lane] > 0) return true;
  }
  return false;
}

// ------------------------------------------------------------------------------------------ streams, deferred work

// NOTE [adversarial schedule]
// With seed 0, deferred work runs as late as the rules allow: the worst case for code that forgot to wait. With
// another seed, explore() also runs work early, at random but repeatable places, which is the worst case for code
// that counts on work being late (a buffer that is still needed). Copies to the host never come early: their
// destination is filled with NaN patterns at once (the earliest effect) and with the data as late as possible (the
// latest), so a host that reads too soon is caught under every seed. Every order that results is one that a real
// device could show.

void Runtime::enqueue(int lane, DeferredItem item) {
  for (auto& block : item.blocks) block->pending[lane]++;
  lanes[lane].queue.push_back(std::move(item));
  lanes[lane].enqueued++;
  if (!defer_copies) drain_lane(lane);
}

void Runtime::drain(int lane, uint64_t until_sequence) {
  Lane& l = lanes[lane];
  while (l.finished < until_sequence && !l.queue.empty()) {
    DeferredItem item = std::move(l.queue.front());
    l.queue.pop_front();
    l.finished++;
    if (item.waits_for && !item.waits_for->done) drain(item.waits_for->lane, item.waits_for->sequence);
    if (item.run) item.run();
    finish(item, lane);
    graveyard.push_back(std::move(item));
  }
}

void Runtime::finish(DeferredItem& item, int lane) {
  if (item.records) item.records->done = true;
  for (auto& block : item.blocks) {
    block->pending[lane]--;
    if (block->freed && block->active && !block->has_pending_on_recorded_lane()) release_active_bytes(*block);
  }
}

void Runtime::drain_everything() {
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!lanes[lane].queue.empty()) drain_lane(lane);
  }
}

bool Runtime::coin(uint64_t one_in) {
  schedule_state += 0x9E3779B97F4A7C15ull;  // splitmix64
  uint64_t z = schedule_state;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return (z ^ (z >> 31)) % one_in == 0;
}

bool Runtime::may_run_early(const DeferredItem& item) const {
  return !item.lands_on_host && (!item.waits_for || item.waits_for->done);
}

void Runtime::explore() {
  if (schedule_seed == 0) return;
  for (int lane = 0; lane < kLanes; ++lane) {
    auto& queue = lanes[lane].queue;
    while (!queue.empty() && may_run_early(queue.front()) && coin(3)) drain(lane, lanes[lane].finished + 1);
  }
}

// -------------------------------------------------------------------------------------------------- happens-before

void Runtime::learn_from_host(int lane) {
  Lane& l = lanes[lane];
  if (l.host_version_seen == host_version) return;
  l.clock.join(host);
  l.host_version_seen = host_version;
}

uint64_t Runtime::begin_operation(int lane) {
  learn_from_host(lane);
  return ++lanes[lane].clock.tick[lane];
}

void Runtime::host_waits_for_lane(int lane) {
  host.join(lanes[lane].clock);
  host_version++;
  clock.host_wait(clock.lane_ms(lane));
}

void Runtime::host_waits_for(const EventRecord& event) {
  host.join(event.clock);
  host_version++;
  clock.host_wait(event.at_ms);
}

void Runtime::record_event(int lane, EventPtr event) {
  learn_from_host(lane);
  event->lane = lane;
  event->sequence = lanes[lane].enqueued + 1;
  event->clock = lanes[lane].clock;
  event->at_ms = clock.lane_ms(lane);
  DeferredItem item;
  item.records = std::move(event);
  enqueue(lane, std::move(item));
}

void Runtime::wait_event(int lane, const EventPtr& event) {
  lanes[lane].clock.join(event->clock);
  clock.wait(lane, event->at_ms);
  if (event->done) return;
  DeferredItem item;
  item.waits_for = event;
  enqueue(lane, std::move(item));
}

// ----------------------------------------------------------------------------------------------------------- races

namespace {

std::string describe(const Access& old, const Access& now, const char* operation, const char* memory, size_t bytes) {
  const char* kind = !now.write ? "read-after-write" : old.write ? "write-after-write" : "write-after-read";
  return std::string(kind) + " race: '" + operation + "' on " + lane_name(now.lane) + (now.write ? " writes" : " reads") +
         " bytes " + std::to_string(now.range.begin) + ".." + std::to_string(now.range.end) + " of a " + memory + " of " +
         std::to_string(bytes) + " bytes, and is not ordered after the " + (old.write ? "write" : "read") + " of bytes " +
         std::to_string(old.range.begin) + ".." + std::to_string(old.range.end) + " on " + lane_name(old.lane) +
         " (missing wait_stream or wait_event)";
}

}  // namespace

void Runtime::log_access(AccessLog& log, ByteRange range, int lane, bool write, const char* operation,
                         const char* memory, size_t bytes) {
  if (race_mode == RaceMode::off || range.begin >= range.end) return;
  const Access now{range, lane, lanes[lane].clock.tick[lane], write};
  std::string first;
  for (const Access& old : log.add(now, lanes[lane].clock, host)) {
    std::string message = describe(old, now, operation, memory, bytes);
    if (first.empty()) first = message;
    report(message);
  }
  if (first.empty() || race_mode != RaceMode::raise_at_once) return;
  postponed_report_.clear();
  TORCH_CHECK(false, "simgpu: ", first);
}

void Runtime::access(Block& block, ByteRange range, int lane, bool write, const char* operation) {
  log_access(block.log, range, lane, write, operation, "device block", block.requested_bytes);
}

void Runtime::access_pinned(PinnedBlock& block, ByteRange range, int lane, bool write, const char* operation) {
  log_access(block.log, range, lane, write, operation, "pinned host block", block.requested_bytes);
}

void Runtime::report(const std::string& message) {
  constexpr size_t kMaxReports = 1000;
  if (reports.size() < kMaxReports) reports.push_back(message);
  // Some reports are made where nothing may throw (a free); they are raised by the next operator.
  if (race_mode == RaceMode::raise_at_once && postponed_report_.empty()) postponed_report_ = message;
}

void Runtime::forget_postponed_report() { postponed_report_.clear(); }

void Runtime::raise_postponed_report() {
  if (postponed_report_.empty()) return;
  std::string message = std::exchange(postponed_report_, {});
  TORCH_CHECK(race_mode != RaceMode::raise_at_once, "simgpu: ", message);
}

}  // namespace simgpu
