"""Activation offload (exact): what a layer saves for backward waits in a store and is back before it is needed.

Saved tensors travel as stretches of their storage, not one by one: views of one storage (query, key and value of one
product), and tensors that several operators save, travel once and share memory again when they are back, with the
strides and offsets that they had.

NOTE [when a copy stands for a tensor]: a storage is known by its identity, and only while it lives, because a new one
may get the same address. The stretch and the version belong to the key, so a tensor that was changed in place travels
again. Versions can be compared only if they come from the same counter: the gates of an LSTM cell are chunks of one
storage, each has a counter of its own, and each is changed in place after the one before was saved. While the storage
lives, for whatever reason, backward takes the tensor from there and nothing moves.

NOTE [changed in place]: with hooks, autograd no longer notices that a saved tensor was changed before backward needed
it. Each saved tensor therefore leaves a witness here, which shares its version counter and no memory, and backward
raises as plain PyTorch does. The same holds for tensors that stay where they are, parameters among them.

NOTE [used sources]: the tensors that were sent last are still in the transfers' window when backward begins, and are
taken from there. Once they are used nobody needs their bytes again, but the window would hold them until the pass ends.
They are let go of when backward has waited for the first tensor that came back: that one was sent before them, and was
on its way for a while, so their copies are most likely made, and the wait for these takes no time. A window of the
default size holds little, often less than one layer saves, and keeps it.

NOTE [backward passes]: a tensor that is fetched ahead belongs to the backward pass that fetched it, and is freed with
that pass, however it ends. A saved tensor belongs to the graph. Nothing else holds either of them.

These tensors stay where they are: parameters and buffers (recognised by storage), small tensors, expanded tensors,
subclasses, tensors of other devices, and what an operator may fill only after autograd has saved it (filled_later.py).

Known limit: a write that goes past the version counter (`.data`, foreign kernels) is seen in the first forwards of
layers whose code names `.data` (silent_writes.py). Elsewhere it is not: backward gets the value of the first saving.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Collection, Iterable
from typing import Any, TypeAlias

import torch
from torch import nn

from memscale._errors import MemScaleError
from memscale._plan import OffloadActivations
from memscale._torch import private
from memscale._torch.overrides import ForwardOverride, find_module, transforms_refused
from memscale.techniques.offload.activations.filled_later import is_unfilled, may_fill_later
from memscale.techniques.offload.store.stores import Layout, Ticket, can_store
from memscale.techniques.offload.transfer.stream_order import TransferStats
from memscale.techniques.offload.transfer.transfers import WINDOW_BYTES, Arrival, Transfers
from memscale.techniques.recompute.silent_writes import SilentWrites, is_watched_here, may_write_silently

MIN_TENSOR_BYTES = 1024 * 1024
PREFETCH_BYTES = 64 * 1024 * 1024
KEPT_WINDOW_BYTES = WINDOW_BYTES
"""The largest window that keeps used sources until a pass ends. See NOTE [used sources]."""
WHOLE_STORAGE_RATIO = 4
"""A storage up to this many times as large as the tensor travels whole: its other parts are likely to be saved too."""

Key: TypeAlias = tuple[int, int, int, int]
"""Storage, version, first byte, last byte."""


class Stretch:
    """Bytes of one storage that wait in the store. It lives as long as a graph holds a tensor of it."""

    __slots__ = ("__weakref__", "handles", "number", "start", "storage", "ticket", "witness")

    def __init__(
        self, number: int, storage: torch.UntypedStorage, start: int, ticket: Ticket, witness: torch.Tensor
    ) -> None:
        self.number = number
        """Its place in the order of sending."""
        self.storage = weakref.ref(storage)
        self.start = start
        self.ticket = ticket
        self.witness = witness
        """The witness of the tensor for which the stretch was sent. See NOTE [changed in place]."""
        self.handles: weakref.WeakSet[Handle] = weakref.WeakSet()


class Handle:
    """What autograd keeps in place of one saved tensor."""

    __slots__ = ("__weakref__", "device", "dtype", "offset", "refusal", "shape", "stretch", "stride", "version")

    def __init__(self, stretch: Stretch, tensor: torch.Tensor) -> None:
        self.stretch = stretch
        self.device = tensor.device
        self.dtype = tensor.dtype
        self.shape, self.stride = tuple(tensor.shape), tuple(tensor.stride())
        self.offset = int(tensor.storage_offset())
        self.version = tensor._version
        self.refusal: str | None = None
        """Why the stretch does not stand for the tensor. See silent_writes.py."""
        stretch.handles.add(self)

    def over(self, storage: torch.UntypedStorage, start: int) -> torch.Tensor:
        """Return the tensor over a storage whose first byte is byte `start` of the original storage."""
        offset = self.offset - start // self.dtype.itemsize
        return private.tensor_over(storage, self.dtype, self.device, offset, self.shape, self.stride)

    def refuse_changed(self) -> None:
        """Raise if the tensor was changed since it was saved. See NOTE [changed in place]."""
        _refuse_changed(self.stretch.witness, self.version, self.dtype, self.shape)


class Kept:
    """What autograd keeps for a saved tensor that stays where it is. See NOTE [changed in place]."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = private.detach_with_version(tensor)  # a saved output holds the node, which holds this object
        self.version = tensor._version

    def unpack(self) -> torch.Tensor:
        _refuse_changed(self.tensor, self.version, self.tensor.dtype, tuple(self.tensor.shape))
        return self.tensor


