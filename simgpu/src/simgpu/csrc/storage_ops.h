// Operators that make tensors and views without computing: factories, views, set_, record_stream.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

namespace simgpu {

using at::IntArrayRef;
using at::Tensor;

Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
             std::optional<at::Device> device, std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format);
Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout> layout, std::optional<at::Device> device, std::optional<bool> pin_memory);
Tensor as_strided(const Tensor& self, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset);
Tensor reshape_alias(const Tensor& self, IntArrayRef size, IntArrayRef stride);
Tensor view(const Tensor& self, IntArrayRef size);
Tensor& set_storage(Tensor& self, c10::Storage source);
Tensor& set_storage_view(Tensor& self, c10::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride);
Tensor& set_tensor(Tensor& self, const Tensor& source);
Tensor& set_empty(Tensor& self);
void record_stream_on_tensor(Tensor& self, c10::Stream stream);
bool has_compatible_shallow_copy_type(const Tensor& self, const Tensor& from);

}  // namespace simgpu
