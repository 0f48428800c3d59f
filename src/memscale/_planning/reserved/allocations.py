"""What PyTorch's caching allocator makes of the allocations of whole training steps.

    reserved_of(log, parse_settings("expandable_segments:True"))    # Reserved(allocated_peak_bytes=..., ...)

`recording.py` records such logs.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence

from memscale._decide.allocator import CachingAllocator
from memscale._decide.allocator.blocks import Block
from memscale._decide.allocator.settings import AllocatorSettings, parse_settings
from memscale._errors import ConfigError, MemScaleError
from memscale._execute.reserving import STEP_BEGIN, settings_in_force
from memscale._hardware.allocator_environment import own_settings
from memscale._plan import AllocatorUse, ReleasePoint
from memscale._planning.reserved.allocation_log import (
    Allocated,
    AllocationLog,
    Emptied,
    Event,
    Freed,
    Multiplied,
    Origin,
    Reached,
    Resumed,
    Thread,
)
from memscale._planning.reserved.found_memory import FoundMemory, FoundWorkspaces, PlacedBefore
from memscale._units import show_bytes

logger = logging.getLogger("memscale")

WORKSPACE_BYTES = 8_519_680
"""cuBLAS's workspace on cards up to sm_89: two buffers of 4 MiB and eight of 16 KiB. From sm_90 on it is 32 MiB."""

NUM_STEPS = 3
"""How many steps are played: in the second the optimizer's state is there, in the third memory is as the second left
it."""

Start = AllocatorSettings | PlacedBefore | FoundMemory | FoundWorkspaces | None
"""What steps begin with: weights placed under these settings, or some of them; or memory as it was found, all of it or
what workspaces keep; None: nothing but their own settings."""


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
    after. Segments stay what they are, and what is free around weights in ordinary ones is of less use. Where the
    allocator tells which weights lie in which, they are placed so (`found_memory.find_placed`); else steps are played
    from both, and the higher is told.
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
    start: Start = None,
) -> Reserved:
    """What PyTorch's allocator hands out and holds in that many steps, of which the last recorded one is repeated.

    `workspace_bytes` is what cuBLAS takes for each thread that multiplies matrices; 0: nothing. `use` is what a plan
    asks of the allocator, once it is attached. Raises `OutOfMemoryError` where `capacity_bytes` do not suffice, and
    `HoldsMore` as soon as more than `most_bytes` are held in a step. `start`: the settings under which the weights
    may have been placed, too, or which of them were, see NOTE [two starts]; or the memory in which a step goes on that
    has begun; or what workspaces keep, see NOTE [workspaces stay]. Where the batch may come at several moments, each is
    played, see NOTE [arriving batches].
    """
    if isinstance(start, FoundMemory):
        replay = Replay(CachingAllocator(settings, capacity_bytes), workspace_bytes, log)
        parts = replay.go_on(start, log.origins, log.played(num_steps))
        return _reserved_from(replay, parts, settings, use, most_bytes)
    found = []
    placements = [settings, start] if isinstance(start, AllocatorSettings) else [settings]
    for placed, arrival in itertools.product(placements, log.arrivals):
        replay = Replay(CachingAllocator(placed, capacity_bytes), workspace_bytes, log)
        parts = log.played(num_steps, arrival)
        if isinstance(start, PlacedBefore):
            parts[0] = replay.place(start, log.origins, parts[0], settings or AllocatorSettings())
        elif isinstance(start, FoundWorkspaces):
            parts[0] = replay.beside(start, parts[0])
        found.append(_reserved_from(replay, parts, settings, use, most_bytes))
    return _highest(found)


def _highest(found: Sequence[Reserved]) -> Reserved:
    """The highest value of each figure; the rises of those who reserve most."""
    reserved_bytes = max(one.reserved_peak_bytes for one in found)
    return Reserved(
        max(one.requested_peak_bytes for one in found),
        max(one.allocated_peak_bytes for one in found),
        reserved_bytes,
        frozenset().union(*(one.rises for one in found if one.reserved_peak_bytes == reserved_bytes)),
    )


