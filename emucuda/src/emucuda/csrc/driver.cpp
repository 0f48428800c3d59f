// libcuda.so.1: the driver functions that PyTorch asks for, by name, through the runtime. All others are generated stubs.
#include <cuda.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "card.h"

using namespace emucuda;

namespace {

constexpr CUresult ok = CUDA_SUCCESS;
CUcontext context() { return reinterpret_cast<CUcontext>(0x1000); }

// NOTE [physical memory]: a handle of cuMemCreate is counted against the card until it is released and mapped nowhere,
// as on a real card. What it holds does not survive unmapping here: nobody maps a handle twice but to share it between
// processes, which is not emulated.
struct Physical {
  size_t bytes;
  int references;
};
std::mutex mappings_lock;
std::map<CUdeviceptr, Physical*>& mappings() {
  static auto* it = new std::map<CUdeviceptr, Physical*>;
  return *it;
}

void let_go(Physical* physical) {
  if (--physical->references) return;
  give_physical(physical->bytes);
  delete physical;
}

Physical* of(CUmemGenericAllocationHandle handle) { return reinterpret_cast<Physical*>(handle); }

// A function of a module that was loaded from an image: a name to count launches by.
CUfunction function_named(const char* name) {
  static std::mutex lock;
  static auto* known = new std::map<std::string, CUfunction>;
  std::lock_guard<std::mutex> guard(lock);
  CUfunction& function = (*known)[name];
  if (!function) {
    const char* kept = strdup(name);
    function = reinterpret_cast<CUfunction>(const_cast<char*>(kept));
    name_kernel(function, kept);
  }
  return function;
}

}  // namespace

extern "C" {

// ---- the device and its one context

CUresult cuInit(unsigned) { return ok; }
CUresult cuDriverGetVersion(int* version) { return *version = CUDA_VERSION, ok; }
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  if (ordinal != 0) return CUDA_ERROR_INVALID_DEVICE;
  return *device = 0, ok;
}
CUresult cuDeviceGetCount(int* count) { return *count = 1, ok; }
CUresult cuDeviceGetName(char* name, int size, CUdevice) { return snprintf(name, size, "%s", card().name.c_str()), ok; }
CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice) { return *bytes = card().total_bytes, ok; }
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice) {
  return *value = device_attribute(which), ok;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* active) {
  if (flags) *flags = 0;
  if (active) *active = 1;
  return ok;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* it, CUdevice) { return *it = context(), ok; }
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) { return ok; }
CUresult cuCtxGetCurrent(CUcontext* it) { return *it = context(), ok; }
CUresult cuCtxSetCurrent(CUcontext) { return ok; }
CUresult cuCtxPushCurrent_v2(CUcontext) { return ok; }
CUresult cuCtxPopCurrent_v2(CUcontext* it) {
  if (it) *it = context();
  return ok;
}
CUresult cuCtxGetDevice(CUdevice* device) { return *device = 0, ok; }
CUresult cuCtxSynchronize() { return device_sync(), ok; }
CUresult cuGetErrorName(CUresult code, const char** text) {
  *text = code == ok ? "CUDA_SUCCESS" : code == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR";
  return ok;
}
CUresult cuGetErrorString(CUresult code, const char** text) {
  static thread_local std::string said;
  said = "error " + std::to_string(code) + " of the emulated driver";
  if (code == CUDA_ERROR_NOT_SUPPORTED && !last_missing().empty()) said = last_missing() + " is not emulated";
  *text = code == ok ? "no error" : code == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : said.c_str();
  return ok;
}

// ---- memory

CUresult cuMemGetInfo_v2(size_t* free, size_t* total) { return *free = free_bytes(), *total = card().total_bytes, ok; }
CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* size, CUdeviceptr ptr) {
  const Range range = find(reinterpret_cast<void*>(ptr));
  if (range.kind == Kind::none) return CUDA_ERROR_INVALID_VALUE;
  if (base) *base = CUdeviceptr(range.base);
  if (size) *size = range.bytes;
  return ok;
}
CUresult cuPointerGetAttribute(void* out, CUpointer_attribute which, CUdeviceptr ptr) {
  const Range range = find(reinterpret_cast<void*>(ptr));
  if (range.kind == Kind::none) return CUDA_ERROR_INVALID_VALUE;
  switch (which) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<unsigned*>(out) = range.kind == Kind::host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
      return ok;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: return *static_cast<int*>(out) = 0, ok;
    case CU_POINTER_ATTRIBUTE_CONTEXT: return *static_cast<CUcontext*>(out) = context(), ok;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: return *static_cast<CUdeviceptr*>(out) = ptr, ok;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID: return *static_cast<unsigned long long*>(out) = CUdeviceptr(range.base), ok;
    default: return CUresult(missing("cuPointerGetAttribute for this attribute", CUDA_ERROR_NOT_SUPPORTED));
  }
}
CUresult cuMemsetD32Async(CUdeviceptr ptr, unsigned value, size_t count, CUstream stream) {
  fill(reinterpret_cast<void*>(ptr), 0, 4 * count, stream);
  std::fill_n(reinterpret_cast<unsigned*>(ptr), count, value);
  return ok;
}
CUresult cuStreamWriteValue32_v2(CUstream stream, CUdeviceptr ptr, cuuint32_t value, unsigned) {
  return cuMemsetD32Async(ptr, value, 1, stream);
}

