#include "kernels.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros_like.h>

#include "fallback.h"
#include "generator.h"
#include "host_call.h"

namespace simgpu {

namespace {

Work bytes_of(std::initializer_list<Tensor> tensors) {
  Work work;
  for (const Tensor& t : tensors) {
    if (t.defined()) work.bytes += static_cast<double>(t.nbytes());
  }
  return work;
}

std::vector<int64_t> plain_ints(c10::SymIntArrayRef values) {
  std::vector<int64_t> ints;
  for (auto& value : values) ints.push_back(value.expect_int());
  return ints;
}

}  // namespace

// --------------------------------------------------------------------------------------------------------- dropout
// One fused operator that saves a boolean mask, as on a card; the numbers drawn and the arithmetic are those of the
// CPU's dropout (which saves the scaled noise), so that losses are the same to the bit.

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  HostCall call("aten::native_dropout", input.device().index());
  const Tensor x = call.read(input);
  call.launch();
  KernelScope scope;
  Tensor out, mask;
  if (!train.value_or(true) || p == 0) {
    out = x.clone();
    mask = at::ones_like(x, x.options().dtype(at::kBool));
  } else {
    Tensor noise = at::empty_like(x).bernoulli_(1 - p, host_generator(default_generator(call.device())));
    mask = noise.to(at::kBool);
    out = x.mul(p < 1 ? noise.div_(1 - p) : noise);
  }
  call.finish(bytes_of({x, out, mask}));
  return {call.adopt(out), call.adopt(mask)};
}

Tensor native_dropout_backward(const Tensor& grad, const Tensor& mask, double scale) {
  HostCall call("aten::native_dropout_backward", grad.device().index());
  const Tensor g = call.read(grad), kept = call.read(mask);
  call.launch();
  KernelScope scope;
  Tensor noise = kept.to(g.scalar_type());
  if (scale != 0) noise.div_(1 / scale); else noise.zero_();
  const Tensor result = g.mul(noise);
  call.finish(bytes_of({g, kept, result}));
  return call.adopt(result);
}

// ----------------------------------------------------------------------------------------------------- convolution
// Composite code asks for the *_overrideable operators on devices it does not know; the CPU's own composite kernels
// do the work.

void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  run_on_host(op, stack);
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& grad_out, const Tensor& input, const Tensor& weight,
                                                        c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
                                                        c10::SymIntArrayRef dilation, bool transposed,
                                                        c10::SymIntArrayRef output_padding, c10::SymInt groups,
                                                        std::array<bool, 3> wanted) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  const int64_t channels = transposed ? weight.size(1) * groups.expect_int() : weight.size(0);
  torch::jit::Stack stack;
  torch::jit::push(stack, grad_out, input, weight, std::vector<int64_t>{channels}, plain_ints(stride), plain_ints(padding),
                   plain_ints(dilation), transposed, plain_ints(output_padding), groups.expect_int(),
                   std::vector<bool>(wanted.begin(), wanted.end()));
  run_on_host(op, &stack);
  return {stack[0].toTensor(), stack[1].toTensor(), stack[2].toTensor()};
}

// ------------------------------------------------------------------------------------------------- recurrent cells
// A card has fused cells here and the CPU has none. Gate order is PyTorch's: LSTM i f g o, GRU r z n. The workspaces
// have the sizes of the card's: four and five times the hidden size.

