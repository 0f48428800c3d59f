"""Where an optimizer's state lies: beside its parameters, wherever these are moved to."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from memscale._torch.optimizer_steps import StepOrder, StepWatcher
from memscale.techniques.offload.optimizer.separable import is_taken_over

_HOST_SCALARS = ("step", "mu_product")
"""Counters that most optimizers keep on the host, unless they are capturable or fused."""


class Followers(StepWatcher):
    """Keeps the state of every optimizer of one model beside its parameters."""

    order = StepOrder.PLACE

    def __init__(self, model: nn.Module) -> None:
        self._parameters: dict[int, weakref.ref[torch.Tensor]] = {}
        self.know(model.parameters())
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.leaves_adopted = False
        """Whether optimizers that were taken over are left alone: whoever steps them moves their state, in pieces."""
        self._moved_scalars: set[tuple[int, str]] = set()
        """Counters that some optimizers keep beside the parameter, by the parameter's id and their name."""

    def know(self, parameters: Iterable[torch.Tensor]) -> None:
        """Let the state of these follow, too."""
        self._parameters.update((id(parameter), weakref.ref(parameter)) for parameter in parameters)

    def follow_all(self, optimizers: Iterable[Optimizer]) -> None:
        """Move the state of those that are the model's to where the parameters are now."""
        for optimizer in optimizers:
            if self.concerns(optimizer):
                self._optimizers.add(optimizer)
                self._follow(optimizer)

    def take_over(self, other: Followers) -> None:
        """Know the optimizers that another has followed.

        NOTE [a change of plans]: plans by shape stream the same parameters, and change at many steps. Looking for
        optimizers goes through all of Python's objects, 70 ms in a process of ordinary size. One that is new since the
        plan before has no state, or has it beside its parameters, and is met at its first step.
        """
        self._optimizers |= other._optimizers
        self._moved_scalars |= other._moved_scalars

    def concerns(self, optimizer: Optimizer) -> bool:
        return any(self._is_ours(parameter) for group in optimizer.param_groups for parameter in group["params"])

    def before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Move the state of an optimizer that was out of reach until now (unpickled, or made by a library)."""
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            self._follow(optimizer)
        _scale_on_host(optimizer)

    def release(self) -> None:
        for optimizer in [*self._optimizers]:
            self._follow(optimizer)

    def _is_ours(self, parameter: Any) -> bool:
        found = self._parameters.get(id(parameter))
        return found is not None and found() is parameter

    def _follow(self, optimizer: Optimizer) -> None:
        if self.leaves_adopted and is_taken_over(optimizer):
            return
        every = [(parameter, group) for group in optimizer.param_groups for parameter in group["params"]]
        # State of the host's parameters moves first, because that makes room on the device.
        for parameter, group in sorted(every, key=lambda pair: pair[0].device.type != "cpu"):
            state = optimizer.state.get(parameter) if self._is_ours(parameter) else None
            if type(state) is dict:  # any other type belongs to an object that moves it itself
                self._move_state(state, parameter, group)

    def _move_state(self, state: dict[str, Any], parameter: torch.Tensor, group: dict[str, Any]) -> None:
        for name, value in [*state.items()]:
            if not isinstance(value, torch.Tensor):
                state[name] = contents_beside(value, parameter.device)
                continue
            if value.device == parameter.device:
                continue
            key = (id(parameter), name)
            if value.dim() == 0 and value.device.type != "cpu":
                self._moved_scalars.add(key)
            elif stays_on_host(name, value, group) and key not in self._moved_scalars:
                continue
            state[name] = value.to(parameter.device)


def contents_beside(value: Any, device: torch.device) -> Any:
    """State that is no tensor: those in its containers (LBFGS keeps lists of them) go to this device."""
    is_away = any(isinstance(leaf, torch.Tensor) and leaf.device != device for leaf in tree_leaves(value))
    return tree_map_only(torch.Tensor, lambda leaf: leaf.to(device), value) if is_away else value


def stays_on_host(name: str, value: torch.Tensor, group: dict[str, Any]) -> bool:
    """Whether this value of a parameter's state is on the host wherever the parameter is."""
    is_counter = name in _HOST_SCALARS and value.dim() == 0
    return is_counter and not (group.get("capturable") or group.get("fused"))


def _scale_on_host(optimizer: Any) -> None:
    """Let scales be copied to the host safely. See NOTE [scale on the host] in `state_following.py`."""
    scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    if isinstance(scale, torch.Tensor):
        optimizer.grad_scale = scale.cpu()
    if isinstance(found_inf, torch.Tensor):
        optimizer.found_inf = (found_inf.cpu() != 0).to(found_inf.dtype)
