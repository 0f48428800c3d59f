"""Samples, seconds and bytes of a training, as they really were.

    meter = StepMeter()
    meter.begin(model, optimizer)           # a training begins
    meter.step_begins()                     # whoever drives the training says so ...
    meter.num_samples += num_samples_of(args, kwargs)
    meter.step_ends()                       # ... and when the optimizer has stepped
    meter.stop()                            # leaves no measurement open, whatever happened

On an accelerator the peak is the allocator's. A CPU keeps no such counter, so steps are measured: the second, when
optimizer state exists, and later ones whose batch is larger than any that was measured (`forward_begins`). A measured
step counts the model, its gradients and optimizer state, and all that the step computes; tensors of others in the same
process are left out. A model with compiled parts, or an optimizer that compiles its step, is not measured.

A reduction compares like with like: there is none while the largest batch of the training was not measured, as it may
be under dynamic padding.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from memscale._torch import private
from memscale._torch.live_bytes import LiveBytes
from memscale._torch.overrides import OwnHook


def num_samples_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The length of the first tensor among a forward's inputs that has one."""
    return _num_samples((args, kwargs))


def _num_samples(inputs: Any) -> int:
    tensors = (leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0)
    return next((len(tensor) for tensor in tensors), 0)


def _num_elements(inputs: Any) -> int:
    return sum(leaf.numel() for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor))


@dataclasses.dataclass(frozen=True, slots=True)
class _Size:
    """How large a batch is: in elements, and by the peak of the unmodified model that is predicted with it."""

    num_elements: int = 0
    baseline_bytes: int = 0

    def at_least(self, other: _Size) -> _Size:
        return _Size(max(self.num_elements, other.num_elements), max(self.baseline_bytes, other.baseline_bytes))

    def covers(self, other: _Size) -> bool:
        return self.num_elements >= other.num_elements and self.baseline_bytes >= other.baseline_bytes


