// The emulated card, as the stand-ins for NVIDIA's libraries share it. Its state lives in libcuda.so.1, once a process;
// libcudart, libcublas, libcudnn and the others link to that library and keep no state of their own but handles.
//
// NOTE [kernels do nothing]: memory, copies, streams and events are real; a kernel is only counted. So every value that
// a kernel would have written is whatever the memory held before, and what host code decides by such values goes by
// chance. The Python package pins the known places (emucuda/_pins.py).
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace emucuda {

// ---- card.cpp: what the card is, and what the user asked for

struct Card {
  std::string name;
  size_t total_bytes;
  int major, minor, multiprocessors;
  size_t l2_bytes;
  int bus_bits, memory_clock_khz, clock_khz;

  // By compute capability, from the tables of the CUDA programming guide.
  int threads_per_multiprocessor() const;
  int blocks_per_multiprocessor() const;
  int shared_bytes_per_multiprocessor() const;
  int shared_bytes_per_block_optin() const;
  int capability() const { return 10 * major + minor; }
};

struct Settings {
  size_t context_bytes;     // what the context, and whoever else uses the card, holds of it
  size_t copy_limit_bytes;  // longer copies are counted and not made
  size_t lag;               // how many pieces of work a stream may be behind the host
  bool races, kernels;
  int log;                  // 1: kernels' first launch, 2: allocations
};

const Card& card();
const Settings& settings();
int device_attribute(int attribute);  // CUdevice_attribute, which equals cudaDeviceAttr

// NOTE [never silently]: every function that NVIDIA's library has and we have not is generated to call this. It writes
// the name to stderr once, and the texts of the libraries' errors repeat it, so that PyTorch's exception names it.
int missing(const char* function, int status);
const std::string& last_missing();  // of this thread; empty if there was none

struct Counters {
  std::atomic<uint64_t> launches{0}, copies{0}, host_to_device_bytes{0}, device_to_host_bytes{0}, device_to_device_bytes{0};
  std::atomic<uint64_t> allocations{0}, frees{0}, out_of_memory{0}, records{0}, waits{0}, host_waits{0}, missing{0}, races{0};
};
Counters& counters();

// ---- memory.cpp: which bytes are whose

enum class Kind { none, device, host, managed };
struct Range {
  Kind kind = Kind::none;
  char* base = nullptr;
  size_t bytes = 0;    // as asked for
  size_t counted = 0;  // against the card's memory
  bool registered = false;
};

constexpr size_t kGranule = 2u << 20;  // the card hands out memory in pieces of 2 MiB

void* device_alloc(size_t bytes);  // nullptr: out of memory
bool device_free(void* ptr);
void* host_alloc(size_t bytes, Kind kind = Kind::host);
bool host_free(void* ptr, Kind kind = Kind::host);
void host_register(void* ptr, size_t bytes);
bool host_unregister(void* ptr);
Range find(const void* ptr);
size_t free_bytes();
size_t used_bytes();

struct Peaks {
  uint64_t device, host, host_peak;
};
Peaks peaks();
void reset_peaks();

// Physical memory without an address, for the driver's virtual memory functions.
bool take_physical(size_t bytes);
void give_physical(size_t bytes);
bool map_physical(void* at, size_t bytes);
bool unmap_physical(void* at, size_t bytes);

// ---- order.cpp: streams and events

struct Stream;
struct Event;
Stream* stream_create(unsigned flags, int priority);
void stream_destroy(Stream* stream);
int stream_priority(void* stream);
unsigned stream_flags(void* stream);
void stream_wait(void* stream, Event* event);
bool stream_query(void* stream);
void stream_sync(void* stream);
void device_sync();
Event* event_create();
void event_destroy(Event* event);
void event_record(Event* event, void* stream);
bool event_query(Event* event);
void event_sync(Event* event);
double event_ms(Event* from, Event* to);

void copy(void* to, const void* from, size_t bytes, void* stream, bool blocking);
void fill(void* at, int value, size_t bytes, void* stream);
void launch(const void* function, void* stream, const char* name = nullptr);

// What a kernel reads and writes is not known here; whoever knows it (emucuda/_races.py) says so after the launch.
void device_access(const void* at, size_t bytes, bool writes, void* stream, const char* what);
void host_access(const void* at, size_t bytes, bool writes, const char* what);
std::vector<std::string> take_reports();

// ---- kernels.cpp: which kernels were launched

void name_kernel(const void* function, const char* name);
void count_kernel(const void* function, const char* name);
std::string take_kernels();  // "count name" a line

}  // namespace emucuda
