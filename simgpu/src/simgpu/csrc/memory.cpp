#include "memory.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <cstring>

#include "faults.h"

namespace simgpu {

c10::Device device_at(int index) { return c10::Device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index)); }

namespace {

using c10::CachingAllocator::format_size;
using Stats = c10::CachingDeviceAllocator::DeviceStats;

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }
auto& total(c10::CachingAllocator::StatArray& stats) { return stats[0]; }

// NOTE [reserved bytes]: reserved memory is that of an ideal caching allocator: it grows in steps of 2 MiB to cover
// what is active, never beyond the capacity, and shrinks only by empty_cache. Fragmentation is not modelled, so a
// program that fits in the allocated bytes fits in the capacity.
// A model of a real caching allocator may take its place (`simgpu.set_allocator`). It is Python, and no allocation waits
// for it: what the allocator is asked for is written down here, and played when somebody reads what is reserved. A
// block comes back to the model when all streams are done with it. The capacity stays one of active bytes.
ReservedModel reserved_model;

void note(DeviceState& device, AllocatorEvent event) {
  if (device.is_modelled) device.events.push_back(event);
}

void note_allocation(DeviceState& device, const Block& block) {
  note(device, {AllocatorEvent::Kind::allocate, block.serial, block.requested_bytes, stream_of_lane(block.owner_lane)});
}

void set_reserved(DeviceState& device, size_t current, size_t peak) {
  auto& stat = total(device.stats.reserved_bytes);
  const size_t before = static_cast<size_t>(stat.current);
  if (current > before) stat.increase(current - before);
  if (current < before) stat.decrease(before - current);
  stat.peak = std::max(stat.peak, static_cast<int64_t>(peak));
}

void ask_reserved_model(int index) {
  check_device_index(index);
  {
    Lock lock;
    if (!runtime().devices[index].is_modelled) return;
  }
  const auto [current, peak] = reserved_model(index);
  Lock lock;
  DeviceState& device = runtime().devices[index];
  if (device.is_modelled) set_reserved(device, current, peak);
}

void cover_with_reserved(DeviceState& device) {
  if (device.is_modelled) return;
  const size_t active = total(device.stats.active_bytes).current;
  const size_t reserved = total(device.stats.reserved_bytes).current;
  if (active <= reserved) return;
  const size_t wanted = std::max(active, std::min(round_up(active, kSegmentRounding), device.capacity_bytes));
  total(device.stats.reserved_bytes).increase(wanted - reserved);
  device.stats.num_device_alloc++;
}

[[noreturn]] void throw_out_of_memory(DeviceState& device, int index, size_t bytes, const char* reason) {
  device.stats.num_ooms++;
  const size_t active = total(device.stats.active_bytes).current;
  const size_t allocated = total(device.stats.allocated_bytes).current;
  const size_t reserved = total(device.stats.reserved_bytes).current;
  const size_t free = device.capacity_bytes > active ? device.capacity_bytes - active : 0;
  TORCH_CHECK_WITH(OutOfMemoryError, false, "simgpu out of memory. Tried to allocate ", format_size(bytes), ". simgpu:",
                   index, " has a total capacity of ", format_size(device.capacity_bytes), " of which ",
                   format_size(free), " is free. Of the allocated memory ", format_size(allocated),
                   " is allocated by PyTorch, and ", format_size(reserved > allocated ? reserved - allocated : 0),
                   " is reserved by PyTorch but unallocated.", reason);
  __builtin_unreachable();
}

void make_room(DeviceState& device, int index, size_t bytes) {
  auto fits = [&] { return total(device.stats.active_bytes).current + bytes <= device.capacity_bytes; };
  if (fits()) return;
  // As a real caching allocator: wait for streams that still hold freed blocks, then try again.
  device.stats.num_alloc_retries++;
  runtime().drain_everything();
  note(device, {AllocatorEvent::Kind::empty_cache});
  if (!fits()) throw_out_of_memory(device, index, bytes, "");
}

void count_allocation(Stats& stats, const Block& block) {
  total(stats.allocated_bytes).increase(block.charged_bytes);
  total(stats.active_bytes).increase(block.charged_bytes);
  total(stats.requested_bytes).increase(block.requested_bytes);
  total(stats.allocation).increase(1);
  total(stats.active).increase(1);
}

void count_free(Stats& stats, const Block& block) {
  total(stats.allocated_bytes).decrease(block.charged_bytes);
  total(stats.requested_bytes).decrease(block.requested_bytes);
  total(stats.allocation).decrease(1);
}

