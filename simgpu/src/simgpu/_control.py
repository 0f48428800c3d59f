"""Steering the simulated device: capacity, races, schedule, clock, faults and counters."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, cast

from simgpu._allocator import set_allocator
from simgpu._cards import CARDS, Card
from simgpu._native import native

DEFAULT_CAP_BYTES = 1 << 40
DEFAULT_CARD = "RTX 3090"

RaceMode = Literal["collect", "raise", "off"]
_RACE_MODES = {
    "collect": native.RaceMode.collect,
    "raise": native.RaceMode.raise_at_once,
    "off": native.RaceMode.off,
}
_current_cards: dict[int, Card] = {}


# ---------------------------------------------------------------------------------------------------------- memory


def set_cap(num_bytes: int, device: int = 0) -> None:
    """The device's capacity: an allocation that would exceed it raises `torch.OutOfMemoryError`."""
    if num_bytes < 0:
        raise ValueError(f"a capacity cannot be negative, got {num_bytes}")
    native.set_capacity(device, num_bytes)


def get_cap(device: int = 0) -> int:
    """The device's capacity in bytes; 1 TiB unless set."""
    return int(native.get_capacity(device))


@dataclass(frozen=True, slots=True)
class PinnedStats:
    """Pinned host memory, in bytes. Rounded: to a power of two, as CUDA's host allocator rounds."""

    requested_bytes: int
    requested_peak: int
    rounded_bytes: int
    rounded_peak: int
    reserved_bytes: int
    """Rounded bytes in use and cached for reuse; `torch.accelerator.empty_host_cache()` drops the latter."""
    reserved_peak: int
    allocations: int


def pinned_stats() -> PinnedStats:
    """How much pinned host memory is, and at most was, in use."""
    stats = native.pinned_stats()
    return PinnedStats(**{name: getattr(stats, name) for name in PinnedStats.__slots__})


def reset_pinned_peaks() -> None:
    """Sets the peaks of `pinned_stats` to what is in use now."""
    native.reset_pinned_peaks()


# ----------------------------------------------------------------------------------------------------------- races


def take_reports() -> list[str]:
    """The races found since the last call, each as a sentence."""
    return list(native.take_reports())


def set_race_mode(mode: RaceMode) -> None:
    """`collect` (the default): report. `raise`: also raise RuntimeError at the spot. `off`: do not look.

    A race that is found where nothing may raise (a free) is raised by the next operator.
    """
    if mode not in _RACE_MODES:
        raise ValueError(f"the race mode is 'collect', 'raise' or 'off', got {mode!r}")
    native.set_race_mode(_RACE_MODES[mode])


@contextlib.contextmanager
def race_mode(mode: RaceMode) -> Iterator[None]:
    """`set_race_mode` for a while. What was found at a free and met no operator since is raised at the end."""
    before = native.get_race_mode()
    set_race_mode(mode)
    try:
        yield
        native.raise_postponed_report()
    finally:
        native.set_race_mode(before)


# -------------------------------------------------------------------------------------------------------- schedule


def set_schedule_seed(seed: int) -> None:
    """0 (the default): deferred work runs as late as it may. Others: also early, at repeatable random places."""
    native.set_schedule_seed(seed)


def set_defer_copies(on: bool) -> None:
    """Off: asynchronous copies run at once (the race detector still sees them as asynchronous)."""
    native.set_defer_copies(on)


def set_poison(on: bool) -> None:
    """Whether fresh memory, and pinned buffers that a copy is on its way to, are filled with NaN patterns."""
    native.set_poison(on)


# ----------------------------------------------------------------------------------------------------------- clock


def set_card(card: str | Card, device: int = 0) -> None:
    """Which card the virtual clock plays: a name of `simgpu.CARDS`, or figures of your own."""
    if isinstance(card, str):
        if card not in CARDS:
            raise ValueError(f"unknown card {card!r}; known are {', '.join(CARDS)}")
        card = CARDS[card]
    native.set_card(
        device,
        native.Card(
            card.fp32_tflops,
            card.bf16_tflops,
            card.fp16_tflops,
            card.memory_gbps,
            card.link_gbps,
            card.pageable_link_gbps,
            card.copy_engines,
            card.launch_us,
        ),
    )
    _current_cards[device] = card


