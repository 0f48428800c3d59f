// Scaled dot-product attention that saves what a card's memory-efficient kernel saves.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/SymInt.h>

#include <array>
#include <tuple>

namespace simgpu {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

int64_t attention_choice(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask,
                         double dropout, bool causal, std::optional<double> scale, bool grouped);

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                                               const OptionalTensor& bias, bool compute_logsumexp,
                                                               double dropout, bool causal, std::optional<double> scale);
std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_attention_backward(
    const Tensor& grad_out, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& bias,
    const Tensor& out, const Tensor& logsumexp, const Tensor& seed, const Tensor& offset, double dropout,
    std::array<bool, 4> wanted, bool causal, std::optional<double> scale);

// The same for grouped heads; another operator only because the meta kernel of the first cannot tell their gradients'
// shape.
std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> grouped_attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& bias, double dropout, bool causal,
    bool return_debug_mask, std::optional<double> scale);
std::tuple<Tensor, Tensor, Tensor, Tensor> grouped_attention_backward(
    const Tensor& grad_out, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& bias,
    std::array<bool, 4> wanted, const Tensor& out, const Tensor& logsumexp, const Tensor& cum_seq_q,
    const Tensor& cum_seq_k, int64_t max_q, int64_t max_k, double dropout, bool causal, const Tensor& seed,
    const Tensor& offset, std::optional<double> scale);

// Which attention weights dropout keeps, for one seed: (batch, heads, queries, keys), on the CPU.
Tensor attention_dropout_mask(int64_t seed, int64_t batch, int64_t heads, int64_t queries, int64_t keys, double dropout);

}  // namespace simgpu
