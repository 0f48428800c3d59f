// What torch.accelerator, torch.Stream and torch.Event call: devices, streams and events.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceCapability.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "faults.h"
#include "generator.h"
#include "memory.h"

namespace simgpu {

namespace {

struct EventHandle {
  EventPtr record;
};

EventPtr record_of(void* event) { return event ? static_cast<EventHandle*>(event)->record : nullptr; }

int lane_of_stream(const c10::Stream& stream) {
  check_device_index(stream.device_index());
  TORCH_CHECK(stream.id() >= 0 && stream.id() < kStreamsPerDevice, "simgpu: there is no stream ", stream.id());
  return lane_of(stream.device_index(), static_cast<int>(stream.id()));
}

c10::Stream stream_at(int device, int stream) { return c10::Stream(c10::Stream::UNSAFE, device_at(device), stream); }

int index_or_current(c10::Device device) {
  if (device.index() < 0) return current_device();
  check_device_index(device.index());
  return device.index();
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::DeviceIndex deviceCount() const noexcept override { return kMaxDevices; }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Device exchangeDevice(c10::Device device) const override {
    return device_at(exchange_device(index_or_current(device)));
  }
  c10::Device getDevice() const override { return device_at(current_device()); }
  void setDevice(c10::Device device) const override { exchangeDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) exchange_device(device.index());
  }

  // -- streams
  c10::Stream getStream(c10::Device device) const override {
    const int index = index_or_current(device);
    return stream_at(index, current_stream(index));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_at(index_or_current(device), 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    const int index = index_or_current(device);
    Lock lock;
    int& made = runtime().devices[index].streams_made;
    const int stream = 1 + (made - 1) % (kStreamsPerDevice - 1);  // a pool that wraps around, like CUDA's
    made++;
    return stream_at(index, stream);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const int lane = lane_of_stream(stream), device = device_of_lane(lane);
    return stream_at(device, exchange_stream(device, stream_of_lane(lane)));
  }
  // Without `override`: PyTorch 2.10 has no such function.
  void* getStreamNativeHandle(const c10::Stream stream) const { return &runtime().lanes[lane_of_stream(stream)]; }

  bool queryStream(const c10::Stream& stream) const override {
    Lock lock;
    Runtime& r = runtime();
    const int lane = lane_of_stream(stream);
    if (r.lanes[lane].queue.empty()) {
      r.host_waits_for_lane(lane);
      return true;
    }
    r.drain(lane, r.lanes[lane].finished + 1);  // reluctant but live: every poll makes progress
    return false;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Lock lock;
    runtime().drain_lane(lane_of_stream(stream));
    runtime().host_waits_for_lane(lane_of_stream(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    check_device_index(device);
    Lock lock;
    for (int stream = 0; stream < kStreamsPerDevice; ++stream) {
      runtime().drain_lane(lane_of(device, stream));
      runtime().host_waits_for_lane(lane_of(device, stream));
    }
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    record_stream(pointer, lane_of_stream(stream));
  }

  // -- events
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    auto fresh = std::make_shared<EventRecord>();
    Lock lock;
    TORCH_CHECK(!faults().strikes(Fault::event), "simgpu error: an event could not be recorded (injected fault)");
    if (!*event) *event = new EventHandle();
    static_cast<EventHandle*>(*event)->record = fresh;
    runtime().explore();
    runtime().record_event(lane_of_stream(stream), std::move(fresh));
  }
  void block(void* event, const c10::Stream& stream) const override {
    EventPtr record = record_of(event);
    if (!record) return;
    Lock lock;
    runtime().explore();
    runtime().wait_event(lane_of_stream(stream), record);
  }
  bool queryEvent(void* event) const override {
    EventPtr record = record_of(event);
    if (!record) return true;
    Lock lock;
    Runtime& r = runtime();
    r.explore();
    constexpr int kReluctantPolls = 2;
    if (!record->done && ++record->polls > kReluctantPolls) r.drain(record->lane, record->sequence);
    if (record->done) r.host_waits_for(*record);
    return record->done;
  }
  void synchronizeEvent(void* event) const override {
    EventPtr record = record_of(event);
    if (!record) return;
    Lock lock;
    if (!record->done) runtime().drain(record->lane, record->sequence);
    runtime().host_waits_for(*record);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<EventHandle*>(event); }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    EventPtr first = record_of(begin), last = record_of(end);
    TORCH_CHECK(first && last, "simgpu: both events must be recorded before calculating elapsed time");
    return last->at_ms - first->at_ms;
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kMaxDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchangeDevice(device); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    check_device_index(device);
    return static_cast<c10::DeviceIndex>(exchange_device(device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return new_generator(device); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  bool isPinnedPtr(const void* address) const override {
    Lock lock;
    return pinned_block_at(address) != nullptr;
  }
  c10::Device getDeviceFromPtr(void*) const override { return device_at(current_device()); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override { resize_storage(storage, bytes); }
};

[[maybe_unused]] const bool hooks_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace

}  // namespace simgpu
