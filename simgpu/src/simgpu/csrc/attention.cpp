#include "attention.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_safe_softmax.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/_softmax_backward_data.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "generator.h"
#include "host_call.h"

namespace simgpu {

namespace {

// NOTE [attention flavours]
// Without dropout, the CPU's flash kernel computes, so the bits are those of a CPU run. It cannot do dropout, differ-
// ing head sizes or gradients of the mask: then plain mathematics computes on host scratch, in the order of operations
// of the CPU's math kernel. Either way the device is charged only for what a card's memory-efficient kernel
// keeps: output, log-sum-exp, seed and offset. Backward recomputes the probabilities and draws the same dropout mask
// from the seed again.

struct Problem {
  Tensor query, key, value, bias;  // host tensors; bias may be undefined
  bool causal = false;
  double scale = 1;
};

struct Gradients {
  Tensor query, key, value, bias;
};

double scale_of(const Tensor& query, std::optional<double> scale) {
  return scale.value_or(1.0 / std::sqrt(static_cast<double>(query.size(-1))));
}

bool dense_in_last(const Tensor& t) { return t.stride(-1) == 1 || t.size(-1) == 1; }

bool cpu_kernel_can(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& bias, double dropout) {
  return dropout == 0 && query.size(-1) == value.size(-1) && !(bias.defined() && bias.requires_grad()) &&
         dense_in_last(query) && dense_in_last(key) && dense_in_last(value);
}

OptionalTensor if_defined(const Tensor& t) { return t.defined() ? OptionalTensor(t) : std::nullopt; }

Tensor swap_last(const Tensor& t) { return t.transpose(-2, -1); }

// ---------------------------------------------------------------------------------------- plain mathematics, on the host

Tensor repeat_heads(const Tensor& t, int64_t heads) {
  if (t.size(1) == heads) return t;
  const int64_t groups = heads / t.size(1);
  return t.unsqueeze(2).expand({t.size(0), t.size(1), groups, t.size(2), t.size(3)}).reshape({t.size(0), heads, t.size(2), t.size(3)});
}

Tensor sum_heads(const Tensor& grad, int64_t heads) {
  if (grad.size(1) == heads) return grad;
  return grad.reshape({grad.size(0), heads, grad.size(1) / heads, grad.size(2), grad.size(3)}).sum({2}, true).squeeze(2);
}

struct Plain {
  Tensor scaled_query, scaled_key_t, value, scores, weights;
};

Plain plain_weights(const Problem& p) {
  const double root = std::sqrt(std::abs(p.scale));
  Plain plain;
  plain.scaled_query = at::mul(p.query, at::Scalar(p.scale < 0 ? -root : root));
  plain.scaled_key_t = at::mul(swap_last(repeat_heads(p.key, p.query.size(1))), at::Scalar(root));
  plain.value = repeat_heads(p.value, p.query.size(1));
  plain.scores = at::matmul(plain.scaled_query, plain.scaled_key_t);
  if (p.bias.defined()) plain.scores = plain.scores.add(p.bias);
  if (p.causal) {
    const Tensor seen = at::ones({plain.scores.size(-2), plain.scores.size(-1)}, at::kBool).tril();
    plain.scores.masked_fill_(seen.logical_not(), -std::numeric_limits<double>::infinity());
  }
  plain.weights = at::_safe_softmax(plain.scores, -1);
  return plain;
}

Tensor drop(const Tensor& weights, const Tensor& keep, double dropout) {
  return keep.defined() ? weights.mul(keep).mul(1.0 / (1.0 - dropout)) : weights;
}

Tensor plain_forward(const Problem& p, const Tensor& keep, double dropout, Tensor& logsumexp) {
  const Plain plain = plain_weights(p);
  logsumexp = at::logsumexp(plain.scores, {-1});
  return at::matmul(drop(plain.weights, keep, dropout), plain.value);
}

Gradients plain_backward(const Problem& p, const Tensor& grad_out, const Tensor& keep, double dropout) {
  const Plain plain = plain_weights(p);
  const double root = std::sqrt(std::abs(p.scale));
  const Tensor dropped = drop(plain.weights, keep, dropout);
  const Tensor grad_value = at::matmul(swap_last(dropped), grad_out);
  const Tensor grad_weights = drop(at::matmul(grad_out, swap_last(plain.value)), keep, dropout);
  const Tensor grad_scores = at::_softmax_backward_data(grad_weights, plain.weights, -1, plain.weights.scalar_type());
  Gradients g;
  g.query = at::mul(at::matmul(grad_scores, swap_last(plain.scaled_key_t)), at::Scalar(p.scale < 0 ? -root : root));
  const Tensor grad_key_t = at::mul(at::matmul(swap_last(plain.scaled_query), grad_scores), at::Scalar(root));
  g.key = sum_heads(swap_last(grad_key_t), p.key.size(1));
  g.value = sum_heads(grad_value, p.value.size(1));
  g.bias = grad_scores;
  return g;
}

// 16-bit problems are computed in 32 bits, as a fused kernel accumulates.
Problem in_full_precision(Problem p) {
  if (p.query.scalar_type() == at::kFloat) return p;
  for (Tensor* t : {&p.query, &p.key, &p.value, &p.bias}) {
    if (t->defined()) *t = t->to(at::kFloat);
  }
  return p;
}

// ------------------------------------------------------------------------------------------------------- dropout, in tiles

uint64_t seed_of_head(uint64_t seed, uint64_t head) {
  uint64_t z = seed + (head + 1) * 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  return z ^ (z >> 27);
}

Tensor keep_mask(int64_t seed, int64_t first_head, int64_t heads, int64_t queries, int64_t keys, double dropout) {
  Tensor keep = at::empty({heads, queries, keys}, at::kBool);
  for (int64_t h = 0; h < heads; ++h) {
    auto generator = at::detail::createCPUGenerator(seed_of_head(static_cast<uint64_t>(seed), first_head + h));
    keep.select(0, h).bernoulli_(1.0 - dropout, generator);
  }
  return keep;
}

// Every head has its own random stream, so the mask does not depend on how the heads are tiled.
template <class Function>
void for_each_tile(const Problem& p, int64_t seed, double dropout, Function function) {
  constexpr int64_t kTileElements = 8 << 20;
  const int64_t batch = p.query.size(0), heads = p.query.size(1), m = p.query.size(2), n = p.key.size(2);
  const int64_t per_tile = std::max<int64_t>(1, std::min(heads, kTileElements / std::max<int64_t>(1, m * n)));
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads; h += per_tile) {
      const int64_t count = std::min(per_tile, heads - h);
      auto part = [&](const Tensor& t) { return t.defined() ? t.narrow(0, b, 1).narrow(1, h, count) : t; };
      Problem tile = p;
      tile.query = part(p.query), tile.key = part(p.key), tile.value = part(p.value), tile.bias = part(p.bias);
      function(tile, keep_mask(seed, b * heads + h, count, m, n, dropout).unsqueeze(0), part);
    }
  }
}

