// Which operator runs where.
#include <torch/library.h>

#include <unordered_set>

#include "attention.h"
#include "copy.h"
#include "fallback.h"
#include "generator.h"
#include "kernels.h"
#include "storage_ops.h"

namespace simgpu {

namespace {

using torch::CppFunction;

// Operators with a kernel of their own, registered below by hand.
const std::unordered_set<std::string>& own_kernels() {
  static const std::unordered_set<std::string> names = {
      "empty.memory_format", "empty_strided", "as_strided", "_reshape_alias", "view", "set_", "set_.source_Storage",
      "set_.source_Storage_storage_offset", "set_.source_Tensor", "record_stream", "_has_compatible_shallow_copy_type",
      "_copy_from", "_copy_from_and_resize", "native_dropout", "native_dropout_backward", "convolution_overrideable",
      "convolution_backward_overrideable", "_thnn_fused_lstm_cell", "_thnn_fused_lstm_cell_backward_impl",
      "_thnn_fused_gru_cell", "_thnn_fused_gru_cell_backward", "_fused_sdp_choice",
      "_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward",
      "_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_fused_attention_overrideable_backward"};
  return names;
}

void register_own_kernels(torch::Library& m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("view", view);
  m.impl("set_", set_empty);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_view);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("record_stream", record_stream_on_tensor);
  m.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("native_dropout", native_dropout);
  m.impl("native_dropout_backward", native_dropout_backward);
  m.impl("convolution_overrideable", CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
  m.impl("_fused_sdp_choice", attention_choice);
  m.impl("_scaled_dot_product_efficient_attention", efficient_attention);
  m.impl("_scaled_dot_product_efficient_attention_backward", efficient_attention_backward);
  m.impl("_scaled_dot_product_fused_attention_overrideable", grouped_attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", grouped_attention_backward);
}

// A composite kernel of an operator would win over the catch-all fallback below and break the operator up into
// several (native_layer_norm); so every operator that has a CPU kernel is routed to it by name. So are those over lists of
// tensors, which a card does in one launch and the CPU one by one.
void route_to_cpu_kernels(torch::Library& m) {
  auto& dispatcher = c10::Dispatcher::singleton();
  const std::string prefix = "aten::";
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind(prefix, 0) != 0) continue;
    const std::string overload = name.overload_name.empty() ? "" : "." + name.overload_name;
    const std::string full = name.name.substr(prefix.size()) + overload;
    if (own_kernels().count(full)) continue;
    auto op = dispatcher.findSchema(name);
    const bool over_lists = full.rfind("_foreach_", 0) == 0;
    if (!op || !(over_lists || op->hasKernelForDispatchKey(c10::DispatchKey::CPU))) continue;
    m.impl(full.c_str(), CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  register_own_kernels(m);
  route_to_cpu_kernels(m);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(CppFunction::makeFromBoxedFunction<&run_on_host>()); }

// Without these, the fallbacks for conjugated and negated views and clone() call one another for ever.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", CppFunction::makeFallthrough()); }

TORCH_LIBRARY(simgpu, m) {
  m.def("attention_dropout_mask(int seed, int batch, int heads, int queries, int keys, float dropout) -> Tensor",
        attention_dropout_mask);
  m.def("get_rng_state(int device) -> Tensor", [](int64_t device) { return default_generator(device).get_state(); });
  m.def("set_rng_state(int device, Tensor state) -> ()",
        [](int64_t device, const Tensor& state) { default_generator(device).set_state(state); });
  m.def("manual_seed(int device, int seed) -> ()",
        [](int64_t device, int64_t seed) { default_generator(device).set_current_seed(seed); });
  m.def("initial_seed(int device) -> int",
        [](int64_t device) { return static_cast<int64_t>(default_generator(device).current_seed()); });
}

}  // namespace

}  // namespace simgpu
