#include "fallback.h"

#include <ATen/core/List.h>

#include <unordered_map>
#include <unordered_set>

#include "generator.h"
#include "host_call.h"

namespace simgpu {

namespace {

using c10::IValue;
using torch::jit::Stack;

// ------------------------------------------------------------------------------------- what the schema tells of an op

struct OperatorFacts {
  bool is_view = false;         // results are views of operands: no launch
  bool host_waits = false;      // the host reads the result (item, nonzero)
  bool draws = false;           // random
  bool is_matmul = false;
  bool is_lookup = false;       // touches few rows of a large operand
  bool counts = false;          // a histogram
  int weight_argument = -1;     // of a convolution
  int generator_argument = -1;
  int host_argument = -1;       // may be a CPU tensor that is no scalar
  bool overwrites = false;      // what it writes to it does not read (zero_, fill_)
  bool raises_versions = false; // by itself; autograd does it for all but operators over lists
  std::vector<bool> writes;     // per argument
  std::vector<bool> is_out;     // per argument: out=, which is written and not read
  std::vector<int> returns_argument;  // per result: the written argument that it is, or -1
};

// The one argument that a real device also allows to be a CPU tensor that is no scalar: indices, sequence lengths, a
// list of scalars.
int host_argument_of(const std::string& name) {
  static const std::unordered_map<std::string, int> arguments = {
      {"aten::index", 1}, {"aten::index_put", 1}, {"aten::index_put_", 1}, {"aten::_index_put_impl_", 1},
      {"aten::_unsafe_index", 1}, {"aten::_unsafe_index_put", 1}, {"aten::_pack_padded_sequence", 1},
      {"aten::_pack_padded_sequence_backward", 2}, {"aten::_foreach_addcmul", 3}, {"aten::_foreach_addcmul_", 3},
      {"aten::_foreach_addcdiv", 3}, {"aten::_foreach_addcdiv_", 3}};
  auto found = arguments.find(name);
  return found == arguments.end() ? -1 : found->second;
}

bool is_matmul(const std::string& name) {
  static const std::unordered_set<std::string> names = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm",
                                                        "aten::addmm_", "aten::baddbmm_", "aten::addbmm"};
  return names.count(name) > 0;
}

bool is_lookup(const std::string& name) {
  static const std::unordered_set<std::string> names = {"aten::embedding", "aten::index_select", "aten::gather",
                                                        "aten::index", "aten::_unsafe_index"};
  return names.count(name) > 0;
}

bool overwrites(const std::string& name) {
  static const std::unordered_set<std::string> names = {"aten::zero_", "aten::fill_", "aten::_foreach_zero_"};
  return names.count(name) > 0;
}

// As the CUDA build does it, read off on an emulated card: all operators over lists that write in place but these.
bool raises_versions(const c10::FunctionSchema& schema) {
  const std::string& name = schema.name();
  const std::string& overload = schema.overload_name();
  if (name.rfind("aten::_foreach_", 0) != 0 || name.back() != '_' || name == "aten::_foreach_zero_") return false;
  return name != "aten::_foreach_lerp_" || (overload != "Scalar" && overload != "ScalarList");
}

int argument_returned_as(const c10::FunctionSchema& schema, const c10::Argument& result) {
  if (!result.alias_info() || !result.alias_info()->isWrite()) return -1;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    auto* info = schema.arguments()[i].alias_info();
    if (info && info->beforeSets() == result.alias_info()->beforeSets()) return static_cast<int>(i);
  }
  return -1;
}

bool is_host_value(const c10::Argument& result) {
  const std::string type = result.type()->str();
  return type == "bool" || type == "Scalar" || type == "number";
}

OperatorFacts read_facts(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  OperatorFacts facts;
  for (auto& argument : schema.arguments()) {
    if (argument.type()->str().find("Generator") != std::string::npos) {
      facts.generator_argument = static_cast<int>(facts.writes.size());
    }
    facts.writes.push_back(argument.alias_info() && argument.alias_info()->isWrite());
    facts.is_out.push_back(facts.writes.back() && argument.kwarg_only());
  }
  facts.is_view = !schema.returns().empty();
  facts.host_waits = op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape);
  for (auto& result : schema.returns()) {
    facts.returns_argument.push_back(argument_returned_as(schema, result));
    facts.is_view &= result.alias_info() && !result.alias_info()->isWrite();
    facts.host_waits |= is_host_value(result);
  }
  const std::string& name = schema.name();
  facts.draws = op.hasTag(at::Tag::nondeterministic_seeded);
  facts.host_argument = host_argument_of(name);
  facts.is_matmul = is_matmul(name);
  facts.is_lookup = is_lookup(name);
  facts.overwrites = overwrites(name);
  facts.raises_versions = raises_versions(schema);
  facts.counts = name == "aten::histc" && schema.overload_name().empty();
  if (name == "aten::convolution") facts.weight_argument = 1;
  if (name == "aten::convolution_backward") facts.weight_argument = 2;
  return facts;
}

