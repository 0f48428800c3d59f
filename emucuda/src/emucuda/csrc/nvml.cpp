// libnvidia-ml.so.1: how PyTorch counts cards without a context, and whom it names when memory runs out. Its expandable
// segments call it, too, and would jump to address 0 where it is not installed.
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "card.h"

using namespace emucuda;

namespace {
constexpr int kOk = 0, kNotSupported = 3, kInsufficientSize = 7;
struct Process {  // nvmlProcessInfo_v1_t and, with the last two, _v2_t
  unsigned pid;
  unsigned long long bytes;
};
struct Process2 {
  unsigned pid;
  unsigned long long bytes;
  unsigned gpu_instance, compute_instance;
};
struct Memory {
  unsigned long long total, free, used;
};
struct Fabric {  // the beginning of nvmlGpuFabricInfoV_t, in all its versions
  unsigned version;
  unsigned char cluster[16];
  int status;
  unsigned clique;
  unsigned char state;
};
void* only() { return reinterpret_cast<void*>(0x7000); }

template <typename P>
int this_process(unsigned* count, P* processes) {
  const unsigned room = *count;
  *count = 1;
  if (!processes || room < 1) return kInsufficientSize;
  memset(processes, 0, sizeof *processes);
  processes->pid = unsigned(getpid());
  processes->bytes = used_bytes() + settings().context_bytes;
  return kOk;
}
}  // namespace

extern "C" {

int nvmlInit() { return kOk; }
int nvmlInit_v2() { return kOk; }
int nvmlInitWithFlags(unsigned) { return kOk; }
int nvmlShutdown() { return kOk; }
const char* nvmlErrorString(int status) { return status ? "an error of the emulated NVML" : "Success"; }
int nvmlSystemGetDriverVersion(char* text, unsigned size) { return snprintf(text, size, "580.0 (emulated)"), kOk; }
int nvmlSystemGetCudaDriverVersion(int* version) { return *version = 13000, kOk; }
int nvmlSystemGetCudaDriverVersion_v2(int* version) { return *version = 13000, kOk; }
int nvmlDeviceGetCount(unsigned* count) { return *count = 1, kOk; }
int nvmlDeviceGetCount_v2(unsigned* count) { return *count = 1, kOk; }
int nvmlDeviceGetHandleByIndex(unsigned, void** device) { return *device = only(), kOk; }
int nvmlDeviceGetHandleByIndex_v2(unsigned, void** device) { return *device = only(), kOk; }
int nvmlDeviceGetHandleByPciBusId_v2(const char*, void** device) { return *device = only(), kOk; }
int nvmlDeviceGetHandleByUUID(const char*, void** device) { return *device = only(), kOk; }
int nvmlDeviceGetName(void*, char* text, unsigned size) { return snprintf(text, size, "%s", card().name.c_str()), kOk; }
int nvmlDeviceGetUUID(void*, char* text, unsigned size) {  // the bytes of "an emulated card", as the runtime reports them
  return snprintf(text, size, "GPU-616e2065-6d75-6c61-7465-642063617264"), kOk;
}
int nvmlDeviceGetMemoryInfo(void*, Memory* memory) {
  const unsigned long long total = card().total_bytes, free = free_bytes();
  return *memory = {total, free, total - free}, kOk;
}
int nvmlDeviceGetComputeRunningProcesses(void*, unsigned* count, Process* it) { return this_process(count, it); }
int nvmlDeviceGetComputeRunningProcesses_v3(void*, unsigned* count, Process2* it) { return this_process(count, it); }

// One card alone: no fabric, no link to others. These are answers, not gaps.
int nvmlDeviceGetGpuFabricInfoV(void*, Fabric* fabric) {
  memset(fabric->cluster, 0, sizeof fabric->cluster);
  return fabric->status = kOk, fabric->clique = 0, fabric->state = 0, kOk;  // state 0: not supported
}
int nvmlDeviceGetNvLinkRemoteDeviceType(void*, unsigned, void*) { return kNotSupported; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void*, unsigned, void*) { return kNotSupported; }
}
