"""An optimizer's step as a plan takes it: what it allocates, held against what the optimizer's costs say."""

from __future__ import annotations

import pathlib
import traceback
from typing import Any

import pytest
import torch
from torch import nn

from memscale import AsyncOffloadConfig, Config, Hardware
from memscale._plan import StreamParameters
from memscale._planning.job import Job
from memscale._planning.optimizer_trials import OptimizerCosts
from memscale._planning.planner import Planner
from memscale._planning.reserved import bucket_steps
from memscale._planning.reserved.allocation_log import Allocated, AllocationLog, Freed
from memscale._planning.reserved.allocations import reserved_of
from memscale._planning.reserved.recording import Shortcuts, UnderPlan, record_steps
from memscale._profile.device_kernels import GpuKernels
from memscale._profile.inputs import Inputs
from memscale._profile.rehearsal import FakeRehearsal
from memscale.techniques.offload.optimizer.on_device import StepOnDevice
from memscale.techniques.technique import PlannedStep
from tests.models import features, small

MIB = 1 << 20


def costs_of(model: nn.Module, *, overlaps: bool) -> OptimizerCosts:
    config = Config(async_offload=overlaps, enable_logging=False)
    return OptimizerCosts(Job(model, config, Hardware.from_name("RTX 3090"), "adamw"))


def log_of(
    model: nn.Module, costs: OptimizerCosts, *, moves: bool, eight_bit: bool = False, **how: Any
) -> AllocationLog:
    rules = costs.rules(PlannedStep(moves=moves, packs=eight_bit, **how), window_bytes=64 * MIB)
    rehearsal = FakeRehearsal(model, Inputs((features(0),), {}), "cuda")
    return record_steps(rehearsal, model, "adamw", under=UnderPlan(rules=rules))


