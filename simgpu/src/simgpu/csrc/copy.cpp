#include "copy.h"

#include <ATen/ops/copy.h>
#include <ATen/ops/resize.h>

#include <cstring>

#include "faults.h"
#include "host_call.h"

namespace simgpu {

namespace {

// One end of a copy. The alias does not keep its memory alive: the block does, on the device and in pinned memory alike,
// even if the tensor's storage is resized while the copy is deferred. Copies of other memory are never deferred.
struct End {
  Tensor alias;
  BlockPtr block;    // device memory
  PinnedPtr pinned;  // pinned host memory
  ByteRange range;                 // within either
  char* bytes() const { return static_cast<char*>(alias.storage().mutable_data()) + byte_range_of(alias).begin; }
  size_t size() const { return range.end - range.begin; }
};

c10::Storage unowned_storage(const c10::Storage& storage) {
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), impl->nbytes(),
      c10::DataPtr(impl->mutable_data(), c10::Device(c10::DeviceType::CPU)), /*allocator=*/nullptr, /*resizable=*/false));
}

// Takes references to tensors, so it must run before the lock. See NOTE [GIL and the runtime lock].
End make_end(const Tensor& t) {
  End end;
  end.range = byte_range_of(t);
  if (on_device(t)) end.block = block_of(t.storage().data_ptr());
  end.alias = tensor_over(unowned_storage(t.storage()), c10::DispatchKey::CPU, t);
  return end;
}

void find_pinned(End& end) {
  if (end.block || end.size() == 0) return;
  end.pinned = pinned_block_at(end.bytes());
  if (!end.pinned) return;
  const size_t offset = end.bytes() - static_cast<char*>(end.pinned->data);
  end.range = {offset, offset + end.size()};
}

void log_access(const End& end, int lane, bool write) {
  const char* operation = write ? "copy (destination)" : "copy (source)";
  if (end.block) runtime().access(*end.block, end.range, lane, write, operation);
  if (end.pinned) runtime().access_pinned(*end.pinned, end.range, lane, write, operation);
}

void move_bytes(Tensor& destination, const Tensor& source) {
  KernelScope scope;
  destination.copy_(source);
}

// NOTE [pinned buffers in flight]
// The host's own reads and writes of a pinned buffer cannot be seen, but their traces can. A buffer that a deferred
// copy will read is hashed when the copy is enqueued and again when it runs: another hash means that the host wrote
// to it too early. A buffer that a deferred copy will fill is filled with NaN patterns until then, so that reading it
// too early gives NaN; if the patterns are gone when the copy runs, the host wrote to it too early. Both only while no
// other deferred copy touches the same pinned block, whose content would then change rightly.
uint64_t hash_bytes(const char* data, size_t size) {
  uint64_t hash = 0xCBF29CE484222325ull ^ size;
  for (; size >= 8; data += 8, size -= 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    hash = (hash ^ word) * 0x9E3779B97F4A7C15ull;
    hash ^= hash >> 29;
  }
  for (; size > 0; ++data, --size) hash = (hash ^ static_cast<unsigned char>(*data)) * 0x100000001B3ull;
  return hash;
}

bool is_poisoned(const char* data, size_t size) {
  for (size_t i = 0; i < size; ++i) {
    if (static_cast<unsigned char>(data[i]) != 0xFF) return false;
  }
  return true;
}

bool spans_without_gaps(const End& end) { return end.alias.is_non_overlapping_and_dense(); }

uint64_t hash_elements(const End& end) {
  if (spans_without_gaps(end)) return hash_bytes(end.bytes(), end.size());
  KernelScope scope;
  const Tensor dense = end.alias.contiguous();  // what lies in the gaps may change rightly
  return hash_bytes(static_cast<const char*>(dense.const_data_ptr()), dense.nbytes());
}

struct PinnedWatch {
  bool hashed = false, poisoned = false;
  uint64_t hash = 0, device_writes = 0;
};

PinnedWatch watch_pinned(const End& source, const End& destination) {
  PinnedWatch watch;
  if (runtime().race_mode == RaceMode::off) return watch;
  if (source.pinned && source.pinned->pending_writes == 0) {
    watch.hashed = true;
    watch.hash = hash_elements(source);
    watch.device_writes = source.pinned->device_writes;
  }
  const PinnedBlock* target = destination.pinned.get();
  if (target && spans_without_gaps(destination) && target->pending_reads == 0 && target->pending_writes == 0 &&
      runtime().poison) {
    watch.poisoned = true;
    watch.device_writes = target->device_writes;
    std::memset(destination.bytes(), 0xFF, destination.size());
  }
  return watch;
}