// Dropout works on ungrouped heads and on a mask of full size, so that both can be tiled; gradients are summed back
// afterwards.
Problem ungrouped(Problem p) {
  p.key = repeat_heads(p.key, p.query.size(1));
  p.value = repeat_heads(p.value, p.query.size(1));
  if (p.bias.defined()) p.bias = p.bias.expand({p.query.size(0), p.query.size(1), p.query.size(2), p.key.size(2)});
  return p;
}

Tensor dropout_forward(const Problem& grouped, int64_t seed, double dropout, Tensor& logsumexp) {
  const Problem p = ungrouped(grouped);
  Tensor out = at::empty({p.query.size(0), p.query.size(1), p.query.size(2), p.value.size(3)}, p.query.options());
  logsumexp = at::empty({p.query.size(0), p.query.size(1), p.query.size(2)}, p.query.options());
  for_each_tile(p, seed, dropout, [&](const Problem& tile, const Tensor& keep, auto part) {
    Tensor tile_logsumexp;
    part(out).copy_(plain_forward(tile, keep, dropout, tile_logsumexp));
    part(logsumexp).copy_(tile_logsumexp);
  });
  return out;
}

Gradients dropout_backward(const Problem& grouped, const Tensor& grad_out, int64_t seed, double dropout, bool want_bias) {
  const Problem p = ungrouped(grouped);
  Gradients g{at::empty(p.query.sizes(), p.query.options()), at::empty(p.key.sizes(), p.key.options()),
              at::empty(p.value.sizes(), p.value.options()), Tensor()};
  if (want_bias) g.bias = at::empty({p.query.size(0), p.query.size(1), p.query.size(2), p.key.size(2)}, p.query.options());
  for_each_tile(p, seed, dropout, [&](const Problem& tile, const Tensor& keep, auto part) {
    const Gradients of_tile = plain_backward(tile, part(grad_out), keep, dropout);
    part(g.query).copy_(of_tile.query);
    part(g.key).copy_(of_tile.key);
    part(g.value).copy_(of_tile.value);
    if (want_bias) part(g.bias).copy_(of_tile.bias);
  });
  g.key = sum_heads(g.key, grouped.key.size(1));
  g.value = sum_heads(g.value, grouped.value.size(1));
  return g;
}

