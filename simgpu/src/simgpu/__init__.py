"""simgpu: a simulated accelerator, so that code for a device can be tested without one.

    import simgpu                      # registers the device "simgpu" with torch; builds its runtime the first time

    simgpu.set_cap(8 << 30)            # a device of 8 GiB
    model = model.to("simgpu")
    ...
    torch.accelerator.max_memory_allocated()   # bytes, exact and repeatable
    simgpu.take_reports()                      # races between streams
    simgpu.virtual_ms()                        # a modelled time, not a measured one

Every operator computes through its CPU kernel, so results equal the CPU's. What this proves and what it cannot is in
docs/design/simgpu.md.
"""

from simgpu._allocator import AllocatorModel, set_allocator
from simgpu._cards import CARDS, Card
from simgpu._control import (
    Counters,
    InjectedFault,
    OverlapReport,
    PinnedStats,
    counters,
    fail_allocation,
    fail_copy,
    fail_event,
    fail_pinned_allocation,
    get_cap,
    get_card,
    overlap_report,
    pinned_stats,
    race_mode,
    reset,
    reset_clock,
    reset_pinned_peaks,
    set_cap,
    set_card,
    set_defer_copies,
    set_poison,
    set_race_mode,
    set_schedule_seed,
    take_reports,
    virtual_ms,
)
from simgpu._device import register as _register

__version__ = "0.1.0"

__all__ = [
    "CARDS",
    "AllocatorModel",
    "Card",
    "Counters",
    "InjectedFault",
    "OverlapReport",
    "PinnedStats",
    "counters",
    "fail_allocation",
    "fail_copy",
    "fail_event",
    "fail_pinned_allocation",
    "get_cap",
    "get_card",
    "overlap_report",
    "pinned_stats",
    "race_mode",
    "reset",
    "reset_clock",
    "reset_pinned_peaks",
    "set_allocator",
    "set_cap",
    "set_card",
    "set_defer_copies",
    "set_poison",
    "set_race_mode",
    "set_schedule_seed",
    "take_reports",
    "virtual_ms",
]

_register()
