"""Loads a state dict while state waits: it is cast as `load_state_dict` would, but not all of it on the device."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from memscale._torch import private

WillWait = Callable[[torch.Tensor, Any, torch.Tensor], bool]
"""Whether a parameter's state tensor of this name will wait, so that it need not be loaded to the device first."""


def cast_state(optimizer: Optimizer, loaded: dict[str, Any], will_wait: WillWait) -> defaultdict[Any, Any]:
    """Return a loaded state as `load_state_dict` would make it, except that tensors that will wait are on the host."""
    saved = itertools.chain.from_iterable(group["params"] for group in loaded["param_groups"])
    own = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    parameter_of = dict(zip(saved, own, strict=True))
    state: defaultdict[Any, Any] = defaultdict(dict)
    for key, entry in loaded["state"].items():
        parameter = parameter_of.get(key)
        if parameter is None:
            state[key] = entry
            continue
        state[parameter] = {
            name: _cast_value(optimizer, parameter, value, key, loaded["param_groups"], name, will_wait)
            for name, value in entry.items()
        }
    return state


def _cast_value(
    optimizer: Optimizer,
    parameter: torch.Tensor,
    value: Any,
    key: Any,
    groups: list[dict[str, Any]],
    name: Any,
    will_wait: WillWait,
) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    cast = private.cast_optimizer_value(
        optimizer, torch.empty(0, dtype=parameter.dtype, device="cpu"), value, key, groups, name
    )
    if not will_wait(parameter, name, cast):
        cast = private.cast_optimizer_value(optimizer, parameter, value, key, groups, name)
    return cast.clone() if cast is value else cast
