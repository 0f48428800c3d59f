"""Python state beside a model: what its code can reach by name, and change, without being handed it.

    beside = Beside.of_model(model)
    with beside.kept():
        ...                         # whatever runs here leaves all of it as it was

A forward may count in a global or a class attribute, draw from a generator of its Python module, remember in a closure,
a default argument or an object; hooks do so all the time. It is found by reading the code's names: from the classes
of the modules and from functions on them (hooks are such) through closures, defaults, globals and attributes of Python
modules, transitively. What belongs to torch, NumPy, the standard library or us is not looked into, nor are tensors.

Remembered are bindings of names, contents of builtin containers and of classes derived from them, states of random
generators, small arrays and attributes of plain objects, slots included.

NOTE [what was loaded stays]: a name that is bound to a function, a class or a module by then is left so: code that was
loaded is loaded, and whoever loaded it may remember that where we do not see it. For the same reason an `lru_cache`
that was filled is emptied if anything else had to be put back: what its function has set up is gone.

Known limits: iterators, Python generators and context variables cannot be set back; names that code makes up
(`globals()[name]`, `setattr`), memory of extension modules, thread-locals, weak dictionaries, containers of over
100,000 elements and what is further away than a few steps are not seen.
"""

from __future__ import annotations

import argparse
import array
import collections
import contextlib
import functools
import operator
import pickle
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import nn

from memscale._torch import private
from memscale._torch.snapshots import ABSENT, is_generator, set_state, state_of

_MAX_VISITED = 20_000
_MAX_DEPTH = 8
"""How many steps from the model's code are followed."""
MAX_ELEMENTS = 100_000
"""The most elements of a container whose contents are remembered."""
_MAX_LOOKED_INTO = 1_000
"""The most elements of a container whose elements are looked at themselves."""
_MAX_ARRAY_BYTES = 1 << 16
_CONTAINERS = (
    list, dict, set, collections.deque, collections.OrderedDict, collections.defaultdict, collections.Counter,
)  # fmt: skip
_BUILTIN_KINDS = (collections.OrderedDict, dict, list, set, collections.deque)
_FOREIGN = frozenset({*sys.stdlib_module_names, "torch", "numpy", "memscale", "simgpu"})
_COMMON_ATTRIBUTES = frozenset(vars(nn.Module()))
CODE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, staticmethod, classmethod, property)
"""Bindings to these are taken for definitions, not for state. See NOTE [what was loaded stays]."""


class Entry(Protocol):
    """One thing that may change."""

    of: Any
    """What it belongs to: a container, an object, a class, the namespace of a Python module."""

    def take(self) -> Any:
        """What it is now."""

    def put(self, before: Any) -> None:
        """Let it be that again."""

    def is_as(self, before: Any) -> bool: ...


class _Generator:
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


class _Contents:
    """The contents of a container, by identity. The methods called are those of the builtin class: one derived from it
    may do more in its own, such as load what it lists."""

    def __init__(self, container: Any) -> None:
        self.of = container
        self._kind: Any = next(kind for kind in _BUILTIN_KINDS if isinstance(container, kind))

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


class _Array:
    def __init__(self, array: Any) -> None:
        self.of = array

    def take(self) -> Any:
        return self.of.copy()

    def put(self, before: Any) -> None:
        self.of[...] = before

    def is_as(self, before: Any) -> bool:
        return bool(self.of.tobytes() == before.tobytes())


class _Buffer:
    """A `bytearray` or an `array.array`."""

    def __init__(self, buffer: Any) -> None:
        self.of = buffer

    def take(self) -> Any:
        return self.of[:]

    def put(self, before: Any) -> None:
        self.of[:] = before

    def is_as(self, before: Any) -> bool:
        return bytes(self.of) == bytes(before)


class _Cell:
    """A variable of an enclosing function."""

    def __init__(self, cell: types.CellType) -> None:
        self.of = cell

    def take(self) -> Any:
        try:
            return self.of.cell_contents
        except ValueError:
            return ABSENT

    def put(self, before: Any) -> None:
        if isinstance(self.take(), CODE):
            return
        if before is not ABSENT:
            self.of.cell_contents = before
        elif self.take() is not ABSENT:
            del self.of.cell_contents

    def is_as(self, before: Any) -> bool:
        return self.take() is before


class _Globals:
    """Names in a Python module that some code mentions, bound or not."""

    def __init__(self, namespace: dict[str, Any], names: Iterable[str]) -> None:
        self.of = namespace
        self._names = [name for name in names if not isinstance(namespace.get(name), CODE)]

    def take(self) -> Any:
        return [self.of.get(name, ABSENT) for name in self._names]

    def put(self, before: Any) -> None:
        for name, value in zip(self._names, before, strict=True):
            if isinstance(self.of.get(name), CODE):
                continue
            if value is ABSENT:
                self.of.pop(name, None)
            else:
                self.of[name] = value

    def is_as(self, before: Any) -> bool:
        return all(map(operator.is_, self.take(), before))


