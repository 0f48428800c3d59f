"""Calls of streamed layers under one autocast add up the gradients of a parameter in 16 bits, as plain PyTorch does.

NOTE [casts]: autocast casts a parameter once and remembers the result, so that plain PyTorch adds up the gradients of
all its uses in 16 bits, the last use first, and casts their sum. It remembers nothing of a streamed layer's copies: the
use in each call has a cast of its own, whose gradient arrives in 32 bits. A sum of two such gradients that is rounded
to 16 bits is the sum that the 16-bit addition gives, because that, too, adds in 32 bits and rounds. So each call's copy
stands behind a *joint*, where the gradient of the next call's copy is the first to be added to that of its own use, and
which rounds the sum. The first call's joint gives it to what comes before: the way home, or a tail (sum_order.py).

    parameter -- link of the first call -- joint -- copy --> cast, use
                                             |
                               tail -- joint of the next call -- copy --> cast, use

Calls are under one autocast as long as its cache is not emptied in between (`CastProbe`). A cast that the layer's code
makes by itself (`weight.bfloat16()`) is none of autocast's, and plain PyTorch sums those of several calls in 32 bits
(uses.py tells them apart). What cannot be joined is refused: a call that casts a parameter twice,
and one that uses it otherwise than the call before it does.

Known limits: a head whose logits are lazy uses its weight later, and is not joined.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import torch

from memscale._torch import private
from memscale.techniques.offload.parameters.holders import Holders
from memscale.techniques.offload.parameters.uses import Use


@dataclasses.dataclass(slots=True, eq=False)
class Rounding:
    """What a joint does to a sum. The graph holds this and no joint: a joint's tail would hold the graph in turn."""

    dtype: torch.dtype
    is_on: bool = False
    """Whether a call has followed, so that gradients are added up here."""


@dataclasses.dataclass(slots=True, eq=False)
class Joint:
    """One call's part in a cast that several calls share. See NOTE [casts]."""

    lifetime: Any
    """What tells this life of autocast's cache from others."""
    rounding: Rounding
    before: Joint | None = None
    """The joint of the call before this one."""
    tail: torch.Tensor | None = None
    """To its gradient the next call's is added. None: that cannot be, as autocast's cast is not all that the call uses
    the parameter for."""
    is_placed: bool = False
    """Whether the call's copy stands behind it."""

    def may_follow(self, before: Joint, use: Use) -> bool:
        """Whether the gradient of this use can be the first to be added to that of the call before."""
        return (
            self.is_placed
            and use.count == 1
            and before.tail is not None
            and before.rounding.dtype is self.rounding.dtype
        )


class Joining(torch.autograd.Function):
    """The place of a joint in the graph."""

    @staticmethod
    def forward(ctx: Any, link: torch.Tensor, weight: list[torch.Tensor], rounding: Rounding) -> torch.Tensor:
        ctx.rounding = rounding
        return weight[0]  # in a list, so that it is no input of the graph

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if ctx.rounding.is_on:
            gradient = gradient.to(ctx.rounding.dtype).to(gradient.dtype)
        return gradient, None, None


class Holder(Protocol):
    """An object that lives as long as the graph of one call."""

    joints: dict[int, Joint]


class SharedCasts:
    """The last joint of every parameter in every life of autocast's cache."""

    def __init__(self, device: torch.device) -> None:
        self._device_type = device.type
        self._probe: private.CastProbe | None = None
        self._holders: Holders[Holder] = Holders()

    def __len__(self) -> int:
        return len(self._holders)

    def lifetime(self) -> Any:
        """Return what tells this life of autocast's cache from others; None if autocast remembers no casts now."""
        if not torch.is_autocast_enabled(self._device_type) or not torch.is_autocast_cache_enabled():
            return None
        if self._probe is None:
            self._probe = private.CastProbe()
        return self._probe.lifetime()

    def new_joint(self, parameter: torch.Tensor, lifetime: Any) -> Joint | None:
        """Return a joint for the call that begins; None if its cast of this parameter is shared with no other."""
        if lifetime is None or not _can_be_shared(parameter):
            return None
        holder = self._holders.last((id(parameter), lifetime))  # a joint keeps its parameter alive, and with it the id
        before = None if holder is None else holder.joints[id(parameter)]
        return Joint(lifetime, Rounding(torch.get_autocast_dtype(self._device_type)), before)

    def leave(self, parameter: torch.Tensor, joint: Joint, use: Use, holder: Holder) -> bool:
        """Keep a call's joint for the next call, and return whether that may be added to it."""
        before = joint.before
        if use.casts == 0:
            if before is None or before.tail is None:
                return False
            if use.count > 0:
                raise CannotBeJoined
        elif use.casts > 1 or (before is not None and not joint.may_follow(before, use)):
            raise CannotBeJoined
        holder.joints[id(parameter)] = joint
        self._holders.add((id(parameter), joint.lifetime), holder)
        return joint.is_placed and use.count == use.casts


class CannotBeJoined(Exception):
    """A call's gradients cannot be added up as plain PyTorch adds them up."""


def _can_be_shared(parameter: torch.Tensor) -> bool:
    """Whether autocast remembers its cast of this parameter."""
    return (
        parameter.requires_grad and parameter.dtype is torch.float32 and parameter.is_leaf and not parameter._is_view()
    )
