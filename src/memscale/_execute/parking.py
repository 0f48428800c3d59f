"""Parking: a model between two steps gives all of its device memory back, and takes it again later.

    num_bytes = park(model)         # parameters, gradients, buffers and optimizer state are in host memory
    resume(model)                   # the same objects are on their devices again, bit for bit

The plan of a wrapped model stays attached: what it keeps on other tiers stays there, and what is on the device follows
the rest to the host. Tensors keep their identity, their data moves (`parameter.data = ...`), so optimizers, hooks,
schedulers and whoever else holds a `Parameter` notice nothing. While it is parked, the model can be saved, copied and
loaded, but not run: a forward or a step would compute on the host, with other kernels, or fail in the middle.

Known limits: tensors that are reached through no module and no optimizer (outputs, batches, a moving average of the
loop's own) stay where they are, and so does memory that such a tensor shares with the model, which is said. A module
attribute is found if it is a tensor, or one in lists, tuples and dictionaries. State in paged memory stays.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from memscale._errors import MemScaleError, OffloadError, ParkedError, StoreFullError
from memscale._execute.executor import Executor
from memscale._execute.reserving import empty_cache
from memscale._hardware.host import host_memory
from memscale._torch import private
from memscale._torch.optimizer_steps import StepWatcher, living_optimizers, owns_any, watch_steps
from memscale._torch.overrides import OwnHook, keep_copies_clean, undo_with
from memscale._torch.released_gradients import held_gradient
from memscale._units import show_bytes
from memscale.techniques.offload.optimizer.buckets import Bucket, Waiting, values_here
from memscale.techniques.offload.parameters.parameter_homes import CPU, Slot, overlapping, relocate, slots_of

logger = logging.getLogger("memscale")

_NOT_STATE = frozenset(vars(nn.Module()))
"""Attributes that every module has: its tables of parameters, buffers, children and hooks."""

_PARKED: weakref.WeakKeyDictionary[nn.Module, Parking] = weakref.WeakKeyDictionary()


def is_parked(model: nn.Module) -> bool:
    """Whether this very model was parked, and not resumed since."""
    return model in _PARKED


def park(model: nn.Module, executor: Executor | None = None, optimizer: Optimizer | None = None) -> int:
    """Move all that the model holds on devices to the host, all or nothing. Returns its bytes; 0 if it is there."""
    if model in _PARKED:
        return 0
    parking = Parking(model, executor, optimizer)
    num_bytes = parking.leave()
    _PARKED[model] = parking
    return num_bytes


def resume(model: nn.Module) -> int:
    """Move it back, all or nothing. Returns the bytes that were moved; 0 if it was not parked."""
    parking = _PARKED.get(model)
    if parking is None:
        return 0
    num_bytes = parking.come_back()
    del _PARKED[model]
    return num_bytes


class Parking(StepWatcher):
    """One model while it is parked: where everything came from, and what refuses to run it."""

    def __init__(self, model: nn.Module, executor: Executor | None, optimizer: Optimizer | None) -> None:
        self._model = weakref.ref(model)
        self._executor = weakref.ref(executor) if executor is not None else None
        known = {id(one): one for one in (*living_optimizers(), *([optimizer] if optimizer is not None else []))}
        owners = [one for one in known.values() if one is optimizer or owns_any(one, model.parameters())]
        self._optimizers = [weakref.ref(one) for one in owners]
        self._slots: list[tuple[Slot, torch.device]] = []
        self._state: dict[tuple[int, Any], torch.device] = {}
        """Where each value was, by the id of its parameter and the name of the value."""
        self._loose: list[tuple[weakref.ref[torch.Tensor], torch.device]] = []
        """Attributes of modules, options of optimizers, and tensors of ours."""
        self._guards = contextlib.ExitStack()

    # ---- there

    def leave(self) -> int:
        model = self._model()
        assert model is not None, "who parks holds the model"
        executor = self._executor() if self._executor is not None else None
        own = executor.let_go() if executor is not None else []
        self._slots = [
            (slot, slot.get().device)
            for slot in slots_of(model.modules(), buffers=True)
            if slot.get().device.type not in ("cpu", "meta")
        ]
        self._note_state()
        loose = [*own, *_attributes_of(model), *_options_of(self._living_optimizers())]
        self._loose = [(weakref.ref(tensor), tensor.device) for tensor in loose if tensor.device.type != "cpu"]
        tensors = self._tensors()
        _refuse_unmovable(tensor for tensor, _ in tensors)
        num_bytes = _bytes_of([tensor for tensor, _ in tensors]) + sum(bucket.num_bytes for bucket in self._packed())
        _require_room(num_bytes)
        self._tell_of_others([tensor for tensor, _ in tensors])
        devices = {device for _, device in tensors}
        for device in devices:
            torch.accelerator.synchronize(device)  # copies on other streams may still read or write
        _move([(tensor, CPU) for tensor, _ in tensors])
        for bucket in self._packed():
            assert bucket.memory is not None
            bucket.memory = bucket.memory.cpu()
        if devices or executor is not None:
            empty_cache()
        self._guard(model, executor)
        return num_bytes

    def _note_state(self) -> None:
        for parameter, name, value in self._state_tensors():
            if value.device.type != "cpu" and not getattr(value, "is_paged", False):
                self._state[id(parameter), name] = value.device

    def _guard(self, model: nn.Module, executor: Executor | None) -> None:
        refusal = _Refusal(type(model).__name__)
        for module in model.modules():
            self._guards.callback(module.register_forward_pre_hook(refusal, prepend=True).remove)
            keep_copies_clean(module, self._guards)
        undo_with(model, watch_steps(self), self._guards)
        if executor is not None:
            executor.resume_first = self._resume
            self._guards.callback(setattr, executor, "resume_first", None)

    def _resume(self) -> None:
        model = self._model()
        if model is not None:
            resume(model)

    # ---- back again

    def come_back(self) -> int:
        tensors = [(tensor, device) for tensor, device in self._tensors() if tensor.device != device]
        buckets = [bucket for bucket in self._packed() if bucket.memory is not None and bucket.memory.device == CPU]
        try:
            _move(tensors)
        except torch.OutOfMemoryError as error:
            needed = _bytes_of([tensor for tensor, _ in tensors]) + sum(bucket.num_bytes for bucket in buckets)
            empty_cache()
            raise OffloadError(
                f"{show_bytes(needed)} do not fit back on {', '.join(sorted({str(d) for _, d in tensors}))}: the model "
                "stays parked. Free device memory and call memscale.resume(model) again"
            ) from error
        for bucket in buckets:
            assert bucket.memory is not None
            bucket.memory = bucket.memory.to(bucket.device)
        self._guards.close()
        return _bytes_of([tensor for tensor, _ in tensors]) + sum(bucket.num_bytes for bucket in buckets)

    # ---- what there is

    def _tensors(self) -> list[tuple[torch.Tensor, torch.device]]:
        """What there is now of that which came from devices, and those devices. Each tensor once."""
        found: dict[int, tuple[torch.Tensor, torch.device]] = {}
        for slot, device in self._slots:
            tensor = slot.get()
            if tensor is None:
                continue
            found[id(tensor)] = tensor, device
            gradient = held_gradient(tensor) if tensor.is_leaf else None
            if gradient is not None:
                found[id(gradient)] = gradient, device
        for parameter, name, value in self._state_tensors():
            if (id(parameter), name) in self._state:
                found.setdefault(id(value), (value, self._state[id(parameter), name]))
        for reference, device in self._loose:
            loose = reference()
            if loose is not None:
                found.setdefault(id(loose), (loose, device))
        for tensor, device in [*found.values()]:
            base = tensor._base  # which a view keeps alive, and with it the memory
            if base is not None:
                found.setdefault(id(base), (base, device))
        return list(found.values())

    def _living_optimizers(self) -> list[Optimizer]:
        return [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]

    def _state_tensors(self) -> Iterator[tuple[Any, Any, torch.Tensor]]:
        """The state tensors that do not wait elsewhere, with their parameters and names."""
        for optimizer in self._living_optimizers():
            for parameter, entry in optimizer.state.items():
                values = values_here(entry).items()
                yield from ((parameter, name, value) for name, value in values if _is_tensor(value))

    def _packed(self) -> list[Bucket]:
        """Buckets of state that waits on the device itself."""
        entries = [entry for one in self._living_optimizers() for entry in one.state.values()]
        buckets = {id(e.bucket): e.bucket for e in entries if isinstance(e, Waiting) and e.bucket is not None}
        return [bucket for bucket in buckets.values() if bucket.memory is not None]

    def _tell_of_others(self, tensors: list[torch.Tensor]) -> None:
        """Memory that somebody else holds, too, is not given back."""
        holders: dict[int, int] = {}
        storages = {}
        for tensor in tensors:
            if tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                key = private.storage_key(storage)
                holders[key] = holders.get(key, 0) + 1
                storages[key] = storage
        held = sum(s.nbytes() for key, s in storages.items() if private.num_holders(s) > holders[key] + _OWN_HOLDERS)
        if held:
            logger.warning(
                "%s of a parked %s stay on the device, because other tensors share that memory (a state_dict that is "
                "kept, a graph before its backward); after memscale.resume they will not follow the model any more",
                show_bytes(held),
                type(self._model()).__name__,
            )

    # ---- steps

    def concerns(self, optimizer: Optimizer) -> bool:
        return any(known is optimizer for known in self._living_optimizers()) or self._owns(optimizer)

    def _owns(self, optimizer: Optimizer) -> bool:
        model = self._model()
        return model is not None and owns_any(optimizer, model.parameters())

    def before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
        _refuse(f"{type(optimizer).__name__} cannot step", type(self._model()).__name__)


_OWN_HOLDERS = 1
"""The object through which a storage is looked at."""


class _Refusal(OwnHook):
    """A parked model is not run."""

    def __init__(self, class_name: str) -> None:
        self._class_name = class_name

    def __call__(self, module: nn.Module, args: Any) -> NoReturn:
        _refuse(f"{type(module).__name__} cannot run", self._class_name)


def _refuse(what: str, class_name: str) -> NoReturn:
    raise ParkedError(
        f"{what}: this {class_name} is parked, and its memory is on the host. Call memscale.resume(model) first"
    )


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type != "meta" and not private.is_fake(value)


def _attributes_of(model: nn.Module) -> list[torch.Tensor]:
    """Tensors that modules keep beside their buffers. Those of a graph are not ours to move."""
    kept = [value for module in model.modules() for name, value in vars(module).items() if name not in _NOT_STATE]
    return [leaf for leaf in tree_leaves(kept) if _is_tensor(leaf) and private.node_of(leaf) is None]


def _options_of(optimizers: Iterable[Optimizer]) -> list[torch.Tensor]:
    """Learning rates and the like that are tensors."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    options = [value for group in groups for name, value in group.items() if name != "params"]
    return [leaf for leaf in tree_leaves(options) if _is_tensor(leaf)]


