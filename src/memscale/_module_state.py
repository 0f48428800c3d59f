"""What a module's forward reads and changes beside its arguments, kept so that a second run sees what the first saw.

NOTE [changing state]: which buffers and attributes a forward changes is learned at the first forward in each state of
the training flags; from then on only those are remembered. Buffers are compared by value: some kernels write to them
without telling autograd. Modules are held weakly, so that a wrapped model dies with its last reference.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import random
import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import nn

from memscale import _torch_private
from memscale._patching import OWN_ATTRIBUTES

Slot: TypeAlias = tuple["weakref.ref[nn.Module]", str]
Flags: TypeAlias = tuple[bool, ...]

_COMMON_ATTRIBUTES = frozenset(vars(nn.Module())) | OWN_ATTRIBUTES
_CONTAINERS = (list, dict, set, collections.deque, collections.OrderedDict)
_ABSENT = object()


@dataclasses.dataclass(slots=True)
class Memory:
    """What one forward found."""

    parameters: list[tuple[Slot, torch.Tensor, int]] = dataclasses.field(default_factory=list)
    """The tensors and their versions."""
    constants: list[tuple[Slot, torch.Tensor]] = dataclasses.field(default_factory=list)
    """Buffers that it left alone."""
    buffers: dict[Slot, torch.Tensor] = dataclasses.field(default_factory=dict)
    """Copies of those that it changed."""
    attributes: dict[Slot, Any] = dataclasses.field(default_factory=dict)
    generators: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)
    """Random generators that the module holds, and their state."""


class ModuleState:
    """Everything about one module that its recompute must see as its forward saw it."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = [weakref.ref(part) for part in module.modules()]
        self._parameters: list[Slot] = _slots(module, "_parameters")
        self._buffers = _Buffers(_slots(module, "_buffers"))
        self._attributes = _Attributes(self._modules)

    @contextlib.contextmanager
    def remembered(self) -> Iterator[Memory]:
        """What the forward inside this context finds."""
        flags = tuple([part.training for ref in self._modules if (part := ref()) is not None])
        memory = Memory()
        for slot in self._parameters:
            if (value := _owner(slot)._parameters.get(slot[1])) is not None:
                memory.parameters.append((slot, value, _version(value)))
        with self._buffers.remembered(flags, memory), self._attributes.remembered(flags, memory):
            yield memory

    @contextlib.contextmanager
    def replayed(self, memory: Memory) -> Iterator[None]:
        """The module as that forward found it; afterwards as it is now, untouched."""
        _refuse_changed(memory.parameters)
        # `torch.func.functional_call` puts other tensors in place for the length of a forward; this comes later.
        tensors = [("_parameters", slot, value) for slot, value, _ in memory.parameters]
        tensors += [("_buffers", slot, value) for slot, value in memory.constants]
        tensors += [("_buffers", slot, value.clone()) for slot, value in memory.buffers.items()]
        with _tensors_replaced(tensors), self._attributes.replayed(memory):
            yield


def _slots(module: nn.Module, table: str) -> list[Slot]:
    return [(weakref.ref(part), name) for part in module.modules() for name in getattr(part, table)]


def _owner(slot: Slot) -> nn.Module:
    module = slot[0]()
    assert module is not None, "a module's forward runs while the module lives"
    return module


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _refuse_changed(parameters: list[tuple[Slot, torch.Tensor, int]]) -> None:
    for slot, value, version in parameters:
        if _version(value) != version:
            raise RuntimeError(
                f"parameter {slot[1]!r} of {type(_owner(slot)).__name__} was changed in place between forward and "
                "backward: its recompute would not be the same. Call backward before the optimizer's step."
            )


@contextlib.contextmanager
def _tensors_replaced(tensors: Iterable[tuple[str, Slot, torch.Tensor]]) -> Iterator[None]:
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    for table_name, slot, value in tensors:
        table = getattr(_owner(slot), table_name)
        if table.get(slot[1]) is not value:
            replaced.append((table, slot[1], table.get(slot[1])))
            table[slot[1]] = value
    try:
        yield
    finally:
        for table, name, value in replaced:
            table[name] = value


