"""What a module's forward reads and changes beside its arguments, kept so that a second run sees what the first saw.

    memory = state.before()            # then the forward
    state.after(memory)
    ...
    shown = state.show(memory)         # the module as that forward found it; then the second run
    state.hide(shown)                  # the module as it was, untouched

It runs once a layer a step, so it is written for speed: a few microseconds for a transformer block.

NOTE [changing state]: which buffers and attributes a forward changes is learned at the first forward in each state of
the training flags; from then on only those are remembered. Buffers are compared by value: some kernels write to them
without telling autograd. Modules are held weakly, so that a wrapped model dies with its last reference.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import random
import sys
import weakref
from collections.abc import Sequence
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
_CONTAINERS = (list, dict, set, collections.deque, collections.OrderedDict)
_ABSENT = object()
_UNVERSIONED = -1
"""Inference tensors have no version."""


@dataclasses.dataclass(slots=True)
class Memory:
    """What one forward found."""

    flags: Flags = ()
    parameters: Sequence[torch.Tensor | None] = ()
    versions: Sequence[int] = ()
    """Those of the parameters."""
    buffers: list[tuple[Table, str, torch.Tensor, int]] = dataclasses.field(default_factory=list)
    """Those that it left alone, with their versions."""
    copies: dict[tuple[int, str], tuple[Table, torch.Tensor]] = dataclasses.field(default_factory=dict)
    """Earlier values of the buffers that it changed."""
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
        self._modules: list[ModuleRef] = [weakref.ref(part) for part in module.modules()]
        self._parameters: list[tuple[Table, str]] = [
            (part._parameters, name) for part in module.modules() for name in part._parameters
        ]
        self._buffers = _Buffers(module)
        self._attributes = _Attributes(self._modules)

    def before(self) -> Memory:
        """To be called right before the forward."""
        flags = tuple([part.training for ref in self._modules if (part := ref()) is not None])
        parameters = [table.get(name) for table, name in self._parameters]
        memory = Memory(flags, parameters, [_version(value) for value in parameters])
        self._buffers.before(memory)
        self._attributes.before(memory)
        return memory

    def after(self, memory: Memory) -> None:
        """To be called right after it; learns, and refuses what was learned wrongly."""
        self._buffers.after(memory)
        self._attributes.after(memory)

    def show(self, memory: Memory) -> Shown:
        """Let the module be as that forward found it."""
        shown = Shown([], {}, [])
        for (table, name), value, version in zip(self._parameters, memory.parameters, memory.versions, strict=True):
            if value is not None and version != _UNVERSIONED and value._version != version:
                _refuse_changed(name, value)
            # `torch.func.functional_call` puts other tensors in place for the length of a forward; this comes later.
            if table.get(name) is not value:
                _show(table, name, value, shown)
        for table, name, value, _ in memory.buffers:
            if table.get(name) is not value:
                _show(table, name, value, shown)
        for (_, name), (table, value) in memory.copies.items():
            shown.tensors.append((table, name, table.get(name)))
            table[name] = value.clone()
        if memory.attributes or memory.generators:
            self._attributes.show(memory, shown)
        return shown

    def hide(self, shown: Shown) -> None:
        """Let the module be as it was before `show`."""
        for table, name, value in shown.tensors:
            table[name] = value
        for slot, value in shown.attributes.items():
            _set(slot, value)
        for generator, state in shown.generators:
            _set_state(generator, state)


def _version(tensor: torch.Tensor | None) -> int:
    return _UNVERSIONED if tensor is None or tensor.is_inference() else tensor._version


def _show(table: Table, name: str, value: torch.Tensor | None, shown: Shown) -> None:
    shown.tensors.append((table, name, table.get(name)))
    table[name] = value


def _refuse_changed(name: str, value: torch.Tensor) -> None:
    raise RuntimeError(
        f"parameter {name!r} of shape {tuple(value.shape)} was changed in place between forward and backward: its "
        "recompute would not be the same. Call backward before the optimizer's step."
    )


class _Buffers:
    """Knows which buffers a forward changes."""

    def __init__(self, module: nn.Module) -> None:
        self._slots = [(part._buffers, name) for part in module.modules() for name in part._buffers]
        self._owners = {id(part._buffers): type(part).__name__ for part in module.modules()}
        self._changing: dict[Flags, set[tuple[int, str]]] = {}

    def before(self, memory: Memory) -> None:
        known = self._changing.get(memory.flags)
        for table, name in self._slots:
            value = table.get(name)
            if value is None:
                continue
            if (id(table), name) in known if known is not None else _may_change_silently(value):
                memory.copies[id(table), name] = (table, value.clone())
            if known is None or (id(table), name) not in known:
                memory.buffers.append((table, name, value, _version(value)))

    def after(self, memory: Memory) -> None:
        if not memory.buffers:
            return  # every buffer is known to change
        known = self._changing.get(memory.flags)
        touched = {
            (id(table), name)
            for table, name, value, version in memory.buffers
            if table.get(name) is not value or _version(value) != version
        }
        if known is None:
            self._learn(memory, touched)
        elif touched:
            known |= touched
            self._refuse(*next(iter(touched)))

    def _learn(self, memory: Memory, touched: set[tuple[int, str]]) -> None:
        changed = {key for key, (table, value) in memory.copies.items() if not _same(value, table.get(key[1]))}
        known = self._changing[memory.flags] = touched | changed
        for table, name, value, _ in memory.buffers:
            if (id(table), name) in touched and (id(table), name) not in memory.copies:
                memory.copies[id(table), name] = (table, value.clone())  # without values: any copy will do
        memory.copies = {key: kept for key, kept in memory.copies.items() if key in known}
        memory.buffers = [entry for entry in memory.buffers if (id(entry[0]), entry[1]) not in known]

    def _refuse(self, table_id: int, name: str) -> None:
        raise RuntimeError(
            f"buffer {name!r} of {self._owners[table_id]} was changed by this forward, not by earlier ones: its "
            "recompute would not be the same. Run the step again: MemScale remembers it from now on."
        )


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
        self._changing: dict[Flags, list[Slot]] = {}
        self._generators: list[Slot] = []

    def before(self, memory: Memory) -> None:
        known = self._changing.get(memory.flags)
        slots = self._all_slots() if known is None else known
        if known is None:
            self._generators = [slot for slot in slots if _is_generator(_get(slot))]
        if slots:
            memory.attributes = {slot: _snapshot(_get(slot)) for slot in slots}
        for slot in self._generators:
            if _is_generator(generator := _get(slot)):
                memory.generators.append((generator, _state_of(generator)))

    def after(self, memory: Memory) -> None:
        if memory.flags in self._changing:
            return
        before, slots = memory.attributes, dict.fromkeys([*memory.attributes, *self._all_slots()])
        known = [slot for slot in slots if not _unchanged(before.get(slot, _ABSENT), _get(slot))]
        self._changing[memory.flags] = known
        memory.attributes = {slot: before.get(slot, _ABSENT) for slot in known}

    def _all_slots(self) -> list[Slot]:
        return [
            (ref, name)
            for ref in self._modules
            if (module := ref()) is not None
            for name in vars(module)
            if name not in _COMMON_ATTRIBUTES
        ]

    def show(self, memory: Memory, shown: Shown) -> None:
        for slot, value in memory.attributes.items():
            shown.attributes[slot] = _get(slot)
            _set(slot, _snapshot(value))
        for generator, state in memory.generators:
            shown.generators.append((generator, _state_of(generator)))
            _set_state(generator, state)


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


def _snapshot(value: Any) -> Any:
    """Containers are changed in place, so what they hold is remembered; of anything else the object itself."""
    return copy.copy(value) if type(value) in _CONTAINERS else value


def _unchanged(before: Any, after: Any) -> bool:
    if type(before) not in _CONTAINERS or type(before) is not type(after):
        return before is after
    if isinstance(before, dict):
        return before.keys() == after.keys() and all(after[key] is value for key, value in before.items())
    return len(before) == len(after) and all(a is b for a, b in zip(before, after, strict=True))


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