def _reserved_from(
    replay: Replay,
    parts: list[list[Event]],
    settings: AllocatorSettings | None,
    use: AllocatorUse | None,
    most_bytes: int | None,
) -> Reserved:
    """The same, with weights that are placed as the allocator is set or found, and steps under the settings."""
    memory = replay.memory
    before, *steps = parts
    replay.play(before)
    memory.configure(settings or AllocatorSettings())
    if use is not None:
        replay.follow(use)
    memory.reset_peaks()  # what streamed parameters took before they left is no part of a step
    replay.most_bytes = most_bytes
    for events in steps:
        replay.play(events)
    return Reserved(
        memory.peak_requested_bytes, memory.peak_allocated_bytes, memory.peak_reserved_bytes, frozenset(replay.rises)
    )


def weights_in(log: AllocationLog) -> frozenset[int]:
    """Parameters and buffers that are there before a step, by serial."""
    came = (event for event in log.before if isinstance(event, Allocated))
    return frozenset(event.serial for event in came if event.place is not None and event.place.phase == "parameters")


def state_in(log: AllocationLog) -> frozenset[int]:
    """What the optimizer allocates in its first step, by serial: its state, and what it frees again."""
    came = (event for event in log.steps[0] if isinstance(event, Allocated)) if log.steps else ()
    return frozenset(event.serial for event in came if event.place is not None and event.place.phase == "optimizer")


def staying_bytes(log: AllocationLog) -> int:
    """What lies on the device between two steps: weights, buffers and the optimizer's state."""
    staying, sizes = weights_in(log) | state_in(log), dict[int, int]()
    for event in (*log.before, *(log.steps[0] if log.steps else ())):
        if isinstance(event, Allocated) and event.serial in staying:
            sizes[event.serial] = event.num_bytes
        elif isinstance(event, Freed):
            sizes.pop(event.serial, None)
    return sum(sizes.values())


class HoldsMore(MemScaleError):
    """More is held than somebody wants to know about."""


