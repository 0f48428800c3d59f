"""Odd forwards, continued: state in places that a list of names is likely to miss. See odd_programs.py."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import inspect
import io
import itertools
import logging
import operator
import random
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from tests._planning.recovery import odd_state
from tests._planning.recovery.odd_programs import program
from tests.techniques.offload.runs import DEVICE

REPEATED = (
    "attribute_called_training", "named_constants", "several_errors_that_are_no_lack_of_memory", "shared_settings",
    "copied_module_constants", "descriptor_that_counts", "metaclass_that_counts", "missing_attribute_that_counts",
    "frozen_dataclass_that_counts", "list_of_functions", "mode_of_a_part", "attributes_that_share_memory",
    "object_of_a_cached_function", "set_in_the_order_of_its_filling",
)  # fmt: skip
"""Those that are worth it."""

# ---- tensors that no container of their own holds


@program
def tensor_in_a_tuple() -> Any:
    kept = (torch.zeros(()), 1)

    def odd(x: torch.Tensor) -> torch.Tensor:
        kept[0].add_(1)
        return x * kept[0].item()

    return odd, kept[0].item


@program
def device_tensor_in_a_tuple() -> Any:
    kept = (torch.zeros((), device=DEVICE), 1)

    def odd(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            kept[0].add_(1)
        return x * kept[0]

    return odd, kept[0].item


@program
def tensor_as_default_argument() -> Any:
    total = torch.zeros(())

    def odd(x: torch.Tensor, kept: torch.Tensor = total) -> torch.Tensor:
        kept.add_(1)
        return x * kept.item()

    return odd, total.item


@program
def tensor_of_a_partial() -> Any:
    total = torch.zeros((), device=DEVICE)

    def scaled(kept: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            kept.add_(1)
        return x * kept

    return functools.partial(scaled, total), total.item


@program
def bound_method_of_a_tensor() -> Any:
    add = torch.zeros(()).add_
    return (lambda x: x * add(1).item()), lambda: add(0).item()


@program
def tensor_on_a_tensor() -> Any:
    kept = torch.ones(())
    kept.mean = torch.zeros(())  # type: ignore[method-assign,assignment]

    def odd(x: torch.Tensor) -> torch.Tensor:
        kept.mean.add_(1)  # type: ignore[attr-defined]
        return x * kept.mean.item()  # type: ignore[attr-defined]

    return odd, kept.mean.item  # type: ignore[attr-defined]


@program
def tensors_of_a_result() -> Any:
    kept = torch.max(torch.zeros(2, 2), 0)

    def odd(x: torch.Tensor) -> torch.Tensor:
        kept.values.add_(1)
        return x * kept.values[0].item()

    return odd, kept.values[0].item


@program
def inference_tensor() -> Any:
    with torch.inference_mode():
        total = torch.zeros(())

    def odd(x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            total.add_(1)
        return x * total.item()

    return odd, total.item


@program
def tensor_written_in_inference_mode() -> Any:
    total = torch.zeros((), device=DEVICE)

    def odd(x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            total.add_(1)
        return x * total.item()

    return odd, total.item


@program
def version_of_a_tensor() -> Any:
    total = torch.zeros(())

    def odd(x: torch.Tensor) -> torch.Tensor:
        total.add_(1)
        return x * total._version

    return odd, lambda: total._version


@program
def flag_of_a_tensor() -> Any:
    total = torch.zeros(())

    def odd(x: torch.Tensor) -> torch.Tensor:
        total.requires_grad = not total.requires_grad
        return x * (1 + total.requires_grad)

    return odd, lambda: total.requires_grad


@program
def gradient_of_a_tensor() -> Any:
    """A leaf that is nobody's parameter, whose gradients are added up by each backward."""
    total = torch.ones((), device=DEVICE, requires_grad=True)

    def odd(x: torch.Tensor) -> torch.Tensor:
        return x * total

    return odd, lambda: None if total.grad is None else total.grad.item()


