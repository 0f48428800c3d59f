"""`LossScale`: the dynamic scale of fp16 gradients, and the steps that must not be taken.

A step after a backward that overflowed is skipped: the optimizer runs and finds no gradients, and gets them back after.
Then the scale is halved. After `growth_interval` good steps in a row it is doubled.

A user's own `torch.amp.GradScaler` is left in charge. One that exists when training starts is taken to be meant for
this model until the first step shows whether it is taken by a scaler; from then on each step decides.

NOTE [steps of scalers]: optimizers are not told who steps them. While a scale is attached, `GradScaler.step` notes for
its thread that it is under way. A subclass whose `step` calls the optimizer without `super().step()` is not seen.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from memscale._errors import ConfigError, quoted, shown
from memscale._torch import private
from memscale._torch.interception import CallsUnderWay, intercept
from memscale._torch.optimizer_steps import StepOrder, StepWatcher, owns_any, parameters_of, watch_steps
from memscale._torch.overrides import undo_with

logger = logging.getLogger("memscale")

_LARGEST, _SMALLEST = 2.0**24, 2.0**-24
_PATIENCE = 20
"""Steps skipped in a row before the user is told that it is not the scale."""


class LossScale(StepWatcher):
    """The scale, its history, and what it does at the steps of optimizers."""

    order = StepOrder.SCALE

    def __init__(self, initial: float = 2.0**16, growth_interval: int = 2000) -> None:
        self.value = initial
        """What gradients are multiplied with now: a power of two."""
        self.growth_interval = growth_interval
        self.good_steps = 0
        """Steps since the scale last changed."""
        self.num_skipped_steps = 0
        self._skipped_in_a_row = 0
        self._is_ours: bool | None = None
        self._has_news = False
        """There was a backward since the last look."""
        self._is_finite = True
        """What that look showed."""
        self._marks: dict[torch.device, torch.Tensor] = {}
        """The largest gradient since then, on each device."""
        self._told: set[int] = set()
        """The optimizers that were told of it."""
        self._reached: Any = WeakIdKeyDictionary()
        """The leaves that gradients come to from this model: its parameters, and those of what feeds it."""
        self._hidden: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._model: weakref.ref[nn.Module] | None = None

    def attach(self, model: nn.Module, undo: contextlib.ExitStack) -> None:
        """Watch the optimizers of what this model's gradients come to, until undone."""
        self._model = weakref.ref(model)
        undo_with(model, watch_steps(self), undo)
        undo_with(model, intercept(torch.amp.GradScaler, "step", _note_scaler_step), undo)
        undo.callback(self._forget)

    def tensors(self) -> list[torch.Tensor]:
        """What it keeps on devices between a backward and the step."""
        return list(self._marks.values())

    def _forget(self) -> None:
        self._marks.clear()
        self._told.clear()
        self._has_news, self._is_finite = False, True
        for optimizer_id in list(self._hidden):
            self._give_back(optimizer_id)

    # ---- whose job it is

    def is_ours(self) -> bool:
        """Whether MemScale scales; otherwise a scaler of the user's does."""
        if self._is_ours is None:
            self._is_ours = not _lives_a_scaler()
            if not self._is_ours:
                logger.info("a torch.amp.GradScaler is in use: the loss scale is left to it")
        return self._is_ours

    # ---- in forward

    def reaches(self, leaves: Iterable[torch.Tensor]) -> None:
        """Gradients of a forward will come to these: an overflow is their optimizer's business, too."""
        for leaf in leaves:
            if leaf not in self._reached:
                self._reached[leaf] = None

    def begin(self) -> None:
        """A forward begins. Gradients that nobody stepped with and that are gone teach all the same.

        A user who drops what is not finite by himself never steps, and the scale would never back off.
        """
        if self._has_news and all(leaf.grad is None for leaf in self._reached):
            self._look()
            self._is_finite = True

    # ---- in backward

    def watch(self, gradient: torch.Tensor) -> None:
        """Note a gradient that is not finite, without waiting for the device."""
        with torch.no_grad():
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            if values.numel() == 0:
                return
            largest = torch.linalg.vector_norm(values, math.inf)  # infinite or NaN if any is
            before = self._marks.get(largest.device)
            self._marks[largest.device] = largest if before is None else torch.maximum(before, largest)
        self._has_news = True

    # ---- at the step

    def concerns(self, optimizer: Optimizer) -> bool:
        if id(optimizer) in self._hidden or self._owns(optimizer):
            return True
        return any(parameter in self._reached for parameter in parameters_of(optimizer))

    def before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A step that raised has given nothing back. Its gradients had overflowed: nobody may get them any more.
        self._hidden.pop(id(optimizer), None)
        self._is_ours = not _SCALER_STEPS
        if not self._is_ours:
            return None
        args, kwargs, has_closure = _with_closure(self, optimizer, args, kwargs)
        if not has_closure:
            self.settle(optimizer)
        return args, kwargs

    def settle(self, optimizer: Optimizer) -> None:
        """The gradients of a step are complete: learn from them, and hide them if they must not be used."""
        is_new = self._has_news
        if is_new:
            self._look(optimizer)
        if not self._is_finite and (is_new or self._shares_backward(optimizer)):
            self._told.add(id(optimizer))
            self._hide_gradients(optimizer)

    def _look(self, optimizer: Optimizer | None = None) -> None:
        was_finite, self._has_news = self._is_finite, False
        self._told.clear()
        # In a rehearsal nothing overflows: fake tensors have no values.
        marks = [mark for mark in self._marks.values() if not private.is_fake(mark)]
        self._is_finite = all(math.isfinite(mark.item()) for mark in marks)
        if optimizer is not None and (_has_ranks() or not was_finite):
            # NOTE [ranks agree]: another rank's overflow is in the reduced gradients only. And after a skipped step the
            # gradients of one may still be there, if nobody has zeroed them.
            self._is_finite = self._is_finite and _has_finite_gradients(optimizer)
        self._marks.clear()
        self._learn()

    def _shares_backward(self, optimizer: Optimizer) -> bool:
        """Whether the backward that overflowed is this optimizer's, too; not one that was told, and trains on."""
        if id(optimizer) not in self._told and self._owns(optimizer):
            return True
        return not _has_finite_gradients(optimizer)

    def _learn(self) -> None:
        if self._is_finite:
            self.good_steps += 1
            self._skipped_in_a_row = 0
            if self.good_steps >= self.growth_interval:
                self.value, self.good_steps = min(self.value * 2.0, _LARGEST), 0
            return
        self.value, self.good_steps = max(self.value / 2.0, _SMALLEST), 0
        self.num_skipped_steps += 1
        self._skipped_in_a_row += 1
        logger.info("fp16 gradients overflowed: step skipped, the loss scale is now %g", self.value)
        if self._skipped_in_a_row == _PATIENCE:
            warnings.warn(
                f"{_PATIENCE} steps in a row were skipped and gradients are still not finite at a loss scale of "
                f"{self.value:g}: the loss itself is likely NaN or infinite",
                stacklevel=2,
            )

    def _hide_gradients(self, optimizer: Optimizer) -> None:
        hidden = self._hidden.setdefault(id(optimizer), [])
        for parameter in parameters_of(optimizer):
            if parameter.grad is not None:
                hidden.append((parameter, parameter.grad))
                parameter.grad = None

    def after_step(self, optimizer: Optimizer) -> None:
        self._give_back(id(optimizer))

    def _give_back(self, optimizer_id: int) -> None:
        for parameter, gradient in self._hidden.pop(optimizer_id, []):
            parameter.grad = gradient

    def _owns(self, optimizer: Optimizer) -> bool:
        model = self._model() if self._model is not None else None
        return model is not None and owns_any(optimizer, model.parameters())

    # ---- save and resume

    def state_dict(self) -> dict[str, float | int]:
        """What a resumed run needs to go on as this one would."""
        return {"scale": self.value, "good_steps": self.good_steps, "num_skipped_steps": self.num_skipped_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over all of it, or nothing where a part of it is not what `state_dict` gives."""
        try:
            value = float(state["scale"])
            counts = int(state["good_steps"]), int(state["num_skipped_steps"])
        except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"this is not the state of a loss scale: {quoted(error)}") from error
        if not (value > 0 and math.isfinite(value) and math.frexp(value)[0] == 0.5):
            raise ConfigError(f"a loss scale of {value!r} is not allowed; it must be a power of two")
        if not all(0 <= count < 2**63 for count in counts):
            raise ConfigError(f"the state of a loss scale cannot count {shown(counts)} steps")
        self.value = value
        self.good_steps, self.num_skipped_steps = counts


class _Closure:
    """The closure of a step, after which the step's gradients are complete."""

    def __init__(self, scale: LossScale, optimizer: Optimizer, closure: Any) -> None:
        self.scale, self.optimizer, self.closure = scale, optimizer, closure

    def __call__(self) -> Any:
        result = self.closure()
        self.scale.settle(self.optimizer)
        return result


def _with_closure(
    scale: LossScale, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """The arguments of a step, its closure, if any, followed by a look at the gradients. args[0] is the optimizer."""
    if kwargs.get("closure") is not None:
        return args, {**kwargs, "closure": _Closure(scale, optimizer, kwargs["closure"])}, True
    if len(args) > 1 and callable(args[1]):
        return (args[0], _Closure(scale, optimizer, args[1]), *args[2:]), kwargs, True
    return args, kwargs, False


def _has_ranks() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _has_finite_gradients(optimizer: Optimizer) -> bool:
    gradients = [parameter.grad for parameter in parameters_of(optimizer) if parameter.grad is not None]
    return math.isfinite(nn.utils.get_total_norm(gradients, math.inf).item())


def _lives_a_scaler() -> bool:
    # By type, not isinstance: asking a lazy proxy for its __class__ may run user code.
    return any(issubclass(type(obj), torch.amp.GradScaler) and obj.is_enabled() for obj in gc.get_objects())


_SCALER_STEPS = CallsUnderWay()
"""See NOTE [steps of scalers]."""


def _note_scaler_step(step: Callable[..., Any], scaler: torch.amp.GradScaler, *args: Any, **kwargs: Any) -> Any:
    if not scaler.is_enabled():
        return step(scaler, *args, **kwargs)
    return _SCALER_STEPS.note(step, scaler, *args, **kwargs)
