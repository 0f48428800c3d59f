// libcudart.so.13. Memory, copies, streams and events are those of the card; kernels are counted and do nothing.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "card.h"

using namespace emucuda;

extern "C" int cuGetProcAddress_v2(const char*, void**, int, uint64_t, int*);

namespace {

constexpr cudaError_t ok = cudaSuccess;
thread_local cudaError_t last = ok;
cudaError_t fail(cudaError_t code) { return last = code; }

thread_local struct {
  dim3 grid, block;
  size_t shared_bytes;
  cudaStream_t stream;
} pushed;  // what stands between <<< and >>>

// __device__ variables: the program's host side names them by the address of a shadow variable.
struct Variables {
  std::mutex lock;
  std::map<const void*, size_t> bytes;
  std::map<const void*, void*> at;
};
Variables& variables() {
  static Variables* it = new Variables;
  return *it;
}
void* variable(const void* shadow) {
  Variables& v = variables();
  std::lock_guard<std::mutex> guard(v.lock);
  void*& at = v.at[shadow];
  if (!at) at = calloc(1, std::max<size_t>(v.bytes.count(shadow) ? v.bytes[shadow] : 0, 4096));
  return at;
}

struct ErrorText {
  cudaError_t code;
  const char *name, *text;
};
constexpr ErrorText kErrors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorPeerAccessUnsupported, "cudaErrorPeerAccessUnsupported", "peer access is not supported"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered", "this memory was not registered"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
};
const ErrorText* text_of(cudaError_t code) {
  for (const ErrorText& each : kErrors)
    if (each.code == code) return &each;
  return nullptr;
}

}  // namespace

extern "C" {

// ---- kernels, as the code that nvcc writes announces and starts them

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*, int*) {
  name_kernel(host, name);
}
void __cudaRegisterVar(void**, char* shadow, char*, const char*, int, size_t bytes, int, int) {
  std::lock_guard<std::mutex> guard(variables().lock);
  variables().bytes[shadow] = bytes;
}
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream) {
  pushed = {grid, block, shared_bytes, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  *grid = pushed.grid, *block = pushed.block, *shared_bytes = pushed.shared_bytes;
  *static_cast<cudaStream_t*>(stream) = pushed.stream;
  return ok;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  return *kernel = static_cast<cudaKernel_t>(const_cast<void*>(host)), ok;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return launch(kernel, stream), ok;
}
cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return launch(function, stream), ok;
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void**) {
  return launch(function, config->stream), ok;
}
cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t stream) {
  return launch(function, stream), ok;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* it, const void*) {
  memset(it, 0, sizeof *it);
  it->maxThreadsPerBlock = 1024, it->numRegs = 32;
  it->ptxVersion = it->binaryVersion = card().capability();
  it->maxDynamicSharedSizeBytes = card().shared_bytes_per_block_optin();
  return ok;
}
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return ok; }
cudaError_t cudaFuncSetCacheConfig(const void*, cudaFuncCache) { return ok; }
cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) { return ok; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int threads, size_t,
                                                                   unsigned) {
  const int most = card().threads_per_multiprocessor() / std::max(threads, 1);
  return *blocks = std::clamp(most, 1, card().blocks_per_multiprocessor()), ok;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* function, int threads, size_t bytes) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, bytes, 0);
}
cudaError_t cudaLibraryLoadData(cudaLibrary_t* library, const void*, cudaJitOption*, void**, unsigned,
                                cudaLibraryOption*, void**, unsigned) {
  return *library = reinterpret_cast<cudaLibrary_t>(0x4000), ok;
}
cudaError_t cudaLibraryGetKernel(cudaKernel_t* kernel, cudaLibrary_t, const char* name) {
  const char* kept = strdup(name);
  name_kernel(kept, kept);
  return *kernel = reinterpret_cast<cudaKernel_t>(const_cast<char*>(kept)), ok;
}
cudaError_t cudaLibraryUnload(cudaLibrary_t) { return ok; }
cudaError_t cudaGetSymbolAddress(void** at, const void* shadow) { return *at = variable(shadow), ok; }
cudaError_t cudaMemcpyToSymbol(const void* shadow, const void* from, size_t bytes, size_t offset, cudaMemcpyKind) {
  memcpy(static_cast<char*>(variable(shadow)) + offset, from, bytes);
  return ok;
}

// ---- the device

cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, ok; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, ok; }
cudaError_t cudaSetDevice(int device) { return device == 0 ? ok : fail(cudaErrorInvalidDevice); }
cudaError_t cudaInitDevice(int, unsigned, unsigned) { return ok; }
cudaError_t cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, ok; }
cudaError_t cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, ok; }
cudaError_t cudaDeviceSynchronize() { return device_sync(), ok; }
cudaError_t cudaDeviceReset() { return ok; }
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) { return *can = 0, ok; }
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return fail(cudaErrorPeerAccessUnsupported); }
cudaError_t cudaDeviceGetPCIBusId(char* id, int size, int) { return snprintf(id, size, "0000:01:00.0"), ok; }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return ok;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) { return *value = device_attribute(which), ok; }
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  return *pool = reinterpret_cast<cudaMemPool_t>(0x6000), ok;
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return ok; }
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr which, void* value) {
  const bool used = which == cudaMemPoolAttrUsedMemCurrent || which == cudaMemPoolAttrReservedMemCurrent;
  return *static_cast<uint64_t*>(value) = used ? used_bytes() : 0, ok;
}
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) { return ok; }
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return ok; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int device) {
  if (device != 0) return fail(cudaErrorInvalidDevice);
  const Card& it = card();
  memset(p, 0, sizeof *p);
  snprintf(p->name, sizeof p->name, "%s", it.name.c_str());
  memcpy(p->uuid.bytes, "an emulated card", 16);
  p->totalGlobalMem = it.total_bytes;
  p->major = it.major, p->minor = it.minor, p->multiProcessorCount = it.multiprocessors;
  p->memoryBusWidth = it.bus_bits, p->l2CacheSize = int(it.l2_bytes);
  p->maxThreadsPerMultiProcessor = it.threads_per_multiprocessor();
  p->maxBlocksPerMultiProcessor = it.blocks_per_multiprocessor();
  p->sharedMemPerBlock = 48 << 10, p->sharedMemPerBlockOptin = it.shared_bytes_per_block_optin();
  p->sharedMemPerMultiprocessor = it.shared_bytes_per_multiprocessor();
  p->reservedSharedMemPerBlock = it.major >= 8 ? 1024 : 0;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->warpSize = 32, p->memPitch = 2147483647;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 64 << 10, p->textureAlignment = 512, p->texturePitchAlignment = 32;
  p->pciBusID = 1, p->asyncEngineCount = 2;
  p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = p->streamPrioritiesSupported = 1;
  p->globalL1CacheSupported = p->localL1CacheSupported = p->managedMemory = p->cooperativeLaunch = 1;
  p->computePreemptionSupported = p->canUseHostPointerForRegisteredMem = 1;
  p->hostRegisterSupported = p->memoryPoolsSupported = 1;
  return ok;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  int status = 0;
  cuGetProcAddress_v2(name, function, int(version), 0, &status);
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return *function || result ? ok : fail(cudaError_t(missing(name, cudaErrorNotSupported)));
}

// ---- errors

cudaError_t cudaGetLastError() {
  const cudaError_t was = last;
  last = ok;
  return was;
}
cudaError_t cudaPeekAtLastError() { return last; }
const char* cudaGetErrorName(cudaError_t code) { return text_of(code) ? text_of(code)->name : "an error of the emulated card"; }
const char* cudaGetErrorString(cudaError_t code) {
  static thread_local std::string said;
  if (code == cudaErrorNotSupported && !last_missing().empty()) {
    said = last_missing() + " is not emulated by emucuda";
    return said.c_str();
  }
  return text_of(code) ? text_of(code)->text : "an error of the emulated card";
}

// ---- memory

