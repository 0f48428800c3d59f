#include "clock.h"

namespace simgpu {

namespace {

constexpr double kMsPerByteAt1GBps = 1e-6;
constexpr double kMsPerFlopAt1TFlops = 1e-9;

double peak_tflops(const Card& card, Precision precision) {
  switch (precision) {
    case Precision::bf16: return card.bf16_tflops;
    case Precision::fp16: return card.fp16_tflops;
    default: return card.fp32_tflops;
  }
}

using Intervals = std::vector<std::pair<double, double>>;

double total(const Intervals& intervals) {
  double sum = 0;
  for (auto& [begin, end] : intervals) sum += end - begin;
  return sum;
}

double intersection(const Intervals& a, const Intervals& b) {
  double sum = 0;
  for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    sum += std::max(0.0, std::min(a[i].second, b[j].second) - std::max(a[i].first, b[j].first));
    if (a[i].second < b[j].second) ++i; else ++j;
  }
  return sum;
}

Intervals union_of(Intervals a, const Intervals& b) {
  a.insert(a.end(), b.begin(), b.end());
  std::sort(a.begin(), a.end());
  Intervals merged;
  for (auto& interval : a) {
    if (!merged.empty() && interval.first <= merged.back().second) {
      merged.back().second = std::max(merged.back().second, interval.second);
    } else {
      merged.push_back(interval);
    }
  }
  return merged;
}

}  // namespace

double Timeline::reserve(double earliest, double duration) {
  double begin = earliest;
  size_t at = busy_.size();
  for (size_t i = first_open_; i < busy_.size(); ++i) {
    if (begin + duration <= busy_[i].first) { at = i; break; }
    begin = std::max(begin, busy_[i].second);
  }
  if (duration > 0) insert(at, begin, begin + duration);
  return begin + duration;
}

void Timeline::insert(size_t at, double begin, double end) {
  const bool touches_left = at > 0 && busy_[at - 1].second == begin;
  const bool touches_right = at < busy_.size() && busy_[at].first == end;
  if (touches_left && touches_right) {
    busy_[at - 1].second = busy_[at].second;
    busy_.erase(busy_.begin() + at);
  } else if (touches_left) {
    busy_[at - 1].second = end;
  } else if (touches_right) {
    busy_[at].first = begin;
  } else {
    busy_.insert(busy_.begin() + at, {begin, end});
  }
}

void Timeline::forget_gaps_before(double instant) {
  while (first_open_ + 1 < busy_.size() && busy_[first_open_].second < instant) ++first_open_;
}

Timeline& VirtualClock::timeline(int device, Engine engine) {
  const bool shared = engine == Engine::to_host && cards_[device].copy_engines < 2;
  return engines_[device][static_cast<int>(shared ? Engine::to_device : engine)];
}

void VirtualClock::occupy(int lane, Timeline& timeline, double duration_ms) {
  host_ms_ += cards_[device_of_lane(lane)].launch_us * 1e-3;
  timeline.forget_gaps_before(host_ms_);
  lane_ms_[lane] = timeline.reserve(std::max(lane_ms_[lane], host_ms_), duration_ms);
}

void VirtualClock::run_kernel(int lane, const Work& work) {
  const int device = device_of_lane(lane);
  const Card& card = cards_[device];
  const double memory_ms = work.bytes / card.memory_gbps * kMsPerByteAt1GBps;
  const double math_ms = work.flops / peak_tflops(card, work.precision) * kMsPerFlopAt1TFlops;
  occupy(lane, timeline(device, Engine::compute), std::max(memory_ms, math_ms));
}

void VirtualClock::run_copy(int lane, Engine engine, double bytes, bool pinned) {
  const int device = device_of_lane(lane);
  const Card& card = cards_[device];
  const double gbps = pinned ? card.link_gbps : card.pageable_link_gbps;
  occupy(lane, timeline(device, engine), bytes / gbps * kMsPerByteAt1GBps);
}

void VirtualClock::host_wait(double instant) { host_ms_ = std::max(host_ms_, instant); }

double VirtualClock::all_done_ms() const {
  double latest = host_ms_;
  for (double instant : lane_ms_) latest = std::max(latest, instant);
  return latest;
}

OverlapReport VirtualClock::overlap(int device) const {
  auto& [compute, to_device, to_host] = engines_[device];
  const Intervals copies = union_of(to_device.busy(), to_host.busy());
  OverlapReport report;
  report.elapsed_ms = all_done_ms();
  report.compute_ms = total(compute.busy());
  report.to_device_ms = total(to_device.busy());
  report.to_host_ms = total(to_host.busy());
  report.hidden_copy_ms = intersection(copies, compute.busy());
  report.exposed_copy_ms = total(copies) - report.hidden_copy_ms;
  return report;
}

void VirtualClock::reset() {
  for (auto& device : engines_) device = {};
  lane_ms_ = {};
  host_ms_ = 0;
}

}  // namespace simgpu
