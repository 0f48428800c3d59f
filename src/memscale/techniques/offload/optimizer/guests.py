"""Guests: parameters that live on the host and visit the device for their optimizer's step.

    guests = Guests(parameters)         # their values and gradients are on their way
    stand_ins = guests.stand_ins()      # by id: a parameter on the device that is stepped in place of the guest
    guests.go_home()                    # the stepped values are on their way back
    guests.let_go()                     # their device memory is free

An optimizer steps a streamed parameter's stand-in with the kernels that it would use for a parameter on the device, so
the bits are those of a model that is not streamed. Nothing changes on the host before `go_home`, so a step that fails
leaves the parameters of its bucket as they were.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from memscale._torch.unversioned_steps import raise_version
from memscale.techniques.offload.optimizer.implementations import Coming, Streams, streamed_parameters
from memscale.techniques.offload.parameters.parameter_homes import overlapping
from memscale.techniques.offload.store.stores import Stretch
from memscale.techniques.offload.transfer.transfers import Arrival


class Guests:
    """Some streamed parameters of one bucket, or a stretch of the elements of one."""

    def __init__(self, parameters: Sequence[torch.Tensor], stretch: Stretch | None = None) -> None:
        streams = streamed_parameters()
        self._stretch = stretch
        self._hosts: list[tuple[torch.Tensor, Streams]] = [(p, streams[id(p)]) for p in parameters]
        self._coming: list[tuple[Coming, Coming | None]] = [
            (host.bring(p, stretch), host.bring_gradient(p, stretch) if p.grad is not None else None)
            for p, host in self._hosts
        ]
        self._stand_ins: dict[int, nn.Parameter] = {}
        self._versions: dict[int, tuple[int, int]] = {}
        """The versions of the copies when they arrived: of the values, and of the gradient."""

    def stand_ins(self) -> dict[int, nn.Parameter]:
        """Return the stand-ins for the current stream, which waits for copies that have not arrived."""
        for (parameter, _), (weight, gradient) in zip(self._hosts, self._coming, strict=True):
            stand_in = nn.Parameter(_arrived(weight), requires_grad=parameter.requires_grad)
            vars(stand_in).update(vars(parameter))
            if gradient is not None:
                stand_in.grad = _arrived(gradient)
            self._versions[id(parameter)] = _versions_of(stand_in)
            self._stand_ins[id(parameter)] = stand_in
        self._coming = []
        return self._stand_ins

    def go_home(self, *, gradients_are_written: bool = False) -> None:
        """Send home the values that the step left. Gradients go home only if the step changed them: as autograd knows,
        or as the caller does."""
        for parameter, host in self._hosts:
            stand_in = self._stand_ins.pop(id(parameter))
            (now, now_gradient), (then, then_gradient) = _versions_of(stand_in), self._versions[id(parameter)]
            host.take_home(parameter, stand_in.detach(), self._stretch, num_changes=now - then)
            is_changed = gradients_are_written or now_gradient != then_gradient
            if is_changed and parameter.grad is not None and stand_in.grad is not None:
                with torch.no_grad():
                    (self._stretch.of(parameter.grad) if self._stretch else parameter.grad).copy_(stand_in.grad)

    def let_go(self) -> None:
        for parameter, host in self._hosts:
            host.let_go(parameter, self._stretch)


class LocalPart:
    """Some elements of a parameter that lives on the device. Their stand-in shares its memory."""

    def __init__(self, parameter: torch.Tensor, stretch: Stretch, gradient: torch.Tensor | None = None) -> None:
        """`gradient` is theirs, if the parameter's waits elsewhere."""
        self._parameter = parameter
        self._stand_in = nn.Parameter(stretch.of(parameter), requires_grad=parameter.requires_grad)
        vars(self._stand_in).update(vars(parameter))
        if gradient is not None:
            self._stand_in.grad = gradient
        elif parameter.grad is not None:
            self._stand_in.grad = stretch.of(parameter.grad)
        self._versions = parameter._version, self._stand_in._version

    def stand_ins(self) -> dict[int, nn.Parameter]:
        return {id(self._parameter): self._stand_in}

    def end(self) -> None:
        """They have been stepped. Inside a dispatch mode the stand-in has a version counter of its own."""
        version, version_of_stand_in = self._versions
        if self._parameter._version == version:
            raise_version(self._parameter, self._stand_in._version - version_of_stand_in)


def visitors() -> dict[int, torch.device]:
    """Return the streamed parameters that can be stepped on the device, by id, each with that device.

    Parameters that share memory are stepped on the host: as guests, each would overwrite the other's step.
    """
    found: dict[int, torch.device] = {}
    for streams in {id(one): one for one in streamed_parameters().values()}.values():
        alone = (group[0] for group in overlapping(streams.parameters()) if len(group) == 1)
        found.update((id(parameter), streams.device) for parameter in alone)
    return found


def wait_until_home() -> None:
    """Block until no guest is on its way, so that the host may read and write the parameters that live there."""
    for streams in {id(one): one for one in streamed_parameters().values()}.values():
        streams.wait_until_home()


def _versions_of(stand_in: torch.Tensor) -> tuple[int, int]:
    return stand_in._version, 0 if stand_in.grad is None else stand_in.grad._version


def _arrived(coming: Coming) -> torch.Tensor:
    return (coming.wait() if isinstance(coming, Arrival) else coming).detach()
