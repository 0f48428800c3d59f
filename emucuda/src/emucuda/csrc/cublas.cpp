// libcublas.so.13: handles, and the few questions that PyTorch asks. Products are generated stubs that count a launch.
// Its workspace is PyTorch's: one per handle and stream, taken from the caching allocator and set here.
// Declared, not included: cublas_v2.h needs the fp16 headers, which need a package that PyTorch does not bring.
#include "handles.h"

using namespace emucuda;

extern "C" {

int cublasCreate_v2(void** handle) { return make<Handle>(handle); }
int cublasDestroy_v2(Handle* handle) { return delete handle, 0; }
int cublasSetStream_v2(Handle* handle, void* stream) { return handle->stream = stream, 0; }
int cublasGetStream_v2(Handle* handle, void** stream) { return *stream = handle->stream, 0; }
int cublasSetPointerMode_v2(Handle* handle, int mode) { return handle->pointer_mode = mode, 0; }
int cublasGetPointerMode_v2(Handle* handle, int* mode) { return *mode = handle->pointer_mode, 0; }
int cublasSetMathMode(Handle* handle, int mode) { return handle->math_mode = mode, 0; }
int cublasGetMathMode(Handle* handle, int* mode) { return *mode = handle->math_mode, 0; }
int cublasSetWorkspace_v2(Handle*, void*, size_t) { return 0; }
int cublasSetSmCountTarget(Handle*, int) { return 0; }
int cublasSetAtomicsMode(Handle*, int) { return 0; }
int cublasGetVersion_v2(Handle*, int* version) { return *version = 130101, 0; }

const char* cublasGetStatusName(int status) { return status ? "an error of the emulated cuBLAS" : "CUBLAS_STATUS_SUCCESS"; }
const char* cublasGetStatusString(int status) {
  static thread_local std::string said;
  said = last_missing().empty() ? "an error of the emulated cuBLAS" : last_missing() + " is not emulated by emucuda";
  return status ? said.c_str() : "no error";
}
}
