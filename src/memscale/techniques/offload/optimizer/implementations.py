"""Which implementation an optimizer steps a part of its parameters with: the one that the whole model would have.

NOTE [the implementation of the whole]: PyTorch's optimizers have a multi-tensor implementation ("foreach") and a loop
over the parameters. The two round differently: in 16 bits for most optimizers, in any dtype for RAdam and ASGD. Where
nobody chose, an optimizer takes foreach for a group whose parameters are all on a device that has it. A streamed
parameter is on the host, so the whole group would fall back to the loop, and a bucket of it might be stepped in another
way than the group. Therefore each part is stepped with the implementation that the whole group would have had with its
streamed parameters on the device that computes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch.optim.optimizer import Optimizer

from memscale._torch import private
from memscale.techniques.offload.store.stores import Stretch
from memscale.techniques.offload.transfer.transfers import Arrival


class Streams(Protocol):
    """An object that streams parameters, as optimizers see it."""

    @property
    def device(self) -> torch.device: ...
    def parameters(self) -> Iterable[torch.Tensor]: ...
    def bring(self, parameter: torch.Tensor, stretch: Stretch | None = None) -> Coming: ...
    def bring_gradient(self, parameter: torch.Tensor, stretch: Stretch | None = None) -> Coming: ...
    def take_home(
        self, parameter: torch.Tensor, stepped: torch.Tensor, stretch: Stretch | None = None, *, num_changes: int
    ) -> None: ...
    def let_go(self, parameter: torch.Tensor, stretch: Stretch | None = None) -> None: ...
    def wait_until_home(self) -> None: ...


Coming = Arrival | torch.Tensor
"""A tensor that is on its way to the device or has arrived."""

_STREAMING: weakref.WeakSet[Any] = weakref.WeakSet()
"""All objects that stream parameters now."""


def begin_streaming(streams: Streams) -> None:
    _STREAMING.add(streams)


def end_streaming(streams: Streams) -> None:
    _STREAMING.discard(streams)


def streamed_parameters() -> dict[int, Streams]:
    """Return the object that streams each parameter, by the parameter's id."""
    return {id(parameter): streams for streams in [*_STREAMING] for parameter in streams.parameters()}


def devices_of_streamed() -> dict[int, torch.device]:
    """Return the devices on which streamed parameters compute, by the ids of the parameters."""
    return {number: streams.device for number, streams in streamed_parameters().items()}


Stepped = Callable[[torch.Tensor], bool]
"""Whether a parameter is stepped."""


def has_gradient(parameter: torch.Tensor) -> bool:
    return parameter.grad is not None


def foreach_of_whole(optimizer: Optimizer, is_stepped: Stepped = has_gradient) -> list[bool | None]:
    """Return, by group, the value of `foreach` with which every part of the group is to be stepped.

    It depends on which parameters have gradients now, or on `is_stepped` where that is given. None means that the group
    sets it itself, or that the optimizer chooses by other rules.
    """
    streamed = devices_of_streamed()
    return [_foreach_of_group(optimizer, group, streamed, is_stepped) for group in optimizer.param_groups]


def differs_from_whole(optimizer: Optimizer, foreach: list[bool | None]) -> bool:
    """Whether the optimizer would step a group in another way than the given one of the whole model."""
    return any(
        choice is not None and choice != _default(list(filter(has_gradient, group["params"])), group)
        for group, choice in zip(optimizer.param_groups, foreach, strict=True)
    )


def _foreach_of_group(
    optimizer: Optimizer, group: dict[str, Any], streamed: dict[int, torch.device], is_stepped: Stepped
) -> bool | None:
    if not private.chooses_by_device(optimizer, group):
        return None
    stepped = list(filter(is_stepped, group["params"]))
    if isinstance(optimizer, torch.optim.Adagrad) and any(p.grad is not None and p.grad.is_sparse for p in stepped):
        return False  # one sparse gradient makes it step the neighbours in the loop too
    away = [streamed[id(parameter)] for parameter in stepped if id(parameter) in streamed]
    has_foreach = all(device.type in private.foreach_device_types() for device in away)
    return has_foreach and _default([p for p in stepped if id(p) not in streamed], group)


def _default(parameters: list[torch.Tensor], group: dict[str, Any]) -> bool:
    return private.is_foreach_by_default(parameters, differentiable=bool(group.get("differentiable")))
