"""A context in which every operator goes through a function: PyTorch's dispatch mode, for who loads no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class EachOperator(TorchDispatchMode):
    """Calls `handle(op, args, kwargs)` in the place of each operator; what that returns is the operator's output."""

    def __init__(self, handle: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._handle = handle

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._handle(func, args, kwargs or {})
