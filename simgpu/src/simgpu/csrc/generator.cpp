#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>

#include "memory.h"

namespace simgpu {

namespace {

class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  explicit DeviceGenerator(int device)
      : c10::GeneratorImpl(device_at(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(at::detail::createCPUGenerator()) {}

  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  // A Mersenne twister has no offset; pickling a generator asks for one and sets it again.
  void set_offset(uint64_t offset) override { TORCH_CHECK(offset == 0, "simgpu: a Mersenne twister has no offset to set"); }
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }

  at::Generator host;

 private:
  DeviceGenerator* clone_impl() const override {
    auto* copy = new DeviceGenerator(device().index());
    copy->host = host.clone();
    return copy;
  }
};

at::CPUGeneratorImpl* engine_of(const at::Generator& generator) {
  return at::check_generator<at::CPUGeneratorImpl>(generator);
}

}  // namespace

at::Generator new_generator(int device) {
  const int index = device < 0 ? current_device() : device;
  check_device_index(index);
  return at::make_generator<DeviceGenerator>(index);
}

at::Generator& default_generator(int device) {
  static auto* generators = new std::array<at::Generator, kMaxDevices>{new_generator(0), new_generator(1)};
  const int index = device < 0 ? current_device() : device;
  check_device_index(index);
  return (*generators)[index];
}

at::Generator host_generator(const at::Generator& generator) {
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->host;
}

DrawFromDevice::DrawFromDevice(int device, bool active) : device_(device), active_(active) {
  if (active_) swap();
}

DrawFromDevice::~DrawFromDevice() {
  if (active_) swap();
}

void DrawFromDevice::swap() {
  at::CPUGeneratorImpl* cpu = engine_of(at::detail::getDefaultCPUGenerator());
  at::CPUGeneratorImpl* device = engine_of(host_generator(default_generator(device_)));
  auto engine = cpu->engine();
  cpu->set_engine(device->engine());
  device->set_engine(engine);
  auto next_float = cpu->next_float_normal_sample();
  cpu->set_next_float_normal_sample(device->next_float_normal_sample());
  device->set_next_float_normal_sample(next_float);
  auto next_double = cpu->next_double_normal_sample();
  cpu->set_next_double_normal_sample(device->next_double_normal_sample());
  device->set_next_double_normal_sample(next_double);
}

}  // namespace simgpu