// ------------------------------------------------------------------------------------------------- host-side attention

// Memory-efficient kernels lay tensors out as (batch, sequence, heads, head size).
Tensor in_kernel_layout(const Tensor& t, at::ScalarType dtype) {
  Tensor laid_out = at::empty({t.size(0), t.size(2), t.size(1), t.size(3)}, t.options().dtype(dtype)).transpose(1, 2);
  return laid_out.copy_(t);
}

struct Forward {
  Tensor out, logsumexp;
};

Forward attention_on_host(const Problem& problem, bool use_cpu_kernel, int64_t seed, double dropout) {
  if (use_cpu_kernel) {
    auto [out, logsumexp] = at::_scaled_dot_product_flash_attention_for_cpu(
        problem.query, problem.key, problem.value, 0.0, problem.causal, if_defined(problem.bias), problem.scale);
    return {out, logsumexp};
  }
  const Problem p = in_full_precision(problem);
  Forward result;
  Tensor out = dropout > 0 ? dropout_forward(p, seed, dropout, result.logsumexp) : plain_forward(p, {}, 0, result.logsumexp);
  result.out = in_kernel_layout(out, problem.query.scalar_type());
  return result;
}

// The CPU kernel writes the log-sum-exp with the heads innermost, and expects it back that way.
Tensor in_cpu_kernel_layout(const Tensor& logsumexp, int64_t queries) {
  return logsumexp.narrow(2, 0, queries).transpose(1, 2).contiguous().transpose(1, 2);
}

Gradients attention_backward_on_host(const Problem& problem, bool use_cpu_kernel, const Tensor& grad_out, const Tensor& out,
                                     const Tensor& logsumexp, int64_t seed, double dropout, bool want_bias) {
  if (use_cpu_kernel) {
    auto [query, key, value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, problem.query, problem.key, problem.value, out, in_cpu_kernel_layout(logsumexp, problem.query.size(2)), 0.0,
        problem.causal, if_defined(problem.bias), problem.scale);
    return {query, key, value, Tensor()};
  }
  const Problem p = in_full_precision(problem);
  const Tensor go = grad_out.to(p.query.scalar_type());
  Gradients g = dropout > 0 ? dropout_backward(p, go, seed, dropout, want_bias) : plain_backward(p, go, {}, 0);
  const at::ScalarType dtype = problem.query.scalar_type();
  g.query = in_kernel_layout(g.query, dtype);
  g.key = in_kernel_layout(g.key, dtype);
  g.value = in_kernel_layout(g.value, dtype);
  return g;
}

Work work_of(const Problem& p, double passes) {
  const double pairs = static_cast<double>(p.query.size(0) * p.query.size(1)) * p.query.size(2) * p.key.size(2);
  Work work;
  work.flops = passes * 2.0 * pairs * static_cast<double>(p.query.size(3) + p.value.size(3)) * (p.causal ? 0.5 : 1.0);
  work.bytes = passes * static_cast<double>(p.query.nbytes() + p.key.nbytes() + p.value.nbytes() + p.query.nbytes());
  work.precision = precision_of(p.query);
  return work;
}
constexpr double kBackwardPasses = 2.5;  // five products where the forward has two

