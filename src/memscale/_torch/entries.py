"""Things that may change: each can be taken, compared with what it was, and put back.

`state_beside.py` finds them, from a model's code. Here is what they are: contents of containers, attributes and slots
of objects, variables of Python modules and of functions around functions, states of random generators, small arrays.
"""

from __future__ import annotations

import argparse
import collections
import contextvars
import functools
import gc
import operator
import pickle
import queue
import sys
import types
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import nn

from memscale._torch.snapshots import ABSENT, set_state, state_of, version_of

_MAX_ARRAY_BYTES = 1 << 16
CONTAINER_TYPES = (
    list, dict, set, collections.deque, collections.OrderedDict, collections.defaultdict, collections.Counter,
)  # fmt: skip
CONTAINER_KINDS = (collections.OrderedDict, dict, list, set, collections.deque)
_FOREIGN = frozenset({*sys.stdlib_module_names, "torch", "numpy", "memscale", "simgpu", "emucuda"})
_PLAIN_KINDS = (
    types.SimpleNamespace, argparse.Namespace, queue.Queue, queue.LifoQueue, queue.PriorityQueue,
)  # fmt: skip
"""Classes of others whose objects are no more than their attributes. A `SimpleQueue` shows nobody what it holds."""
_COMMON_ATTRIBUTES = frozenset(vars(nn.Module()))
LruCache = type(functools.lru_cache(lambda: None))
CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, staticmethod, classmethod, property)
"""Bindings to these are taken for definitions, not for state. See NOTE [what was loaded stays] in state_beside.py."""


class Entry(Protocol):
    """One thing that may change."""

    of: Any
    """What it belongs to: a container, an object, a class, the namespace of a Python module."""

    def take(self) -> Any:
        """What it is now."""

    def put(self, before: Any) -> None:
        """Let it be that again."""

    def is_as(self, before: Any) -> bool: ...


class GeneratorState:
    def __init__(self, generator: Any) -> None:
        self.of = generator

    def take(self) -> Any:
        return state_of(self.of)

    def put(self, before: Any) -> None:
        set_state(self.of, before)

    def is_as(self, before: Any) -> bool:
        return _same_state(self.take(), before)


