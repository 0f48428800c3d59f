"""Where fp16 gradients are scaled, and where they are not.

    loss -> ... -> output ->| x scale |-> the model's graph, in fp16 ->| / scale |-> parameter, input
                        gradient enters                          gradient leaves

NOTE [gradients enter and leave]: the scale is on exactly between the tensors that the model hands out and the edges on
which gradients leave its graph. So a parameter that the user's loss also uses directly (a penalty on weights) gets a
true sum, accumulation over any number of backwards is exact, whatever the scale was at each, and clipping, logging and
`torch.autograd.grad` see true values. Scales are powers of two: multiplying by one and by its inverse loses nothing.

The edges are found by walking the autograd graph after the forward. They lead to leaves (parameters, also those that
the model does not register), to the tensors that came in, and to what an earlier forward handed out.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from memscale._errors import MemScaleError
from memscale._patching import OwnHook

if TYPE_CHECKING:
    from memscale.techniques.precision.loss_scale import LossScale

MapTensor = Callable[[torch.Tensor], torch.Tensor]

_LEAF = "torch::autograd::AccumulateGrad"
_FRESH_CAST = "ToCopyBackward0"
_REENTRANT = "CheckpointFunctionBackward"
_MODULE_INTERNALS = frozenset(vars(nn.Module())) - {"_buffers"}


class ScaleGradient(torch.autograd.Function):
    """The same tensor; its gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        # Losses are changed in place (`loss /= steps`), which autograd forbids on views made here; a number is cheap.
        return tensor.clone() if tensor.numel() == 1 else tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            # Second derivatives reach weights both through edges that unscale and through new ones that do not.
            raise MemScaleError(
                "fp16 gradients that MemScale scales cannot be differentiated again (create_graph=True). "
                "Use bf16, or a torch.amp.GradScaler of your own: MemScale leaves the scaling to it."
            )
        return gradient * ctx.factor, None


