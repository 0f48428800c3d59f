"""What a model's code caches beside the model is real after a rehearsal."""

from __future__ import annotations

import copy
import functools
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import memscale
from memscale._profile.inputs import Inputs
from memscale._profile.rehearsal import FakeRehearsal
from memscale._torch import private

pytestmark = pytest.mark.unit
TABLES: dict[int, torch.Tensor] = {}
SEEN: list[torch.Tensor] = []
CURRENT = torch.ones(4)


@functools.lru_cache(maxsize=8)
def table(length: int, device: torch.device) -> torch.Tensor:
    return torch.arange(length, dtype=torch.float32, device=device)


class Caching(nn.Module):
    """Keeps its tables wherever there is room for one."""

    tables: ClassVar[dict[str, tuple[torch.Tensor, int]]] = {}
    scale: torch.Tensor | None = None

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(4, 4), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * getattr(self, self.way)(x)

    def function(self, x: torch.Tensor) -> torch.Tensor:
        return table(4, x.device)

    @functools.cache  # noqa: B019  (it is what libraries do)
    def _method(self, length: int) -> torch.Tensor:
        return torch.ones(length)

    def method(self, x: torch.Tensor) -> torch.Tensor:
        return self._method(4)

    def module_dictionary(self, x: torch.Tensor) -> torch.Tensor:
        if 4 not in TABLES:
            TABLES[4] = torch.ones(4)
        return TABLES[4]

    def module_list(self, x: torch.Tensor) -> torch.Tensor:
        SEEN.append(torch.ones(4))
        return SEEN[-1]

    def module_name(self, x: torch.Tensor) -> torch.Tensor:
        global CURRENT
        CURRENT = CURRENT * x.detach().mean()
        return CURRENT

    def class_dictionary(self, x: torch.Tensor) -> torch.Tensor:
        return self.tables.setdefault("ones", (torch.ones(4), 4))[0]

    def class_name(self, x: torch.Tensor) -> torch.Tensor:
        type(self).scale = torch.ones(4)
        return type(self).scale


def kept() -> list[Any]:
    return [*TABLES.values(), *SEEN, CURRENT, *(each for each, _ in Caching.tables.values()), Caching.scale]


@pytest.mark.parametrize(
    "way",
    ["function", "method", "module_dictionary", "module_list", "module_name", "class_dictionary", "class_name"],
)
def test_no_cache_keeps_a_fake_tensor(way: str) -> None:
    model, x = Caching(way), torch.randn(2, 4)
    rehearsal = FakeRehearsal(model, Inputs((x,)), "cpu")
    for _ in range(2):
        rehearsal.run()
        assert not any(each is not None and private.is_fake(each) for each in kept())
    assert not private.is_fake(model(x))
    assert not private.is_fake(CURRENT)
    table.cache_clear()
    Caching._method.cache_clear()
    for cache in (SEEN, TABLES, Caching.tables):
        cache.clear()


def test_caches_without_fake_tensors_are_left_alone() -> None:
    first = table(4, torch.device("cpu"))
    TABLES[7] = torch.ones(7)
    FakeRehearsal(Caching("module_dictionary"), Inputs((torch.randn(2, 4),)), "cpu").run()
    assert table(4, torch.device("cpu")) is first
    assert 7 in TABLES
    table.cache_clear()
    TABLES.clear()


class Unbound:
    """As a web framework's `request` is outside of a request: it stands for something else, and nothing is there."""

    @property
    def __class__(self) -> type:
        raise RuntimeError("outside of a request")

    @__class__.setter
    def __class__(self, value: type) -> None:
        raise RuntimeError("outside of a request")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("outside of a request")


def test_a_proxy_beside_the_model_is_not_asked_what_it_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "REQUEST", Unbound())
    monkeypatch.setitem(TABLES, 9, Unbound())
    model, x = Caching("module_dictionary"), torch.randn(2, 4)
    FakeRehearsal(model, Inputs((x,)), "cpu").run()
    assert not any(each is not None and private.is_fake(each) for each in TABLES.values() if type(each) is not Unbound)
    assert 9 in TABLES
    TABLES.clear()


class Symmetric(nn.Module):
    """PyTorch's own example of a parametrization. It saves nothing for backward: an old graph is no error."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def test_weights_that_a_loop_caches_are_those_of_its_own_forward() -> None:
    """A rehearsal inside of `parametrize.cached()` left its own there, and the step that followed trained with it."""

    def gradients(model: nn.Module) -> list[torch.Tensor | None]:
        for step in range(3):
            with parametrize.cached():
                model(torch.full((2, 4), step + 1.0)).sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    plain = copy.deepcopy(model)
    memscale.wrap(model, memscale.Config(enable_logging=False))
    try:
        found = gradients(model)
    finally:
        memscale.detach(model)
    assert all(map(torch.equal, found, gradients(plain)))