class _Attributes:
    """The attributes of a class or an object, those that come and go included."""

    def __init__(self, owner: Any) -> None:
        self.of = owner

    def take(self) -> Any:
        return {name: value for name, value in vars(self.of).items() if _is_state(name, value)}

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


class _Slots:
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
    own = [base for base in cls.__mro__ if _is_own_class(base) and "__slots__" in vars(base)]
    return [slot for base in own for slot in vars(base).values() if isinstance(slot, types.MemberDescriptorType)]


def _is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _is_state(name: str, value: Any) -> bool:
    return not (_is_special(name) or name in _COMMON_ATTRIBUTES or isinstance(value, CODE))


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


FRESH_STATES = (_Generator, _Array, _Buffer)
"""Entries whose state is a copy that nobody else holds."""


class Beside:
    """All that was found. See the module's docstring."""

    def __init__(self, roots: Iterable[Any]) -> None:
        self.entries: list[Entry] = []
        self.code: set[types.CodeType] = set()
        """All code that was read."""
        self.others: list[Any] = []
        """What was met and not looked into, containers that are too large for that included."""
        self.is_cut = False
        """There is more, further away or in containers of very many elements."""
        self._lru_caches: list[Any] = []
        self._seen: set[int] = set()
        self._alive: list[Any] = []
        """What was seen, so that no other object gets its id while we look."""
        self._waiting: collections.deque[tuple[Any, int]] = collections.deque()
        self._mentioned: dict[int, tuple[dict[str, Any], dict[str, None]]] = {}
        self._names = {"forward", "backward", "setup_context"}
        """Names that some code mentions. A method is looked into when its name is among them."""
        self._methods: dict[str, list[tuple[Any, int]]] = {}
        """The methods that no code has mentioned yet."""
        self._wait(roots, 0)
        while self._waiting and len(self._seen) < _MAX_VISITED:
            self._visit(*self._waiting.popleft())
        self.entries += [_Globals(namespace, names) for namespace, names in self._mentioned.values()]
        self.is_cut = self.is_cut or bool(self._waiting)
        self._alive, self._mentioned, self._methods = [], {}, {}
        self._waiting.clear()

    @classmethod
    def of_model(cls, model: nn.Module) -> Beside:
        """The state beside everything that a step of this model runs, hooks of any module and parameter included."""
        hooks = [hook for _, hooks in private.global_module_hooks() for hook in hooks.values()]
        hooks += [hook for parameter in model.parameters() for hook in (parameter._backward_hooks or {}).values()]
        return cls([*_roots(model), *hooks])

    @classmethod
    def inside(cls, values: Iterable[Any]) -> Beside:
        """The state that these values hold, without the code that they lead to and without modules."""
        return _Inside(values)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """What is changed inside is as before afterwards."""
        before = [entry.take() for entry in self.entries]
        misses = [cache.cache_info().misses for cache in self._lru_caches]
        try:
            yield
        finally:
            changed = [(e, state) for e, state in zip(self.entries, before, strict=True) if not e.is_as(state)]
            for entry, state in changed:
                entry.put(state)
            for cache, known in zip(self._lru_caches, misses, strict=True):
                if changed and cache.cache_info().misses != known:  # see NOTE [what was loaded stays]
                    cache.cache_clear()

    # ---- looking

    def _wait(self, values: Iterable[Any], depth: int) -> None:
        if depth < _MAX_DEPTH:
            self._waiting.extend((value, depth) for value in values)
        elif any(not issubclass(type(value), (*_UNINTERESTING, *CODE)) for value in values):
            self.is_cut = True

    def _visit(self, value: Any, depth: int) -> None:
        if id(value) in self._seen or _is_proxy(type(value)) or isinstance(value, _UNINTERESTING):
            return
        self._seen.add(id(value))
        self._alive.append(value)
        if is_generator(value):
            self.entries.append(_Generator(value))
        elif type(value) in _CONTAINERS:
            self._visit_container(_Contents(value), depth)
        elif isinstance(value, types.FunctionType):
            self._visit_function(value, depth)
        elif is_small_array(value):
            self.entries.append(_Array(value))
        elif isinstance(value, bytearray | array.array):
            if len(value) <= MAX_ELEMENTS:
                self.entries.append(_Buffer(value))
            else:
                self.others.append(value)
        elif isinstance(value, tuple | frozenset):
            self._wait(value if len(value) <= _MAX_LOOKED_INTO else (), depth + 1)
        elif (inside := _definitions_in(value)) is not None:
            if isinstance(value, _LruCache):
                self._lru_caches.append(value)
            self._wait(inside, depth)
        elif _is_own_class(value):
            self._visit_class(value, depth)
        elif _is_plain_object(value):
            self._visit_object(value, depth)
        else:
            self.others.append(value)

    def _visit_object(self, value: Any, depth: int) -> None:
        if isinstance(value, _BUILTIN_KINDS):
            self._visit_container(_Contents(value), depth)
        if isinstance(getattr(value, "__dict__", None), dict):
            self.entries.append(_Attributes(value))
            self._wait([each for name, each in vars(value).items() if _is_state(name, each)], depth + 1)
        slots = _Slots(value)
        self.entries.append(slots)
        self._wait([each for each in slots.take() if not isinstance(each, CODE)], depth + 1)
        self._wait(type(value).__mro__, depth + 1)

    def _visit_container(self, contents: _Contents, depth: int) -> None:
        if len(contents) > MAX_ELEMENTS:
            self.others.append(contents.of)
            return
        self.entries.append(contents)
        if len(contents) <= _MAX_LOOKED_INTO:
            self._wait(contents.elements(), depth + 1)
        elif not holds_scalars(contents.elements()):
            self.is_cut = True

    def _visit_class(self, cls: type, depth: int) -> None:
        self.entries.append(_Attributes(cls))
        self._wait(cls.__mro__[1:], depth + 1)
        for name, value in vars(cls).items():
            if _is_state(name, value) or _is_special(name) or name in self._names:
                self._wait([value], depth + 1)
            else:
                self._methods.setdefault(name, []).append((value, depth + 1))

    def _visit_function(self, function: types.FunctionType, depth: int) -> None:
        if not is_own(function.__globals__.get("__name__")):
            return
        self.code.update(_code_in(function.__code__))
        cells = [_Cell(cell) for cell in function.__closure__ or ()]
        self.entries += cells
        self._wait([cell.take() for cell in cells], depth + 1)
        self._wait([function.__defaults__, function.__kwdefaults__, function.__dict__], depth + 1)
        names = _names_in(function.__code__)
        for name in names:
            if name not in self._names:
                self._names.add(name)
                self._waiting.extend(self._methods.pop(name, ()))
        self._mention(function.__globals__, names, depth)
        for name in names:
            module = function.__globals__.get(name)
            if isinstance(module, types.ModuleType) and is_own(module.__name__):
                self._mention(vars(module), [each for each in names if each in vars(module)], depth)

    def _mention(self, namespace: dict[str, Any], names: Iterable[str], depth: int) -> None:
        _, known = self._mentioned.setdefault(id(namespace), (namespace, {}))
        fresh = [name for name in names if name not in known]
        known.update(dict.fromkeys(fresh))
        self._wait([namespace[name] for name in fresh if name in namespace], depth + 1)