int64_t draw_seed(int device) {
  at::Generator generator = host_generator(default_generator(device));
  std::lock_guard<std::mutex> guard(generator.mutex());
  return static_cast<int64_t>(at::check_generator<at::CPUGeneratorImpl>(generator)->random64() >> 1);
}

Tensor seed_tensor(int64_t value) { return at::scalar_tensor(at::Scalar(value), at::TensorOptions().dtype(at::kLong)); }

// A card's kernel pads each row of the log-sum-exp to 32 queries.
Tensor padded_logsumexp(const Tensor& logsumexp, bool wanted) {
  const int64_t queries = logsumexp.size(2), padded = wanted ? (queries + 31) / 32 * 32 : 0;
  Tensor result = at::full({logsumexp.size(0), logsumexp.size(1), padded}, std::numeric_limits<double>::infinity(),
                           at::TensorOptions().dtype(at::kFloat));
  if (wanted) result.narrow(2, 0, queries).copy_(logsumexp);
  return result;
}

struct Launched {
  Tensor out, logsumexp, seed, offset;
};

template <class Finish>
Launched launch_forward(const char* name, const Tensor& query, const Tensor& key, const Tensor& value,
                        const OptionalTensor& bias, double dropout, bool causal, std::optional<double> scale,
                        Finish finish_logsumexp) {
  HostCall call(name, query.device().index());
  const Tensor mask = bias.value_or(Tensor());
  const Problem problem{call.read(query), call.read(key), call.read(value), call.read(mask), causal, scale_of(query, scale)};
  const bool use_cpu_kernel = cpu_kernel_can(query, key, value, mask, dropout);
  call.launch();
  KernelScope scope;
  const int64_t seed = dropout > 0 ? draw_seed(call.device()) : 0;
  const Forward forward = attention_on_host(problem, use_cpu_kernel, seed, dropout);
  call.finish(work_of(problem, 1.0));
  Launched result;
  result.out = call.adopt(forward.out);
  result.logsumexp = call.adopt(finish_logsumexp(forward.logsumexp));
  result.seed = call.adopt(seed_tensor(seed));
  result.offset = call.adopt(seed_tensor(0));
  return result;
}

// The gradient of an expanded mask has the mask's size, its rows padded to 16 as a card's kernel aligns them.
Tensor padded_bias_gradient(const Tensor& grad, at::ScalarType dtype, bool align) {
  const int64_t keys = grad.size(-1), padded = align ? (keys + 15) / 16 * 16 : keys;
  std::vector<int64_t> sizes(grad.sizes().begin(), grad.sizes().end());
  sizes.back() = padded;
  Tensor result = at::empty(sizes, grad.options().dtype(dtype)).narrow(-1, 0, keys);
  return result.copy_(grad);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> launch_backward(const char* name, const Tensor& grad_out, const Tensor& query,
                                                           const Tensor& key, const Tensor& value, const Tensor& bias,
                                                           const Tensor& out, const Tensor& logsumexp, const Tensor& seed,
                                                           double dropout, bool want_bias, bool causal,
                                                           std::optional<double> scale, bool align_bias) {
  if (!grad_out.defined()) return {};
  HostCall call(name, query.device().index());
  const Problem problem{call.read(query), call.read(key), call.read(value), call.read(bias), causal, scale_of(query, scale)};
  const Tensor host_grad = call.read(grad_out), host_out = call.read(out), host_logsumexp = call.read(logsumexp);
  const Tensor host_seed = call.read(seed);
  const bool use_cpu_kernel = cpu_kernel_can(query, key, value, bias, dropout) && !want_bias;
  call.launch();
  KernelScope scope;
  const int64_t seed_value = dropout > 0 ? *host_seed.const_data_ptr<int64_t>() : 0;
  const Gradients g = attention_backward_on_host(problem, use_cpu_kernel, host_grad, host_out, host_logsumexp, seed_value,
                                                 dropout, want_bias);
  call.finish(work_of(problem, kBackwardPasses));
  Tensor grad_bias;
  if (want_bias && bias.defined()) grad_bias = padded_bias_gradient(g.bias, bias.scalar_type(), align_bias);
  return {call.adopt(g.query), call.adopt(g.key), call.adopt(g.value), call.adopt(grad_bias)};
}

// ------------------------------------------------------------------------------------------------------- which kernel

bool is_fusable(const Tensor& query, const Tensor& key, const Tensor& value) {
  const at::ScalarType dtype = query.scalar_type();
  if (query.dim() != 4 || key.dim() != 4 || value.dim() != 4) return false;
  if (dtype != at::kFloat && dtype != at::kHalf && dtype != at::kBFloat16) return false;
  if (key.scalar_type() != dtype || value.scalar_type() != dtype) return false;
  if (query.is_nested() || query.sym_numel() == 0 || key.sym_numel() == 0 || value.sym_numel() == 0) return false;
  return query.sym_size(0) == key.sym_size(0) && query.sym_size(0) == value.sym_size(0) &&
         key.sym_size(1) == value.sym_size(1) && query.sym_size(3) == key.sym_size(3);
}

}  // namespace

