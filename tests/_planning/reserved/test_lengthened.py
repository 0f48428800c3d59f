"""A step that is recorded at a fraction of the depth and lengthened is the step of the whole model, event by event."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

from memscale import Config, Hardware
from memscale._decide.choice import block_actions
from memscale._plan import Action, Checkpoint, OffloadActivations, OffloadOptimizer, StreamParameters
from memscale._planning.job import Job
from memscale._planning.planner import Planner
from memscale._planning.reserved.allocation_log import (
    Allocated,
    AllocationLog,
    Asked,
    Event,
    Freed,
    LetGo,
    Place,
    Reached,
)
from memscale._planning.reserved.lengthened import Mark, NotAlike, lengthened
from memscale._profile import CHECKPOINT_OFFLOAD, OFFLOAD, TraceKey
from memscale._profile.inputs import Inputs
from memscale._profile.shallow import Cut
from memscale._units import MIB
from memscale.techniques.offload.optimizer.early_state import FetchStateEarly
from memscale.techniques.offload.optimizer.late_state import SendStateLate
from memscale.techniques.offload.optimizer.on_device import StepOnDevice
from tests._profile.test_shallow import Deep
from tests.lanes import some

DEPTH = 14


def planner_of(*, overlaps: bool) -> Planner:
    with torch.device("meta"):
        model, ids = Deep(DEPTH, width=2048), torch.zeros(8, 512, dtype=torch.long)
    config = Config(async_offload=overlaps, memory_budget_gb=1.0)
    return Planner(Job(model, config, Hardware.from_name("RTX 3090"), "adamw"), Inputs.from_sample(ids))


def told(log: AllocationLog) -> list[list[object]]:
    """The events, with serials in the order in which they come."""
    made = (event.serial for events in (log.before, *log.steps) for event in events if isinstance(event, Allocated))
    numbers = {serial: number for number, serial in enumerate(made)}
    found = []
    for events in (log.before, *log.steps):
        here: list[object] = []
        for event in events:
            if isinstance(event, Allocated):
                here.append((numbers[event.serial], event.num_bytes))
            else:
                here.append(numbers[event.serial] if isinstance(event, Freed) else event)
        found.append(here)
    found[0].sort(key=str)  # parameters leave the device in any order
    return found


def streamed(blocks: list[str]) -> tuple[Action, ...]:
    each = itertools.chain(*((Checkpoint(fqn), StreamParameters(fqn)) for fqn in blocks))
    return (*each, StepOnDevice(64 << 20))


KINDS = ("streamed", "offloaded", "some recomputed", "one sends a little", "recomputed", "plain")


@pytest.mark.parametrize("kind", some(KINDS, "streamed", "offloaded", "some recomputed", "one sends a little"))
@pytest.mark.parametrize("overlaps", [True, pytest.param(False, marks=pytest.mark.full)])
def test_the_log_is_that_of_the_whole_model(kind: str, overlaps: bool) -> None:
    planner = planner_of(overlaps=overlaps)
    blocks = list(planner.rehearsal.blocks)
    actions: dict[str, tuple[Action, ...]] = {
        "plain": (),
        "recomputed": tuple(map(Checkpoint, blocks)),
        "some recomputed": tuple(map(Checkpoint, blocks[4:14])),
        "offloaded": tuple(map(OffloadActivations, blocks)),
        "streamed": streamed(blocks),
        # Many of its kind would fill a window, but there is no other: how many blocks are kept goes by runs.
        "one sends a little": (*block_actions(blocks[0], CHECKPOINT_OFFLOAD), *streamed(blocks[1:])),
    }
    if kind == "offloaded":
        planner.try_variants({TraceKey(OFFLOAD): actions[kind]}, planner.job.eligible)  # how much is offloaded
    short = planner._steps_short(actions[kind], planner.job.config)
    assert short is not None
    recorded = planner._record(actions[kind], planner.job.config)
    assert told(short) == told(recorded)
    reached = [event.point.module_fqn for event in short.steps[-1] if isinstance(event, Reached) and event.is_block]
    assert reached == (blocks[::-1] if actions[kind] else []), "each block's backward, by its own name"
    assert short.levels == recorded.levels
    trace = planner._rehearsed_short(actions[kind], planner.job.config, num_steps := 1 + planner._learns(actions[kind]))
    whole = planner.rehearsal.run(planner.attacher(actions[kind], planner.job.config), num_steps=num_steps)
    assert trace is not None
    assert (trace.peak_bytes, trace.end_bytes) == (whole.peak_bytes, whole.end_bytes) == max(recorded.levels)


def test_state_that_comes_early_comes_in_the_same_places() -> None:
    """Asked for in backward of every block, of which most are left out."""
    planner = planner_of(overlaps=True)
    blocks, config = list(planner.rehearsal.blocks), planner.job.config
    late = (*streamed(blocks), OffloadOptimizer(16 << 20))
    early = tuple(FetchStateEarly(fqn, 32 << 20) for fqn in reversed(blocks))
    short, recorded = planner._steps_short((*late, *early), config), planner._record((*late, *early), config)
    assert short is not None
    assert told(short) == told(recorded)
    assert short.levels == recorded.levels
    without = planner._record(late, config)
    (peak_bytes, end_bytes), (late_peak_bytes, late_end_bytes) = recorded.levels[-1], without.levels[-1]
    assert end_bytes == late_end_bytes + 448 * MIB
    assert late_peak_bytes <= peak_bytes <= late_peak_bytes + 448 * MIB
    (first, second), (late_first, late_second) = recorded.steps, without.steps
    assert made_before_the_step(first) == made_before_the_step(late_first), "nothing waits before the first step"
    come = made_before_the_step(second) - made_before_the_step(late_second)
    assert 400 * MIB < come <= 448 * MIB, "whole buckets"
    assert not any(isinstance(event, Asked) for event in (*first, *second))


def test_state_that_leaves_late_goes_in_the_same_places() -> None:
    """Let go of in forward of every second block, of which most are left out; the forward of a block that is computed
    again lets go of nothing."""
    planner = planner_of(overlaps=True)
    blocks, config = list(planner.rehearsal.blocks), planner.job.config
    at_once = (*map(Checkpoint, blocks), OffloadOptimizer(16 << 20))
    late = tuple(SendStateLate(fqn, 48 << 20) for fqn in blocks)
    short, recorded = planner._steps_short((*at_once, *late), config), planner._record((*at_once, *late), config)
    assert short is not None
    assert told(short) == told(recorded)
    assert short.levels == recorded.levels
    without, late_bytes = planner._record(at_once, config), DEPTH * 48 * MIB
    (peak_bytes, end_bytes), (soon_peak_bytes, soon_end_bytes) = recorded.levels[-1], without.levels[-1]
    assert end_bytes == soon_end_bytes
    assert soon_peak_bytes <= peak_bytes <= soon_peak_bytes + late_bytes
    first, second = recorded.steps
    assert not gone_late(first), "nothing waits before the first step"
    sizes = [num_bytes for num_bytes, _ in gone_late(second)]
    assert late_bytes - 64 * MIB < sum(sizes) <= late_bytes, "whole buckets"
    held_bytes = sum(sizes)
    for num_bytes, place in gone_late(second):
        held_bytes -= num_bytes
        assert place is not None
        assert place.phase == "forward"
    assert held_bytes == 0
    assert max(live_in(second)) - max(live_in(without.steps[1])) <= late_bytes
    assert not any(isinstance(event, LetGo) for event in (*first, *second))


def gone_late(events: Sequence[Event]) -> list[tuple[int, Place | None]]:
    """What is freed of what the step before has left, with the place of what was allocated last before."""
    sizes, here, found = {e.serial: e.num_bytes for e in events if isinstance(e, Allocated)}, set[int](), []
    place: Place | None = Place("forward")
    for event in events:
        if isinstance(event, Allocated):
            here.add(event.serial)
            place = event.place
        elif isinstance(event, Freed) and event.serial in sizes and event.serial not in here:
            found.append((sizes[event.serial], place))
    return found


def live_in(events: Sequence[Event]) -> list[int]:
    """Live bytes of this step, above what there is before it, when it is played again."""
    live, sizes, found = sum(num_bytes for num_bytes, _ in gone_late(events)), dict[int, int](), list[int]()
    late = {e.serial: e.num_bytes for e in events if isinstance(e, Allocated)}
    for event in events:
        if isinstance(event, Allocated):
            sizes[event.serial] = event.num_bytes
            live += event.num_bytes
        elif isinstance(event, Freed):
            live -= sizes.pop(event.serial, late.get(event.serial, 0))
        found.append(live)
    return found


def made_before_the_step(events: Sequence[Event]) -> int:
    """What the optimizer's allocations before the last gradient is made come to."""
    made = [event for event in events if isinstance(event, Allocated) and event.place is not None]
    last = max(index for index, event in enumerate(made) if event.place is not None and event.place.phase == "backward")
    return sum(each.num_bytes for each in made[:last] if each.place is not None and each.place.phase == "optimizer")


