// Operators that need more than the fallback: dropout, convolution and recurrent cells.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/SymInt.h>

#include <array>
#include <tuple>

namespace simgpu {

using at::Tensor;

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train);
Tensor native_dropout_backward(const Tensor& grad, const Tensor& mask, double scale);

void convolution(const c10::OperatorHandle& op, torch::jit::Stack* stack);
std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& grad_out, const Tensor& input, const Tensor& weight,
                                                        c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
                                                        c10::SymIntArrayRef dilation, bool transposed,
                                                        c10::SymIntArrayRef output_padding, c10::SymInt groups,
                                                        std::array<bool, 3> wanted);

std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cell,
                                             const std::optional<Tensor>& input_bias, const std::optional<Tensor>& hidden_bias);
std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const std::optional<Tensor>& grad_hidden,
                                                      const std::optional<Tensor>& grad_cell, const Tensor& cell,
                                                      const Tensor& new_cell, const Tensor& workspace, bool has_bias);
std::tuple<Tensor, Tensor> gru_cell(const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& hidden,
                                    const std::optional<Tensor>& input_bias, const std::optional<Tensor>& hidden_bias);
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& grad_hidden, const Tensor& workspace,
                                                                     bool has_bias);

}  // namespace simgpu