// ---- virtual memory: addresses and bytes apart, which PyTorch's expandable_segments live on

CUresult cuMemGetAllocationGranularity(size_t* bytes, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  return *bytes = kGranule, ok;
}
CUresult cuMemAddressReserve(CUdeviceptr* ptr, size_t size, size_t, CUdeviceptr, unsigned long long) {
  // One granule more than asked for, so that the address can be a multiple of it as the driver's are.
  void* base = mmap(nullptr, size + kGranule, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  const uintptr_t start = (uintptr_t(base) + kGranule - 1) / kGranule * kGranule;
  if (start > uintptr_t(base)) munmap(base, start - uintptr_t(base));
  if (const size_t rest = uintptr_t(base) + kGranule - start) munmap(reinterpret_cast<void*>(start + size), rest);
  return *ptr = start, ok;
}
CUresult cuMemAddressFree(CUdeviceptr ptr, size_t size) { return munmap(reinterpret_cast<void*>(ptr), size), ok; }
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* wanted,
                     unsigned long long) {
  if (wanted->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
    return CUresult(missing("cuMemCreate elsewhere than on the device", CUDA_ERROR_NOT_SUPPORTED));
  if (!take_physical(size)) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = reinterpret_cast<CUmemGenericAllocationHandle>(new Physical{size, 1});
  return ok;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  std::lock_guard<std::mutex> guard(mappings_lock);
  return let_go(of(handle)), ok;
}
CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* at) {
  std::lock_guard<std::mutex> guard(mappings_lock);
  auto found = mappings().upper_bound(CUdeviceptr(at));
  if (found == mappings().begin()) return CUDA_ERROR_INVALID_VALUE;
  Physical* physical = (--found)->second;
  if (CUdeviceptr(at) >= found->first + physical->bytes) return CUDA_ERROR_INVALID_VALUE;
  ++physical->references;
  *handle = reinterpret_cast<CUmemGenericAllocationHandle>(physical);
  return ok;
}
CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* properties, CUmemGenericAllocationHandle) {
  memset(properties, 0, sizeof *properties);
  properties->type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties->location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  return ok;
}
CUresult cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long) {
  if (offset != 0) return CUDA_ERROR_INVALID_VALUE;  // the driver takes no other either
  if (!map_physical(reinterpret_cast<void*>(ptr), size)) return CUDA_ERROR_OUT_OF_MEMORY;
  std::lock_guard<std::mutex> guard(mappings_lock);
  mappings()[ptr] = of(handle);
  ++of(handle)->references;
  return ok;
}
CUresult cuMemUnmap(CUdeviceptr ptr, size_t size) {
  if (!unmap_physical(reinterpret_cast<void*>(ptr), size)) return CUDA_ERROR_INVALID_VALUE;
  std::lock_guard<std::mutex> guard(mappings_lock);
  const auto first = mappings().lower_bound(ptr), end = mappings().lower_bound(ptr + size);
  for (auto it = first; it != end; ++it) let_go(it->second);
  mappings().erase(first, end);
  return ok;
}
CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return ok; }

// ---- modules and launches, for kernels that were compiled while the program runs

CUresult cuModuleLoad(CUmodule* module, const char*) { return *module = reinterpret_cast<CUmodule>(0x2000), ok; }
CUresult cuModuleLoadData(CUmodule* module, const void*) { return cuModuleLoad(module, nullptr); }
CUresult cuModuleLoadDataEx(CUmodule* module, const void*, unsigned, CUjit_option*, void**) {
  return cuModuleLoad(module, nullptr);
}
CUresult cuModuleUnload(CUmodule) { return ok; }
CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  return *function = function_named(name), ok;
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute which, CUfunction) {
  return *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0, ok;
}
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) { return ok; }
CUresult cuFuncSetCacheConfig(CUfunction, CUfunc_cache) { return ok; }
CUresult cuLaunchKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                        CUstream stream, void**, void**) {
  return launch(function, stream), ok;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void**, void**) {
  return launch(function, config->hStream), ok;
}
CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                   unsigned, CUstream stream, void**) {
  return launch(function, stream), ok;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int threads, size_t) {
  const int most = card().threads_per_multiprocessor() / std::max(threads, 1);
  return *blocks = std::clamp(most, 1, card().blocks_per_multiprocessor()), ok;
}

// ---- how the runtime, and programs, find the functions above and the stubs of the others

CUresult cuGetProcAddress_v2(const char* name, void** function, int, cuuint64_t, CUdriverProcAddressQueryResult* status) {
  static void* self = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  *function = nullptr;
  for (const char* suffix : {"", "_v2", "_v3", "_v4"})
    if (!*function) *function = dlsym(self, (std::string(name) + suffix).c_str());
  if (status) *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return *function || status ? ok : CUDA_ERROR_NOT_FOUND;
}

// Libraries that carry a runtime of their own (NCCL) ask for private tables of the driver first. They are not to go on:
// they would call what is not there. Not every one repeats the name of what failed, so the library is named, too.
CUresult cuGetExportTable(const void** table, const CUuuid*) {
  *table = nullptr;
  Dl_info asking{};
  const bool is_known = dladdr(__builtin_return_address(0), &asking) && asking.dli_fname;
  const std::string path = is_known ? asking.dli_fname : "a library";
  missing(("the CUDA runtime inside " + path.substr(path.rfind('/') + 1)).c_str(), 0);
  return CUDA_ERROR_NOT_SUPPORTED;
}
}