def _refuse_unmovable(tensors: Iterable[Any]) -> None:
    for tensor in tensors:
        if is_traceable_wrapper_subclass(tensor):
            raise MemScaleError(
                f"a {type(tensor).__name__} of shape {tuple(tensor.shape)} cannot be parked: it stands for other "
                "tensors (a shard, a quantized weight), whose memory MemScale does not know. Nothing was moved"
            )


def _require_room(num_bytes: int) -> None:
    available = host_memory()[1]
    if num_bytes > available:
        raise StoreFullError(
            f"the model holds {show_bytes(num_bytes)} on its device, and host memory has {show_bytes(available)} left: "
            "it cannot be parked. Nothing was moved"
        )


def _move(tensors: list[tuple[torch.Tensor, torch.device]]) -> None:
    """Move each tensor to its device, all or nothing; those that share memory move together."""
    came_from = {id(tensor): tensor.device for tensor, _ in tensors}
    wanted = {id(tensor): device for tensor, device in tensors}
    moved: list[list[torch.Tensor]] = []
    try:
        for group in overlapping(tensor for tensor, _ in tensors):
            relocate(group, wanted[id(group[0])])
            moved.append(group)
    except BaseException:
        for group in reversed(moved):
            relocate(group, came_from[id(group[0])])
        raise


def _bytes_of(tensors: list[torch.Tensor]) -> int:
    """The bytes that these tensors take in memory; memory that they share counts once."""
    strided = [tensor for tensor in tensors if tensor.layout is torch.strided]
    return sum(max(tensor.nbytes for tensor in group) for group in overlapping(strided))