@program
def attribute_that_comes_and_goes() -> Any:
    total = torch.zeros(())

    def odd(x: torch.Tensor) -> torch.Tensor:
        if hasattr(total, "is_here"):
            del total.is_here
            return x * 2
        total.is_here = True  # type: ignore[attr-defined]
        return x * 3

    return odd, lambda: hasattr(total, "is_here")


@program
def out_argument() -> Any:
    totals = (torch.zeros(()),)

    def odd(x: torch.Tensor) -> torch.Tensor:
        torch.add(totals[0], 1, out=totals[0])
        return x * totals[0].item()

    return odd, totals[0].item


@program
def foreach_operator() -> Any:
    totals = (torch.zeros(()), torch.zeros(()))

    def odd(x: torch.Tensor) -> torch.Tensor:
        torch._foreach_add_(totals, 1.0)
        return x * totals[1].item()

    return odd, totals[0].item


# ---- attributes that are not among those of plain objects


class Flagged:
    def __init__(self) -> None:
        self.training = False


@program
def attribute_called_training() -> Any:
    kept = Flagged()

    def odd(x: torch.Tensor) -> torch.Tensor:
        kept.training = not kept.training
        return x * (1 + kept.training)

    return odd, lambda: kept.training


class Special:
    __calls__ = 0


@program
def special_name_of_an_object() -> Any:
    kept = Special()
    kept.__calls__ = 0

    def odd(x: torch.Tensor) -> torch.Tensor:
        kept.__calls__ += 1
        return x * kept.__calls__

    return odd, lambda: kept.__calls__


@program
def special_name_of_a_class() -> Any:
    Special.__calls__ = 0

    def odd(x: torch.Tensor) -> torch.Tensor:
        Special.__calls__ += 1
        return x * Special.__calls__

    return odd, lambda: Special.__calls__


class Even:
    scale = 2


class Uneven:
    scale = 3


@program
def class_of_an_object() -> Any:
    kept: Any = Even()

    def odd(x: torch.Tensor) -> torch.Tensor:
        kept.__class__ = Uneven if type(kept) is Even else Even
        return x * kept.scale

    return odd, lambda: kept.scale


@program
def attribute_of_a_class_of_others() -> Any:
    nn.Identity.num_calls = 0  # type: ignore[attr-defined]

    def odd(x: torch.Tensor) -> torch.Tensor:
        nn.Identity.num_calls += 1  # type: ignore[attr-defined]
        return x * nn.Identity.num_calls  # type: ignore[attr-defined]

    def seen() -> int:
        found = nn.Identity.num_calls  # type: ignore[attr-defined]
        del nn.Identity.num_calls  # type: ignore[attr-defined]
        return int(found)

    return odd, seen


@program
def attribute_of_a_function_of_others() -> Any:
    F.relu.num_calls = 0  # type: ignore[attr-defined]

    def odd(x: torch.Tensor) -> torch.Tensor:
        F.relu.num_calls += 1  # type: ignore[attr-defined]
        return x * F.relu.num_calls  # type: ignore[attr-defined]

    def seen() -> int:
        found = F.relu.num_calls  # type: ignore[attr-defined]
        del F.relu.num_calls  # type: ignore[attr-defined]
        return int(found)

    return odd, seen


LOGGER = logging.getLogger("odd places")


@program
def attribute_of_a_logger() -> Any:
    LOGGER.num_lines = 0  # type: ignore[attr-defined]

    def odd(x: torch.Tensor) -> torch.Tensor:
        LOGGER.num_lines += 1  # type: ignore[attr-defined]
        return x * LOGGER.num_lines  # type: ignore[attr-defined]

    return odd, lambda: LOGGER.num_lines  # type: ignore[attr-defined]


@program
def attribute_of_a_partial() -> Any:
    kept: Any = functools.partial(int)
    kept.num_calls = 0

    def odd(x: torch.Tensor) -> torch.Tensor:
        kept.num_calls += 1
        return x * kept.num_calls

    return odd, lambda: kept.num_calls