class _Buffers:
    """Knows which buffers a forward changes."""

    def __init__(self, slots: list[Slot]) -> None:
        self._slots = slots
        self._changing: dict[Flags, set[Slot]] = {}

    def _values(self) -> dict[Slot, torch.Tensor]:
        return {slot: value for slot in self._slots if (value := _owner(slot)._buffers.get(slot[1])) is not None}

    @contextlib.contextmanager
    def remembered(self, flags: Flags, memory: Memory) -> Iterator[None]:
        if not self._slots:
            yield
            return
        values = self._values()
        known = self._changing.get(flags)
        versions = {slot: _version(value) for slot, value in values.items()}
        copies = {slot: value.clone() for slot, value in values.items() if known is None or slot in known}
        yield
        after = self._values()
        touched = {slot for slot, version in versions.items() if slot in after and _version(after[slot]) != version}
        if known is None:
            known = touched | {slot for slot, value in copies.items() if not _same(value, after.get(slot))}
            self._changing[flags] = known
        self._refuse_surprises(touched - known, known)
        memory.buffers = {slot: value for slot, value in copies.items() if slot in known}
        memory.constants = [(slot, value) for slot, value in values.items() if slot not in known]

    def _refuse_surprises(self, surprises: set[Slot], known: set[Slot]) -> None:
        known |= surprises
        for slot in surprises:
            raise RuntimeError(
                f"buffer {slot[1]!r} of {type(_owner(slot)).__name__} was changed by this forward, not by earlier "
                "ones: its recompute would not be the same. Run the step again: MemScale remembers it from now on."
            )


def _same(before: torch.Tensor, after: torch.Tensor | None) -> bool:
    if after is None or before.shape != after.shape or before.dtype != after.dtype:
        return False
    if before.device.type == "meta" or _torch_private.is_fake(before):
        return False  # no values to compare: take it as changing
    return torch.equal(before, after)


class _Attributes:
    """Knows which Python attributes a forward changes, and which random generators the module holds."""

    def __init__(self, modules: list[weakref.ref[nn.Module]]) -> None:
        self._modules = modules
        self._changing: dict[Flags, list[Slot]] = {}
        self._generators: list[Slot] = []

    @contextlib.contextmanager
    def remembered(self, flags: Flags, memory: Memory) -> Iterator[None]:
        known = self._changing.get(flags)
        slots = self._all_slots() if known is None else known
        if known is None:
            self._generators = [slot for slot in slots if _is_generator(_get(slot))]
        before = {slot: _snapshot(_get(slot)) for slot in slots}
        memory.generators = [
            (found, _state_of(found)) for slot in self._generators if _is_generator(found := _get(slot))
        ]
        yield
        if known is None:
            slots = list(dict.fromkeys([*slots, *self._all_slots()]))
            known = [slot for slot in slots if not _unchanged(before.get(slot, _ABSENT), _get(slot))]
            self._changing[flags] = known
        memory.attributes = {slot: before.get(slot, _ABSENT) for slot in known}

    def _all_slots(self) -> list[Slot]:
        return [
            (ref, name)
            for ref in self._modules
            if (module := ref()) is not None
            for name in vars(module)
            if name not in _COMMON_ATTRIBUTES
        ]

    @contextlib.contextmanager
    def replayed(self, memory: Memory) -> Iterator[None]:
        now = {slot: _get(slot) for slot in memory.attributes}
        states = [(generator, _state_of(generator)) for generator, _ in memory.generators]
        for slot, value in memory.attributes.items():
            _set(slot, _snapshot(value))
        for generator, state in memory.generators:
            _set_state(generator, state)
        try:
            yield
        finally:
            for slot, value in now.items():
                _set(slot, value)
            for generator, state in states:
                _set_state(generator, state)


def _get(slot: Slot) -> Any:
    return vars(_owner(slot)).get(slot[1], _ABSENT)


def _set(slot: Slot, value: Any) -> None:
    if value is _ABSENT:
        vars(_owner(slot)).pop(slot[1], None)
    else:
        vars(_owner(slot))[slot[1]] = value


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
