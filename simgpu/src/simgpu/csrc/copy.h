// Copies between host and device, within a device, and between devices.
#pragma once
#include <ATen/core/Tensor.h>

namespace simgpu {

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& destination, bool non_blocking);
at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& destination);

}  // namespace simgpu