cudaError_t cudaMalloc(void** at, size_t bytes) {
  *at = bytes ? device_alloc(bytes) : nullptr;
  return *at || !bytes ? ok : fail(cudaErrorMemoryAllocation);
}
cudaError_t cudaFree(void* at) {
  device_sync();  // as the real one does; expandable segments and the retry after out of memory rely on it
  return !at || device_free(at) || host_free(at, Kind::managed) ? ok : fail(cudaErrorInvalidValue);
}
cudaError_t cudaMallocAsync(void** at, size_t bytes, cudaStream_t) { return cudaMalloc(at, bytes); }
cudaError_t cudaFreeAsync(void* at, cudaStream_t) { return !at || device_free(at) ? ok : fail(cudaErrorInvalidValue); }
// Pages of managed memory move as they are touched, which no kernel here does: they stay with the host, uncounted.
cudaError_t cudaMallocManaged(void** at, size_t bytes, unsigned) {
  *at = host_alloc(bytes, Kind::managed);
  return *at ? ok : fail(cudaErrorMemoryAllocation);
}
cudaError_t cudaMemPrefetchAsync(const void*, size_t, cudaMemLocation, unsigned, cudaStream_t) { return ok; }
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) { return *free = free_bytes(), *total = card().total_bytes, ok; }
cudaError_t cudaHostAlloc(void** at, size_t bytes, unsigned) {
  *at = host_alloc(bytes);
  return *at ? ok : fail(cudaErrorMemoryAllocation);
}
cudaError_t cudaMallocHost(void** at, size_t bytes) { return cudaHostAlloc(at, bytes, 0); }
cudaError_t cudaFreeHost(void* at) {
  device_sync();
  return !at || host_free(at) ? ok : fail(cudaErrorInvalidValue);
}
cudaError_t cudaHostRegister(void* at, size_t bytes, unsigned) { return host_register(at, bytes), ok; }
cudaError_t cudaHostUnregister(void* at) { return host_unregister(at) ? ok : fail(cudaErrorHostMemoryNotRegistered); }
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned) { return *device = host, ok; }
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* it, const void* ptr) {
  const Range range = find(ptr);
  memset(it, 0, sizeof *it);
  void* self = const_cast<void*>(ptr);
  switch (range.kind) {
    case Kind::none: it->type = cudaMemoryTypeUnregistered, it->device = -2, it->hostPointer = self; break;
    case Kind::device: it->type = cudaMemoryTypeDevice, it->devicePointer = self; break;
    case Kind::host: it->type = cudaMemoryTypeHost, it->devicePointer = it->hostPointer = self; break;
    case Kind::managed: it->type = cudaMemoryTypeManaged, it->devicePointer = it->hostPointer = self; break;
  }
  return ok;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  return copy(to, from, bytes, nullptr, true), ok;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  return copy(to, from, bytes, stream, false), ok;
}
cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, cudaStream_t stream) {
  return copy(to, from, bytes, stream, false), ok;
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                              cudaMemcpyKind, cudaStream_t stream) {
  for (size_t row = 0; row < height; ++row)
    copy(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width, stream, false);
  return ok;
}
cudaError_t cudaMemset(void* at, int value, size_t bytes) { return fill(at, value, bytes, nullptr), ok; }
cudaError_t cudaMemsetAsync(void* at, int value, size_t bytes, cudaStream_t stream) {
  return fill(at, value, bytes, stream), ok;
}

// ---- streams and events

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* it, unsigned flags, int priority) {
  return *it = reinterpret_cast<cudaStream_t>(stream_create(flags, priority)), ok;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* it, unsigned flags) { return cudaStreamCreateWithPriority(it, flags, 0); }
cudaError_t cudaStreamCreate(cudaStream_t* it) { return cudaStreamCreateWithPriority(it, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t it) { return stream_destroy(reinterpret_cast<Stream*>(it)), ok; }
cudaError_t cudaStreamGetPriority(cudaStream_t it, int* priority) { return *priority = stream_priority(it), ok; }
cudaError_t cudaStreamGetFlags(cudaStream_t it, unsigned* flags) { return *flags = stream_flags(it), ok; }
cudaError_t cudaStreamQuery(cudaStream_t it) { return stream_query(it) ? ok : fail(cudaErrorNotReady); }
cudaError_t cudaStreamSynchronize(cudaStream_t it) { return stream_sync(it), ok; }
cudaError_t cudaStreamWaitEvent(cudaStream_t it, cudaEvent_t event, unsigned) {
  return stream_wait(it, reinterpret_cast<Event*>(event)), ok;
}
// What a stream calls on the host is called at once: everything before it has been done, for all that can be seen.
cudaError_t cudaStreamAddCallback(cudaStream_t it, cudaStreamCallback_t function, void* data, unsigned) {
  return function(it, ok, data), ok;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t function, void* data) { return function(data), ok; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = cudaStreamCaptureStatusNone, ok;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t*,
                                     const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t* nodes) {
  *status = cudaStreamCaptureStatusNone;
  if (id) *id = 0;
  if (nodes) *nodes = 0;
  return ok;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return ok; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* it, unsigned) {
  return *it = reinterpret_cast<cudaEvent_t>(event_create()), ok;
}
cudaError_t cudaEventCreate(cudaEvent_t* it) { return cudaEventCreateWithFlags(it, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t it) { return event_destroy(reinterpret_cast<Event*>(it)), ok; }
cudaError_t cudaEventRecord(cudaEvent_t it, cudaStream_t stream) {
  return event_record(reinterpret_cast<Event*>(it), stream), ok;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t it, cudaStream_t stream, unsigned) { return cudaEventRecord(it, stream); }
cudaError_t cudaEventQuery(cudaEvent_t it) {
  return event_query(reinterpret_cast<Event*>(it)) ? ok : fail(cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t it) { return event_sync(reinterpret_cast<Event*>(it)), ok; }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
  return *ms = float(event_ms(reinterpret_cast<Event*>(from), reinterpret_cast<Event*>(to))), ok;
}
cudaError_t cudaProfilerStart() { return ok; }
cudaError_t cudaProfilerStop() { return ok; }
}
