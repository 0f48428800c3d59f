"""Where the tensors of a forward lie: in its result, on its modules, in the hands of hooks.

A result is usually a tensor, or tensors in tuples, dicts and dataclasses: those are made anew with changed tensors.
Other objects (a distribution, a key-value cache, a dict of a class of its own) are changed in place: nobody can say how
to make another one. What lies on modules is changed in place as well, since several modules may share a list.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from memscale._torch import private
from memscale._torch.overrides import OwnHook

MapTensor = Callable[[torch.Tensor], torch.Tensor]

_MAX_DEPTH = 4
"""So far is looked into objects; what is deeper is no output."""
_MODULE_INTERNALS = frozenset(vars(nn.Module())) - {"_buffers"}
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device, torch.Size)
_OPAQUE = (*_PLAIN, nn.Module, types.ModuleType, types.FunctionType, types.MethodType, torch.Generator)
_WELL_KNOWN = ("memscale.", "torch.", "transformers.", "accelerate.", "peft.")
"""Packages whose hooks hand activations to nobody but in the result."""


def map_outputs(output: Any, change: MapTensor, leave: tuple[str, ...] = ()) -> Any:
    """The output with its floating tensors changed, or None if none was. Dataclasses are copied, not changed.

    Objects whose classes are from the modules `leave` are not looked into.
    """
    return _map_outputs(output, InPlace(change, leave))


def widened(output: Any, narrow: torch.dtype, leave: tuple[str, ...] = ()) -> Any:
    """The output with its tensors of this type in 32 bits, or None if there are none. `leave`: as for `map_outputs`."""
    return map_outputs(output, lambda tensor: tensor.float() if tensor.dtype == narrow else tensor, leave)


def _map_outputs(output: Any, inside: InPlace) -> Any:
    leaves, spec = tree_flatten(output)
    changed = [_map_leaf(leaf, inside) for leaf in leaves]
    if all(new is old for new, old in zip(changed, leaves, strict=True)):
        return None
    return tree_unflatten(changed, spec)


def _map_leaf(leaf: Any, inside: InPlace) -> Any:
    if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
        return inside(leaf)
    fields = {field.name: getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)}
    changed = {name: new for name, value in fields.items() if (new := _map_outputs(value, inside)) is not None}
    if changed:
        leaf = copy.copy(leaf)
        for name, value in changed.items():
            object.__setattr__(leaf, name, value)  # also of a frozen one: the copy is ours
    return leaf


class InPlace:
    """Changes floating tensors wherever they lie in a value. Containers and objects stay the same; tuples cannot."""

    def __init__(self, change: MapTensor, leave: tuple[str, ...] = ()) -> None:
        self.change = change
        self.leave = leave
        self._seen: dict[int, tuple[Any, Any]] = {}

    def __call__(self, value: Any, depth: int = 0) -> Any:
        if isinstance(value, torch.Tensor):
            return self.change(value) if value.is_floating_point() or value.is_complex() else value
        if type(value) in _PLAIN or depth > _MAX_DEPTH or isinstance(value, _OPAQUE):
            return value
        if type(value).__module__ in self.leave:
            return value
        if id(value) not in self._seen:
            self._seen[id(value)] = (value, value)  # also what ends a circle
            self._seen[id(value)] = (value, self._look_into(value, depth + 1))
        return self._seen[id(value)][1]

    def _look_into(self, value: Any, depth: int) -> Any:
        if isinstance(value, tuple):
            parts = [self(part, depth) for part in value]
            if all(new is old for new, old in zip(parts, value, strict=True)):
                return value
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        if isinstance(value, dict | list | collections.UserDict | collections.deque):
            for key, part in list(value.items() if hasattr(value, "items") else enumerate(value)):
                new = self(part, depth)
                if new is not part:
                    value[key] = new
            return value
        for name, part in list(getattr(value, "__dict__", {}).items()):
            new = self(part, depth)
            if new is not part:
                vars(value)[name] = new
        return value


def change_attributes(model: nn.Module, change: MapTensor) -> None:
    """Change the tensors that a forward computed and left on its modules (an auxiliary loss, a state for later)."""
    inside = InPlace(functools.partial(_change_computed, change))
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if name not in _MODULE_INTERNALS:
                new = inside(value)
                if new is not value:
                    vars(module)[name] = new


def _change_computed(change: MapTensor, tensor: torch.Tensor) -> torch.Tensor:
    return change(tensor) if private.node_of(tensor) is not None else tensor


# ---- hooks


def find_foreign_hook(model: nn.Module) -> tuple[str, str] | None:
    """(where, of which kind) is the first hook that may let activations out, or that sees gradients inside."""
    for kind, hooks in private.global_module_hooks():
        if any(not _is_harmless(hook) for hook in hooks.values()):
            return "every module", kind
    module_fqn: str
    for module_fqn, module in model.named_modules():
        for kind, hooks in _hooks_of(module, is_root=not module_fqn):
            if any(not _is_harmless(hook) for hook in hooks.values()):
                return repr(module_fqn or type(module).__name__), kind
    return None


def _hooks_of(module: nn.Module, *, is_root: bool) -> Iterator[tuple[str, dict[int, Any]]]:
    """Forward hooks of the model itself see what goes in and out, which is true."""
    if not is_root:
        yield "forward", module._forward_hooks
        yield "forward", module._forward_pre_hooks
    yield "backward", module._backward_hooks
    yield "backward", module._backward_pre_hooks


def _is_harmless(hook: Any) -> bool:
    function = hook.func if isinstance(hook, functools.partial) else hook
    owner = getattr(function, "__self__", function)
    home = function.__module__ if isinstance(owner, types.FunctionType) else type(owner).__module__
    return isinstance(hook, OwnHook) or f"{home}.".startswith(_WELL_KNOWN)