void check_pinned(const PinnedWatch& watch, const End& source, const End& destination) {
  if (watch.hashed && source.pinned->device_writes == watch.device_writes &&
      hash_elements(source) != watch.hash) {
    runtime().report("pinned buffer race: the host wrote to a pinned buffer of " +
                     std::to_string(source.pinned->requested_bytes) +
                     " bytes before the copy from it to the device had ended (missing synchronize on its event)");
  }
  if (watch.poisoned && destination.pinned->device_writes == watch.device_writes &&
      !is_poisoned(destination.bytes(), destination.size())) {
    runtime().report("pinned buffer race: the host wrote to a pinned buffer of " +
                     std::to_string(destination.pinned->requested_bytes) +
                     " bytes before the copy from the device into it had ended (missing synchronize on its event)");
  }
}

void defer(End source, End destination, int lane) {
  const PinnedWatch watch = watch_pinned(source, destination);
  if (source.pinned) source.pinned->pending_reads++;
  if (destination.pinned) destination.pinned->pending_writes++;
  DeferredItem item;
  item.lands_on_host = !destination.block;
  for (const End* end : {&source, &destination}) {
    if (end->block) item.blocks.push_back(end->block);
  }
  item.run = [source = std::move(source), destination = std::move(destination), watch]() mutable {
    check_pinned(watch, source, destination);
    move_bytes(destination.alias, source.alias);
    if (source.pinned) source.pinned->pending_reads--;
    if (destination.pinned) {
      destination.pinned->pending_writes--;
      destination.pinned->device_writes++;
    }
  };
  runtime().counters.deferred_copies++;
  runtime().enqueue(lane, std::move(item));
}

void check_fault() {
  TORCH_CHECK(!faults().strikes(Fault::copy), "simgpu error: a copy failed (injected fault)");
}

void copy_across_link(const Tensor& source, const Tensor& destination, bool non_blocking) {
  refuse_in_forked_child();
  const bool to_device = on_device(destination);
  const int device = (to_device ? destination : source).device().index();
  const int lane = current_lane(device);
  End from = make_end(source), to = make_end(destination);
  Lock lock;
  Runtime& r = runtime();
  check_fault();
  r.raise_postponed_report();
  r.explore();
  find_pinned(from);
  find_pinned(to);
  const bool pinned = from.pinned || to.pinned;
  const bool asynchronous = non_blocking && pinned;
  if (non_blocking && !pinned && destination.numel() > 0) r.counters.unpinned_async_copies++;
  if (!asynchronous) r.drain_lane(lane);
  r.begin_operation(lane);
  log_access(from, lane, false);
  log_access(to, lane, true);
  r.clock.run_copy(lane, to_device ? Engine::to_device : Engine::to_host, static_cast<double>(destination.nbytes()), pinned);
  if (asynchronous) return defer(std::move(from), std::move(to), lane);
  move_bytes(to.alias, from.alias);
  if (to.pinned) to.pinned->device_writes++;
  r.host_waits_for_lane(lane);
}

// Runs on the source's stream; the two current streams wait for one another before and after, as on CUDA.
void copy_on_devices(const Tensor& source, const Tensor& destination) {
  refuse_in_forked_child();
  const int lane = current_lane(source.device().index()), other = current_lane(destination.device().index());
  End from = make_end(source), to = make_end(destination);
  Lock lock;
  Runtime& r = runtime();
  const bool peer = lane != other;
  if (peer) check_fault();
  r.raise_postponed_report();
  r.explore();
  r.drain_lane(lane);
  r.drain_lane(other);
  r.lanes[lane].clock.join(r.lanes[other].clock);
  r.begin_operation(lane);
  log_access(from, lane, false);
  log_access(to, lane, true);
  if (peer) {
    r.clock.run_copy(lane, Engine::to_host, static_cast<double>(destination.nbytes()), true);
    r.clock.wait(other, r.clock.lane_ms(lane));
  } else {
    r.clock.run_local_copy(lane, static_cast<double>(destination.nbytes()));
  }
  move_bytes(to.alias, from.alias);
  r.lanes[other].clock.join(r.lanes[lane].clock);
}

}  // namespace

Tensor copy_from(const Tensor& source, const Tensor& destination, bool non_blocking) {
  if (on_device(source) && on_device(destination)) {
    copy_on_devices(source, destination);
  } else {
    copy_across_link(source, destination, non_blocking);
  }
  return destination;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& destination) {
  destination.resize_(source.sizes());
  return copy_from(source, destination, false);
}

}  // namespace simgpu
