// cuDNN's recurrent networks: where each weight lies in the flat buffer, and how much space a pass takes.
//
// NOTE [spaces of recurrent networks]: cuDNN does not publish the sizes of its work and reserve spaces. The reserve
// space holds here what backward needs of every step: the gates, the cell and the hidden state of each layer and
// direction, and a mask of the dropout between layers. The work space holds one layer's gates for all steps.
#include "cudnn_descriptors.h"

using namespace emucuda;

namespace {

constexpr cudnnStatus_t ok = CUDNN_STATUS_SUCCESS;

struct Network {
  cudnnRNNMode_t mode;
  cudnnRNNBiasMode_t biases;
  int directions;
  cudnnDataType_t type;
  size_t input, hidden, projected, layers;

  size_t gates() const { return mode == CUDNN_LSTM ? 4 : mode == CUDNN_GRU ? 3 : 1; }
  size_t matrices() const { return 2 * gates() + (has_projection() ? 1 : 0); }
  bool has_projection() const { return mode == CUDNN_LSTM && projected != hidden; }
  size_t bias_sets() const {
    return biases == CUDNN_RNN_NO_BIAS ? 0 : biases == CUDNN_RNN_DOUBLE_BIAS ? 2 : 1;
  }
  size_t input_of(size_t pseudo_layer) const {
    return pseudo_layer < size_t(directions) ? input : projected * size_t(directions);
  }
};

struct Sequence {
  size_t steps = 0, batch = 0, width = 0;
};

Network* of(cudnnRNNDescriptor_t it) { return reinterpret_cast<Network*>(it); }
Sequence* of(cudnnRNNDataDescriptor_t it) { return reinterpret_cast<Sequence*>(it); }

struct Matrix {
  size_t rows, columns;
  size_t elements() const { return rows * columns; }
};

// Matrix `id` of a pseudo layer: first those for the input, a gate each, then those for the state, then the projection.
Matrix matrix_of(const Network& n, size_t pseudo_layer, size_t id) {
  if (id < n.gates()) return {n.hidden, n.input_of(pseudo_layer)};
  if (id < 2 * n.gates()) return {n.hidden, n.projected};
  return {n.projected, n.hidden};
}

size_t matrices_elements(const Network& n, size_t pseudo_layer, size_t before) {
  size_t elements = 0;
  for (size_t id = 0; id < before; ++id) elements += matrix_of(n, pseudo_layer, id).elements();
  return elements;
}

size_t all_matrices_elements(const Network& n, size_t pseudo_layers) {
  size_t elements = 0;
  for (size_t layer = 0; layer < pseudo_layers; ++layer) elements += matrices_elements(n, layer, n.matrices());
  return elements;
}

size_t biases_of_layer(const Network& n) { return n.bias_sets() * n.gates() * n.hidden; }

void set_shape(cudnnTensorDescriptor_t it, cudnnDataType_t type, size_t rows, size_t columns) {
  *shape_of(it) = Shape{type, {1, int(rows), int(columns)}, {int(rows * columns), int(columns), 1}};
}

}  // namespace

