// The race detector: who touched which bytes of one allocation, and was it ordered?
#pragma once
#include <cstddef>
#include <string>
#include <vector>

#include "vector_clock.h"

namespace simgpu {

struct ByteRange {
  size_t begin = 0, end = 0;
  bool overlaps(const ByteRange& o) const { return begin < o.end && o.begin < end; }
  bool covers(const ByteRange& o) const { return begin <= o.begin && o.end <= end; }
};

struct Access {
  ByteRange range;
  int lane = 0;
  uint64_t tick = 0;
  bool write = false;
};

// The accesses to one allocation that something may still race with.
//
// NOTE [access log]: an old access can be forgotten when no future access can race with it without also racing with
// a newer one that is kept (a covering, ordered access), or when the host has already waited for it: every launch
// happens after what the host knows. So the log of an ordinary tensor has one to three entries. A log that still
// grows (thousands of unsynchronised accesses to different slices) forgets its oldest entries: it may then miss a
// race, it never invents one.
class AccessLog {
 public:
  // Adds `now`, made by a lane whose clock is `known`; returns the earlier accesses that it races with.
  std::vector<Access> add(const Access& now, const VectorClock& known, const VectorClock& host);

  // Accesses by lanes other than `owner` that `known` is not ordered after.
  std::vector<Access> unordered_with(int owner, const VectorClock& known) const;

  const std::vector<Access>& entries() const { return entries_; }

 private:
  static constexpr size_t kMaxEntries = 2048;
  std::vector<Access> entries_;
};

// "simgpu:0 stream 3"
std::string lane_name(int lane);

}  // namespace simgpu
