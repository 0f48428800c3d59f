"""Optimizers of a model with streamed parameters step in parts, each part with the implementation of the whole.

    in_parts.attach(model, undo)

The parameters of each device are stepped on their own. Those on the device that computes are stepped at once, as they
would be if nothing were streamed. Those on the host are stepped a few at a time, so that the temporaries stay small.
See NOTE [the implementation of the whole] in implementations.py. An optimizer whose state waits is stepped in its
buckets instead (adopted_optimizer.py). An optimizer that does not choose its implementation by device is left alone.

Known limits: an optimizer whose update of one parameter depends on others is left alone with a warning. LBFGS, which
joins all gradients in one tensor, cannot step on two devices at all, and is refused before anything has changed.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from memscale._errors import OffloadError
from memscale._torch import private
from memscale._torch.optimizer_steps import StepOrder, StepWatcher, parameters_of, watch_steps
from memscale._torch.overrides import undo_with
from memscale.techniques.offload.optimizer.buckets import split_into_buckets
from memscale.techniques.offload.optimizer.implementations import (
    devices_of_streamed,
    differs_from_whole,
    foreach_of_whole,
)
from memscale.techniques.offload.optimizer.resumed_steps import run_resumed
from memscale.techniques.offload.optimizer.separable import (
    NotSeparable,
    SplitStep,
    StepCall,
    check_separable,
    idle_shadow,
    is_shadow,
    is_taken_over,
    owners_of,
    put_in_order,
    skips_parameters_without_gradient,
)

logger = logging.getLogger("memscale")

BYTES_AT_ONCE = 16 * 1024 * 1024
"""The most bytes of host parameters that are stepped together; a larger parameter is stepped alone."""

MULTIPLIES_HALVES: tuple[type[Optimizer], ...] = tuple(
    getattr(torch.optim, name) for name in ("Muon",) if hasattr(torch.optim, name)
)
"""Optimizers that multiply matrices of 16 bits: a device rounds the result once, a host's kernel in between as well."""


class StepsInParts(StepWatcher):
    """The optimizers of one model while some of its parameters are streamed."""

    order = StepOrder.TAKE_OVER

    def __init__(self) -> None:
        self._hooks: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()
        """The step pre-hook on each optimizer that was seen; None for an optimizer that is left alone."""
        self._has_told = False

    def concerns(self, optimizer: Optimizer) -> bool:
        return not is_shadow(optimizer) and not is_taken_over(optimizer) and _holds_streamed(optimizer)

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Take over an optimizer at its first step. The user's own pre-hooks come first."""
        _refuse_joined_gradients(optimizer)
        if optimizer not in self._hooks and _chooses_by_device(optimizer):
            self._hooks[optimizer] = self._take(optimizer)
        hook = self._hooks.get(optimizer)
        if hook is not None:
            private.step_pre_hooks(optimizer).move_to_end(hook.id)

    def after_step(self, optimizer: Optimizer) -> None:
        """Say once that the host has stepped what it rounds otherwise. Who steps on the device has taken over now."""
        if isinstance(optimizer, MULTIPLIES_HALVES) and not self._has_told and not is_taken_over(optimizer):
            self._has_told = True
            logger.warning(
                "%s multiplies matrices of 16 bits, which the host's kernels round otherwise than the device's, and "
                "this plan lets the host step what it streams: the weights may differ from plain training in the last "
                "bits of these products. With Config(allow_host_step=False) they are stepped on the device",
                type(optimizer).__name__,
            )

    def release(self) -> None:
        for hook in [*self._hooks.values()]:
            if hook is not None:
                hook.remove()
        self._hooks.clear()

    def _take(self, optimizer: Optimizer) -> Any:
        """Return the hook, or warn why the optimizer is left alone and return None."""
        try:
            check_separable(optimizer)
        except NotSeparable as reason:
            warnings.warn(
                f"{type(optimizer).__name__} is left as it is ({reason}). PyTorch steps parameters on two devices one "
                "by one, which may round differently from the plain model's step: set foreach=False on both to "
                "compare them",
                stacklevel=2,
            )
            return None
        return optimizer.register_step_pre_hook(_before_step)


def _refuse_joined_gradients(optimizer: Optimizer) -> None:
    parameters = parameters_of(optimizer)
    devices = sorted({str(parameter.device) for parameter in parameters})
    if isinstance(optimizer, torch.optim.LBFGS) and len(devices) > 1:
        raise OffloadError(
            f"{type(optimizer).__name__} joins the gradients of all {len(parameters)} parameters in one tensor, but "
            f"the plan streams some of them, so that they lie on {' and '.join(devices)}; nothing was stepped. Set "
            "Config(enable_offloading=False), or train with another optimizer"
        )


def refuse_joined_gradients(model: nn.Module) -> None:
    """Raise `OffloadError` if an optimizer of this model is there already that cannot step it as it is placed now."""
    for optimizer in owners_of([*model.parameters()]):
        _refuse_joined_gradients(optimizer)


def _chooses_by_device(optimizer: Optimizer) -> bool:
    return any(private.chooses_by_device(optimizer, group) for group in optimizer.param_groups)


def _holds_streamed(optimizer: Optimizer) -> bool:
    streamed = devices_of_streamed()
    return any(id(parameter) in streamed for parameter in parameters_of(optimizer))


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if is_taken_over(optimizer) or is_shadow(args[0]):
        return None  # another has run this step: every model with streamed parameters watches their optimizers
    call = StepCall(args[1:], kwargs)
    call.evaluate_closure()
    stepped: Optimizer = optimizer
    if differs_from_whole(optimizer, foreach_of_whole(optimizer)):
        run_resumed(optimizer, lambda: _step_in_parts(optimizer, call))
        stepped = idle_shadow(optimizer)
    call.give_back_loss()
    return (stepped, *call.args), call.kwargs


def _step_in_parts(optimizer: Optimizer, call: StepCall) -> None:
    split, every = SplitStep(optimizer), not skips_parameters_without_gradient(optimizer)
    before = set(optimizer.state)
    for part in parts_of(optimizer):
        if every or any(parameter.grad is not None for parameter in part):
            split.run_in_place(part, call.args, call.kwargs)
    split.merge()
    put_in_order(optimizer, before)


def parts_of(optimizer: Optimizer) -> Iterator[list[torch.Tensor]]:
    """Return the parts: all parameters of a device, or up to `BYTES_AT_ONCE` of those on the host."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for parameter in parameters_of(optimizer):
        by_device.setdefault(parameter.device, []).append(parameter)
    for device, same in by_device.items():
        limit_bytes = BYTES_AT_ONCE if device.type == "cpu" else sys.maxsize
        for indices in split_into_buckets((p.nbytes for p in same), limit_bytes):
            yield [same[index] for index in indices]


def attach(model: nn.Module, undo: contextlib.ExitStack) -> None:
    """Let the model's optimizers step as a plain model's would, until undone or until the model is gone."""
    steps = StepsInParts()
    undo.callback(steps.release)
    undo_with(model, watch_steps(steps), undo)
