"""Streamed layers that use `torch.utils.checkpoint` themselves."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memscale
from memscale._errors import MemScaleError
from memscale._plan import StreamParameters
from tests.techniques.offload.runs import DEVICE, MODES, gradients, let_autograd_finish, pair, same, streamed

SIZE = 16


@pytest.fixture(autouse=True)
def _clean(no_races, no_leaks) -> Iterator[None]:
    yield
    let_autograd_finish()


def contexts() -> tuple[Any, Any]:
    return contextlib.nullcontext(), contextlib.nullcontext()


class Block(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.inner = nn.Sequential(nn.LayerNorm(SIZE), nn.Linear(SIZE, SIZE), nn.Dropout(0.5))
        self.out = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self.inner, x, **self.options)
        return x + self.out(checkpoint(lambda z: torch.tanh(self.out(z)), y, **self.options))


def build(**options: Any) -> nn.Module:
    return nn.Sequential(*(Block(**options) for _ in range(3)))


def inputs() -> torch.Tensor:
    return torch.linspace(-1, 1, 4 * SIZE).view(4, SIZE).to(DEVICE).requires_grad_()


@MODES
def test_gradients_are_the_plain_ones(asynchronous: bool):
    plain, model = pair(lambda: build(use_reentrant=False))
    with streamed(model, asynchronous) as streamer:
        for step in range(2):
            for one in (model, plain):
                torch.manual_seed(step)
                one(inputs()).square().mean().backward()
        assert streamer.stats.num_visits > 0
        assert same(gradients(model), gradients(plain))


@pytest.mark.parametrize("options", [{"use_reentrant": True}, {"use_reentrant": False, "context_fn": contexts}])
def test_what_would_not_be_the_same_is_refused(options: dict[str, Any]):
    _, model = pair(lambda: build(**options))
    with streamed(model):
        with pytest.raises(MemScaleError, match=r"0 calls torch.utils.checkpoint with .* leave this layer out"):
            model(inputs())
        assert all(parameter.is_leaf for parameter in model.parameters())


class EndsInside(nn.Module):
    """The last that its backward needs is computed inside of its own checkpoint: its recompute ends in there, early."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(inplace=True), nn.Dropout(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


@MODES
def test_a_recompute_may_end_inside_of_the_layers_own_checkpoint(asynchronous: bool):
    plain, model = pair(lambda: nn.Sequential(*(EndsInside() for _ in range(3))))
    with streamed(model, asynchronous):
        for one in (model, plain):
            torch.manual_seed(0)
            one(inputs()).square().sum().backward()
        assert same(gradients(model), gradients(plain))


class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(SIZE, SIZE)

    def fail(self, x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError(f"{tuple(self.inner(x).shape)} is what was computed")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.fail, x, use_reentrant=False)


def test_an_error_inside_of_the_layers_own_checkpoint_reaches_the_caller():
    _, model = pair(lambda: nn.Sequential(*(Raises() for _ in range(3))))
    with streamed(model), pytest.raises(ArithmeticError, match="is what was computed"):
        model(inputs())


def test_nothing_is_refused_where_nothing_is_computed_again():
    plain, model = pair(lambda: build(use_reentrant=False, context_fn=contexts))
    with streamed(model), torch.no_grad():
        assert torch.equal(model.eval()(inputs()), plain.eval()(inputs()))


def test_wrap_streams_them_or_says_why_not(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "memscale"):
        for reentrant in (False, True):
            assert streams_when_wrapped(reentrant) != reentrant
            assert ("does not run on this model" in caplog.text) == reentrant
    assert "0 calls torch.utils.checkpoint with use_reentrant=True in its own forward" in caplog.text
    caplog.clear()  # a record holds an error, the error its frames, and these tensors
    gc.collect()


def streams_when_wrapped(reentrant: bool) -> bool:
    _, model = pair(lambda: build(use_reentrant=reentrant))
    model.to(DEVICE)
    memscale.wrap(model, memscale.Config(force_optimize=True), inputs())
    actions = model._memscale_executor.plan.actions
    model(inputs()).square().mean().backward()
    memscale.detach(model)
    return any(isinstance(action, StreamParameters) for action in actions)
