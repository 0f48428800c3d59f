// The virtual clock: a deterministic model of how long a chosen card would take. It is a model, never a measurement.
#pragma once
#include <array>
#include <utility>
#include <vector>

#include "vector_clock.h"

namespace simgpu {

struct Card {
  double fp32_tflops = 35.6, bf16_tflops = 71.0, fp16_tflops = 71.0;
  double memory_gbps = 936.0;
  double link_gbps = 25.0;          // pinned, one direction
  double pageable_link_gbps = 8.0;  // copies from memory that is not pinned
  int copy_engines = 2;             // 2: both directions at once; 1: they take turns
  double launch_us = 4.0;           // host time per kernel or copy
};

enum class Precision { fp32, bf16, fp16 };
enum class Engine { compute, to_device, to_host };
constexpr int kEngines = 3;

// What one operator costs: a roofline of bytes moved and floating-point operations.
struct Work {
  double bytes = 0, flops = 0;
  Precision precision = Precision::fp32;
};

// Something that does one job at a time, and remembers when it was busy.
class Timeline {
 public:
  // The first gap of `duration` at or after `earliest`; returns its end.
  double reserve(double earliest, double duration);
  // Nothing will be reserved before this instant any more: gaps before it need not be searched.
  void forget_gaps_before(double instant);
  const std::vector<std::pair<double, double>>& busy() const { return busy_; }

 private:
  void insert(size_t at, double begin, double end);
  std::vector<std::pair<double, double>> busy_;  // sorted, disjoint, touching intervals merged
  size_t first_open_ = 0;
};

struct OverlapReport {
  double elapsed_ms = 0, compute_ms = 0, to_device_ms = 0, to_host_ms = 0;
  double hidden_copy_ms = 0, exposed_copy_ms = 0;  // copy time with and without compute beside it
};

class VirtualClock {
 public:
  void set_card(int device, const Card& card) { cards_[device] = card; }
  const Card& card(int device) const { return cards_[device]; }

  void run_kernel(int lane, const Work& work);
  void run_copy(int lane, Engine engine, double bytes, bool pinned);
  void run_local_copy(int lane, double bytes) { run_kernel(lane, Work{2 * bytes, 0, Precision::fp32}); }
  void wait(int lane, double instant) { lane_ms_[lane] = std::max(lane_ms_[lane], instant); }
  void host_wait(double instant);

  // The instant at which all that was put on the lane so far is done.
  double lane_ms(int lane) const { return std::max(lane_ms_[lane], host_ms_); }
  // The instant at which everything that was launched so far is done.
  double all_done_ms() const;
  OverlapReport overlap(int device) const;
  void reset();

 private:
  void occupy(int lane, Timeline& timeline, double duration_ms);
  Timeline& timeline(int device, Engine engine);

  std::array<Card, kMaxDevices> cards_;
  std::array<std::array<Timeline, kEngines>, kMaxDevices> engines_;
  std::array<double, kLanes> lane_ms_{};
  double host_ms_ = 0;
};

}  // namespace simgpu