// Only PyTorch's own operators are remembered: a custom one can be taken back, and another be defined at its address.
const OperatorFacts& facts_of(const c10::OperatorHandle& op, std::optional<OperatorFacts>& scratch) {
  static thread_local std::unordered_map<const c10::FunctionSchema*, OperatorFacts> cache;
  if (op.schema().name().rfind("aten::", 0) != 0) return scratch.emplace(read_facts(op));
  auto found = cache.find(&op.schema());
  if (found == cache.end()) found = cache.emplace(&op.schema(), read_facts(op)).first;
  return found->second;
}

// --------------------------------------------------------------------------------------------------- one boxed call

class BoxedCall {
 public:
  BoxedCall(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), stack_(stack), facts_(facts_of(op, scratch_)), call_(op.schema().name().c_str(), -1),
        arguments_(op.schema().arguments().size()), first_(stack->size() - arguments_) {}

  void run() {
    find_device();
    alias_arguments();
    if (!facts_.is_view) call_.launch();
    compute();
    for (auto& [device_tensor, alias] : written_) call_.sync_geometry(device_tensor, alias);
    adopt_results();
    if (facts_.raises_versions) raise_versions();
    if (!facts_.is_view) call_.finish(work());
    if (facts_.host_waits) {
      Lock lock;
      runtime().host_waits_for_lane(call_.lane());
    }
  }

 private:
  // From the first device operand, or a Device argument (factories), or what is current.
  void find_device() {
    for (size_t i = 0; i < arguments_ && !call_.has_device(); ++i) {
      const IValue& value = argument(i);
      if (value.isTensor() && on_device(value.toTensor())) call_.require_device(value.toTensor().device().index());
      if (value.isDevice() && value.toDevice().type() == c10::DeviceType::PrivateUse1 && value.toDevice().has_index()) {
        call_.require_device(value.toDevice().index());
      }
      if (value.isTensorList()) {
        for (const Tensor& t : value.toTensorList()) {
          if (on_device(t)) { call_.require_device(t.device().index()); break; }
        }
      }
    }
    if (!call_.has_device()) call_.require_device(current_device());
  }

  void alias_arguments() {
    for (size_t i = 0; i < arguments_; ++i) {
      if (facts_.writes[i]) originals_.emplace_back(static_cast<int>(i), argument(i));
      alias_argument(argument(i), i);
    }
  }

  void alias_argument(IValue& value, size_t index) {
    const bool write = facts_.writes[index];
    if (value.isTensor()) {
      value = alias(value.toTensor(), write, index);
    } else if (value.isTensorList()) {
      c10::List<Tensor> aliases;
      for (const Tensor& t : value.toTensorVector()) aliases.push_back(alias(t, write, index));
      value = std::move(aliases);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> aliases;
      for (std::optional<Tensor> t : value.toOptionalTensorList()) {
        aliases.push_back(t ? std::optional<Tensor>(alias(*t, write, index)) : t);
      }
      value = std::move(aliases);
    } else if (value.isDevice()) {
      value = c10::Device(c10::DeviceType::CPU);
    } else if (static_cast<int>(index) == facts_.generator_argument) {
      alias_generator(value);
    }
  }

  void alias_generator(IValue& value) {
    has_generator_ = true;
    if (value.isNone()) {
      value = host_generator(default_generator(call_.device()));
    } else {
      const c10::Device device = value.toGenerator().device();
      TORCH_CHECK(device == device_at(call_.device()), "Expected a '", device_at(call_.device()),
                  "' generator device but found '", device, "'");
      value = host_generator(value.toGenerator());
    }
  }

  Tensor alias(const Tensor& t, bool write, size_t index) {
    if (t.defined() && !on_device(t)) return host_operand(t, write, index);
    Tensor host = write ? call_.write(t) : call_.read(t);
    if (!t.defined()) return host;
    // What is changed in place is read and written.
    const bool both = write && !facts_.is_out[index] && !facts_.overwrites;
    bytes_ += (both ? 2.0 : 1.0) * static_cast<double>(t.numel() * t.itemsize());
    if (!facts_.is_out[index]) previous_operand_ = std::exchange(last_operand_, host);
    if (write) written_.emplace_back(t, host);
    if (static_cast<int>(index) == facts_.weight_argument) weight_ = host;
    if (index == 0) grad_out_elements_ = static_cast<double>(t.numel());
    return host;
  }

  // As on a real device: only scalars, and indices of the few operators that move them, may be on the CPU.
  Tensor host_operand(const Tensor& t, bool write, size_t index) {
    const bool allowed = t.dim() == 0 || static_cast<int>(index) == facts_.host_argument;
    if (write || !allowed || !t.device().is_cpu()) call_.refuse(t);
    return call_.pass(t);
  }

