// One kernel launch, computed by host code on zero-copy aliases of device memory.
//
// Device memory is host memory, so a CPU tensor can be laid over a device tensor's storage; the CPU kernel computes
// on it; a fresh result is taken over by the device without a copy and charged, and a result that shares an
// operand's storage becomes a view of that operand.
#pragma once
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "clock.h"
#include "memory.h"

namespace simgpu {

using at::Tensor;

inline bool on_device(const Tensor& t) {
  return t.defined() && t.device().type() == c10::DeviceType::PrivateUse1;
}

// The same sizes, strides and flags as `like`, on another storage.
Tensor tensor_over(c10::Storage storage, c10::DispatchKey key, const Tensor& like);

// The bytes of its storage that a tensor spans.
ByteRange byte_range_of(const Tensor& t);

// Below autograd, autocast and every Python mode: what runs here is the device's own business. In particular a
// deferred copy may run while a TorchDispatchMode of an innocent bystander is active.
class KernelScope {
 public:
  KernelScope();

 private:
  at::AutoDispatchBelowADInplaceOrView below_autograd_;
  c10::impl::ExcludeDispatchKeyGuard below_modes_;
};

class HostCall {
 public:
  HostCall(const char* operation, int device) : operation_(operation), device_(device) {}

  // CPU aliases of device operands. Tensors elsewhere are refused.
  Tensor read(const Tensor& t) { return alias(t, false); }
  Tensor write(const Tensor& t) { return alias(t, true); }
  // A tensor elsewhere that is allowed as it is: a scalar, an index.
  Tensor pass(const Tensor& t);
  [[noreturn]] void refuse(const Tensor& elsewhere) const;
  // Which device the call is on, once known; operands on another device are refused.
  void require_device(int device);

  // Waits for what is deferred on the current stream, opens a new tick, and checks every operand for races.
  void launch();

  // A kernel's result as a device tensor.
  Tensor adopt(const Tensor& host_result);
  // An operand that the kernel resized (out=, resize_) hands its new memory and geometry back to the device tensor.
  void sync_geometry(const Tensor& device_tensor, const Tensor& alias);

  // Charges the virtual clock.
  void finish(const Work& work);

  int device() const { return device_; }
  int lane() const { return current_lane(device_); }
  bool has_device() const { return device_ >= 0; }

 private:
  struct Touched {
    BlockPtr block;
    ByteRange range;
    bool write;
  };
  Tensor alias(const Tensor& t, bool write);
  const c10::Storage& host_storage_for(const c10::Storage& device_storage);
  const c10::Storage* device_storage_for(const c10::Storage& host_storage) const;
  bool is_foreign(const c10::Storage& host_storage) const;

  const char* operation_;
  int device_;
  c10::SmallVector<std::pair<c10::Storage, c10::Storage>, 8> pairs_;  // (device, host)
  c10::SmallVector<c10::StorageImpl*, 2> foreign_;                    // storages of CPU operands: never adopted
  c10::SmallVector<Touched, 8> touched_;
};

Precision precision_of(const Tensor& t);

}  // namespace simgpu
