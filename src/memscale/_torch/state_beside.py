"""Python state beside a model: what its code can reach by name, and change, without being handed it.

    beside = Beside.of_model(model)
    with beside.kept():
        ...                         # whatever runs here leaves all of it as it was

A forward may count in a global or a class attribute, draw from a generator of its Python module, remember in a closure,
a default argument or an object; hooks do so all the time. It is found by reading the code's names: from the classes
of the modules and from functions on them (hooks are such) through closures, defaults, globals and attributes of Python
modules, transitively. What belongs to torch, NumPy, the standard library or us is not looked into, nor are tensors.

Remembered are bindings of names, contents of builtin containers and of classes derived from them, states of random
generators, small arrays and attributes of plain objects, slots included; of tensors, all but what they hold.

NOTE [what was loaded stays]: a name that is bound to a function, a class or a module by then is left so: code that was
loaded is loaded, and whoever loaded it may remember that where we do not see it. For the same reason an `lru_cache`
that was filled is emptied if anything else had to be put back: what its function has set up is gone. So is one that
remembers a container or an object by then: what has changed in there is known to nobody else. Messages that are shown
once are not shown again (messages.py).

Known limits: iterators, Python generators, `queue.SimpleQueue` and context variables that held nothing cannot be set
back; names that code makes up (`globals()[name]`, `setattr`), memory of extension modules, thread-locals, weak
dictionaries, containers of over 100,000 elements and what is further away than a few steps are not seen.
"""

from __future__ import annotations

import array
import collections
import contextlib
import contextvars
import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from memscale._torch import private
from memscale._torch.entries import (
    CODE,
    CONTAINER_KINDS,
    CONTAINER_TYPES,
    ArrayValues,
    Attributes,
    BufferValues,
    Cell,
    Contents,
    ContextValue,
    Entry,
    GeneratorState,
    LruCache,
    Slots,
    Variables,
    cell_contents,
    definitions_in,
    holds_scalars,
    is_own,
    is_own_class,
    is_plain_object,
    is_proxy,
    is_small_array,
    is_special,
    is_state_of,
    remembered_by,
)
from memscale._torch.messages import says_once
from memscale._torch.snapshots import is_generator
from memscale._torch.tensor_marks import TensorMarks

_MAX_VISITED = 20_000
_MAX_DEPTH = 8
"""How many steps from the model's code are followed."""
MAX_ELEMENTS = 100_000
"""The most elements of a container whose contents are remembered."""
_MAX_LOOKED_INTO = 1_000
"""The most elements of a container whose elements are looked at themselves."""


