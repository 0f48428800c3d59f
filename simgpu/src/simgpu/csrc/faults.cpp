#include "faults.h"

namespace simgpu {

FaultPlan& faults() {
  static FaultPlan* plan = new FaultPlan();
  return *plan;
}

void FaultPlan::arm(Fault fault, int64_t nth) {
  remaining_[index(fault)] = nth;
  fired_[index(fault)] = false;
}

bool FaultPlan::strikes(Fault fault) {
  int64_t& remaining = remaining_[index(fault)];
  if (remaining == 0 || --remaining > 0) return false;
  fired_[index(fault)] = true;
  return true;
}

}  // namespace simgpu
