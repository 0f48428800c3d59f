#include "race.h"

namespace simgpu {

namespace {

bool ordered_before(const Access& old, const Access& now, const VectorClock& known) {
  return old.lane == now.lane || known.knows(old.lane, old.tick);
}

// See NOTE [access log].
bool subsumed(const Access& old, const Access& now) {
  return now.range.covers(old.range) && (now.write || !old.write);
}

}  // namespace

std::vector<Access> AccessLog::add(const Access& now, const VectorClock& known, const VectorClock& host) {
  std::vector<Access> races;
  size_t kept = 0;
  for (const Access& old : entries_) {
    if (host.knows(old.lane, old.tick)) continue;
    const bool ordered = ordered_before(old, now, known);
    const bool races_with_old = !ordered && (old.write || now.write) && old.range.overlaps(now.range);
    if (races_with_old) races.push_back(old);
    // A reported pair counts as ordered from here on: one mistake gives one report, not one per later operator.
    if ((ordered || races_with_old) && subsumed(old, now)) continue;
    entries_[kept++] = old;
  }
  entries_.resize(kept);
  if (entries_.size() >= kMaxEntries) entries_.erase(entries_.begin(), entries_.begin() + kMaxEntries / 2);
  entries_.push_back(now);
  return races;
}

std::vector<Access> AccessLog::unordered_with(int owner, const VectorClock& known) const {
  std::vector<Access> found;
  for (const Access& access : entries_) {
    if (access.lane != owner && !known.knows(access.lane, access.tick)) found.push_back(access);
  }
  return found;
}

std::string lane_name(int lane) {
  return "simgpu:" + std::to_string(device_of_lane(lane)) + " stream " + std::to_string(stream_of_lane(lane));
}

}  // namespace simgpu
