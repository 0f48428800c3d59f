// What Python steers: capacity, races, schedule, clock, faults and counters.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "faults.h"
#include "memory.h"
#include "runtime.h"

namespace py = pybind11;

namespace simgpu {

namespace {

using ReleaseGil = py::call_guard<py::gil_scoped_release>;  // see NOTE [GIL and the runtime lock]

void set_capacity(int device, size_t bytes) {
  check_device_index(device);
  Lock lock;
  runtime().devices[device].capacity_bytes = bytes;
  if (reserved_bytes(device) > bytes) empty_device_cache(device);  // a device never has more reserved than it has
}

size_t get_capacity(int device) {
  check_device_index(device);
  Lock lock;
  return runtime().devices[device].capacity_bytes;
}

std::vector<std::string> take_reports() {
  Lock lock;
  runtime().forget_postponed_report();  // whoever takes it has seen it
  return std::exchange(runtime().reports, {});
}

void set_race_mode(RaceMode mode) {
  Lock lock;
  runtime().forget_postponed_report();  // a report of an earlier user is not for this one
  runtime().race_mode = mode;
}

void raise_postponed_report() {
  Lock lock;
  runtime().raise_postponed_report();
}

RaceMode get_race_mode() {
  Lock lock;
  return runtime().race_mode;
}

void set_schedule_seed(uint64_t seed) {
  Lock lock;
  runtime().schedule_seed = seed;
  runtime().schedule_state = seed;
}

void set_defer_copies(bool on) {
  Lock lock;
  if (!on) runtime().drain_everything();
  runtime().defer_copies = on;
}

void set_poison(bool on) {
  Lock lock;
  runtime().poison = on;
}

void set_card(int device, const Card& card) {
  check_device_index(device);
  Lock lock;
  runtime().clock.set_card(device, card);
}

double virtual_ms() {
  Lock lock;
  return runtime().clock.all_done_ms();
}

OverlapReport overlap(int device) {
  check_device_index(device);
  Lock lock;
  return runtime().clock.overlap(device);
}

void reset_clock() {
  Lock lock;
  runtime().clock.reset();
}

void arm_fault(Fault fault, int64_t nth) {
  Lock lock;
  faults().arm(fault, nth);
}

bool disarm_fault(Fault fault) {
  Lock lock;
  faults().disarm(fault);
  return faults().fired(fault);
}

Counters get_counters() {
  Lock lock;
  return runtime().counters;
}

PinnedStats get_pinned_stats() {
  Lock lock;
  return runtime().pinned_stats;
}

// `model(device)` gives reserved bytes now, and at most since it was asked before.
void set_python_reserved_model(const py::function& model) {
  auto* kept = new py::function(model);  // for good: it is asked until the process ends
  set_reserved_model([kept](int device) {
    py::gil_scoped_acquire gil;
    return (*kept)(device).cast<std::pair<size_t, size_t>>();
  });
}

void bind_values(py::module_& m) {
  py::enum_<AllocatorEvent::Kind>(m, "AllocatorEventKind")
      .value("allocate", AllocatorEvent::Kind::allocate)
      .value("free", AllocatorEvent::Kind::free)
      .value("empty_cache", AllocatorEvent::Kind::empty_cache);
  py::class_<AllocatorEvent>(m, "AllocatorEvent")
      .def_readonly("kind", &AllocatorEvent::kind)
      .def_readonly("serial", &AllocatorEvent::serial)
      .def_readonly("bytes", &AllocatorEvent::bytes)
      .def_readonly("stream", &AllocatorEvent::stream);
  py::enum_<RaceMode>(m, "RaceMode")
      .value("collect", RaceMode::collect)
      .value("raise_at_once", RaceMode::raise_at_once)
      .value("off", RaceMode::off);
  py::enum_<Fault>(m, "Fault")
      .value("allocation", Fault::allocation)
      .value("pinned_allocation", Fault::pinned_allocation)
      .value("copy", Fault::copy)
      .value("event", Fault::event);
  py::class_<Card>(m, "Card")
      .def(py::init<double, double, double, double, double, double, int, double>())
      .def_readonly("copy_engines", &Card::copy_engines);
  py::class_<OverlapReport>(m, "OverlapReport")
      .def_readonly("elapsed_ms", &OverlapReport::elapsed_ms)
      .def_readonly("compute_ms", &OverlapReport::compute_ms)
      .def_readonly("to_device_ms", &OverlapReport::to_device_ms)
      .def_readonly("to_host_ms", &OverlapReport::to_host_ms)
      .def_readonly("hidden_copy_ms", &OverlapReport::hidden_copy_ms)
      .def_readonly("exposed_copy_ms", &OverlapReport::exposed_copy_ms);
  py::class_<Counters>(m, "Counters")
      .def_readonly("kernels", &Counters::kernels)
      .def_readonly("deferred_copies", &Counters::deferred_copies)
      .def_readonly("unpinned_async_copies", &Counters::unpinned_async_copies);
  py::class_<PinnedStats>(m, "PinnedStats")
      .def_readonly("requested_bytes", &PinnedStats::requested_bytes)
      .def_readonly("requested_peak", &PinnedStats::requested_peak)
      .def_readonly("rounded_bytes", &PinnedStats::rounded_bytes)
      .def_readonly("rounded_peak", &PinnedStats::rounded_peak)
      .def_readonly("reserved_bytes", &PinnedStats::reserved_bytes)
      .def_readonly("reserved_peak", &PinnedStats::reserved_peak)
      .def_readonly("allocations", &PinnedStats::allocations);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  bind_values(m);
  m.attr("DEVICE_COUNT") = kMaxDevices;
  m.def("set_capacity", &set_capacity, ReleaseGil());
  m.def("get_capacity", &get_capacity, ReleaseGil());
  m.def("take_reports", &take_reports, ReleaseGil());
  m.def("set_race_mode", &set_race_mode, ReleaseGil());
  m.def("get_race_mode", &get_race_mode, ReleaseGil());
  m.def("raise_postponed_report", &raise_postponed_report, ReleaseGil());
  m.def("set_schedule_seed", &set_schedule_seed, ReleaseGil());
  m.def("set_defer_copies", &set_defer_copies, ReleaseGil());
  m.def("set_poison", &set_poison, ReleaseGil());
  m.def("set_card", &set_card, ReleaseGil());
  m.def("virtual_ms", &virtual_ms, ReleaseGil());
  m.def("overlap", &overlap, ReleaseGil());
  m.def("reset_clock", &reset_clock, ReleaseGil());
  m.def("arm_fault", &arm_fault, ReleaseGil());
  m.def("disarm_fault", &disarm_fault, ReleaseGil());
  m.def("counters", &get_counters, ReleaseGil());
  m.def("pinned_stats", &get_pinned_stats, ReleaseGil());
  m.def("reset_pinned_peaks", &reset_pinned_peaks, ReleaseGil());
  m.def("set_reserved_model", &set_python_reserved_model);
  m.def("model_reserved", &model_reserved, ReleaseGil());
  m.def("take_allocator_events", &take_allocator_events, ReleaseGil());
  m.def("in_forked_child", [] { return runtime().in_forked_child; });
}

}  // namespace simgpu
