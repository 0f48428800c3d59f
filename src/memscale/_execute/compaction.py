"""What stays on the device is moved together, so that no page of it is held for the gaps between.

Weights lie in the segments that building the model made, with up to a tenth unused in each. The optimizer's state is
made in the first step, in the gaps that its activations left between gradients, and stays there when those are gone.
Caching allocators give back whole pages alone. So the plan may ask that what stays goes to the host for a moment, all
unused memory goes back to the card, and it returns in one piece: weights when the plan is attached, and once more with
the state before the second step. `_planning/reserved/least_reserved.py` decides when that pays.

NOTE [storages stay]: the storage objects stay, and get other memory. So every tensor over them follows: views, tied
weights, what a graph has saved. What is known by an address alone (a tensor that another library imported, memory that
another process maps) would not. So storages that somebody else holds, too, stay where they are, and so do those of
tensors that stand for others (shards, quantized weights).
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memscale._errors import OffloadError
from memscale._execute.interrupts import undisturbed
from memscale._hardware.host import host_memory
from memscale._plan import ReleasePoint
from memscale._torch import private
from memscale._torch.optimizer_steps import StepWatcher, steps_model, watch_steps
from memscale._torch.overrides import undo_with
from memscale._units import show_bytes
from memscale.techniques.offload.optimizer.buckets import Waiting, values_here
from memscale.techniques.offload.parameters.parameter_homes import slots_of

logger = logging.getLogger("memscale")

_OWN_HOLDERS = 1
"""The object through which a storage is looked at."""

Storages = list[tuple[torch.UntypedStorage, list[torch.Tensor]]]
"""Storages, each with the tensors over it that are known."""

_PLACED: weakref.WeakKeyDictionary[nn.Module, set[tuple[int, int]]] = weakref.WeakKeyDictionary()
"""What was moved together last of each model, and to where: plans that take turns do not move it again."""


class Compaction(StepWatcher):
    """Moves together what stays of one model: now, and before the step that follows the optimizer's first."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._optimizers: list[weakref.ref[Optimizer]] = []
        """Those that have stepped, until what stays has been moved together with their state."""
        self._is_done = False

    def attach(self, undo: contextlib.ExitStack) -> None:
        """Move weights, and watch for the optimizer until undone. `reached` is to be called at the begin of steps."""
        model = self._model()
        assert model is not None, "who attaches holds the model"
        undo_with(model, watch_steps(self), undo)
        undo.callback(setattr, self, "_is_done", True)
        move_together(model, weights_of(model))

    def concerns(self, optimizer: Optimizer) -> bool:
        model = self._model()
        return not self._is_done and model is not None and steps_model(optimizer, model)

    def after_step(self, optimizer: Optimizer) -> None:
        if optimizer.state and not any(known() is optimizer for known in self._optimizers):
            self._optimizers.append(weakref.ref(optimizer))

    def reached(self, point: ReleasePoint) -> None:
        """A step begins."""
        model = self._model()
        if self._is_done or not self._optimizers or model is None:
            return
        self._is_done = True
        state = list(state_of(one for known in self._optimizers if (one := known()) is not None))
        if any(map(_may_move, state)):  # else it waits elsewhere
            move_together(model, [*weights_of(model), *state])


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers, wherever they are."""
    return [slot.get() for slot in slots_of(model.modules(), buffers=True)]


def state_of(optimizers: Iterable[Optimizer]) -> Iterator[torch.Tensor]:
    """The state that does not wait elsewhere, and buckets of state that wait on the device itself."""
    buckets = {}
    for optimizer in optimizers:
        for entry in optimizer.state.values():
            yield from (value for value in values_here(entry).values() if isinstance(value, torch.Tensor))
            if isinstance(entry, Waiting) and entry.bucket is not None:
                buckets[id(entry.bucket)] = entry.bucket
    yield from (bucket.memory for bucket in buckets.values() if bucket.memory is not None)


def move_together(model: nn.Module, tensors: Iterable[torch.Tensor]) -> int:
    """Give the storages of these tensors memory side by side, where nobody else holds them. Returns their bytes; 0 if
    they lie where they were put before.

    Raises:
        OffloadError: Somebody else took the memory meanwhile. What found no room is on the host.
    """
    storages = _movable(tensors)
    num_bytes = sum(storage.nbytes() for storage, _ in storages)
    if not storages or _places(storages) <= _PLACED.get(model, set()):
        return 0
    if num_bytes > host_memory()[1]:
        logger.warning(
            "%s of weights and optimizer state are not moved together, because host memory has no room for them for a "
            "moment. More may be reserved than the plan says.",
            show_bytes(num_bytes),
        )
        return 0
    for device in {storage.device for storage, _ in storages}:
        torch.accelerator.synchronize(device)  # copies on other streams may still read or write
    with undisturbed():
        waiting: list[_Waiting] = []
        try:
            for storage, over in storages:
                waiting.append(_Waiting(storage, over))
            torch.accelerator.empty_cache()
        finally:
            _bring_back(waiting)
    _PLACED[model] = _places(storages)
    return num_bytes


def _places(storages: Storages) -> set[tuple[int, int]]:
    """Where these lie: which storages they are, and their memory."""
    return {(private.storage_key(storage), storage.data_ptr()) for storage, _ in storages}


class _Waiting:
    """A storage whose contents are on the host: its own memory is free."""

    def __init__(self, storage: torch.UntypedStorage, over: list[torch.Tensor]) -> None:
        self.storage, self.over = storage, over
        self.host = _bytes_over(storage).to("cpu", copy=True)
        storage.resize_(0)

    def bring_back(self) -> None:
        self.storage.resize_(self.host.numel())
        _bytes_over(self.storage).copy_(self.host)

    def stay(self) -> None:
        """Let the tensors be on the host."""
        for tensor in self.over:
            offset, shape, stride = int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())
            storage = self.host.untyped_storage()
            tensor.data = private.tensor_over(storage, tensor.dtype, self.host.device, offset, shape, stride)


def _bring_back(waiting: list[_Waiting]) -> None:
    for index, one in enumerate(waiting):
        try:
            one.bring_back()
        except torch.OutOfMemoryError as error:
            left = waiting[index:]
            for other in left:
                other.stay()
            raise OffloadError(
                f"{show_bytes(sum(other.host.numel() for other in left))} of weights and optimizer state do not fit "
                f"back on {one.storage.device}, because something else has taken memory there, and stay on the host; "
                "free device memory and move the model there with .to()"
            ) from error


def _movable(tensors: Iterable[torch.Tensor]) -> Storages:
    """The storages that only these tensors hold, the largest first."""
    found: dict[int, tuple[torch.UntypedStorage, list[torch.Tensor]]] = {}
    for tensor in {id(tensor): tensor for tensor in tensors if _may_move(tensor)}.values():
        storage = tensor.untyped_storage()
        found.setdefault(private.storage_key(storage), (storage, []))[1].append(tensor)
    storages = [(storage, over) for storage, over in found.values() if storage.resizable()]
    held = sum(storage.nbytes() for storage, over in storages if _is_held(storage, over))
    if held:
        logger.warning(
            "%s of weights and optimizer state stay where they are, because other tensors share that memory (a "
            "state_dict that is kept). More may be reserved than the plan says.",
            show_bytes(held),
        )
    free = [(storage, over) for storage, over in storages if not _is_held(storage, over)]
    return sorted(free, key=lambda one: -one[0].nbytes())


def _may_move(tensor: Any) -> bool:
    return bool(
        tensor.device.type not in ("cpu", "meta")
        and tensor.layout is torch.strided
        and not private.is_fake(tensor)
        and not is_traceable_wrapper_subclass(tensor)
        and not nn.parameter.is_lazy(tensor)
        and tensor.untyped_storage().nbytes() > 0
    )


def _is_held(storage: torch.UntypedStorage, over: list[torch.Tensor]) -> bool:
    return private.num_holders(storage) > len(over) + _OWN_HOLDERS


def _bytes_over(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
