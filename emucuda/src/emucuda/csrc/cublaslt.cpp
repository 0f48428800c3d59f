// libcublasLt.so.13: descriptors exist, one algorithm without a workspace is always found, products count a launch.
#include "handles.h"

using namespace emucuda;

extern "C" {

struct Heuristic {  // cublasLtMatmulHeuristicResult_t
  uint64_t algorithm[8];
  size_t workspace_bytes;
  int state;
  float waves;
  int reserved[4];
};

int cublasLtCreate(void** handle) { return make<Handle>(handle); }
int cublasLtDestroy(Handle* handle) { return delete handle, 0; }
size_t cublasLtGetVersion() { return 130101; }
size_t cublasLtGetCudartVersion() { return 13000; }

int cublasLtMatmulDescCreate(void** made, int, int) { return make_opaque(made); }
int cublasLtMatmulDescDestroy(void* it) { return free(it), 0; }
int cublasLtMatmulDescSetAttribute(void*, int, const void*, size_t) { return 0; }
int cublasLtMatrixLayoutCreate(void** made, int, uint64_t, uint64_t, int64_t) { return make_opaque(made); }
int cublasLtMatrixLayoutDestroy(void* it) { return free(it), 0; }
int cublasLtMatrixLayoutSetAttribute(void*, int, const void*, size_t) { return 0; }
int cublasLtMatrixTransformDescCreate(void** made, int) { return make_opaque(made); }
int cublasLtMatrixTransformDescDestroy(void* it) { return free(it), 0; }
int cublasLtMatrixTransformDescSetAttribute(void*, int, const void*, size_t) { return 0; }
int cublasLtMatmulPreferenceCreate(void** made) { return make_opaque(made); }
int cublasLtMatmulPreferenceDestroy(void* it) { return free(it), 0; }
int cublasLtMatmulPreferenceSetAttribute(void*, int, const void*, size_t) { return 0; }

int cublasLtMatmulAlgoGetHeuristic(void*, void*, void*, void*, void*, void*, void*, int, Heuristic* results, int* found) {
  memset(results, 0, sizeof *results);
  return *found = 1, 0;
}
int cublasLtMatmul(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*,
                   void*, void*, const void*, void*, size_t, void* stream) {
  return launch(nullptr, stream, "cublasLtMatmul"), 0;
}
int cublasLtMatrixTransform(void*, void*, const void*, const void*, void*, const void*, const void*, void*, void*, void*,
                            void* stream) {
  return launch(nullptr, stream, "cublasLtMatrixTransform"), 0;
}
}
