"""Gradients of a parameter that several streamed calls use are summed in the order in which plain PyTorch sums them.

NOTE [order of sums]: plain autograd adds up the gradients of all uses of a parameter one by one, the last use first. A
streamed call has a copy of its own: the gradients of its uses are added up there, and the sum goes home. With one use
in each call the result is the same. With two uses of a parameter in one call, and a later call that uses it too, plain
PyTorch computes (later + second) + first; two sums would be later + (second + first), which may have another last bit.
So a call that uses a parameter more than once leaves a *tail*: a tensor without memory whose gradient is the first to
be added to those of the call's own uses. The gradient of the next call's copy goes there instead of going home on its
own. Where every call uses the parameter once, there is no tail, and every gradient goes home at once.

Uses are counted in the graph that a call has made: at a layer's first forward in each mode (training or not), and at
every forward of a layer that is called again while an earlier call still waits for its backward.

NOTE [casts]: autocast casts a parameter once and remembers it, so that plain PyTorch adds up the gradients of its uses
in 16 bits and casts their sum. It remembers no copies, each use of which has a cast of its own, so that the sum would
be made of 32 bits. A call that casts a copy twice is refused. Where a layer is called again before its backward,
with a cast in each, the log says once that those sums may differ from plain PyTorch's by the rounding of 16 bits: they
do if the calls are under one autocast, and do not if each is under one of its own, which nobody can tell apart here.

Known limits: it is not noticed if a layer uses a parameter once at first and more often later, without having been
called twice before. A call whose operators save nothing for backward leaves no tail. A graph of gradients
(`create_graph=True`, a penalty on gradients of inputs) uses a call's copies once more, and nobody knows of it when the
call is made: if that call's output is in the loss as well, and another call of the layer is, the sum may have another
last bit.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from memscale._torch import private

_CAST = "ToCopyBackward0"
HOLLOW_BYTES = 16
"""One element of the largest dtype."""


class _Tail(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, linked: torch.Tensor, hollow: list[torch.Tensor]) -> torch.Tensor:
        return hollow[0]  # in a list, so that it is no input of the graph

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _Following(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tail: torch.Tensor, weight: list[torch.Tensor]) -> torch.Tensor:
        return weight[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class Holder(Protocol):
    """An object that lives as long as the graph of one call."""

    tails: dict[int, torch.Tensor]


class Tails:
    """The last tail of every parameter that has a tail. See NOTE [order of sums]."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._holders: weakref.WeakValueDictionary[int, Holder] = weakref.WeakValueDictionary()
        self._memory: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self._holders)

    def let_go(self) -> None:
        """Keep no memory on the device; tails that are still followed keep theirs."""
        self._memory = None

    def of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the tail that a new copy of this parameter follows; None if its gradient goes home on its own."""
        holder = self._holders.get(id(parameter))  # a tail keeps its parameter alive, and with it the id
        return None if holder is None else holder.tails[id(parameter)]

    def leave(self, parameter: torch.Tensor, linked: torch.Tensor, holder: Holder) -> None:
        if self._memory is None:
            self._memory = torch.empty(HOLLOW_BYTES, dtype=torch.uint8, device=self._device)
        shape = tuple(linked.shape)
        hollow = private.tensor_over(
            self._memory.untyped_storage(), linked.dtype, linked.device, 0, shape, (0,) * len(shape)
        )
        tail: torch.Tensor = _Tail.apply(linked, [hollow])  # type: ignore[no-untyped-call]
        private.run_first(tail.grad_fn)
        holder.tails[id(parameter)] = tail
        self._holders[id(parameter)] = holder


def follow(tail: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the weight with the tail as the end of its graph."""
    linked: torch.Tensor = _Following.apply(tail, [weight])  # type: ignore[no-untyped-call]
    private.run_first(linked.grad_fn)
    return linked


class Uses:
    """Knows which copies the calls of one layer use more than once."""

    def __init__(self) -> None:
        self._several: dict[tuple[bool, ...], set[int]] = {}
        """Positions among the layer's weights, by training mode, by autocast and by which weights are trained."""
        self._counts_always = False
        self.is_cast = False
        """Whether autocast casts any of them in the last call that was counted."""
        self.cast_twice: set[int] = set()
        """Positions of those that autocast casts more than once in the last call that was counted."""

    def several(
        self, module: nn.Module, weights: list[Any], output: Any, since: int, *, is_called_again: bool
    ) -> set[int]:
        """Return the positions of weights that a call uses more than once; its graph begins at this sequence number."""
        self._counts_always = self._counts_always or is_called_again
        nodes = [getattr(weight, "grad_fn", None) for weight in weights]
        is_cast_once = any(_casts_once(weight) for weight in weights)
        key = (module.training, is_cast_once, *(node is not None for node in nodes))
        if key not in self._several or self._counts_always:
            kept = [value for part in module.modules() for value in vars(part).values()]
            leaves = [leaf for leaf in (*tree_leaves(output), *kept) if isinstance(leaf, torch.Tensor)]
            # Asking lazy logits for their graph would build them; they use their weight once, whatever their tiles.
            roots = [leaf.grad_fn for leaf in leaves if not getattr(leaf, "is_lazy", False)]
            users = _users(roots, nodes, since)
            self._several[key] = {position for position, each in enumerate(users) if len(each) > 1}
            cast_twice = {position for position, each in enumerate(users) if each.count(_CAST) > 1}
            self.cast_twice = cast_twice if is_cast_once else set()
            self.is_cast = is_cast_once and any(_CAST in each for each in users)
        return self._several[key]


def _casts_once(weight: torch.Tensor) -> bool:
    """Whether plain PyTorch would cast the parameter of this copy once for all of its uses. See NOTE [casts]."""
    return torch.is_autocast_enabled(weight.device.type) and torch.is_autocast_cache_enabled()


def _users(roots: Iterable[Any], targets: list[Any], since: int) -> list[list[str]]:
    """The names of what uses each target in the graph above them, once a use, among nodes no older than `since`."""
    found: dict[Any, list[str]] = {target: [] for target in targets if target is not None}
    waiting = [root for root in roots if root is not None and root not in found]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if private.sequence_number(node) < since:
            continue
        for following, _ in node.next_functions:
            if following in found:
                found[following].append(node.name())
            elif following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return [found.get(target, []) for target in targets]
