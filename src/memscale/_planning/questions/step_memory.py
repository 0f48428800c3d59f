"""What the device will hold over a step, by kind: the recorded allocations of a rehearsal, played once more.

    step_memory(planner, plan.actions, config, plan.allocator)

A storage's kind is read from when it comes and goes: what forward allocates and backward still has is an activation,
what backward leaves for the optimizer is a gradient, what the optimizer leaves for the next step is its state, and the
rest is temporary (with it streamed weights and recomputed activations, which are there for one layer at a time).
"""

from __future__ import annotations

from collections.abc import Iterator

from memscale._config import Config
from memscale._decide.allocator import CachingAllocator
from memscale._plan import Action, AllocatorUse
from memscale._planning.one_way import OneWay
from memscale._planning.reserved.allocation_log import Allocated, Event, Freed, Place
from memscale._planning.reserved.allocations import NUM_STEPS, Replay
from memscale._units import round_up
from memscale.report.step_memory import KINDS, Moment, StepMemory

_STANDING = ("parameters", "inputs")
"""Phases of what is there before a step."""
_PHASES = ("forward", "backward", "optimizer")
"""Those of a step, in order: a recomputed forward is a part of backward."""
_KIND_OF = {
    "parameters": "parameters",
    "inputs": "inputs",
    "forward": "activations",
    "backward": "gradients",
    "optimizer": "optimizer state",
}
"""What outlives the phase that allocates it, by that phase."""


def step_memory(
    planner: OneWay, actions: tuple[Action, ...], config: Config, use: AllocatorUse | None = None
) -> StepMemory:
    """The memory of the step as these actions change it, once the optimizer has its state, on the planner's device."""
    log = planner.steps(actions, config, names_modules=True)
    hardware = planner.hardware
    memory = CachingAllocator(planner.allocator) if hardware.has_caching_allocator else None
    replay = None if memory is None else Replay(memory, hardware.workspace_bytes, log)
    live = _Live(planner.rehearsal.rounding_bytes)
    *earlier, last = log.played(NUM_STEPS)
    earlier_bytes = 0
    for number, events in enumerate(earlier):
        if number == 1 and replay is not None and use is not None:
            replay.follow(use)
        for moment in _played(events, live, memory, replay):
            earlier_bytes = max(earlier_bytes, moment.total_bytes)
    return StepMemory(tuple(_played(last, live, memory, replay)), "predicted", earlier_bytes)


class _Live:
    """Live bytes by kind, each storage rounded up as those of a profile are."""

    def __init__(self, rounding_bytes: int) -> None:
        self._rounding_bytes = rounding_bytes
        self._storages: dict[int, tuple[int, int]] = {}
        """The index of its kind and its bytes, by serial."""
        self.sums = [0] * len(KINDS)

    def come(self, serial: int, kind: str, num_bytes: int) -> None:
        self.go(serial)  # what a step leaves behind is replaced by the next step's
        index, rounded_bytes = KINDS.index(kind), round_up(num_bytes, self._rounding_bytes)
        self._storages[serial] = (index, rounded_bytes)
        self.sums[index] += rounded_bytes

    def go(self, serial: int) -> None:
        index, num_bytes = self._storages.pop(serial, (0, 0))
        self.sums[index] -= num_bytes


def _played(
    events: list[Event], live: _Live, memory: CachingAllocator | None, replay: Replay | None
) -> Iterator[Moment]:
    kinds = _kinds_of(events)
    for event in events:
        if replay is not None:
            replay.play([event])
        if isinstance(event, Freed):
            live.go(event.serial)
        elif isinstance(event, Allocated):
            live.come(event.serial, kinds[event.serial], event.num_bytes)
            place = event.place or Place("")
            yield Moment(
                place.phase,
                place.module_fqn,
                tuple(live.sums),
                None if memory is None else memory.allocated_bytes,
                None if memory is None else memory.reserved_bytes,
            )


def _kinds_of(events: list[Event]) -> dict[int, str]:
    """The kind of what is allocated, by serial."""
    came: dict[int, str] = {}
    kinds: dict[int, str] = {}
    phase = _PHASES[0]
    for event in events:
        if isinstance(event, Allocated):
            named = event.place.phase if event.place else phase
            phase = max(phase, named, key=_PHASES.index) if named in _PHASES else phase
            came[event.serial] = phase
            kinds[event.serial] = _KIND_OF[named if named in _STANDING else phase]
        elif isinstance(event, Freed) and came.get(event.serial) == phase:
            kinds[event.serial] = "temporaries"
    return kinds
