"""Which trainable parameters a rehearsed step shows to get no gradient, ever: an unused head, an unused branch.

An optimizer keeps nothing for them. What another step might still train is not among them:

- what the model's outputs depend on, whether its own loss does or not: the user's loss may;
- anything, if the step drew random numbers on the host, by which models skip layers;
- a layer that was left out where others of its kind were not (an expert of a mixture, a dropped layer).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from memscale._profile.segments import with_gradient
from memscale._torch import private
from memscale._torch.host_rng import HostRng
from memscale._torch.overrides import OwnHook

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


class TrainedWatch(OwnHook):
    """Watches one step of a model."""

    def __init__(self, model: nn.Module, undo: contextlib.ExitStack) -> None:
        self._model = model
        self._trained: set[int] = set()
        self._rng, self._torch_rng = HostRng(), _torch_rng()
        undo.callback(model.register_forward_hook(self).remove)
        for parameter in model.parameters():
            if parameter.requires_grad:
                undo.callback(parameter.register_post_accumulate_grad_hook(self._see_gradient).remove)

    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        self._trained.update(id(leaf) for leaf in _leaves_of(with_gradient(output)))

    def _see_gradient(self, parameter: torch.Tensor) -> None:
        self._trained.add(id(parameter))

    def untrained(self, num_calls: dict[str, int]) -> frozenset[str]:
        """The names of parameters that get no gradient, now that the step has called these layers so often."""
        if self._rng.moved() or self._torch_rng != _torch_rng():
            return frozenset()
        perhaps = {id(p) for module in self._left_out(num_calls) for p in module.parameters()}
        known = self._trained | perhaps
        return frozenset(n for n, p in self._model.named_parameters() if p.requires_grad and id(p) not in known)

    def _left_out(self, num_calls: dict[str, int]) -> Iterator[nn.Module]:
        """Layers that were not called, or are not known to be, beside others of their kind that are trained."""
        for prefix, container in self._model.named_modules():
            if not isinstance(container, _CONTAINERS):
                continue
            trained = {type(child) for child in container.children() if self._is_trained(child)}
            for name, child in container.named_children():
                module_fqn = f"{prefix}.{name}" if prefix else name
                if type(child) in trained and not self._is_trained(child) and not num_calls.get(module_fqn):
                    yield child

    def _is_trained(self, module: nn.Module) -> bool:
        return any(id(parameter) in self._trained for parameter in module.parameters())


def _leaves_of(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """What these are computed from, as far as autograd shows it."""
    waiting: list[Any] = [node for tensor in tensors if (node := private.node_of(tensor)) is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor):
            yield leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def _torch_rng() -> bytes:
    with private.real_tensors():
        return torch.random.get_rng_state().numpy().tobytes()
