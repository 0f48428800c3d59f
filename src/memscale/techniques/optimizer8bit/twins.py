"""Twins of bitsandbytes' optimizers over fake parameters, so that what they keep and need can be tried beforehand."""

from __future__ import annotations

import types
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

_WIDE = {"optim_bits": 32}


def is_of_bitsandbytes(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("bitsandbytes.") and hasattr(optimizer, "name2qmap")


def prepare_twin(
    optimizer: Optimizer, wide: Collection[int], twin: Optimizer, parameters: Mapping[int, nn.Parameter]
) -> None:
    """Make a twin of bitsandbytes' optimizer step these fake parameters as that would step the real ones.

    `parameters` are given by the ids of those that they stand for; `wide` has the ids of those whose state is in 32
    bits besides those that bitsandbytes was told of. What the twin shares with the optimizer is not touched.
    """
    device = next(iter(parameters.values())).device
    books: dict[str, torch.Tensor] = vars(optimizer)["name2qmap"]
    vars(twin)["name2qmap"] = {name: torch.empty(book.shape, device=device) for name, book in books.items()}
    configs = {**_overrides(optimizer), **dict.fromkeys(wide, _WIDE)}
    vars(twin)["mng"] = types.SimpleNamespace(
        pid2config={id(fake): configs[number] for number, fake in parameters.items() if number in configs},
        index2config={},
        module_weight_config_triple=[],
    )


def _overrides(optimizer: Any) -> dict[int, dict[str, Any]]:
    """What bitsandbytes was told of single parameters, by id."""
    manager = optimizer.mng
    configs = {
        id(optimizer.param_groups[group]["params"][index]): config
        for (group, index), config in manager.index2config.items()
        if group < len(optimizer.param_groups) and index < len(optimizer.param_groups[group]["params"])
    }
    by_module = {id(getattr(module, name)): config for module, name, config in manager.module_weight_config_triple}
    return {**configs, **by_module, **manager.pid2config}
