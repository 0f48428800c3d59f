"""Where a step teaches what is attached nothing, forward and backward are recorded once; that gives the same log."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from memscale import Config, Hardware
from memscale._decide import plan_as_it_is
from memscale._decide.allocator.settings import parse_settings
from memscale._decide.eligible import resolve
from memscale._plan import Action, Checkpoint, OffloadActivations, OffloadOptimizer, StreamParameters
from memscale._planning.job import Job
from memscale._planning.planner import Planner
from memscale._planning.reserved import recording
from memscale._planning.reserved.allocation_log import Allocated, Freed, Multiplied
from memscale._planning.reserved.allocations import reserved_of
from memscale._profile.inputs import Inputs
from memscale.techniques.offload.optimizer.on_device import StepOnDevice
from tests._profile.test_shallow import Deep

WIDTH, DEPTH = 512, 4


class Backwards(nn.Module):
    """Its blocks are called from the last to the first, which nobody can guess from the order that they have."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(DEPTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in reversed(self.blocks):
            x = x + block(x)
        return x


def planner_of(model: nn.Module, inputs: Inputs) -> Planner:
    config = Config(async_offload=True, memory_budget_gb=1.0)
    return Planner(Job(model, config, Hardware.from_name("RTX 3090"), "adamw"), inputs)


def in_order() -> Planner:
    with torch.device("meta"):
        return planner_of(Deep(DEPTH, width=WIDTH), Inputs.from_sample(torch.zeros(8, 64, dtype=torch.long)))


def out_of_order() -> Planner:
    with torch.device("meta"):
        return planner_of(Backwards(), Inputs.from_sample(torch.zeros(8, 64, WIDTH)))


def streaming(blocks: list[str]) -> tuple[Action, ...]:
    return tuple(itertools.chain(*((Checkpoint(fqn), StreamParameters(fqn)) for fqn in blocks)))


def actions_of(kind: str, planner: Planner) -> tuple[Action, ...]:
    blocks, guests = list(planner.rehearsal.blocks), StepOnDevice(64 << 20)
    found: dict[str, tuple[Action, ...]] = {
        "all streamed": (*streaming(blocks), guests),
        "some streamed": (*streaming(blocks[:2]), guests, OffloadOptimizer(16 << 20)),
        "stepped on the host": streaming(blocks),
        "some offloaded": (*streaming(blocks[:2]), *map(OffloadActivations, blocks[2:3]), guests),
    }
    return found[kind]


def sizes_in(events: Sequence[object]) -> list[object]:
    """What happens in a step: sizes that are allocated, and of what is freed, which of them it was.

    That a thread multiplies is in the log once.
    """
    numbers: dict[int, int] = {}
    found: list[object] = []
    for event in (event for event in events if not isinstance(event, Multiplied)):
        if isinstance(event, Allocated):
            numbers[event.serial] = len(numbers)
            found.append(event.num_bytes)
        else:
            found.append(numbers.get(event.serial, "before") if isinstance(event, Freed) else event)
    return found


@pytest.fixture
def num_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    passes = [0]
    pass_through = recording._pass_through

    def counted(*args: object) -> object:
        passes[0] += 1
        return pass_through(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(recording, "_pass_through", counted)
    return passes


@pytest.mark.parametrize("kind", ["all streamed", "some streamed", "stepped on the host", "some offloaded"])
def test_a_step_that_teaches_nothing_is_recorded_once(
    kind: str, num_passes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    planner = in_order()
    actions = actions_of(kind, planner)
    once = planner.steps(actions, planner.job.config)
    assert num_passes == [1]
    monkeypatch.setattr(recording._Lesson, "is_learnt", property(lambda lesson: True))
    planner = in_order()  # the other knows forward and backward
    twice = planner.steps(actions, planner.job.config)
    assert num_passes == [3]
    assert max(once.levels) == max(twice.levels)
    assert [sizes_in(events) for events in once.steps] == [sizes_in(events) for events in twice.steps]
    for settings in ("", "expandable_segments:True"):
        assert reserved_of(once, parse_settings(settings)) == reserved_of(twice, parse_settings(settings))


def test_a_step_that_teaches_an_order_is_recorded_again(num_passes: list[int]) -> None:
    planner = out_of_order()
    actions = actions_of("all streamed", planner)
    log = planner.steps(actions, planner.job.config)
    assert num_passes == [2]
    assert sizes_in(log.steps[0]) != sizes_in(log.steps[1])  # nothing could be fetched ahead in the first


def test_a_plan_that_live_bytes_rule_out_says_what_it_holds() -> None:
    planner = in_order()
    config = planner.job.config
    tight = config.replace(memory_budget_gb=0.02)
    actions = actions_of("some streamed", planner)
    planner.look_into_everything(planner.job.eligible.under(config))
    shown = planner.confirm(
        plan_as_it_is(planner.profile, resolve(tight, planner.hardware), actions, ""), planner.job.eligible.under(tight)
    )
    held = planner.held(actions, config)
    assert not shown.fits
    assert held is not None
    assert shown.predicted_reserved_bytes is not None
    assert held.reserved_bytes >= shown.predicted_reserved_bytes > shown.predicted_peak_bytes > shown.budget_bytes
