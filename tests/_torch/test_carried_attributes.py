"""What parameters carry (`weight.scale = ...`): treated layers read and change it as plain ones do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import simgpu  # noqa: F401  (registers the device)
from memscale._config import AsyncOffloadConfig
from memscale._execute.executor import Executor
from memscale._execute.settings import ExecutionSettings
from memscale._plan import Action, Checkpoint, OffloadActivations, StreamParameters
from memscale._torch.carried_attributes import lend_attributes, return_attributes
from memscale.techniques.offload.optimizer.on_device import StepOnDevice

SIZE = 8
DEVICE = torch.device("simgpu", 0)
PLANS: dict[str, Callable[[str], Action]] = {
    "checkpoint": Checkpoint,
    "selective": lambda fqn: Checkpoint(fqn, keep=("matmul", "attention")),
    "offload": OffloadActivations,
    "stream": StreamParameters,
    "stream and step": StreamParameters,
}
Use = Callable[[Any, torch.Tensor], torch.Tensor]


def count(weight: Any, x: torch.Tensor) -> torch.Tensor:
    weight.count += 1
    return x * weight.count


def once(weight: Any, x: torch.Tensor) -> torch.Tensor:
    """There is nothing on the parameter when its first forward begins."""
    if hasattr(weight, "is_made"):
        return x
    weight.is_made = True
    return x * 2


def take_off(weight: Any, x: torch.Tensor) -> torch.Tensor:
    if not hasattr(weight, "scale"):
        return x
    x = x * weight.scale
    del weight.scale
    return x


def cache(weight: Any, x: torch.Tensor) -> torch.Tensor:
    if getattr(weight, "version", None) != weight._version:
        weight.version, weight.mean = weight._version, weight.detach().abs().mean()
    return x * weight.mean


def average(weight: Any, x: torch.Tensor) -> torch.Tensor:
    weight.average.mul_(0.9).add_(weight.detach(), alpha=0.1)
    return x @ weight.average.clone()


def average_silently(weight: Any, x: torch.Tensor) -> torch.Tensor:
    weight.average.data.mul_(0.9).add_(weight.detach(), alpha=0.1)
    return x @ weight.average


def number(weight: Any, x: torch.Tensor) -> torch.Tensor:
    return x * (1 + weight._version / 8)


USES: tuple[Use, ...] = (count, once, take_off, cache, average, average_silently)


class Block(nn.Module):
    def __init__(self, use: Use) -> None:
        super().__init__()
        self.up, self.down, self.use = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE), use
        weight: Any = self.up.weight
        weight.count, weight.scale, weight.average = 0, 3.0, torch.zeros(SIZE, SIZE, device=DEVICE)
        if use is once:
            vars(weight).clear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.use(self.up.weight, torch.tanh(self.up(x))))


def chain(use: Use) -> nn.Sequential:
    """Each model is made by itself: copies of a parameter leave its attributes behind."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIZE, SIZE), Block(use), Block(use)).to(DEVICE)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def trained(model: nn.Module, make: Callable[[Any], torch.optim.Optimizer] = sgd) -> list[torch.Tensor]:
    """Gradients of each step; the second has two forwards."""
    optimizer, draws, found = make(model.parameters()), torch.Generator().manual_seed(1), []
    for number in range(3):
        optimizer.zero_grad()
        for _ in range(1 + number % 2):
            model(torch.randn(4, SIZE, generator=draws).to(DEVICE)).square().mean().backward()
        found += [parameter.grad.to("cpu", copy=True) for parameter in model.parameters()]
        optimizer.step()
    return found


def carried(model: nn.Module) -> list[tuple[str, float]]:
    found = [item for parameter in model.parameters() for item in sorted(vars(parameter).items())]
    return [(name, float(value.sum() if isinstance(value, torch.Tensor) else value)) for name, value in found]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("use", USES)
def test_gradients_and_what_is_carried_are_those_of_plain_training(use: Use, plan: str) -> None:
    plain, model = chain(use), chain(use)
    settings = ExecutionSettings(DEVICE, asynchronous=False, async_config=AsyncOffloadConfig(min_tensor_bytes=0))
    executor = Executor(model, settings=settings)
    more = [StepOnDevice(600)] if plan == "stream and step" else []
    executor.attach([*map(PLANS[plan], ("1", "2")), *more])
    try:
        ours, theirs = trained(model), trained(plain)
    finally:
        executor.detach()
    assert all(map(torch.equal, ours, theirs))
    assert carried(model) == carried(plain)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": sgd,
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.05, fused=True),
}


@pytest.mark.parametrize("bucket_bytes", [600, 100])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_versions_are_those_of_plain_training(name: str, bucket_bytes: int) -> None:
    """Foreach steps raise them by one an operator, fused ones do not; a weight of 256 bytes comes in stretches."""
    plain, model = chain(number), chain(number)
    executor = Executor(model, settings=ExecutionSettings(DEVICE, asynchronous=False))
    executor.attach([StreamParameters("1"), StreamParameters("2"), StepOnDevice(bucket_bytes)])
    try:
        ours, theirs = trained(model, OPTIMIZERS[name]), trained(plain, OPTIMIZERS[name])
        assert all(map(torch.equal, ours, theirs))
        assert [p._version for p in model.parameters()] == [p._version for p in plain.parameters()]
    finally:
        executor.detach()


def test_what_others_put_on_the_parameter_meanwhile_stays() -> None:
    parameter, stand_in = nn.Parameter(torch.zeros(1)), torch.zeros(1)
    parameter.kept = parameter.changed = parameter.gone = 1  # type: ignore[attr-defined]
    lent = lend_attributes(parameter, stand_in)
    assert lent is not None
    parameter.kept = 2  # type: ignore[attr-defined]
    stand_in.changed = stand_in.new = 3  # type: ignore[attr-defined]
    del stand_in.gone  # type: ignore[attr-defined]
    return_attributes(parameter, stand_in, lent)
    assert vars(parameter) == {"kept": 2, "changed": 3, "new": 3}