def _refuse_changed(witness: torch.Tensor, version: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if witness._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a {dtype} tensor of shape {list(shape)} is at version {witness._version}; "
            f"expected version {version} instead"
        )


class Pass:
    """What one backward pass has brought back or is bringing. See NOTE [backward passes]."""

    def __init__(self, offloader: Offloader) -> None:
        self._offloader = offloader
        self._ahead: dict[Stretch, Arrival] = {}
        self._held: dict[Stretch, tuple[torch.Tensor, weakref.WeakSet[Handle]]] = {}
        self._lowest: int | None = None
        """The lowest number of a stretch that this pass has considered; a pass goes backwards."""

    def bring(self, handle: Handle) -> torch.UntypedStorage:
        """Return the stretch's bytes on the device. Its tensors share them until this pass has used the last one."""
        stretch = handle.stretch
        held = self._held.pop(stretch, None)
        if held is None:
            arrival = self._ahead.pop(stretch, None) or self._offloader.fetch(stretch)
            held = (arrival.wait(), weakref.WeakSet(stretch.handles))
        line, waiting = held
        waiting.discard(handle)
        if waiting:
            self._held[stretch] = held
        return line.untyped_storage()

    def look_ahead(self, stretch: Stretch) -> None:
        """Start fetching the stretches sent before this one, the latest first, within a bound of device memory."""
        self._held = {one: held for one, held in self._held.items() if held[1]}
        if self._lowest is None or stretch.number < self._lowest:
            self._lowest = stretch.number
        room = self._offloader.prefetch_bytes - sum(one.ticket.num_bytes for one in self._ahead)
        while (before := self._offloader.sent_before(self._lowest)) is not None:
            if before.storage() is None:
                if before.ticket.num_bytes > room and self._ahead:
                    return
                self._ahead[before] = self._offloader.fetch(before)
                room -= before.ticket.num_bytes
            self._lowest = before.number

    def close(self) -> None:
        self._ahead, self._held = {}, {}
        self._offloader.sweep()

    def __del__(self) -> None:
        self.close()


@dataclasses.dataclass(slots=True)
class ActivationStats:
    """Counts of what has been offloaded so far."""

    transfers: TransferStats
    num_saved: int = 0
    """The number of tensors that the planned layers saved and that went to the store."""
    num_sent: int = 0
    """The number of stretches that went there. It is smaller, because tensors share stretches."""
    sent_bytes: int = 0
    fetched_bytes: int = 0
    num_in_place: int = 0
    """The number of tensors that were still on the device when backward needed them."""


