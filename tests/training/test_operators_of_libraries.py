"""Operators that a library has written in others, as bitsandbytes has its product with 4-bit weights, under autocast.

PyTorch switches autocast off for what a dispatch mode calls. Inside of such an operator casts were left out whenever
somebody watched: in observed steps, in `memscale.measure()`, and where a selective checkpoint keeps outputs.
"""

from __future__ import annotations

import copy
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from memscale._config import AsyncOffloadConfig
from memscale._execute.executor import execute
from memscale._execute.settings import ExecutionSettings
from memscale._plan import Action, Checkpoint, OffloadActivations
from memscale.techniques.offload.kept_outputs import OffloadKept
from tests.models import WIDTH
from tests.parity import plan_of

pytestmark = pytest.mark.unit
LAYERS = ("0", "1", "2")
FORCED = memscale.Config(mode="conservative", force_optimize=True, enable_logging=False, use_static_profiling=False)


@torch.library.custom_op("memscale_tests::product_of_attention", mutates_args=())
def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Autocast casts what it is written in, and not the operator itself. Its name is one that may be kept."""
    return nn.functional.linear(x, weight).float().clone()


@product.register_fake
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=torch.float32)


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, -2).T @ x.flatten(0, -2)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(Product.apply(x, self.weight))  # type: ignore[no-untyped-call]


def train(model: nn.Module, *, enabled: bool = True) -> list[torch.Tensor]:
    """Losses and weights of three steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


def measured(model: nn.Module, directory: pathlib.Path, *, enabled: bool) -> list[torch.Tensor]:
    with memscale.measure():
        return train(model, enabled=enabled)


def observed(model: nn.Module, directory: pathlib.Path, *, enabled: bool) -> list[torch.Tensor]:
    model = memscale.wrap(model, FORCED)
    trained = train(model, enabled=enabled)
    executor = memscale.executor_of(model)
    assert executor is not None
    assert executor.plan.profile_source == "empirical"
    memscale.detach(model)
    return trained


def _under(actions: list[Action], model: nn.Module, directory: pathlib.Path, enabled: bool) -> list[torch.Tensor]:
    settings = ExecutionSettings(offload_dir=str(directory), async_config=AsyncOffloadConfig(min_tensor_bytes=1))
    executor = execute(model, plan_of(actions), settings)
    trained = train(model, enabled=enabled)
    executor.detach()
    return trained


def kept(model: nn.Module, directory: pathlib.Path, *, enabled: bool) -> list[torch.Tensor]:
    actions: list[Action] = [Checkpoint(fqn, keep=("matmul", "attention")) for fqn in LAYERS]
    return _under(actions, model, directory, enabled)


def recomputed(model: nn.Module, directory: pathlib.Path, *, enabled: bool) -> list[torch.Tensor]:
    """Selective checkpoints that keep another kind of operator."""
    return _under([Checkpoint(fqn, keep=("matmul",)) for fqn in LAYERS], model, directory, enabled)


def kept_elsewhere(model: nn.Module, directory: pathlib.Path, *, enabled: bool) -> list[torch.Tensor]:
    kinds: tuple[Any, ...] = (lambda fqn: Checkpoint(fqn, keep=("attention",)), OffloadActivations, OffloadKept)
    return _under([kind(fqn) for fqn in LAYERS for kind in kinds], model, directory, enabled)


@pytest.mark.parametrize("enabled", [True, False], ids=["cast", "as they are"])
@pytest.mark.parametrize("way", [measured, observed, kept, recomputed, kept_elsewhere])
def test_watched_steps_compute_what_plain_ones_do(
    way: Callable[..., Any], enabled: bool, tmp_path: pathlib.Path
) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(Layer() for _ in LAYERS))
    model = copy.deepcopy(plain)
    for ours, theirs in zip(way(model, tmp_path, enabled=enabled), train(plain, enabled=enabled), strict=True):
        assert torch.equal(ours, theirs)


def test_casts_change_what_is_compared() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in LAYERS))
    cast, as_they_are = train(copy.deepcopy(model)), train(model, enabled=False)
    assert not torch.equal(cast[0], as_they_are[0])
