// Fault injection: make the n-th allocation, pinned allocation, copy or recorded event fail.
#pragma once
#include <array>
#include <cstdint>

namespace simgpu {

enum class Fault { allocation, pinned_allocation, copy, event };
constexpr int kFaults = 4;

// Counts down from `nth` (1 is the next one). Not armed: 0.
class FaultPlan {
 public:
  void arm(Fault fault, int64_t nth);
  void disarm(Fault fault) { remaining_[index(fault)] = 0; }
  bool fired(Fault fault) const { return fired_[index(fault)]; }
  // Called at every place that may fail; true exactly once, at the n-th call after arm().
  bool strikes(Fault fault);

 private:
  static int index(Fault fault) { return static_cast<int>(fault); }
  std::array<int64_t, kFaults> remaining_{};
  std::array<bool, kFaults> fired_{};
};

FaultPlan& faults();  // guarded by the runtime's lock

}  // namespace simgpu