DeviceState& state_of(const Block& block) { return runtime().devices[device_of_lane(block.owner_lane)]; }

void report_unsafe_free(const Block& block, int lane) {
  runtime().report("use-after-free race: a device block of " + std::to_string(block.requested_bytes) +
                   " bytes, owned by " + lane_name(block.owner_lane) + ", is freed while " + lane_name(lane) +
                   " may still use it (missing record_stream, or a wait before the free)");
}

// True if work that is still deferred would touch the block after it has been given to someone else.
bool check_free(Block& block) {
  Runtime& r = runtime();
  VectorClock known = r.lanes[block.owner_lane].clock;
  known.join(r.host);
  bool endangered = false;
  for (const Access& access : block.log.unordered_with(block.owner_lane, known)) {
    if (block.recorded[access.lane]) continue;
    if (r.race_mode != RaceMode::off) report_unsafe_free(block, access.lane);
    endangered |= block.pending[access.lane] > 0;
  }
  return endangered;
}

void free_block(void* context) {
  std::unique_ptr<BlockPtr> handle(static_cast<BlockPtr*>(context));
  Lock lock;
  Block& block = **handle;
  block.freed = true;
  count_free(state_of(block).stats, block);
  const bool endangered = check_free(block);
  if (endangered && runtime().poison) std::memset(block.data, 0xFF, block.requested_bytes);
  if (!block.has_pending_on_recorded_lane()) release_active_bytes(block);
}

// Handing memory out counts as a write by the owner at this point of its stream: whoever had the memory before may
// still be using it there, so another stream must wait for the owner before it writes.
c10::DataPtr pointer_to(BlockPtr block) {
  {
    Lock lock;
    runtime().access(*block, {0, block->requested_bytes}, block->owner_lane, true, "allocation");
  }
  void* data = block->data;
  const int device = device_of_lane(block->owner_lane);
  return {data, new BlockPtr(std::move(block)), &free_block, device_at(device)};
}

}  // namespace

void release_active_bytes(Block& block) {
  if (!block.active) return;
  block.active = false;
  Stats& stats = state_of(block).stats;
  total(stats.active_bytes).decrease(block.charged_bytes);
  total(stats.active).decrease(1);
  if (state_of(block).charged.erase(block.serial)) {
    note(state_of(block), {AllocatorEvent::Kind::free, block.serial});
  }
}

BlockPtr charge(size_t bytes, int device) {
  refuse_in_forked_child();
  const size_t rounded = round_up(bytes, kBlockRounding);
  Lock lock;
  DeviceState& state = runtime().devices[device];
  if (rounded > 0) {
    if (faults().strikes(Fault::allocation)) throw_out_of_memory(state, device, rounded, " (injected fault)");
    make_room(state, device, rounded);
  }
  auto block = std::make_shared<Block>();
  block->requested_bytes = bytes;
  block->charged_bytes = rounded;
  block->owner_lane = current_lane(device);
  block->serial = ++state.blocks_made;
  count_allocation(state.stats, *block);
  if (rounded > 0) {
    state.charged[block->serial] = block.get();
    note_allocation(state, *block);
  }
  cover_with_reserved(state);
  return block;
}

void uncharge(Block& block) {
  Lock lock;
  block.freed = true;
  count_free(state_of(block).stats, block);
  release_active_bytes(block);
}

c10::DataPtr adopt_host_memory(c10::StorageImpl& host_storage, int device) {
  const size_t bytes = host_storage.data() ? host_storage.nbytes() : 0;
  BlockPtr block = charge(bytes, device);  // before the memory is moved: an OutOfMemoryError must leave it in place
  block->backing = host_storage.set_data_ptr(c10::DataPtr(nullptr, c10::Device(c10::DeviceType::CPU)));
  block->data = block->backing.get();
  return pointer_to(std::move(block));
}

BlockPtr block_of(const c10::DataPtr& pointer) {
  if (pointer.get_deleter() != &free_block || !pointer.get_context()) return nullptr;
  return *static_cast<BlockPtr*>(pointer.get_context());
}

void record_stream(const c10::DataPtr& pointer, int lane) {
  Lock lock;
  if (BlockPtr block = block_of(pointer)) block->recorded[lane] = true;
}