def _same_state(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    return bool(first == second) if isinstance(first, tuple) else pickle.dumps(first) == pickle.dumps(second)


class Contents:
    """The contents of a container, by identity. The methods called are those of the builtin class: one derived from it
    may do more in its own, such as load what it lists."""

    def __init__(self, container: Any) -> None:
        self.of = container
        self._kind: Any = next(kind for kind in CONTAINER_KINDS if isinstance(container, kind))

    def __len__(self) -> int:
        return int(self._kind.__len__(self.of))

    def elements(self) -> list[Any]:
        """The elements, without the keys of a dictionary."""
        return list(self._kind.values(self.of)) if self._is_dict() else self.take()

    def take(self) -> list[Any]:
        return list(self._kind.items(self.of) if self._is_dict() else self._kind.__iter__(self.of))

    def put(self, before: Any) -> None:
        container, kind = self.of, self._kind
        kind.clear(container)
        if self._is_dict():
            for key, value in before:
                kind.__setitem__(container, key, value)
        elif kind is set:
            kind.update(container, before)
        else:
            kind.extend(container, before)

    def _is_dict(self) -> bool:
        return issubclass(self._kind, dict)

    def is_as(self, before: Any) -> bool:
        now = self.take()
        if self._is_dict():
            now, before = ([part for item in items for part in item] for items in (now, before))
        return len(now) == len(before) and all(map(operator.is_, now, before))


class ArrayValues:
    def __init__(self, array: Any) -> None:
        self.of = array

    def take(self) -> Any:
        return self.of.copy()

    def put(self, before: Any) -> None:
        self.of[...] = before

    def is_as(self, before: Any) -> bool:
        return bool(self.of.tobytes() == before.tobytes())


class BufferValues:
    """A `bytearray` or an `array.array`."""

    def __init__(self, buffer: Any) -> None:
        self.of = buffer

    def take(self) -> Any:
        return self.of[:]

    def put(self, before: Any) -> None:
        self.of[:] = before

    def is_as(self, before: Any) -> bool:
        return bytes(self.of) == bytes(before)


def cell_contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


class Cell:
    """A variable of an enclosing function."""

    def __init__(self, cell: types.CellType) -> None:
        self.of = cell

    def take(self) -> Any:
        return cell_contents(self.of)

    def put(self, before: Any) -> None:
        if isinstance(self.take(), CODE):
            return
        if before is not ABSENT:
            self.of.cell_contents = before
        elif self.take() is not ABSENT:
            del self.of.cell_contents

    def is_as(self, before: Any) -> bool:
        return self.take() is before


class ContextValue:
    """What a context variable holds here. One that held nothing cannot be made to hold nothing again."""

    def __init__(self, variable: contextvars.ContextVar[Any]) -> None:
        self.of = variable

    def take(self) -> Any:
        return self.of.get(ABSENT)

    def put(self, before: Any) -> None:
        if before is not ABSENT:
            self.of.set(before)

    def is_as(self, before: Any) -> bool:
        return self.take() is before


class Variables:
    """Names in a Python module that some code mentions, bound or not."""

    def __init__(self, namespace: dict[str, Any], names: Iterable[str]) -> None:
        self.of = namespace
        self.names = [name for name in names if not isinstance(namespace.get(name), CODE)]

    def take(self) -> Any:
        return [self.of.get(name, ABSENT) for name in self.names]

    def put(self, before: Any) -> None:
        for name, value in zip(self.names, before, strict=True):
            if isinstance(self.of.get(name), CODE):
                continue
            if value is ABSENT:
                self.of.pop(name, None)
            else:
                self.of[name] = value

    def is_as(self, before: Any) -> bool:
        return all(map(operator.is_, self.take(), before))


class Attributes:
    """The attributes of a class or an object, those that come and go included."""

    def __init__(self, owner: Any) -> None:
        self.of = owner

    def take(self) -> Any:
        return {name: value for name, value in vars(self.of).items() if is_state_of(self.of, name, value)}

    def put(self, before: Any) -> None:
        now = self.take()
        for name in now.keys() - before.keys():
            _delete(self.of, name)
        for name, value in before.items():
            if now.get(name, ABSENT) is not value and not isinstance(vars(self.of).get(name), CODE):
                _bind(self.of, name, value)

    def is_as(self, before: Any) -> bool:
        now = self.take()
        return now.keys() == before.keys() and all(map(operator.is_, now.values(), map(before.__getitem__, now)))


class Slots:
    """Attributes of an object that its class has slots for."""

    def __init__(self, owner: Any) -> None:
        self.of = owner
        self._slots = _slots_of(type(owner))

    def take(self) -> list[Any]:
        return [self._get(slot) for slot in self._slots]

    def put(self, before: Any) -> None:
        for slot, value in zip(self._slots, before, strict=True):
            now = self._get(slot)
            if now is value or isinstance(now, CODE):
                continue
            if value is ABSENT:
                slot.__delete__(self.of)
            else:
                slot.__set__(self.of, value)

    def is_as(self, before: Any) -> bool:
        return all(map(operator.is_, self.take(), before))

    def _get(self, slot: Any) -> Any:
        try:
            return slot.__get__(self.of)
        except AttributeError:
            return ABSENT


def _slots_of(cls: type) -> list[Any]:
    """The descriptors themselves: those of a frozen dataclass or a shadowed name can be set, too. Members of classes of
    extension modules, which declare no slots, may be read-only."""
    own = [base for base in cls.__mro__ if is_own_class(base) and "__slots__" in vars(base)]
    return [slot for base in own for slot in vars(base).values() if isinstance(slot, types.MemberDescriptorType)]


_ORDINARY = frozenset({"__validators__", "__class_validators__"})
"""Special by their looks alone: what `huggingface_hub.dataclasses` gives to classes of configs. They are compared."""


def is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__") and name not in _ORDINARY


def has_slots(cls: type) -> bool:
    """Whether objects of an own class have attributes that are not in their dictionary."""
    return bool(_slots_of(cls))


def is_state_of(owner: Any, name: str, value: Any) -> bool:
    """Whether an attribute of a class or an object is compared. The training flags of modules are, elsewhere."""
    kind = owner if isinstance(owner, type) else type(owner)
    if isinstance(value, CODE) or (name in _COMMON_ATTRIBUTES and issubclass(kind, nn.Module)):
        return False
    return owner is not kind or not is_special(name)


def _bind(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, type):
        setattr(owner, name, value)
    else:
        vars(owner)[name] = value


def _delete(owner: Any, name: str) -> None:
    if isinstance(owner, type):
        delattr(owner, name)
    else:
        vars(owner).pop(name)


class CachedCalls:
    """How often a function under `functools.lru_cache` really ran. It cannot be taken back, unless it never had."""

    UNUSED = (0, 0, 0)

    def __init__(self, cache: Any) -> None:
        self.of = cache

    def take(self) -> Any:
        info = self.of.cache_info()
        is_full = info.maxsize is not None and info.currsize >= info.maxsize
        return info.misses, info.currsize, info.hits if is_full else 0  # hits decide what a full one forgets next

    def put(self, before: Any) -> None:
        if before != self.UNUSED:
            raise RuntimeError("a call that was remembered cannot be forgotten alone")
        self.of.cache_clear()

    def is_as(self, before: Any) -> bool:
        return bool(self.take() == before)


class TensorNote:
    """How often a tensor was written to, and which attributes it has. It is held weakly, and cannot be put back."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._before = self.take()

    @property
    def of(self) -> Any:
        return self._tensor()

    def take(self) -> Any:
        tensor = self._tensor()
        return None if tensor is None else (version_of(tensor), tuple(vars(tensor)))

    def put(self, before: Any) -> None:
        raise RuntimeError("a tensor that was written to cannot be put back")

    def is_as(self, before: Any) -> bool:
        return bool(self.take() == before)

    def is_as_noted(self) -> bool:
        return self.is_as(self._before)


FRESH_STATES = (GeneratorState, ArrayValues, BufferValues, CachedCalls)
"""Entries whose state is a copy that nobody else holds."""


def holds_scalars(values: Iterable[Any]) -> bool:
    """Whether all of these cannot change. Takes some nanoseconds a value."""
    return set(map(type, values)) <= SCALARS


def definitions_in(value: Any) -> list[Any] | None:
    """The functions that a callable of a known kind leads to; None for anything else."""
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, types.BuiltinFunctionType):  # also a method of an object: `draw = generator.random`
        return [value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, staticmethod | classmethod):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget, value.fset]
    if isinstance(value, functools.cached_property):
        return [value.func]
    if isinstance(value, LruCache):
        return [value.__wrapped__, *remembered_by(value)]
    if type(value) in (collections.UserDict, collections.UserList):
        return [value.data]
    if type(value) is collections.ChainMap:
        return [*value.maps]
    return None


def remembered_by(cache: Any) -> list[Any]:
    """The results of calls that an `lru_cache` holds: objects may live there alone. Its own table is not looked at."""
    held = gc.get_referents(cache)
    found = [value for each in held for value in (each.values() if type(each) is dict else (each,))]
    links = [each for each in found if type(each).__name__ == "_lru_list_elem"]
    found += [value for link in links for value in gc.get_referents(link)]
    skipped = (type, object, type(links[0])) if links else (type, object)
    return [each for each in found if each is not cache.__wrapped__ and type(each) not in skipped]


def is_own(module_name: str | None) -> bool:
    """Whether this Python module may hold state of a model's code."""
    return module_name is not None and module_name.partition(".")[0] not in _FOREIGN


def is_proxy(kind: type) -> bool:
    """Whether it answers for another object: every question to it, its class included, may run somebody's code."""
    return any("__class__" in vars(base) for base in kind.__mro__ if base is not object)


def is_own_class(value: Any) -> bool:
    return isinstance(value, type) and is_own(value.__module__)


def is_plain_object(value: Any) -> bool:
    return type(value) in _PLAIN_KINDS or is_own_class(type(value))


def is_small_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray and value.nbytes <= _MAX_ARRAY_BYTES


SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
"""What cannot change, by its exact type."""
