"""The allocations of whole training steps in their order, and what PyTorch's caching allocator makes of them.

    log = record_steps(rehearsal, model, "adamw")
    reserved_of(log, parse_settings("expandable_segments:True"))    # Reserved(allocated_peak_bytes=..., ...)

A step is forward, backward, the optimizer's step and `zero_grad()`. The log has what lives all the time (parameters,
buffers, the batch), then the first step, in which the optimizer makes its state, and a second one, which is like all
that follow.

Of what a kernel allocates and frees inside itself there are the workspace of matrix products and what
`temporary_bytes` knows. What is not seen: workspaces of convolutions, buffers of reductions, and what building the
model on the device left in the cache. All is on one stream.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from memscale._decide.allocator import AllocatorSettings, Block, CachingAllocator
from memscale._profile.device_kernels import temporary_bytes
from memscale._profile.optimizer_twin import AnyValue, host_counters, optimizer_over
from memscale._profile.rehearsal import FakeRehearsal, loss_of
from memscale._profile.segments import SegmentRecorder
from memscale._torch import private

WORKSPACE_BYTES = 8_519_680
"""Of cuBLAS, on cards up to sm_89: two buffers of 4 MiB and eight of 16 KiB. From sm_90 on it is 32 MiB."""

_aten = torch.ops.aten
PRODUCTS = frozenset(
    (_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten._grouped_mm.default)
)
"""Operators that cuBLAS computes."""

CARD_TYPE = "cuda"
"""The devices whose kernels are known to allocate for themselves."""

Thread = Literal["forward", "backward"]
"""Autograd computes backward in a thread of its own."""


@dataclasses.dataclass(frozen=True, slots=True)
class Allocated:
    serial: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Freed:
    serial: int


@dataclasses.dataclass(frozen=True, slots=True)
class Multiplied:
    """A matrix product: the first one of a thread makes cuBLAS take its workspace, for good."""

    thread: Thread


Event = Allocated | Freed | Multiplied


class AllocationLog:
    """What is allocated and freed, in order. `LiveBytes.log` feeds it."""

    def __init__(self) -> None:
        self.before: list[Event] = []
        """What comes before the first step."""
        self.steps: list[list[Event]] = []
        self._num_allocations = 0
        self._serials: dict[int, int] = {}
        """Of what lives, by the keys of storages."""
        self._have_multiplied: set[Thread] = set()
        self._forgotten: set[int] = set()

    @property
    def _now(self) -> list[Event]:
        return self.steps[-1] if self.steps else self.before

    def begin_step(self) -> None:
        self.steps.append([])

    def allocate(self, key: int, num_bytes: int) -> None:
        old = self._serials.get(key)
        serial = self._serials[key] = self._num_allocations
        self._num_allocations += 1
        self._now.append(Allocated(serial, num_bytes))
        if old is not None:  # a storage that is resized has both for a moment
            self._free_serial(old)

    def free(self, key: int) -> None:
        self._free_serial(self._serials.pop(key))

    def _free_serial(self, serial: int) -> None:
        if serial not in self._forgotten:
            self._now.append(Freed(serial))

    def multiply(self, thread: Thread) -> None:
        if thread not in self._have_multiplied:
            self._have_multiplied.add(thread)
            self._now.append(Multiplied(thread))

    def pass_by(self, sizes_bytes: tuple[int, ...]) -> None:
        """What a kernel had for itself: all of it at once, and none of it afterwards."""
        first = self._num_allocations
        self._num_allocations += len(sizes_bytes)
        self._now.extend(Allocated(first + index, num_bytes) for index, num_bytes in enumerate(sizes_bytes))
        self._now.extend(Freed(first + index) for index in range(len(sizes_bytes)))

    def forget(self, keys: Iterable[int]) -> None:
        """What lives under these keys is not on the device in truth."""
        gone = {self._serials[key] for key in keys} - self._forgotten
        self._forgotten |= gone
        for events in (self.before, *self.steps):
            events[:] = [event for event in events if not (isinstance(event, Allocated) and event.serial in gone)]


# ---- recording


class EventRecorder(SegmentRecorder):
    """Feeds a log."""

    def __init__(self, rehearsal: FakeRehearsal, log: AllocationLog) -> None:
        super().__init__(rehearsal.device_type, rehearsal.rounding_bytes, counts_fakes=rehearsal.is_fake)
        self.log = self._events = log
        self.thread: Thread = "forward"
        self._has_card_kernels = rehearsal.target_type == CARD_TYPE

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func in PRODUCTS:
            self._events.multiply(self.thread)
        if self._has_card_kernels:
            self._events.pass_by(temporary_bytes(func, args))
        return result

    def forget(self, tensors: list[torch.Tensor]) -> None:
        self._events.forget(private.storage_key(tensor.untyped_storage()) for tensor in tensors)


def record_steps(
    rehearsal: FakeRehearsal, model: nn.Module, optimizer: str | Optimizer, *, num_steps: int = 2
) -> AllocationLog:
    """Whole steps of the unmodified model on this stage, with an optimizer by name or the one that the user has.

    `model` is the user's, of which the stage has a copy. "none" is training without an optimizer.
    """
    log = AllocationLog()
    recorder = EventRecorder(rehearsal, log)
    with contextlib.ExitStack() as undo:
        undo.enter_context(rehearsal.stage())
        undo.callback(setattr, recorder, "log", None)  # what dies later is no part of a step
        recorder.see_all([list(rehearsal.model.parameters()), list(rehearsal.model.buffers())], "parameters")
        recorder.see_all(rehearsal.inputs.tensors(), "other")
        stepping = _optimizer_on(rehearsal, model, optimizer)
        for _ in range(num_steps):
            log.begin_step()
            _record_step(rehearsal, recorder, stepping)
    return log


def _optimizer_on(rehearsal: FakeRehearsal, model: nn.Module, optimizer: str | Optimizer) -> Optimizer | None:
    if optimizer == "none":
        return None
    copies = zip(model.parameters(), rehearsal.model.parameters(), strict=True)
    stand_ins = {id(original): copy for original, copy in copies}
    return optimizer_over(stand_ins, model, optimizer, rehearsal.target_type)


def _record_step(rehearsal: FakeRehearsal, recorder: EventRecorder, optimizer: Optimizer | None) -> None:
    with recorder:
        recorder.thread = "forward"
        loss = loss_of(rehearsal.model(*rehearsal.inputs.args, **rehearsal.inputs.kwargs))
        recorder.thread = "backward"
        loss.backward()
        recorder.thread = "forward"
        if optimizer is not None:
            with AnyValue():
                optimizer.step()
            if rehearsal.emulates_gpu:
                recorder.forget(host_counters(optimizer))
    for parameter in rehearsal.model.parameters():
        parameter.grad = None


# ---- what the allocator makes of it


@dataclasses.dataclass(frozen=True, slots=True)
class Reserved:
    """The highest of each, over all steps."""

    requested_peak_bytes: int
    """What the storages take."""
    allocated_peak_bytes: int
    """What is handed out for them."""
    reserved_peak_bytes: int
    """What is held for that."""


def reserved_of(
    log: AllocationLog,
    settings: AllocatorSettings | None = None,
    *,
    num_steps: int = 3,
    workspace_bytes: int = WORKSPACE_BYTES,
    capacity_bytes: int | None = None,
) -> Reserved:
    """What PyTorch's allocator hands out and holds in that many steps, of which the last recorded one is repeated.

    `workspace_bytes` is what cuBLAS takes for each thread that multiplies matrices; 0: nothing. Raises
    `OutOfMemoryError` where `capacity_bytes` do not suffice.
    """
    memory = CachingAllocator(settings, capacity_bytes)
    replay = _Replay(memory, workspace_bytes)
    replay.play(log.before)
    for index in range(num_steps):
        repeated = index >= len(log.steps)
        replay.play(log.steps[-1] if repeated else log.steps[index])
    return Reserved(memory.peak_requested_bytes, memory.peak_allocated_bytes, memory.peak_reserved_bytes)


class _Replay:
    """A step may be played several times. What it leaves behind is then replaced: the new comes, the old goes, as when
    a variable gets another value."""

    def __init__(self, memory: CachingAllocator, workspace_bytes: int) -> None:
        self._memory = memory
        self._workspace_bytes = workspace_bytes
        self._blocks: dict[int, Block] = {}
        self._threads: set[Thread] = set()

    def play(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Allocated):
                old = self._blocks.get(event.serial)
                self._blocks[event.serial] = self._memory.allocate(event.num_bytes)
                if old is not None:
                    self._memory.free(old)
            elif isinstance(event, Multiplied):
                self._multiply(event.thread)
            elif event.serial in self._blocks:  # else it was made before the step, and went when that was first played
                self._memory.free(self._blocks.pop(event.serial))

    def _multiply(self, thread: Thread) -> None:
        if self._workspace_bytes and thread not in self._threads:
            self._threads.add(thread)
            self._memory.allocate(self._workspace_bytes)
