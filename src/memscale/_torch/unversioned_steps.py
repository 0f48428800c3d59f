"""Optimizer steps that change parameters without a new version: those of fused kernels, which autograd is not told of.

    undo = STEPS.watch()
    moment = STEPS.count
    ...
    STEPS.has_stepped(parameter, since=moment)
    raise_version(parameter, num_changes)       # as often as the step has raised that of what stood in for it

Every parameter is looked at: groups of one optimizer may differ in `fused`, and a hook of the user's may have changed
one parameter in the ordinary way. Gradients are looked at when the step is over, because closures make them in it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from memscale._torch.optimizer_steps import StepArguments, StepWatcher, parameters_of, watch_steps

_Before = tuple[weakref.ref[torch.Tensor], int]


class UnversionedSteps(StepWatcher):
    """The last such step of every parameter, while anybody watches."""

    def __init__(self) -> None:
        self.count = 0
        """How many such steps there have been."""
        self._last: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._before: weakref.WeakKeyDictionary[Optimizer, list[_Before]] = weakref.WeakKeyDictionary()
        """The parameters of the steps that are being taken, with their versions. A step that fails leaves its own."""
        self._num_watching = 0
        self._leave: Callable[[], None] | None = None
        self._lock = threading.RLock()

    def watch(self) -> Callable[[], None]:
        """Look at steps from now on. Returns what undoes that."""
        with self._lock:
            self._num_watching += 1
            if self._leave is None:
                self._leave = watch_steps(self)
        return self._unwatch

    def _unwatch(self) -> None:
        with self._lock:
            self._num_watching -= 1
            if self._num_watching == 0 and self._leave is not None:
                leave, self._leave = self._leave, None
                leave()
                self._last.clear()

    def concerns(self, optimizer: Optimizer) -> bool:
        return True

    def before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepArguments | None:
        found = parameters_of(optimizer)
        self._before[optimizer] = [(weakref.ref(p), p._version) for p in found if not p.is_inference()]
        return None

    def after_step(self, optimizer: Optimizer) -> None:
        before = [(reference(), version) for reference, version in self._before.pop(optimizer, ())]
        same = [parameter for parameter, version in before if parameter is not None and parameter._version == version]
        self.note([parameter for parameter in same if parameter.grad is not None])

    def note(self, stepped: Iterable[torch.Tensor]) -> None:
        """There was such a step of these parameters."""
        references = {id(parameter): weakref.ref(parameter) for parameter in stepped}
        if references:
            self.count += 1
            self._last |= {key: (reference, self.count) for key, reference in references.items()}

    def has_stepped(self, parameter: torch.Tensor, *, since: int) -> bool:
        """Whether there was such a step of this parameter after the count was this."""
        return self.count != since and self.last_of(parameter) > since

    def last_of(self, parameter: torch.Tensor) -> int:
        """The number of its last such step; 0 if there was none."""
        reference, number = self._last.get(id(parameter), (None, 0))
        return number if reference is not None and reference() is parameter else 0


STEPS = UnversionedSteps()


def raise_version(parameter: torch.Tensor, num_changes: int) -> None:
    """Raise a parameter's version as often as its step has changed, as far as autograd knows, what stood in for it.

    A layer may remember something by that number (`weight._version`). A fused step does not raise it, and is noted.
    """
    if num_changes > 0:
        torch.autograd.graph.increment_version([parameter] * num_changes)
    else:
        STEPS.note([parameter])
