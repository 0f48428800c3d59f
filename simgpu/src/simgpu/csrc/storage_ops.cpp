#include "storage_ops.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>

#include "memory.h"

namespace simgpu {

namespace {

const c10::DispatchKeySet kDeviceKeys(c10::DispatchKey::PrivateUse1);

// The allocator allocates on the current device.
class DeviceScope {
 public:
  explicit DeviceScope(std::optional<at::Device> device) : previous_(current_device()) {
    if (!device || !device->has_index()) return;
    check_device_index(device->index());
    exchange_device(device->index());
  }
  ~DeviceScope() { exchange_device(previous_); }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int previous_;
};

void check_options(std::optional<at::Layout> layout, std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  TORCH_CHECK_NOT_IMPLEMENTED(layout.value_or(at::kStrided) == at::kStrided, "simgpu: only strided tensors are supported");
}

}  // namespace

Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
             std::optional<at::Device> device, std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
  check_options(layout, pin_memory);
  DeviceScope scope(device);
  return at::detail::empty_generic(size, device_allocator(), kDeviceKeys, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout> layout, std::optional<at::Device> device, std::optional<bool> pin_memory) {
  check_options(layout, pin_memory);
  DeviceScope scope(device);
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kDeviceKeys, c10::dtype_or_default(dtype));
}

Tensor as_strided(const Tensor& self, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

Tensor reshape_alias(const Tensor& self, IntArrayRef size, IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}

Tensor view(const Tensor& self, IntArrayRef size) { return at::native::view(self, size); }

Tensor& set_storage_view(Tensor& self, c10::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  TORCH_CHECK(source.device().type() == c10::DeviceType::PrivateUse1, "simgpu: set_ needs a storage on simgpu, got one on ",
              source.device());
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.empty() && !size.empty()) {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage source) {
  const int64_t elements = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage_view(self, std::move(source), 0, {elements}, {1});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage_view(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

Tensor& set_empty(Tensor& self) {
  const Tensor nothing = empty({0}, self.scalar_type(), std::nullopt, self.device(), std::nullopt, std::nullopt);
  return set_tensor(self, nothing);
}

void record_stream_on_tensor(Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data_ptr(), lane_of(stream.device_index(), static_cast<int>(stream.id())));
}

// Lets `parameter.data = cpu_tensor` and module.to() keep the parameter object.
bool has_compatible_shallow_copy_type(const Tensor& self, const Tensor& from) {
  return self.layout() == at::kStrided && from.layout() == at::kStrided;
}

}  // namespace simgpu
