// libcudnn.so.9: the handle, descriptors, batch normalisation. The graph interface that convolutions use is in
// cudnn_graph.cpp, recurrent networks are in cudnn_rnn.cpp.
#include "cudnn_descriptors.h"

#include <cstdio>

using namespace emucuda;

namespace {
constexpr cudnnStatus_t ok = CUDNN_STATUS_SUCCESS;
Handle* of(cudnnHandle_t handle) { return reinterpret_cast<Handle*>(handle); }
cudnnStatus_t launched(cudnnHandle_t handle, const char* function) { return cudnnStatus_t(launch_on(of(handle), function)); }
}  // namespace

extern "C" {

size_t cudnnGetVersion() { return CUDNN_VERSION; }
size_t cudnnGetCudartVersion() { return 13000; }
cudnnStatus_t cudnnGetProperty(libraryPropertyType which, int* value) {
  *value = which == MAJOR_VERSION ? CUDNN_MAJOR : which == MINOR_VERSION ? CUDNN_MINOR : CUDNN_PATCHLEVEL;
  return ok;
}
const char* cudnnGetErrorString(cudnnStatus_t status) {
  static thread_local std::string said;
  said = last_missing().empty() ? "an error of the emulated cuDNN" : last_missing() + " is not emulated by emucuda";
  return status ? said.c_str() : "CUDNN_STATUS_SUCCESS";
}
void cudnnGetLastErrorString(char* text, size_t size) { snprintf(text, size, "%s", last_missing().c_str()); }

cudnnStatus_t cudnnCreate(cudnnHandle_t* handle) {
  return *handle = reinterpret_cast<cudnnHandle_t>(new Handle), ok;
}
cudnnStatus_t cudnnDestroy(cudnnHandle_t handle) { return delete of(handle), ok; }
cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream) { return of(handle)->stream = stream, ok; }
cudnnStatus_t cudnnGetStream(cudnnHandle_t handle, cudaStream_t* stream) {
  return *stream = static_cast<cudaStream_t>(of(handle)->stream), ok;
}

// ---- descriptors that are looked at

cudnnStatus_t cudnnCreateTensorDescriptor(cudnnTensorDescriptor_t* made) {
  return *made = reinterpret_cast<cudnnTensorDescriptor_t>(new Shape), ok;
}
cudnnStatus_t cudnnDestroyTensorDescriptor(cudnnTensorDescriptor_t it) { return delete shape_of(it), ok; }
cudnnStatus_t cudnnSetTensorNdDescriptor(cudnnTensorDescriptor_t it, cudnnDataType_t type, int rank, const int* sizes,
                                         const int* strides) {
  *shape_of(it) = Shape{type, {sizes, sizes + rank}, {strides, strides + rank}};
  return ok;
}
cudnnStatus_t cudnnGetTensorNdDescriptor(const cudnnTensorDescriptor_t it, int wanted, cudnnDataType_t* type, int* rank,
                                         int* sizes, int* strides) {
  const Shape& shape = *shape_of(it);
  *type = shape.type, *rank = int(shape.sizes.size());
  for (int i = 0; i < std::min(wanted, *rank); ++i) {
    sizes[i] = shape.sizes[size_t(i)];
    if (strides) strides[i] = shape.strides[size_t(i)];
  }
  return ok;
}

// ---- descriptors that are only handed back

#define EMUCUDA_OPAQUE(Name, Type)                                                                    \
  cudnnStatus_t cudnnCreate##Name##Descriptor(Type* made) { return cudnnStatus_t(make_opaque(made)); } \
  cudnnStatus_t cudnnDestroy##Name##Descriptor(Type it) { return free(it), ok; }
EMUCUDA_OPAQUE(Activation, cudnnActivationDescriptor_t)
EMUCUDA_OPAQUE(Dropout, cudnnDropoutDescriptor_t)
EMUCUDA_OPAQUE(Pooling, cudnnPoolingDescriptor_t)
EMUCUDA_OPAQUE(SpatialTransformer, cudnnSpatialTransformerDescriptor_t)
#undef EMUCUDA_OPAQUE

cudnnStatus_t cudnnSetActivationDescriptor(cudnnActivationDescriptor_t, cudnnActivationMode_t, cudnnNanPropagation_t, double) {
  return ok;
}
cudnnStatus_t cudnnDropoutGetStatesSize(cudnnHandle_t, size_t* bytes) {
  // One generator's state a thread, for as many threads as the card runs at once.
  return *bytes = size_t(48) * size_t(card().multiprocessors) * size_t(card().threads_per_multiprocessor()), ok;
}
cudnnStatus_t cudnnSetDropoutDescriptor(cudnnDropoutDescriptor_t, cudnnHandle_t handle, float, void*, size_t,
                                        unsigned long long) {
  return launched(handle, "cudnnSetDropoutDescriptor");
}
cudnnStatus_t cudnnRestoreDropoutDescriptor(cudnnDropoutDescriptor_t, cudnnHandle_t, float, void*, size_t, unsigned long long) {
  return ok;
}

// ---- batch normalisation. It keeps nothing beyond the saved mean and variance, which PyTorch allocates itself.

cudnnStatus_t cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    cudnnHandle_t, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t,
    const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnActivationDescriptor_t, size_t* bytes) {
  return *bytes = 0, ok;
}
cudnnStatus_t cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    cudnnHandle_t, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t,
    const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t, const cudnnTensorDescriptor_t,
    const cudnnTensorDescriptor_t, const cudnnActivationDescriptor_t, size_t* bytes) {
  return *bytes = 0, ok;
}
cudnnStatus_t cudnnGetBatchNormalizationTrainingExReserveSpaceSize(
    cudnnHandle_t, cudnnBatchNormMode_t, cudnnBatchNormOps_t, const cudnnActivationDescriptor_t, const cudnnTensorDescriptor_t,
    size_t* bytes) {
  return *bytes = 0, ok;
}
// The arguments of the three that compute are not looked at, so only the first is declared.
int cudnnBatchNormalizationForwardTrainingEx(void* handle) { return launch_on(handle, "cudnnBatchNormalizationForwardTrainingEx"); }
int cudnnBatchNormalizationBackwardEx(void* handle) { return launch_on(handle, "cudnnBatchNormalizationBackwardEx"); }
int cudnnBatchNormalizationForwardInference(void* handle) { return launch_on(handle, "cudnnBatchNormalizationForwardInference"); }
}
