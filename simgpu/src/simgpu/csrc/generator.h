// Random numbers: a CPU Mersenne twister behind a generator of the device's type, one default per device.
#pragma once
#include <ATen/core/Generator.h>

namespace simgpu {

at::Generator& default_generator(int device);
at::Generator new_generator(int device);
// The CPU generator that a device generator draws from.
at::Generator host_generator(const at::Generator& generator);

// Kernels that take no Generator draw from the default CPU generator. This lends them the device's numbers, and
// gives the CPU its own back.
class DrawFromDevice {
 public:
  DrawFromDevice(int device, bool active);
  ~DrawFromDevice();
  DrawFromDevice(const DrawFromDevice&) = delete;
  DrawFromDevice& operator=(const DrawFromDevice&) = delete;

 private:
  void swap();
  int device_;
  bool active_;
};

}  // namespace simgpu
