"""Live bytes by kind, on any device: the books that `memscale.measure()` and every rehearsal keep.

Bytes are counted by unique storage, at operator boundaries: every operator's results enter the books when it
returns, and leave them when the last tensor on their storage dies. What a kernel allocates and frees inside itself
(a workspace) is not seen. bitsandbytes' optimizer steps on a CPU are one operator each, but written in others, with
temporaries several times as large as the parameter: those are seen.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import weakref
from typing import Any, Literal, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from memscale._torch import private
from memscale._units import round_up

Kind = Literal["parameters", "gradients", "optimizer state", "activations", "temporaries", "other"]
KINDS: tuple[Kind, ...] = (
    "parameters",
    "gradients",
    "optimizer state",
    "activations",
    "temporaries",
    "other",
)

ACCELERATOR_ROUNDING_BYTES = 512
"""Device allocators hand out memory in such blocks."""


def rounding_of(device_type: str) -> int:
    """The blocks in which this device's allocator hands out memory; the host's waste is not counted."""
    return 1 if device_type == "cpu" else ACCELERATOR_ROUNDING_BYTES


_OPENED = ("optimizer_update_32bit", "optimizer_update_8bit_blockwise")
"""bitsandbytes' operators whose kernels for a CPU are written in operators."""


class Log(Protocol):
    """Is told what is allocated and freed, in order. Keys are those of live storages: they come back."""

    def allocate(self, key: int, num_bytes: int) -> None:
        """A storage of this many bytes, not rounded; or one that is there has this many from now on."""

    def free(self, key: int) -> None: ...


class Recall(Protocol):
    """Knows what operators on fake tensors give, where that is said by shapes alone.

    Answers here, in the mode that is asked first, spare an operator the way through all modes below.
    """

    def find(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> private.Remembered | None:
        """None: the operator has to run."""

    def again(self, known: private.Remembered, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the operator gives, and all that it does."""


@dataclasses.dataclass(slots=True)
class _Entry:
    num_bytes: int
    kind: Kind
    alive: weakref.ref[torch.UntypedStorage]


class LiveBytes(TorchDispatchMode):
    """Keeps the books of live storages while it is the active dispatch mode."""

    def __init__(self, device_type: str, rounding_bytes: int = 1, *, counts_fakes: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts_fakes = counts_fakes
        self.opens_kernels = device_type == "cpu"
        """Set to False where tensors on the CPU stand for those of another device, with kernels of its own."""
        self.device_type = device_type
        self.rounding_bytes = rounding_bytes
        self.log: Log | None = None
        self.recall: Recall | None = None
        """Knows what some operators on fake tensors give; None: every operator runs."""
        self.known: private.Remembered | None = None
        """What is remembered of the last operator, if it was not run; else None."""
        self.total_bytes = 0
        self.peak_bytes = 0
        self.by_kind: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        self.peak_by_kind: dict[Kind, int] = dict(self.by_kind)
        self._entries: dict[int, _Entry] = {}
        # Backward of an accelerator runs in threads of its own, and garbage is collected anywhere.
        self._lock = threading.RLock()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operator, whose results enter the books. Subclasses see more; PyTorch wraps every `__torch_dispatch__` of
        a mode into two functions more, so there is only one."""
        if self.opens_kernels and func.namespace == "bitsandbytes" and _is_opened(func, args):
            with self:
                result = private.run_opened(func, "cpu", args, kwargs)
            self.known = None  # that was of what is inside
            return result
        result = self._remembered(func, args, kwargs)
        if self.known is None:
            result = private.run_below_mode(func, args, kwargs)
        if isinstance(result, torch.Tensor):
            self.see(result)
        elif isinstance(result, tuple | list):
            self.see_all(result)
        return result

    def _remembered(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the operator gives, where that is `known`."""
        recall = self.recall
        known = self.known = None if recall is None else recall.find(func, args, kwargs)
        return None if known is None or recall is None else recall.again(known, func, args, kwargs)

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's storage is in the books."""
        return private.storage_key(tensor.untyped_storage()) in self._entries

    def see_all(self, tree: Any, kind: Kind | None = None) -> None:
        is_flat = isinstance(tree, tuple | list) and all(isinstance(leaf, torch.Tensor) for leaf in tree)
        for leaf in tree if is_flat else tree_leaves(tree):
            if isinstance(leaf, torch.Tensor):
                self.see(leaf, kind)

    def see(self, tensor: torch.Tensor, kind: Kind | None = None) -> None:
        """Enter a tensor's storage into the books; a `kind` given renames what is there already."""
        if private.is_fake(tensor) != self.counts_fakes:
            return
        if private.device_type_of(tensor) != self.device_type:
            return
        if not self.counts_fakes and hasattr(tensor, "__tensor_flatten__"):
            # A wrapper subclass shows a storage of its nominal size; its bytes are in the tensors that it holds.
            names = tensor.__tensor_flatten__()[0]
            self.see_all([getattr(tensor, name) for name in names], kind)
            return
        if tensor.layout is not torch.strided:
            self.see_all(parts_of_sparse(tensor), kind)
            return
        storage = tensor.untyped_storage()
        with self._lock:
            self._enter(storage, kind)

    def _enter(self, storage: torch.UntypedStorage, kind: Kind | None) -> None:
        key = private.storage_key(storage)
        num_bytes = self._round(storage.nbytes())
        entry = self._entries.get(key)
        if entry is None:
            if num_bytes:
                alive = weakref.ref(storage, functools.partial(self._leave, key))
                entry = _Entry(num_bytes, kind or self._kind_now(), alive)
                self._entries[key] = entry
                self._count(entry.kind, num_bytes)
                self._note(key, storage.nbytes())
        elif kind not in (None, entry.kind) or num_bytes != entry.num_bytes:
            if num_bytes != entry.num_bytes:
                self._note(key, storage.nbytes())
            self._count(entry.kind, -entry.num_bytes)
            entry.kind, entry.num_bytes = kind or entry.kind, num_bytes
            self._count(entry.kind, num_bytes)

    def _leave(self, key: int, dead: weakref.ref[torch.UntypedStorage]) -> None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.alive is dead:
                del self._entries[key]
                self._count(entry.kind, -entry.num_bytes)
                if self.log is not None:
                    self.log.free(key)

    def _note(self, key: int, num_bytes: int) -> None:
        if self.log is not None:
            self.log.allocate(key, num_bytes)

    def _count(self, kind: Kind, num_bytes: int) -> None:
        self.by_kind[kind] += num_bytes
        self.total_bytes += num_bytes
        if self.total_bytes > self.peak_bytes:
            self.peak_bytes = self.total_bytes
            self.peak_by_kind = dict(self.by_kind)

    def _round(self, num_bytes: int) -> int:
        return round_up(num_bytes, self.rounding_bytes)

    def _kind_now(self) -> Kind:
        """What is computed with gradients on will be saved for backward, also in a recompute."""
        return "activations" if torch.is_grad_enabled() else "temporaries"

    def reset_peak(self) -> None:
        with self._lock:
            self.peak_bytes, self.peak_by_kind = self.total_bytes, dict(self.by_kind)


def _is_opened(func: Any, args: tuple[Any, ...]) -> bool:
    name = func.name().partition("::")[2]
    tensors = (arg for arg in args if isinstance(arg, torch.Tensor))
    return name in _OPENED and all(private.device_type_of(tensor) == "cpu" for tensor in tensors)


def parts_of_sparse(tensor: torch.Tensor) -> list[torch.Tensor]:
    """What a sparse tensor consists of; other layouts hide their storages."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout is torch.sparse_csr:
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return []
