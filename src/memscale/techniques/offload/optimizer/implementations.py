"""With which implementation an optimizer steps a part of its parameters: with the one that the whole model would have.

NOTE [the implementation of the whole]: PyTorch's optimizers have a multi-tensor implementation ("foreach") and a loop
over the parameters, which round differently: in 16 bits most of them, RAdam and ASGD in any type. Where nobody chose,
they take foreach for a group whose parameters are all on a device that has it. A streamed parameter is on the host, so
the whole group would fall to the loop, and a bucket of it might be stepped in another way than the group. Therefore a
part is told what the whole group would have taken with its streamed parameters on the device that computes.
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
    """Who streams parameters."""

    @property
    def device(self) -> torch.device: ...
    def parameters(self) -> Iterable[torch.Tensor]: ...
    def bring(self, parameter: torch.Tensor, stretch: Stretch | None = None) -> Coming: ...
    def bring_gradient(self, parameter: torch.Tensor, stretch: Stretch | None = None) -> Coming: ...
    def take_home(self, parameter: torch.Tensor, stepped: torch.Tensor, stretch: Stretch | None = None) -> None: ...
    def let_go(self, parameter: torch.Tensor, stretch: Stretch | None = None) -> None: ...
    def wait_until_home(self) -> None: ...


Coming = Arrival | torch.Tensor
"""A tensor on its way to the device, or there."""

_STREAMING: weakref.WeakSet[Any] = weakref.WeakSet()
"""Everybody who streams parameters now."""


def begin_streaming(streams: Streams) -> None:
    _STREAMING.add(streams)


def end_streaming(streams: Streams) -> None:
    _STREAMING.discard(streams)


def streamed_parameters() -> dict[int, Streams]:
    """Who streams a parameter, by the parameter's id."""
    return {id(parameter): streams for streams in [*_STREAMING] for parameter in streams.parameters()}


def devices_of_streamed() -> dict[int, torch.device]:
    """Where streamed parameters compute, by their ids."""
    return {number: streams.device for number, streams in streamed_parameters().items()}


Stepped = Callable[[torch.Tensor], bool]
"""Whether a parameter is stepped."""


def has_gradient(parameter: torch.Tensor) -> bool:
    return parameter.grad is not None


def foreach_of_whole(optimizer: Optimizer, is_stepped: Stepped = has_gradient) -> list[bool | None]:
    """By group: the `foreach` that every part of it is to be stepped with, given the gradients that there are now, or
    what is said to be stepped.

    None: the group says it, or the optimizer chooses by other rules.
    """
    streamed = devices_of_streamed()
    return [_foreach_of_group(optimizer, group, streamed, is_stepped) for group in optimizer.param_groups]


def differs_from_whole(optimizer: Optimizer, foreach: list[bool | None]) -> bool:
    """Whether the optimizer would step a group in another way than the whole model's optimizer, which is given."""
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
        return False  # one sparse gradient makes it step its neighbours in the loop, too
    away = [streamed[id(parameter)] for parameter in stepped if id(parameter) in streamed]
    has_foreach = all(device.type in private.foreach_device_types() for device in away)
    return has_foreach and _default([p for p in stepped if id(p) not in streamed], group)


def _default(parameters: list[torch.Tensor], group: dict[str, Any]) -> bool:
    return private.is_foreach_by_default(parameters, differentiable=bool(group.get("differentiable")))