class StepMeter:
    """Measures one training at a time."""

    def __init__(self) -> None:
        self._model: weakref.ref[nn.Module] | None = None
        self._optimizer: weakref.ref[Optimizer] | None = None
        self.device_type = "cpu"
        self.num_steps = 0
        self.num_samples = 0
        self.seconds = 0.0
        """The seconds in steps and between them, without pauses."""
        self._mark = 0.0
        self._measured_bytes: int | None = None
        self._is_due = False
        self._largest = _Size()
        """The largest batch of this training."""
        self._measured = _Size()
        self._begun = _Size()
        """The batches of this step."""
        self._measuring = contextlib.ExitStack()
        self._books: LiveBytes | None = None

    def begin(self, model: nn.Module, optimizer: Optimizer | None, device_type: str | None = None) -> None:
        """A training begins. `device_type` is where the model computes; None: where its parameters are."""
        self.stop()
        self.__init__()  # type: ignore[misc]  # every training starts from nothing
        self._model = weakref.ref(model)
        self._optimizer = weakref.ref(optimizer) if optimizer is not None else None
        self.device_type = device_type or next((parameter.device.type for parameter in model.parameters()), "cpu")
        self._mark = time.perf_counter()

    def know_optimizer(self, optimizer: Optimizer) -> None:
        """This one has stepped: its state belongs to what a measured step counts."""
        self._optimizer = weakref.ref(optimizer)

    def measure_again(self) -> None:
        """Measure the step after the next, too: another plan is in force."""
        self._is_due = self.num_steps > 0

    def step_begins(self, inputs: Any = None) -> None:
        """A step begins. One before it that has not ended is part of it. Its `inputs` are measured, too."""
        if self.num_steps == 1 or self._is_due:
            self._is_due = False
            self._measure(inputs)

    def forward_begins(self, inputs: Any, baseline_bytes: int | None) -> None:
        """A forward of the step begins, under a plan whose batch would let the unmodified model peak so high."""
        self.num_samples += _num_samples(inputs)
        size = _Size(_num_elements(inputs), baseline_bytes or 0)
        self._begun, self._largest = self._begun.at_least(size), self._largest.at_least(size)
        if self.num_steps > 0 and not self._measured.covers(size):
            self._measure(inputs)

    def _measure(self, inputs: Any) -> None:
        if self._books is not None or self.device_type != "cpu" or not private.can_take_outermost_mode():
            return
        if not self._is_compiled():
            self._books = LiveBytes("cpu", 1)
            self._books.see_all([self._resident(), inputs], "other")
            private.insert_outermost_mode(self._books)
            self._measuring.callback(private.remove_mode, self._books)

    def _is_compiled(self) -> bool:
        """Compiled code does not run inside a dispatch mode: the step would be computed by other kernels, or fail."""
        model = self._model() if self._model is not None else None
        optimizer = self._optimizer() if self._optimizer is not None else None
        if type(optimizer).__module__.partition(".")[0] == "torchao":
            return True
        return model is not None and any(map(private.is_compiled, model.modules()))

    def _resident(self) -> list[Any]:
        model = self._model() if self._model is not None else None
        optimizer = self._optimizer() if self._optimizer is not None else None
        parameters = list(model.parameters()) if model is not None else []
        return [
            parameters,
            [parameter.grad for parameter in parameters if parameter.is_leaf],
            list(model.buffers()) if model is not None else [],
            list(optimizer.state.values()) if optimizer is not None else [],
        ]

    def step_ends(self) -> None:
        self.num_steps += 1
        now = time.perf_counter()
        self.seconds, self._mark = self.seconds + now - self._mark, now
        if self._books is not None:
            self._measuring.close()
            self._measured_bytes, self._books = max(self._measured_bytes or 0, self._books.peak_bytes), None
            self._measured = self._measured.at_least(self._begun)
        self._begun = _Size()

    def pause_ends(self) -> None:
        """An evaluation or a save is over; it was no training."""
        self._mark = time.perf_counter()

    def stop(self) -> None:
        """Leave no measurement open, whatever happened."""
        self._measuring.close()
        self._books = None

    @property
    def peak_bytes(self) -> int | None:
        """The allocator's peak, or that of the measured step; None before there is one."""
        if self.device_type != "cpu" and torch.accelerator.is_available():
            return int(torch.accelerator.max_memory_allocated())
        return self._measured_bytes

    @property
    def baseline_bytes(self) -> int | None:
        """The peak of the unmodified model with the largest batch; None where the peak is that of a smaller one."""
        is_comparable = self.device_type != "cpu" or self._measured.covers(self._largest)
        return self._largest.baseline_bytes or None if is_comparable else None

    def figures(self, baseline_bytes: int | None, predicted_bytes: int | None = None) -> dict[str, float]:
        """What goes into the logs of whoever drives the training; the bytes are those of the plan in force."""
        found = {"memscale_samples_per_second": self.num_samples / self.seconds} if self.seconds else {}
        peak_bytes = self.peak_bytes
        if peak_bytes is not None:
            found["memscale_peak_gb"] = peak_bytes / 1e9
            if baseline_bytes:
                found["memscale_reduction"] = 1 - peak_bytes / baseline_bytes
        if predicted_bytes is not None:
            found["memscale_predicted_peak_gb"] = predicted_bytes / 1e9
        return found


class ForwardMeter(OwnHook):
    """A forward pre-hook that tells the meter of training forwards. It comes after the hook that plans.

    `baseline_of` gives the predicted peak of the unmodified model, by the plan in force.
    """

    def __init__(self, meter: StepMeter, baseline_of: Callable[[], int | None]) -> None:
        self.meter = meter
        self._baseline_of = baseline_of

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if kwargs is not None and model.training and torch.is_grad_enabled():
            self.meter.forward_begins((args, kwargs), self._baseline_of())
