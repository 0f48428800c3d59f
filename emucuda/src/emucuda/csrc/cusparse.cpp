// libcusparse.so.12: nothing of it is emulated. It is here so that its functions fail with their names; the real one
// would fail in its own private runtime.
#include "card.h"

extern "C" {
const char* cusparseGetErrorString(int status) {
  static thread_local std::string said;
  const std::string& name = emucuda::last_missing();
  said = name.empty() ? "an error of the emulated cuSPARSE" : name + " is not emulated by emucuda";
  return status ? said.c_str() : "no error";
}
}
