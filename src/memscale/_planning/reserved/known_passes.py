"""Forward and backward of a plan that were recorded, for plans that differ from it in the optimizer's step alone.

    passes: KnownPasses = []
    shortcuts = Shortcuts(passes=passes)
    record_steps(..., under=UnderPlan(rules=rules), shortcuts=shortcuts)     # forward and backward run, and are kept
    record_steps(..., under=UnderPlan(rules=others), shortcuts=shortcuts)    # they are taken from there

An optimizer's step sees nothing of what came before it but parameters and gradients, and a step ends with what forward
and backward have left. So the log of a step is put together from the two. Serial numbers are given in order, so what
is there before the first step must be the same; `Passed.suits` says whether it is. Where what is attached learns from a
step, two passes are kept: the second goes on where the optimizer's first step has ended, with other serial numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from memscale._planning.reserved.allocation_log import Allocated, AllocationLog, Event, Freed, LogState, Moment
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
class Stretch:
    """A part of a log: one forward and backward, with what the end of the step frees."""

    start: LogState
    end: LogState
    """The log when they ended, before the optimizer stepped."""
    events: tuple[Event, ...]
    marks: tuple[Mark, ...]
    moments: tuple[Moment, ...]
    ended: tuple[Event, ...]
    """What the end of the step frees."""

    def moved_to(self, state: LogState) -> Stretch:
        """The same on a log in this state: what was there when they began keeps its serials."""
        if state == self.start:
            return self
        first, more = self.start[0], state[0] - self.start[0]

        def moved(events: Iterable[Event]) -> tuple[Event, ...]:
            return tuple(
                dataclasses.replace(event, serial=event.serial + more)
                if isinstance(event, Allocated | Freed) and event.serial >= first
                else event
                for event in events
            )

        end = (self.end[0] + more, self.end[1] | state[1], state[2])
        return Stretch(state, end, moved(self.events), self.marks, self.moments, moved(self.ended))

    def uses_any(self, serials: range) -> bool:
        """Whether any of these is freed here."""
        return any(isinstance(event, Freed) and event.serial in serials for event in (*self.events, *self.ended))


@dataclasses.dataclass(frozen=True, slots=True)
class Passed:
    """What one forward and backward have allocated and freed, and what they have left."""

    before: frozenset[Event]
    """What was there when the first step began."""
    requests: Stretch
    """What an allocator is asked for."""
    storages: Stretch
    """The same by the storages of tensors, without what kernels allocate inside themselves."""
    gradients: tuple[Gradient | None, ...] | None
    """What each parameter's is like, in their order; None: that cannot be said."""
    num_ending: int
    """How much of what the end of the step frees goes before gradients do, of storages."""

    def suits(self, log: AllocationLog) -> bool:
        """Whether the same would happen on what this log has."""
        return self.requests.start == log.state and self.before == frozenset(log.before)


KnownPasses = list[Passed]
"""Forward and backward of one plan, or nothing yet: of one step, or of the first and of the second, where what is
attached has learnt something from the first."""


def may_be_known(passes: KnownPasses) -> bool:
    """Whether these can stand for those of another recording.

    What the optimizer allocates between two of them differs from plan to plan, so the second must not free any of it.
    """
    if any(one.gradients is None or one.requests.start[2] != one.requests.end[2] for one in passes):
        return False
    ends, starts = ([getattr(one.requests, at)[0] for one in passes] for at in ("end", "start"))
    between = (range(end, start) for end, start in zip(ends, starts[1:], strict=False))
    return not any(one.requests.uses_any(serials) for one, serials in zip(passes[1:], between, strict=True))


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
    assert known.gradients is not None, "others are not kept"
    for parameter, gradient in zip(parameters, known.gradients, strict=True):
        if gradient is not None and gradient.waits:
            parameter.grad = waiting_elsewhere(parameter)
        elif gradient is not None:
            parameter.grad = gradient.make()
            yield parameter.grad