class ScaledGraph:
    """The autograd graph of one forward, between what came in and what goes out."""

    def __init__(self, scale: LossScale, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.scale = scale
        self.factor = scale.value
        self._came_in = {
            (leaf.grad_fn, leaf.output_nr)
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None
        }
        self._went_out: list[Any] = []
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def close(self, model: nn.Module, output: Any) -> Any:
        """Scale what the model hands out, unscale where gradients leave. Gives the new output."""
        scaled = map_outputs(output, self._hand_out)
        hand_out_attributes(model, self._hand_out)
        self._known.clear()
        for node, index_of_leaf in leaving_edges(self._went_out, self._came_in):
            node.register_hook(
                Unscale(self.scale, 1.0 / self.factor, index_of_leaf, is_cast=node.name() == _FRESH_CAST)
            )
        return output if scaled is None else scaled

    def _hand_out(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad or _is_scaled(tensor):
            return tensor
        if id(tensor) not in self._known:  # the same tensor under two names stays one
            scaled: torch.Tensor = ScaleGradient.apply(tensor, self.factor)  # type: ignore[no-untyped-call]
            self._known[id(tensor)] = (tensor, scaled)
            self._went_out.append(scaled.grad_fn)
        return self._known[id(tensor)][1]


class Unscale:
    """A hook of a node: takes the scale off the gradients that leave the graph here."""

    def __init__(self, scale: LossScale, inverse: float, edges: dict[int, bool], *, is_cast: bool) -> None:
        self.scale = scale
        self.inverse = inverse
        self.edges = edges
        """Positions among the node's gradients; True for those of leaves."""
        self.is_cast = is_cast

    def __call__(self, gradients: tuple[Any, ...], incoming: tuple[Any, ...]) -> tuple[Any, ...]:
        result = list(gradients)
        for index, is_leaf in self.edges.items():
            gradient = result[index]
            if gradient is None:
                continue
            result[index] = gradient = self._divide(gradient, incoming)
            if is_leaf:
                self.scale.watch(gradient)
        return tuple(result)

    def _divide(self, gradient: torch.Tensor, incoming: tuple[Any, ...]) -> torch.Tensor:
        """In place where the gradient is certainly nobody else's: a cast has just made it."""
        is_fresh = self.is_cast and incoming[0] is not None and incoming[0].dtype != gradient.dtype
        return gradient.mul_(self.inverse) if is_fresh else gradient * self.inverse


def leaving_edges(roots: list[Any], came_in: set[Any]) -> Iterator[tuple[Any, dict[int, bool]]]:
    """Each node from which gradients leave the graph: (node, position -> whether it leads to a leaf)."""
    border = type(roots[0]) if roots else None
    seen: set[Node] = set(roots)
    stack = list(roots)
    while stack:
        node = stack.pop()
        leaving: dict[int, bool] = {}
        for index, edge in enumerate(node.next_functions):
            child = edge[0]
            if child is None:
                continue
            is_leaf = child.name() == _LEAF
            if is_leaf or edge in came_in or type(child) is border:
                leaving[index] = is_leaf
            elif child not in seen:
                _refuse_reentrant(child)
                seen.add(child)
                stack.append(child)
        if leaving:
            yield node, leaving


def _refuse_reentrant(node: Any) -> None:
    if type(node).__name__ == _REENTRANT:
        raise MemScaleError(
            "the model checkpoints with use_reentrant=True, which hides its parameters from fp16 loss scaling. "
            "Use use_reentrant=False, or leave checkpointing to MemScale."
        )


def _is_scaled(tensor: torch.Tensor) -> bool:
    return tensor.grad_fn is not None and tensor.grad_fn.name() == "ScaleGradientBackward"


def map_outputs(output: Any, change: MapTensor) -> Any:
    """The output with its floating tensors changed, or None if none was. Dataclasses are copied, not changed."""
    leaves, spec = tree_flatten(output)
    changed = [_map_leaf(leaf, change) for leaf in leaves]
    if all(new is old for new, old in zip(changed, leaves, strict=True)):
        return None
    return tree_unflatten(changed, spec)


def _map_leaf(leaf: Any, change: MapTensor) -> Any:
    if isinstance(leaf, torch.Tensor):
        return change(leaf) if leaf.is_floating_point() or leaf.is_complex() else leaf
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        fields = {field.name: getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)}
        changed = {name: new for name, value in fields.items() if (new := map_outputs(value, change)) is not None}
        if changed:
            leaf = copy.copy(leaf)
            for name, value in changed.items():
                object.__setattr__(leaf, name, value)  # also of a frozen one: the copy is ours
    return leaf


def hand_out_attributes(model: nn.Module, change: MapTensor) -> None:
    """Tensors that a forward left on its modules (an auxiliary loss, a state for the next call) are handed out, too."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if name not in _MODULE_INTERNALS and any(_is_computed(part) for part in _parts(value)):
                new = map_outputs(value, functools.partial(_change_computed, change))
                if new is not None:
                    vars(module)[name] = new


def _parts(value: Any) -> Iterable[Any]:
    if type(value) is dict:
        return value.values()
    return value if type(value) in (list, tuple) else (value,)


def _change_computed(change: MapTensor, tensor: torch.Tensor) -> torch.Tensor:
    return change(tensor) if _is_computed(tensor) else tensor


def _is_computed(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is not None


def has_foreign_hooks(model: nn.Module) -> str | None:
    """The first inner module with a forward hook that is not MemScale's: such a hook may let activations out."""
    module_fqn: str
    for module_fqn, module in model.named_modules():
        if module_fqn and any(not _is_ours(hook) for hook in module._forward_hooks.values()):
            return module_fqn
    return None


def _is_ours(hook: Any) -> bool:
    function = hook.func if isinstance(hook, functools.partial) else hook
    owner = getattr(function, "__self__", function)
    return isinstance(hook, OwnHook) or type(owner).__module__.startswith("memscale.")
