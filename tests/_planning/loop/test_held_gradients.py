"""`GradientWatch`: what becomes of gradients that are there when a forward begins."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memscale._planning.loop.held_gradients import GradientWatch, Stay, held_bytes

pytestmark = pytest.mark.unit


def stays(num_batches: int, *, clears: str, to_none: bool = True, num_steps: int = 3) -> list[Stay]:
    """What the watch says at each forward of so many steps; `clears`: before forward, backward or at the end."""
    model, watch = nn.Linear(2, 2), GradientWatch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said: list[Stay] = []
    has_stepped = False
    for _ in range(num_steps):
        for batch in range(num_batches):
            if clears == "forward" and not batch:
                optimizer.zero_grad(set_to_none=to_none)
            said.append(watch.look(model, has_stepped=has_stepped))
            has_stepped = False
            loss = model(torch.ones(1, 2)).sum()
            if clears == "backward" and not batch:
                optimizer.zero_grad(set_to_none=to_none)
            loss.backward()
        optimizer.step()
        has_stepped = True
        if clears == "end":
            optimizer.zero_grad(set_to_none=to_none)
    return said


@pytest.mark.parametrize("clears", ["forward", "end"])
def test_a_loop_that_clears_before_its_forward(clears: str) -> None:
    assert stays(1, clears=clears) == ["none"] * 3


@pytest.mark.parametrize("clears", ["forward", "end"])
@pytest.mark.parametrize("num_batches", [2, 3])
def test_a_loop_that_adds_up(num_batches: int, clears: str) -> None:
    assert stays(num_batches, clears=clears) == ["none", *["backward"] * (3 * num_batches - 1)]


def test_a_loop_that_clears_between_forward_and_backward() -> None:
    assert stays(1, clears="backward") == ["none", "forward", "forward"]


def test_gradients_of_which_nobody_knows_whether_they_were_stepped_with() -> None:
    model, watch = nn.Linear(2, 2), GradientWatch()
    said: list[Stay] = []
    for _ in range(4):
        said.append(watch.look(model, has_stepped=False))
        loss = model(torch.ones(1, 2)).sum()
        model.zero_grad()
        loss.backward()
    assert said == ["none", "backward", "forward", "forward"]


def test_a_loop_that_does_both() -> None:
    assert stays(3, clears="backward") == ["none", *["backward"] * 8]


def test_gradients_that_are_filled_with_zeros_stay() -> None:
    """The second batch shows that."""
    assert stays(1, clears="backward", to_none=False, num_steps=4) == ["none", "forward", "backward", "backward"]


def test_what_was_said_of_the_loop_stays() -> None:
    watch = GradientWatch("backward")
    assert watch.look(nn.Linear(2, 2), has_stepped=False) == "backward"


def test_bytes_of_gradients() -> None:
    model = nn.Linear(2, 2)
    assert held_bytes(model) == 0
    model(torch.ones(1, 2)).sum().backward()
    assert held_bytes(model) == 24
