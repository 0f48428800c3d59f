"""Streamed parameters visit the device once more in a training step, to be stepped there.

    visits = StepVisits(streamer)
    weight, gradient = visits.bring(parameter), visits.bring_gradient(parameter)    # on their way, or there
    visits.take_home(parameter, stepped, num_changes=1)     # the new values are on their way
    visits.let_go(parameter)                    # the device memory that they are copied from is free
    visits.wait_until_home()                    # from here on homes may be read and written by the host

They are stepped by `offload/optimizer` (guests.py), which knows a streamer only by the protocol `Streams`.

NOTE [homes after a step]: a program may read its parameters, or write to them, as soon as `step()` has returned. So the
host waits, once, for the last copy into a home. That copy comes after all others on its stream, and after all copies
out of the homes that were stepped. Copies that were fetched ahead for a step that failed are not used.
"""

from __future__ import annotations

import torch

from memscale._torch.unversioned_steps import raise_version
from memscale.techniques.offload.parameters.streamer import Streamer
from memscale.techniques.offload.store.stores import Stretch, Ticket
from memscale.techniques.offload.transfer import stream_order
from memscale.techniques.offload.transfer.transfers import Arrival


def _part(ticket: Ticket, stretch: Stretch) -> Ticket:
    layout = stretch.layout(ticket.layout.dtype, ticket.layout.device)
    return ticket.store.part_of(ticket, layout, stretch.start * layout.dtype.itemsize)


class StepVisits:
    """The visits of one streamer's parameters to be stepped."""

    def __init__(self, streamer: Streamer) -> None:
        self._streamer = streamer
        self._leaving: dict[tuple[int, int], Ticket] = {}
        """The copies to homes whose sources are still held, by parameter id and first element."""
        self._last_written: torch.Event | None = None

    @property
    def device(self) -> torch.device:
        return self._streamer.device

    def parameters(self) -> list[torch.Tensor]:
        return self._streamer.parameters()

    def bring(self, parameter: torch.Tensor, stretch: Stretch | None = None) -> Arrival | torch.Tensor:
        """Fetch the parameter's values, or those of a stretch of its elements."""
        return self._brought(parameter.detach(), self._home_of(parameter), stretch)

    def bring_gradient(self, parameter: torch.Tensor, stretch: Stretch | None = None) -> Arrival | torch.Tensor:
        gradient = parameter.grad
        assert gradient is not None, "who asks has looked"
        landed = self._streamer.landed
        return self._brought(gradient.detach(), None if landed is None else landed.ticket_of(gradient), stretch)

    def _home_of(self, parameter: torch.Tensor) -> Ticket | None:
        homes = self._streamer.homes
        return homes.ticket_of(parameter) if homes.store is not None else None

    def _brought(self, home: torch.Tensor, ticket: Ticket | None, stretch: Stretch | None) -> Arrival | torch.Tensor:
        if ticket is None:
            return (home if stretch is None else stretch.of(home)).to(self.device)
        part = ticket if stretch is None else _part(ticket, stretch)
        try:
            return self._streamer.transfers.fetch(part)
        finally:
            ticket.note_read(part)

    def take_home(
        self, parameter: torch.Tensor, stepped: torch.Tensor, stretch: Stretch | None = None, *, num_changes: int
    ) -> None:
        """Start copying these values home, where they become the parameter's. The step has raised the version of the
        copy so often; of a parameter that comes in stretches, that of each."""
        raise_version(parameter, num_changes if stretch is None or stretch.start == 0 else 0)
        ticket = self._home_of(parameter)
        if ticket is None:
            (parameter if stretch is None else stretch.of(parameter)).data.copy_(stepped)  # its version is raised
            return
        part = ticket if stretch is None else _part(ticket, stretch)
        try:
            self._streamer.transfers.send(stepped, part)
        finally:  # a copy that failed may have begun
            ticket.note_written(part)
            if part.written is not None:
                self._last_written = part.written.event
        self._leaving[id(parameter), stretch.start if stretch is not None else 0] = part

    def let_go(self, parameter: torch.Tensor, stretch: Stretch | None = None) -> None:
        ticket = self._leaving.pop((id(parameter), stretch.start if stretch is not None else 0), None)
        if ticket is not None:
            self._streamer.transfers.wait_sent(ticket)

    def wait_until_home(self) -> None:
        """Block until homes may be read and written. See NOTE [homes after a step]."""
        while self._leaving:
            self._streamer.transfers.wait_sent(self._leaving.popitem()[1])
        if self._last_written is not None:
            stream_order.order(None, self._last_written, "host after stepped weights")
        self._last_written = None
