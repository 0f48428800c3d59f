"""What an optimizer keeps and what its step needs, by running two of its steps on fake parameters."""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
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


Split = Callable[[list[int]], list[list[int]]]
"""From the sizes of parameters to the indices of those that are stepped together."""


def optimizer_cost(
    model: nn.Module,
    optimizer: str | Optimizer,
    device_type: str,
    *,
    split: Split | None = None,
    without: Collection[str] = (),
) -> OptimizerCost:
    """State and step temporaries of an optimizer over this model's parameters on this device.

    With a `split`, also what the device holds when the step runs bucket by bucket; `without` leaves out submodules.
    """
    if optimizer == "none":
        return OptimizerCost("none", 0, 0, 0)
    left_out = {id(p) for module_fqn in without for p in model.get_submodule(module_fqn).parameters()}
    try:
        return _Twin(model, optimizer, device_type, left_out).cost(split)
    except Exception as error:  # whatever a third party's optimizer does on fake tensors
        if isinstance(optimizer, str):
            raise
        logger.warning(
            "%s cannot be tried on fake tensors (%s: %s); its state is taken to be AdamW's",
            type(optimizer).__name__,
            type(error).__name__,
            error,
        )
        cost = _Twin(model, "adamw", device_type, left_out).cost(None)
        return dataclasses.replace(cost, name=f"{type(optimizer).__name__}, taken as AdamW")


class _AnyValue(TorchFunctionMode):
    """Reads any fake number as a half: Adafactor and others scale by norms, and bytes do not depend on them."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.Tensor.item, torch.Tensor.__float__) and _torch_private.is_fake(args[0]):
            return 0.5
        return func(*args, **(kwargs or {}))


class _Twin:
    """The same optimizer over fake parameters, choosing its implementation as the real device would."""

    def __init__(self, model: nn.Module, optimizer: str | Optimizer, device_type: str, left_out: set[int]) -> None:
        self._left_out = left_out
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
            self.optimizer.state.clear()  # Adagrad makes its state at once; made at the first step it is counted
        else:
            groups = [{**group, "params": self._fake_all(group["params"])} for group in optimizer.param_groups]
            self.optimizer = _same_class(optimizer, groups)
        # PyTorch picks foreach where the device has it, but never for fake tensors.
        picks_foreach = device_type in _torch_private.foreach_device_types()
        for group in self.optimizer.param_groups:
            if group.get("foreach", False) is None and not group.get("fused"):
                group["foreach"] = picks_foreach

    def _fake_all(self, parameters: Any) -> list[nn.Parameter]:
        return [self._fake(p) for p in parameters if p.requires_grad and id(p) not in self._left_out]

    def _fake(self, parameter: torch.Tensor) -> nn.Parameter:
        if id(parameter) not in self._fakes:
            with self.mode:
                shape, stride = parameter.shape, parameter.stride()
                empty = torch.empty_strided(shape, stride, dtype=parameter.dtype, device=self.device)
            self._fakes[id(parameter)] = nn.Parameter(empty)
        return self._fakes[id(parameter)]

    def cost(self, split: Split | None) -> OptimizerCost:
        parameters = list(self._fakes.values())
        if not parameters:
            return OptimizerCost(self.name, 0, 0, 0)
        books = LiveBytes(self.device.type, self.rounding_bytes, counts_fakes=True)
        with self.mode:
            for parameter in parameters:
                parameter.grad = torch.empty_like(parameter)
            books.see_all([parameters, [parameter.grad for parameter in parameters]])
            before = books.total_bytes
            with books, _AnyValue():
                self.optimizer.step()
                state_bytes = books.total_bytes - before
                books.reset_peak()
                self.optimizer.step()
            step_bytes = books.peak_bytes - before - state_bytes
        state_bytes -= self._counter_bytes()
        moved_bytes = 3 * sum(parameter.nbytes for parameter in parameters) + 2 * state_bytes
        split_bytes = None if split is None else self._split_bytes(split, parameters)
        return OptimizerCost(self.name, state_bytes, max(0, step_bytes), moved_bytes, split_bytes)

    def _split_bytes(self, split: Split, parameters: list[nn.Parameter]) -> int:
        """The most that a bucket's state, the next one's, and the step's temporaries come to."""
        largest = max(split([p.nbytes for p in parameters]), key=lambda b: sum(parameters[i].nbytes for i in b))
        inside = {id(parameters[index]) for index in largest}
        groups = [{**g, "params": [p for p in g["params"] if id(p) in inside]} for g in self.optimizer.param_groups]
        bucket = _same_class(self.optimizer, groups)
        books = LiveBytes(self.device.type, self.rounding_bytes, counts_fakes=True)
        with self.mode, books, _AnyValue():
            bucket.step()
            state_bytes = books.total_bytes
            books.reset_peak()
            bucket.step()
        return 2 * state_bytes + books.peak_bytes - state_bytes

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
    # A scheduler puts a `step` bound to the user's optimizer on the instance: the twin's is that of the class.
    vars(twin).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks"):
            setattr(twin, name, type(value)())
    twin.param_groups = groups
    twin.state = collections.defaultdict(dict)
    return twin
