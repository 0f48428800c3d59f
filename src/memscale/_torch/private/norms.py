"""How the norm of gradients is taken: which functions take it, and in which groups and by which kernels.

Relies on: `torch.nn.utils.clip_grad._get_total_norm`, which `torch.nn.utils` shows as `get_total_norm`;
`torch.utils._foreach_utils`; `torch._foreach_norm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn


def norm_functions() -> list[tuple[Any, str]]:
    """The places where programs, and `clip_grad_norm_`, find the function that takes the norm of gradients."""
    return [(nn.utils.clip_grad, "_get_total_norm"), (nn.utils, "get_total_norm")]


def norm_groups(tensors: Sequence[torch.Tensor], foreach: bool | None) -> list[tuple[list[int], bool]]:
    """The positions of the tensors whose norms are taken together, group by group in PyTorch's order, and whether a
    kernel for many tensors takes them."""
    from torch.utils._foreach_utils import (
        _device_has_foreach_support,
        _group_tensors_by_device_and_dtype,
        _has_foreach_support,
    )

    groups: Any = _group_tensors_by_device_and_dtype([list(tensors)], with_indices=True)
    return [
        (positions, _has_foreach_support(members, device) if foreach is None else foreach and supported)
        for (device, _), ([members], positions) in groups.items()
        for supported in (_device_has_foreach_support(device),)
    ]


def norms_of(tensors: list[torch.Tensor], norm_type: float, *, together: bool) -> list[torch.Tensor]:
    """The norm of each tensor, by the kernel for many tensors or by the one for one."""
    if together and tensors:
        return list(torch._foreach_norm(tensors, norm_type))
    return [torch.linalg.vector_norm(tensor, norm_type) for tensor in tensors]