class Beside:
    """All that was found. See the module's docstring."""

    def __init__(self, roots: Iterable[Any]) -> None:
        self.entries: list[Entry] = []
        self.others: list[Any] = []
        """What was met and not looked into, containers that are too large for that included."""
        self.tensors: list[torch.Tensor] = []
        """Those that were met. They are no entries: what they hold is not taken, and what else code may change about
        them is put back by `kept` alone (tensor_marks.py)."""
        self.is_cut = False
        """There is more, further away or in containers of very many elements."""
        self.lru_caches: list[Any] = []
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
        self.entries += [Variables(namespace, names) for namespace, names in self._mentioned.values()]
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
        marks = [TensorMarks(tensor) for tensor in self.tensors if not private.is_fake(tensor)]
        misses = [cache.cache_info().misses for cache in self.lru_caches]
        try:
            yield
        finally:
            changed = [(e, state) for e, state in zip(self.entries, before, strict=True) if not e.is_as(state)]
            for entry, state in changed:
                entry.put(state)
            for mark in marks:
                mark.put_back()
            for cache, known in zip(self.lru_caches, misses, strict=True):
                is_filled = cache.cache_info().misses != known and not says_once(cache)
                if is_filled and (changed or _remembers_state(cache)):
                    cache.cache_clear()  # see NOTE [what was loaded stays]

    # ---- looking

    def _wait(self, values: Iterable[Any], depth: int) -> None:
        if depth < _MAX_DEPTH:
            self._waiting.extend((value, depth) for value in values)
        elif any(not issubclass(type(value), (*_UNINTERESTING, *CODE)) for value in values):
            self.is_cut = True

    def _visit(self, value: Any, depth: int) -> None:
        if id(value) in self._seen or is_proxy(type(value)):
            return
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            self._wait(vars(value).values(), depth + 1)
        if isinstance(value, _UNINTERESTING) and not (isinstance(value, _SUBCLASSED) and is_own_class(type(value))):
            return
        self._seen.add(id(value))
        self._alive.append(value)
        if is_generator(value):
            self.entries.append(GeneratorState(value))
        elif type(value) in CONTAINER_TYPES:
            self._visit_container(Contents(value), depth)
        elif isinstance(value, types.FunctionType):
            self._visit_function(value, depth)
        elif is_small_array(value):
            self.entries.append(ArrayValues(value))
        elif isinstance(value, bytearray | array.array):
            if len(value) <= MAX_ELEMENTS:
                self.entries.append(BufferValues(value))
            else:
                self.others.append(value)
        elif isinstance(value, tuple | frozenset):
            self._wait(value if len(value) <= _MAX_LOOKED_INTO else (), depth + 1)
        elif (inside := definitions_in(value)) is not None:
            if isinstance(value, LruCache):
                self.lru_caches.append(value)
            self._wait(inside, depth)
        elif isinstance(value, contextvars.ContextVar):
            self.entries.append(ContextValue(value))
            self._wait([value.get(None)], depth + 1)
        elif is_own_class(value):
            self._visit_class(value, depth)
        elif is_plain_object(value):
            self._visit_object(value, depth)
        else:
            self.others.append(value)

    def _visit_object(self, value: Any, depth: int) -> None:
        if isinstance(value, CONTAINER_KINDS):
            self._visit_container(Contents(value), depth)
        if isinstance(getattr(value, "__dict__", None), dict):
            self.entries.append(Attributes(value))
            self._wait([each for name, each in vars(value).items() if is_state_of(value, name, each)], depth + 1)
        slots = Slots(value)
        self.entries.append(slots)
        self._wait([each for each in slots.take() if not isinstance(each, CODE)], depth + 1)
        self._wait(type(value).__mro__, depth + 1)

    def _visit_container(self, contents: Contents, depth: int) -> None:
        if len(contents) > MAX_ELEMENTS:
            self.others.append(contents.of)
            return
        self.entries.append(contents)
        if isinstance(contents.of, collections.defaultdict):
            self._wait([contents.of.default_factory], depth + 1)
        if len(contents) <= _MAX_LOOKED_INTO:
            self._wait(contents.elements(), depth + 1)
        elif not holds_scalars(contents.elements()):
            self.is_cut = True

    def _visit_class(self, cls: type, depth: int) -> None:
        self.entries.append(Attributes(cls))
        self._wait(cls.__mro__[1:], depth + 1)
        for name, value in vars(cls).items():
            if is_state_of(cls, name, value) or is_special(name) or name in self._names:
                self._wait([value], depth + 1)
            else:
                self._methods.setdefault(name, []).append((value, depth + 1))

    def _visit_function(self, function: types.FunctionType, depth: int) -> None:
        if not is_own(function.__globals__.get("__name__")):
            self._wait(filter(_is_own_function, map(cell_contents, function.__closure__ or ())), depth + 1)
            return
        cells = [Cell(cell) for cell in function.__closure__ or ()]
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


_SUBCLASSED = (int, float, complex, str, bytes)
"""Objects of own classes that are derived from these have attributes: members of an enumeration."""
_UNINTERESTING = (type(None), bool, int, float, complex, str, bytes, torch.Tensor, types.ModuleType, torch.dtype)


def _roots(model: nn.Module) -> Iterator[Any]:
    """The classes of the modules, and what was put on single modules: hooks, another forward, functions to call."""
    modules = list(model.modules())
    yield from {cls: None for module in modules for cls in type(module).__mro__ if is_own_class(cls)}
    for module in modules:
        for value in vars(module).values():
            values = (
                value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            )
            yield from (each for each in values if callable(each) and not isinstance(each, nn.Module))


def _remembers_state(cache: Any) -> bool:
    return any(type(value) in CONTAINER_TYPES or is_plain_object(value) for value in remembered_by(cache))


def _is_own_function(value: Any) -> bool:
    """Whether a decorator of others (`torch.no_grad()`, `contextlib.contextmanager`) was put around own code."""
    return isinstance(value, types.FunctionType) and is_own(value.__globals__.get("__name__"))


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """Every name that the code, or a function inside of it, mentions."""
    inner = [_names_in(const) for const in code.co_consts if isinstance(const, types.CodeType)]
    return tuple(dict.fromkeys([*code.co_names, *(name for names in inner for name in names)]))
