"""A model that the executor has placed on its device: it stays there from plan to plan, and goes back at last."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from memscale import PlanError
from memscale._execute.executor import Executor, execute
from memscale._execute.settings import ExecutionSettings
from memscale._plan import Action, Checkpoint, OffloadOptimizer, Plan, StreamParameters
from tests.models import Mlp, square_loss
from tests.parity import plan_of

pytestmark = pytest.mark.unit

DEVICE = "simgpu"
Places = dict[str, tuple[int, int]]


def without_chance() -> Mlp:
    model = Mlp()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # the device draws other numbers than the twin
    return model


def plan_with(*actions: Action) -> Plan:
    return plan_of(actions, device_type=DEVICE)


def placed(model: nn.Module, overlaps: bool) -> Executor:
    settings = ExecutionSettings(device=torch.device(DEVICE), asynchronous=overlaps)
    return execute(model, plan_with(), settings)


def places(model: nn.Module, without: str = "nothing") -> Places:
    """Where weights and their gradients lie."""
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        if not name.startswith(without):
            found[name] = parameter.data_ptr(), parameter.grad.data_ptr()
    return found


def pass_through(model: nn.Module, twin: nn.Module, number: int) -> None:
    batch = torch.randn(4, 64, generator=torch.Generator().manual_seed(number))
    square_loss(twin(batch)).backward()
    square_loss(model(batch.to(DEVICE))).backward()


def assert_same(model: nn.Module, twin: nn.Module) -> None:
    for mine, plain in zip(model.parameters(), twin.parameters(), strict=True):
        assert mine.device.type == "cpu"
        assert torch.equal(mine, plain)
        assert mine.grad is not None
        assert plain.grad is not None
        assert torch.equal(mine.grad, plain.grad)


@pytest.mark.parametrize("overlaps", [False, True])
def test_plans_that_follow_one_another_leave_it_where_it_is(overlaps: bool, simgpu_device: Any, no_races: Any) -> None:
    model = without_chance()
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(each.parameters()) for each in (model, twin)]
    executor = placed(model, overlaps)
    pass_through(model, twin, 0)
    before = places(model)
    executor.apply(plan_with(Checkpoint("blocks.1")))
    assert places(model) == before
    pass_through(model, twin, 1)
    before = places(model, without="blocks.0")
    executor.apply(plan_with(StreamParameters("blocks.0")))
    assert places(model, without="blocks.0") == before
    assert {parameter.device.type for parameter in model.blocks[0].parameters()} == {"cpu"}
    pass_through(model, twin, 2)
    for optimizer in optimizers:
        optimizer.step()
    pass_through(model, twin, 3)
    executor.detach()
    assert_same(model, twin)


@pytest.mark.parametrize("last", [(), (Checkpoint("blocks.0"),), (StreamParameters("blocks.1"),)])
def test_streamed_parameters_do_not_visit_the_device_on_their_way_back(
    last: tuple[Action, ...], simgpu_device: Any, no_races: Any
) -> None:
    model = without_chance()
    twin = copy.deepcopy(model)
    executor = placed(model, overlaps=False)
    pass_through(model, twin, 0)
    executor.apply(plan_with(StreamParameters("blocks.0")))
    pass_through(model, twin, 1)
    executor.apply(plan_with(*last))
    pass_through(model, twin, 2)
    torch.accelerator.reset_peak_memory_stats()
    held_bytes = torch.accelerator.memory_allocated()
    executor.detach()
    assert torch.accelerator.max_memory_allocated() == held_bytes, "nothing was brought to the device"
    assert_same(model, twin)


def test_a_plan_that_cannot_be_attached_brings_it_back(simgpu_device: Any) -> None:
    model = without_chance()
    executor = placed(model, overlaps=False)
    assert {parameter.device.type for parameter in model.parameters()} == {DEVICE}
    with pytest.raises(PlanError):
        executor.apply(plan_with(StreamParameters("blocks.0"), Checkpoint("nowhere")))
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    executor.apply(plan_with())
    assert {parameter.device.type for parameter in model.parameters()} == {DEVICE}
    executor.detach()
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}


def test_state_of_the_optimizer_goes_with_it(simgpu_device: Any, no_races: Any) -> None:
    """State that waited under one plan is given back under the next, and all of it comes to the host at last."""
    model = without_chance()
    twin = copy.deepcopy(model)
    mine, plain = (torch.optim.AdamW(each.parameters()) for each in (model, twin))
    executor = placed(model, overlaps=False)
    for number, actions in enumerate([(), (OffloadOptimizer(1 << 24),), (StreamParameters("blocks.0"),), ()]):
        executor.apply(plan_with(*actions))
        pass_through(model, twin, number)
        for optimizer in (mine, plain):
            optimizer.step()
            optimizer.zero_grad()
    pass_through(model, twin, 9)
    executor.detach()
    assert_same(model, twin)
    tensors = [value for state in mine.state.values() for value in state.values()]
    assert {value.device.type for value in tensors} == {"cpu"}
    for first, second in zip(mine.state.values(), plain.state.values(), strict=True):
        assert all(torch.equal(first[name], second[name]) for name in second)
