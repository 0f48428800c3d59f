"""Optimizers on fake tensors, which have no values: what reads one reads a half."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memscale._torch import private


class AnyValue(TorchDispatchMode):
    """Reads any fake number as a half: Adafactor and others scale by norms, and bytes do not depend on them. Answers of
    yes or no are not made up: bytes may well depend on those."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return ANY_VALUE if reads_fake_number(func, args) else func(*args, **(kwargs or {}))


ANY_VALUE = 0.5
_READ = torch.ops.aten._local_scalar_dense.default


def reads_fake_number(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether `ANY_VALUE` is the answer. A mode that sees operators anyway asks this itself: one more takes time at
    each of them."""
    return func is _READ and private.is_fake(args[0]) and args[0].dtype is not torch.bool
