"""A recomputed module that changes in place what it has saved for backward is refused, not trained wrongly."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import simgpu  # noqa: F401  (registers the device)
from memscale import MemScaleError
from memscale._plan import Checkpoint, StreamParameters
from memscale.techniques.checkpointing import checkpointed_forward
from memscale.techniques.offload.parameters import streaming

SIZE = 8
DEVICE = torch.device("simgpu", 0)
REFUSAL = "changes a tensor in place that it has saved for backward"


class Scaled(nn.Module):
    """`relu_` saves its result, which is changed afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu_().mul_(1.5).add_(x)


class EndsBefore(nn.Module):
    """A checkpoint of its own, whose recompute ends before the change: plain PyTorch trains it. Then it goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled, self.last = Scaled(), nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(checkpoint(self.scaled, x.clone(), use_reentrant=False))


class ChangesLast(nn.Module):
    """The same with nothing that is saved after the change."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = Scaled()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.scaled, x.clone(), use_reentrant=False)


class Ordinary(nn.Module):
    """Changes in place, but nothing that is saved before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).add_(x).relu_())


class Model(nn.Module):
    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([build(), nn.Linear(SIZE, SIZE)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def pair(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = Model(build)
    return copy.deepcopy(model).to(DEVICE), model


def train(model: nn.Module, steps: int = 2) -> list[torch.Tensor]:
    x = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(1), device="cpu").to(DEVICE)
    for _ in range(steps):
        model(x).square().mean().backward()
    return [parameter.grad.cpu() for parameter in model.parameters()]


@contextlib.contextmanager
def streamed(model: nn.Module):
    with contextlib.ExitStack() as undo:
        streaming.attach([StreamParameters("blocks.0"), StreamParameters("blocks.1")], model, DEVICE, undo)
        yield


def test_a_checkpoint_inside_of_a_streamed_layer_may_have_ended_before_the_change() -> None:
    """The streamed layer is computed again as a whole, and was trained with another gradient."""
    plain, model = pair(EndsBefore)
    train(plain)
    with streamed(model):
        for _ in range(2):
            with pytest.raises(MemScaleError, match=f"blocks.0 {REFUSAL}"):
                train(model, 1)


@pytest.mark.parametrize("build", [ChangesLast, Ordinary])
def test_a_change_that_no_recompute_comes_to_or_that_changes_nothing_saved_is_trained_the_same(build) -> None:
    plain, model = pair(build)
    theirs = train(plain)
    with streamed(model):
        assert all(map(torch.equal, train(model), theirs))


def test_what_plain_backward_refuses_is_refused_where_it_is_checkpointed() -> None:
    plain, model = pair(lambda: nn.Sequential(Scaled(), nn.Linear(SIZE, SIZE)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        train(plain)
    model.to(DEVICE)
    with contextlib.ExitStack() as undo:
        checkpointed_forward.attach(Checkpoint("blocks.0"), model.blocks[0], undo)
        with pytest.raises(MemScaleError, match=REFUSAL):
            train(model)


def test_only_the_first_forward_is_watched_where_it_finds_nothing() -> None:
    _, model = pair(Ordinary)
    model.to(DEVICE)
    with contextlib.ExitStack() as undo:
        forward = checkpointed_forward.attach(Checkpoint("blocks.0"), model.blocks[0], undo)
        train(model)
        assert [*forward.changes_saved.values()] == [False]
        model.eval()
        train(model)
        assert [*forward.changes_saved.values()] == [False, False]
