"""Tensors without memory: what they are, where they say that they lie, and what they cannot answer.

Relies on: `torch._subclasses.fake_tensor` and its errors, and the place of its mode among the dispatch modes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses import fake_tensor


def fake_tensor_class() -> type[torch.Tensor]:
    return fake_tensor.FakeTensor


def data_dependent_errors() -> tuple[type[Exception], ...]:
    """What fake tensors raise where an operator's result, or its shape, depends on values."""
    return fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException


def asks_for_values(error: BaseException) -> bool:
    """Whether this error, or one that it came from, says that fake tensors lack a value or a kernel."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    kinds = (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedFakeTensorException,
        fake_tensor.UnsupportedOperatorException,
        GuardOnDataDependentSymNode,
        NotImplementedError,
    )
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, kinds):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether the tensor has no memory behind it."""
    return isinstance(tensor, fake_tensor.FakeTensor)


def active_fake_mode() -> Any:
    """The mode that makes tensors fake now; None: they are real."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


def device_of(tensor: torch.Tensor) -> torch.device:
    """Its device; asking a fake tensor in the usual way would run an operator."""
    device: torch.device = tensor.fake_device if is_fake(tensor) else tensor.device  # type: ignore[attr-defined]
    return device


def device_type_of(tensor: torch.Tensor) -> str:
    """The type of its device."""
    return device_of(tensor).type


_DEVICE_QUESTION = torch.ops.prim.device.default


def is_device_question(func: Any) -> bool:
    """Whether a mode was handed not an operator but somebody's question where a fake tensor lies."""
    return func is _DEVICE_QUESTION


def device_answer(tensor: torch.Tensor) -> torch.device:
    """What the fake tensor itself would answer."""
    if fake_mode_of(tensor).in_kernel_invocation:
        return torch.device("meta")
    device: torch.device = tensor.fake_device  # type: ignore[attr-defined]
    return device


def fake_mode_of(tensor: torch.Tensor) -> Any:
    """The mode that a fake tensor belongs to."""
    return tensor.fake_mode  # type: ignore[attr-defined]
