"""Weights under `parametrize.cached()`: a recompute takes them as its forward did, wherever backward runs."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import simgpu  # noqa: F401  (registers the device)
from memscale._execute.executor import Executor
from memscale._execute.settings import ExecutionSettings
from memscale._plan import Action, Checkpoint, StreamParameters

SIZE = 8
"""Of batches, too: what is saved for the weight alone has then the shape of what is saved for its use."""
DEVICE = torch.device("simgpu", 0)
PLANS: dict[str, Callable[[str], Action]] = {
    "checkpoint": Checkpoint,
    "selective": lambda fqn: Checkpoint(fqn, keep=("matmul", "attention")),
    "stream": StreamParameters,
}
Losses = Callable[[], torch.Tensor]


class Exp(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.exp() / SIZE


def block() -> nn.Module:
    linear = nn.Linear(SIZE, SIZE, bias=False)
    parametrize.register_parametrization(linear, "weight", Exp())
    return nn.Sequential(linear, nn.Tanh())


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(SIZE, SIZE), block(), block()).to(DEVICE)


def backward_inside(model: nn.Module, losses: Losses) -> None:
    with parametrize.cached():
        losses().backward()


def backward_outside(model: nn.Module, losses: Losses) -> None:
    with parametrize.cached():
        total = losses()
    total.backward()


def forward_outside(model: nn.Module, losses: Losses) -> None:
    total = losses()
    with parametrize.cached():
        [part.weight for part in model.modules() if parametrize.is_parametrized(part)]
        total.backward()


def graph_kept(model: nn.Module, losses: Losses) -> None:
    with parametrize.cached():
        losses().backward(retain_graph=True)
        losses().backward()


LOOPS = (backward_inside, backward_outside, forward_outside, graph_kept)


def gradients(model: nn.Module, loop: Callable[[nn.Module, Losses], None]) -> list[torch.Tensor]:
    """The first step has one forward, the second two."""
    draws, found = torch.Generator().manual_seed(1), []

    def loss(num_forwards: int) -> torch.Tensor:
        batches = torch.randn(num_forwards, SIZE, SIZE, generator=draws).to(DEVICE)
        return torch.stack([model(batch).square().mean() for batch in batches]).sum()

    for num_forwards in (1, 2):
        loop(model, functools.partial(loss, num_forwards))
        found += [parameter.grad.to("cpu", copy=True) for parameter in model.parameters()]
    return found


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("loop", LOOPS)
def test_gradients_are_those_of_plain_training(loop: Callable[[nn.Module, Losses], None], plan: str) -> None:
    plain, model = chain(), chain()
    executor = Executor(model, settings=ExecutionSettings(DEVICE, asynchronous=False))
    executor.attach([*map(PLANS[plan], ("1", "2"))])
    try:
        ours, theirs = gradients(model, loop), gradients(plain, loop)
    finally:
        executor.detach()
    assert all(map(torch.equal, ours, theirs))
    assert parametrize._cache == {}
