// The card's memory: address space without pages until somebody touches it, counted in pieces of 2 MiB against the cap.
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <mutex>

#include "card.h"

namespace emucuda {

namespace {

using Guard = std::lock_guard<std::mutex>;

struct Memory {
  std::mutex lock;
  std::map<uintptr_t, Range> ranges;
  size_t used = 0, peak = 0, host = 0, host_peak = 0;
};
Memory& memory() {
  static Memory* it = new Memory;  // never destroyed: PyTorch frees at exit, after static destructors
  return *it;
}

size_t rounded(size_t bytes, size_t granule) { return (std::max<size_t>(bytes, 1) + granule - 1) / granule * granule; }

// MAP_NORESERVE: a 24 GB card costs the host only the pages that copies really touch.
void* mapped(void* at, size_t bytes, int protection) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | (at ? MAP_FIXED : 0);
  void* base = mmap(at, bytes, protection, flags, -1, 0);
  return base == MAP_FAILED ? nullptr : base;
}

bool take(Memory& m, size_t bytes) {
  const size_t ours = card().total_bytes - std::min(settings().context_bytes, card().total_bytes);
  if (m.used + bytes > ours) {
    ++counters().out_of_memory;
    return false;
  }
  m.used += bytes;
  m.peak = std::max(m.peak, m.used);
  return true;
}

bool is(const std::map<uintptr_t, Range>::iterator& it, const Memory& m, Kind kind, bool registered) {
  return it != m.ranges.end() && it->second.kind == kind && it->second.registered == registered;
}

}  // namespace

void* device_alloc(size_t bytes) {
  Memory& m = memory();
  const size_t counted = rounded(bytes, kGranule);
  Guard guard(m.lock);
  if (!take(m, counted)) return nullptr;
  void* base = mapped(nullptr, counted, PROT_READ | PROT_WRITE);
  if (!base) {
    fprintf(stderr, "emucuda: the host has no address space for %zu bytes.\n", counted);
    m.used -= counted;
    return nullptr;
  }
  m.ranges[uintptr_t(base)] = Range{Kind::device, static_cast<char*>(base), bytes, counted, false};
  ++counters().allocations;
  if (settings().log > 1) fprintf(stderr, "emucuda: %zu bytes at %p, %zu in use\n", bytes, base, m.used);
  return base;
}

bool device_free(void* ptr) {
  Memory& m = memory();
  Guard guard(m.lock);
  const auto it = m.ranges.find(uintptr_t(ptr));
  if (!is(it, m, Kind::device, false)) return false;
  munmap(ptr, it->second.counted);
  m.used -= it->second.counted;
  m.ranges.erase(it);
  ++counters().frees;
  return true;
}

void* host_alloc(size_t bytes, Kind kind) {
  void* base = mapped(nullptr, rounded(bytes, 4096), PROT_READ | PROT_WRITE);
  if (!base) return nullptr;
  Memory& m = memory();
  Guard guard(m.lock);
  m.ranges[uintptr_t(base)] = Range{kind, static_cast<char*>(base), bytes, 0, false};
  m.host += bytes;
  m.host_peak = std::max(m.host_peak, m.host);
  return base;
}

bool host_free(void* ptr, Kind kind) {
  Memory& m = memory();
  Guard guard(m.lock);
  const auto it = m.ranges.find(uintptr_t(ptr));
  if (!is(it, m, kind, false)) return false;
  munmap(ptr, rounded(it->second.bytes, 4096));
  m.host -= it->second.bytes;
  m.ranges.erase(it);
  return true;
}

void host_register(void* ptr, size_t bytes) {
  Guard guard(memory().lock);
  memory().ranges[uintptr_t(ptr)] = Range{Kind::host, static_cast<char*>(ptr), bytes, 0, true};
}

bool host_unregister(void* ptr) {
  Memory& m = memory();
  Guard guard(m.lock);
  const auto it = m.ranges.find(uintptr_t(ptr));
  if (!is(it, m, Kind::host, true)) return false;
  m.ranges.erase(it);
  return true;
}

Range find(const void* ptr) {
  Memory& m = memory();
  Guard guard(m.lock);
  auto it = m.ranges.upper_bound(uintptr_t(ptr));
  if (it == m.ranges.begin()) return {};
  --it;
  const size_t span = std::max(it->second.bytes, it->second.counted);
  return uintptr_t(ptr) < it->first + span ? it->second : Range{};
}

size_t used_bytes() {
  Guard guard(memory().lock);
  return memory().used;
}

size_t free_bytes() {
  const size_t held = settings().context_bytes + used_bytes();
  return card().total_bytes - std::min(held, card().total_bytes);
}

Peaks peaks() {
  Memory& m = memory();
  Guard guard(m.lock);
  return {m.peak, m.host, m.host_peak};
}

void reset_peaks() {
  Memory& m = memory();
  Guard guard(m.lock);
  m.peak = m.used, m.host_peak = m.host;
}

bool take_physical(size_t bytes) {
  Guard guard(memory().lock);
  return take(memory(), bytes);
}

void give_physical(size_t bytes) {
  Guard guard(memory().lock);
  memory().used -= bytes;
}

bool map_physical(void* at, size_t bytes) {
  if (!mapped(at, bytes, PROT_READ | PROT_WRITE)) return false;
  Memory& m = memory();
  Guard guard(m.lock);
  m.ranges[uintptr_t(at)] = Range{Kind::device, static_cast<char*>(at), bytes, 0, false};  // counted when it was taken
  return true;
}

bool unmap_physical(void* at, size_t bytes) {
  Memory& m = memory();
  Guard guard(m.lock);
  const auto first = m.ranges.lower_bound(uintptr_t(at)), end = m.ranges.lower_bound(uintptr_t(at) + bytes);
  if (first == end) return false;
  m.ranges.erase(first, end);
  return mapped(at, bytes, PROT_NONE) != nullptr;  // the address stays reserved, and a touch of it a fault
}

}  // namespace emucuda
