"""What PyTorch's caching allocator makes of the allocations of whole training steps.

    reserved_of(log, parse_settings("expandable_segments:True"))    # Reserved(allocated_peak_bytes=..., ...)

`recording.py` records such logs.
"""

from __future__ import annotations

import dataclasses
import logging

from memscale._decide.allocator import CachingAllocator
from memscale._decide.allocator.blocks import Block
from memscale._decide.allocator.settings import AllocatorSettings, parse_settings
from memscale._errors import ConfigError, MemScaleError
from memscale._execute.reserving import settings_in_force
from memscale._hardware.allocator_environment import own_settings
from memscale._plan import AllocatorUse, ReleasePoint
from memscale._planning.reserved.allocation_log import (
    Allocated,
    AllocationLog,
    Emptied,
    Event,
    Multiplied,
    Reached,
    Thread,
)
from memscale._units import show_bytes

logger = logging.getLogger("memscale")

WORKSPACE_BYTES = 8_519_680
"""cuBLAS's workspace on cards up to sm_89: two buffers of 4 MiB and eight of 16 KiB. From sm_90 on it is 32 MiB."""

NUM_STEPS = 3
"""How many steps are played: in the second the optimizer's state is there, in the third memory is as the second left
it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Reserved:
    """The highest value of each figure, over all steps."""

    requested_peak_bytes: int
    """What the storages ask for."""
    allocated_peak_bytes: int
    """What the allocator hands out for them."""
    reserved_peak_bytes: int
    """What is held for that."""
    rises: frozenset[ReleasePoint] = frozenset()
    """The moments after which, and before the next, what is held came to be more than before."""


def allocator_settings() -> AllocatorSettings:
    """What PyTorch's allocator of this process is set to now, by the environment or by a plan; the defaults where our
    model does not know a setting."""
    try:
        return parse_settings(settings_in_force())
    except ConfigError as error:
        logger.info("Reserved memory is predicted for PyTorch's default allocator settings: %s.", str(error))
        return AllocatorSettings()


def settings_before_plans() -> AllocatorSettings | None:
    """What the allocator was set to before a plan changed that; None: no plan has, or our model knows nothing of it.

    NOTE [two starts]: a model's weights may have been placed before an earlier plan switched to segments that grow, or
    after. Segments stay what they are, and what is free around weights in ordinary ones is of less use. So steps are
    played from both, and the higher is told.
    """
    if settings_in_force() == own_settings():
        return None
    try:
        return parse_settings(own_settings())
    except ConfigError:
        return None


def reserved_of(
    log: AllocationLog,
    settings: AllocatorSettings | None = None,
    *,
    num_steps: int = NUM_STEPS,
    workspace_bytes: int = WORKSPACE_BYTES,
    capacity_bytes: int | None = None,
    use: AllocatorUse | None = None,
    most_bytes: int | None = None,
    earlier: AllocatorSettings | None = None,
) -> Reserved:
    """What PyTorch's allocator hands out and holds in that many steps, of which the last recorded one is repeated.

    `workspace_bytes` is what cuBLAS takes for each thread that multiplies matrices; 0: nothing. `use` is what a plan
    asks of the allocator, once it is attached. Raises `OutOfMemoryError` where `capacity_bytes` do not suffice, and
    `HoldsMore` as soon as more than `most_bytes` are held in a step. `earlier`: the settings under which the weights
    may have been placed, too; see NOTE [two starts].
    """
    starts = [settings] if earlier is None else [settings, earlier]
    found = [
        _reserved_from(
            CachingAllocator(start, capacity_bytes), log, settings, num_steps, workspace_bytes, use, most_bytes
        )
        for start in starts
    ]
    return max(found, key=lambda one: one.reserved_peak_bytes)


def _reserved_from(
    memory: CachingAllocator,
    log: AllocationLog,
    settings: AllocatorSettings | None,
    num_steps: int,
    workspace_bytes: int,
    use: AllocatorUse | None,
    most_bytes: int | None,
) -> Reserved:
    """The same, with weights that are placed as this allocator is set, and steps under the settings."""
    replay = Replay(memory, workspace_bytes)
    before, *steps = log.played(num_steps)
    replay.play(before)
    memory.reset_peaks()  # what streamed parameters took before they left is no part of a step
    memory.configure(settings or AllocatorSettings())
    if use is not None:
        replay.follow(use)
    replay.most_bytes = most_bytes
    for events in steps:
        replay.play(events)
    return Reserved(
        memory.peak_requested_bytes, memory.peak_allocated_bytes, memory.peak_reserved_bytes, frozenset(replay.rises)
    )


class HoldsMore(MemScaleError):
    """More is held than somebody wants to know about."""


class Replay:
    """A step may be played several times. What it leaves behind is then replaced: the new comes, the old goes, as when
    a variable gets another value."""

    def __init__(self, memory: CachingAllocator, workspace_bytes: int) -> None:
        self._memory = memory
        self._workspace_bytes = workspace_bytes
        self._blocks: dict[int, Block] = {}
        self._threads: set[Thread] = set()
        self._releases: frozenset[ReleasePoint] = frozenset()
        self._passed: ReleasePoint | None = None
        self.rises: set[ReleasePoint] = set()
        self.most_bytes: int | None = None
        """`HoldsMore` is raised above this; None: nothing is too much."""

    def follow(self, use: AllocatorUse) -> None:
        """Set the allocator as the executor does when a plan is attached."""
        if use.settings:
            self._memory.configure(parse_settings(use.settings))
        self._releases = frozenset(use.releases)

    def play(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Allocated):
                self._allocate(event)
            elif isinstance(event, Reached):
                self._reach(event.point)
            elif isinstance(event, Multiplied):
                self._multiply(event.thread)
            elif isinstance(event, Emptied):
                self._memory.empty_cache()
            elif event.serial in self._blocks:  # else it was made before the step, and went when that was first played
                self._memory.free(self._blocks.pop(event.serial))

    def _allocate(self, event: Allocated) -> None:
        memory, old = self._memory, self._blocks.get(event.serial)
        highest_bytes = memory.peak_reserved_bytes
        self._blocks[event.serial] = memory.allocate(event.num_bytes)
        if memory.peak_reserved_bytes > highest_bytes:
            if self.most_bytes is not None and memory.peak_reserved_bytes > self.most_bytes:
                raise HoldsMore(f"more than {show_bytes(self.most_bytes)} are held")
            if self._passed is not None:
                self.rises.add(self._passed)
        if old is not None:
            memory.free(old)

    def _reach(self, point: ReleasePoint) -> None:
        self._passed = point
        if point in self._releases:
            self._memory.empty_cache()

    def _multiply(self, thread: Thread) -> None:
        if self._workspace_bytes and thread not in self._threads:
            self._threads.add(thread)
            self._memory.allocate(self._workspace_bytes)
