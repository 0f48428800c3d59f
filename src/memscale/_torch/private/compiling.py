"""What `torch.compile` leaves on modules and functions, without loading the compiler.

Relies on: `OptimizedModule`, the attributes of compiled calls and callables, and `_disable_dynamo`.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch


def never_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run as written under `torch.compile`; does not load the compiler before the first call."""
    from torch._compile import _disable_dynamo

    ordinary: Callable[..., Any] = _disable_dynamo(function)
    return ordinary


_Mode = TypeVar("_Mode", bound=type)


def without_compiler(mode: _Mode) -> _Mode:
    """A dispatch mode that is active only while nothing is compiled (`never_while_compiled`).

    PyTorch keeps the compiler out of every `__torch_dispatch__` by two functions around it, through which each operator
    goes; here it goes straight to the mode's own.
    """
    dispatch: Any = mode.__torch_dispatch__  # type: ignore[attr-defined]
    mode.__torch_dispatch__ = inspect.unwrap(dispatch)  # type: ignore[attr-defined]
    return mode


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether `torch.compile` stands around this very module: `torch.compile(module)`, `module.compile()` or
    `module.forward = torch.compile(module.forward)`. Does not load the compiler."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")  # not loaded: then nobody can have compiled anything
    return compiler is not None and (
        is_compiled_module(module)
        or is_compiled_in_place(module)
        or hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
    )


def is_compiled_module(module: torch.nn.Module) -> bool:
    """Whether this is what `torch.compile(module)` returns: a module around the other one, `_orig_mod`."""
    compiler = sys.modules.get("torch._dynamo.eval_frame")
    return compiler is not None and isinstance(module, compiler.OptimizedModule)


COMPILED_CALL = "_compiled_call_impl"
"""Where `module.compile()` leaves what stands in for the call of the module: its forward and its hooks."""


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    return vars(module).get(COMPILED_CALL) is not None


def uncompile_forward(module: torch.nn.Module) -> None:
    """A copy of a module whose `forward` was replaced by a compiled one still has that of the original, with the
    original's parameters. It gets its own instead, uncompiled."""
    compiled = getattr(vars(module).get("forward"), "_torchdynamo_orig_callable", None)
    if compiled is not None and not is_compiled_module(module):
        plain = inspect.unwrap(compiled)  # PyTorch's own forwards are inside one more function
        if not isinstance(plain, types.MethodType):
            raise TypeError(f"the compiled forward of this {type(module).__name__} is no method of it")
        vars(module)["forward"] = types.MethodType(plain.__func__, module)


class _AsWritten:
    """Compiled code runs as written, for the whole process, while at least one thread is inside."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._stance: Any = None

    def __enter__(self) -> None:
        with self._lock:
            self._depth += 1
            if self._stance is None and "torch._dynamo" in sys.modules:
                self._stance = torch.compiler.set_stance("force_eager")

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0 and self._stance is not None:
                stance, self._stance = self._stance, None
                stance.__exit__(None, None, None)


_AS_WRITTEN = _AsWritten()


def never_while_compiled() -> contextlib.AbstractContextManager[None]:
    """Inside, what others have compiled runs as it is written. The compiler is not loaded for that.

    Fake tensors must not meet compiled code: under a dispatch mode PyTorch leaves a compiled function out of the
    compiler for good, and one that was compiled with `fullgraph=True` then raises in the next real step.
    """
    return _AS_WRITTEN
