"""A step that was recorded without most of its equal blocks, with what those allocate and free put in.

    passed, *later = lengthened(passed, later, marks, cuts, new_serial)

A block's share of forward is what comes from its beginning up to that of the next block, and its share of backward
likewise. Where equal blocks are left out (`_profile/shallow.py`), the shares of the last one before the gap are
repeated for each of them: a block's allocations get serials of their own, and what a share frees of its neighbours it
frees of the neighbours that it has now. Whether that is right is not assumed: the shares of the blocks on both sides of
the gap must be the same, event by event, and everything is freed once, or `NotAlike` is raised.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard

from memscale._errors import MemScaleError
from memscale._plan import ReleasePoint
from memscale._planning.reserved.allocation_log import Allocated, Event, Freed, Reached
from memscale._profile import Phase
from memscale._profile.shallow import Cut

Mark = tuple[Phase, str, int]
"""The step came to the forward or backward of this module when so many events were recorded."""
_Share = tuple[Phase, str, int]
"""Forward or backward of the block with this position in this container."""


class NotAlike(MemScaleError):
    """Blocks that should be the same are not, so that none can stand for others."""


def lengthened(
    passed: list[Event],
    later: Sequence[list[Event]],
    marks: Sequence[Mark],
    cuts: Sequence[Cut],
    new_serial: Callable[[], int],
) -> list[list[Event]]:
    """Forward and backward with all blocks, and then the lists of what comes later in the step."""
    return _Lengthener(passed, marks, cuts, new_serial).lengthened(passed, later)


@dataclasses.dataclass(frozen=True, slots=True)
class _Stretch:
    """The events of a share."""

    share: _Share
    start: int
    end: int


class _Lengthener:
    def __init__(
        self, passed: list[Event], marks: Sequence[Mark], cuts: Sequence[Cut], new_serial: Callable[[], int]
    ) -> None:
        self._new_serial = new_serial
        self._cut_of = {(cut.container_fqn, cut.stand_in): cut for cut in cuts}
        self._cuts: dict[str, list[Cut]] = collections.defaultdict(list)
        for cut in cuts:
            self._cuts[cut.container_fqn].append(cut)
        self._ranks = {container_fqn: _ranks_of(here) for container_fqn, here in self._cuts.items()}
        self._stretches = sorted(self._find_stretches(marks), key=lambda one: one.start)
        if any(a.end > b.start for a, b in itertools.pairwise(self._stretches)):
            raise NotAlike("blocks of several containers take turns")
        self._serials: dict[_Share, list[int]] = {}
        """What each share allocates, in order."""
        self._owners: dict[int, tuple[_Share, int]] = {}
        for one in self._stretches:
            serials = [event.serial for event in passed[one.start : one.end] if isinstance(event, Allocated)]
            self._serials[one.share] = serials
            self._owners.update({serial: (one.share, number) for number, serial in enumerate(serials)})
        self._live: set[int] = set()
        self._freed: set[int] = set()

    # ---- shares

    def _find_stretches(self, marks: Sequence[Mark]) -> Iterator[_Stretch]:
        turn = next((i for i, (phase, _, _) in enumerate(marks) if phase == "backward"), len(marks))
        forward: dict[str, list[int]] = collections.defaultdict(list)
        backward: dict[str, int] = {}
        for _, name, index in marks[:turn]:
            forward[name].append(index)
        for phase, name, index in marks[turn:]:
            if phase == "backward":
                backward.setdefault(name, index)
        for container_fqn, cuts in self._cuts.items():
            kept = list(self._ranks[container_fqn])
            names = [cuts[0].name(position) for position in kept]
            if any(len(forward[name]) != 1 or name not in backward for name in names):
                raise NotAlike("a block is called several times, or has no backward")
            for (a, first), (b, second) in itertools.pairwise(zip(kept, names, strict=True)):
                yield _Stretch(("forward", container_fqn, a), forward[first][0], forward[second][0])
                yield _Stretch(("backward", container_fqn, b), backward[second], backward[first])

    def _check_alike(self, passed: list[Event]) -> None:
        """The shares on both sides of each gap are the same, seen from their own block."""
        by_share = {one.share: one for one in self._stretches}
        for (container_fqn, stand_in), cut in self._cut_of.items():
            for phase in ("forward", "backward"):
                around = (stand_in - 1, stand_in, cut.left_out.stop)
                stretches = [by_share[phase, container_fqn, position] for position in around]
                if any(one.start > one.end for one in stretches):
                    raise NotAlike("blocks are visited in another order than they have")
                seen = [self._seen(one, passed) for one in stretches]
                if seen[0] != seen[1] or seen[1] != seen[2]:
                    raise NotAlike(f"{phase} of {cut.stands_in} is not that of its neighbours")

    def _seen(self, stretch: _Stretch, passed: list[Event]) -> list[Any]:
        return [self._event_seen(stretch.share, event) for event in passed[stretch.start : stretch.end]]

    def _event_seen(self, share: _Share, event: Event) -> Any:
        if isinstance(event, Allocated):
            return event.num_bytes
        if isinstance(event, Freed):
            owned = self._owners.get(event.serial)
            if owned is not None and owned[0][1] == share[1]:
                (phase, _, position), number = owned
                return phase, self._distance(share, position), number
        if self._is_own_moment(event, share):
            return event.point.phase
        return event

    def _is_own_moment(self, event: Event, share: _Share) -> TypeGuard[Reached]:
        """Whether the step comes to the block itself."""
        return isinstance(event, Reached) and event.point.module_fqn == self._name(share, share[2])

    def _name(self, share: _Share, position: int) -> str:
        return self._cuts[share[1]][0].name(position)

    def _distance(self, share: _Share, position: int) -> int:
        ranks = self._ranks[share[1]]
        return ranks[position] - ranks[share[2]]

    # ---- putting together

    def lengthened(self, passed: list[Event], later: Sequence[list[Event]]) -> list[list[Event]]:
        self._check_alike(passed)
        whole: list[Event] = []
        position = 0
        for one in self._stretches:
            whole += self._outside(passed[position : one.start])
            whole += self._with_copies(one, passed[one.start : one.end])
            position = one.end
        whole += self._outside(passed[position:])
        lengthened = [whole, *(self._outside(events) for events in later)]
        self._check_balance()
        return lengthened

    def _with_copies(self, one: _Stretch, events: list[Event]) -> list[Event]:
        """A share, with those of the blocks that it stands for: after it in forward, before it in backward."""
        phase, container_fqn, position = one.share
        cut = self._cut_of.get((container_fqn, position))
        if cut is None:
            return self._placed(one.share, position, events)
        if phase == "forward":
            return [event for at in (position, *cut.left_out) for event in self._placed(one.share, at, events)]
        return [event for at in (*reversed(cut.left_out), position) for event in self._placed(one.share, at, events)]

    def _placed(self, share: _Share, at: int, events: list[Event]) -> list[Event]:
        """A share as that of the block at this position."""
        phase, container_fqn, position = share
        here = (phase, container_fqn, at)
        if at != position:
            self._serials[here] = [self._new_serial() for _ in self._serials[share]]
        placed: list[Event] = []
        serials = iter(self._serials[here])
        for event in events:
            if isinstance(event, Allocated):
                serial = next(serials)
                self._live.add(serial)
                placed.append(Allocated(serial, event.num_bytes, event.place) if at != position else event)
            elif isinstance(event, Freed):
                placed.append(self._freeing(self._serial_for(share, at, event.serial)))
            elif self._is_own_moment(event, share):
                placed.append(Reached(ReleasePoint(event.point.phase, self._name(share, at)), event.is_block))
            else:
                placed.append(event)
        return placed

    def _serial_for(self, share: _Share, at: int, serial: int) -> int:
        """What a share frees when it is that of the block at this position."""
        owned = self._owners.get(serial)
        if owned is None or owned[0][1] != share[1]:
            return serial
        (phase, container_fqn, position), number = owned
        target = at + self._distance(share, position)
        first, last = min(target, position, at), max(target, position, at)
        if target != position and not any(cut.start <= first and last < cut.end for cut in self._cuts[container_fqn]):
            if at != share[2]:
                raise NotAlike("a block that is left out frees what lies beyond its equals")
            target = position
        return self._serials[phase, container_fqn, target][number]

    def _outside(self, events: list[Event]) -> list[Event]:
        """What is in no block's share. What is freed here of a block that stands for others is freed of those, too."""
        found: list[Event] = []
        for share, group in itertools.groupby(events, self._stands_for):
            here = list(group)
            positions = [None, *self._cut_of[share[1:]].left_out] if share is not None else [None]
            for at in positions:
                for event in here:
                    if isinstance(event, Allocated):
                        self._live.add(event.serial)
                    elif isinstance(event, Freed):
                        serial = event.serial
                        if share is not None and at is not None:
                            serial = self._serials[share[0], share[1], at][self._owners[serial][1]]
                        event = self._freeing(serial)
                    found.append(event)
        return found

    def _stands_for(self, event: Event) -> _Share | None:
        """The share of a block that stands for others, if this frees something of it."""
        share, _ = self._owners.get(event.serial, (None, 0)) if isinstance(event, Freed) else (None, 0)
        return share if share is not None and share[1:] in self._cut_of else None

    def _freeing(self, serial: int) -> Freed:
        if serial in self._freed:
            raise NotAlike("a block would free what another has freed")
        self._freed.add(serial)
        self._live.discard(serial)
        return Freed(serial)

    def _check_balance(self) -> None:
        """A block that was left out leaves behind what the one does that stands for it."""
        for (container_fqn, stand_in), cut in self._cut_of.items():
            for phase in ("forward", "backward"):
                lasting = self._lasting((phase, container_fqn, stand_in))
                for position in cut.left_out:
                    if self._lasting((phase, container_fqn, position)) != lasting:
                        raise NotAlike("a block that was left out leaves something else behind")

    def _lasting(self, share: Any) -> list[int]:
        return [number for number, serial in enumerate(self._serials[share]) if serial in self._live]


def _ranks_of(cuts: list[Cut]) -> dict[int, int]:
    """The blocks of a container that are there, by position: which in order they are."""
    left_out = {position for cut in cuts for position in cut.left_out}
    kept = (position for position in range(cuts[0].num_children) if position not in left_out)
    return {position: rank for rank, position in enumerate(kept)}
