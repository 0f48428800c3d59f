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
        if func is torch.ops.aten._local_scalar_dense.default and _is_fake_number(args[0]):
            return 0.5
        return func(*args, **(kwargs or {}))


def _is_fake_number(tensor: torch.Tensor) -> bool:
    return private.is_fake(tensor) and tensor.dtype is not torch.bool
