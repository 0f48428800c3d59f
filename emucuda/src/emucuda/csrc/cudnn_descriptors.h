// Tensor shapes as cuDNN's interfaces state them, shared by the files of its stand-in.
#pragma once
#define CUDNN_DISABLE_DEPRECATION_WARNINGS
// Three functions are defined without their arguments, which nobody looks at; cuDNN's own declarations must not clash.
#define cudnnBatchNormalizationForwardTrainingEx declared_by_cudnn_1
#define cudnnBatchNormalizationBackwardEx declared_by_cudnn_2
#define cudnnBatchNormalizationForwardInference declared_by_cudnn_3
#include <cudnn.h>
#undef cudnnBatchNormalizationForwardTrainingEx
#undef cudnnBatchNormalizationBackwardEx
#undef cudnnBatchNormalizationForwardInference

#include <algorithm>
#include <vector>

#include "handles.h"

namespace emucuda {

inline size_t bytes_of(cudnnDataType_t type) {
  switch (type) {
    case CUDNN_DATA_DOUBLE: case CUDNN_DATA_INT64: case CUDNN_DATA_COMPLEX_FP32: return 8;
    case CUDNN_DATA_FLOAT: case CUDNN_DATA_INT32: case CUDNN_DATA_UINT32: return 4;
    case CUDNN_DATA_HALF: case CUDNN_DATA_BFLOAT16: return 2;
    default: return 1;
  }
}

struct Shape {
  cudnnDataType_t type = CUDNN_DATA_FLOAT;
  std::vector<int> sizes, strides;
};
inline Shape* shape_of(cudnnTensorDescriptor_t it) { return reinterpret_cast<Shape*>(it); }

}  // namespace emucuda