namespace {

Tensor with_biases(Tensor gates, const Tensor& first, const Tensor& second) {
  if (first.defined()) gates = gates + first;
  return second.defined() ? gates + second : gates;
}

Tensor or_zeros(const Tensor& t, const Tensor& like) { return t.defined() ? t : at::zeros_like(like); }

}  // namespace

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cell,
                                             const std::optional<Tensor>& input_bias, const std::optional<Tensor>& hidden_bias) {
  HostCall call("aten::_thnn_fused_lstm_cell", input_gates.device().index());
  const Tensor from_input = call.read(input_gates), from_hidden = call.read(hidden_gates), c = call.read(cell);
  const Tensor bias_i = call.read(input_bias.value_or(Tensor())), bias_h = call.read(hidden_bias.value_or(Tensor()));
  call.launch();
  KernelScope scope;
  const auto gates = with_biases(from_input + from_hidden, bias_i, bias_h).chunk(4, 1);
  const Tensor i = gates[0].sigmoid(), f = gates[1].sigmoid(), g = gates[2].tanh(), o = gates[3].sigmoid();
  const Tensor new_cell = f * c + i * g;
  const Tensor hidden = o * new_cell.tanh(), workspace = at::cat({i, f, g, o}, 1);
  call.finish(bytes_of({from_input, from_hidden, c, new_cell, hidden, workspace}));
  return {call.adopt(hidden), call.adopt(new_cell), call.adopt(workspace)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const std::optional<Tensor>& grad_hidden,
                                                      const std::optional<Tensor>& grad_cell, const Tensor& cell,
                                                      const Tensor& new_cell, const Tensor& workspace, bool has_bias) {
  HostCall call("aten::_thnn_fused_lstm_cell_backward_impl", workspace.device().index());
  const Tensor c = call.read(cell), cy = call.read(new_cell), saved = call.read(workspace);
  const Tensor maybe_gh = call.read(grad_hidden.value_or(Tensor())), maybe_gc = call.read(grad_cell.value_or(Tensor()));
  call.launch();
  KernelScope scope;
  const auto gates = saved.chunk(4, 1);
  const Tensor i = gates[0], f = gates[1], g = gates[2], o = gates[3];
  const Tensor grad_h = or_zeros(maybe_gh, cy), tanh_cy = cy.tanh();
  const Tensor grad_cy = or_zeros(maybe_gc, cy) + grad_h * o * (1 - tanh_cy * tanh_cy);
  const Tensor grad_gates = at::cat({grad_cy * g * i * (1 - i), grad_cy * c * f * (1 - f), grad_cy * i * (1 - g * g),
                                     grad_h * tanh_cy * o * (1 - o)}, 1);
  const Tensor grad_c = grad_cy * f;
  const Tensor grad_bias = has_bias ? grad_gates.sum({0}) : Tensor();
  call.finish(bytes_of({c, cy, saved, grad_gates, grad_c}));
  return {call.adopt(grad_gates), call.adopt(grad_c), call.adopt(grad_bias)};
}

std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hidden,
                                    const std::optional<Tensor>& input_bias, const std::optional<Tensor>& hidden_bias) {
  HostCall call("aten::_thnn_fused_gru_cell", input_gates.device().index());
  const Tensor from_input = call.read(input_gates), from_hidden = call.read(hidden_gates), h = call.read(hidden);
  const Tensor bias_i = call.read(input_bias.value_or(Tensor())), bias_h = call.read(hidden_bias.value_or(Tensor()));
  call.launch();
  KernelScope scope;
  const auto in = with_biases(from_input, bias_i, {}).chunk(3, 1), hid = with_biases(from_hidden, bias_h, {}).chunk(3, 1);
  const Tensor r = (in[0] + hid[0]).sigmoid(), z = (in[1] + hid[1]).sigmoid();
  const Tensor n = (in[2] + r * hid[2]).tanh();
  const Tensor result = n + z * (h - n), workspace = at::cat({r, z, n, h, hid[2]}, 1);
  call.finish(bytes_of({from_input, from_hidden, h, result, workspace}));
  return {call.adopt(result), call.adopt(workspace)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad_hidden, const Tensor& workspace,
                                                                     bool has_bias) {
  HostCall call("aten::_thnn_fused_gru_cell_backward", grad_hidden.device().index());
  const Tensor grad = call.read(grad_hidden), saved = call.read(workspace);
  call.launch();
  KernelScope scope;
  const auto parts = saved.chunk(5, 1);
  const Tensor r = parts[0], z = parts[1], n = parts[2], h = parts[3], hidden_n = parts[4];
  const Tensor grad_n = grad * (1 - z) * (1 - n * n);
  const Tensor grad_r = grad_n * hidden_n * r * (1 - r), grad_z = grad * (h - n) * z * (1 - z);
  const Tensor grad_in = at::cat({grad_r, grad_z, grad_n}, 1), grad_hid = at::cat({grad_r, grad_z, grad_n * r}, 1);
  const Tensor grad_h = grad * z;
  const Tensor bias_i = has_bias ? grad_in.sum({0}) : Tensor(), bias_h = has_bias ? grad_hid.sum({0}) : Tensor();
  call.finish(bytes_of({grad, saved, grad_in, grad_hid, grad_h}));
  return {call.adopt(grad_in), call.adopt(grad_hid), call.adopt(grad_h), call.adopt(bias_i), call.adopt(bias_h)};
}

}  // namespace simgpu
