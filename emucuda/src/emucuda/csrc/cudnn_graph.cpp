// cuDNN's graph interface: descriptors with attributes, from which PyTorch builds an operation, asks which engines could
// compute it, and takes the workspace that the first one wants. One engine answers for everything and computes nothing.
//
// NOTE [workspaces of convolutions]: cuDNN does not publish them. Its tensor-core kernels want channels last, and copy
// what lies otherwise into the workspace; so the workspace is here the bytes of the operation's tensors that are not
// channels last. It is an estimate, and no engine with another trade-off is ever offered.
#include <map>
#include <memory>
#include <mutex>

#include "cudnn_descriptors.h"

using namespace emucuda;

namespace {

constexpr cudnnStatus_t ok = CUDNN_STATUS_SUCCESS;

struct Descriptor;
using DescriptorPointer = std::shared_ptr<Descriptor>;

struct Attribute {
  int64_t count = 0;
  std::vector<char> bytes;
  std::vector<DescriptorPointer> parts;  // for attributes that are descriptors: cuDNN keeps them alive as well
};
struct Descriptor {
  cudnnBackendDescriptorType_t type;
  std::map<int, Attribute> attributes;

  const Attribute* find(int name) const {
    const auto found = attributes.find(name);
    return found == attributes.end() ? nullptr : &found->second;
  }
  DescriptorPointer part(int name) const {
    const Attribute* it = find(name);
    return it && !it->parts.empty() ? it->parts.front() : nullptr;
  }
  std::vector<int64_t> numbers(int name) const {
    const Attribute* it = find(name);
    if (!it) return {};
    const auto* first = reinterpret_cast<const int64_t*>(it->bytes.data());
    return {first, first + it->count};
  }
};

std::mutex lock;
std::map<void*, DescriptorPointer>& descriptors() {
  static auto* it = new std::map<void*, DescriptorPointer>;
  return *it;
}
DescriptorPointer known(void* handle) {
  const auto found = descriptors().find(handle);
  return found == descriptors().end() ? nullptr : found->second;
}

size_t element_bytes(cudnnBackendAttributeType_t type) {
  switch (type) {
    case CUDNN_TYPE_HANDLE: case CUDNN_TYPE_VOID_PTR: case CUDNN_TYPE_BACKEND_DESCRIPTOR: return sizeof(void*);
    case CUDNN_TYPE_INT64: case CUDNN_TYPE_DOUBLE: return 8;
    case CUDNN_TYPE_BOOLEAN: case CUDNN_TYPE_CHAR: return 1;
    case CUDNN_TYPE_FRACTION: return 16;
    default: return 4;  // enumerations, float, int32
  }
}

// ---- how much a plan takes

bool is_channels_last(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  return sizes.size() < 3 || sizes[1] == 1 || strides[1] == 1;
}

size_t converted_bytes(const DescriptorPointer& tensor) {
  if (!tensor) return 0;
  const auto sizes = tensor->numbers(CUDNN_ATTR_TENSOR_DIMENSIONS), strides = tensor->numbers(CUDNN_ATTR_TENSOR_STRIDES);
  if (is_channels_last(sizes, strides)) return 0;
  const Attribute* type = tensor->find(CUDNN_ATTR_TENSOR_DATA_TYPE);
  size_t bytes = type ? bytes_of(*reinterpret_cast<const cudnnDataType_t*>(type->bytes.data())) : 4;
  for (const int64_t size : sizes) bytes *= size_t(size);
  return bytes;
}

std::vector<int> tensors_of(cudnnBackendDescriptorType_t operation) {
  switch (operation) {
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR:
      return {CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
              CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y};
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR:
      return {CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY};
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR:
      return {CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
              CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY};
    default: return {};
  }
}

int64_t workspace_bytes(const Descriptor& config) {
  const DescriptorPointer engine = config.part(CUDNN_ATTR_ENGINECFG_ENGINE);
  const DescriptorPointer graph = engine ? engine->part(CUDNN_ATTR_ENGINE_OPERATION_GRAPH) : nullptr;
  const Attribute* operations = graph ? graph->find(CUDNN_ATTR_OPERATIONGRAPH_OPS) : nullptr;
  size_t bytes = 0;
  if (operations)
    for (const DescriptorPointer& operation : operations->parts)
      for (const int name : tensors_of(operation->type)) bytes += converted_bytes(operation->part(name));
  return int64_t(bytes);
}

// ---- answers

Attribute numbers(std::initializer_list<int64_t> values) {
  Attribute it;
  it.count = int64_t(values.size());
  it.bytes.resize(values.size() * sizeof(int64_t));
  std::copy(values.begin(), values.end(), reinterpret_cast<int64_t*>(it.bytes.data()));
  return it;
}
Attribute part(const DescriptorPointer& descriptor) {
  Attribute it;
  it.count = 1;
  it.parts = {descriptor};
  return it;
}

// The one way to compute a graph that is ever proposed.
DescriptorPointer only_config(const DescriptorPointer& graph) {
  auto engine = std::make_shared<Descriptor>(Descriptor{CUDNN_BACKEND_ENGINE_DESCRIPTOR, {}});
  engine->attributes[CUDNN_ATTR_ENGINE_OPERATION_GRAPH] = part(graph);
  engine->attributes[CUDNN_ATTR_ENGINE_GLOBAL_INDEX] = numbers({0});
  auto config = std::make_shared<Descriptor>(Descriptor{CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, {}});
  config->attributes[CUDNN_ATTR_ENGINECFG_ENGINE] = part(engine);
  return config;
}

bool is_answered_with_none(int name) {
  switch (name) {
    case CUDNN_ATTR_ENGINE_NUMERICAL_NOTE: case CUDNN_ATTR_ENGINE_BEHAVIOR_NOTE: case CUDNN_ATTR_ENGINE_KNOB_INFO:
    case CUDNN_ATTR_ENGINE_LAYOUT_INFO: case CUDNN_ATTR_ENGINECFG_KNOB_CHOICES:
    case CUDNN_ATTR_ENGINECFG_INTERMEDIATE_INFO: return true;
    default: return false;
  }
}

// What is asked of a descriptor: an attribute that was set, or one that cuDNN works out.
bool answer(const Descriptor& it, int name, Attribute& out) {
  if (const Attribute* set = it.find(name)) return out = *set, true;
  switch (name) {
    case CUDNN_ATTR_ENGINEHEUR_RESULTS: return out = part(only_config(it.part(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH))), true;
    case CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT: return out = numbers({1}), true;
    case CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE: return out = numbers({workspace_bytes(it)}), true;
    case CUDNN_ATTR_ENGINECFG_SHARED_MEMORY_USED: return out = numbers({0}), true;
    case CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE:
      if (const DescriptorPointer config = it.part(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG))
        return out = numbers({workspace_bytes(*config)}), true;
      return false;
    default: return is_answered_with_none(name);
  }
}

}  // namespace

