"""Optimizers and state that nobody planned for: two wrapped models, strides and shapes of a user's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from memscale._execute.executor import Executor, execute
from memscale._execute.settings import ExecutionSettings
from memscale._plan import OffloadOptimizer, StepInBuckets, StreamParameters
from memscale.techniques.offload.optimizer.on_device import StepOnDevice
from tests.parity import plan_of
from tests.techniques.offload.runs import DEVICE
from tests.techniques.offload.tiers import on_host, same

SOME, ALL = [StreamParameters("1")], [StreamParameters(str(index)) for index in range(3)]
GUESTS = [StreamParameters("1"), StepOnDevice(5_000), StepInBuckets(5_000)]
PLANS = {"some streamed": SOME, "all streamed": ALL, "guests": GUESTS, "state away": [OffloadOptimizer(5_000)]}


@pytest.fixture(autouse=True)
def _device(simgpu_device, no_leaks):
    """Registers the device; every test must give its device and pinned bytes back."""


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))).to(DEVICE)


def attached(model: nn.Module, actions: Sequence[Any]) -> Executor:
    settings = ExecutionSettings(asynchronous=True, device=DEVICE)
    return execute(model, plan_of(list(actions), device_type=DEVICE.type), settings)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.linspace(-1, 1, 32).reshape(2, 16).to(DEVICE)).square().mean().backward()
    optimizer.step()


def outcome(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    state = optimizer.state_dict()
    return on_host([dict(model.state_dict()), state]), list(state["state"])


@pytest.mark.parametrize("name", PLANS)
def test_two_models_with_an_optimizer_each_are_stepped_once(name: str) -> None:
    """Every model with streamed parameters watches all optimizers that hold any."""
    plain = [net(seed) for seed in range(2)]
    expected = [torch.optim.AdamW(model.parameters(), 1e-2) for model in plain]
    wrapped = [net(seed) for seed in range(2)]
    executors = [attached(model, PLANS[name]) for model in wrapped]
    ours = [torch.optim.AdamW(model.parameters(), 1e-2) for model in wrapped]
    for models, optimizers in ((plain, expected), (wrapped, ours)):
        for _ in range(3):
            for model, optimizer in zip(models, optimizers, strict=True):
                step(model, optimizer)
    for index in range(2):
        assert same(outcome(wrapped[index], ours[index]), outcome(plain[index], expected[index]))
    for executor in executors:
        executor.detach()


@pytest.mark.parametrize("name", ["guests", "state away"])
def test_one_optimizer_over_two_models_is_stepped_by_one_plan(name: str) -> None:
    def train(models: list[nn.Sequential], optimizer: torch.optim.Optimizer) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            for model in models:
                model(torch.linspace(-1, 1, 32).reshape(2, 16).to(DEVICE)).square().mean().backward()
            optimizer.step()

    plain, wrapped = ([net(seed) for seed in range(2)] for _ in range(2))
    expected = torch.optim.AdamW([p for model in plain for p in model.parameters()], 1e-2)
    train(plain, expected)
    executors = [attached(model, PLANS[name]) for model in wrapped]
    ours = torch.optim.AdamW([p for model in wrapped for p in model.parameters()], 1e-2)
    with pytest.warns(UserWarning, match="steps parameters of another wrapped model, too"):
        train(wrapped, ours)
    assert same(outcome(nn.ModuleList(wrapped), ours), outcome(nn.ModuleList(plain), expected))
    for executor in reversed(executors):
        executor.detach()


def contiguous(values: dict[str, Any]) -> None:
    """What a checkpoint of another format gives."""
    values.update({name: value.contiguous() for name, value in values.items()})


def counter_of_one(values: dict[str, Any]) -> None:
    values["step"] = values["step"].reshape(1)


def stranger(values: dict[str, Any]) -> None:
    values["note"] = torch.arange(5.0)


@pytest.mark.parametrize("change", [contiguous, counter_of_one, stranger])
def test_state_that_cannot_be_cut_is_stepped_whole(change: Callable[[dict[str, Any]], None]) -> None:
    def train(actions: Sequence[Any]) -> Any:
        torch.manual_seed(0)
        model = nn.Conv2d(16, 32, 3).to(memory_format=torch.channels_last).to(DEVICE)
        executor = attached(model, actions) if actions else None
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for number in range(4):
            if number == 1:
                state = optimizer.state_dict()
                for values in state["state"].values():
                    change(values)
                optimizer.load_state_dict(state)
            optimizer.zero_grad()
            inputs = torch.linspace(-1, 1, 2048).sin().reshape(2, 16, 8, 8).to(DEVICE)
            model(inputs).square().mean().backward()
            optimizer.step()
        found = outcome(model, optimizer)
        if executor is not None:
            executor.detach()
        return found

    assert same(train([OffloadOptimizer(5_000)]), train([]))


def test_state_stands_in_the_order_of_a_plain_step_where_some_is_streamed() -> None:
    plain, wrapped = net(), net()
    expected = torch.optim.AdamW(plain.parameters(), 1e-2)
    step(plain, expected)
    executor = attached(wrapped, SOME)
    ours = torch.optim.AdamW(wrapped.parameters(), 1e-2)
    step(wrapped, ours)
    assert list(ours.state_dict()["state"]) == list(expected.state_dict()["state"]) == [0, 1, 2, 3, 4, 5]
    executor.detach()
