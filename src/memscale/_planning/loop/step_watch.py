"""The peak of every training step, held against what its plan promised, for the price of two numbers a step.

    watch = StepWatch(model)
    watch.begin(plan, inputs, device)        # at the beginning of a training forward
    excess = watch.end()                     # at the next forward of any kind; None: the plan has kept its word

A step ends when an optimizer has stepped on the model's parameters, or with the model's next forward.

The device's own statistics are read, and never reset, since they are the user's. So a step is seen to exceed its
promise where it sets a new peak: one below an earlier peak of the process is not noticed until somebody resets the
statistics. A CPU keeps no such statistics, and is not watched.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from memscale._plan import Plan
from memscale._profile.inputs import Inputs
from memscale._torch import private
from memscale._torch.live_bytes import rounding_of
from memscale._torch.optimizer_steps import StepWatcher, parameters_of, steps_model, watch_steps
from memscale._torch.overrides import undo_with
from memscale._torch.released_gradients import held_gradient
from memscale._units import round_up, show_bytes

TOLERATED_SHARE = 0.01
TOLERATED_BYTES = 8192
"""A step may be above its promise by the larger of the two: rounding is not worth a word."""
_TOLERATED_SHARE_OF_CARD = 0.1
_TOLERATED_BYTES_OF_CARD = 64 * 1024 * 1024
"""A step on a real card may be above by their sum: plans promise live bytes, and its allocator counts unsplit blocks
and the libraries' workspaces as well."""


@dataclasses.dataclass(frozen=True, slots=True)
class Excess:
    """A step that took more than its plan had promised."""

    plan: Plan
    peak_bytes: int
    """The peak without what others held on the device when the step began."""

    @property
    def is_over(self) -> bool:
        """Whether the step exceeded the budget."""
        return self.peak_bytes > self.plan.budget_bytes

    @property
    def corrected(self) -> Plan:
        """The plan, with the peak that was seen."""
        return dataclasses.replace(self.plan, predicted_peak_bytes=self.peak_bytes, fits=not self.is_over)

    @property
    def words(self) -> str:
        promised, budget = show_bytes(self.plan.predicted_peak_bytes), show_bytes(self.plan.budget_bytes)
        peak = show_bytes(self.peak_bytes)
        return f"a training step peaked at {peak}, where the plan promised {promised}; the budget is {budget}"


@dataclasses.dataclass(frozen=True, slots=True)
class _Window:
    """A step under way."""

    plan: Plan
    device: torch.device
    allocated_bytes: int
    peak_bytes: int
    """The peak of the process so far."""
    input_bytes: int
    holds_gradients: bool
    """Gradients of an earlier batch are there."""
    counts_held: bool
    """The plan counts them."""


