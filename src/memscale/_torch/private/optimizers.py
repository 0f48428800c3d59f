"""Which implementation an optimizer takes, how it casts loaded state, and how a scaler copies its scale.

Relies on: `_default_to_fused_or_foreach`, the list of devices with multi-tensor kernels, and
`Optimizer._process_value_according_to_param_policy`.
"""

from __future__ import annotations

import sys
from typing import Any

import torch


def foreach_device_types() -> list[str]:
    """Devices on which optimizers take their multi-tensor implementation by default."""
    from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices

    return list(_get_foreach_kernels_supported_devices())


def chooses_by_device(optimizer: Any, group: dict[str, Any]) -> bool:
    """Whether PyTorch chooses an optimizer's implementation for this group by where its parameters are.

    Other libraries have options of the same names and rules of their own.
    """
    if group.get("foreach", False) is not None or group.get("fused") is not None or group.get("differentiable"):
        return False
    # Adam has no multi-tensor implementation for a learning rate in a tensor, and takes the loop on any device.
    is_adam = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)
    if is_adam and isinstance(group["lr"], torch.Tensor) and not group.get("capturable"):
        return False
    return _asks_pytorch(type(optimizer))


def _asks_pytorch(kind: type) -> bool:
    from torch.optim.optimizer import _default_to_fused_or_foreach as chooser

    modules = (sys.modules.get(base.__module__) for base in kind.__mro__ if base is not torch.optim.Optimizer)
    return any(getattr(module, chooser.__name__, None) is chooser for module in modules)


def is_foreach_by_default(parameters: list[torch.Tensor], *, differentiable: bool) -> bool:
    """Whether PyTorch's optimizers step these parameters with their multi-tensor implementation, if nobody chose."""
    from torch.optim.optimizer import _default_to_fused_or_foreach

    return bool(_default_to_fused_or_foreach(parameters, differentiable)[1])


def scale_replicator() -> type[Any]:
    """What `torch.amp.GradScaler` copies its scale to other devices with."""
    from torch.amp.grad_scaler import _MultiDeviceReplicator

    return _MultiDeviceReplicator


def cast_optimizer_value(
    optimizer: Any, parameter: torch.Tensor, value: torch.Tensor, key: Any, groups: list[dict[str, Any]], name: Any
) -> torch.Tensor:
    """A loaded state tensor as the optimizer's `load_state_dict` would cast and move it."""
    cast: torch.Tensor = optimizer._process_value_according_to_param_policy(parameter, value, key, groups, name)
    return cast
