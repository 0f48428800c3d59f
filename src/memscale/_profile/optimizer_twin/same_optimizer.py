"""The same optimizer over other parameters, without its state and hooks."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves


def over_parameters(optimizer: Optimizer, inside: Mapping[int, torch.Tensor]) -> Optimizer:
    """The same optimizer, without state, over these in the place of its parameters, by the ids of those."""
    groups = [{**g, "params": [inside[id(p)] for p in g["params"] if id(p) in inside]} for g in optimizer.param_groups]
    return same_class(optimizer, groups)


def host_counters(optimizer: Optimizer) -> list[torch.Tensor]:
    """Step counters in its state, which stay on the host while parameters are on a device, unless the step is fused
    or capturable."""
    if any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups):
        return []
    leaves = tree_leaves(list(optimizer.state.values()))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() == 0]


def same_class(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """An optimizer of the same class and hyperparameters over other parameters, without state or hooks."""
    twin = object.__new__(type(optimizer))
    # A scheduler puts a `step` bound to the user's optimizer on the instance: the twin's is that of the class.
    vars(twin).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks"):
            setattr(twin, name, type(value)())
    twin.param_groups = groups
    twin.state = collections.defaultdict(dict)
    return twin
