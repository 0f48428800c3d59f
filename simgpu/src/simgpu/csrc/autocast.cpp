// Autocast: PyTorch's own lists of what runs in 16 bits, in 32 bits, and in the widest type, for this device.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace at::autocast {

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

#define SIMGPU_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SIMGPU_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SIMGPU_FP32_SET_OPT_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define SIMGPU_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

Tensor refuse_binary_cross_entropy(const Tensor&, const Tensor&, const std::optional<Tensor>&, int64_t) {
  TORCH_CHECK(false, "binary_cross_entropy is unsafe to autocast, here as on a card: use "
              "binary_cross_entropy_with_logits, or leave autocast for it");
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(SIMGPU_LOWER_PRECISION)
  AT_FORALL_FP32(SIMGPU_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(SIMGPU_FP32_SET_OPT_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(SIMGPU_PROMOTE)
  SIMGPU_PROMOTE(stack)
  SIMGPU_PROMOTE(cat)
  m.impl("binary_cross_entropy", refuse_binary_cross_entropy);
}

}  // namespace at::autocast
