"""Forward and backward of a plan that were recorded, for plans that differ from it in the optimizer's step alone.

    passes: KnownPasses = []
    shortcuts = Shortcuts(passes=passes)
    record_steps(..., under=UnderPlan(rules=rules), shortcuts=shortcuts)     # forward and backward run, and are kept
    record_steps(..., under=UnderPlan(rules=others), shortcuts=shortcuts)    # they are taken from there

An optimizer's step sees nothing of what came before it but parameters and gradients, and a step ends with what forward
and backward have left. So the log of a step is put together from the two. Serial numbers are given in order, so what
is there before the first step must be the same; `Passed.suits` says whether it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from memscale._planning.reserved.allocation_log import AllocationLog, Event, LogState
from memscale._planning.reserved.lengthened import Mark
from memscale._torch import private
from memscale._torch.waiting_gradients import is_waiting, waiting_elsewhere


@dataclasses.dataclass(frozen=True, slots=True)
class Gradient:
    """What a parameter's gradient is like."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    waits: bool = False
    """It waits elsewhere, and takes nothing on the device."""

    def make(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclasses.dataclass(frozen=True, slots=True)
class Passed:
    """What one forward and backward have allocated and freed, and what they have left."""

    before: frozenset[Event]
    """What was there when the step began."""
    start: LogState
    """The log when they began, and when they ended."""
    end: LogState
    events: tuple[Event, ...]
    marks: tuple[Mark, ...]
    gradients: tuple[Gradient | None, ...]
    """What each parameter's is like, in their order."""
    ended: tuple[Event, ...]
    """What the end of the step frees."""
    levels: tuple[int, int]

    def suits(self, log: AllocationLog) -> bool:
        """Whether the same would happen on what this log has."""
        return self.start == log.state and self.before == frozenset(log.before)


KnownPasses = list[Passed]
"""Forward and backward of one plan, or nothing yet. What learns from a step is not kept: the next would be another."""


def gradients_of(parameters: Iterable[nn.Parameter]) -> tuple[Gradient | None, ...] | None:
    """What their gradients are like; None where two of them lie in one memory, or one is not strided."""
    found: list[Gradient | None] = []
    keys = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            found.append(None)
            continue
        if is_waiting(gradient):
            found.append(Gradient(gradient.shape, gradient.stride(), gradient.dtype, gradient.device, waits=True))
            continue
        if gradient.layout is not torch.strided:
            return None
        keys.append(private.storage_key(gradient.untyped_storage()))
        found.append(Gradient(gradient.shape, gradient.stride(), gradient.dtype, gradient.device))
    return tuple(found) if len(set(keys)) == len(keys) else None


def made_again(known: Passed, parameters: Iterable[nn.Parameter]) -> Iterator[torch.Tensor]:
    """Give parameters the gradients that forward and backward have left, one by one."""
    for parameter, gradient in zip(parameters, known.gradients, strict=True):
        if gradient is not None and gradient.waits:
            parameter.grad = waiting_elsewhere(parameter)
        elif gradient is not None:
            parameter.grad = gradient.make()
            yield parameter.grad
