"""What sees the allocations of a step while it runs on fake tensors, and writes them down in logs.

with EventRecorder(rehearsal, log, hardware):
    ...                                        # every operator's results, and what its kernel allocates inside
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from memscale._hardware import Hardware
from memscale._planning.reserved.allocation_log import AllocationLog, Place, Thread
from memscale._planning.reserved.kernel_temporaries import KernelTemporaries
from memscale._planning.reserved.lengthened import Mark
from memscale._planning.reserved.shared_out import SharedOut
from memscale._profile import Phase
from memscale._profile.device_kernels import OPENED
from memscale._profile.rehearsal import FakeRehearsal
from memscale._profile.segments import FakeRecorder
from memscale._torch import private
from memscale._torch.live_bytes import Kind

_aten = torch.ops.aten
PRODUCTS = frozenset(
    (_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten._grouped_mm.default)
)
"""Operators that cuBLAS computes."""

_EFFICIENT = _aten._scaled_dot_product_efficient_attention.default
"""Its last results are a seed and an offset, which a card keeps on the host."""

CARD_TYPE = "cuda"
"""The devices whose kernels are known to allocate for themselves."""


class LogRecorder(FakeRecorder):
    """Records live storages as they come and go while a rehearsal runs, and where blocks begin."""

    def __init__(self, rehearsal: FakeRehearsal) -> None:
        super().__init__(rehearsal.device_type, rehearsal.rounding_bytes)
        self.storages = AllocationLog()
        self.log = self.storages
        self.storage_marks: list[Mark] = []
        """Where the step came to a module that is watched."""

    @contextlib.contextmanager
    def without_log(self) -> Iterator[None]:
        """What comes is in the books and in no log."""
        log, self.log = self.log, None
        try:
            yield
        finally:
            self.log = log

    def move_to(self, phase: Phase, module_fqn: str, call: int) -> None:
        super().move_to(phase, module_fqn, call)
        if module_fqn:
            self.storage_marks.append((phase, module_fqn, self.storages.num_events))


class _Both:
    """Two logs that are told the same."""

    def __init__(self, first: AllocationLog, second: AllocationLog) -> None:
        self._logs = first, second

    def allocate(self, key: int, num_bytes: int) -> None:
        for log in self._logs:
            log.allocate(key, num_bytes)

    def free(self, key: int) -> None:
        for log in self._logs:
            log.free(key)


class EventRecorder(LogRecorder):
    """Has another log, of what an allocator is asked for: with what kernels allocate inside themselves, and without
    what is new on fake tensors alone."""

    def __init__(self, rehearsal: FakeRehearsal, log: AllocationLog, hardware: Hardware | None = None) -> None:
        super().__init__(rehearsal)
        self.events = log
        self.marks: list[Mark] = []
        self.log = self._both = _Both(self.storages, log)
        self._kernels = KernelTemporaries(hardware)
        self._is_dropout = self._has_seed = False
        self._call: tuple[Any, tuple[Any, ...]] | None = None
        """The operator whose results are seen, and its arguments, where something is allocated between them."""
        self.thread: Thread = "forward"
        self.is_optimizing = False
        self.shared: SharedOut | None = None
        """What ranks that share the model out allocate; None: each has all of it."""
        self._has_card_kernels = rehearsal.target_type == CARD_TYPE

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._has_card_kernels and func in OPENED:
            return self._run_opened(func, args, kwargs)
        self._is_dropout = func is _aten.native_dropout.default
        self._has_seed = self._has_card_kernels and func is _EFFICIENT
        is_between = self._has_card_kernels and func is _aten.convolution_backward.default
        self._call = (func, args) if is_between else None
        self.events.place = self._place_of(func)
        result = super().run(func, args, kwargs)
        if func is _aten.add.Tensor and self.thread == "backward" and not torch.is_grad_enabled():
            self._see_sum(result, args)
        if func in PRODUCTS:
            self.events.multiply(self.thread)
        elif self._has_card_kernels:
            self.events.pass_by(*self._kernels.inside(func, args, result, kwargs))
        return result

    def _run_opened(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self, self.without_storages():
            result = OPENED[func](*args, **kwargs)
        storage = result.untyped_storage()
        self.storages.allocate(private.storage_key(storage), storage.nbytes())
        return result

    @contextlib.contextmanager
    def without_storages(self) -> Iterator[None]:
        """What comes is in the allocator's log alone."""
        self.log = self.events
        try:
            yield
        finally:
            self.log = self._both

    @contextlib.contextmanager
    def optimizing(self) -> Iterator[None]:
        """The optimizer steps."""
        self.is_optimizing = self.reads_any_number = True
        try:
            with self.without_storages():
                yield
        finally:
            self.is_optimizing = self.reads_any_number = False

    def move_to(self, phase: Phase, module_fqn: str, call: int) -> None:
        super().move_to(phase, module_fqn, call)
        if module_fqn:
            self.marks.append((phase, module_fqn, self.events.num_events))
        if self.shared is not None:
            self.shared.move(phase, module_fqn)

    def _place_of(self, func: Any) -> Place:
        phase, module_fqn, _ = self._place
        return _place("optimizer", "", func) if self.is_optimizing else _place(phase, module_fqn, func)

    def _see_sum(self, result: torch.Tensor, summands: tuple[Any, ...]) -> None:
        """See NOTE [sums of gradients]. A view's memory is also its base's, and is not added to."""
        num_bytes = result.untyped_storage().nbytes()
        whole = (summand for summand in summands if isinstance(summand, torch.Tensor) and summand._base is None)
        storages = [summand.untyped_storage() for summand in whole]
        alike = [private.storage_key(storage) for storage in storages if storage.nbytes() == num_bytes]
        self.events.sum_up(private.storage_key(result.untyped_storage()), alike)

    def see_all(self, tree: Any, kind: Kind | None = None) -> None:
        """A dropout's mask is allocated before its result; seeds of attention are not the device's; the backward of
        a convolution has a kernel with a workspace of its own for each of its results."""
        if self._call is not None:
            (func, args), self._call = self._call, None
            for leaf, sizes in itertools.zip_longest(
                tree, list(self._kernels.after_each(func, args, tree)), fillvalue=()
            ):
                super().see_all([leaf], kind)
                self.events.pass_by(sizes)
            return
        tree = tree[:2] if self._has_seed else tree
        super().see_all(tree[::-1] if self._is_dropout else tree, kind)


@functools.lru_cache(maxsize=65536)
def _place(phase: str, module_fqn: str, func: Any) -> Place:
    return Place(phase, module_fqn, str(func))
