"""Forward and backward that are known, with the optimizer's step of another plan: that plan's log, event by event."""

from __future__ import annotations

import itertools

import pytest
from torch import nn

from memscale._decide.choice import block_actions
from memscale._plan import (
    OPTIMIZER_BUCKET_BYTES,
    STEP_BUCKET_BYTES,
    Action,
    Checkpoint,
    OffloadActivations,
    OffloadOptimizer,
    StepInBuckets,
)
from memscale._planning.planner import Planner
from memscale._planning.reserved.allocation_log import Allocated, AllocationLog, Event, Freed
from memscale._planning.reserved.known_passes import Passed, Stretch, may_be_known
from memscale._profile import CHECKPOINT_OFFLOAD
from memscale.techniques.offload.optimizer.early_state import FetchStateEarly
from memscale.techniques.offload.optimizer.late_state import SendStateLate
from memscale.techniques.offload.optimizer.on_device import StepOnDevice
from tests._planning.reserved.test_lengthened import planner_of, streamed, told
from tests._planning.reserved.test_settled_steps import out_of_order, streaming
from tests.lanes import some

HALF, ALL = (OffloadOptimizer(OPTIMIZER_BUCKET_BYTES, share) for share in (0.5, 0.0))
STEPS: dict[str, tuple[Action, ...]] = {
    "half of the state waits": (HALF,),
    "all of the state waits": (ALL,),
    "in buckets": (StepInBuckets(STEP_BUCKET_BYTES),),
}
BESIDE = {"early": ((192, 0), (128, 0)), "late": ((0, 128), (0, 64)), "both": ((64, 128), (128, 64))}
"""MiB that are asked for before the backward of the first blocks, and let go of before their forward. These blocks are
treated unlike their neighbours each time, so that the same blocks are left out."""
KINDS = ("recomputed", "offloaded", "streamed", "mixed")


def blocks_under(kind: str, blocks: list[str]) -> tuple[Action, ...]:
    mixed = [*block_actions(blocks[0], CHECKPOINT_OFFLOAD), *map(OffloadActivations, blocks[1:4:2])]
    return {
        "recomputed": tuple(map(Checkpoint, blocks)),
        "offloaded": tuple(map(OffloadActivations, blocks)),
        "streamed": streamed(blocks),
        "mixed": (*mixed, *map(Checkpoint, blocks[4:])),
    }[kind]


