// What the stand-ins for the maths libraries have in common: a handle that knows its stream, and launches on it.
#pragma once
#include <cstdlib>
#include <cstring>

#include "card.h"

namespace emucuda {

struct Handle {
  void* stream = nullptr;
  int pointer_mode = 0, math_mode = 0;
};

template <typename T>
int make(void** made) {
  return *made = new T, 0;
}

// Descriptors that are only ever handed back: nothing in them is looked at.
inline int make_opaque(void* made) { return *static_cast<void**>(made) = calloc(1, 256), 0; }

// NOTE [info]: factorisations report success in an integer that PyTorch reads back and raises on. Kernels write nothing
// here, so the stand-in does it for them, at once.
inline void succeed(void* info, long count) {
  if (info) memset(info, 0, sizeof(int) * size_t(count));
}

inline int launch_on(const void* handle, const char* function) {
  return launch(nullptr, static_cast<const Handle*>(handle)->stream, function), 0;
}

// NOTE [workspaces of factorisations]: NVIDIA does not publish them. These are estimates from the algorithms' block
// sizes: a panel of 64 columns, or for eigen- and singular values two matrices more.
inline size_t factorisation_elements(long rows, long columns, bool spectral) {
  const size_t m = size_t(rows > 0 ? rows : 1), n = size_t(columns > 0 ? columns : 1);
  return spectral ? 2 * m * n + 64 * (m + n) : 64 * (m > n ? m : n);
}
inline int answer_elements(void* elements, long rows, long columns, bool spectral) {
  return *static_cast<int*>(elements) = int(factorisation_elements(rows, columns, spectral)), 0;
}
inline int answer_bytes(void* device, void* host, long rows, long columns, bool spectral) {
  if (device) *static_cast<size_t*>(device) = 8 * factorisation_elements(rows, columns, spectral);
  if (host) *static_cast<size_t*>(host) = 0;
  return 0;
}

}  // namespace emucuda
