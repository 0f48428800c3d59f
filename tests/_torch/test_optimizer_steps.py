"""One hook on the optimizers of the process, told to those whom a step concerns, in a defined order."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import optimizer as optimizer_internals

from memscale._torch.optimizer_steps import StepOrder, StepWatcher, owns_any, parameters_of, watch_steps


class Noting(StepWatcher):
    def __init__(self, name: str, model: nn.Module, told: list[str], order: StepOrder = StepOrder.OBSERVE) -> None:
        self.name, self.model, self.told = name, model, told
        self.order = order  # type: ignore[misc]

    def concerns(self, optimizer: Any) -> bool:
        return owns_any(optimizer, self.model.parameters())

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        self.told.append(f"before {self.name}")

    def after_step(self, optimizer: Any) -> None:
        self.told.append(f"after {self.name}")


def num_hooks() -> tuple[int, int]:
    before, after = optimizer_internals._global_optimizer_pre_hooks, optimizer_internals._global_optimizer_post_hooks
    return len(before), len(after)


def test_there_is_one_hook_as_long_as_anybody_is_interested() -> None:
    model = nn.Linear(2, 2)
    watchers = [Noting(str(index), model, []) for index in range(3)]
    undos = [watch_steps(watcher) for watcher in watchers]
    assert num_hooks() == (1, 1)
    for undo in undos[1:]:
        undo()
        undo()  # a second time does nothing
    assert num_hooks() == (1, 1)
    undos[0]()
    assert num_hooks() == (0, 0)


def test_watchers_are_told_in_order_and_in_the_opposite_order_after_the_step() -> None:
    model, told = nn.Linear(2, 2), []
    orders = (StepOrder.TAKE_OVER, StepOrder.OBSERVE, StepOrder.PLACE, StepOrder.SCALE, StepOrder.OBSERVE)
    watchers = [Noting(f"{order.name} {index}", model, told, order) for index, order in enumerate(orders)]
    undos = [watch_steps(watcher) for watcher in watchers]
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: told.append("before its own"))
    optimizer.register_step_post_hook(lambda *_: told.append("after its own"))
    optimizer.step()
    in_order = ["OBSERVE 1", "OBSERVE 4", "SCALE 3", "PLACE 2", "TAKE_OVER 0"]
    assert told == [
        *(f"before {name}" for name in in_order),
        "before its own",
        "after its own",
        *(f"after {name}" for name in reversed(in_order)),
    ]
    for undo in undos:
        undo()


def test_only_those_are_told_whom_the_optimizer_concerns() -> None:
    ours, theirs, told = nn.Linear(2, 2), nn.Linear(2, 2), []
    watcher = Noting("ours", ours, told)
    undo = watch_steps(watcher)
    torch.optim.SGD(theirs.parameters()).step()
    assert not told
    torch.optim.SGD([*theirs.parameters(), ours.bias]).step()
    assert told == ["before ours", "after ours"]
    undo()


class Changing(Noting):
    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        self.told.append(self.name + "".join(sorted(kwargs)))
        return args, {**kwargs, self.name: 1}


class TakesAnything(torch.optim.SGD):
    def step(self, closure: Any = None, **kwargs: Any) -> Any:
        return kwargs


def test_arguments_that_one_returns_are_seen_by_the_next_and_by_the_step() -> None:
    model, told = nn.Linear(2, 2), []
    watchers = [Changing("a", model, told), Noting("looks", model, told), Changing("b", model, told)]
    undos = [watch_steps(watcher) for watcher in watchers]
    assert TakesAnything(model.parameters()).step() == {"a": 1, "b": 1}
    assert told == ["a", "before looks", "ba", "after b", "after looks", "after a"]
    for undo in undos:
        undo()


def test_a_watcher_is_not_kept_alive() -> None:
    model, told = nn.Linear(2, 2), []
    undo = watch_steps(Noting("gone", model, told))
    gc.collect()
    torch.optim.SGD(model.parameters()).step()
    assert not told
    undo()


class Leaving(Noting):
    undo: Any

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        super().before_step(optimizer, args, kwargs)
        self.undo()


def test_a_watcher_may_leave_while_it_is_told() -> None:
    model, told = nn.Linear(2, 2), []
    leaving, staying = Leaving("leaving", model, told), Noting("staying", model, told)
    leaving.undo, undo = watch_steps(leaving), watch_steps(staying)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.step()
    optimizer.step()
    assert told == ["before leaving", "before staying", "after staying", "before staying", "after staying"]
    undo()


def test_a_watcher_must_say_what_concerns_it() -> None:
    model = nn.Linear(2, 2)
    watcher = StepWatcher()
    undo = watch_steps(watcher)
    with pytest.raises(NotImplementedError):
        torch.optim.SGD(model.parameters()).step()
    undo()


def test_parameters_are_those_of_all_groups() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": first.parameters()}, {"params": [second.bias]}])
    assert [id(p) for p in parameters_of(optimizer)] == [id(p) for p in (first.weight, first.bias, second.bias)]
    assert owns_any(optimizer, second.parameters())
    assert not owns_any(optimizer, [second.weight, None])
