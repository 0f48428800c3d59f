"""Where fp16 gradients are scaled, and where they are not.

    loss -> ... -> output ->| x scale |-> the model's graph, in fp16 ->| / scale |-> parameter, input
                        gradient enters                          gradient leaves

NOTE [gradients enter and leave]: the scale is on exactly between the tensors that the model hands out and the edges on
which gradients leave its graph. So a parameter that the user's loss also uses directly (a penalty on weights) gets a
true sum, accumulation over any number of backwards is exact, whatever the scale was at each, and clipping, logging and
`torch.autograd.grad` see true values. Scales are powers of two: multiplying by one and by its inverse loses nothing.

The edges are found by walking the autograd graph after the forward. They lead to leaves (parameters, also those that
the model does not register), to what was computed before the forward began (nodes are numbered as they are made), and
to what an earlier forward handed out. One that leads into the middle of an earlier forward, whose gradients are scaled
as well (a key-value cache, a cached weight), changes from one scale to the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from memscale._errors import MemScaleError
from memscale._torch import private
from memscale.techniques.precision.output_tensors import change_attributes, map_outputs

if TYPE_CHECKING:
    from memscale.techniques.precision.loss_scale import LossScale

_LEAF = "torch::autograd::AccumulateGrad"
_FRESH_CAST = "ToCopyBackward0"
_REENTRANT = "CheckpointFunctionBackward"
_INSIDE = "memscale: scaled by"
"""The key in the metadata of a node whose incoming gradients are scaled."""


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
        self._first = private.next_sequence_number()
        self._came_in = {  # another thread, with numbers of its own, may have computed it
            (node, leaf.output_nr)
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, torch.Tensor) and (node := private.node_of(leaf)) is not None
        }
        self._roots: list[Any] = []
        self._known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def close(self, model: nn.Module, output: Any) -> Any:
        """Scale what the model hands out, unscale where gradients leave. Gives the new output."""
        scaled = map_outputs(output, self._hand_out)
        change_attributes(model, self._hand_out_if_new)
        self._known.clear()
        border: list[Any] = []
        for node, multipliers in self._leaving(border):
            node.register_hook(Unscale(self.scale, multipliers, is_cast=node.name() == _FRESH_CAST))
        self.scale.reaches(leaves_beyond(border))
        return output if scaled is None else scaled

    def _hand_out(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad or _is_scaled(tensor):
            return tensor
        if id(tensor) not in self._known:  # the same tensor under two names stays one
            scaled: torch.Tensor = ScaleGradient.apply(tensor, self.factor)  # type: ignore[no-untyped-call]
            self._known[id(tensor)] = (tensor, scaled)
            self._roots.append(private.node_of(scaled))
        return self._known[id(tensor)][1]

    def _hand_out_if_new(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._hand_out(tensor) if self._is_new(private.node_of(tensor)) else tensor

    def _is_new(self, node: Any) -> bool:
        return private.sequence_number(node) >= self._first

    def _leaving(self, border: list[Any]) -> Iterator[tuple[Any, dict[int, float]]]:
        """Each node from which gradients leave the graph, and what they are multiplied with there, by position.

        The nodes that they go to, with true values, are added to `border`.
        """
        seen: set[Node] = set(self._roots)
        stack = list(self._roots)
        while stack:
            node = stack.pop()
            multipliers: dict[int, float] = {}
            for index, edge in enumerate(node.next_functions):
                child = edge[0]
                if child is None:
                    continue
                target = self._scale_at(edge)
                if target == 1.0:
                    multipliers[index] = 1.0 / self.factor
                    border.append(child)
                elif target is not None and target != self.factor:
                    multipliers[index] = target / self.factor
                elif target is None and child not in seen:
                    _refuse_reentrant(child)
                    child.metadata[_INSIDE] = self.factor
                    seen.add(child)
                    stack.append(child)
            if multipliers:
                yield node, multipliers

    def _scale_at(self, edge: tuple[Any, int]) -> float | None:
        """The scale of gradients beyond this edge; None if it leads on through this graph."""
        child = edge[0]
        if child.name() == _LEAF or edge in self._came_in or _is_border(child):
            return 1.0
        return None if self._is_new(child) else float(child.metadata.get(_INSIDE, 1.0))


class Unscale:
    """A hook of a node: takes the scale off the gradients that leave the graph here."""

    def __init__(self, scale: LossScale, multipliers: dict[int, float], *, is_cast: bool) -> None:
        self.scale = scale
        self.multipliers = multipliers
        """A factor for each gradient of the node, by its position."""
        self.is_cast = is_cast

    def __call__(self, gradients: tuple[Any, ...], incoming: tuple[Any, ...]) -> tuple[Any, ...]:
        result = list(gradients)
        for index, multiplier in self.multipliers.items():
            gradient = result[index]
            if gradient is not None:
                result[index] = gradient = self._multiply(gradient, multiplier, incoming)
                self.scale.watch(gradient)
        return tuple(result)

    def _multiply(self, gradient: torch.Tensor, multiplier: float, incoming: tuple[Any, ...]) -> torch.Tensor:
        """Multiply, in place where the gradient is certainly nobody else's: a cast has just made it."""
        is_fresh = self.is_cast and incoming[0] is not None and incoming[0].dtype != gradient.dtype
        return gradient.mul_(multiplier) if is_fresh else gradient * multiplier


def leaves_beyond(border: list[Any]) -> Iterator[torch.Tensor]:
    """The leaves that gradients from this border come to. Those of an earlier forward are known from there."""
    seen: set[Node] = set(border)
    stack = list(border)
    while stack:
        node = stack.pop()
        if node.name() == _LEAF:
            yield node.variable
        if _is_border(node):
            continue
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                stack.append(child)


def _is_border(node: Any) -> bool:
    return bool(node.name() == "ScaleGradientBackward")


def _refuse_reentrant(node: Any) -> None:
    if type(node).__name__ == _REENTRANT:
        raise MemScaleError(
            "the model checkpoints with use_reentrant=True, which hides its parameters from fp16 loss scaling. "
            "Use use_reentrant=False, or leave checkpointing to MemScale."
        )


def _is_scaled(tensor: torch.Tensor) -> bool:
    node = private.node_of(tensor)
    return node is not None and _is_border(node)
