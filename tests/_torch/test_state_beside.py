"""Python state beside a model is found by the names in its code, and is as it was after a rehearsal."""

from __future__ import annotations

import array
import collections
import copy
import dataclasses
import functools
import queue
import random
import types
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import memscale
from memscale import Config
from memscale._torch import private
from memscale._torch.state_beside import Beside
from tests._torch import beside_state

PYTHON = random.Random(0)
NUMPY = np.random.default_rng(0)
LEGACY = np.random.RandomState(0)
TORCH = torch.Generator().manual_seed(0)
DRAW = PYTHON.random
count = 0
COUNTS: collections.Counter[str] = collections.Counter()
LATEST: collections.deque[float] = collections.deque(maxlen=4)
NESTED: dict[str, list[int]] = {"calls": []}
SEEN: set[int] = set()
RUNNING = np.zeros(2)
NAMESPACE = types.SimpleNamespace(calls=0, generators=[random.Random(1)])


class Tally:
    """Not a module, and its own class counts, too."""

    total: ClassVar[int] = 0

    def __init__(self) -> None:
        self.calls = 0

    def up(self) -> int:
        self.calls += 1
        Tally.total += 1
        return self.calls + Tally.total


TALLY = Tally()


@dataclasses.dataclass(slots=True)
class Slotted:
    calls: int = 0
    late: int = dataclasses.field(init=False)


class Derived(dict[str, int]):
    """Its own methods are not for us."""

    label = ""

    def items(self) -> Any:
        raise NotImplementedError

    values = clear = __len__ = items


class DerivedList(list[int]):
    pass


SLOTTED = Slotted()
DERIVED = Derived(calls=0)
ORDERED = type("Ordered", (collections.OrderedDict,), {})(calls=0)
DERIVED_LIST = DerivedList()
USERS: collections.UserDict[str, int] = collections.UserDict(calls=0)
CHAINED = collections.ChainMap({"calls": 0})
QUEUE: queue.Queue[int] = queue.Queue()
BYTES = bytearray(1)
ARRAY = array.array("d", [0.0])


def in_global() -> float:
    global count, late
    count += 1
    late = count
    return late


def in_class() -> float:
    Counting.num_calls += 1
    Counting.lazily = Counting.num_calls
    return Counting.lazily


def in_containers() -> float:
    COUNTS["calls"] += 1
    LATEST.append(random.random())
    NESTED["calls"].append(len(NESTED["calls"]))
    SEEN.add(len(SEEN))
    return COUNTS["calls"] + len(NESTED["calls"]) + len(SEEN)


def in_a_queue() -> float:
    QUEUE.put(QUEUE.qsize())
    return QUEUE.qsize() + QUEUE.unfinished_tasks


@functools.cache
def remembered() -> list[int]:
    return []


def in_a_remembered_list() -> float:
    remembered().append(1)
    return len(remembered())


def in_slots() -> float:
    SLOTTED.calls += 1
    SLOTTED.late = SLOTTED.calls + getattr(SLOTTED, "late", 0)
    return SLOTTED.late


def in_derived_containers() -> float:
    DERIVED["calls"] += 1
    DERIVED.label += "x"
    ORDERED["calls"] += 1
    ORDERED.move_to_end("calls")
    DERIVED_LIST.append(0)
    return DERIVED["calls"] + len(DERIVED.label) + ORDERED["calls"] + len(DERIVED_LIST)


def in_library_containers() -> float:
    USERS["calls"] += 1
    CHAINED["calls"] += 1
    return USERS["calls"] + CHAINED["calls"]


def in_buffers() -> float:
    BYTES[0] += 1
    ARRAY[0] += 1
    return BYTES[0] + ARRAY[0]


def in_array() -> float:
    RUNNING[0] += 1
    return float(RUNNING[0])


def in_objects() -> float:
    NAMESPACE.calls += 1
    return TALLY.up() + NAMESPACE.calls + NAMESPACE.generators[0].random()


def in_another_module() -> float:
    beside_state.count += 1
    return beside_state.count + beside_state.draw()


def in_default(state: dict[str, int] = {"calls": 0}) -> float:  # noqa: B006  (it is what people do)
    state["calls"] += 1
    return state["calls"]


def in_function_attribute() -> float:
    in_function_attribute.calls = getattr(in_function_attribute, "calls", 0) + 1  # type: ignore[attr-defined]
    return in_function_attribute.calls  # type: ignore[attr-defined,no-any-return]


def _make_closure() -> Callable[[], float]:
    calls, generator = 0, random.Random(2)

    def closure() -> float:
        nonlocal calls
        calls += 1
        return calls + generator.random()

    return closure


in_closure = _make_closure()


def generators() -> float:
    drawn = PYTHON.random() + float(NUMPY.random()) + LEGACY.random_sample() + DRAW()
    return drawn + float(torch.rand((), generator=TORCH))


WAYS: dict[str, Callable[[], float]] = {
    way.__name__.strip("_"): way
    for way in (
        in_global,
        in_class,
        in_containers,
        in_a_queue,
        in_a_remembered_list,
        in_slots,
        in_derived_containers,
        in_library_containers,
        in_buffers,
        in_array,
        in_objects,
        in_another_module,
        in_default,
        in_function_attribute,
        in_closure,
        generators,
    )
}


