// Device and pinned host memory: every byte charged, capped, and freed in stream order.
#pragma once
#include <c10/core/Storage.h>

#include "runtime.h"

namespace simgpu {

constexpr size_t kBlockRounding = 512;
constexpr size_t kSegmentRounding = size_t(2) << 20;

c10::Device device_at(int index);
c10::DeviceAllocator* device_allocator();
c10::Allocator* pinned_allocator();

// Charges a new block to the device; throws OutOfMemoryError before anything is allocated. The caller gives it memory.
BlockPtr charge(size_t bytes, int device);
// Undoes charge() for a block that never got a DataPtr.
void uncharge(Block& block);
// Charges the host memory of a kernel's result, and takes it over without a copy.
c10::DataPtr adopt_host_memory(c10::StorageImpl& host_storage, int device);

// Null if the pointer is not one of ours.
BlockPtr block_of(const c10::DataPtr& pointer);
PinnedPtr pinned_block_at(const void* address);  // needs the lock

void record_stream(const c10::DataPtr& pointer, int lane);
void resize_storage(const c10::Storage& storage, size_t new_bytes);
void empty_device_cache(int device);
size_t reserved_bytes(int device);  // needs the lock

// Reserved bytes now, and at most since the last call, by a model that plays the events. Called without the lock.
using ReservedModel = std::function<std::pair<size_t, size_t>(int device)>;
void set_reserved_model(ReservedModel model);
void model_reserved(int device, bool on);
std::vector<AllocatorEvent> take_allocator_events(int device);
void reset_pinned_peaks();

}  // namespace simgpu