class Offloader:
    """Packs and unpacks the saved tensors of the planned layers of one model."""

    def __init__(
        self, device: torch.device, transfers: Transfers, *, min_tensor_bytes: int, prefetch_bytes: int
    ) -> None:
        self.device = device
        self.transfers = transfers
        self.min_tensor_bytes = min_tensor_bytes
        self.prefetch_bytes = prefetch_bytes if transfers.asynchronous else 0
        self.stats = ActivationStats(transfers.stats)
        self.closed = False
        self._known: dict[Key, weakref.ref[Stretch]] = {}
        self._sent: list[tuple[int, weakref.ref[Stretch]]] = []
        self._passes: weakref.WeakValueDictionary[int, Pass] = weakref.WeakValueDictionary()
        self._count = 0
        self._lock = threading.RLock()

    # ------------------------------------------------------------------------------------------------------ forward

    def pack(self, tensor: torch.Tensor, resident: frozenset[int]) -> Any:
        """Return what autograd is to keep: a handle, or a `Kept` tensor if it stays where it is."""
        if not self._may_travel(tensor):
            return tensor.detach() if tensor.is_inference() else Kept(tensor)
        storage = tensor.untyped_storage()
        if private.storage_key(storage) in resident:
            return Kept(tensor)
        with self._lock:
            stretch = self._stretch_of(tensor, storage)
            self.stats.num_saved += 1
            return Handle(stretch, tensor)

    def _may_travel(self, tensor: torch.Tensor) -> bool:
        if not (can_store(tensor) or private.is_fake(tensor)) or tensor.layout is not torch.strided:
            return False
        is_expanded = any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
        is_here = private.device_type_of(tensor) == self.device.type
        is_plain = not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference())
        return is_here and is_plain and not is_expanded and tensor.nbytes >= max(self.min_tensor_bytes, 1)

    def _stretch_of(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> Stretch:
        """Return the stretch that stands for a tensor, new or known. See NOTE [when a copy stands for a tensor]."""
        start, end = _stretch(tensor, storage)
        key = (private.storage_key(storage), tensor._version, start, end)
        known = self._known.get(key)
        stretch = known() if known is not None else None
        is_same = stretch is not None and stretch.storage() is storage
        if stretch is not None and is_same and private.share_version_counter(stretch.witness, tensor):
            return stretch
        line = private.tensor_over(storage, torch.uint8, tensor.device, start, (end - start,), (1,))
        ticket = self.transfers.send(line)
        if not self.transfers.asynchronous:
            self.transfers.wait_sent(ticket)
        self._count += 1
        stretch = Stretch(self._count, storage, start, ticket, private.version_witness(tensor))
        if ticket.sent is not None:
            ticket.sent.owner = weakref.ref(stretch)
        self._known[key] = weakref.ref(stretch)
        self._sent.append((stretch.number, weakref.ref(stretch)))
        self.stats.num_sent += 1
        self.stats.sent_bytes += end - start
        return stretch

    # ----------------------------------------------------------------------------------------------------- backward

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, Kept):
            return packed.unpack()
        if not isinstance(packed, Handle):
            tensor: torch.Tensor = packed
            return tensor
        packed.refuse_changed()
        if self.closed:
            raise RuntimeError(
                "MemScale was detached, or planned again, between this forward and its backward: the tensors that the "
                "forward saved are gone. Call backward() first."
            )
        with self._lock, torch.no_grad():
            current = self._pass()
            storage = packed.stretch.storage()
            start = 0
            if storage is not None:
                self.stats.num_in_place += 1
            else:
                if packed.refusal is not None:
                    raise MemScaleError(packed.refusal)
                storage, start = current.bring(packed), packed.stretch.start
                if self.transfers.window_bytes > KEPT_WINDOW_BYTES:
                    self.transfers.release_unneeded()  # see NOTE [used sources]
            if self.prefetch_bytes:
                current.look_ahead(packed.stretch)
            return packed.over(storage, start)

    def fetch(self, stretch: Stretch) -> Arrival:
        self.stats.fetched_bytes += stretch.ticket.num_bytes
        return self.transfers.fetch(stretch.ticket)

    def _pass(self) -> Pass:
        task_id = private.graph_task_id()
        found = self._passes.get(task_id) if task_id >= 0 else None
        if found is None:
            found = Pass(self)
            if task_id >= 0:
                self._passes[task_id] = found
                private.at_end_of_backward(found.close)
        return found

    def sent_before(self, number: int) -> Stretch | None:
        """Return the latest stretch below this number that a graph still holds."""
        position = bisect.bisect_left(self._sent, number, key=lambda entry: entry[0])
        while position:
            position -= 1
            stretch = self._sent[position][1]()
            if stretch is not None:
                return stretch
        return None

    def sweep(self) -> None:
        """Forget stretches that no graph holds, and release the last sources: the next forward is far away."""
        with self._lock:
            self._sent = [entry for entry in self._sent if entry[1]() is not None]
            self._known = {key: known for key, known in self._known.items() if known() is not None}
            self.transfers.store.sweep()
            self.transfers.release_sources()

    def close(self) -> None:
        self.closed = True


