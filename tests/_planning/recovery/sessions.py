"""A training program that is run three ways: as it is, and with a failing forward or backward in one of its steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import memscale
import simgpu
from tests.parity import seed
from tests.techniques.offload.runs import DEVICE

NUM_STEPS = 4
CONFIG = memscale.Config(enable_logging=False, mode="conservative", recover_from_oom="plain")
"""Models of plain code alone."""
BY_DEFAULT = memscale.Config(enable_logging=False, mode="conservative")
"""Of these, failing forwards alone."""

OBSERVED: Any = object()
"""The sample of a model that does not run on fake tensors: it is planned from its first steps."""


class Session:
    """Hands a program its inputs, and lets one allocation of one of its steps fail."""

    def __init__(
        self, fails_in: str | None, number: int, config: memscale.Config = CONFIG, failing_step: int = NUM_STEPS - 1
    ) -> None:
        self.fails_in, self.number, self.config, self.failing_step = fails_in, number, config, failing_step
        self.fired = False
        self.models: list[nn.Module] = []
        self.before: list[torch.Tensor] = []
        """The weights before the step that fails."""
        seed(1)

    def wrap(self, model: nn.Module, *, sample: Any = None) -> Any:
        model = model.to(DEVICE)
        self.models.append(model)
        if self.fails_in is not None:
            given = self.x(0) if sample is None else sample
            memscale.wrap(model, self.config, None if given is OBSERVED else given)
        return model

    def x(self, step: int) -> torch.Tensor:
        torch.manual_seed(10 + step)
        return (torch.randn(8, 16) + step).to(DEVICE)

    def weights(self) -> list[torch.Tensor]:
        return [value.detach().cpu().clone() for model in self.models for value in model.parameters()]

    def forward(self, step: int, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if step == self.failing_step and not self.before:
            self.before = self.weights()
        with self._failing("forward", step):
            return call(*args, **kwargs)

    def backward(self, step: int, loss: torch.Tensor, **options: Any) -> None:
        with self._failing("backward", step):
            loss.backward(**options)

    def train(self, model: nn.Module, *, optimizer: Any = None, **kwargs: Any) -> list[Any]:
        """The plainest loop."""
        losses = []
        for step in range(NUM_STEPS):
            loss = self.forward(step, model, self.x(step), **kwargs)
            self.backward(step, loss)
            losses.append(loss.detach().cpu())
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
        return losses

    @contextlib.contextmanager
    def _failing(self, where: str, step: int) -> Iterator[None]:
        if where != self.fails_in or step != self.failing_step or self.fired:
            yield
            return
        fault = None
        try:
            with simgpu.fail_allocation(self.number) as fault:
                yield
        finally:
            self.fired = fault is not None and fault.fired


def ran(
    program: Callable[[Session], Any],
    fails_in: str | None,
    number: int,
    config: memscale.Config = CONFIG,
    failing_step: int = NUM_STEPS - 1,
) -> Any:
    """What came out: (values or None, weights, what was said if it was refused, whether anything failed)."""
    session = Session(fails_in, number, config, failing_step)
    try:
        seen = program(session)
    except torch.OutOfMemoryError as error:
        return None, session.weights(), str(error), session
    finally:
        for model in session.models:
            if fails_in is not None:
                memscale.detach(model)
    gradients = [
        None if value.grad is None else value.grad.cpu() for model in session.models for value in model.parameters()
    ]
    return [seen, gradients], session.weights(), None, session


def is_same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and torch.equal(first, second)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(is_same, first, second))
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(is_same(first[key], second[key]) for key in first)
    return bool(first == second)


def cases(programs: dict[str, Any], quick: set[tuple[str, str]]) -> list[Any]:
    """Each program with a failure in forward and in backward; `make test` runs the quick ones."""
    pairs = [(name, where) for name in sorted(programs) for where in ("backward", "forward")]
    return [pytest.param(*pair, marks=() if pair in quick else (pytest.mark.full,)) for pair in pairs]


def refusal_unless_exact(
    program: Callable[[Session], Any], fails_in: str, number: int, failing_step: int = NUM_STEPS - 1
) -> str | None:
    """What was said when the failing step was refused; None where it was repeated, and all is as without a failure."""
    config = BY_DEFAULT if fails_in == "forward" else CONFIG
    expected, weights, _, _ = ran(program, None, 0)
    found, weights_now, said, _ = ran(program, fails_in, number, config, failing_step)
    if said is None:
        assert is_same(found, expected)
        assert is_same(weights_now, weights)
    return None if said is None else str(said)


def is_explained(said: str) -> bool:
    """Whether it is our error, with the reason, and not PyTorch's own. (A program may go back in what it calls its
    forward.)"""
    return "is not run again after this failure in " in said
