"""Draws of the host's generators in a rehearsal: Python's and NumPy's are as high or as low as `Values` say.

LayerDrop and stochastic depth may ask Python or NumPy for their numbers, and these decide how deep a step is, as those
of `torch.rand` do (see `values`). Other threads, which may train meanwhile, draw as they always did.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

from memscale._profile.values import Values
from memscale._torch.host_rng import Fingerprint
from memscale._torch.interception import replaced_in_this_thread


@contextlib.contextmanager
def drawn_by_host(values: Values) -> Iterator[None]:
    """Uniform numbers of Python's and NumPy's global generators are as high or low as `values` say.

    Others repeat themselves, and that there were some is noted: a name that was imported before (`from random import
    random`) is not in our hands, and no more are other distributions.
    """
    chance = _Chance(values)
    random.seed(values.seed)
    torch.default_generator.manual_seed(values.seed)  # not those of devices
    names = ("random", "uniform", "randrange", "randint", "choice")
    with contextlib.ExitStack() as undo:
        undo.enter_context(replaced_in_this_thread(random, **{name: getattr(chance, name) for name in names}))
        undo.enter_context(_drawn_by_numpy(chance, values.seed))
        before = Fingerprint()
        try:
            yield
        finally:
            values.was_host_asked |= before.moved()


class _Chance:
    """Stands in for uniform draws of Python's generator."""

    def __init__(self, values: Values) -> None:
        self._values = values

    def random(self) -> float:
        self._values.was_draw_asked = True
        return self._values.share

    def uniform(self, a: float = 0.0, b: float = 1.0) -> float:
        return a + (b - a) * self.random()

    def randrange(self, start: int, stop: int | None = None, step: int = 1) -> int:
        numbers = range(start) if stop is None else range(start, stop, step)
        if not numbers:
            raise ValueError(f"the range of {start}, {stop}, {step} is empty")
        return numbers[int(self.random() * len(numbers))]

    def randint(self, a: int, b: int) -> int:
        return self.randrange(a, b + 1)

    def choice(self, seq: Any) -> Any:
        return seq[self.randrange(len(seq))]


@contextlib.contextmanager
def _drawn_by_numpy(chance: _Chance, seed: int) -> Iterator[None]:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        yield
        return

    def drawn(size: Any = None) -> Any:
        return chance.random() if size is None else numpy.full(size, chance.random())

    def rand(*shape: int) -> Any:
        return drawn(shape or None)

    def uniform(low: Any = 0.0, high: Any = 1.0, size: Any = None) -> Any:
        return low + (numpy.subtract(high, low)) * drawn(size)

    def randint(low: Any, high: Any = None, size: Any = None, dtype: Any = int) -> Any:
        low, high = (0, low) if high is None else (low, high)
        number = numpy.floor(uniform(low, high, size)).astype(dtype)
        return number.item() if size is None and not number.shape else number

    numpy.random.seed(seed)
    with (
        replaced_in_this_thread(numpy.random, rand=rand, uniform=uniform, randint=randint),
        replaced_in_this_thread(numpy.random, random=drawn, random_sample=drawn, ranf=drawn, sample=drawn),
    ):
        yield