void empty_device_cache(int device) {
  Lock lock;
  DeviceState& state = runtime().devices[device];
  if (state.is_modelled) {
    note(state, {AllocatorEvent::Kind::empty_cache});
    return;
  }
  const size_t active = total(state.stats.active_bytes).current;
  const size_t needed = std::max(active, std::min(round_up(active, kSegmentRounding), state.capacity_bytes));
  const size_t reserved = total(state.stats.reserved_bytes).current;
  if (reserved > needed) {
    total(state.stats.reserved_bytes).decrease(reserved - needed);
    state.stats.num_device_free++;
  }
}

size_t reserved_bytes(int device) { return total(runtime().devices[device].stats.reserved_bytes).current; }

void set_reserved_model(ReservedModel model) { reserved_model = std::move(model); }

// On: the model begins with the blocks that are charged now. Off: the ideal allocator goes on, with what is active.
void model_reserved(int device, bool on) {
  check_device_index(device);
  Lock lock;
  DeviceState& state = runtime().devices[device];
  state.events.clear();
  state.is_modelled = on;
  set_reserved(state, 0, 0);
  if (on) {
    for (const auto& [serial, block] : state.charged) note_allocation(state, *block);
  } else {
    cover_with_reserved(state);
  }
  total(state.stats.reserved_bytes).reset_peak();
}

std::vector<AllocatorEvent> take_allocator_events(int device) {
  check_device_index(device);
  Lock lock;
  return std::exchange(runtime().devices[device].events, {});
}

// ------------------------------------------------------------------------------------------------ device allocator

namespace {

DeviceState& checked_state(int device) {
  check_device_index(device);
  return runtime().devices[device];
}

class DeviceAllocatorImpl final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override { return allocate_on(current_device(), bytes); }

  c10::DataPtr allocate_on(int device, size_t bytes) {
    BlockPtr block = charge(bytes, device);
    try {
      block->backing = c10::GetCPUAllocator()->allocate(bytes);
    } catch (...) {
      uncharge(*block);
      throw;
    }
    block->data = block->backing.get();
    // Fresh memory is filled with NaN patterns: code that reads before it writes, or before its copy came, shows.
    if (bytes && runtime().poison) std::memset(block->data, 0xFF, bytes);
    return pointer_to(std::move(block));
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    for (int device = 0; device < kMaxDevices; ++device) empty_device_cache(device);
  }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    record_stream(pointer, lane_of(stream.device_index(), static_cast<int>(stream.id())));
  }
  Stats getDeviceStats(c10::DeviceIndex device) override {
    ask_reserved_model(device);
    Lock lock;
    return checked_state(device).stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    for_each_stat(device, [](auto& stat) { stat.reset_accumulated(); });
    checked_state(device).stats.num_ooms = 0;
    checked_state(device).stats.num_alloc_retries = 0;
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    ask_reserved_model(device);
    for_each_stat(device, [](auto& stat) { stat.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    ask_reserved_model(device);
    Lock lock;
    DeviceState& state = checked_state(device);
    const size_t reserved = total(state.stats.reserved_bytes).current;
    return {state.capacity_bytes > reserved ? state.capacity_bytes - reserved : 0, state.capacity_bytes};
  }

 private:
  template <class Function>
  void for_each_stat(c10::DeviceIndex device, Function function) {
    Lock lock;
    Stats& s = checked_state(device).stats;
    for (auto* stats : {&s.allocation, &s.active, &s.allocated_bytes, &s.reserved_bytes, &s.active_bytes, &s.requested_bytes}) {
      function(total(*stats));
    }
  }
};

DeviceAllocatorImpl allocator_instance;

}  // namespace

c10::DeviceAllocator* device_allocator() { return &allocator_instance; }
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &allocator_instance);

void resize_storage(const c10::Storage& storage, size_t new_bytes) {
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  const int device = impl->device().index();
  const size_t kept = std::min(new_bytes, impl->nbytes());
  c10::DataPtr fresh(nullptr, device_at(device));
  if (new_bytes) fresh = allocator_instance.allocate_on(device, new_bytes);
  if (kept) {
    const BlockPtr before = block_of(impl->data_ptr()), after = block_of(fresh);
    Lock lock;
    const int lane = current_lane(device);
    runtime().drain_lane(lane);
    runtime().begin_operation(lane);
    if (before) runtime().access(*before, {0, kept}, lane, false, "resize");
    if (after) runtime().access(*after, {0, kept}, lane, true, "resize");
    std::memcpy(fresh.get(), impl->data(), kept);
  }
  impl->set_data_ptr_noswap(std::move(fresh));
  impl->set_nbytes(new_bytes);
}

