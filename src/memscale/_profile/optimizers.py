"""What an optimizer keeps and what its step needs, by running two of its steps on fake parameters."""

from __future__ import annotations

import collections
import dataclasses
import logging
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from memscale import _torch_private
from memscale._memory import LiveBytes, rounding_of
from memscale._profile import OptimizerCost
from memscale._profile.rehearsal import device_exists

logger = logging.getLogger("memscale")

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", {}),
    "adam": ("Adam", {}),
    "sgd": ("SGD", {}),
    "sgd_momentum": ("SGD", {"momentum": 0.9}),
    "rmsprop": ("RMSprop", {}),
    "adagrad": ("Adagrad", {}),
    "adafactor": ("Adafactor", {}),
}
"""Optimizers that can be named in `estimate`; `"none"` is training without one."""


def optimizer_cost(model: nn.Module, optimizer: str | Optimizer, device_type: str) -> OptimizerCost:
    """State and step temporaries of an optimizer over this model's parameters on this device."""
    if optimizer == "none":
        return OptimizerCost("none", 0, 0, 0)
    try:
        return _Twin(model, optimizer, device_type).cost()
    except Exception as error:  # whatever a third party's optimizer does on fake tensors
        if isinstance(optimizer, str):
            raise
        logger.warning(
            "%s cannot be tried on fake tensors (%s: %s); its state is taken to be AdamW's",
            type(optimizer).__name__,
            type(error).__name__,
            error,
        )
        cost = _Twin(model, "adamw", device_type).cost()
        return dataclasses.replace(cost, name=f"{type(optimizer).__name__}, taken as AdamW")


class _Twin:
    """The same optimizer over fake parameters, choosing its implementation as the real device would."""

    def __init__(self, model: nn.Module, optimizer: str | Optimizer, device_type: str) -> None:
        self.name = optimizer if isinstance(optimizer, str) else type(optimizer).__name__
        self.mode = _torch_private.fake_tensor_mode()
        self.is_emulated = not device_exists(device_type)
        self.rounding_bytes = rounding_of(device_type)
        self.device = torch.device("cpu" if self.is_emulated else device_type)
        self._fakes: dict[int, nn.Parameter] = {}
        if isinstance(optimizer, str):
            class_name, options = OPTIMIZERS[optimizer]
            groups = [{"params": self._fake_all(model.parameters())}]
            self.optimizer: Optimizer = getattr(torch.optim, class_name)(groups, **options)
        else:
            groups = [{**group, "params": self._fake_all(group["params"])} for group in optimizer.param_groups]
            self.optimizer = _same_class(optimizer, groups)
        # PyTorch picks foreach where the device has it, but never for fake tensors.
        picks_foreach = device_type in _torch_private.foreach_device_types()
        for group in self.optimizer.param_groups:
            if group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = picks_foreach

    def _fake_all(self, parameters: Any) -> list[nn.Parameter]:
        return [self._fake(parameter) for parameter in parameters if parameter.requires_grad]

    def _fake(self, parameter: torch.Tensor) -> nn.Parameter:
        if id(parameter) not in self._fakes:
            with self.mode:
                shape, stride = parameter.shape, parameter.stride()
                empty = torch.empty_strided(shape, stride, dtype=parameter.dtype, device=self.device)
            self._fakes[id(parameter)] = nn.Parameter(empty)
        return self._fakes[id(parameter)]

    def cost(self) -> OptimizerCost:
        parameters = list(self._fakes.values())
        books = LiveBytes(self.device.type, self.rounding_bytes, counts_fakes=True)
        with self.mode:
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter)
            books.see_all([parameters, [parameter.grad for parameter in parameters]])
            before = books.total_bytes
            with books:
                self.optimizer.step()
                state_bytes = books.total_bytes - before
                books.reset_peak()
                self.optimizer.step()
            step_bytes = books.peak_bytes - before - state_bytes
        state_bytes -= self._counter_bytes()
        moved_bytes = 3 * sum(parameter.nbytes for parameter in parameters) + 2 * state_bytes
        return OptimizerCost(self.name, state_bytes, max(0, step_bytes), moved_bytes)

    def _counter_bytes(self) -> int:
        """Step counters stay on the host while parameters are on a device, unless the step is fused or capturable."""
        if not self.is_emulated or any(g.get("fused") or g.get("capturable") for g in self.optimizer.param_groups):
            return 0
        leaves = tree_leaves(list(self.optimizer.state.values()))
        counters = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() == 0]
        return self.rounding_bytes * len(counters)


def _same_class(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """An optimizer of the same class and hyperparameters over other parameters, without state or hooks."""
    twin = object.__new__(type(optimizer))
    vars(twin).update(vars(optimizer))
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks"):
            setattr(twin, name, type(value)())
    twin.param_groups = groups
    twin.state = collections.defaultdict(dict)
    return twin
