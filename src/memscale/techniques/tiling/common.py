"""What the tiled modules share."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from memscale._errors import MemScaleError, PlanError

_DROPOUT = F.dropout


def dropout_call(func: Any, args: Any, kwargs: Any) -> tuple[torch.Tensor, float, bool] | None:
    """(input, p, inplace) if this is a call of dropout that drops something; None for anything else.

    A card that is emulated calls the kernel by its own name; see `memscale._profile.device_kernels`.
    """
    if func is _DROPOUT:
        input, p, training, inplace = _dropout_arguments(*args, **kwargs)
        return (input, p, inplace) if training and p > 0 else None
    if func is torch.native_dropout:
        return args[0], args[1], False
    return None


def _dropout_arguments(
    input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> tuple[torch.Tensor, float, bool, bool]:
    return input, p, training, inplace


def dropped(func: Any, output: Any) -> Any:
    """What this function of dropout returns; nobody reads the mask of the kernel's own."""
    return (output, None) if func is torch.native_dropout else output


def draw_noise(like: Any, shape: Any, p: float) -> torch.Tensor:
    """The noise that dropout of a tensor of this shape multiplies with, drawn as the plain path draws it."""
    with torch.no_grad():
        return F.dropout(torch.ones(shape, dtype=like.dtype, device=like.device), p, True)


class TilingError(MemScaleError, RuntimeError):
    """A module cannot be tiled; the message says why."""


def names(text: str) -> frozenset[str]:
    """A set of names, written as one reads them."""
    return frozenset(text.split())


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
