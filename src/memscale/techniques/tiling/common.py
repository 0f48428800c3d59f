"""What the tiled modules share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memscale._errors import MemScaleError, PlanError


class TilingError(MemScaleError, RuntimeError):
    """A module cannot be tiled; the message says why."""


def names(text: str) -> frozenset[str]:
    """A set of names, written as one reads them."""
    return frozenset(text.split())


def submodule(model: nn.Module, module_fqn: str) -> nn.Module:
    try:
        return model.get_submodule(module_fqn)
    except AttributeError as error:
        raise PlanError(
            f"the plan names {module_fqn!r}, which {type(model).__name__} does not have: it was made for another model"
        ) from error


def at_least_one(module_fqn: str, what: str, value: int) -> None:
    if value < 1:
        raise PlanError(f"{what} of {module_fqn!r} is {value}; it must be at least 1")


def autocast_now(device_type: str) -> dict[str, Any]:
    """Arguments that make `torch.autocast` what it is now, for a recompute.

    Without its cache: weights are other tensors in every tile, and their casts would only be kept alive.
    """
    return {
        "device_type": device_type,
        "enabled": torch.is_autocast_enabled(device_type),
        "dtype": torch.get_autocast_dtype(device_type),
        "cache_enabled": False,
    }