extern "C" {

cudnnStatus_t cudnnCreateRNNDescriptor(cudnnRNNDescriptor_t* made) {
  return *made = reinterpret_cast<cudnnRNNDescriptor_t>(new Network{}), ok;
}
cudnnStatus_t cudnnDestroyRNNDescriptor(cudnnRNNDescriptor_t it) { return delete of(it), ok; }
cudnnStatus_t cudnnSetRNNDescriptor_v8(cudnnRNNDescriptor_t it, cudnnRNNAlgo_t, cudnnRNNMode_t mode,
                                       cudnnRNNBiasMode_t biases, cudnnDirectionMode_t direction, cudnnRNNInputMode_t,
                                       cudnnDataType_t type, cudnnDataType_t, cudnnMathType_t, int32_t input,
                                       int32_t hidden, int32_t projected, int32_t layers, cudnnDropoutDescriptor_t,
                                       uint32_t) {
  const int directions = direction == CUDNN_BIDIRECTIONAL ? 2 : 1;
  const int32_t width = projected > 0 ? projected : hidden;
  *of(it) = Network{mode, biases, directions, type, size_t(input), size_t(hidden), size_t(width), size_t(layers)};
  return ok;
}
cudnnStatus_t cudnnCreateRNNDataDescriptor(cudnnRNNDataDescriptor_t* made) {
  return *made = reinterpret_cast<cudnnRNNDataDescriptor_t>(new Sequence), ok;
}
cudnnStatus_t cudnnDestroyRNNDataDescriptor(cudnnRNNDataDescriptor_t it) { return delete of(it), ok; }
cudnnStatus_t cudnnSetRNNDataDescriptor(cudnnRNNDataDescriptor_t it, cudnnDataType_t, cudnnRNNDataLayout_t, int steps,
                                        int batch, int width, const int*, void*) {
  return *of(it) = {size_t(steps), size_t(batch), size_t(width)}, ok;
}

cudnnStatus_t cudnnGetRNNWeightSpaceSize(cudnnHandle_t, cudnnRNNDescriptor_t it, size_t* bytes) {
  const Network& n = *of(it);
  const size_t pseudo_layers = n.layers * size_t(n.directions);
  const size_t elements = all_matrices_elements(n, pseudo_layers) + pseudo_layers * biases_of_layer(n);
  return *bytes = elements * bytes_of(n.type), ok;
}
// All matrices come first, then all biases, as in cuDNN: PyTorch makes one flat buffer and views into it. It asks for
// matrices and biases one by one, with null pointers for what it does not want.
cudnnStatus_t cudnnGetRNNWeightParams(cudnnHandle_t, cudnnRNNDescriptor_t it, int32_t pseudo_layer, size_t,
                                      const void* space, int32_t id, cudnnTensorDescriptor_t matrix_shape, void** matrix,
                                      cudnnTensorDescriptor_t bias_shape, void** bias) {
  const Network& n = *of(it);
  const size_t layer = size_t(pseudo_layer), which = size_t(id), item = bytes_of(n.type);
  if (matrix) *matrix = nullptr;
  if (bias) *bias = nullptr;
  if (which >= n.matrices()) return ok;
  char* base = static_cast<char*>(const_cast<void*>(space));
  const Matrix shape = matrix_of(n, layer, which);
  if (matrix) *matrix = base + item * (all_matrices_elements(n, layer) + matrices_elements(n, layer, which));
  if (matrix_shape) set_shape(matrix_shape, n.type, shape.rows, shape.columns);
  if (bias && bias_shape && which < n.bias_sets() * n.gates()) {
    const size_t all = all_matrices_elements(n, n.layers * size_t(n.directions));
    *bias = base + item * (all + layer * biases_of_layer(n) + which * n.hidden);
    set_shape(bias_shape, n.type, n.hidden, 1);
  }
  return ok;
}
cudnnStatus_t cudnnGetRNNTempSpaceSizes(cudnnHandle_t, cudnnRNNDescriptor_t it, cudnnForwardMode_t mode,
                                        cudnnRNNDataDescriptor_t data, size_t* work_bytes, size_t* reserve_bytes) {
  const Network& n = *of(it);
  const Sequence& s = *of(data);
  const size_t item = bytes_of(n.type), cells = s.steps * s.batch * n.hidden * size_t(n.directions);
  *work_bytes = item * n.gates() * cells;
  const size_t kept = (n.gates() + (n.mode == CUDNN_LSTM ? 2 : 1)) * item + (n.layers > 1 ? 1 : 0);
  if (reserve_bytes) *reserve_bytes = mode == CUDNN_FWD_MODE_TRAINING ? n.layers * cells * kept : 0;
  return ok;
}

cudnnStatus_t cudnnRNNForward(cudnnHandle_t handle, cudnnRNNDescriptor_t, cudnnForwardMode_t, const int32_t*,
                              cudnnRNNDataDescriptor_t, const void*, cudnnRNNDataDescriptor_t, void*,
                              cudnnTensorDescriptor_t, const void*, void*, cudnnTensorDescriptor_t, const void*, void*,
                              size_t, const void*, size_t, void*, size_t, void*) {
  return cudnnStatus_t(launch_on(handle, "cudnnRNNForward"));
}
cudnnStatus_t cudnnRNNBackwardData_v8(cudnnHandle_t handle, cudnnRNNDescriptor_t, const int32_t*, cudnnRNNDataDescriptor_t,
                                      const void*, const void*, cudnnRNNDataDescriptor_t, void*, cudnnTensorDescriptor_t,
                                      const void*, const void*, void*, cudnnTensorDescriptor_t, const void*, const void*,
                                      void*, size_t, const void*, size_t, void*, size_t, void*) {
  return cudnnStatus_t(launch_on(handle, "cudnnRNNBackwardData_v8"));
}
cudnnStatus_t cudnnRNNBackwardWeights_v8(cudnnHandle_t handle, cudnnRNNDescriptor_t, cudnnWgradMode_t, const int32_t*,
                                         cudnnRNNDataDescriptor_t, const void*, cudnnTensorDescriptor_t, const void*,
                                         cudnnRNNDataDescriptor_t, const void*, size_t, void*, size_t, void*, size_t,
                                         void*) {
  return cudnnStatus_t(launch_on(handle, "cudnnRNNBackwardWeights_v8"));
}
}