class Counting(nn.Module):
    """Multiplies by what it finds beside itself."""

    num_calls: ClassVar[int] = 0
    lazily: ClassVar[int]

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x) * self.scale())

    def scale(self) -> float:
        return 1 + WAYS[self.way]() / 8


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """Tests leave nothing to one another."""
    with Beside.of_model(Counting("in_global")).kept():
        yield


def losses(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return [*found, *(parameter.detach() for parameter in model.parameters())]


@pytest.mark.parametrize("how", ["estimate", "wrap"])
@pytest.mark.parametrize("way", sorted(WAYS))
def test_training_after_a_rehearsal_is_as_without_one(way: str, how: str) -> None:
    model = Counting(way)
    plain = copy.deepcopy(model)
    beside = Beside.of_model(model)
    with beside.kept():
        expected = losses(plain)
    sample = torch.ones(2, 4)
    if how == "estimate":
        assert memscale.estimate(model, sample).baseline_peak_bytes
    else:
        memscale.wrap(model, Config(enable_logging=False), sample)
    found = losses(model)
    assert all(map(torch.equal, found, expected))


def test_generators_in_attributes_are_as_before() -> None:
    model = Counting("in_global")
    model.generators = [random.Random(3), {"numpy": np.random.default_rng(3)}, torch.Generator().manual_seed(3)]
    model.scale = types.MethodType(_drawn, model)  # type: ignore[method-assign]
    expected = losses(copy.deepcopy(model))
    memscale.estimate(model, torch.ones(2, 4))
    assert all(map(torch.equal, losses(model), expected))


def _drawn(model: Any) -> float:
    first, second, third = model.generators
    return float(first.random() + second["numpy"].random() + float(torch.rand((), generator=third)))


def test_hooks_take_part_and_what_they_keep_is_put_back() -> None:
    """They may change the computation, so a rehearsal without them would be of another model."""
    kept: list[torch.Tensor] = []
    calls, scales = 0, []

    def on_module(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        nonlocal calls
        calls += 1
        kept.append(output)

    def on_all(scale: float, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        scales.append(scale)
        return output * scale

    model = Counting("in_global")
    plain = memscale.estimate(model, torch.ones(512, 4)).breakdown["activations"]
    handles = [model.first.register_forward_hook(on_module)]
    handles.append(nn.modules.module.register_module_forward_hook(functools.partial(on_all, 2.0)))
    hooked = memscale.estimate(model, torch.ones(512, 4)).breakdown["activations"]
    for handle in handles:
        handle.remove()
    assert hooked > plain, "the hooks ran"
    assert calls == 0
    assert not kept
    assert not scales


def test_what_a_failing_rehearsal_has_changed_is_put_back() -> None:
    class ByValue(Counting):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.scale()
            return x if x.sum().item() > 3 else self.first(x)

    with pytest.raises(memscale.ProfileError):
        memscale.estimate(ByValue("in_objects"), torch.ones(2, 4))
    assert TALLY.calls == Tally.total == NAMESPACE.calls == 0


def test_definitions_and_foreign_state_are_left_alone() -> None:
    beside = Beside.of_model(Counting("in_global"))
    with beside.kept():
        original, torch.foreign = in_global, 1  # type: ignore[attr-defined]
        globals()["in_global"] = in_class
        globals()["unmentioned"] = 1
    assert in_global is in_class
    assert torch.foreign == 1  # type: ignore[attr-defined]
    assert globals().pop("unmentioned") == 1
    globals()["in_global"] = original
    del torch.foreign  # type: ignore[attr-defined]


LOADED: Callable[[float], float] | None = None
TABLE: list[float] | None = None


@functools.lru_cache(maxsize=1)
def _set_up() -> None:
    """Remembers that it was called, where nobody sees it."""
    global LOADED, TABLE
    LOADED, TABLE = abs, [0.5]


class Lazy(Counting):
    def scale(self) -> float:
        _set_up()
        assert LOADED is not None
        assert TABLE is not None
        return LOADED(TABLE[0])


def test_what_is_set_up_once_is_set_up_when_it_is_needed() -> None:
    """A function that was loaded stays; a table that is gone is made again."""
    model = Lazy("in_global")
    memscale.estimate(model, torch.ones(2, 4))
    assert TABLE is None
    assert LOADED is abs
    assert losses(model), "it trains"
    _set_up.cache_clear()


def test_a_proxy_is_not_asked_anything() -> None:
    class Proxy:
        @property
        def __class__(self) -> Any:
            raise AssertionError("somebody asked")

        @__class__.setter
        def __class__(self, kind: Any) -> None: ...

    def function() -> Any:
        return proxy

    proxy = Proxy()
    with Beside([function]).kept():
        pass


def test_the_systems_generator_has_no_state() -> None:
    def function() -> float:
        return system.random()

    system = random.SystemRandom()
    with Beside([function]).kept():
        function()


def test_no_fake_tensor_is_left_in_a_closure() -> None:
    latest: torch.Tensor | None = None

    def remember(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        nonlocal latest
        latest = output

    model = Counting("in_global")
    model.register_forward_hook(remember)
    memscale.estimate(model, torch.ones(2, 4))
    assert latest is None
    model(torch.ones(2, 4))
    assert latest is not None
    assert not private.is_fake(latest)
