// The runtime: one lock, the streams with their deferred work, and what is known about every allocation.
//
// Kernels run at once, on the calling thread. Copies that a real device would run asynchronously are put off until
// something forces them (a wait, an event, an operator on the same stream, memory pressure), so that code which
// forgot to wait sees the wrong bytes. See NOTE [adversarial schedule] in runtime.cpp.
#pragma once
#include <c10/core/CachingDeviceAllocator.h>

#include <array>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "clock.h"
#include "race.h"

namespace simgpu {

// One device allocation. The host memory behind it lives as long as the block, which deferred work may keep alive
// after the tensor is gone.
struct Block {
  uint64_t serial = 0;  // counts what was charged to the device, from 1 on
  void* data = nullptr;
  size_t requested_bytes = 0;
  size_t charged_bytes = 0;  // rounded to 512, as a caching allocator would
  c10::DataPtr backing;
  int owner_lane = 0;  // the stream that was current at allocation: memory is handed back to it
  AccessLog log;
  std::array<int, kLanes> pending{};        // deferred work items that touch the block, per lane
  std::array<bool, kLanes> recorded{};      // record_stream()
  bool freed = false;                       // the tensor is gone
  bool active = true;                       // still charged: in use by a tensor or by a recorded stream
  bool has_pending_on_recorded_lane() const;
};
using BlockPtr = std::shared_ptr<Block>;

// One pinned host allocation. A deferred copy keeps it alive after its tensor is gone or has been resized, which is what
// CUDA's host allocator achieves with events.
struct PinnedBlock : std::enable_shared_from_this<PinnedBlock> {
  ~PinnedBlock();
  void* data = nullptr;
  size_t requested_bytes = 0;
  size_t rounded_bytes = 0;  // to a power of two, as CUDA's host allocator rounds
  c10::DataPtr backing;
  AccessLog log;
  int pending_reads = 0, pending_writes = 0;  // deferred copies from and into the block
  uint64_t device_writes = 0;                 // copies that have landed in it
};

using PinnedPtr = std::shared_ptr<PinnedBlock>;

// The bytes are no longer in use by any stream (memory.cpp).
void release_active_bytes(Block& block);

struct EventRecord {
  int lane = 0;
  uint64_t sequence = 0;  // done when the lane has finished this many items
  bool done = false;
  int polls = 0;
  VectorClock clock;
  double at_ms = 0;
};
using EventPtr = std::shared_ptr<EventRecord>;

struct DeferredItem {
  std::function<void()> run;
  EventPtr records, waits_for;
  std::vector<BlockPtr> blocks;
  bool lands_on_host = false;
};

struct Lane {
  std::deque<DeferredItem> queue;
  uint64_t enqueued = 0, finished = 0;
  VectorClock clock;
  uint64_t host_version_seen = 0;
};

struct PinnedStats {
  int64_t requested_bytes = 0, requested_peak = 0;
  int64_t rounded_bytes = 0, rounded_peak = 0;
  int64_t reserved_bytes = 0, reserved_peak = 0;  // rounded bytes plus what the host allocator caches
  int64_t allocations = 0;
};

struct Counters {
  int64_t kernels = 0, deferred_copies = 0, unpinned_async_copies = 0;
};

enum class RaceMode { collect, raise_at_once, off };

// What a caching allocator is asked for, in order. See NOTE [reserved bytes] in memory.cpp.
struct AllocatorEvent {
  enum class Kind { allocate, free, empty_cache };
  Kind kind;
  uint64_t serial = 0;
  size_t bytes = 0;
  int stream = 0;
};

struct DeviceState {
  size_t capacity_bytes = size_t(1) << 40;
  uint64_t blocks_made = 0;
  std::map<uint64_t, const Block*> charged;  // the blocks that are charged, oldest first
  bool is_modelled = false;                  // reserved bytes are a model's, which plays the events
  std::vector<AllocatorEvent> events;
  int streams_made = 1;
  c10::CachingDeviceAllocator::DeviceStats stats;
};

class Runtime {
 public:
  // -- streams and deferred work
  void enqueue(int lane, DeferredItem item);
  void drain(int lane, uint64_t until_sequence);
  void drain_lane(int lane) { drain(lane, lanes[lane].enqueued); }
  void drain_everything();
  void explore();  // with a seed: now and then run some work early
  bool may_run_early(const DeferredItem& item) const;
  bool coin(uint64_t one_in);

  // -- happens-before
  uint64_t begin_operation(int lane);  // a new tick of the lane, after all the host knows
  void host_waits_for_lane(int lane);
  void host_waits_for(const EventRecord& event);
  void learn_from_host(int lane);
  void record_event(int lane, EventPtr event);
  void wait_event(int lane, const EventPtr& event);

  // -- races
  void access(Block& block, ByteRange range, int lane, bool write, const char* operation);
  void access_pinned(PinnedBlock& block, ByteRange range, int lane, bool write, const char* operation);
  void report(const std::string& message);
  void raise_postponed_report();
  void forget_postponed_report();

  std::recursive_mutex mutex;
  int lock_depth = 0;
  std::vector<DeferredItem> graveyard;  // see NOTE [GIL and the runtime lock]

  std::array<Lane, kLanes> lanes;
  VectorClock host;
  uint64_t host_version = 1;
  VirtualClock clock;
  std::array<DeviceState, kMaxDevices> devices;
  std::map<uintptr_t, PinnedBlock*> pinned;
  PinnedStats pinned_stats;
  std::map<size_t, int64_t> pinned_cache;  // freed blocks of one rounded size that would be reused
  Counters counters;

  std::vector<std::string> reports;
  RaceMode race_mode = RaceMode::collect;
  bool defer_copies = true;
  bool poison = true;
  uint64_t schedule_seed = 0;
  uint64_t schedule_state = 0;
  bool in_forked_child = false;

 private:
  void log_access(AccessLog& log, ByteRange range, int lane, bool write, const char* operation, const char* memory,
                  size_t bytes);
  void finish(DeferredItem& item, int lane);
  std::string postponed_report_;
};

Runtime& runtime();

// Holds the runtime's lock. See NOTE [GIL and the runtime lock].
class Lock {
 public:
  Lock();
  ~Lock();
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
};

// The calling thread's current device and stream.
int current_device();
int exchange_device(int device);
int current_stream(int device);
int exchange_stream(int device, int stream);
inline int current_lane(int device) { return lane_of(device, current_stream(device)); }
void check_device_index(int device);
void refuse_in_forked_child();

}  // namespace simgpu
