"""What a module's forward reads and changes beside its arguments, kept so that a second run sees what the first saw.

    memory = state.before()            # then the forward
    state.after(memory)
    ...
    shown = state.show(memory)         # the module as that forward found it; then the second run
    state.hide(shown)                  # the module as it was, untouched

It runs once a layer a step, so it is written for speed: `python -m memscale.benchmarks.overhead`.

NOTE [changing state]: which buffers and attributes a forward changes is learned at the first forward in each state of
the training flags; from then on only those are copied, and of the others it is seen whether they were replaced or, for
tensors, changed. Buffers are compared by value at first: some kernels write to them without telling autograd. What an
attribute holds that is neither a tensor nor a container is not looked into. Modules are held weakly, so that a
wrapped model dies with its last reference.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
import operator
import random
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from memscale import _torch_private
from memscale._patching import OWN_ATTRIBUTES

Table: TypeAlias = dict[str, Any]
"""A module's `_parameters` or `_buffers`."""
ModuleRef: TypeAlias = "weakref.ref[nn.Module]"
Slot: TypeAlias = tuple[ModuleRef, str]
Flags: TypeAlias = tuple[bool, ...]

_COMMON_ATTRIBUTES = frozenset(vars(nn.Module())) | OWN_ATTRIBUTES
_UNWATCHED = _COMMON_ATTRIBUTES - {"training"}
_CONTAINERS = (list, dict, set, collections.deque, collections.OrderedDict)
_ABSENT = object()
_chain = itertools.chain.from_iterable
_MAX_DEPTH = 4
"""Containers in containers are looked into so deep."""
_UNVERSIONED = -1
"""Inference tensors have no version."""


@dataclasses.dataclass(slots=True)
class Memory:
    """What one forward found."""

    flags: Flags = ()
    slots: Sequence[tuple[Table, str]] = ()
    """Where the parameters were."""
    parameters: Sequence[torch.Tensor | None] = ()
    versions: Sequence[int] = ()
    """Those of the parameters."""
    buffers: list[tuple[Table, str, torch.Tensor, int]] = dataclasses.field(default_factory=list)
    """Those that it left alone, with their versions."""
    copies: dict[tuple[int, str], tuple[Table, Any]] = dataclasses.field(default_factory=dict)
    """Earlier values of the buffers that it changed; None or `_ABSENT` for those that it made."""
    num_buffers: int = 0
    shared: frozenset[tuple[int, str]] = frozenset()
    """Those of the copied buffers that share memory with another one."""
    modules: Sequence[ModuleRef] = ()
    names: Sequence[tuple[str, ...]] = ()
    """Of every part: its attributes; see `_Attributes`."""
    values: Sequence[tuple[Any, ...]] = ()
    """What they held."""
    tensors: Sequence[tuple[Slot, Any, int]] = ()
    """Attributes that hold tensors, with their versions."""
    attributes: dict[Slot, Any] = dataclasses.field(default_factory=dict)
    generators: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)
    """Random generators that the module holds, and their state."""


@dataclasses.dataclass(slots=True)
class Shown:
    """What the module really has while it shows a memory."""

    tensors: list[tuple[Table, str, Any]]
    attributes: dict[Slot, Any]
    generators: list[tuple[Any, Any]]