class Calls:
    """How often a model was called."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, module: nn.Module, inputs: object) -> None:
        self.number += 1


def recorded(planner: Planner, actions: tuple[Action, ...]) -> AllocationLog:
    return planner.steps(actions, planner.job.config)


@pytest.mark.parametrize("kind", some(KINDS, "streamed", "mixed"))
@pytest.mark.parametrize("overlaps", [True, pytest.param(False, marks=pytest.mark.full)])
def test_the_log_is_that_of_the_whole_plan(kind: str, overlaps: bool) -> None:
    planner = planner_of(overlaps=overlaps)
    treated = blocks_under(kind, list(planner.rehearsal.blocks))
    whole = {name: recorded(planner_of(overlaps=overlaps), (*treated, *step)) for name, step in STEPS.items()}
    recorded(planner, (*treated, ALL))
    calls = Calls()
    with planner.rehearsal.model.register_forward_pre_hook(calls):
        again = {name: recorded(planner, (*treated, *step)) for name, step in STEPS.items()}
    assert calls.number == 0, "forward and backward are known"
    for name in STEPS:
        assert told(again[name]) == told(whole[name])
        assert again[name].levels == whole[name].levels
    assert all(told(one) != told(other) for one, other in itertools.combinations(again.values(), 2))


def beside(blocks: list[str], sizes: tuple[tuple[int, int], ...]) -> tuple[Action, ...]:
    """State that comes early and leaves late, at the first blocks."""
    asked = [(fqn, *each) for fqn, each in zip(blocks, sizes, strict=False)]
    early = (FetchStateEarly(fqn, size << 20) for fqn, size, _ in asked if size)
    return (*early, *(SendStateLate(fqn, size << 20) for fqn, _, size in asked if size))


@pytest.mark.parametrize("kind", some(KINDS, "streamed", "mixed"))
def test_state_beside_passes_needs_no_passes_of_its_own(kind: str) -> None:
    """What comes under backward and leaves under the next forward is asked for in the same forward and backward."""
    planner = planner_of(overlaps=True)
    blocks = list(planner.rehearsal.blocks)
    plans = {name: (*blocks_under(kind, blocks), ALL, *beside(blocks, sizes)) for name, sizes in BESIDE.items()}
    whole = {name: recorded(planner_of(overlaps=True), actions) for name, actions in plans.items()}
    recorded(planner, plans["early"])
    calls = Calls()
    with planner.rehearsal.model.register_forward_pre_hook(calls):
        again = {name: recorded(planner, actions) for name, actions in plans.items()}
    assert calls.number == 0, "forward and backward are known"
    for name in BESIDE:
        assert told(again[name]) == told(whole[name])
        assert again[name].levels == whole[name].levels
    assert all(told(one) != told(other) for one, other in itertools.combinations(again.values(), 2))


def test_buckets_of_another_size_need_no_passes_of_their_own() -> None:
    """Nor where streamed parameters visit the device to be stepped, as many at once as a bucket holds."""
    planner = planner_of(overlaps=True)
    in_small = planner.travel.in_buckets_of(32 << 20)

    def actions(planner: Planner, size: int) -> tuple[Action, ...]:
        treated = blocks_under("streamed", list(planner.rehearsal.blocks))
        return (*(StepOnDevice(size) if isinstance(one, StepOnDevice) else one for one in treated), ALL)

    recorded(planner, actions(planner, 64 << 20))
    calls, small = Calls(), planner.by(in_small)
    with planner.rehearsal.model.register_forward_pre_hook(calls):
        log = small.steps(actions(planner, 32 << 20), planner.job.config)
    assert calls.number == 0, "forward and backward are known"
    other = planner_of(overlaps=True)
    whole = other.by(in_small).steps(actions(other, 32 << 20), other.job.config)
    assert told(log) == told(whole)
    assert log.levels == whole.levels


def test_passes_that_have_taught_something_are_known_too() -> None:
    """Blocks that are visited in another order than they have: the second forward and backward are not the first."""
    planner = out_of_order()
    treated = streaming(list(planner.rehearsal.blocks))
    whole = {name: recorded(out_of_order(), (*treated, *step)) for name, step in STEPS.items()}
    calls = Calls()
    with planner.rehearsal.model.register_forward_pre_hook(calls):
        recorded(planner, (*treated, HALF))
        assert calls.number == 2, "the first has taught the order"
        again = {name: recorded(planner, (*treated, *step)) for name, step in STEPS.items()}
    assert calls.number == 2, "both are known"
    for name in STEPS:
        assert told(again[name]) == told(whole[name])
        assert again[name].levels == whole[name].levels


def stretch_of(start: int, *events: Event) -> Stretch:
    end = start + sum(isinstance(event, Allocated) for event in events)
    nothing = frozenset[int]()
    return Stretch((start, frozenset(), nothing), (end, frozenset(), nothing), events, (), (), (Freed(start),))


def test_a_second_pass_goes_on_where_the_optimizer_has_ended() -> None:
    """What it allocates gets other serials; what was there before keeps its own."""
    second = stretch_of(10, Allocated(10, 512), Freed(3), Allocated(11, 512), Freed(11))
    state = (14, frozenset({"forward"}), frozenset({12}))
    moved = second.moved_to(state)
    assert moved.events == (Allocated(14, 512), Freed(3), Allocated(15, 512), Freed(15))
    assert moved.ended == (Freed(14),)
    assert (moved.start, moved.end) == (state, (16, *state[1:]))


@pytest.mark.parametrize(("freed", "expected"), [(3, True), (6, False)])
def test_passes_that_free_what_the_optimizer_made_are_not_kept(freed: int, expected: bool) -> None:
    """Serials 5 to 9 are those of the optimizer's first step, which is another in another plan."""
    first = stretch_of(2, Allocated(2, 512), Allocated(3, 512), Allocated(4, 512))
    second = stretch_of(10, Freed(freed), Allocated(10, 512))
    passes = [Passed(frozenset(), one, one, (), 0) for one in (first, second)]
    assert may_be_known(passes) is expected


def test_other_blocks_are_recorded_anew() -> None:
    planner = planner_of(overlaps=True)
    blocks = list(planner.rehearsal.blocks)
    recorded(planner, (*map(Checkpoint, blocks), ALL))
    calls = Calls()
    with planner.rehearsal.model.register_forward_pre_hook(calls):
        log = recorded(planner, (*map(Checkpoint, blocks[:-1]), ALL))
    assert calls.number == 1
    assert told(log) == told(recorded(planner_of(overlaps=True), (*map(Checkpoint, blocks[:-1]), ALL)))
