"""Layers that a plan written by hand should have left alone end in a sentence that names them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import simgpu  # noqa: F401  (registers the device)
from memscale import MemScaleError, OffloadError
from memscale._execute.executor import Executor
from memscale._execute.settings import ExecutionSettings
from memscale._plan import Action, Checkpoint, OffloadActivations, StreamParameters

SIZE = 8
DEVICE = torch.device("simgpu", 0)


class UsesTransform(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slope = torch.func.grad(lambda y: y.tanh().sum())(x.detach())
        return self.linear(x) * slope


class Freezes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.linear.bias.requires_grad_(False)
        return self.linear(x)


class Model(nn.Module):
    def __init__(self, block: type[nn.Module], *, sends_inputs: bool = False) -> None:
        super().__init__()
        self.block, self.head = block(), nn.Linear(SIZE, SIZE)
        self.sends_inputs = sends_inputs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.sends_inputs:
            x = x.to(self.block.linear.weight.device)  # as Qwen2AudioEncoder does
        return self.head(self.block(x))


def train(model: nn.Module) -> list[torch.Tensor | None]:
    x = torch.ones(2, SIZE, device=DEVICE)
    model(x).square().mean().backward()
    return [None if parameter.grad is None else parameter.grad.cpu() for parameter in model.parameters()]


def error_of(model: nn.Module, action: Action) -> MemScaleError:
    """What a step under this plan raises; after `detach()` it is taken, as by a plain model."""
    plain = copy.deepcopy(model).to(DEVICE)
    executor = Executor(model.to(DEVICE), ExecutionSettings(DEVICE))
    executor.attach([action])
    with pytest.raises(MemScaleError) as raised:
        train(model)
    executor.detach()
    assert all(a is b is None or torch.equal(a, b) for a, b in zip(train(model), train(plain), strict=True))
    return raised.value


@pytest.mark.parametrize("action", [Checkpoint("block"), OffloadActivations("block"), StreamParameters("block")])
def test_a_transform_inside_of_a_treated_layer(action: Action) -> None:
    error = error_of(Model(UsesTransform), action)
    assert "block uses a transform of torch.func" in str(error)
    assert isinstance(error.__cause__, RuntimeError)


def test_a_streamed_layer_that_freezes_its_parameters_in_its_forward() -> None:
    error = error_of(Model(Freezes), StreamParameters("block"))
    assert isinstance(error, OffloadError)
    assert "block freezes or unfreezes its parameters in its forward" in str(error)


def test_a_model_that_sends_inputs_to_where_a_streamed_layer_lives() -> None:
    error = error_of(Model(Freezes, sends_inputs=True), StreamParameters("block.linear"))
    assert isinstance(error, OffloadError)
    assert "block.linear computes on simgpu:0 and is given tensors on the CPU" in str(error)
