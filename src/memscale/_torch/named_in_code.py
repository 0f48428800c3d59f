"""Which names the code of a module's classes uses, by reading it: attributes, globals and functions that it asks for.

PyTorch's own classes are not read. Known limit: code that is reached through functions of other Python modules is not
read either.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

_MAKING = ("__init__", "reset_parameters", "_init", "init")
"""How functions begin that make a module."""
_FOUND: weakref.WeakKeyDictionary[type, dict[str, bool]] = weakref.WeakKeyDictionary()
"""Classes whose code was read: the names, and whether a function has them that does not make a module."""


def code_names_any(module: nn.Module, names: Iterable[str], *, once_made: bool = False) -> bool:
    """Whether the code of a part of the module uses one of these names; `once_made`: after it was made."""
    known = [_names_in(cls) for cls in {type(part) for part in module.modules()}]
    return any(name in each and (each[name] or not once_made) for each in known for name in names)


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