  void compute() {
    KernelScope scope;
    DrawFromDevice draw(call_.device(), facts_.draws && !has_generator_);
    const bool halves = multiplies_halves(), integers = counts_integers();
    if (halves) cast_arguments(at::kFloat);
    if (integers) cast_arguments(at::kDouble);
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    if (halves || integers) stack_->back() = stack_->back().toTensor().to(last_operand_.scalar_type());
  }

  // A real device has histograms of integers (mixtures of experts count tokens with them), the CPU only of floats.
  bool counts_integers() const {
    return facts_.counts && last_operand_.defined() && c10::isIntegralType(last_operand_.scalar_type(), false);
  }

  // NOTE [products of halves]: a real device multiplies 16-bit numbers, adds in 32 bits and rounds once. So do we, by
  // way of 32 bits on the host: the CPU's own 16-bit products can take a hundred times as long.
  bool multiplies_halves() {
    if (!facts_.is_matmul || !originals_.empty() || !op_.schema().overload_name().empty()) return false;
    const at::ScalarType dtype = last_operand_.defined() ? last_operand_.scalar_type() : at::kFloat;
    for (size_t i = 0; i < arguments_; ++i) {
      if (argument(i).isTensor() && argument(i).toTensor().scalar_type() != dtype) return false;
    }
    return dtype == at::kHalf || dtype == at::kBFloat16;
  }

  void cast_arguments(at::ScalarType dtype) {
    for (size_t i = 0; i < arguments_; ++i) {
      if (argument(i).isTensor()) argument(i) = argument(i).toTensor().to(dtype);
    }
  }

  void adopt_results() {
    const size_t results = op_.schema().returns().size(), first = stack_->size() - results;
    for (size_t i = 0; i < results; ++i) {
      IValue& value = (*stack_)[first + i];
      if (facts_.returns_argument[i] >= 0) {
        value = original(facts_.returns_argument[i]);
      } else if (value.isTensor()) {
        value = adopt(value.toTensor());
      } else if (value.isTensorList()) {
        c10::List<Tensor> adopted;
        for (const Tensor& t : value.toTensorVector()) adopted.push_back(adopt(t));
        value = std::move(adopted);
      }
    }
  }

  void raise_versions() const {
    for (auto& [device_tensor, alias] : written_) {
      if (!device_tensor.is_inference()) device_tensor.unsafeGetTensorImpl()->bump_version();
    }
  }

  Tensor adopt(const Tensor& host_result) {
    Tensor result = call_.adopt(host_result);
    if (result.defined()) result_bytes_ += static_cast<double>(result.numel() * result.itemsize());
    return result;
  }

  IValue original(int index) const {
    for (auto& [i, value] : originals_) {
      if (i == index) return value;
    }
    return {};
  }

  Work work() const {
    Work work;
    work.bytes = facts_.is_lookup ? 2 * result_bytes_ : bytes_ + result_bytes_;
    if (last_operand_.defined()) work.precision = precision_of(last_operand_);
    if (facts_.is_matmul && previous_operand_.defined() && last_operand_.dim() >= 2) {
      work.flops = 2.0 * static_cast<double>(previous_operand_.numel() * last_operand_.size(-1));
    }
    if (weight_.defined()) work.flops = convolution_flops();
    return work;
  }

  // Every weight of an output channel meets every output position; backward is two such products.
  double convolution_flops() const {
    if (weight_.numel() == 0) return 0;
    const bool backward = facts_.weight_argument == 2;
    const double positions = backward ? grad_out_elements_ : result_bytes_ / static_cast<double>(weight_.itemsize());
    const double per_position = 2.0 * static_cast<double>(weight_.numel()) / static_cast<double>(weight_.size(0));
    return (backward ? 2 : 1) * per_position * positions;
  }

  IValue& argument(size_t index) { return (*stack_)[first_ + index]; }

  const c10::OperatorHandle& op_;
  Stack* stack_;
  std::optional<OperatorFacts> scratch_;  // of an operator that is not remembered
  const OperatorFacts& facts_;
  HostCall call_;
  const size_t arguments_, first_;
  c10::SmallVector<std::pair<int, IValue>, 4> originals_;
  c10::SmallVector<std::pair<Tensor, Tensor>, 4> written_;  // (device tensor, its alias)
  Tensor previous_operand_, last_operand_, weight_;
  double bytes_ = 0, result_bytes_ = 0, grad_out_elements_ = 0;
  bool has_generator_ = false;
};

}  // namespace

void run_on_host(const c10::OperatorHandle& op, Stack* stack) { BoxedCall(op, stack).run(); }

}  // namespace simgpu