def tensors_in(states: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors in what entries took."""
    for state in states:
        values = state.values() if isinstance(state, dict) else state if isinstance(state, list) else (state,)
        for value in values:
            value = value[1] if is_item(value) else value
            if isinstance(value, torch.Tensor):
                yield value


def is_item(value: Any) -> bool:
    """Whether it is a key and its value: what a dictionary's contents are taken as."""
    return type(value) is tuple and len(value) == 2


def holds_scalars(values: Iterable[Any]) -> bool:
    """Whether all of these cannot change. Takes some nanoseconds a value."""
    return set(map(type, values)) <= SCALARS


class _Inside(Beside):
    def _visit(self, value: Any, depth: int) -> None:
        if issubclass(type(value), nn.Module):
            self.others.append(value)
        else:
            super()._visit(value, depth)

    def _visit_function(self, function: types.FunctionType, depth: int) -> None:
        """Do not look into it: a function is code."""

    def _visit_class(self, cls: type, depth: int) -> None:
        """Do not look into it: its attributes belong to other objects as well."""


SCALARS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
"""What cannot change, by its exact type."""
_UNINTERESTING = (type(None), bool, int, float, complex, str, bytes, torch.Tensor, types.ModuleType, torch.dtype)


def _roots(model: nn.Module) -> Iterator[Any]:
    """The classes of the modules, and what was put on single modules: hooks, another forward, functions to call."""
    modules = list(model.modules())
    yield from {cls: None for module in modules for cls in type(module).__mro__ if _is_own_class(cls)}
    for module in modules:
        for value in vars(module).values():
            values = (
                value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            )
            yield from (each for each in values if callable(each) and not isinstance(each, nn.Module))


def _definitions_in(value: Any) -> list[Any] | None:
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
    if isinstance(value, _LruCache):
        return [value.__wrapped__]
    if type(value) in (collections.UserDict, collections.UserList):
        return [value.data]
    if type(value) is collections.ChainMap:
        return [*value.maps]
    return None


_LruCache = type(functools.lru_cache(lambda: None))


def is_own(module_name: str | None) -> bool:
    """Whether this Python module may hold state of a model's code."""
    return module_name is not None and module_name.partition(".")[0] not in _FOREIGN


def _is_proxy(kind: type) -> bool:
    """Whether it answers for another object: every question to it, its class included, may run somebody's code."""
    return any("__class__" in vars(base) for base in kind.__mro__ if base is not object)


def _is_own_class(value: Any) -> bool:
    return isinstance(value, type) and is_own(value.__module__)


def _is_plain_object(value: Any) -> bool:
    return type(value) in (types.SimpleNamespace, argparse.Namespace) or _is_own_class(type(value))


def is_small_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray and value.nbytes <= _MAX_ARRAY_BYTES


def _code_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """It, and that of the functions inside of it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _code_in(const)


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """Every name that the code, or a function inside of it, mentions."""
    inner = [_names_in(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return tuple(dict.fromkeys([*code.co_names, *(name for names in inner for name in names)]))
