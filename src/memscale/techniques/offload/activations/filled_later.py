"""Operators that fill a tensor after autograd has saved it: what was copied when it was saved would be garbage.

Of PyTorch's operators this is `rrelu` in training: it saves its noise, and then draws it, past the version counter.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_NAMES = frozenset({"rrelu", "rrelu_", "rrelu_with_noise", "rrelu_with_noise_", "RReLU"})


def may_fill_later(module: nn.Module) -> bool:
    """Whether a part of the module is such an operator, or code of its classes names one.

    Known limit: code that is reached through functions of other Python modules is not read.
    """
    classes: set[type] = {type(part) for part in module.modules()}
    return any(map(_code_names_one, classes)) or any(map(_is_one, module.modules()))


def is_unfilled(tensor: torch.Tensor) -> bool:
    """Whether a saved tensor may be such a one: nobody has written to it, and it is no result."""
    return not tensor.requires_grad and tensor._version == 0 and tensor.is_floating_point()


def _is_one(part: nn.Module) -> bool:
    values = [value for value in vars(part).values() if callable(value)]
    return isinstance(part, nn.RReLU) or any(getattr(value, "__name__", "") in _NAMES for value in values)


_FOUND: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()
"""Classes whose code was read; it is asked at every forward."""


def _code_names_one(cls: type) -> bool:
    if cls not in _FOUND:
        functions = [value for base in cls.__mro__ if _is_own(base) for value in vars(base).values()]
        _FOUND[cls] = any(_NAMES.intersection(code.co_names) for value in functions for code in _code_of(value))
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
