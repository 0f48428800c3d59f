"""Python state beside a model is put back for a forward that runs again, or the repetition is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from memscale._planning.recovery.steps_beside import StepsBeside
from memscale._planning.recovery.watched_run import NotComparable

pytestmark = pytest.mark.unit

COUNT = 0
SEEN: dict[str, list[int]] = {"calls": []}
NUMBERS = itertools.count()


def count() -> None:
    global COUNT
    COUNT += 1
    SEEN["calls"].append(COUNT)


def draw() -> int:
    return next(NUMBERS)


class Model(nn.Module):
    def __init__(self, does: Callable[[], Any]) -> None:
        super().__init__()
        self.does = does

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.does()
        return x


def steps_of(model: nn.Module) -> StepsBeside:
    return StepsBeside(model, list)


def run(beside: StepsBeside, model: nn.Module) -> Any:
    taken = beside.before()
    model(torch.zeros(1))
    beside.after(taken)
    return taken


@pytest.mark.parametrize("num_before", [0, 1, 3])
def test_what_a_forward_changed_is_put_back_in_the_same_objects(num_before: int) -> None:
    model, calls = Model(count), SEEN["calls"]
    beside = steps_of(model)
    for _ in range(num_before):
        run(beside, model)
    before = COUNT, list(calls)
    taken = run(beside, model)
    after = COUNT, list(calls)
    beside.refuse_changes(taken)
    beside.show_before(taken)
    assert (COUNT, calls) == before
    with beside.ran() as check:
        model(torch.zeros(1))
    check()
    assert (COUNT, calls) == after
    beside.show_after(taken)
    assert SEEN["calls"] is calls
    assert (COUNT, calls) == after


def test_what_changes_after_the_forward_is_refused() -> None:
    model = Model(count)
    beside = steps_of(model)
    taken = run(beside, model)
    SEEN["calls"].append(-1)
    with pytest.raises(NotComparable, match="changed after its forward"):
        beside.refuse_changes(taken)


def test_what_changes_for_the_first_time_is_refused_and_known_from_then_on() -> None:
    model = Model(lambda: SEEN)
    beside = steps_of(model)
    run(beside, model)
    taken = run(beside, model)
    SEEN["calls"].append(-1)
    with pytest.raises(NotComparable, match="had not changed before"):
        beside.refuse_changes(taken)
    taken = run(beside, model)
    beside.refuse_changes(taken)


def test_what_was_not_there_at_first_is_refused() -> None:
    model = Model(count)
    beside = steps_of(model)
    taken = run(beside, model)
    model.register_forward_hook(lambda *_, held=[1]: None)
    with pytest.raises(NotComparable, match="was not there at first"):
        beside.refuse_changes(taken)


def test_code_that_draws_from_an_iterator_is_refused() -> None:
    model = Model(draw)
    beside = steps_of(model)
    taken = run(beside, model)
    beside.refuse_changes(taken)
    with beside.ran() as check:
        model(torch.zeros(1))
    with pytest.raises(NotComparable, match="draw: NUMBERS uses what cannot be compared"):
        check()


def test_an_attribute_that_holds_an_iterator_is_refused() -> None:
    model = Model(count)
    beside = StepsBeside(model, lambda: [[iter(range(3))]])
    taken = run(beside, model)
    with pytest.raises(NotComparable, match="attribute of the model"):
        beside.refuse_changes(taken)


def test_a_step_of_a_model_that_changes_nothing_notes_nothing() -> None:
    model = Model(lambda: SEEN["calls"])
    beside = steps_of(model)
    run(beside, model)
    taken = run(beside, model)
    assert not taken.before
    assert not taken.after
