// Streams and events: an order of work, who knows of whose work, and the races that this order leaves open.
//
// Every stream numbers the work that it is given. A clock holds, for every stream, up to which number its work is known
// to be over; each stream has one and so has the host. Recording an event writes the stream's clock down, waiting for
// the event takes it over, and whatever the host has waited for is known to all work that it hands out later.
//
// With a lag of n the device is up to n pieces of work behind the host in every stream: events are not ready before the
// host hands out more or waits. Without a lag everything is ready at once, but is no more *known* than on a real card.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

#include "card.h"

namespace emucuda {

namespace {

using Guard = std::lock_guard<std::mutex>;
using Clock = std::vector<uint64_t>;  // by the stream's index

void merge(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

bool knows(const Clock& clock, size_t index, uint64_t number) { return index < clock.size() && clock[index] >= number; }

}  // namespace

struct Stream {
  size_t index = 0;
  unsigned flags = 0;
  int priority = 0;
  uint64_t issued = 0, done = 0;
  Clock clock;
  bool blocks_default() const { return index != 0 && !(flags & 1); }  // made without cudaStreamNonBlocking
};

struct Event {
  Clock clock;
  std::chrono::steady_clock::time_point when;
};

namespace {

struct Access {
  uintptr_t low, high;
  bool writes;
  size_t stream;
  uint64_t number;
  const char* what;
};

struct Order {
  std::mutex lock;
  std::vector<Stream*> streams{new Stream};  // the default one is the first; none is deleted, clocks name them
  Clock host;
  std::map<uintptr_t, std::vector<Access>> pages;
  std::set<std::string> names;
  std::vector<std::string> reports;
};
Order& order() {
  static Order* it = new Order;
  return *it;
}

// NULL, cudaStreamLegacy and cudaStreamPerThread all mean the default stream here.
Stream* real(void* stream) { return uintptr_t(stream) > 2 ? static_cast<Stream*>(stream) : order().streams.front(); }

void host_learns(Order& o, const Clock& clock) {
  merge(o.host, clock);
  for (size_t i = 0; i < clock.size(); ++i) o.streams[i]->done = std::max(o.streams[i]->done, clock[i]);
}

uint64_t issue(Order& o, Stream* stream) {
  merge(stream->clock, o.host);
  if (stream->index == 0) {  // the legacy default stream waits for those that were made without "non-blocking" ...
    for (Stream* other : o.streams)
      if (other->blocks_default()) merge(stream->clock, other->clock);
  } else if (stream->blocks_default()) {  // ... and they wait for it
    merge(stream->clock, o.streams.front()->clock);
  }
  if (stream->clock.size() <= stream->index) stream->clock.resize(stream->index + 1);
  stream->clock[stream->index] = ++stream->issued;
  const size_t lag = settings().lag;
  if (lag && stream->issued - stream->done > lag) stream->done = stream->issued - lag;
  return stream->issued;
}

bool is_done(const Order& o, const Clock& clock) {
  if (!settings().lag) return true;
  for (size_t i = 0; i < clock.size(); ++i)
    if (o.streams[i]->done < clock[i]) return false;
  return true;
}

bool learn_if_done(const Clock& clock) {
  Order& o = order();
  if (!is_done(o, clock)) return false;
  host_learns(o, Clock(clock));  // a copy: `clock` may be the host's own
  return true;
}

std::string who(size_t stream) { return stream ? "stream " + std::to_string(stream) : "the default stream"; }

void report(Order& o, const Access& now, const char* where, const Access& old) {
  ++counters().races;
  if (o.reports.size() >= 200) return;
  char bytes[96];
  snprintf(bytes, sizeof bytes, "%zu bytes at %p", size_t(now.high - now.low), reinterpret_cast<void*>(now.low));
  o.reports.push_back(std::string(now.what) + " on " + where + (now.writes ? " writes " : " reads ") + bytes +
                      " and is not ordered after " + old.what + ", which " + (old.writes ? "writes" : "reads") +
                      " them on " + who(old.stream));
}

constexpr uintptr_t kPage = kGranule;

template <typename Visit>
void for_each_page(uintptr_t low, uintptr_t high, Visit visit) {
  for (uintptr_t at = low; at < high;) {
    const uintptr_t next = std::min(high, (at / kPage + 1) * kPage);
    visit(at / kPage, at, next);
    at = next;
  }
}

// Adds an access of a stream to the log of one page; true if it races with an earlier one. An old access is forgotten
// once the host knows it to be over, or once a newer, ordered one covers it: nothing can race with it then without
// racing with the newer one, too. It is also forgotten once it was reported: one mistake gives one report.
bool add_to_page(Order& o, std::vector<Access>& log, const Access& now, const Clock& known, Access& culprit) {
  bool found = false;
  size_t kept = 0;
  for (const Access& old : log) {
    if (knows(o.host, old.stream, old.number)) continue;
    const bool ordered = old.stream == now.stream || knows(known, old.stream, old.number);
    const bool races = !ordered && (old.writes || now.writes) && old.low < now.high && now.low < old.high;
    if (races) found = true, culprit = old;
    const bool covered = now.low <= old.low && old.high <= now.high;
    if (covered && (races || (ordered && (now.writes || !old.writes)))) continue;
    log[kept++] = old;
  }
  log.resize(kept);
  constexpr size_t kMost = 512;  // beyond it the oldest are forgotten: a race may be missed, none is invented
  if (log.size() >= kMost) log.erase(log.begin(), log.begin() + kMost / 2);
  log.push_back(now);
  return found;
}

void add_access(Order& o, const void* at, size_t bytes, bool writes, Stream* stream, uint64_t number, const char* what) {
  Access whole{uintptr_t(at), uintptr_t(at) + bytes, writes, stream->index, number, what}, culprit{};
  bool races = false;
  for_each_page(whole.low, whole.high, [&](uintptr_t page, uintptr_t low, uintptr_t high) {
    Access part = whole;
    part.low = low, part.high = high;
    races |= add_to_page(o, o.pages[page], part, stream->clock, culprit);
  });
  if (races) report(o, whole, who(stream->index).c_str(), culprit);
}

const char* interned(Order& o, const char* text) { return o.names.insert(text).first->c_str(); }

void count_copy(const Range& to, const Range& from, size_t bytes) {
  Counters& c = counters();
  ++c.copies;
  if (to.kind != Kind::device) c.device_to_host_bytes += bytes;
  else if (from.kind == Kind::device) c.device_to_device_bytes += bytes;
  else c.host_to_device_bytes += bytes;
}

}  // namespace

void copy(void* to, const void* from, size_t bytes, void* handle, bool blocking) {
  if (!bytes) return;
  const Range target = find(to), source = find(from);
  count_copy(target, source, bytes);
  Order& o = order();
  {
    Guard guard(o.lock);
    Stream* stream = real(handle);
    // As CUDA documents it: a copy from pageable memory first waits for its stream and then returns when the bytes are
    // staged, maybe before they arrive; a copy to pageable memory returns when they are there.
    if (source.kind == Kind::none) host_learns(o, Clock(stream->clock));
    const uint64_t number = issue(o, stream);
    if (settings().races) {
      add_access(o, from, bytes, false, stream, number, "a copy");
      add_access(o, to, bytes, true, stream, number, "a copy");
    }
    const bool staged = source.kind == Kind::none && target.kind == Kind::device;
    if (target.kind == Kind::none || (blocking && !staged)) host_learns(o, Clock(stream->clock));
  }
  if (bytes <= settings().copy_limit_bytes) memmove(to, from, bytes);
}

void fill(void* at, int value, size_t bytes, void* handle) {
  if (!bytes) return;
  Order& o = order();
  {
    Guard guard(o.lock);
    Stream* stream = real(handle);
    const uint64_t number = issue(o, stream);
    if (settings().races) add_access(o, at, bytes, true, stream, number, "a memset");
  }
  if (bytes <= settings().copy_limit_bytes) memset(at, value, bytes);
}

void launch(const void* function, void* stream, const char* name) {
  ++counters().launches;
  {
    Guard guard(order().lock);
    issue(order(), real(stream));
  }
  if (settings().kernels) count_kernel(function, name);
}

void device_access(const void* at, size_t bytes, bool writes, void* handle, const char* what) {
  Order& o = order();
  Guard guard(o.lock);
  Stream* stream = real(handle);
  if (bytes) add_access(o, at, bytes, writes, stream, stream->issued, interned(o, what));
}

// The host touches bytes that a copy may still be using. Work that is handed out later is ordered after it anyway.
void host_access(const void* at, size_t bytes, bool writes, const char* what) {
  if (find(at).kind == Kind::none) return;
  Order& o = order();
  Guard guard(o.lock);
  const Access now{uintptr_t(at), uintptr_t(at) + bytes, writes, ~size_t(0), 0, interned(o, what)};
  for_each_page(now.low, now.high, [&](uintptr_t page, uintptr_t low, uintptr_t high) {
    const auto log = o.pages.find(page);
    if (log == o.pages.end()) return;
    for (const Access& old : log->second) {
      if (knows(o.host, old.stream, old.number) || !(writes || old.writes)) continue;
      if (old.low < high && low < old.high) return report(o, now, "the host", old);
    }
  });
}

std::vector<std::string> take_reports() {
  Guard guard(order().lock);
  std::vector<std::string> taken;
  taken.swap(order().reports);
  return taken;
}

Stream* stream_create(unsigned flags, int priority) {
  Order& o = order();
  Guard guard(o.lock);
  auto* made = new Stream;
  made->index = o.streams.size(), made->flags = flags, made->priority = priority;
  o.streams.push_back(made);
  return made;
}

void stream_destroy(Stream*) {}

int stream_priority(void* stream) { return real(stream)->priority; }

unsigned stream_flags(void* stream) { return real(stream)->flags; }

void stream_wait(void* stream, Event* event) {
  Guard guard(order().lock);
  merge(real(stream)->clock, event->clock);
  ++counters().waits;
}

bool stream_query(void* stream) {
  Guard guard(order().lock);
  return learn_if_done(real(stream)->clock);
}

void stream_sync(void* stream) {
  Guard guard(order().lock);
  host_learns(order(), Clock(real(stream)->clock));
  ++counters().host_waits;
}

void device_sync() {
  Guard guard(order().lock);
  for (Stream* stream : order().streams) host_learns(order(), Clock(stream->clock));
  ++counters().host_waits;
}

Event* event_create() { return new Event{{}, std::chrono::steady_clock::now()}; }

void event_destroy(Event* event) { delete event; }

void event_record(Event* event, void* stream) {
  Guard guard(order().lock);
  issue(order(), real(stream));
  event->clock = real(stream)->clock;
  event->when = std::chrono::steady_clock::now();
  ++counters().records;
}

bool event_query(Event* event) {
  Guard guard(order().lock);
  return learn_if_done(event->clock);
}

void event_sync(Event* event) {
  Guard guard(order().lock);
  host_learns(order(), event->clock);
  ++counters().host_waits;
}

double event_ms(Event* from, Event* to) {
  return std::chrono::duration<double, std::milli>(to->when - from->when).count();
}

}  // namespace emucuda