extern "C" {

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t* made) {
  std::lock_guard<std::mutex> guard(lock);
  auto it = std::make_shared<Descriptor>(Descriptor{type, {}});
  descriptors()[it.get()] = it;
  return *made = it.get(), ok;
}
cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t it) {
  std::lock_guard<std::mutex> guard(lock);
  return descriptors().erase(it), ok;
}
cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t) { return ok; }

cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t handle, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t count, const void* elements) {
  std::lock_guard<std::mutex> guard(lock);
  const DescriptorPointer it = known(handle);
  if (!it) return CUDNN_STATUS_BAD_PARAM;
  Attribute set;
  set.count = count;
  if (type == CUDNN_TYPE_BACKEND_DESCRIPTOR) {
    for (int64_t i = 0; i < count; ++i) set.parts.push_back(known(static_cast<void* const*>(elements)[i]));
  } else {
    const char* first = static_cast<const char*>(elements);
    set.bytes.assign(first, first + size_t(count) * element_bytes(type));
  }
  it->attributes[name] = std::move(set);
  return ok;
}

cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t handle, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t room, int64_t* count, void* elements) {
  std::lock_guard<std::mutex> guard(lock);
  const DescriptorPointer it = known(handle);
  Attribute out;
  if (!it || !answer(*it, name, out)) {
    const std::string what = "cudnnBackendGetAttribute for attribute " + std::to_string(int(name));
    return cudnnStatus_t(missing(what.c_str(), CUDNN_STATUS_NOT_SUPPORTED));
  }
  if (count) *count = out.count;
  const int64_t given = std::min(room, out.count);
  if (!elements || given <= 0) return ok;
  if (type != CUDNN_TYPE_BACKEND_DESCRIPTOR) {
    memcpy(elements, out.bytes.data(), size_t(given) * element_bytes(type));
    return ok;
  }
  for (int64_t i = 0; i < given; ++i) {  // the caller brings empty descriptors, and cuDNN fills them
    const DescriptorPointer target = known(static_cast<void**>(elements)[i]);
    if (!target) return CUDNN_STATUS_BAD_PARAM;
    target->attributes = out.parts[size_t(i)]->attributes;
  }
  return ok;
}

cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t, cudnnBackendDescriptor_t) {
  return cudnnStatus_t(launch_on(handle, "cudnnBackendExecute"));
}
}
