"""Every use of PyTorch's private API, in one place. `tests/test_torch_private.py` says when one of them breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry


def storage_key(storage: torch.UntypedStorage) -> int:
    """The address of the C++ storage: the same for every Python object that shows it, unique while it lives."""
    return int(storage._cdata)


def fake_tensor_mode() -> Any:
    """Tensors without memory: shapes, dtypes, devices and strides propagate, values do not exist."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether the tensor has no memory behind it."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def device_type_of(tensor: torch.Tensor) -> str:
    """The type of its device; asking a fake tensor in the usual way would run an operator."""
    device: torch.device = tensor.fake_device if is_fake(tensor) else tensor.device  # type: ignore[attr-defined]
    return device.type


def flop_formula(func: Any) -> Callable[..., int] | None:
    """PyTorch's own FLOP count of an operator; None for those that it takes as free."""
    formula: Callable[..., int] | None = flop_registry.get(func._overloadpacket)
    return formula
