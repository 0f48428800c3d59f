"""Samples, seconds and bytes of a training, as they really were.

    meter = StepMeter()
    meter.begin(model, optimizer)           # a training begins
    meter.step_begins()                     # whoever drives the training says so ...
    meter.num_samples += num_samples_of(args, kwargs)
    meter.step_ends()                       # ... and when the optimizer has stepped
    meter.stop()                            # leaves no measurement open, whatever happened

On an accelerator the peak is the allocator's. A CPU keeps no such counter, so one step is measured: the second, when
optimizer state exists. It counts the model, its gradients and optimizer state, and all that the step computes; tensors
of others in the same process are left out. A model with compiled parts is not measured.
"""

from __future__ import annotations

import contextlib
import time
import weakref
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
    tensors = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.dim() > 0)
    return next((len(tensor) for tensor in tensors), 0)


class StepMeter:
    """Of one training at a time."""

    def __init__(self) -> None:
        self._model: weakref.ref[nn.Module] | None = None
        self._optimizer: weakref.ref[Optimizer] | None = None
        self.device_type = "cpu"
        self.num_steps = 0
        self.num_samples = 0
        self.seconds = 0.0
        """In steps and between them, without pauses."""
        self._mark = 0.0
        self._measured_bytes: int | None = None
        self._is_due = False
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
        """Also where the step before has not ended yet, which is then part of this one. `inputs` are counted, too."""
        if self._books is not None or self.device_type != "cpu" or not private.can_take_outermost_mode():
            return
        if (self.num_steps == 1 or self._is_due) and not self._has_compiled_parts():
            self._is_due = False
            self._books = LiveBytes("cpu", 1)
            self._books.see_all([self._resident(), inputs], "other")
            private.insert_outermost_mode(self._books)
            self._measuring.callback(private.remove_mode, self._books)

    def _has_compiled_parts(self) -> bool:
        """Compiled code does not run inside a dispatch mode: the step would be computed by other kernels."""
        model = self._model() if self._model is not None else None
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
            self._measured_bytes, self._books = self._books.peak_bytes, None

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


class SampleCounter(OwnHook):
    """A forward pre-hook: counts samples in training."""

    def __init__(self, meter: StepMeter) -> None:
        self.meter = meter

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        if kwargs is not None and model.training and torch.is_grad_enabled():
            self.meter.num_samples += num_samples_of(args, kwargs)
