"""Which optimizers may be stepped in parts, and that a step in parts is the step."""

from __future__ import annotations

import contextlib
import random
import types
from typing import Any

import pytest
import torch
from torch import nn

from memscale.techniques.offload.optimizer.separable import (
    NotSeparable,
    SplitStep,
    check_separable,
    idle_shadow,
    is_shadow,
    shadow,
)

pytestmark = pytest.mark.unit
O = torch.optim  # noqa: E741


class Custom(O.Optimizer):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            self.before(group)
            for p in group["params"]:
                if p.grad is not None:
                    self.update(group, p)

    def before(self, group: dict[str, Any]) -> None:
        pass

    def update(self, group: dict[str, Any], p: torch.Tensor) -> None:
        p.sub_(p.grad, alpha=group["lr"])


class Counting(Custom):
    def before(self, group: dict[str, Any]) -> None:
        group["count"] = group.get("count", 0) + 1

    def update(self, group: dict[str, Any], p: torch.Tensor) -> None:
        p.sub_(p.grad, alpha=group["lr"] / group["count"])


class Random(Custom):
    """Draws a number for each parameter in turn; buckets are not always stepped in that order."""

    def update(self, group: dict[str, Any], p: torch.Tensor) -> None:
        p.sub_(p.grad * torch.rand(()).item())


class PythonsRandom(Custom):
    def update(self, group: dict[str, Any], p: torch.Tensor) -> None:
        p.sub_(p.grad * random.random())


class GlobalNorm(Custom):
    def before(self, group: dict[str, Any]) -> None:
        gradients = [p.grad.norm() for p in group["params"] if p.grad is not None]
        self.norm = float(torch.stack(gradients).norm()) if gradients else 1.0

    def update(self, group: dict[str, Any], p: torch.Tensor) -> None:
        p.sub_(p.grad / self.norm)


class Prodigylike(Custom):
    """A step size in the group that grows with all gradients."""

    def before(self, group: dict[str, Any]) -> None:
        total = sum(float((p.grad * p).sum()) for p in group["params"] if p.grad is not None)
        group["d"] = group.get("d", 1e-3) + abs(total) * 1e-3

    def update(self, group: dict[str, Any], p: torch.Tensor) -> None:
        p.sub_(p.grad, alpha=group["d"])


class CountingInside(Custom):
    """A counter where assignments to attributes do not show it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.counts = {"steps": 0}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.counts["steps"] += 1
        super().step()


class Remembering(CountingInside):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.counts = types.SimpleNamespace(seen=[0])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.counts.seen[0] += 1
        Custom.step(self)


class CountingInPlace(CountingInside):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.counts = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.counts += 1
        Custom.step(self)


class Caching(Custom):
    """Fills a table at its first step: it is the same whoever fills it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.table: dict[str, torch.Tensor] = {}

    def update(self, group: dict[str, Any], p: torch.Tensor) -> None:
        self.table.setdefault("rate", torch.tensor(0.1))
        p.sub_(p.grad * self.table["rate"])


