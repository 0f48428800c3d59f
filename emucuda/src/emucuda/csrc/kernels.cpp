// Which kernels were launched, by name. Off unless asked for (EMUCUDA_KERNELS): PyTorch announces some 100,000 kernels.
#include <cxxabi.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <unordered_map>

#include "card.h"

namespace emucuda {

namespace {

struct Kernels {
  std::mutex lock;
  std::unordered_map<const void*, const char*> names;  // into the program's own constants
  std::map<std::string, uint64_t> launched;
};
Kernels& kernels() {
  static Kernels* it = new Kernels;
  return *it;
}

std::string readable(const std::string& name) {
  int status = 0;
  char* plain = abi::__cxa_demangle(name.c_str(), nullptr, nullptr, &status);
  std::string text = plain ? plain : name;
  free(plain);
  return text;
}

}  // namespace

void name_kernel(const void* function, const char* name) {
  if (!settings().kernels) return;
  std::lock_guard<std::mutex> guard(kernels().lock);
  kernels().names[function] = name;
}

void count_kernel(const void* function, const char* name) {
  Kernels& k = kernels();
  std::lock_guard<std::mutex> guard(k.lock);
  const auto known = k.names.find(function);
  const std::string called = name ? name : known != k.names.end() ? known->second : "a kernel without a name";
  const uint64_t count = ++k.launched[called];
  if (settings().log && count == 1) fprintf(stderr, "emucuda: first launch of %s\n", readable(called).c_str());
}

std::string take_kernels() {
  Kernels& k = kernels();
  std::lock_guard<std::mutex> guard(k.lock);
  std::string text;
  for (const auto& [name, count] : k.launched) text += std::to_string(count) + " " + readable(name) + "\n";
  k.launched.clear();
  return text;
}

}  // namespace emucuda
