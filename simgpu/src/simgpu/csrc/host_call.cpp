#include "host_call.h"

#include <ATen/ops/clone.h>
#include <c10/core/CPUAllocator.h>

namespace simgpu {

using c10::DispatchKey;
using c10::DispatchKeySet;

namespace {

const c10::Device kHost(c10::DeviceType::CPU);

DispatchKeySet bystander_keys() {
  return c10::autocast_dispatch_keyset |
         DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::PythonDispatcher});
}

}  // namespace

KernelScope::KernelScope() : below_modes_(bystander_keys()) {}

Tensor tensor_over(c10::Storage storage, DispatchKey key, const Tensor& like) {
  DispatchKeySet keys(key);
  if (like.is_conj()) keys = keys.add(DispatchKey::Conjugate);
  if (like.is_neg()) keys = keys.add(DispatchKey::Negative);
  if (like._is_zerotensor()) keys = keys.add(DispatchKey::ZeroTensor);
  Tensor t = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  t.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return t;
}

ByteRange byte_range_of(const Tensor& t) {
  if (t.numel() == 0) return {};
  size_t last = 0;
  for (int64_t d = 0; d < t.dim(); ++d) last += static_cast<size_t>((t.size(d) - 1) * t.stride(d));
  const size_t begin = t.storage_offset() * t.itemsize();
  return {begin, begin + (last + 1) * t.itemsize()};
}

Precision precision_of(const Tensor& t) {
  if (t.scalar_type() == at::kBFloat16) return Precision::bf16;
  return t.scalar_type() == at::kHalf ? Precision::fp16 : Precision::fp32;
}

void HostCall::require_device(int device) {
  if (device_ < 0) device_ = device;
  TORCH_CHECK(device_ == device, "Expected all tensors to be on the same device, but found at least two devices, simgpu:",
              device_, " and simgpu:", device, "! (", operation_, ")");
}

void HostCall::refuse(const Tensor& elsewhere) const {
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, simgpu:", device_,
              " and ", elsewhere.device(), "! (", operation_, ")");
  __builtin_unreachable();
}

Tensor HostCall::pass(const Tensor& t) {
  if (t.defined() && t.has_storage()) foreign_.push_back(t.storage().unsafeGetStorageImpl());
  return t;
}

Tensor HostCall::alias(const Tensor& t, bool write) {
  if (!t.defined()) return t;
  if (!on_device(t)) refuse(t);
  require_device(t.device().index());
  TORCH_CHECK_NOT_IMPLEMENTED(t.has_storage(), "simgpu: '", operation_, "' got a tensor without a storage (layout ",
                              t.layout(), "); only strided tensors are supported");
  if (BlockPtr block = block_of(t.storage().data_ptr())) {
    touched_.push_back({std::move(block), byte_range_of(t), write});
  }
  Tensor host = tensor_over(host_storage_for(t.storage()), DispatchKey::CPU, t);
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) host.unsafeGetTensorImpl()->set_wrapped_number(true);
  return host;
}

const c10::Storage& HostCall::host_storage_for(const c10::Storage& device_storage) {
  c10::StorageImpl* impl = device_storage.unsafeGetStorageImpl();
  for (auto& [known, host] : pairs_) {
    if (known.unsafeGetStorageImpl() == impl) return host;
  }
  auto host = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), impl->nbytes(),
                                                    c10::DataPtr(impl->mutable_data(), kHost),
                                                    c10::GetCPUAllocator(), /*resizable=*/true);
  pairs_.emplace_back(device_storage, c10::Storage(std::move(host)));
  return pairs_.back().second;
}

const c10::Storage* HostCall::device_storage_for(const c10::Storage& host_storage) const {
  for (auto& [device, host] : pairs_) {
    if (host.unsafeGetStorageImpl() == host_storage.unsafeGetStorageImpl()) return &device;
  }
  return nullptr;
}

bool HostCall::is_foreign(const c10::Storage& host_storage) const {
  for (c10::StorageImpl* impl : foreign_) {
    if (impl == host_storage.unsafeGetStorageImpl()) return true;
  }
  return false;
}

void HostCall::launch() {
  refuse_in_forked_child();
  Lock lock;
  Runtime& r = runtime();
  r.raise_postponed_report();
  const int lane = this->lane();
  r.explore();
  r.drain_lane(lane);
  r.begin_operation(lane);
  r.counters.kernels++;
  // Reads first: an operator that reads and writes one tensor is a write.
  for (Touched& touched : touched_) {
    if (!touched.write) r.access(*touched.block, touched.range, lane, false, operation_);
  }
  for (Touched& touched : touched_) {
    if (touched.write) r.access(*touched.block, touched.range, lane, true, operation_);
  }
}

Tensor HostCall::adopt(const Tensor& host_result) {
  if (!host_result.defined()) return host_result;
  TORCH_CHECK_NOT_IMPLEMENTED(host_result.layout() == at::kStrided && host_result.has_storage(), "simgpu: '", operation_,
                              "' gives a tensor of layout ", host_result.layout(), "; only strided tensors are supported");
  Tensor result = is_foreign(host_result.storage()) ? host_result.clone() : host_result;
  const c10::Storage& host = result.storage();
  if (const c10::Storage* device = device_storage_for(host)) return tensor_over(*device, DispatchKey::PrivateUse1, result);

  const size_t bytes = host.nbytes();
  c10::DataPtr memory = adopt_host_memory(*host.unsafeGetStorageImpl(), device_);
  c10::Storage device(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes, std::move(memory),
                                                           device_allocator(), /*resizable=*/true));
  pairs_.emplace_back(device, host);
  return tensor_over(device, DispatchKey::PrivateUse1, result);
}

void HostCall::sync_geometry(const Tensor& device_tensor, const Tensor& alias) {
  c10::StorageImpl* device = device_tensor.storage().unsafeGetStorageImpl();
  c10::StorageImpl* host = alias.storage().unsafeGetStorageImpl();
  const bool has_new_memory = device_storage_for(alias.storage()) && host->data() != device->data();
  if (has_new_memory) {
    const size_t bytes = host->nbytes();
    c10::DataPtr memory = adopt_host_memory(*host, device_);
    host->set_data_ptr_noswap(c10::DataPtr(memory.get(), kHost));
    device->set_data_ptr_noswap(std::move(memory));
    device->set_nbytes(bytes);
  }
  if (device_tensor.sizes() != alias.sizes() || device_tensor.strides() != alias.strides() ||
      device_tensor.storage_offset() != alias.storage_offset()) {
    device_tensor.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
  }
}

void HostCall::finish(const Work& work) {
  Lock lock;
  runtime().clock.run_kernel(lane(), work);
}

}  // namespace simgpu