class StepWatch(StepWatcher):
    """Watches the steps of one model. At most one step is under way at a time."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._window: _Window | None = None
        self._excess: Excess | None = None
        self._optimizers: list[weakref.ref[Optimizer]] = []
        """The optimizers that have stepped, and have had their state since, the latest last."""
        self._undo = contextlib.ExitStack()
        self._is_hooked = False

    def begin(self, plan: Plan, inputs: Inputs, device: torch.device, *, counts_held: bool = False) -> None:
        """A training step begins, which this plan is made for. `counts_held`: also gradients of earlier batches."""
        model = self._model()
        if model is None or device.type == "cpu":
            return
        index = device.index if device.index is not None else torch.accelerator.current_device_index()
        counted = private.allocator_bytes(index)
        if counted is None:
            return
        self._hook(model)
        first = next((p for p in model.parameters() if p.requires_grad and p.is_leaf), None)
        self._window = _Window(
            plan=plan,
            device=torch.device(device.type, index),
            allocated_bytes=counted[0],
            peak_bytes=counted[1],
            input_bytes=bytes_on(inputs.tensors(), device.type),
            holds_gradients=first is not None and held_gradient(first) is not None,
            counts_held=counts_held,
        )

    def end(self) -> Excess | None:
        """The step is over, if one is under way. What it, or one since the last call, took beyond its promise."""
        self._close(None)
        excess, self._excess = self._excess, None
        return excess

    def stop(self) -> None:
        """Watch nothing any more. A second call does nothing."""
        self._window = None
        self._undo.close()
        self._is_hooked = False

    def _hook(self, model: nn.Module) -> None:
        if not self._is_hooked:
            self._is_hooked = True
            undo_with(model, watch_steps(self), self._undo)

    def concerns(self, optimizer: Optimizer) -> bool:
        model = self._model()
        return model is not None and steps_model(optimizer, model)

    def after_step(self, optimizer: Optimizer) -> None:
        if private.graph_task_id() < 0:  # otherwise it steps in the middle of backward, which goes on
            self._close(optimizer)

    def _close(self, optimizer: Optimizer | None) -> None:
        window, self._window = self._window, None
        if window is not None:
            counted = private.allocator_bytes(window.device.index)
            is_new = counted is not None and counted[1] != window.peak_bytes
            if counted is not None and is_new and _is_above(counted[1], window.plan):
                self._judge(window, counted[1], optimizer)
        if optimizer is not None:
            self._optimizers = [*self._known_but(optimizer), weakref.ref(optimizer)]

    def _known_but(self, optimizer: Optimizer | None) -> list[weakref.ref[Optimizer]]:
        return [known for known in self._optimizers if known() is not None and known() is not optimizer]

    def _state_before(self, optimizer: Optimizer | None) -> list[Any]:
        """What optimizers held when the step began that this one has ended. Of several that step one parameter, the
        latest counts: what those that it has replaced still hold is not the step's."""
        others = self._known_but(optimizer)
        latest: dict[int, Any] = {}
        for known in filter(None, (reference() for reference in others)):
            latest.update((id(parameter), known.state.get(parameter)) for parameter in parameters_of(known))
        if optimizer is not None:
            had_stepped = any(known() is optimizer for known in self._optimizers)
            state = optimizer.state if had_stepped else {}
            latest.update((id(parameter), state.get(parameter)) for parameter in parameters_of(optimizer))
        return tree_leaves(list(latest.values()))

    def _judge(self, window: _Window, peak_bytes: int, optimizer: Optimizer | None) -> None:
        """Compare a peak with the plan. What of it was others' is found out only here, because that takes time."""
        model = self._model()
        if model is None:
            return
        trained = [p for p in model.parameters() if p.requires_grad and p.is_leaf]
        device_type = window.device.type
        held = bytes_on(trained, device_type) if window.holds_gradients else 0
        state = self._state_before(optimizer)
        ours = bytes_on([*model.parameters(), *model.buffers(), *state], device_type) + window.input_bytes + held
        others_bytes = max(0, window.allocated_bytes - ours)
        shown_bytes = peak_bytes - others_bytes - (0 if window.counts_held else held)
        if _is_above(shown_bytes, window.plan):
            self._excess = Excess(window.plan, shown_bytes)


def _is_above(peak_bytes: int, plan: Plan) -> bool:
    promised_bytes = plan.predicted_peak_bytes
    tolerated_bytes = max(TOLERATED_SHARE * promised_bytes, TOLERATED_BYTES)
    if plan.device_type != "simgpu":
        tolerated_bytes = _TOLERATED_SHARE_OF_CARD * promised_bytes + _TOLERATED_BYTES_OF_CARD
    return peak_bytes - promised_bytes > tolerated_bytes


def bytes_on(tensors: Iterable[Any], device_type: str) -> int:
    """The bytes of unique storages on that device, rounded up to the blocks in which it hands out memory."""
    sizes = {}
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and tensor.device.type == device_type and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            sizes[private.storage_key(storage)] = round_up(storage.nbytes(), rounding_of(device_type))
    return sum(sizes.values())
