"""`memscale.measure()`: live bytes by kind, over time and at the peak, on any device."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from memscale._errors import ConfigError, shown
from memscale._torch import private
from memscale._torch.device_memory import total_peak_bytes
from memscale._torch.live_bytes import KINDS, Kind, LiveBytes, parts_of_sparse, rounding_of
from memscale._torch.optimizer_steps import StepWatcher, parameters_of, watch_steps


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """Live bytes at one moment."""

    seconds: float
    total_bytes: int
    by_kind: Mapping[Kind, int]


class Measurement:
    """What `measure()` saw. Grows while the context is open.

        with memscale.measure() as measured:
            train_one_step(model)
        print(measured.peak_bytes, measured.breakdown["activations"])

    Bytes are counted by unique storage.
    """

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type
        self.peak_bytes = 0
        """The highest live bytes, by unique storage."""
        self.breakdown: Mapping[Kind, int] = dict.fromkeys(KINDS, 0)
        """Bytes by kind at that peak; they add up to `peak_bytes`."""
        self.timeline: list[Sample] = []
        self.allocator_peak_bytes: int | None = None
        """The device allocator's own peak of what it has handed out, where the device has one."""
        self.reserved_peak_bytes: int | None = None
        """Its peak of what it holds: a budget in GB bounds this."""
        self.total_peak_bytes: int | None = None
        """The reserved peak, the context and what others hold of the device, as `nvidia-smi` shows it; None on a
        CPU."""

    def __repr__(self) -> str:
        kinds = ", ".join(f"{kind} {self.breakdown[kind] / 1e9:.3f}" for kind in KINDS)
        card = "".join(f", {name} {value / 1e9:.3f}" for name, value in self._held().items())
        return f"Measurement({self.device_type}: peak {self.peak_bytes / 1e9:.3f} GB{card}; {kinds})"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from memscale.report.measured import measurement_html

        breakdown: dict[str, int] = {kind: self.breakdown[kind] for kind in KINDS}
        return measurement_html(self.device_type, self.peak_bytes, breakdown, self._held())

    def _held(self) -> dict[str, int]:
        """What the allocator and the card held; nothing on a CPU."""
        held = {
            "allocated": self.allocator_peak_bytes,
            "reserved": self.reserved_peak_bytes,
            "total": self.total_peak_bytes,
        }
        return {name: value for name, value in held.items() if value is not None}


@contextlib.contextmanager
def measure(device: str | torch.device | None = None) -> Iterator[Measurement]:
    """Measure live bytes by kind while the context is open.

        with memscale.measure() as measured:
            train_one_step()
        print(measured.peak_bytes, measured.breakdown)

    Args:
        device: Which device's bytes; None: the accelerator's if there is one, else the CPU's.

    Returns:
        A context manager that gives a `Measurement`, which grows while the context is open.

    Raises:
        ConfigError: This machine has no such device.

    Tensors that live already are found through the garbage collector. What an operator computes with gradients enabled
    counts as activation, everything else that is no parameter, gradient or optimizer state as temporary; tensors from
    before the context that are none of these are "other".

    Overhead: about 10 µs an operator and, at entry, a walk over all Python objects (about 0.1 s a million). On the
    CPU that is a few per cent of a training step of a real model; leave it out of timings.
    """
    device_type = _device_type(device)
    on_accelerator = device_type != "cpu"
    books = _Timeline(device_type, rounding_of(device_type))
    measurement = books.measurement
    if on_accelerator:
        torch.accelerator.reset_peak_memory_stats()
    with contextlib.ExitStack() as undo:
        books.see_what_lives(undo)
        books.reset_peak()
        try:
            with books:
                yield measurement
        finally:
            books.write()
            if on_accelerator:
                measurement.allocator_peak_bytes = torch.accelerator.max_memory_allocated()
                measurement.reserved_peak_bytes = torch.accelerator.max_memory_reserved()
                measurement.total_peak_bytes = total_peak_bytes()


def _device_type(device: str | torch.device | None) -> str:
    found = torch.accelerator.current_accelerator(check_available=True)
    there = ["cpu"] if found is None else ["cpu", found.type]
    if device is None:
        return there[-1]
    try:
        wanted = torch.device(device).type
    except RuntimeError as error:
        raise ConfigError(f"device={shown(device)} is not a device that PyTorch knows") from error
    if wanted not in there:
        raise ConfigError(f"device={shown(device)} cannot be measured here: this machine has {' and '.join(there)}")
    return wanted


class _Timeline(LiveBytes, StepWatcher):
    """Live bytes with their kinds kept up to date by hooks on parameters and optimizers, and a sample a change."""

    def __init__(self, device_type: str, rounding_bytes: int) -> None:
        super().__init__(device_type, rounding_bytes)
        self.measurement = Measurement(device_type)
        self._start = time.perf_counter()
        # With their weak references, because ids come back.
        self._known_parameters: dict[int, weakref.ref[torch.Tensor]] = {}
        self._undo = contextlib.ExitStack()

    def _count(self, kind: Kind, num_bytes: int) -> None:
        super()._count(kind, num_bytes)
        if num_bytes > 0:
            sample = Sample(time.perf_counter() - self._start, self.total_bytes, dict(self.by_kind))
            self.measurement.timeline.append(sample)

    def write(self) -> None:
        self.measurement.peak_bytes = self.peak_bytes
        self.measurement.breakdown = dict(self.peak_by_kind)

    def see_what_lives(self, undo: contextlib.ExitStack) -> None:
        self._undo = undo
        undo.callback(watch_steps(self))
        # By type, not isinstance: asking a lazy proxy for its __class__ may run user code.
        objects = gc.get_objects()
        self._see_parameters(obj for obj in objects if issubclass(type(obj), nn.Parameter))
        for obj in objects:
            if issubclass(type(obj), Optimizer):
                self.after_step(obj)
        for obj in objects:
            if issubclass(type(obj), torch.Tensor) and not issubclass(type(obj), nn.Parameter):
                self._see_stranger(obj)

    def _see_parameters(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            known = self._known_parameters.get(id(parameter))
            if known is not None and known() is parameter:
                continue
            self._known_parameters[id(parameter)] = weakref.ref(parameter)
            self.see(parameter, "parameters")
            if parameter.grad is not None:
                self.see(parameter.grad, "gradients")
            if parameter.requires_grad and parameter.is_leaf:
                handle = parameter.register_post_accumulate_grad_hook(self._see_gradient)
                self._undo.callback(handle.remove)

    def _see_stranger(self, tensor: torch.Tensor) -> None:
        """A tensor from before the context: "other", unless its storage is known already."""
        if private.is_fake(tensor):
            return
        if tensor.layout is not torch.strided:
            for part in parts_of_sparse(tensor):
                self._see_stranger(part)
        elif not self.knows(tensor):
            self.see(tensor, "other")

    def _see_gradient(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self.see(parameter.grad, "gradients")

    def concerns(self, optimizer: Optimizer) -> bool:
        return True

    def before_step(self, optimizer: Optimizer, *_: Any) -> None:
        parameters: Any = parameters_of(optimizer)
        self._see_parameters(parameters)
        for parameter in parameters:
            self._see_gradient(parameter)

    def after_step(self, optimizer: Optimizer) -> None:
        self.see_all(list(optimizer.state.values()), "optimizer state")