def get_card(device: int = 0) -> Card:
    """The card that the virtual clock plays."""
    return _current_cards.get(device, CARDS[DEFAULT_CARD])


def virtual_ms() -> float:
    """The modelled instant, in ms, at which everything launched so far is done. A model, never a measurement."""
    return float(native.virtual_ms())


def reset_clock() -> None:
    """Sets the virtual clock to zero and forgets what it saw."""
    native.reset_clock()


@dataclass(frozen=True, slots=True)
class OverlapReport:
    """Modelled busy times since the clock was reset, in ms."""

    elapsed_ms: float
    compute_ms: float
    to_device_ms: float
    to_host_ms: float
    hidden_copy_ms: float
    """Copy time with compute beside it."""
    exposed_copy_ms: float
    """Copy time with nothing beside it."""


def overlap_report(device: int = 0) -> OverlapReport:
    """How much of the copying the virtual clock saw hidden behind compute."""
    report = native.overlap(device)
    return OverlapReport(**{name: getattr(report, name) for name in OverlapReport.__slots__})


# ---------------------------------------------------------------------------------------------------------- faults


class InjectedFault:
    """What a fault-injecting context manager gives: whether the fault has struck."""

    def __init__(self, kind: str, nth: int) -> None:
        if nth < 1:
            raise ValueError(f"the first {kind} is number 1, got {nth}")
        self._kind = getattr(native.Fault, kind)
        self.fired = False
        """Set when the context ends."""
        native.arm_fault(self._kind, nth)

    def disarm(self) -> None:
        self.fired = cast(bool, native.disarm_fault(self._kind))


@contextlib.contextmanager
def _injected(kind: str, nth: int) -> Iterator[InjectedFault]:
    fault = InjectedFault(kind, nth)
    try:
        yield fault
    finally:
        fault.disarm()


def fail_allocation(nth: int = 1) -> contextlib.AbstractContextManager[InjectedFault]:
    """The n-th device allocation from here on raises `torch.OutOfMemoryError`. Kernel results count too."""
    return _injected("allocation", nth)


def fail_pinned_allocation(nth: int = 1) -> contextlib.AbstractContextManager[InjectedFault]:
    """The n-th pinned host allocation from here on raises RuntimeError."""
    return _injected("pinned_allocation", nth)


def fail_copy(nth: int = 1) -> contextlib.AbstractContextManager[InjectedFault]:
    """The n-th copy between host and device, or between devices, from here on raises RuntimeError."""
    return _injected("copy", nth)


def fail_event(nth: int = 1) -> contextlib.AbstractContextManager[InjectedFault]:
    """The n-th event that is recorded from here on raises RuntimeError; it stays as it was before."""
    return _injected("event", nth)


# -------------------------------------------------------------------------------------------------------- counters


@dataclass(frozen=True, slots=True)
class Counters:
    """Since the process began."""

    kernels: int
    deferred_copies: int
    unpinned_async_copies: int
    """Copies asked to be non-blocking from or to memory that is not pinned: they block."""


def counters() -> Counters:
    """How much was launched."""
    counts = native.counters()
    return Counters(**{name: getattr(counts, name) for name in Counters.__slots__})


def reset() -> None:
    """Everything that can be set, back to its default; reports and clock emptied. Tensors stay as they are."""
    import torch

    for device in range(torch.accelerator.device_count()):
        torch.accelerator.synchronize(device)
        set_allocator(None, device)
        set_cap(DEFAULT_CAP_BYTES, device)
        set_card(DEFAULT_CARD, device)
    for kind in ("allocation", "pinned_allocation", "copy", "event"):
        native.disarm_fault(getattr(native.Fault, kind))
    set_race_mode("collect")
    set_schedule_seed(0)
    set_defer_copies(True)
    set_poison(True)
    reset_clock()
    take_reports()