class Drawing(Custom):
    """Draws from generators of its own, and Python's."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.generator = torch.Generator().manual_seed(3)

    def update(self, group: dict[str, Any], p: torch.Tensor) -> None:
        p.sub_(p.grad * torch.rand((), generator=self.generator).item() * random.random())


class Telling(Custom):
    @torch.no_grad()
    def step(self, closure: Any = None) -> int:  # type: ignore[override]
        super().step()
        return sum(p.grad is not None for group in self.param_groups for p in group["params"])


class SAMlike(O.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.base = O.SGD(self.param_groups, lr=0.1)

    def step(self, closure: Any = None) -> None:
        self.base.step()


class OwnList(Custom):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.flat = [p for group in self.param_groups for p in group["params"]]


class NeedsClosure(Custom):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


class Fragile(Custom):
    def before(self, group: dict[str, Any]) -> None:
        raise ValueError("no stand-ins, please")


def net() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    return model


TORCH = [
    *("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax"),
    *("NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
]


@pytest.mark.parametrize("make", [*(getattr(O, name) for name in TORCH), Custom, Counting, Caching])
def test_separable(make):
    check_separable(make(net().parameters()))


@pytest.mark.parametrize("name", TORCH)
def test_the_trial_agrees_with_what_is_known_of_torchs_optimizers(name):
    """A subclass is not known, so it is tried."""
    kind = type("Tried" + name, (getattr(O, name),), {})
    check_separable(kind(net().parameters()))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (O.LBFGS, "closure several times"),
        (NeedsClosure, "closure several times"),
        (lambda params: O.Adam(params, differentiable=True), "differentiable"),
        (GlobalNorm, "depends on"),
        (Prodigylike, "depends on"),
        (CountingInside, "once a call"),
        (CountingInPlace, "all parameters share depend"),
        (Remembering, "once a call"),
        (Telling, "returns a value"),
        (SAMlike, "wraps another optimizer in .base"),
        (OwnList, "list of parameters of its own in .flat"),
        (Fragile, "trial step failed"),
        (Random, "draws random numbers"),
        (Drawing, "draws random numbers"),
        (PythonsRandom, "draws random numbers"),
    ],
)
def test_not_separable(make, reason):
    optimizer = make(net().parameters())
    with pytest.raises(NotSeparable, match=reason):
        check_separable(optimizer)


@pytest.mark.parametrize("make", [CountingInside, CountingInPlace, Remembering, Caching, Drawing])
def test_the_trial_leaves_what_the_optimizer_keeps_alone(make):
    optimizer = make(net().parameters())
    names = [name for name in ("counts", "table", "generator") if hasattr(optimizer, name)]

    def kept() -> str:
        values = [getattr(optimizer, name) for name in names]
        return repr([v.get_state().tolist() if isinstance(v, torch.Generator) else v for v in values])

    before, python_state = kept(), random.getstate()
    with contextlib.suppress(NotSeparable):
        check_separable(optimizer)
    assert kept() == before
    assert random.getstate() == python_state


@pytest.mark.parametrize("make", [Counting, GlobalNorm, Random])
def test_the_trial_leaves_no_trace(make):
    model = net()
    optimizer = make(model.parameters())
    before = [p.clone() for p in model.parameters()]
    attributes = set(vars(optimizer))
    random_state = torch.get_rng_state()
    try:
        check_separable(optimizer)
    except NotSeparable:
        assert make in (GlobalNorm, Random)
    assert all(map(torch.equal, before, model.parameters()))
    assert torch.equal(torch.get_rng_state(), random_state)
    assert set(vars(optimizer)) == attributes
    assert not optimizer.state
    assert "count" not in optimizer.param_groups[0]


@pytest.mark.parametrize("make", [lambda params: O.AdamW(params), Counting])
def test_a_step_in_parts_is_the_step(make):
    whole, parts = net(), net()
    first, second = make(whole.parameters()), make(parts.parameters())
    for _ in range(3):
        first.step()
        split = SplitStep(second)
        for p in parts.parameters():
            state = {p: second.state[p]} if p in second.state else {}
            second.state.update(split.run([p], state))
        split.merge()
    assert all(map(torch.equal, whole.parameters(), parts.parameters()))
    options = [{k: v for k, v in group.items() if k != "params"} for group in first.param_groups]
    assert options == [{k: v for k, v in group.items() if k != "params"} for group in second.param_groups]


def test_parts_that_disagree_are_found():
    model = net()
    optimizer = Prodigylike(model.parameters())
    split = SplitStep(optimizer)
    for p in model.parameters():
        split.run([p], {})
    with pytest.raises(NotSeparable, match="'d' depends on all parameters"):
        split.merge()


def test_a_shadow_shares_what_it_does_not_replace():
    optimizer = O.SGD(net().parameters(), lr=0.1)
    optimizer.mine = object()
    stand_in = shadow(optimizer, [], {})
    assert type(stand_in) is O.SGD
    assert stand_in.mine is optimizer.mine
    assert is_shadow(stand_in)
    assert not is_shadow(optimizer)


def test_an_idle_shadow_does_nothing():
    model = net()
    optimizer = Counting(model.parameters())
    before = [p.clone() for p in model.parameters()]
    idle_shadow(optimizer).step()
    assert all(map(torch.equal, before, model.parameters()))
    assert "count" not in optimizer.param_groups[0]