class Replay:
    """A step may be played several times. What it leaves behind is then replaced: the new comes, the old goes, as when
    a variable gets another value."""

    def __init__(self, memory: CachingAllocator, workspace_bytes: int, log: AllocationLog) -> None:
        """`log` is what will be played; it says which allocations are weights, and which the optimizer's state."""
        self.memory = memory
        """What is played on."""
        self._workspace_bytes = workspace_bytes
        self._log = log
        self._state: frozenset[int] = frozenset()
        """What the optimizer allocates, by serial, as long as what stays is to be moved together with it."""
        self._blocks: dict[int, Block] = {}
        self._threads: set[Thread] = set()
        self._releases: frozenset[ReleasePoint] = frozenset()
        self._passed: ReleasePoint | None = None
        self.rises: set[ReleasePoint] = set()
        self.most_bytes: int | None = None
        """`HoldsMore` is raised above this; None: nothing is too much."""

    def go_on(self, found: FoundMemory, origins: Mapping[int, Origin], parts: list[list[Event]]) -> list[list[Event]]:
        """Take over the memory of a step that has begun; what is left to be played of these parts.

        A plan that is made then begins with nothing cached (`begin_afresh`). Blocks that belong to nothing in the log
        were the earlier plan's or the earlier batch's, as its loss is, and go with these, or are the loop's, and are
        counted apart.
        """
        blocks = self.memory.adopt(found.segments)
        at = {origin: blocks[address] for origin, address in found.addresses.items() if address in blocks}
        self._blocks = {serial: at[origin] for serial, origin in origins.items() if origin in at}
        before, first, *others = parts
        index = next(index for index, event in enumerate(first) if isinstance(event, Resumed))
        resumed = first[index]
        assert isinstance(resumed, Resumed)
        held = {serial: at[origin] for origin, serial, _ in resumed.gradients if origin in at}
        self._let_go(blocks, {*self._blocks.values(), *held.values()})
        came = [event for event in before if not (isinstance(event, Allocated) and event.serial in self._blocks)]
        self._blocks |= held
        missing = [Allocated(serial, size) for _, serial, size in resumed.gradients if serial not in held]
        return [[*came, *missing, Emptied()], first[index + 1 :], *others]

    def _let_go(self, blocks: Mapping[int, Block], known: set[Block]) -> None:
        """Free what is not known, but for workspaces."""
        threads: list[Thread] = ["backward", "forward"]
        for block in blocks.values():
            if block.state != "allocated" or block in known:
                continue
            if block.requested_bytes == self._workspace_bytes and threads:
                self._threads.add(threads.pop())
            else:
                self.memory.free(block)

    def beside(self, found: FoundWorkspaces, before: list[Event]) -> list[Event]:
        """Play what comes before the steps, and take over the workspaces that are there; what is left."""
        self.play(before)
        self._let_go(self.memory.adopt(found.segments), set())
        return []

    def place(
        self, placed: PlacedBefore, origins: Mapping[int, Origin], before: list[Event], settings: AllocatorSettings
    ) -> list[Event]:
        """Play what comes before the steps, each tensor under the settings that were in force then; what is left."""
        for event in before:
            origin = origins.get(event.serial) if isinstance(event, Allocated) else None
            is_later = origin is None or origin in placed.since
            self.memory.configure(settings if is_later else placed.settings)
            self.play([event])
        return []

    def follow(self, use: AllocatorUse) -> None:
        """Set the allocator as the executor does when a plan is attached."""
        if use.settings:
            self.memory.configure(parse_settings(use.settings))
        self._releases = frozenset(use.releases)
        if use.compacted_bytes:
            self._move_together(weights_in(self._log))
            self._state = state_in(self._log)

    def _move_together(self, serials: Iterable[int]) -> None:
        """All of these go, with what is cached, and come back one behind the other, the largest first."""
        sizes = [(self._blocks[serial].requested_bytes, serial) for serial in serials if serial in self._blocks]
        for _, serial in sizes:
            self.memory.free(self._blocks.pop(serial))
        self.memory.empty_cache()
        for num_bytes, serial in sorted(sizes, reverse=True):
            self._blocks[serial] = self.memory.allocate(num_bytes)

    def play(self, events: list[Event]) -> None:
        """Events are many, and nearly all of the first two kinds."""
        blocks, allocate, free = self._blocks, self._allocate, self.memory.free
        for event in events:
            if isinstance(event, Allocated):
                allocate(event)
            elif isinstance(event, Freed):
                block = blocks.pop(event.serial, None)
                if block is not None:  # else it was made before the step, and went when that was first played
                    free(block)
            elif isinstance(event, Reached):
                self._reach(event)
            elif isinstance(event, Multiplied):
                self._multiply(event.thread)
            elif isinstance(event, Emptied):
                self.memory.empty_cache()
            else:
                assert isinstance(event, Resumed), "there are no others"

    def _allocate(self, event: Allocated) -> None:
        memory, old = self.memory, self._blocks.get(event.serial)
        highest_bytes = memory.peak_reserved_bytes
        self._blocks[event.serial] = memory.allocate(event.num_bytes, event.stream)
        if memory.peak_reserved_bytes > highest_bytes:
            if self.most_bytes is not None and memory.peak_reserved_bytes > self.most_bytes:
                raise HoldsMore(f"more than {show_bytes(self.most_bytes)} are held")
            if self._passed is not None:
                self.rises.add(self._passed)
        if old is not None:
            memory.free(old)

    def _reach(self, event: Reached) -> None:
        point = event.point
        if not event.is_block:
            self._passed = point
        if point == STEP_BEGIN and not self._state.isdisjoint(self._blocks):
            self._move_together(weights_in(self._log) | self._state)
            self._state = frozenset()
        if point in self._releases:
            self.memory.empty_cache()

    def _multiply(self, thread: Thread) -> None:
        if self._workspace_bytes and thread not in self._threads:
            self._threads.add(thread)
            self.memory.allocate(self._workspace_bytes)