class ModuleState:
    """Everything about one module that its recompute must see as its forward saw it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._look(module)

    def _look(self, module: nn.Module) -> None:
        """Find the parts; all that was learned about others is forgotten."""
        self._modules: list[ModuleRef] = [weakref.ref(part) for part in module.modules()]
        self._children = _list_children(self._parts())
        self._parameters: list[tuple[Table, str]] = [
            (part._parameters, name) for part in module.modules() for name in part._parameters
        ]
        self._buffers = _Buffers(module)
        self._attributes = _Attributes(self._modules)

    def _parts(self) -> list[nn.Module]:
        return [part for ref in self._modules if (part := ref()) is not None]

    def before(self) -> Memory:
        """To be called right before the forward."""
        parts = self._parts()
        if _list_children(parts) != self._children and (module := self._module()) is not None:
            self._look(module)  # parts were put in or taken out since
            parts = self._parts()
        flags = tuple([part.training for part in parts])
        parameters = [table.get(name) for table, name in self._parameters]
        memory = Memory(flags, self._parameters, parameters, _versions_of(parameters))
        self._buffers.before(memory)
        self._attributes.before(memory, parts)
        return memory

    def after(self, memory: Memory) -> None:
        """To be called right after it; learns, and refuses what was learned wrongly."""
        self._buffers.after(memory)
        self._attributes.after(memory)

    def show(self, memory: Memory) -> Shown:
        """Let the module be as that forward found it. Refuses before it changes anything."""
        shown = Shown([], {}, [])
        if _versions_of(memory.parameters) != memory.versions:
            _refuse_changed(memory)
        if memory.tensors:
            self._attributes.refuse_changed(memory)
        # `torch.func.functional_call` puts other tensors in place for the length of a forward; this comes later.
        if not all(map(operator.is_, [table.get(name) for table, name in memory.slots], memory.parameters)):
            for (table, name), value in zip(memory.slots, memory.parameters, strict=True):
                _show(table, name, value, shown)
        for table, name, value, _ in memory.buffers:
            if table.get(name) is not value:
                _show(table, name, value, shown)
        if memory.copies:
            self._buffers.show(memory, shown)
        self._attributes.show(memory, shown, self._parts())
        return shown

    def hide(self, shown: Shown) -> None:
        """Let the module be as it was before `show`."""
        for table, name, value in shown.tensors:
            _put(table, name, value)
        for slot, value in shown.attributes.items():
            _set(slot, value)
        for generator, state in shown.generators:
            _set_state(generator, state)


def _list_children(parts: list[nn.Module]) -> list[int]:
    return [id(child) for part in parts for child in part._modules.values()]


def _versions_of(tensors: Sequence[torch.Tensor | None]) -> list[int]:
    try:
        return [_UNVERSIONED if tensor is None else tensor._version for tensor in tensors]
    except RuntimeError:  # an inference tensor is among them
        return [_version(tensor) for tensor in tensors]


def _version(tensor: torch.Tensor | None) -> int:
    return _UNVERSIONED if tensor is None or tensor.is_inference() else tensor._version


def _show(table: Table, name: str, value: Any, shown: Shown) -> None:
    shown.tensors.append((table, name, table.get(name, _ABSENT)))
    _put(table, name, value)


def _put(table: Table, name: str, value: Any) -> None:
    if value is _ABSENT:
        table.pop(name, None)
    else:
        table[name] = value


def _refuse_changed(memory: Memory) -> None:
    pairs = zip(memory.slots, memory.parameters, memory.versions, strict=True)
    name, value = next((name, value) for (_, name), value, version in pairs if _version(value) != version)
    assert value is not None
    raise RuntimeError(
        f"parameter {name!r} of shape {tuple(value.shape)} was changed in place between forward and backward: its "
        "recompute would not be the same. Call backward before the optimizer's step."
    )


class _Buffers:
    """Knows which buffers a forward changes."""

    def __init__(self, module: nn.Module) -> None:
        self._tables: list[Table] = [part._buffers for part in module.modules()]
        self._owners = {id(part._buffers): type(part).__name__ for part in module.modules()}
        self._changing: dict[Flags, set[tuple[int, str]]] = {}
        self._looked_at: list[weakref.ref[Any]] = []
        self._shared: frozenset[tuple[int, str]] = frozenset()

    def before(self, memory: Memory) -> None:
        memory.num_buffers = sum(map(len, self._tables))
        if not memory.num_buffers:
            return
        known = self._changing.get(memory.flags)
        for table in self._tables:
            for name, value in table.items():
                is_known = known is not None and (id(table), name) in known
                if is_known or (known is None and value is not None and _may_change_silently(value)):
                    memory.copies[id(table), name] = (table, value)
                if not is_known:
                    memory.buffers.append((table, name, value, _version(value)))
        if memory.copies:
            memory.shared = self._find_shared(memory.copies)
            _clone_values(memory.copies, memory.shared)

    def _find_shared(self, copies: dict[tuple[int, str], tuple[Table, Any]]) -> frozenset[tuple[int, str]]:
        """Looked for anew only when there are other tensors than last time: asking for storages takes its time."""
        tensors = [value for _, value in copies.values() if isinstance(value, torch.Tensor)]
        known = [ref() for ref in self._looked_at]
        if len(tensors) != len(known) or not all(map(operator.is_, tensors, known)):
            self._looked_at, self._shared = [weakref.ref(tensor) for tensor in tensors], _sharing_keys(copies)
        return self._shared

    def show(self, memory: Memory, shown: Shown) -> None:
        """Stand-ins for what is to change: a second recompute finds the copies untouched."""
        stand_ins = dict(memory.copies)
        _clone_values(stand_ins, memory.shared)
        for (_, name), (table, value) in stand_ins.items():
            _show(table, name, value, shown)

    def after(self, memory: Memory) -> None:
        num_buffers = sum(map(len, self._tables))
        if not num_buffers and not memory.num_buffers:
            return
        known = self._changing.get(memory.flags)
        touched = {
            (id(table), name): (table, value)
            for table, name, value, version in memory.buffers
            if table.get(name) is not value or _version(value) != version
        }
        if num_buffers != memory.num_buffers:
            touched |= self._made(memory)
        if known is None:
            self._learn(memory, touched)
        elif touched:
            known.update(touched)
            self._refuse(*next(iter(touched)))

    def _made(self, memory: Memory) -> dict[tuple[int, str], tuple[Table, Any]]:
        """Buffers that the forward registered."""
        there = memory.copies.keys() | {(id(table), name) for table, name, _, _ in memory.buffers}
        keys = {(id(table), name): (table, _ABSENT) for table in self._tables for name in table}
        return {key: made for key, made in keys.items() if key not in there}

    def _learn(self, memory: Memory, touched: dict[tuple[int, str], tuple[Table, Any]]) -> None:
        changed = {key for key, (table, value) in memory.copies.items() if not _same(value, table.get(key[1]))}
        known = self._changing[memory.flags] = changed.union(touched)
        for key, (table, value) in touched.items():
            if key not in memory.copies:  # made by this forward, or without values: then any copy will do
                memory.copies[key] = (table, value.clone() if isinstance(value, torch.Tensor) else value)
        memory.copies = {key: kept for key, kept in memory.copies.items() if key in known}
        memory.buffers = [entry for entry in memory.buffers if (id(entry[0]), entry[1]) not in known]

    def _refuse(self, table_id: int, name: str) -> None:
        raise RuntimeError(
            f"buffer {name!r} of {self._owners[table_id]} was changed by this forward, not by earlier ones: its "
            "recompute would not be the same. Run the step again: MemScale remembers it from now on."
        )


def _sharing_keys(copies: dict[tuple[int, str], tuple[Table, Any]]) -> frozenset[tuple[int, str]]:
    storages = {key: _storage_of(value) for key, (_, value) in copies.items() if isinstance(value, torch.Tensor)}
    counts = collections.Counter(storages.values())
    return frozenset(key for key, storage in storages.items() if counts[storage] > 1)


def _storage_of(tensor: torch.Tensor) -> int:
    return _torch_private.storage_key(tensor.untyped_storage())


def _clone_values(copies: dict[tuple[int, str], tuple[Table, Any]], shared: frozenset[tuple[int, str]]) -> None:
    """Put clones in the place of the values. Buffers that share memory share it in their clones too."""
    flats: dict[tuple[int, torch.dtype], torch.Tensor] = {}
    for key, (table, value) in copies.items():
        if isinstance(value, torch.Tensor):
            copies[key] = (table, _clone_view(value, flats) if key in shared else value.clone())


def _clone_view(value: torch.Tensor, flats: dict[tuple[int, torch.dtype], torch.Tensor]) -> torch.Tensor:
    key = (_storage_of(value), value.dtype)
    if key not in flats:
        num_elements = value.untyped_storage().nbytes() // value.element_size()
        flats[key] = value.detach().as_strided((num_elements,), (1,), 0).clone()
    return flats[key].as_strided(value.size(), value.stride(), value.storage_offset())


def _has_values(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "meta" and not _torch_private.is_fake(tensor)


def _may_change_silently(buffer: torch.Tensor) -> bool:
    """Kernels that write without telling autograd are batch norms, and they write vectors; values would tell."""
    return _has_values(buffer) or buffer.dim() <= 1


def _same(before: torch.Tensor, after: torch.Tensor | None) -> bool:
    if after is None or before.shape != after.shape or before.dtype != after.dtype:
        return False
    return _has_values(before) and torch.equal(before, after)


class _Attributes:
    """Knows which Python attributes a forward changes, and which random generators the module holds."""

    def __init__(self, modules: list[ModuleRef]) -> None:
        self._modules = modules
        self._changing: dict[Flags, dict[Slot, None]] = {}
        self._generators: list[Slot] = []
        self._tensors: list[Slot] = []
        """Those that hold tensors."""
        self._names: list[tuple[str, ...]] = []
        """By part."""
        self._getters: list[Callable[[dict[str, Any]], tuple[Any, ...]]] = []
        self._num_attributes = 0

    def before(self, memory: Memory, parts: list[nn.Module]) -> None:
        known = self._changing.get(memory.flags)
        if known is None or _count(parts) != self._num_attributes:
            self._look(parts)
        memory.values = self._values(parts) or self._look(parts)
        memory.names, memory.modules = self._names, self._modules
        slots = self._all_slots() if known is None else known
        if slots:
            memory.attributes = {slot: _snapshot(_get(slot), may_be_large=known is not None) for slot in slots}
        if self._tensors:
            memory.tensors = [(slot, value := _get(slot), _version_of(value)) for slot in self._tensors]
        for slot in self._generators:
            if _is_generator(generator := _get(slot)):
                memory.generators.append((generator, _state_of(generator)))

    def _look(self, parts: list[nn.Module]) -> list[tuple[Any, ...]]:
        """Which attributes there are; returns their values."""
        self._num_attributes = _count(parts)
        # No modules among them: a graph must not hold any.
        self._names = [tuple(name for name in vars(part) if name not in _UNWATCHED) for part in parts]
        self._getters = [_getter(names) for names in self._names]
        slots = self._all_slots()
        self._generators = [slot for slot in slots if _is_generator(_get(slot))]
        self._tensors = [slot for slot in slots if isinstance(_get(slot), torch.Tensor)]
        return self._values(parts)

    def _values(self, parts: list[nn.Module]) -> list[tuple[Any, ...]]:
        """Nothing if one of the attributes is gone."""
        try:
            return [getter(vars(part)) for getter, part in zip(self._getters, parts, strict=True)]
        except KeyError:
            return []

    def after(self, memory: Memory) -> None:
        """Learns from the first forward. What later ones replace is seen when it matters, in `show`."""
        if memory.flags not in self._changing:
            self._learn(memory)

    def _learn(self, memory: Memory) -> None:
        before, slots = memory.attributes, dict.fromkeys([*memory.attributes, *self._all_slots()])
        known = {slot: None for slot in slots if not _unchanged(before.get(slot, _ABSENT), _get(slot))}
        self._changing[memory.flags] = known
        memory.attributes = {slot: before.get(slot, _ABSENT) for slot in known}
        for slot, value in memory.attributes.items():
            if isinstance(value, _KeptTensor) and value.is_lost:
                _refuse_attribute(slot)

    def _all_slots(self) -> list[Slot]:
        return [
            (ref, name)
            for ref in self._modules
            if (module := ref()) is not None
            for name in vars(module)
            if name not in _COMMON_ATTRIBUTES
        ]

    def refuse_changed(self, memory: Memory) -> None:
        """A tensor that was changed in place, and of which there is no copy; the next forward makes one."""
        for slot, value, version in memory.tensors:
            if _version_of(value) != version and slot not in memory.attributes:
                self._changing[memory.flags][slot] = None
                _refuse_attribute(slot)

    def show(self, memory: Memory, shown: Shown, parts: list[nn.Module]) -> None:
        is_same = memory.names is self._names and _count(parts) == self._num_attributes
        now = self._values(parts) if is_same else []
        if not now or not all(map(operator.is_, _chain(now), _chain(memory.values))):
            _show_others(memory, shown)
        for slot, value in memory.attributes.items():
            shown.attributes[slot] = _get(slot)
            _set(slot, value.stand_in() if isinstance(value, _KeptTensor) else _snapshot(value))
        for generator, state in memory.generators:
            shown.generators.append((generator, _state_of(generator)))
            _set_state(generator, state)


def _getter(names: tuple[str, ...]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    if len(names) > 1:
        return operator.itemgetter(*names)
    return lambda table: tuple([table[name] for name in names])  # of one name, the other gives no tuple


def _show_others(memory: Memory, shown: Shown) -> None:
    """What was replaced, made or taken out since the forward began: by a later one than was learned from, or by
    somebody between forward and backward (a rate, the training mode)."""
    for ref, names, values in zip(memory.modules, memory.names, memory.values, strict=True):
        module, before = ref(), dict(zip(names, values, strict=True))
        for name in dict.fromkeys([*before, *vars(module)]) if module is not None else ():
            slot, earlier = (ref, name), before.get(name, _ABSENT)
            if name not in _UNWATCHED and slot not in memory.attributes and _get(slot) is not earlier:
                shown.attributes[slot] = _get(slot)
                _set(slot, earlier)


def _count(parts: list[nn.Module]) -> int:
    return sum([len(vars(part)) for part in parts])


_SMALL_BYTES = 1 << 20
"""Larger tensors that attributes hold are not copied on the chance that they change."""


class _KeptTensor:
    """A tensor that an attribute holds, and a copy in case that it is changed in place."""

    def __init__(self, tensor: torch.Tensor, *, may_be_large: bool) -> None:
        self.tensor = tensor
        self.version = _version(tensor)
        is_copied = may_be_large or tensor.nbytes <= _SMALL_BYTES
        self.copy = tensor.detach().clone() if is_copied else None

    @property
    def is_changed(self) -> bool:
        return _version(self.tensor) != self.version

    @property
    def is_lost(self) -> bool:
        return self.is_changed and self.copy is None

    def stand_in(self) -> torch.Tensor:
        if not self.is_changed:
            return self.tensor
        assert self.copy is not None
        return self.copy.clone()


def _version_of(value: Any) -> int:
    return _version(value) if isinstance(value, torch.Tensor) else _UNVERSIONED


def _refuse_attribute(slot: Slot) -> None:
    raise RuntimeError(
        f"attribute {slot[1]!r} of {type(slot[0]()).__name__} was changed in place since this forward began, which "
        "earlier ones did not do: its recompute would not be the same. Run the step again: MemScale remembers it from "
        "now on."
    )


def _dict_of(slot: Slot) -> dict[str, Any]:
    module = slot[0]()
    assert module is not None, "a module's forward runs while the module lives"
    return vars(module)


def _get(slot: Slot) -> Any:
    return _dict_of(slot).get(slot[1], _ABSENT)


def _set(slot: Slot, value: Any) -> None:
    if value is _ABSENT:
        _dict_of(slot).pop(slot[1], None)
    else:
        _dict_of(slot)[slot[1]] = value


def _snapshot(value: Any, *, may_be_large: bool = True) -> Any:
    """Containers and tensors are changed in place, so what they hold is remembered; else the object itself."""
    if isinstance(value, torch.Tensor):
        return _KeptTensor(value, may_be_large=may_be_large)
    return _copy_containers(value)


def _copy_containers(value: Any, depth: int = 0) -> Any:
    if type(value) not in _CONTAINERS or depth > _MAX_DEPTH:
        return value
    copied = copy.copy(value)
    if isinstance(copied, set):
        return copied
    items = copied.items() if isinstance(copied, dict) else enumerate(copied)
    for key, item in list(items):
        if type(item) in _CONTAINERS:
            copied[key] = _copy_containers(item, depth + 1)
    return copied


def _unchanged(before: Any, after: Any, depth: int = 0) -> bool:
    if isinstance(before, _KeptTensor):
        return before.tensor is after and not before.is_changed
    if type(before) not in _CONTAINERS or type(before) is not type(after) or depth > _MAX_DEPTH:
        return before is after
    if isinstance(before, set):
        return len(before) == len(after) and before <= after
    if isinstance(before, dict):
        return before.keys() == after.keys() and all(
            _unchanged(value, after[key], depth + 1) for key, value in before.items()
        )
    return len(before) == len(after) and all(_unchanged(a, b, depth + 1) for a, b in zip(before, after, strict=True))


def _is_generator(value: Any) -> bool:
    if isinstance(value, torch.Generator | random.Random):
        return True
    numpy_random = sys.modules.get("numpy.random")
    return numpy_random is not None and isinstance(value, (numpy_random.Generator, numpy_random.RandomState))


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "bit_generator"):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
