"""Odd forwards: each keeps something somewhere, and lets what it has kept decide the loss.

A program is made anew for each run. It gives a function that the model's forward calls with a tensor, and one that says
what has been kept by then.
"""

from __future__ import annotations

import abc
import array
import collections
import contextlib
import contextvars
import copy
import ctypes
import dataclasses
import enum
import functools
import heapq
import io
import itertools
import json
import logging
import os
import pathlib
import queue
import random
import sys
import tempfile
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

from tests.techniques.offload.runs import DEVICE

Odd = Callable[[torch.Tensor], torch.Tensor]
PROGRAMS: dict[str, Callable[[], tuple[Odd, Callable[[], Any]]]] = {}


def program(make: Callable[[], Any]) -> Callable[[], Any]:
    PROGRAMS[make.__name__] = make
    return make


# ---- what can be put back, or cannot change


@program
def closure_counter() -> Any:
    count = 0

    def odd(x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return x * count

    return odd, lambda: count


COUNT = 0


@program
def global_counter() -> Any:
    global COUNT
    COUNT = 0

    def odd(x: torch.Tensor) -> torch.Tensor:
        global COUNT
        COUNT += 1
        return x * COUNT

    return odd, lambda: COUNT


class Counts:
    calls = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        Counts.calls += 1
        return x * Counts.calls


@program
def class_attribute() -> Any:
    Counts.calls = 0
    return Counts(), lambda: Counts.calls


@dataclasses.dataclass
class Totals:
    calls: int = 0
    sizes: list[int] = dataclasses.field(default_factory=list)


@program
def dataclass_with_a_list() -> Any:
    totals = Totals()

    def odd(x: torch.Tensor) -> torch.Tensor:
        totals.calls += 1
        totals.sizes.append(len(totals.sizes) + x.shape[0])
        return x * totals.sizes[-1]

    return odd, lambda: (totals.calls, tuple(totals.sizes))


@program
def deque_and_counter() -> Any:
    last: collections.deque[int] = collections.deque([1], maxlen=3)
    seen: collections.Counter[int] = collections.Counter()

    def odd(x: torch.Tensor) -> torch.Tensor:
        last.append(last[-1] + 1)
        seen[x.shape[0]] += 1
        return x * last[0] * seen[x.shape[0]]

    return odd, lambda: (tuple(last), dict(seen))


class Slotted:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


@program
def slots() -> Any:
    slotted = Slotted()

    def odd(x: torch.Tensor) -> torch.Tensor:
        slotted.calls += 1
        return x * slotted.calls

    return odd, lambda: slotted.calls


@program
def default_argument() -> Any:
    def odd(x: torch.Tensor, seen: list[int] = [0]) -> torch.Tensor:  # noqa: B006
        seen[0] += 1
        return x * seen[0]

    odd.__defaults__[0][0] = 0
    return odd, lambda: odd.__defaults__[0][0]


@program
def function_attribute() -> Any:
    def odd(x: torch.Tensor) -> torch.Tensor:
        odd.calls += 1  # type: ignore[attr-defined]
        return x * odd.calls  # type: ignore[attr-defined]

    odd.calls = 0  # type: ignore[attr-defined]
    return odd, lambda: odd.calls  # type: ignore[attr-defined]


@program
def python_generator() -> Any:
    draws = random.Random(3)
    return (lambda x: x * draws.random()), draws.random


@program
def numpy_generator() -> Any:
    draws = np.random.default_rng(3)
    return (lambda x: x * float(draws.random())), draws.random


@program
def torch_generator() -> Any:
    draws = torch.Generator().manual_seed(3)
    return (lambda x: x * torch.rand((), generator=draws).item()), lambda: torch.rand((), generator=draws).item()


@program
def global_generators() -> Any:
    random.seed(5)
    np.random.seed(5)

    def odd(x: torch.Tensor) -> torch.Tensor:
        return x * random.random() * float(np.random.rand()) * torch.rand(()).item()

    return odd, lambda: (random.random(), float(np.random.rand()))


@program
def small_numpy_array() -> Any:
    totals = np.zeros(2)

    def odd(x: torch.Tensor) -> torch.Tensor:
        totals[0] += 1
        return x * float(totals[0])

    return odd, lambda: totals.tolist()


@program
def arrays_of_bytes() -> Any:
    first, second = bytearray(2), array.array("d", [0.0])

    def odd(x: torch.Tensor) -> torch.Tensor:
        first[0] += 1
        second[0] += 0.5
        return x * first[0] * second[0]

    return odd, lambda: (bytes(first), list(second))


@program
def cached_function() -> Any:
    calls: list[int] = []

    @functools.lru_cache
    def prepared(size: int) -> float:
        calls.append(size)
        return 1.0 + len(calls)

    return (lambda x: x * prepared(x.shape[0])), lambda: tuple(calls)


@program
def cached_function_of_changing_keys() -> Any:
    calls: list[int] = []

    @functools.lru_cache
    def prepared(size: int) -> float:
        return 1.0 + size

    def odd(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x * prepared(len(calls))

    return odd, lambda: (tuple(calls), prepared.cache_info().misses)


@program
def filled_cache_that_forgets() -> Any:
    made: list[int] = []

    @functools.lru_cache(maxsize=1)
    def prepared(size: int) -> float:
        made.append(size)
        return 1.0 + len(made)

    def odd(x: torch.Tensor) -> torch.Tensor:
        return x * prepared(1) * prepared(2)

    return odd, lambda: len(made)


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@program
def attribute_of_an_enumeration() -> Any:
    Colour.RED.used = 0  # type: ignore[attr-defined]

    def odd(x: torch.Tensor) -> torch.Tensor:
        Colour.RED.used += 1  # type: ignore[attr-defined]
        return x * Colour.RED.used  # type: ignore[attr-defined]

    return odd, lambda: Colour.RED.used  # type: ignore[attr-defined]


class Settings(NamedTuple):
    scales: list[float]


@program
def list_in_a_named_tuple() -> Any:
    settings = Settings([1.0])

    def odd(x: torch.Tensor) -> torch.Tensor:
        settings.scales[0] += 1
        return x * settings.scales[0]

    return odd, lambda: tuple(settings.scales)


@program
def heap() -> Any:
    waiting = [3, 5, 9]

    def odd(x: torch.Tensor) -> torch.Tensor:
        return x * heapq.heappushpop(waiting, waiting[-1] + 1)

    return odd, lambda: tuple(waiting)


@program
def generator_function() -> Any:
    limit = [2]

    def scales() -> Iterator[int]:
        for each in range(limit[0]):
            limit[0] += 1
            yield each + 1
            if each > 3:
                return

    return (lambda x: x * sum(scales())), lambda: limit[0]


@program
def simple_namespace() -> Any:
    kept = types.SimpleNamespace(calls=0)

    def odd(x: torch.Tensor) -> torch.Tensor:
        kept.calls += 1
        return x * kept.calls

    return odd, lambda: kept.calls


class Named(dict[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setitem__("changes", self.get("changes", 0) + 1)


@program
def derived_dictionary() -> Any:
    kept = Named(calls=0)

    def odd(x: torch.Tensor) -> torch.Tensor:
        kept["calls"] = kept["calls"] + 1
        return x * kept["changes"]

    return odd, lambda: dict(kept)


class Abstract(abc.ABC):
    total = 0

    @abc.abstractmethod
    def scale(self) -> int: ...


class Concrete(Abstract):
    def scale(self) -> int:
        type(self).total += 1
        return self.total


@program
def abstract_class() -> Any:
    Concrete.total = 0
    concrete = Concrete()
    return (lambda x: x * concrete.scale()), lambda: Concrete.total


@program
def context_manager_function() -> Any:
    depth = [0]

    @contextlib.contextmanager
    def deeper() -> Iterator[int]:
        depth[0] += 1
        try:
            yield depth[0]
        finally:
            depth[0] += 1

    def odd(x: torch.Tensor) -> torch.Tensor:
        with deeper() as scale:
            return x * scale

    return odd, lambda: depth[0]


# ---- what cannot be seen, or not be put back


@program
def iterator() -> Any:
    numbers = itertools.count(1)
    return (lambda x: x * next(numbers)), lambda: next(numbers)


@program
def iterator_in_a_loop() -> Any:
    numbers = iter(range(100))

    def odd(x: torch.Tensor) -> torch.Tensor:
        for number in numbers:
            return x * (number + 1)
        return x

    return odd, lambda: next(numbers)


@program
def bound_next() -> Any:
    draw = itertools.count(1).__next__
    return (lambda x: x * draw()), draw


@program
def partial_of_next() -> Any:
    draw = functools.partial(next, itertools.count(1))
    return (lambda x: x * draw()), draw


@program
def mapped_over_an_iterator() -> Any:
    numbers = itertools.count(1)

    def odd(x: torch.Tensor) -> torch.Tensor:
        return x * tree_map(numbers.__class__.__next__, [numbers])[0]

    return odd, lambda: next(numbers)


@program
def started_generator() -> Any:
    def count() -> Iterator[int]:
        number = 1
        while True:
            yield number
            number += 1

    numbers = count()
    next(numbers)
    return (lambda x: x * next(numbers)), lambda: next(numbers)


@program
def queue_object() -> Any:
    waiting: queue.Queue[int] = queue.Queue()

    def odd(x: torch.Tensor) -> torch.Tensor:
        waiting.put(1)
        return x * waiting.qsize()

    return odd, waiting.qsize


@program
def simple_queue() -> Any:
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()

    def odd(x: torch.Tensor) -> torch.Tensor:
        waiting.put(1)
        return x * waiting.qsize()

    return odd, waiting.qsize


@program
def file_of_lines() -> Any:
    path = pathlib.Path(tempfile.mkdtemp()) / "lines"
    path.write_text("")

    def odd(x: torch.Tensor) -> torch.Tensor:
        with path.open("a") as file:
            file.write("1\n")
        return x * len(path.read_text().split())

    return odd, path.read_text


@program
def text_buffer() -> Any:
    text = io.StringIO()

    def odd(x: torch.Tensor) -> torch.Tensor:
        return x * text.write("12")

    return odd, text.getvalue


@program
def printed_line() -> Any:
    text = io.StringIO()

    def odd(x: torch.Tensor) -> torch.Tensor:
        print("line", file=text)
        return x

    return odd, text.getvalue


class Handler(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.num_lines = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.num_lines += 1


LOGGER = logging.getLogger("odd programs")


@program
def logged_line() -> Any:
    handler = Handler()
    LOGGER.handlers[:] = [handler]
    LOGGER.propagate = False

    def odd(x: torch.Tensor) -> torch.Tensor:
        LOGGER.warning("line")
        return x

    return odd, lambda: handler.num_lines


@program
def quiet_log() -> Any:
    def odd(x: torch.Tensor) -> torch.Tensor:
        LOGGER.debug("line")
        return x * 2

    return odd, lambda: 0


@program
def environment() -> Any:
    os.environ["MEMSCALE_TEST_ODD"] = "0"

    def odd(x: torch.Tensor) -> torch.Tensor:
        os.environ["MEMSCALE_TEST_ODD"] = str(int(os.environ["MEMSCALE_TEST_ODD"]) + 1)
        return x * int(os.environ["MEMSCALE_TEST_ODD"])

    return odd, lambda: os.environ.pop("MEMSCALE_TEST_ODD")


@program
def loaded_modules() -> Any:
    sys.modules.pop("odd_of_memscale", None)

    def odd(x: torch.Tensor) -> torch.Tensor:
        kept = sys.modules.setdefault("odd_of_memscale", types.SimpleNamespace(calls=0))  # type: ignore[arg-type]
        kept.calls += 1
        return x * kept.calls

    return odd, lambda: sys.modules.pop("odd_of_memscale").calls


@program
def made_up_name() -> Any:
    globals()["MADE_UP_1"] = 0

    def odd(x: torch.Tensor) -> torch.Tensor:
        globals()["MADE_UP_" + str(1)] += 1
        return x * globals()["MADE_UP_" + str(1)]

    return odd, lambda: globals().pop("MADE_UP_1")


VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("VARIABLE", default=0)


@program
def context_variable() -> Any:
    VARIABLE.set(0)

    def odd(x: torch.Tensor) -> torch.Tensor:
        VARIABLE.set(VARIABLE.get() + 1)
        return x * VARIABLE.get()

    return odd, VARIABLE.get


@program
def thread_local() -> Any:
    kept = threading.local()
    kept.calls = 0

    def odd(x: torch.Tensor) -> torch.Tensor:
        kept.calls += 1
        return x * kept.calls

    return odd, lambda: kept.calls


@program
def derived_thread_local() -> Any:
    class Kept(threading.local):
        calls = 0

    kept = Kept()

    def odd(x: torch.Tensor) -> torch.Tensor:
        kept.calls += 1
        return x * kept.calls

    return odd, lambda: kept.calls


@program
def weak_dictionary() -> Any:
    key = Counts()
    kept: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary({key: 0})

    def odd(x: torch.Tensor) -> torch.Tensor:
        kept[key] += 1
        return x * kept[key]

    return odd, lambda: kept[key]


@program
def behind_a_weak_reference() -> Any:
    totals = Totals()
    reference = weakref.ref(totals)
    alive = [totals]

    def odd(x: torch.Tensor) -> torch.Tensor:
        kept = reference()
        assert kept is not None
        kept.calls += 1
        return x * kept.calls

    return odd, lambda: alive[0].calls


@program
def number_of_c() -> Any:
    number = ctypes.c_int(0)

    def odd(x: torch.Tensor) -> torch.Tensor:
        number.value += 1
        return x * number.value

    return odd, lambda: number.value


@program
def memory_of_c() -> Any:
    numbers = (ctypes.c_int * 2)()
    pointer = ctypes.cast(numbers, ctypes.POINTER(ctypes.c_int))

    def odd(x: torch.Tensor) -> torch.Tensor:
        pointer[0] += 1
        return x * pointer[0]

    return odd, lambda: numbers[0]


@program
def memory_view() -> Any:
    memory = memoryview(bytearray(2))

    def odd(x: torch.Tensor) -> torch.Tensor:
        memory[0] += 1
        return x * memory[0]

    return odd, lambda: memory[0]


@program
def array_of_objects() -> Any:
    kept = np.empty(1, dtype=object)
    kept[0] = [0]

    def odd(x: torch.Tensor) -> torch.Tensor:
        kept[0][0] += 1
        return x * kept[0][0]

    return odd, lambda: kept[0][0]


@program
def derived_array() -> Any:
    class Kept(np.ndarray[Any, Any]):
        pass

    kept = np.zeros(2).view(Kept)

    def odd(x: torch.Tensor) -> torch.Tensor:
        kept[0] += 1
        return x * float(kept[0])

    return odd, lambda: float(kept[0])


@program
def thread_that_counts() -> Any:
    calls: list[int] = []

    def odd(x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=calls.append, args=(1,))
        thread.start()
        thread.join()
        return x * len(calls)

    return odd, lambda: len(calls)


@program
def clock() -> Any:
    start = time.monotonic_ns()
    times: list[int] = []

    def odd(x: torch.Tensor) -> torch.Tensor:
        times.append(time.monotonic_ns() - start)
        return x

    return odd, lambda: len(times)


@program
def warning_registry() -> Any:
    def odd(x: torch.Tensor) -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.warn("odd", stacklevel=1)
        return x * 2

    return odd, lambda: 0


class Dying:
    died = 0

    def __del__(self) -> None:
        Dying.died += 1


@program
def finalizer() -> Any:
    Dying.died = 0

    def odd(x: torch.Tensor) -> torch.Tensor:
        Dying()
        return x * Dying.died

    return odd, lambda: Dying.died


class Entered:
    depth = 0

    def __enter__(self) -> int:
        return 2

    def __exit__(self, kind: Any, *_: Any) -> None:
        Entered.depth += 0 if kind is None else 1


@program
def context_manager_that_sees_errors() -> Any:
    Entered.depth = 0

    def odd(x: torch.Tensor) -> torch.Tensor:
        with Entered() as scale:
            return (x * scale).cos().sin().cos().sin() + Entered.depth

    return odd, lambda: Entered.depth


@program
def handler_that_remembers() -> Any:
    path = pathlib.Path(tempfile.mkdtemp()) / "errors"
    path.write_text("")

    def odd(x: torch.Tensor) -> torch.Tensor:
        try:
            return x.cos().sin().cos().sin().cos().sin()
        except RuntimeError:
            path.write_text("an error")
            raise

    return odd, path.read_text


@program
def memory_error_that_is_survived() -> Any:
    kept = Totals()

    def odd(x: torch.Tensor) -> torch.Tensor:
        with contextlib.suppress(RuntimeError):
            x = x.cos()
            kept.calls += 1
        return x * kept.calls

    return odd, lambda: kept.calls


# ---- tensors


@program
def hidden_tensor_written_in_place() -> Any:
    total = torch.zeros((), device=DEVICE)

    def odd(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            total.add_(1)
        return x * total.item()

    return odd, total.item


@program
def tensor_written_through_data() -> Any:
    total = torch.zeros(())

    def odd(x: torch.Tensor) -> torch.Tensor:
        total.data.add_(1)
        return x * total.item()

    return odd, total.item


@program
def tensor_written_through_numpy() -> Any:
    total = torch.zeros(())

    def odd(x: torch.Tensor) -> torch.Tensor:
        total.numpy()[...] += 1
        return x * total.item()

    return odd, total.item


@program
def numpy_written_through_a_tensor() -> Any:
    total = np.zeros(1 << 15)

    def odd(x: torch.Tensor) -> torch.Tensor:
        torch.from_numpy(total).add_(1)
        return x * float(total[0])

    return odd, lambda: float(total[0])


@program
def statistics_outside_of_buffers() -> Any:
    mean, variance = torch.zeros(16, device=DEVICE), torch.ones(16, device=DEVICE)

    def odd(x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, mean, variance, training=True) * float(mean.sum())

    return odd, lambda: mean.cpu().tolist()


@program
def hidden_module_in_a_list() -> Any:
    hidden = [nn.BatchNorm1d(16, affine=False).to(DEVICE)]
    return (lambda x: hidden[0](x)), lambda: hidden[0].running_mean.cpu().tolist()


@program
def loss_without_weights() -> Any:
    criterion = nn.MSELoss()
    return (lambda x: x * criterion(x, x + 1)), lambda: criterion.training


@program
def attribute_of_a_tensor() -> Any:
    total = torch.zeros(())
    total.calls = 0  # type: ignore[attr-defined]

    def odd(x: torch.Tensor) -> torch.Tensor:
        total.calls += 1  # type: ignore[attr-defined]
        return x * total.calls  # type: ignore[attr-defined]

    return odd, lambda: total.calls  # type: ignore[attr-defined]


class Scaled(torch.autograd.Function):
    """Counts in static state, in forward and in backward."""

    forwards = 0
    backwards = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Scaled.forwards += 1
        ctx.scale = Scaled.forwards
        return x * ctx.scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        Scaled.backwards += 1
        return gradient * ctx.scale * Scaled.backwards


@program
def static_state_of_a_function() -> Any:
    Scaled.forwards = Scaled.backwards = 0
    return Scaled.apply, lambda: (Scaled.forwards, Scaled.backwards)


@program
def functional_transform() -> Any:
    def odd(x: torch.Tensor) -> torch.Tensor:
        return x * torch.func.grad(lambda y: (y**3).sum())(x)

    return odd, lambda: 0


@program
def hook_that_is_registered_again() -> Any:
    calls: list[int] = []
    layer = nn.Identity()

    def odd(x: torch.Tensor) -> torch.Tensor:
        layer.register_forward_pre_hook(lambda *_: calls.append(1))
        return layer(x) * len(calls)

    return odd, lambda: len(calls)


@program
def random_state_that_is_seeded() -> Any:
    steps = [0]

    def odd(x: torch.Tensor) -> torch.Tensor:
        steps[0] += 1
        torch.manual_seed(steps[0])
        return F.dropout(x, 0.5)

    return odd, lambda: (steps[0], torch.rand(()).item())


@program
def default_that_is_set() -> Any:
    torch.set_default_dtype(torch.float32)
    order = [torch.float32, torch.float64]

    def odd(x: torch.Tensor) -> torch.Tensor:
        before = torch.get_default_dtype()
        torch.set_default_dtype(order[before == torch.float32])
        return x * (1 + (before == torch.float32))

    def seen() -> str:
        now = str(torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
        return now

    return odd, seen


@program
def data_loader() -> Any:
    loader = iter(torch.utils.data.DataLoader(list(range(1, 100)), batch_size=1))
    return (lambda x: x * next(loader).item()), lambda: next(loader).item()


@program
def copied_object() -> Any:
    kept = {"calls": [0]}

    def odd(x: torch.Tensor) -> torch.Tensor:
        kept["calls"][0] += 1
        return x * copy.deepcopy(kept)["calls"][0]

    return odd, lambda: kept["calls"][0]


@program
def text_of_json() -> Any:
    kept = {"calls": 0}

    def odd(x: torch.Tensor) -> torch.Tensor:
        kept.update(json.loads(json.dumps({"calls": kept["calls"] + 1})))
        return x * kept["calls"]

    return odd, lambda: kept["calls"]


@program
def function_that_is_exchanged() -> Any:
    def first(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def second(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    now = first

    def odd(x: torch.Tensor) -> torch.Tensor:
        nonlocal now
        result = now(x)
        now = second if now is first else first
        return result

    return odd, lambda: now is first


class Switched:
    scale = staticmethod(lambda x: x * 2)


@program
def method_that_is_exchanged() -> Any:
    Switched.scale = staticmethod(lambda x: x * 2)

    def odd(x: torch.Tensor) -> torch.Tensor:
        result = Switched.scale(x)
        Switched.scale = staticmethod(lambda x: x * 3)
        return result

    return odd, lambda: float(Switched.scale(1))


@program
def evaluated_text() -> Any:
    kept = [0]
    namespace = {"kept": kept}

    def odd(x: torch.Tensor) -> torch.Tensor:
        exec("kept[0] += 1", namespace)
        return x * kept[0]

    return odd, lambda: kept[0]


@program
def imported_inside() -> Any:
    from tests._torch import beside_state

    beside_state.count = 0

    def odd(x: torch.Tensor) -> torch.Tensor:
        from tests._torch import beside_state as kept

        kept.count += 1
        return x * kept.count

    return odd, lambda: beside_state.count


@program
def getattr_by_made_up_names() -> Any:
    kept = types.SimpleNamespace(calls_1=0, numbers_1=itertools.count(1))

    def odd(x: torch.Tensor) -> torch.Tensor:
        return x * next(getattr(kept, "numbers_" + str(1)))

    return odd, lambda: next(kept.numbers_1)


class Proxy:
    def __init__(self, kept: Any) -> None:
        self._kept = kept

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        return type(self._kept)

    def add(self) -> int:
        self._kept.append(1)
        return len(self._kept)


@program
def proxy() -> Any:
    kept: list[int] = []
    stands_for = Proxy(kept)
    return (lambda x: x * stands_for.add()), lambda: len(kept)
