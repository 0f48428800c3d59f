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
from memscale._planning.reserved.allocation_log import AllocationLog
from memscale._profile import CHECKPOINT_OFFLOAD
from tests._planning.reserved.test_lengthened import planner_of, streamed, told
from tests.lanes import some

HALF, ALL = (OffloadOptimizer(OPTIMIZER_BUCKET_BYTES, share) for share in (0.5, 0.0))
STEPS: dict[str, tuple[Action, ...]] = {
    "half of the state waits": (HALF,),
    "all of the state waits": (ALL,),
    "in buckets": (StepInBuckets(STEP_BUCKET_BYTES),),
}
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


def test_other_blocks_are_recorded_anew() -> None:
    planner = planner_of(overlaps=True)
    blocks = list(planner.rehearsal.blocks)
    recorded(planner, (*map(Checkpoint, blocks), ALL))
    calls = Calls()
    with planner.rehearsal.model.register_forward_pre_hook(calls):
        log = recorded(planner, (*map(Checkpoint, blocks[:-1]), ALL))
    assert calls.number == 1
    assert told(log) == told(recorded(planner_of(overlaps=True), (*map(Checkpoint, blocks[:-1]), ALL)))
