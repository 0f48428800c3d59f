// libcufft.so.12: plans by number, a workspace of the transform's own size (an estimate), executions count a launch.
#include <map>
#include <mutex>

#include "handles.h"

using namespace emucuda;

namespace {
std::mutex lock;
std::map<int, Handle>& plans() {
  static auto* it = new std::map<int, Handle>;
  return *it;
}
}  // namespace

extern "C" {

int cufftCreate(int* plan) {
  std::lock_guard<std::mutex> guard(lock);
  static int last = 0;
  plans()[*plan = ++last] = {};
  return 0;
}
int cufftDestroy(int plan) {
  std::lock_guard<std::mutex> guard(lock);
  return plans().erase(plan) ? 0 : 1;
}
int cufftSetAutoAllocation(int, int) { return 0; }
int cufftSetWorkArea(int, void*) { return 0; }
int cufftSetStream(int plan, void* stream) {
  std::lock_guard<std::mutex> guard(lock);
  return plans()[plan].stream = stream, 0;
}
int cufftXtMakePlanMany(int, int rank, long long* sizes, long long*, long long, long long, int, long long*, long long,
                        long long, int, long long batch, size_t* workspace_bytes, int) {
  size_t elements = size_t(batch);
  for (int i = 0; i < rank; ++i) elements *= size_t(sizes[i]);
  return *workspace_bytes = 8 * elements, 0;
}
int cufftXtExec(int plan, void*, void*, int) {
  std::lock_guard<std::mutex> guard(lock);
  return launch(nullptr, plans()[plan].stream, "cufftXtExec"), 0;
}
}
