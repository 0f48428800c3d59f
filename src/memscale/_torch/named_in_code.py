"""Which names the code of a module uses, by reading it: attributes, globals and functions that it asks for.

    code_names_any(module, names)       # the code of the classes of its parts
    code_reaches_any(module, names)     # that, its hooks, and the functions that they call by name

PyTorch's own classes are not read, nor are functions of PyTorch, NumPy and the standard library. Known limits: of
objects that are no modules those methods are read whose names the code mentions; names that code makes up are not seen,
nor is what more than some hundred functions lead to.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from memscale._torch.entries import is_own, is_proxy

_MAX_FUNCTIONS = 300
_BY_NAME = frozenset({"getattr", "setattr", "attrgetter"})
"""Functions that take the name of an attribute as text."""
_MAKING = ("__init__", "reset_parameters", "_init", "init")
"""How functions begin that make a module."""
_FOUND: weakref.WeakKeyDictionary[type, dict[str, bool]] = weakref.WeakKeyDictionary()
"""Classes whose code was read: the names, and whether a function has them that does not make a module."""


def code_names_any(module: nn.Module, names: Iterable[str], *, once_made: bool = False) -> bool:
    """Whether the code of a part of the module uses one of these names; `once_made`: after it was made."""
    known = [_names_in(cls) for cls in {type(part) for part in module.modules()}]
    return any(name in each and (each[name] or not once_made) for each in known for name in names)


def code_reaches_any(module: nn.Module, names: Iterable[str]) -> bool:
    """Whether that code, once the module was made, or a function that it calls uses one of these names."""
    return not _Reached(module).names.isdisjoint(names)


class _Reached:
    """The names in all code that a module's forward may run, as far as it can be read."""

    def __init__(self, module: nn.Module) -> None:
        self.names: set[str] = set()
        self._seen: set[int] = set()
        self._waiting: list[types.FunctionType] = []
        for part in module.modules():
            self._meet_class(type(part))
            for value in vars(part).values():
                several = value.values() if isinstance(value, dict) else value
                self._meet(*(several if isinstance(several, Iterable) and _is_container(value) else (value,)))
        while self._waiting and len(self._seen) < _MAX_FUNCTIONS:
            self._read(self._waiting.pop())

    def _meet_class(self, cls: type) -> None:
        for base in filter(_is_own, cls.__mro__):
            self._meet(*(value for name, value in vars(base).items() if not name.startswith(_MAKING)))

    def _meet(self, *values: Any) -> None:
        for value in values:
            if is_proxy(type(value)):
                continue
            if isinstance(value, property):
                self._meet(value.fget, value.fset)
            elif isinstance(value, functools.partial):
                self._meet(value.func)
            elif isinstance(value, type):
                if issubclass(value, torch.autograd.Function) and is_own(value.__module__):
                    self._meet(*vars(value).values())
            elif isinstance(value, nn.Module):
                self._meet_class(type(value))
            else:
                self._meet_function(getattr(value, "__func__", value) if callable(value) else value)

    def _meet_function(self, value: Any) -> None:
        function = inspect.unwrap(value) if isinstance(value, types.FunctionType) else None
        if function is None and is_own(type(value).__module__):  # an object: what it does when it is called
            function = vars(type(value)).get("__call__")
        if isinstance(function, types.FunctionType) and id(function) not in self._seen and is_own(function.__module__):
            self._seen.add(id(function))
            self._waiting.append(function)

    def _read(self, function: types.FunctionType) -> None:
        mentioned = {name for code in _code_of(function) for name in _mentioned_by(code)}
        self.names |= mentioned
        found = [function.__globals__[name] for name in mentioned if name in function.__globals__]
        found += [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        for value in found:
            several = value.values() if type(value) is dict else value if isinstance(value, list | tuple) else (value,)
            self._meet(*several)
            if isinstance(value, types.ModuleType) and is_own(value.__name__):
                self._meet(*(each for name, each in vars(value).items() if name in mentioned))
            elif is_own(type(value).__module__) and not isinstance(value, nn.Module | type):
                self._meet(*(each for name, each in vars(type(value)).items() if name in mentioned))


def _is_container(value: Any) -> bool:
    return isinstance(value, dict | list | tuple)


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _mentioned_by(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    if not _BY_NAME.isdisjoint(code.co_names):
        yield from (const for const in code.co_consts if isinstance(const, str) and const.isidentifier())


def _names_in(cls: type) -> dict[str, bool]:
    if cls not in _FOUND:
        found: dict[str, bool] = {}
        for name, value in (pair for base in cls.__mro__ if _is_own(base) for pair in vars(base).items()):
            is_used = not name.startswith(_MAKING)
            found |= {used: is_used or found.get(used, False) for code in _code_of(value) for used in code.co_names}
        _FOUND[cls] = found
    return _FOUND[cls]


def _is_own(cls: type) -> bool:
    return cls.__module__.partition(".")[0] not in ("torch", "builtins")


def _code_of(value: Any) -> Iterator[types.CodeType]:
    function = inspect.unwrap(getattr(value, "__func__", value)) if callable(value) else None
    waiting = [function.__code__] if isinstance(function, types.FunctionType) else []
    while waiting:
        code = waiting.pop()
        yield code
        waiting += [const for const in code.co_consts if isinstance(const, types.CodeType)]
