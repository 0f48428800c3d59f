"""Python's and NumPy's random state: watched cheaply, remembered for those who draw, and the same in a recompute."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from memscale._execute.executor import Executor
from memscale._plan import Checkpoint
from memscale._torch.host_rng import Fingerprint, HostRng, _python_view

pytestmark = pytest.mark.unit
DRAWS: dict[str, Callable[[], Any]] = {
    "random.random": random.random,
    "random.gauss": lambda: random.gauss(0, 1),
    "random.shuffle": lambda: random.shuffle([1, 2, 3]),
    "numpy.rand": numpy.random.rand,
    "numpy.normal": numpy.random.normal,
}


def test_pythons_generator_is_read_where_it_lies() -> None:
    assert _python_view() is not None, "CPython has moved it: fingerprints have become slow"
    fingerprint = Fingerprint()
    random.random()
    assert fingerprint.python_state() != random.getstate()
    fingerprint = Fingerprint()
    assert fingerprint.python_state() == random.getstate()


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_draw_is_seen(draw: Callable[[], Any]) -> None:
    fingerprint, state = Fingerprint(), HostRng()
    assert not fingerprint.moved()
    assert not state.moved()
    draw()
    assert fingerprint.moved()
    assert state.moved()


def test_another_bit_generator_is_watched_too() -> None:
    before = numpy.random.get_bit_generator()
    try:
        numpy.random.set_bit_generator(numpy.random.PCG64(3))
        fingerprint = Fingerprint()
        assert not fingerprint.numpy_moved()
        numpy.random.rand()
        assert fingerprint.numpy_moved()
    finally:
        numpy.random.set_bit_generator(before)


def test_a_spare_number_is_a_part_of_the_state() -> None:
    random.gauss(0, 1)
    numpy.random.normal()
    for spare in (lambda: random.gauss(0, 1), numpy.random.normal):
        state = HostRng()
        first = spare()
        assert state.moved()
        with state.repeated():
            assert spare() == first


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_repeated_draws_are_the_same_and_leave_no_trace(draw: Callable[[], Any]) -> None:
    state = HostRng()
    first = draw()
    draw()
    after = HostRng()
    with state.repeated():
        assert draw() == first
    assert not after.moved()


# ---- in a recompute


class Drawing(nn.Module):
    """Scales by a number drawn on the host, when it is told to."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.draw = draw
        self.draws = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.draw() if self.draws and self.training else 1.0
        return torch.tanh(self.linear(x) * scale)


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    random.seed(7)
    numpy.random.seed(7)
    model(x).square().sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) > 0 and all(map(torch.equal, one, other))


@pytest.mark.parametrize("draw", [random.random, lambda: random.gauss(0, 1), numpy.random.normal])
def test_a_layer_that_draws_is_recomputed_with_the_same_numbers(draw: Callable[[], float]) -> None:
    model, x = nn.Sequential(Drawing(draw), Drawing(draw)), torch.randn(3, 4)
    expected = gradients(model, x)
    state = HostRng()
    executor = Executor(model)
    executor.attach([Checkpoint("0"), Checkpoint("1")])
    for _ in range(3):
        assert equal(gradients(model, x), expected)
    state.restore()
    executor.detach()


def test_evaluation_first_does_not_teach_that_training_draws_nothing() -> None:
    model, x = nn.Sequential(Drawing(numpy.random.rand)), torch.randn(3, 4)
    expected = gradients(model, x)
    executor = Executor(model)
    executor.attach([Checkpoint("0")])
    gradients(model.eval(), x)
    assert equal(gradients(model.train(), x), expected)
    executor.detach()


def test_a_layer_that_starts_to_draw_from_python_late_is_right_at_once() -> None:
    model, x = nn.Sequential(Drawing(random.random)), torch.randn(3, 4)
    expected = gradients(model, x)
    executor = Executor(model)
    executor.attach([Checkpoint("0")])
    for draws in (False, False, True, True, False):
        model[0].draws = draws
        result = gradients(model, x)
        assert equal(result, expected) is draws
    executor.detach()


def test_a_layer_that_starts_to_draw_from_numpy_late_is_refused_once() -> None:
    model, x = nn.Sequential(Drawing(numpy.random.rand)), torch.randn(3, 4)
    expected = gradients(model, x)
    executor = Executor(model)
    executor.attach([Checkpoint("0")])
    model[0].draws = False
    gradients(model, x)
    model[0].draws = True
    with pytest.raises(RuntimeError, match="drew from NumPy"):
        gradients(model, x)
    assert equal(gradients(model, x), expected)
    executor.detach()