def _stretch(tensor: torch.Tensor, storage: torch.UntypedStorage) -> tuple[int, int]:
    """Return the bytes that travel for a tensor: its whole storage, or its own part if that is much smaller."""
    layout = Layout.of(tensor)
    num_bytes = layout.span * tensor.dtype.itemsize
    if storage.nbytes() <= WHOLE_STORAGE_RATIO * tensor.nbytes:
        return 0, storage.nbytes()
    start = int(tensor.storage_offset()) * tensor.dtype.itemsize
    return start, start + num_bytes


class OffloadedForward(ForwardOverride):
    """The forward of a layer whose saved tensors wait on the next tier.

    Around a recomputed layer, it sees only what that layer keeps: its inputs. Inside of a transform of `torch.func`
    nothing waits elsewhere.
    """

    def __init__(self, module: nn.Module, module_fqn: str, offloader: Offloader, elsewhere: _Residents) -> None:
        super().__init__(module)
        self.module_fqn = module_fqn
        self.offloader = offloader
        self._elsewhere = elsewhere
        self._watched: set[tuple[bool, ...]] = set()
        """The states of the training flags in which a forward was watched for silent writes."""

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or private.inside_functional_transform():
            return self.inner()(*args, **kwargs)
        resident = frozenset(self._elsewhere.keys() | _Residents(self.module).keys())
        packing = _Packing(self.offloader, resident, keeps_unfilled=may_fill_later(self.module))
        packing.silent = self._watch(resident)
        try:
            with (
                transforms_refused(self.module_fqn),
                torch.autograd.graph.saved_tensors_hooks(packing.pack, self.offloader.unpack),
                contextlib.nullcontext() if packing.silent is None else packing.silent.watched(),
            ):
                output = self.inner()(*args, **kwargs)
            if packing.silent is not None:
                _note_overwritten(packing.silent)
            return output
        except BaseException:
            self.offloader.sweep()
            raise

    def _watch(self, resident: Collection[int]) -> SilentWrites | None:
        """Watch the first forward in each state of the training flags, where it may write past autograd."""
        if not is_watched_here():
            return None
        flags = tuple(part.training for part in self.module.modules())
        if flags in self._watched:
            return None
        self._watched.add(flags)
        if not may_write_silently(self.module):
            return None
        return SilentWrites(self.module, self.module_fqn, apart=resident)


class _Packing:
    """The pack hook of one call."""

    def __init__(self, offloader: Offloader, resident: frozenset[int], *, keeps_unfilled: bool) -> None:
        self._offloader = offloader
        self._resident = resident
        self._keeps_unfilled = keeps_unfilled
        """Whether tensors stay that may be filled only now. See filled_later.py."""
        self.silent: SilentWrites | None = None

    def pack(self, tensor: torch.Tensor) -> Any:
        if self._keeps_unfilled and not tensor.is_inference() and is_unfilled(tensor):
            return Kept(tensor)
        packed = self._offloader.pack(tensor, self._resident)
        if self.silent is not None and isinstance(packed, Handle):
            self.silent.saved(tensor, packed)
        return packed


def _note_overwritten(silent: SilentWrites) -> None:
    """Let backward refuse what was written to past autograd, unless it is still there then."""
    for handle in silent.overwritten():
        handle.refusal = silent.refusal_of_saved()


class _Residents:
    """The storages of a module's parameters and buffers, which are on the device anyway."""

    def __init__(self, module: nn.Module) -> None:
        tensors = [t for t in (*module.parameters(), *module.buffers()) if t.layout is torch.strided]
        storages = [tensor.untyped_storage() for tensor in tensors]
        self._storages = {private.storage_key(storage): weakref.ref(storage) for storage in storages}

    def keys(self) -> set[int]:
        return {key for key, storage in self._storages.items() if storage() is not None}


def attach(
    actions: Iterable[OffloadActivations],
    model: nn.Module,
    device: torch.device,
    undo: contextlib.ExitStack,
    *,
    transfers: Transfers,
    min_tensor_bytes: int = MIN_TENSOR_BYTES,
    prefetch_bytes: int = PREFETCH_BYTES,
) -> Offloader:
    """Offload the saved tensors of these layers until undone. Attach it last, around checkpointing and streaming."""
    offloader = Offloader(device, transfers, min_tensor_bytes=min_tensor_bytes, prefetch_bytes=prefetch_bytes)
    undo.callback(offloader.close)
    elsewhere = _Residents(model)
    for action in actions:
        module = find_module(model, action.module_fqn)
        OffloadedForward(module, action.module_fqn, offloader, elsewhere).attach(undo)
    return offloader
