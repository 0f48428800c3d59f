// Happens-before between streams, as vector clocks.
#pragma once
#include <algorithm>
#include <array>
#include <cstdint>

namespace simgpu {

constexpr int kMaxDevices = 2;
constexpr int kStreamsPerDevice = 32;  // like CUDA's pool; stream 0 is the device's default stream

// A lane is one stream of one device. Lanes of all devices share one numbering, so that one clock orders them all.
constexpr int kLanes = kMaxDevices * kStreamsPerDevice;

inline int lane_of(int device, int stream) { return device * kStreamsPerDevice + stream; }
inline int device_of_lane(int lane) { return lane / kStreamsPerDevice; }
inline int stream_of_lane(int lane) { return lane % kStreamsPerDevice; }

// tick[l] = how much of lane l's work is known to be finished before whatever carries this clock.
struct VectorClock {
  std::array<uint64_t, kLanes> tick{};

  void join(const VectorClock& other) {
    for (int lane = 0; lane < kLanes; ++lane) tick[lane] = std::max(tick[lane], other.tick[lane]);
  }
  bool knows(int lane, uint64_t when) const { return tick[lane] >= when; }
};

}  // namespace simgpu
