"""What a plan could ask of the caching allocator, so that less is reserved: found by playing its recorded step.

    use, found = least_reserved(log, settings, may_switch=True, workspace_bytes=...)

Played are segments as they come and, where those may be had, segments that grow page by page; with releases wherever
what is held rises, at all moments that there are, and at one more or fewer. Then releases are left out as long as that
costs next to nothing: each makes the host wait for the device, and must be worth it. Segments that grow take no time:
their pages come in the first steps and stay.

Where that leaves much reserved above what is allocated, what stays on the device is moved together, too: weights lie in
the segments that building the model made, with up to a tenth unused in each, and the optimizer's state in the gaps that
the first step's activations left, between gradients. Pages that are used in part do not go back, at whatever moment.
Moving takes one visit to the host when the plan is attached and one before the second step, and no time afterwards.

NOTE [releases between blocks]: if it still is much, unused memory also goes back before the backward of a few blocks,
evenly spaced. Where many blocks keep their gradients, each takes the place of what the block has saved, and leaves a
gap that no other gradient fits: in GPT-2 XL one of 25 MiB in each block. There are too many blocks to try each.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence

from memscale._decide.allocator.settings import AllocatorSettings
from memscale._execute.reserving import STEP_BEGIN
from memscale._hardware.allocator_environment import SMALL_PAGES
from memscale._plan import AllocatorUse, ReleasePoint
from memscale._planning.reserved.allocation_log import AllocationLog, Reached
from memscale._planning.reserved.allocations import HoldsMore, Reserved, Start, reserved_of, staying_bytes

WORTH = 0.005
"""The share of the reserved bytes that all releases which are left out may cost together."""
MOST_HELD = 1.05
"""How many times what is allocated may be reserved before what stays is moved together. Leaving a release out must not
bring it above this."""
_MOST_BETWEEN = 3
"""How many releases between blocks are tried at most."""
WORTH_MOVING = 0.015
"""The share of the reserved bytes that this must save: as much as is stated above what is played."""
NUM_STEPS = 3
"""How many steps are played: the first makes the optimizer's state, and what comes later is like the third."""

_WITHIN_REACH = 1.05
"""How many times what segments that grow bring it to may be reserved at first in ordinary ones, or releases are not
tried one by one there: that seldom saves more, and is a third of what is played."""
_MAX_EVENTS = 3_000_000
"""The most events that are played for one plan: some seconds. The larger a step is, the fewer ways are tried."""


def as_little(
    log: AllocationLog,
    settings: AllocatorSettings,
    like: AllocatorUse,
    *,
    workspace_bytes: int,
    start: Start = None,
) -> tuple[AllocatorUse, Reserved]:
    """What a plan asks for that is nearly this one, and what is reserved with it. `start`: as in `reserved_of`."""
    use = dataclasses.replace(like, compacted_bytes=staying_bytes(log)) if like.compacted_bytes else like
    return use, _Trials(log, settings, workspace_bytes, start).played(use)


def least_reserved(
    log: AllocationLog,
    settings: AllocatorSettings,
    *,
    may_switch: bool,
    workspace_bytes: int,
    most_moved_bytes: int = 0,
    start: Start = None,
) -> tuple[AllocatorUse, Reserved]:
    """What to ask for, and what is reserved then. `may_switch`: segments may be made to grow page by page.
    `most_moved_bytes`: how much the host has room for while it is moved together. `start`: as in `reserved_of`."""
    trials = _Trials(log, settings, workspace_bytes, start)
    found = [trials.lowest(AllocatorUse(SMALL_PAGES))] if may_switch else []
    within_reach = int(_WITHIN_REACH * trials.bytes_of(found[0])) if found else None
    found.insert(0, trials.lowest(AllocatorUse(""), within_reach))
    most_bytes = int(MOST_HELD * trials.played(found[-1]).allocated_peak_bytes)
    holds_much = min(map(trials.bytes_of, found)) > most_bytes
    if may_switch and holds_much and 0 < (moved_bytes := staying_bytes(log)) <= most_moved_bytes:
        moved = trials.lowest(AllocatorUse(SMALL_PAGES, compacted_bytes=moved_bytes))
        if trials.bytes_of(moved) <= (1 - WORTH_MOVING) * min(map(trials.bytes_of, found)):
            found.append(moved)
    if may_switch and min(map(trials.bytes_of, found)) > most_bytes:
        found += trials.between_blocks(found, most_bytes)
    lowest_bytes = min(map(trials.bytes_of, found))
    limit_bytes = max(lowest_bytes, min(int(lowest_bytes * (1 + WORTH)), most_bytes))
    fewest = [trials.with_fewer(use, limit_bytes) for use in found if trials.bytes_of(use) <= limit_bytes]
    use = min(fewest, key=lambda use: (len(use.releases), use.settings, use.compacted_bytes))
    return use, trials.played(use)


def growing(
    log: AllocationLog,
    settings: AllocatorSettings,
    *,
    workspace_bytes: int,
    start: Start = None,
) -> tuple[AllocatorUse, Reserved]:
    """Segments that grow page by page and no release, and what is reserved then. `start`: as in `reserved_of`."""
    trials = _Trials(log, settings, workspace_bytes, start)
    return (use := AllocatorUse(SMALL_PAGES)), trials.played(use)