// -------------------------------------------------------------------------------------------------- pinned memory

namespace {

size_t next_power_of_two(size_t bytes) {
  size_t rounded = 1;
  while (rounded < bytes) rounded *= 2;
  return rounded;
}

void raise_peak(int64_t value, int64_t& peak) { peak = std::max(peak, value); }

void count_pinned(PinnedStats& stats, const PinnedBlock& block, int sign) {
  stats.requested_bytes += sign * static_cast<int64_t>(block.requested_bytes);
  stats.rounded_bytes += sign * static_cast<int64_t>(block.rounded_bytes);
  stats.allocations += sign;
  raise_peak(stats.requested_bytes, stats.requested_peak);
  raise_peak(stats.rounded_bytes, stats.rounded_peak);
}

void take_from_host_cache(Runtime& r, size_t rounded) {
  auto cached = r.pinned_cache.find(rounded);
  if (cached != r.pinned_cache.end() && cached->second > 0) {
    cached->second--;
  } else {
    r.pinned_stats.reserved_bytes += static_cast<int64_t>(rounded);
    raise_peak(r.pinned_stats.reserved_bytes, r.pinned_stats.reserved_peak);
  }
}

void free_pinned(void* context) { delete static_cast<PinnedPtr*>(context); }

class PinnedAllocatorImpl final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    refuse_in_forked_child();
    if (bytes == 0) return {nullptr, c10::Device(c10::DeviceType::CPU)};
    {
      Lock lock;
      TORCH_CHECK(!faults().strikes(Fault::pinned_allocation), "simgpu error: out of memory: pinned host allocation of ",
                  bytes, " bytes (injected fault)");
    }
    c10::DataPtr backing = c10::GetCPUAllocator()->allocate(bytes);
    auto block = std::make_shared<PinnedBlock>();
    block->requested_bytes = bytes;
    block->rounded_bytes = next_power_of_two(bytes);
    block->data = backing.get();
    block->backing = std::move(backing);
    Lock lock;
    take_from_host_cache(runtime(), block->rounded_bytes);
    count_pinned(runtime().pinned_stats, *block, +1);
    runtime().pinned[reinterpret_cast<uintptr_t>(block->data)] = block.get();
    void* data = block->data;
    return {data, new PinnedPtr(std::move(block)), &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }

  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  // Deferred copies keep the block alive themselves, so there is nothing to record.
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {
    Lock lock;
    for (auto& [rounded, count] : runtime().pinned_cache) {
      runtime().pinned_stats.reserved_bytes -= count * static_cast<int64_t>(rounded);
    }
    runtime().pinned_cache.clear();
  }
  at::HostStats get_stats() override {
    Lock lock;
    const PinnedStats& mine = runtime().pinned_stats;
    at::HostStats stats;
    stats.active_requests.current = mine.allocations;
    stats.active_bytes.current = mine.rounded_bytes;
    stats.active_bytes.peak = mine.rounded_peak;
    stats.allocated_bytes.current = mine.reserved_bytes;
    stats.allocated_bytes.peak = mine.reserved_peak;
    return stats;
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override { reset_pinned_peaks(); }
};

PinnedAllocatorImpl pinned_instance;

}  // namespace

c10::Allocator* pinned_allocator() { return &pinned_instance; }
REGISTER_HOST_ALLOCATOR(at::kPrivateUse1, &pinned_instance);

PinnedBlock::~PinnedBlock() {
  Lock lock;
  Runtime& r = runtime();
  r.pinned.erase(reinterpret_cast<uintptr_t>(data));
  count_pinned(r.pinned_stats, *this, -1);
  r.pinned_cache[rounded_bytes]++;
}

PinnedPtr pinned_block_at(const void* address) {
  auto& blocks = runtime().pinned;
  auto after = blocks.upper_bound(reinterpret_cast<uintptr_t>(address));
  if (after == blocks.begin()) return nullptr;
  PinnedBlock* block = std::prev(after)->second;
  const size_t offset = reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(block->data);
  return offset < block->requested_bytes ? block->weak_from_this().lock() : nullptr;
}

void reset_pinned_peaks() {
  Lock lock;
  PinnedStats& stats = runtime().pinned_stats;
  stats.requested_peak = stats.requested_bytes;
  stats.rounded_peak = stats.rounded_bytes;
  stats.reserved_peak = stats.reserved_bytes;
}

}  // namespace simgpu
