"""Optimizer state that comes under backward or leaves under the next forward, put into a recorded forward and backward.

    note_moments(rehearsal, recorder, blocks, undo)     # the log then has where state could be asked for, and where go
    events, marks = with_asking(events, marks, moments, early, late)     # what a plan asks for there
    with_early(passed, stepped, new_serial)             # what comes, as soon as there is room for it
    with_late(passed, stepped, late, late_bytes)        # what goes, as soon as no more may be held

Forward and backward are the same wherever state is asked for, so where that could be is noted beside the events, at
every block, and plans that differ in it share one recording (`known_passes.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from memscale._execute.reserving import watch
from memscale._plan import ReleasePoint
from memscale._planning.reserved.allocation_log import Allocated, Asked, Event, Freed, LetGo, Moment, Resumed
from memscale._planning.reserved.event_recorder import EventRecorder
from memscale._planning.reserved.lengthened import Mark
from memscale._profile.rehearsal import FakeRehearsal


def note_moments(
    rehearsal: FakeRehearsal, recorder: EventRecorder, module_fqns: Iterable[str], undo: contextlib.ExitStack
) -> None:
    """Let both logs note where forward and backward come to these layers, until undone."""

    def note(point: ReleasePoint) -> None:
        recorder.events.note(point, len(recorder.marks))
        recorder.storages.note(point, len(recorder.storage_marks))

    names = list(module_fqns)
    watch(rehearsal.model, [ReleasePoint("backward", fqn) for fqn in names], note, undo)
    watch(rehearsal.model, [ReleasePoint("forward", fqn) for fqn in names], note, undo)


def with_asking(
    events: Sequence[Event],
    marks: Sequence[Mark],
    moments: Iterable[Moment],
    early: Mapping[str, int],
    late: Mapping[str, int],
) -> tuple[list[Event], list[Mark]]:
    """The events with what is asked for before the backward of some layers, and what is let go of before the forward of
    some, in bytes; and where the marks are then."""
    found, shifted, begin, num_marks = list[Event](), list[Mark](), 0, 0
    for moment in moments:
        sizes, kind = (early, Asked) if moment.point.phase == "backward" else (late, LetGo)
        if moment.point.module_fqn not in sizes:
            continue
        shifted += [(phase, fqn, at + len(found) - begin) for phase, fqn, at in marks[num_marks : moment.num_marks]]
        found += [*events[begin : moment.num_events], kind(sizes[moment.point.module_fqn])]
        begin, num_marks = moment.num_events, moment.num_marks
    shifted += [(phase, fqn, at + len(found) - begin) for phase, fqn, at in marks[num_marks:]]
    return [*found, *events[begin:]], shifted


def with_late(passed: Sequence[Event], stepped: Sequence[Event], late: Sequence[Event], late_bytes: int) -> list[Event]:
    """Forward and backward, with these releases of the step before as soon as no more may be held; at first
    `late_bytes` may.

    A step that is played again frees what it has allocated when it was played before: see `Replay`.
    """
    sizes = {event.serial: event.num_bytes for event in stepped if isinstance(event, Allocated)}
    leaving = [event for event in late if isinstance(event, Freed)]
    held_bytes, found = sum(sizes[event.serial] for event in leaving), list[Event]()
    for event in passed:
        if not isinstance(event, LetGo):
            found.append(event)
            continue
        late_bytes = max(0, late_bytes - event.num_bytes)  # again where the layer is computed again
        while held_bytes > late_bytes:
            held_bytes -= sizes[leaving[0].serial]
            found.append(leaving.pop(0))
    return [*found, *leaving]


def with_early(passed: Sequence[Event], early: Sequence[Event], new_serial: Callable[[], int]) -> list[Event]:
    """Forward and backward, with these allocations made as soon as there is room for each in what was asked for.

    A later batch of the same step gives up what was fetched for the one before. See NOTE [early state] in
    techniques/offload/optimizer/early_arrivals.py.
    """
    coming = [event for event in early if isinstance(event, Allocated)]
    last = max((index for index, event in enumerate(passed) if isinstance(event, Resumed)), default=-1)
    found, held, asked_bytes = list[Event](), list[Allocated](), 0
    for index, event in enumerate(passed):
        if isinstance(event, Resumed):
            found += [Freed(one.serial) for one in held]
            held, asked_bytes = [], 0
        if not isinstance(event, Asked):
            found.append(event)
            continue
        asked_bytes += event.num_bytes
        while len(held) < len(coming) and sum(e.num_bytes for e in coming[: len(held) + 1]) <= asked_bytes:
            one = coming[len(held)]
            held.append(one if index > last else dataclasses.replace(one, serial=new_serial()))
            found.append(held[-1])
    return [*found, *coming[len(held) :]]