# ---- what is not alike

CUT = Cut("layers", 9, 0, 9)


def step_of(odd: int | None = None, *, keeps: bool = False) -> tuple[list[Event], list[Mark]]:
    """Six blocks of nine: each allocates in forward what it frees in backward, where it leaves a gradient; `odd`
    allocates more than the others, or `keeps` what it has."""
    events: list[Event] = []
    marks: list[Mark] = []
    for position in CUT.kept:
        marks.append(("forward", CUT.name(position), len(events)))
        events.append(Allocated(position, 200 if position == odd and not keeps else 100))
    for position in reversed(CUT.kept):
        marks.append(("backward", CUT.name(position), len(events)))
        events.append(Allocated(100 + position, 10))
        if not (position == odd and keeps):
            events.append(Freed(position))
    return events, marks


def test_blocks_that_are_left_out_are_put_in() -> None:
    events, marks = step_of()
    serials = itertools.count(1000)
    ended: list[Event] = [Freed(100 + position) for position in CUT.kept]
    passed, later = lengthened(events, [ended], marks, [CUT], lambda: next(serials))
    assert sum(isinstance(event, Allocated) for event in passed) == 18
    assert sum(isinstance(event, Freed) for event in passed) == 9
    assert len(later) == 9, "what is freed of a block is freed of those that it stands for"
    freed = [event.serial for event in (*passed, *later) if isinstance(event, Freed)]
    assert len(set(freed)) == len(freed) == 18


@pytest.mark.parametrize(("odd", "keeps"), [(CUT.stand_in, False), (CUT.left_out.stop, False), (CUT.stand_in, True)])
def test_what_is_not_alike_is_refused(odd: int, keeps: bool) -> None:
    events, marks = step_of(odd, keeps=keeps)
    with pytest.raises(NotAlike):
        lengthened(events, [], marks, [CUT], itertools.count(1000).__next__)


def test_blocks_that_are_called_twice_are_refused() -> None:
    events, marks = step_of()
    marks.insert(1, marks[0])
    with pytest.raises(NotAlike, match="several times"):
        lengthened(events, [], marks, [CUT], itertools.count(1000).__next__)
