"""A card for small programs on a machine without one: fake tensors, and PyTorch's allocator as a model.

    card = Card(Hardware.from_name("A100"))
    with card.stage():
        step = program(...)                 # makes its tensors, returns what is repeated
        card.peak_of(step)                  # max_memory_allocated() of the last of some repetitions

What a program allocates goes through `memscale`'s own books and its model of the caching allocator, with the savings of
a GPU's kernels and what these allocate inside themselves; and with cuBLAS's workspace, one for each thread that
multiplies matrices, for good.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memscale import Hardware
from memscale._decide.allocator import SMALL_BYTES, CachingAllocator
from memscale._decide.allocator.blocks import Block
from memscale._planning.reserved.allocation_log import Thread
from memscale._planning.reserved.event_recorder import PRODUCTS
from memscale._planning.reserved.kernel_temporaries import KernelTemporaries
from memscale._profile.kernels_in_place import gpu_kernels
from memscale._profile.segments import SegmentRecorder
from memscale._torch import private
from memscale._torch.live_bytes import ACCELERATOR_ROUNDING_BYTES
from memscale._units import round_up

_aten = torch.ops.aten
SCATTERS = frozenset((_aten.scatter.src, _aten.scatter_add.default, _aten.index_put.default))
"""In backward they go into zeros that were made for them: in place, unless tensors are fake."""
NUM_REPETITIONS = 4
"""In the first one there are no gradients from before; from the second on all are alike."""


class _Blocks:
    """What the books are told becomes requests to the allocator."""

    def __init__(self, memory: CachingAllocator) -> None:
        self._memory = memory
        self._blocks: dict[int, Block] = {}
        self._num_large = 0
        self.num_large_at_peak = 0
        """How many blocks might have been up to 1 MiB larger or smaller, after other requests."""
        self.slack_at_peak_bytes = 0
        """What the blocks had beyond what was asked for."""

    def allocate(self, key: int, num_bytes: int) -> None:
        old = self._blocks.get(key)
        self._blocks[key] = self._memory.allocate(num_bytes)
        self._num_large += num_bytes > SMALL_BYTES
        if self._memory.allocated_bytes == self._memory.peak_allocated_bytes:
            self.num_large_at_peak = self._num_large
            blocks = self._blocks.values()
            self.slack_at_peak_bytes = sum(
                block.size_bytes - round_up(block.requested_bytes, ACCELERATOR_ROUNDING_BYTES) for block in blocks
            )
        if old is not None:
            self._free(old)

    def free(self, key: int) -> None:
        self._free(self._blocks.pop(key))

    def _free(self, block: Block) -> None:
        self._num_large -= block.requested_bytes > SMALL_BYTES
        self._memory.free(block)


class Card(SegmentRecorder):
    """Counts what programs would allocate on a card.

    Args:
        hardware: its kernels split long sums over its processors, and its cuBLAS takes a workspace.
        has_multiplied: what ran in the process before has left cuBLAS's workspaces of both threads.
        adds_in_place: autograd adds gradients that meet into the first of them where nobody else holds it. On fake
            tensors it never does. An addition inside a node's own backward looks the same from here, so this is for
            programs without one.
        lt_workspace_bytes: what a product with a bias takes while it is computed. cuBLASLt, which computes it, had a
            workspace of its own for each product until torch 2.12; since then it shares cuBLAS's.
    """

    def __init__(
        self,
        hardware: Hardware,
        *,
        has_multiplied: bool = False,
        adds_in_place: bool = False,
        lt_workspace_bytes: int = 0,
    ) -> None:
        super().__init__("cpu", ACCELERATOR_ROUNDING_BYTES, counts_fakes=True)
        self.memory = CachingAllocator()
        self.log = self.blocks = _Blocks(self.memory)
        self.adds_in_place = adds_in_place
        self._workspace_bytes = hardware.workspace_bytes
        self._lt_workspace_bytes = lt_workspace_bytes
        self._kernels = KernelTemporaries(hardware)
        self._threads: set[Thread] = set()
        if has_multiplied:
            self._multiply("forward")
            self._multiply("backward")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_backward = private.graph_task_id() >= 0
        if func in PRODUCTS:
            self._multiply("backward" if is_backward else "forward")
        if is_backward and (func in SCATTERS or (self.adds_in_place and func is _aten.add.Tensor)):
            self._give_up(args[0])
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for sizes in self._inside(func, args, result, kwargs):
            for block in [self.memory.allocate(num_bytes) for num_bytes in sizes]:
                self.memory.free(block)
        return result

    def _inside(
        self, func: Any, args: tuple[Any, ...], result: Any, kwargs: dict[str, Any] | None
    ) -> Iterator[tuple[int, ...]]:
        """What a call allocates and frees before it returns."""
        yield from self._kernels.inside(func, args, result, kwargs)
        if func is _aten.addmm.default and self._lt_workspace_bytes:
            yield (self._lt_workspace_bytes,)

    def _multiply(self, thread: Thread) -> None:
        if thread not in self._threads:
            self._threads.add(thread)
            self.memory.allocate(self._workspace_bytes)

    def _give_up(self, tensor: torch.Tensor) -> None:
        """The result will lie in this tensor's memory."""
        storage = tensor.untyped_storage()
        key = private.storage_key(storage)
        entry = self._entries.get(key)
        if entry is not None and private.num_holders(storage) == private.NUM_HOLDERS_IN_DISPATCH:
            self._leave(key, entry.alive)

    @contextlib.contextmanager
    def stage(self) -> Iterator[None]:
        """Tensors that are made in here are on the card."""
        with torch.autograd.set_multithreading_enabled(False), private.fake_tensor_mode(), gpu_kernels(), self:
            yield

    def peak_of(self, step: Callable[[], object], num_repetitions: int = NUM_REPETITIONS) -> int:
        """The most that is allocated in the last repetition, in bytes."""
        for _ in range(num_repetitions):
            self.memory.reset_peaks()
            step()
        return self.memory.peak_allocated_bytes