@program
def attribute_of_a_cached_function() -> Any:
    @functools.lru_cache
    def prepared() -> int:
        return 1

    prepared.num_calls = 0  # type: ignore[attr-defined]

    def odd(x: torch.Tensor) -> torch.Tensor:
        prepared.num_calls += prepared()  # type: ignore[attr-defined]
        return x * prepared.num_calls  # type: ignore[attr-defined]

    return odd, lambda: prepared.num_calls  # type: ignore[attr-defined]


@program
def attribute_of_an_ordered_dictionary() -> Any:
    kept: Any = collections.OrderedDict(a=1)
    kept.num_calls = 0

    def odd(x: torch.Tensor) -> torch.Tensor:
        kept.num_calls += kept["a"]
        return x * kept.num_calls

    return odd, lambda: kept.num_calls


@program
def attribute_of_a_counter() -> Any:
    kept: Any = collections.Counter(a=1)
    kept.num_calls = 0

    def odd(x: torch.Tensor) -> torch.Tensor:
        kept.num_calls += kept["a"]
        return x * kept.num_calls

    return odd, lambda: kept.num_calls


@program
def attribute_of_a_user_dictionary() -> Any:
    kept: Any = collections.UserDict(a=1)
    kept.num_calls = 0

    def odd(x: torch.Tensor) -> torch.Tensor:
        kept.num_calls += kept["a"]
        return x * kept.num_calls

    return odd, lambda: kept.num_calls


@program
def attribute_of_a_random_generator() -> Any:
    draws: Any = random.Random(3)
    draws.num_calls = 0

    def odd(x: torch.Tensor) -> torch.Tensor:
        draws.num_calls += 1
        return x * draws.num_calls * draws.random()

    return odd, lambda: draws.num_calls


class Draws(random.Random):
    def __init__(self, start: int) -> None:
        super().__init__(start)
        self.num_calls = 0

    def random(self) -> float:
        self.num_calls += 1
        return super().random() * self.num_calls


@program
def derived_random_generator() -> Any:
    draws = Draws(3)
    return (lambda x: x * draws.random()), lambda: draws.num_calls


@program
def annotations_of_a_function() -> Any:
    def odd(x: torch.Tensor) -> torch.Tensor:
        odd.__annotations__["num_calls"] += 1
        return x * odd.__annotations__["num_calls"]

    odd.__annotations__["num_calls"] = 0
    return odd, lambda: odd.__annotations__["num_calls"]


@program
def text_of_a_function() -> Any:
    def odd(x: torch.Tensor) -> torch.Tensor:
        odd.__doc__ = (odd.__doc__ or "") + "1"
        return x * len(odd.__doc__)

    odd.__doc__ = ""
    return odd, lambda: odd.__doc__


@program
def variable_of_another_function() -> Any:
    count = 0

    def counter() -> int:
        return count

    def odd(x: torch.Tensor) -> torch.Tensor:
        cell = counter.__closure__[0]  # type: ignore[index]
        cell.cell_contents += 1
        return x * counter()

    return odd, lambda: count


class SlottedModule(nn.Module):
    __slots__ = ("num_calls",)

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return x * self.num_calls


@program
def slot_of_a_module() -> Any:
    module = SlottedModule()
    return module, lambda: module.num_calls


