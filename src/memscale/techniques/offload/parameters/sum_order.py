"""Gradients of a parameter that several streamed calls use are summed in the order in which plain PyTorch sums them.

NOTE [order of sums]: plain autograd adds up the gradients of all uses of a parameter one by one, the last use first. A
streamed call has a copy of its own: the gradients of its uses are added up there, and the sum goes home. With one use
in each call the result is the same. With two uses of a parameter in one call, and a later call that uses it too, plain
PyTorch computes (later + second) + first; two sums would be later + (second + first), which may have another last bit.
So a call that uses a parameter more than once leaves a *tail*: a tensor without memory whose gradient is the first to
be added to those of the call's own uses. The gradient of the next call's copy goes there instead of going home on its
own. Where every call uses the parameter once, there is no tail, and every gradient goes home at once.

Uses are counted (uses.py). Calls under one autocast share casts, whose gradients are added up in 16 bits: see NOTE
[casts] in shared_casts.py.

Known limits: a call whose operators save nothing for backward leaves no tail. A graph of gradients
(`create_graph=True`, a penalty on gradients of inputs) uses a call's copies once more, and nobody knows of it when the
call is made: if that call's output is in the loss as well, and another call of the layer is, the sum may have another
last bit.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from memscale._torch import private
from memscale.techniques.offload.parameters.holders import Holders

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
        self._holders: Holders[Holder] = Holders()
        self._memory: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self._holders)

    def let_go(self) -> None:
        """Keep no memory on the device; tails that are still followed keep theirs."""
        self._memory = None

    def of(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the tail that a new copy of this parameter follows; None if its gradient goes home on its own."""
        holder = self._holders.last(id(parameter))  # a tail keeps its parameter alive, and with it the id
        return None if holder is None else holder.tails[id(parameter)]

    def leave(self, parameter: torch.Tensor, linked: torch.Tensor, holder: Holder) -> None:
        holder.tails[id(parameter)] = self.tail_of(linked)
        self._holders.add(id(parameter), holder)

    def tail_of(self, linked: torch.Tensor) -> torch.Tensor:
        """Return a tensor whose gradient is added to this one's before that of its own uses."""
        tail: torch.Tensor = _Tail.apply(linked, [self.hollow(linked)])  # type: ignore[no-untyped-call]
        private.run_first(tail.grad_fn)
        return tail

    def hollow(self, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same shape without memory of its own, a place in the graph."""
        if self._memory is None:
            self._memory = torch.empty(HOLLOW_BYTES, dtype=torch.uint8, device=self._device)
        shape = tuple(like.shape)
        return private.tensor_over(self._memory.untyped_storage(), like.dtype, like.device, 0, shape, (0,) * len(shape))


def follow(tail: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the weight with the tail as the end of its graph."""
    linked: torch.Tensor = _Following.apply(tail, [weight])  # type: ignore[no-untyped-call]
    private.run_first(linked.grad_fn)
    return linked