class _Trials:
    """A step, played in several ways; each once."""

    def __init__(
        self,
        log: AllocationLog,
        settings: AllocatorSettings,
        workspace_bytes: int,
        start: Start = None,
    ) -> None:
        self._log = log
        self._settings, self._start = settings, start
        self._workspace_bytes = workspace_bytes
        self._known: dict[AllocatorUse, Reserved] = {}
        self._above: dict[AllocatorUse, int] = {}
        """What is known to be exceeded, of ways that were not played to their end."""
        self._num_left = _MAX_EVENTS // max(1, NUM_STEPS * len(log.steps[-1]))
        self._same = _first_of_equals(log)
        """For each point beside the blocks the first that it does the same as."""
        self._points = frozenset(self._same.values())
        reached = (event for events in log.steps for event in events if isinstance(event, Reached))
        self._blocks = tuple(dict.fromkeys(event.point for event in reached if event.is_block))
        """The moments at which blocks begin, in the order of the step."""

    def played(self, use: AllocatorUse) -> Reserved:
        if use not in self._known:
            self._play(use)
        return self._known[use]

    def _play(self, use: AllocatorUse, most_bytes: int | None = None) -> None:
        if use not in self._above:
            self._num_left -= 1
        self._known[use] = reserved_of(
            self._log,
            self._settings,
            workspace_bytes=self._workspace_bytes,
            use=use,
            num_steps=NUM_STEPS,
            most_bytes=most_bytes,
            start=self._start,
        )

    def holds_at_most(self, use: AllocatorUse, most_bytes: int) -> bool:
        """Whether no more is reserved. What holds more is played only until that shows."""
        if use not in self._known and self._above.get(use, -1) < most_bytes:
            try:
                self._play(use, most_bytes)
            except HoldsMore:
                self._above[use] = most_bytes
        return use in self._known and self._known[use].reserved_peak_bytes <= most_bytes

    def bytes_of(self, use: AllocatorUse) -> int:
        return self.played(use).reserved_peak_bytes

    def lowest(self, none: AllocatorUse, most_bytes: int | None = None) -> AllocatorUse:
        """The lowest use like this one without releases, that is found from the best start or from no release at all:
        where releases at all moments are the best start, a single one may be better, and it is far from there.

        Of a start above `most_bytes` nothing better is looked for.
        """
        start = self.start(none)
        if most_bytes is not None and self.bytes_of(start) > most_bytes:
            return start
        found = self.improved(start)
        if start == none:
            return found
        other = self.improved(none)
        return other if self.bytes_of(other) < (1 - WORTH) * self.bytes_of(found) else found

    def start(self, none: AllocatorUse) -> AllocatorUse:
        """The lowest of: no release, those where what is held rises, and all that there could be."""
        rises = frozenset(self._same[point] for point in self.played(none).rises)
        where_it_rises = dataclasses.replace(none, releases=_in_order(rises))
        everywhere = dataclasses.replace(none, releases=_in_order(self._points))
        best = none
        for use in (where_it_rises, everywhere):
            best = use if self.holds_at_most(use, self.bytes_of(best) - 1) else best
        return best

    def improved(self, use: AllocatorUse) -> AllocatorUse:
        """The use with one release more, or one fewer, as long as that saves something."""
        better = use
        while self._num_left > 0:
            for point in _in_order(self._points):
                other = dataclasses.replace(use, releases=_in_order(frozenset(better.releases) ^ {point}))
                worth_bytes = math.ceil((1 - WORTH) * self.bytes_of(better)) - 1
                if self._num_left > 0 and self.holds_at_most(other, worth_bytes):
                    better = other
            if better == use:
                break
            use = better
        return better

    def between_blocks(self, uses: Sequence[AllocatorUse], most_bytes: int) -> list[AllocatorUse]:
        """These uses with releases between blocks, from the cheapest on until one holds no more than `most_bytes`; only
        those that save something. See NOTE [releases between blocks]."""
        better: list[AllocatorUse] = []
        for number in range(1, min(_MOST_BETWEEN, len(self._blocks) - 1) + 1):
            moments = {self._blocks[len(self._blocks) * (i + 1) // (number + 1)] for i in range(number)}
            for use in (one for one in uses if one.settings):
                other = dataclasses.replace(use, releases=_in_order(moments | {*use.releases}))
                lowest_bytes = min(map(self.bytes_of, [*uses, *better]))
                if self.holds_at_most(other, math.ceil((1 - WORTH) * lowest_bytes) - 1):
                    better.append(other)
                    if self.bytes_of(other) <= most_bytes:
                        return better
        return better

    def with_fewer(self, use: AllocatorUse, limit_bytes: int) -> AllocatorUse:
        """The use without the releases that the limit does not need: halves are left out first, single ones at last."""
        size = len(use.releases)
        while size > 1:
            size, start = -(-size // 2), 0
            while start < len(use.releases):
                fewer = dataclasses.replace(use, releases=use.releases[:start] + use.releases[start + size :])
                if self.holds_at_most(fewer, limit_bytes):
                    use = fewer
                else:
                    start += size
        return use


def _first_of_equals(log: AllocationLog) -> dict[ReleasePoint, ReleasePoint]:
    """Points between which nothing is allocated or freed, whenever they are reached: a release at any of them does the
    same. Behind a module and before the next one there is often nothing."""
    visits: dict[ReleasePoint, list[int]] = {}
    position = 0
    for events in log.steps:
        position += 1
        for event in events:
            if not isinstance(event, Reached):
                position += 1
                continue
            if event.is_block:
                continue
            position += event.point == STEP_BEGIN  # what stays may be moved together there
            visits.setdefault(event.point, []).append(position)
    first: dict[tuple[int, ...], ReleasePoint] = {}
    for point in _in_order(frozenset(visits)):
        first.setdefault(tuple(visits[point]), point)
    return {point: first[tuple(found)] for point, found in visits.items()}


def _in_order(points: Collection[ReleasePoint]) -> tuple[ReleasePoint, ...]:
    return tuple(
        sorted(points, key=lambda point: (point.phase == "backward", point.module_fqn, point.phase != "forward"))
    )