def bytes_after(log: AllocationLog, num_steps: int) -> int:
    live: dict[int, int] = {}
    for events in (log.before, *log.steps[:num_steps]):
        for event in events:
            if isinstance(event, Allocated):
                live[event.serial] = event.num_bytes
            elif isinstance(event, Freed):
                live.pop(event.serial, None)
    return sum(-(-num_bytes // 512) * 512 for num_bytes in live.values())


@pytest.mark.parametrize("overlaps", [False, True])
def test_what_waits_elsewhere_is_gone_after_a_step(overlaps: bool) -> None:
    model = small()
    costs = costs_of(model, overlaps=overlaps)
    log = log_of(model, costs, moves=True)
    assert bytes_after(log, 1) - bytes_after(log, 0) == costs.cost().offloaded_state_bytes
    assert bytes_after(log, 2) == bytes_after(log, 1)


class _Learning:
    """Something that is attached, and has learnt something whenever it is asked."""

    def __init__(self, model: nn.Module) -> None:
        self._num_asked = 0

    def learnt(self) -> list[int]:
        self._num_asked += 1
        return [self._num_asked]

    def detach(self) -> None:
        """Nothing is there to be taken off."""


@pytest.mark.parametrize("learns", [False, True])
def test_the_first_step_makes_the_state(learns: bool) -> None:
    """Also where the second may differ, and is recorded for itself."""
    model = small()
    rehearsal, attach = FakeRehearsal(model, Inputs((features(0),), {}), "cuda"), _Learning if learns else None
    log = record_steps(rehearsal, model, "adamw", under=UnderPlan(learns=learns, attach=attach))
    first, second = ({event.serial for event in step if isinstance(event, Allocated)} for step in log.steps)
    assert bytes_after(log, 0) < bytes_after(log, 1) == bytes_after(log, 2)
    assert len(second) < len(first)
    assert learns == first.isdisjoint(second)


def test_a_step_inside_of_autocast_is_the_same_each_time() -> None:
    """Weights that were cast for a forward are let go behind it, as a loop does that leaves autocast for backward."""
    model = small()
    rehearsal = FakeRehearsal(model, Inputs((features(0),), {}), "cuda")
    with torch.autocast("cpu", torch.bfloat16):
        traces = [rehearsal.run() for _ in range(2)]
        logs = [record_steps(rehearsal, model, "adamw", num_steps=1) for _ in range(2)]
        assert torch.is_autocast_enabled("cpu")
    assert traces[0] == traces[1]
    assert logs[0].steps == logs[1].steps
    assert bytes_after(logs[0], 1) == bytes_after(record_steps(rehearsal, model, "adamw", num_steps=1), 1)


@pytest.mark.parametrize("overlaps", [False, True])
def test_the_peak_is_what_the_costs_say(overlaps: bool) -> None:
    """Of the optimizer alone: the model of costs and the recording go through the same buckets."""
    model = small()
    costs = costs_of(model, overlaps=overlaps)
    log = log_of(model, costs, moves=True)
    found = costs.cost()
    assert found.offloaded_step_bytes is not None
    gradients = sum(-(-p.nbytes // 512) * 512 for p in model.parameters())
    expected = bytes_after(log, 0) + found.offloaded_state_bytes + gradients + found.offloaded_step_bytes
    assert reserved_of(log, workspace_bytes=0).requested_peak_bytes <= expected


def test_in_8_bits_less_stays() -> None:
    model = nn.Sequential(nn.Linear(features(0).shape[-1], 256), nn.Linear(256, 256))
    costs = costs_of(model, overlaps=False)
    packed, whole = (log_of(model, costs, moves=False, eight_bit=eight_bit) for eight_bit in (True, False))
    assert bytes_after(packed, 2) < bytes_after(whole, 2)


def deep() -> nn.Sequential:
    """Several buckets of 16 MiB of parameters."""
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(features(0).shape[-1], 2048), *(nn.Linear(2048, 2048) for _ in range(4)))


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_share_of_the_state_stays(overlaps: bool) -> None:
    model = deep()
    costs = costs_of(model, overlaps=overlaps)
    share = costs.cost().share(0.5)
    log = log_of(model, costs, moves=True, resident_share=0.5)
    stays = bytes_after(log, 1) - bytes_after(log, 0)
    assert costs.cost().offloaded_state_bytes < stays < costs.cost().state_bytes
    assert stays == share.state_bytes
    assert bytes_after(log, 2) == bytes_after(log, 1)


def test_a_step_in_buckets_takes_less_and_keeps_its_state() -> None:
    model = deep()
    costs = costs_of(model, overlaps=False)
    in_buckets, whole = (log_of(model, costs, moves=False, in_buckets=is_cut) for is_cut in (True, False))
    assert bytes_after(in_buckets, 2) == bytes_after(whole, 2)
    peaks = [reserved_of(log, workspace_bytes=0).requested_peak_bytes for log in (in_buckets, whole)]
    assert peaks[0] < peaks[1]


def test_a_plan_that_leaves_the_optimizer_alone_has_no_rules() -> None:
    costs = costs_of(small(), overlaps=False)
    assert costs.rules(PlannedStep(), window_bytes=64 * MIB) is None


@pytest.mark.parametrize(("window_bytes", "still_there"), [(1 << 20, False), (64 * MIB, True)])
def test_guests_that_exceed_the_window_are_gone_when_their_state_is_laid_out(
    window_bytes: int, still_there: bool
) -> None:
    """The executor waits for what the window cannot hold, and its memory is free for the state."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(2)))
    config = Config(
        async_offload=True, async_config=AsyncOffloadConfig(window_bytes=window_bytes), enable_logging=False
    )
    planner = Planner(
        Job(model, config, Hardware.from_name("RTX 3090"), "adamw"),
        Inputs((torch.empty(8, 1024, device="meta"),), {}),
    )
    log = planner.steps((StreamParameters("0"), StreamParameters("1"), StepOnDevice(1 << 24)), config)
    live = dict[int, Allocated]()
    for event in log.steps[0]:
        if isinstance(event, Freed):
            live.pop(event.serial, None)
        elif isinstance(event, Allocated) and event.place is not None and event.place.phase == "optimizer":
            if event.place.operator == "aten.empty.memory_format" and event.num_bytes > MIB:
                break
            live[event.serial] = event
    large = [each for each in live.values() if each.num_bytes == 4 * MIB and each.place is not None]
    guests = [each for each in large if each.place.operator == "aten.empty_like.default"]  # type: ignore[union-attr]
    assert bool(guests) == still_there


def test_a_step_that_another_log_recorded_goes_on_in_this_one() -> None:
    """The first step is told again with the counters of the other log, and the second is recorded over them."""
    model = deep()
    rules = costs_of(model, overlaps=False).rules(PlannedStep(moves=True), window_bytes=64 * MIB)
    rehearsal = FakeRehearsal(model, Inputs((features(0),), {}), "cuda")
    known: dict[Any, Any] = {}
    under, shortcuts = UnderPlan(rules=rules), Shortcuts(known=known)
    record_steps(rehearsal, model, "adamw", under=under, num_steps=1, shortcuts=shortcuts)
    assert known
    again = record_steps(rehearsal, model, "adamw", under=under, num_steps=2, shortcuts=shortcuts)
    alone = record_steps(rehearsal, model, "adamw", under=under, num_steps=2)
    assert [bytes_after(again, number) for number in range(3)] == [bytes_after(alone, number) for number in range(3)]
    assert reserved_of(again) == reserved_of(alone)


def test_buckets_are_made_without_the_functions_that_a_stage_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    through = GpuKernels.__torch_function__

    def noted(mode: GpuKernels, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        files = {pathlib.Path(frame.filename).name for frame in traceback.extract_stack(limit=8)}
        asked.extend(files & {bucket_steps.__name__.rpartition(".")[2] + ".py", "same_optimizer.py"})
        return through(mode, func, types, args, kwargs)

    monkeypatch.setattr(GpuKernels, "__torch_function__", noted)
    model = small()
    assert log_of(model, costs_of(model, overlaps=True), moves=True).steps
    assert not asked
