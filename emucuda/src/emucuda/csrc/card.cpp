#include "card.h"

#include <cuda.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>

namespace emucuda {

namespace {

size_t number_of(const char* variable, size_t otherwise) {
  const char* text = getenv(variable);
  return text && *text ? strtoull(text, nullptr, 10) : otherwise;
}

// "name=NVIDIA GeForce RTX 3090;total_bytes=25438126080;...", as the Python package writes it from cards.json.
std::map<std::string, std::string> description() {
  const char* text = getenv("EMUCUDA_CARD");
  if (!text) {
    fprintf(stderr, "emucuda: EMUCUDA_CARD is not set. Start programs with `python -m emucuda program.py`.\n");
    abort();
  }
  std::map<std::string, std::string> fields;
  std::string rest = text;
  while (!rest.empty()) {
    const size_t end = std::min(rest.find(';'), rest.size());
    const std::string field = rest.substr(0, end);
    const size_t equals = std::min(field.find('='), field.size());
    fields[field.substr(0, equals)] = equals < field.size() ? field.substr(equals + 1) : "";
    rest.erase(0, end + 1);
  }
  return fields;
}

Card described() {
  const auto fields = description();
  const auto number = [&](const char* name) -> size_t {
    const auto found = fields.find(name);
    if (found == fields.end()) {
      fprintf(stderr, "emucuda: EMUCUDA_CARD has no field '%s'.\n", name);
      abort();
    }
    return strtoull(found->second.c_str(), nullptr, 10);
  };
  Card it;
  it.name = fields.count("name") ? fields.at("name") : "";
  it.total_bytes = number("total_bytes");
  it.major = int(number("major")), it.minor = int(number("minor"));
  it.multiprocessors = int(number("multiprocessors"));
  it.l2_bytes = number("l2_bytes");
  it.bus_bits = int(number("bus_bits"));
  it.memory_clock_khz = int(number("memory_clock_khz"));
  it.clock_khz = int(number("clock_khz"));
  return it;
}

thread_local std::string missing_here;

}  // namespace

int Card::threads_per_multiprocessor() const {
  switch (capability()) {
    case 75: return 1024;
    case 86: case 87: case 89: case 120: return 1536;
    default: return 2048;
  }
}

int Card::blocks_per_multiprocessor() const {
  switch (capability()) {
    case 75: case 86: case 87: return 16;
    case 89: case 120: return 24;
    default: return 32;
  }
}

int Card::shared_bytes_per_multiprocessor() const {
  switch (capability()) {
    case 61: case 70: return 96 << 10;
    case 75: return 64 << 10;
    case 80: return 164 << 10;
    case 90: case 100: return 228 << 10;
    default: return 100 << 10;
  }
}

int Card::shared_bytes_per_block_optin() const {
  if (capability() == 61) return 48 << 10;
  if (capability() == 70 || capability() == 75) return shared_bytes_per_multiprocessor();
  return shared_bytes_per_multiprocessor() - 1024;  // one KiB of each block is the system's
}

const Card& card() {
  static const Card* it = new Card(described());
  return *it;
}

const Settings& settings() {
  static const Settings it{
      number_of("EMUCUDA_CONTEXT_BYTES", 256u << 20), number_of("EMUCUDA_COPY_LIMIT_BYTES", ~size_t(0)),
      number_of("EMUCUDA_LAG", 0),                    number_of("EMUCUDA_RACES", 0) != 0,
      number_of("EMUCUDA_KERNELS", 0) != 0,           int(number_of("EMUCUDA_LOG", 0)),
  };
  return it;
}

Counters& counters() {
  static Counters* it = new Counters;
  return *it;
}

int missing(const char* function, int status) {
  static std::mutex lock;
  static std::set<std::string>* said = new std::set<std::string>;
  missing_here = function;
  ++counters().missing;
  std::lock_guard<std::mutex> guard(lock);
  if (said->insert(function).second) fprintf(stderr, "emucuda: %s is not emulated.\n", function);
  return status;
}

const std::string& last_missing() { return missing_here; }

int device_attribute(int attribute) {
  const Card& it = card();
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X: case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: return 64;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X: return 2147483647;
    case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y: case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: return 65535;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return 48 << 10;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return it.shared_bytes_per_block_optin();
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return it.shared_bytes_per_multiprocessor();
    case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK: return it.major >= 8 ? 1024 : 0;
    case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY: return 64 << 10;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: return 65536;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: return 65536;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: return it.threads_per_multiprocessor();
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: return it.blocks_per_multiprocessor();
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return it.multiprocessors;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: return it.clock_khz;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: return it.memory_clock_khz;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: return it.bus_bits;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: return int(it.l2_bytes);
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return it.major;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return it.minor;
    case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: return 2;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: return 1;
    case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
    case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
    case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
    case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM: return 1;
    default: return 0;  // a feature that this card has not
  }
}

}  // namespace emucuda