class Aliased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(2)
        self.part = self.total[:1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(1)
        return x * self.part.item()


@program
def attributes_that_share_memory() -> Any:
    module = Aliased()
    return module, lambda: (module.total.tolist(), module.part.tolist())


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept = {"totals": [torch.zeros(())]}
        self.same = self.kept["totals"][0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept["totals"][0].add_(1)
        return x * self.same.item()


@program
def tensor_in_nested_containers() -> Any:
    module = Nested()
    return module, lambda: (module.kept["totals"][0].item(), module.same.item())


class Moded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.drop.train(not self.drop.training)
        return self.drop(x)


@program
def mode_of_a_part() -> Any:
    module = Moded()
    return module, lambda: module.drop.training


class Average(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self.weight.average = torch.zeros(16)  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.average.mul_(0.5).add_(self.weight.cpu())  # type: ignore[attr-defined]
        return x * self.weight * self.weight.average.sum().item()  # type: ignore[attr-defined]

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        average = self.weight.average  # type: ignore[attr-defined]
        super()._apply(*args, **kwargs)
        self.weight.average = average  # type: ignore[attr-defined]
        return self


@program
def average_on_a_parameter() -> Any:
    module = Average()
    return module, lambda: module.weight.average.tolist()  # type: ignore[attr-defined]


class Clipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm = nn.utils.clip_grad_norm_(self.parameters(), 0.001)
        return x * self.weight + norm.item()


@program
def clipped_gradients() -> Any:
    module = Clipping()
    return module, lambda: module.weight.grad.tolist()  # type: ignore[union-attr]


class Shrinking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = nn.utils.parameters_to_vector(self.parameters()).detach()
        nn.utils.vector_to_parameters(flat * 0.5, self.parameters())
        return x * self.weight


@program
def shrunk_parameters() -> Any:
    module = Shrinking()
    return module, lambda: module.weight.tolist()


# ---- objects that lie where names do not lead


@program
def singleton_of_a_cached_function() -> Any:
    @functools.cache
    def kept() -> list[int]:
        return [0]

    def odd(x: torch.Tensor) -> torch.Tensor:
        kept()[0] += 1
        return x * kept()[0]

    return odd, lambda: kept()[0]


@dataclasses.dataclass
class Progress:
    num_calls: int = 0


@functools.cache
def progress() -> Progress:
    return Progress()


@program
def object_of_a_cached_function() -> Any:
    progress().num_calls = 0

    def odd(x: torch.Tensor) -> torch.Tensor:
        progress().num_calls += 1
        return x * progress().num_calls

    return odd, lambda: progress().num_calls


@program
def iterator_of_a_cached_function() -> Any:
    @functools.cache
    def numbers() -> Iterator[int]:
        return itertools.count(1)

    return (lambda x: x * next(numbers())), lambda: next(numbers())


@program
def factory_of_a_dictionary() -> Any:
    kept: Any = collections.defaultdict(itertools.count(1).__next__)

    def odd(x: torch.Tensor) -> torch.Tensor:
        return x * kept[len(kept)]

    return odd, lambda: dict(kept)


@program
def order_of_a_set() -> Any:
    kept = set(range(1000))
    for each in range(1000):
        kept.discard(each)
    kept |= {65, 2}

    def odd(x: torch.Tensor) -> torch.Tensor:
        kept.add(200 + len(kept))
        return x * (1 + next(iter(kept)))

    return odd, lambda: list(kept)


@program
def children_of_a_generator() -> Any:
    draws = np.random.default_rng(3)
    return (lambda x: x * float(draws.spawn(1)[0].random())), lambda: draws.spawn(1)[0].random()


@program
def base_of_an_array() -> Any:
    part = np.zeros(1 << 15)[:2]

    def odd(x: torch.Tensor) -> torch.Tensor:
        part.base[100] += 1
        return x * float(part.base[100])

    return odd, lambda: float(part.base[100])


def _grown(module: Any) -> int:
    module.KEPT.append(1)
    return len(module.KEPT)


@program
def module_as_an_argument() -> Any:
    odd_state.KEPT.clear()
    return (lambda x: x * _grown(odd_state)), lambda: len(odd_state.KEPT)


def _state_module() -> types.ModuleType:
    return odd_state


@program
def module_that_is_returned() -> Any:
    odd_state.KEPT.clear()

    def odd(x: torch.Tensor) -> torch.Tensor:
        _state_module().KEPT.append(1)
        return x * len(_state_module().KEPT)

    return odd, lambda: len(odd_state.KEPT)


@program
def variable_of_a_module_by_getattr() -> Any:
    odd_state.KEPT.clear()

    def odd(x: torch.Tensor) -> torch.Tensor:
        getattr(odd_state, "KEPT").append(1)  # noqa: B009
        return x * len(getattr(odd_state, "KEPT"))  # noqa: B009

    return odd, lambda: len(odd_state.KEPT)


@program
def variable_of_a_module_by_its_dictionary() -> Any:
    odd_state.KEPT.clear()

    def odd(x: torch.Tensor) -> torch.Tensor:
        vars(odd_state)["KEPT"].append(1)
        return x * len(odd_state.__dict__["KEPT"])

    return odd, lambda: len(odd_state.KEPT)


KEPT_OF = operator.attrgetter("KEPT")
NUMBERS_OF = operator.attrgetter("numbers")


@program
def variable_of_a_module_by_attrgetter() -> Any:
    odd_state.KEPT.clear()

    def odd(x: torch.Tensor) -> torch.Tensor:
        KEPT_OF(odd_state).append(1)
        return x * len(KEPT_OF(odd_state))

    return odd, lambda: len(odd_state.KEPT)


@program
def iterator_by_attrgetter() -> Any:
    kept = types.SimpleNamespace(numbers=itertools.count(1))
    return (lambda x: x * next(NUMBERS_OF(kept))), lambda: next(kept.numbers)


@program
def iterator_by_methodcaller() -> Any:
    draw = operator.methodcaller("draw")
    kept = Drawing()
    return (lambda x: x * draw(kept)), lambda: draw(kept)


class Drawing:
    def __init__(self) -> None:
        self.numbers = itertools.count(1)

    def draw(self) -> int:
        return next(self.numbers)


@program
def names_of_a_function() -> Any:
    odd_state.KEPT.clear()

    def odd(x: torch.Tensor) -> torch.Tensor:
        kept = odd_state.size_of.__globals__["KEPT"]
        kept.append(1)
        return x * len(kept)

    return odd, lambda: len(odd_state.KEPT)


@program
def frame_of_the_caller() -> Any:
    kept = [0]

    def inner() -> int:
        frame = inspect.currentframe()
        assert frame is not None
        assert frame.f_back is not None
        held = frame.f_back.f_locals["held"]
        held[0] += 1
        return int(held[0])

    def odd(x: torch.Tensor) -> torch.Tensor:
        held = kept
        return x * inner() * len(held)

    return odd, lambda: kept[0]


@program
def free_memory() -> Any:
    seen: list[int] = []

    def odd(x: torch.Tensor) -> torch.Tensor:
        free, _ = torch.accelerator.get_memory_info()
        seen.append(1)
        return x * (1 if free > 0 else 2)

    return odd, lambda: len(seen)


# ---- what only a failing run does


class _Printed:
    """What is printed while it is there."""

    def __init__(self) -> None:
        self._before, self._text = sys.stdout, io.StringIO()
        sys.stdout = self._text

    def text(self) -> str:
        sys.stdout = self._before
        return self._text.getvalue()


@program
def finally_that_knows_of_the_failure() -> Any:
    printed = _Printed()

    def odd(x: torch.Tensor) -> torch.Tensor:
        is_done = False
        try:
            x = x.cos().sin().cos().sin().cos().sin().cos().sin()
            is_done = True
        finally:
            if not is_done:
                print("failed")
        return x

    return odd, printed.text


def _finish(is_done: list[bool]) -> None:
    if not is_done:
        print("failed")


@program
def finally_that_calls() -> Any:
    printed = _Printed()

    def odd(x: torch.Tensor) -> torch.Tensor:
        done: list[bool] = []
        try:
            x = x.cos().sin().cos().sin().cos().sin().cos().sin()
            done.append(True)
        finally:
            _finish(done)
        return x

    return odd, printed.text


@program
def stack_that_knows_of_the_failure() -> Any:
    printed = _Printed()

    def left(kind: Any, *_: Any) -> None:
        if kind is not None:
            print("failed")

    def odd(x: torch.Tensor) -> torch.Tensor:
        with contextlib.ExitStack() as stack:
            stack.push(left)
            return x.cos().sin().cos().sin().cos().sin().cos().sin()

    return odd, printed.text


@program
def warning_that_is_always_shown() -> Any:
    printed = _Printed()
    before, sys.stderr = sys.stderr, sys.stdout

    def odd(x: torch.Tensor) -> torch.Tensor:
        warnings.warn("odd", stacklevel=1)
        return x

    filters = warnings.filters[:]
    warnings.filterwarnings("always", "odd")

    def seen() -> str:
        sys.stderr, warnings.filters[:] = before, filters  # type: ignore[index]
        return str(printed.text().count("odd"))

    return odd, seen


# ---- ordinary ones


@program
def named_constants() -> Any:
    def odd(x: torch.Tensor) -> torch.Tensor:
        return x * (2 if odd_state.Kind.GELU == "gelu" else 3) * int(odd_state.Level.HIGH)

    return odd, lambda: 0


@program
def several_errors_that_are_no_lack_of_memory() -> Any:
    sizes = {16: 2}

    def odd(x: torch.Tensor) -> torch.Tensor:
        try:
            return x * sizes[x.shape[-1]]
        except (KeyError, IndexError):
            return x

    return odd, lambda: 0


@program
def shared_settings() -> Any:
    def odd(x: torch.Tensor) -> torch.Tensor:
        return x * odd_state.SCALE

    return odd, lambda: 0


@program
def copied_module_constants() -> Any:
    table = {"scale": 3.0}

    def odd(x: torch.Tensor) -> torch.Tensor:
        return x * copy.copy(table)["scale"]

    return odd, lambda: 0


class Rate:
    """A descriptor that counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __get__(self, owner: Any, kind: Any = None) -> int:
        self.asked += 1
        return self.asked


class Rated:
    rate = Rate()


@program
def descriptor_that_counts() -> Any:
    Rated.__dict__["rate"].asked = 0
    kept = Rated()
    return (lambda x: x * kept.rate), lambda: Rated.__dict__["rate"].asked


class Counted(type):
    num_made = 0

    def __call__(cls, *args: Any) -> Any:
        Counted.num_made += 1
        return super().__call__(*args)


class Made(metaclass=Counted):
    pass


@program
def metaclass_that_counts() -> Any:
    Counted.num_made = 0

    def odd(x: torch.Tensor) -> torch.Tensor:
        Made()
        return x * Counted.num_made

    return odd, lambda: Counted.num_made


class Asked:
    def __init__(self) -> None:
        self.kept: dict[str, int] = {}

    def __getattr__(self, name: str) -> int:
        kept = self.__dict__["kept"]
        kept[name] = kept.get(name, 0) + 1
        return int(kept[name])


@program
def missing_attribute_that_counts() -> Any:
    kept = Asked()
    return (lambda x: x * kept.anything), lambda: dict(kept.kept)


@dataclasses.dataclass(frozen=True)
class Frozen:
    num_calls: int = 0

    def count(self) -> int:
        object.__setattr__(self, "num_calls", self.num_calls + 1)
        return self.num_calls


@program
def frozen_dataclass_that_counts() -> Any:
    kept = Frozen()
    return (lambda x: x * kept.count()), lambda: kept.num_calls


@program
def function_that_is_used_once() -> Any:
    kept = types.SimpleNamespace(prepare=lambda: 2)

    def odd(x: torch.Tensor) -> torch.Tensor:
        first, kept.prepare = kept.prepare, None
        kept.prepare = first if first is None else (lambda: 5)
        return x * (1 if first is None else first())

    return odd, lambda: kept.prepare()


@program
def list_of_functions() -> Any:
    order: list[Callable[[int], int]] = [lambda n: n + 1, lambda n: n * 3]

    def odd(x: torch.Tensor) -> torch.Tensor:
        order.reverse()
        return x * order[0](order[1](1))

    return odd, lambda: order[0](1)


class Named(nn.Module):
    """Holds a set whose order is that of its filling: 7 and 15 ask for the same place in it."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks: set[int] = set()
        self.ranks.update((7, 15))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * next(iter(self.ranks))


@program
def set_in_the_order_of_its_filling() -> Any:
    odd = Named()
    return odd, lambda: list(odd.ranks)
