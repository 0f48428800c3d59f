"""Batches of several lengths with models that are not all alike: a change of plans moves no state, and is exact."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memscale
from tests._planning.loop.test_shapes import LONG, MIDDLE, SHORT, VOCABULARY, WIDTH, Words, ids
from tests.techniques.offload.runs import DEVICE

LENGTHS = (LONG, SHORT, SHORT, LONG, MIDDLE, SHORT, SHORT, LONG)
pytestmark = pytest.mark.usefixtures("no_races", "no_leaks")


class Tied(Words):
    """Its head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.words(ids)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden).square().mean()


class WithStatistics(Words):
    """Each block has a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in self.blocks)
        self.register_buffer("steps", torch.zeros(()), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1)
        hidden = self.words(ids)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            hidden = hidden + block(norm(hidden.flatten(0, 1)).view_as(hidden))
        return hidden.square().mean()


def _half_frozen() -> nn.Module:
    model = Words()
    model.blocks[:2].requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "statistics": WithStatistics,
    "half frozen": _half_frozen,
}
CONFIGS: dict[str, tuple[float, dict[str, Any]]] = {
    "state on the device": (0.6, {"mode": "conservative"}),
    "state away": (0.45, {"mode": "balanced"}),
}


def _config(model: nn.Module, share: float, wishes: dict[str, Any]) -> memscale.Config:
    plain_bytes = memscale.estimate(model, ids(LONG).to(DEVICE)).baseline_peak_bytes
    return memscale.Config(memory_budget_gb=share * plain_bytes / 1e9, enable_logging=False, **wishes)


class Loop:
    """One model with its optimizer."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        self.losses: list[float] = []

    def step(self, number: int, length: int) -> None:
        torch.manual_seed(number)
        loss = self.model(ids(length).to(DEVICE))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def places(self, *, with_state: bool) -> list[int]:
        """Where weights and buffers lie, and the state, unless it travels in every step."""
        state = [value for entry in self.optimizer.state.values() for value in entry.values()] if with_state else []
        return [value.data_ptr() for value in (*self.model.parameters(), *self.model.buffers(), *state)]

    def seen(self) -> list[torch.Tensor]:
        state = [value for entry in self.optimizer.state_dict()["state"].values() for value in entry.values()]
        return [value.detach().cpu().clone() for value in (*self.model.parameters(), *self.model.buffers(), *state)]


def _are_equal(first: Loop, second: Loop) -> bool:
    is_same = all(torch.equal(*both) for both in zip(first.seen(), second.seen(), strict=True))
    return is_same and first.losses == second.losses


@pytest.mark.parametrize(
    ("name", "wishes"),
    [*((name, "state on the device") for name in MODELS), ("tied", "state away"), ("statistics", "state away")],
)
def test_odd_models_train_on_any_length_as_they_are(name: str, wishes: str, simgpu_device: Any) -> None:
    torch.manual_seed(0)
    plain = Loop(MODELS[name]().to(DEVICE))
    ours = Loop(copy.deepcopy(plain.model))
    config = _config(ours.model, *CONFIGS[wishes])
    memscale.wrap(ours.model, config, ids(LONG).to(DEVICE), lengths=[LONG, MIDDLE, SHORT])
    executor: Any = memscale.executor_of(ours.model)
    plans, places = [], []
    for number, length in enumerate(LENGTHS):
        plain.step(number, length)
        ours.step(number, length)
        plans.append(executor.plan)
        places.append(ours.places(with_state=wishes == "state on the device"))
    assert len({id(plan) for plan in plans}) > 1, "there was something to change"
    assert all(each == places[0] for each in places), "no weight, buffer or state has moved"
    assert _are_equal(ours, plain)
    memscale.detach(ours.model)


def test_two_models_change_their_plans_each_for_itself(simgpu_device: Any) -> None:
    """As a student and its teacher that is trained, too, on batches of other lengths."""
    torch.manual_seed(0)
    plain = [Loop(kind().to(DEVICE)) for kind in (Tied, WithStatistics)]
    ours = [Loop(copy.deepcopy(each.model)) for each in plain]
    for loop in ours:
        config = _config(loop.model, 0.6, {"mode": "conservative"})
        memscale.wrap(loop.model, config, ids(LONG).to(DEVICE), lengths=[LONG, SHORT])
    plans: list[list[Any]] = [[], []]
    for number, length in enumerate(LENGTHS):
        for place, other in enumerate((length, LENGTHS[-1 - number])):
            plain[place].step(number, other)
            ours[place].step(number, other)
            executor: Any = memscale.executor_of(ours[place].model)
            plans[place].append(id(executor.plan))
    assert all(len(set(each)) > 1 for each in plans)
    assert all(_are_equal(first, second) for first, second in zip(ours, plain, strict=True))
    for loop in ours:
        memscale.detach(loop.model)
