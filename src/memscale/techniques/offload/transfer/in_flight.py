"""Sources on their way out. Each is kept until its copy has been made; together they stay within a window of bytes.

See NOTE [stream order] in transfers.py, point 3. There are no locks in this file; `Transfers` has one.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import weakref
from typing import Any

import torch

from memscale.techniques.offload.store.spot_jobs import Job
from memscale.techniques.offload.store.stores import Ticket
from memscale.techniques.offload.transfer import stream_order


@dataclasses.dataclass(slots=True, eq=False)
class Sent:
    """A source that is kept until its copy has been made."""

    source: torch.Tensor | None
    num_bytes: int
    stream: torch.Stream | None
    """The stream that allocated the source and may reuse its memory."""
    event: torch.Event | None
    job: Job | None
    owner: weakref.ref[Any] | None = None
    """Whatever needs the bytes; None: somebody always does. Once it is gone, only the copy is waited for."""

    def release(self) -> None:
        if self.event is not None:
            stream_order.order(self.stream, self.event, "reuse after sent")
        if self.job is not None:
            concurrent.futures.wait([self.job])
        self.source = None  # the ticket still holds this object

    def __del__(self) -> None:
        if self.source is not None and self.event is not None:  # the model was dropped without being detached
            stream_order.order(self.stream, self.event, "reuse after sent")


class Window:
    """The sources in flight, oldest first."""

    def __init__(self, stats: stream_order.TransferStats) -> None:
        self.num_bytes = 0
        self._stats = stats
        self._sent: collections.deque[Sent] = collections.deque()
        self._lingering: list[Sent] = []
        """Those that may stay beside the window until somebody lets go of them."""

    def keep(
        self,
        ticket: Ticket,
        source: torch.Tensor,
        stream: torch.Stream | None = None,
        event: torch.Event | None = None,
        job: Job | None = None,
    ) -> None:
        """Keep a source until the event, or the job, says that it has been copied; with neither, until it is let go."""
        ticket.sent = Sent(source, ticket.num_bytes, stream, event, job)
        self._sent.append(ticket.sent)
        self.num_bytes += ticket.num_bytes

    def trim(self, limit_bytes: int) -> None:
        """Let go of the oldest sources until what is in flight fits the limit."""
        while self.num_bytes > limit_bytes:
            self._let_go(self._sent[0])

    def empty(self) -> None:
        """Let go of all of them, also of those that linger."""
        while self._lingering:
            self._let_go_lingering(self._lingering[0])
        self.trim(0)

    def linger(self, ticket: Ticket) -> None:
        """Keep this one, if it is still here, beside the window: what is sent later does not push it out."""
        sent = ticket.sent
        if sent is not None and sent in self._sent:
            self._sent.remove(sent)
            self.num_bytes -= sent.num_bytes
            self._lingering.append(sent)

    def drop_unneeded(self) -> None:
        """Let go of the sources whose owner is gone."""
        for sent in [one for one in self._sent if one.owner is not None and one.owner() is None]:
            self._let_go(sent)

    def release(self, ticket: Ticket) -> None:
        """Let go of this one, if it is still here."""
        if ticket.sent in self._sent:
            self._let_go(ticket.sent)
        elif ticket.sent in self._lingering:
            self._let_go_lingering(ticket.sent)
        ticket.sent = None

    def _let_go_lingering(self, sent: Sent) -> None:
        with self._stats.blocking():
            sent.release()
        self._lingering.remove(sent)

    def _let_go(self, sent: Sent) -> None:
        with self._stats.blocking():
            sent.release()
        self._sent.remove(sent)
        self.num_bytes -= sent.num_bytes