int64_t attention_choice(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor&, double,
                         bool, std::optional<double>, bool grouped) {
  const bool enabled = at::globalContext().userEnabledMemEfficientSDP();
  if (!enabled || !is_fusable(query, key, value)) return static_cast<int64_t>(at::SDPBackend::math);
  if (query.sym_size(1) == key.sym_size(1)) return static_cast<int64_t>(at::SDPBackend::efficient_attention);
  return static_cast<int64_t>(grouped ? at::SDPBackend::overrideable : at::SDPBackend::math);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                                               const OptionalTensor& bias, bool compute_logsumexp,
                                                               double dropout, bool causal, std::optional<double> scale) {
  Launched r = launch_forward("aten::_scaled_dot_product_efficient_attention", query, key, value, bias, dropout, causal,
                              scale, [&](const Tensor& t) { return padded_logsumexp(t, compute_logsumexp); });
  return {r.out, r.logsumexp, r.seed, r.offset};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_attention_backward(
    const Tensor& grad_out, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& bias,
    const Tensor& out, const Tensor& logsumexp, const Tensor& seed, const Tensor&, double dropout,
    std::array<bool, 4> wanted, bool causal, std::optional<double> scale) {
  return launch_backward("aten::_scaled_dot_product_efficient_attention_backward", grad_out, query, key, value, bias, out,
                         logsumexp, seed, dropout, wanted[3], causal, scale, /*align_bias=*/true);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> grouped_attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& bias, double dropout, bool causal,
    bool, std::optional<double> scale) {
  Launched r = launch_forward("aten::_scaled_dot_product_fused_attention_overrideable", query, key, value, bias, dropout,
                              causal, scale, [](const Tensor& t) { return t.to(at::kFloat).contiguous(); });
  return {r.out, r.logsumexp, Tensor(), Tensor(), query.size(2), key.size(2), r.seed, r.offset, Tensor()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> grouped_attention_backward(
    const Tensor& grad_out, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& bias,
    std::array<bool, 4> wanted, const Tensor& out, const Tensor& logsumexp, const Tensor&, const Tensor&, int64_t, int64_t,
    double dropout, bool causal, const Tensor& seed, const Tensor&, std::optional<double> scale) {
  return launch_backward("aten::_scaled_dot_product_fused_attention_overrideable_backward", grad_out, query, key, value,
                         bias, out, logsumexp, seed, dropout, wanted[3], causal, scale, /*align_bias=*/false);
}

Tensor attention_dropout_mask(int64_t seed, int64_t batch, int64_t heads, int64_t queries, int64_t keys, double dropout) {
  return keep_mask(seed, 0, batch * heads, queries, keys, dropout).view({batch, heads, queries, keys});
}

}  // namespace simgpu

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &simgpu::attention_choice)
}
