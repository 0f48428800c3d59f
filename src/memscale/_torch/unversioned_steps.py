"""Optimizer steps that change parameters without a new version: those of fused kernels, which autograd is not told of.

    undo = STEPS.watch()
    moment = STEPS.count
    ...
    STEPS.has_stepped(parameter, since=moment)

Every parameter is looked at: groups of one optimizer may differ in `fused`, and a hook of the user's may have changed
one parameter in the ordinary way. Gradients are looked at when the step is over, because closures make them in it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from memscale._torch.optimizer_steps import StepArguments, StepWatcher, parameters_of, watch_steps


class UnversionedSteps(StepWatcher):
    """The last such step of every parameter, while anybody watches."""

    def __init__(self) -> None:
        self.count = 0
        """How many such steps there have been."""
        self._last: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._before: weakref.WeakKeyDictionary[Optimizer, list[tuple[torch.Tensor, int]]] = weakref.WeakKeyDictionary()
        """The parameters of the steps that are being taken, with their versions."""
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
        self._before[optimizer] = [(p, p._version) for p in parameters_of(optimizer) if not p.is_inference()]
        return None

    def after_step(self, optimizer: Optimizer) -> None:
        same = [parameter for parameter, version in self._before.pop(optimizer, ()) if parameter._version == version]
        stepped = [parameter for parameter in same if parameter.grad is not None]
        if stepped:
            self.count += 1
            self._last |= {id(parameter): (weakref.ref(parameter), self.count) for parameter in stepped}

    def has_stepped(self, parameter: torch.Tensor, *, since: int) -> bool:
        """Whether there was such a step of this parameter after the count was this."""
        if self.count == since:
            return False
        reference, number = self._last.get(id(parameter), (None, 0))
        return reference is not None and reference() is parameter and number > since


STEPS = UnversionedSteps()
