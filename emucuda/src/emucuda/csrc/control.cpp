// What the Python package calls through ctypes, inside the program that runs on the card.
#include <cstring>

#include "card.h"

using namespace emucuda;

namespace {

// The text of the last answer; the caller copies it before it asks again.
const char* kept(std::string text) {
  static thread_local std::string last;
  last = std::move(text);
  return last.c_str();
}

}  // namespace

extern "C" {

uint64_t emucuda_counter(const char* name) {
  const Counters& c = counters();
  const auto is = [&](const char* other) { return strcmp(name, other) == 0; };
  if (is("launches")) return c.launches;
  if (is("copies")) return c.copies;
  if (is("host_to_device_bytes")) return c.host_to_device_bytes;
  if (is("device_to_host_bytes")) return c.device_to_host_bytes;
  if (is("device_to_device_bytes")) return c.device_to_device_bytes;
  if (is("allocations")) return c.allocations;
  if (is("frees")) return c.frees;
  if (is("out_of_memory")) return c.out_of_memory;
  if (is("records")) return c.records;
  if (is("waits")) return c.waits;
  if (is("host_waits")) return c.host_waits;
  if (is("missing")) return c.missing;
  if (is("races")) return c.races;
  if (is("used_bytes")) return used_bytes();
  if (is("peak_bytes")) return peaks().device;
  if (is("host_bytes")) return peaks().host;
  if (is("host_peak_bytes")) return peaks().host_peak;
  return ~uint64_t(0);
}

void emucuda_reset_peaks() { reset_peaks(); }

const char* emucuda_take_kernels() { return kept(take_kernels()); }

const char* emucuda_take_reports() {
  std::string text;
  for (const std::string& report : take_reports()) text += report + "\n";
  return kept(std::move(text));
}

void emucuda_device_access(const void* at, size_t bytes, int writes, void* stream, const char* what) {
  device_access(at, bytes, writes != 0, stream, what);
}

void emucuda_host_access(const void* at, size_t bytes, int writes, const char* what) {
  host_access(at, bytes, writes != 0, what);
}
}
