"""The `Streamer`: parameters on their way to the device, gradients on their way home.

NOTE [visits]: with overlap, the layer that came next the last time is fetched while the current one computes, and the
last layer stays on the device for the backward that follows. Copies that are fetched ahead belong to what will need
them: the model's forward, the graph (the last layer) or the backward pass. When their owner ends, also by an exception,
or is freed (a loss that is thrown away), so are the copies. A visit is used only in the place of the sequence that it
was fetched for, and only if every parameter is still the same object with the same version; otherwise the parameters
are fetched again.

NOTE [homes are written to only after they were read]: the optimizer, or other code, may write to a home once the layer
is done. So the host waits, after it has launched a layer's compute, for the copies with which this compute began, and
for copies that were fetched and not used. Nothing is fetched ahead outside of the model's own forward and backward,
because there the end of such a use would not be known.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import logging
import threading
import weakref
from collections.abc import Iterable
from typing import Protocol

import torch

from memscale._errors import StoreFullError
from memscale._torch import private
from memscale._torch.unversioned_steps import STEPS
from memscale.techniques.offload.parameters.parameter_homes import Homes, Slot, parameters_in, tensor_over, unviewed
from memscale.techniques.offload.parameters.shared_casts import Joint, SharedCasts
from memscale.techniques.offload.parameters.state_placement import Followers
from memscale.techniques.offload.parameters.sum_order import Tails
from memscale.techniques.offload.pinned import LANDING_BYTES
from memscale.techniques.offload.store.stores import Layout, StoreCounters, Ticket
from memscale.techniques.offload.transfer import stream_order
from memscale.techniques.offload.transfer.stream_order import TransferStats
from memscale.techniques.offload.transfer.transfers import Arrival, Transfers

logger = logging.getLogger("memscale")


class Direction(enum.Enum):
    FORWARD = "forward"
    BACKWARD = "backward"
    INFERENCE = "inference"


Stop = tuple[int, Direction]
"""A layer, by its index, in a direction: one place in the sequence of visits."""


@dataclasses.dataclass(frozen=True, slots=True)
class Stamp:
    """The properties of a parameter that must not change between two uses of its layer."""

    parameter_id: int
    version: int
    silent_step: int
    """The number of its last step without a new version."""
    requires_grad: bool

    @classmethod
    def of(cls, parameters: Iterable[torch.Tensor]) -> tuple[Stamp, ...]:
        return tuple(cls(id(p), p._version, STEPS.last_of(p), p.requires_grad) for p in parameters)


class Visit:
    """Device copies of one layer's parameters, which are there or on their way."""

    def __init__(self, parameters: list[torch.Tensor], arrivals: list[Arrival | torch.Tensor], place: int) -> None:
        self.events: list[torch.Event] = []  # first: `__del__` needs them, also after Ctrl-C in the middle
        self.parameters = parameters
        self.stamps = Stamp.of(parameters)
        self.place = place
        """The number of the fetch for which it is meant."""
        self.arrivals = arrivals
        self.events = [a.event for a in arrivals if isinstance(a, Arrival) and a.event is not None]

    def weights(self) -> list[torch.Tensor]:
        """Return the copies; the current stream waits for them."""
        return [unviewed(a.wait()) if isinstance(a, Arrival) else a for a in self.arrivals]

    def leave_homes(self) -> None:
        """Wait on the host until homes have been read. See NOTE [homes are written to only after they were read]."""
        for event in self.events[-1:]:  # the copies are on one stream, in order
            stream_order.order(None, event, "host after weights")
        self.events = []

    def __del__(self) -> None:
        self.leave_homes()


class Landing:
    """A gradient on its way home."""

    def __init__(self, ticket: Ticket, home: torch.Tensor | None) -> None:
        """`home` is the memory into which the gradient is copied after it landed; None if it stays where it lands."""
        self.num_bytes = 0 if home is None else ticket.num_bytes
        self._ticket: Ticket | None = ticket
        self._home: torch.Tensor | None = home
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Complete the gradient, in whichever thread needs it first, and free the memory in which it landed."""
        with self._lock:
            (ticket, self._ticket), (home, self._home) = (self._ticket, None), (self._home, None)
            if ticket is None or ticket.store.closed:
                return  # the pass failed and the plan was undone before its gradients landed: nobody needs them
            if ticket.written is not None:
                stream_order.order(None, ticket.written.event, "host after gradient")
            if home is None:
                return
            if ticket.store.keeps_bytes:
                ticket.store.read(ticket, [ticket.layout.flatten(home)])
            ticket.store.free(ticket)


class LandedGradients:
    """Gradients in the pinned memory in which they landed. The device reads them from there for the optimizer's step.

    They belong to the user: the memory is returned when a gradient is freed.
    """

    def __init__(self) -> None:
        self._tickets: weakref.WeakValueDictionary[int, Ticket] = weakref.WeakValueDictionary()  # by address

    def home_of(self, ticket: Ticket) -> torch.Tensor | None:
        """Return the gradient where it lands; None if that memory is not in one piece."""
        memory = ticket.store.memory_of(ticket) if ticket.store.keeps_bytes else []
        if len(memory) != 1 or ticket.layout.has_gaps:
            return None
        home = tensor_over(memory[0], ticket, ticket.layout)
        self._tickets[home.data_ptr()] = ticket
        return home

    def ticket_of(self, gradient: torch.Tensor) -> Ticket | None:
        """Return the ticket of a gradient, if it is still where it landed, with unchanged dtype, shape and strides."""
        ticket = self._tickets.get(gradient.data_ptr()) if gradient.layout is torch.strided else None
        if ticket is None or ticket.freed or ticket.store.closed:
            return None
        layout, found = ticket.layout, (gradient.dtype, tuple(gradient.shape), tuple(gradient.stride()))
        return ticket if (layout.dtype, layout.shape, layout.stride) == found else None


class Flight:
    """One backward pass: visits fetched ahead, and gradients on their way. It ends with the pass, in whatever way."""

    def __init__(self, transfers: Transfers) -> None:
        self.ahead: dict[int, Visit] = {}
        self._transfers = transfers
        self._sent: list[Ticket] = []
        self._landings: collections.deque[Landing] = collections.deque()

    def send(self, gradient: torch.Tensor) -> Ticket | None:
        """Start copying a gradient home; return None if there is no pinned memory for it."""
        while True:
            try:
                return self._transfers.send(gradient)
            except StoreFullError:
                if not self._land_oldest():
                    return None

    def expect(self, ticket: Ticket, landing: Landing) -> None:
        self._sent.append(ticket)
        self._landings.append(landing)
        # The pinned memory for arrivals stays bounded, however far behind the other thread is.
        while sum(one.num_bytes for one in [*self._landings]) > LANDING_BYTES:
            self._land_oldest()

    def _land_oldest(self) -> bool:
        if not self._landings:
            return False
        self._landings.popleft().wait()
        return True

    def land(self) -> None:
        self.ahead = {}
        while self._land_oldest():
            continue
        while self._sent:
            self._transfers.wait_sent(self._sent.pop())

    def __del__(self) -> None:
        self.land()


class Passage:
    """One use of one parameter in one graph: where its gradient goes, and the gradient on its way there."""

    def __init__(self, streamer: Streamer, parameter: torch.Tensor, module_fqn: str) -> None:
        self.streamer = streamer
        self.host = parameter.device
        self.module_fqn = module_fqn
        self.landing: Landing | None = None


class Layer(Protocol):
    """A streamed layer, as the streamer sees it."""

    needs_weights_in_backward: bool
    slots: list[Slot]


@dataclasses.dataclass(slots=True, weakref_slot=True, eq=False)
class Expectation:
    """What one forward leaves for its backward. It lives as long as the graph."""

    stamps: tuple[Stamp, ...]
    kept: Visit | None = None
    """This layer's own copies, kept for a backward that follows at once."""
    tails: dict[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    """The tensors to whose gradients later calls add, by parameter id. See NOTE [order of sums] in sum_order.py."""
    joints: dict[int, Joint] = dataclasses.field(default_factory=dict)
    """What later calls under the same autocast may join, by parameter id. See NOTE [casts] in shared_casts.py."""


@dataclasses.dataclass(slots=True)
class StreamStats:
    """Counts of what has been streamed so far."""

    transfers: TransferStats
    pinned: StoreCounters
    """The memory of homes and of gradients on their way; 0 without overlap, when both are in plain memory."""
    num_visits: int = 0
    num_hits: int = 0
    """The number of visits that had been fetched ahead or kept."""


class Streamer:
    """Brings the parameters of the planned layers to the device and their gradients home."""

    def __init__(
        self, device: torch.device, transfers: Transfers, homes: Homes, *, overlaps: bool, prefetch_depth: int
    ) -> None:
        self.device = device
        self.transfers = transfers
        self.store = transfers.store
        self.overlaps = overlaps
        self.prefetch_depth = prefetch_depth if overlaps else 0
        self.homes = homes
        self.stats = StreamStats(transfers.stats, self.store.counters)
        # This tensor makes checkpoint save the device's random state, whatever the layer's arguments are.
        self.anchor = torch.empty(0, device=device)
        self.layers: list[weakref.ref[Layer]] = []
        self._fetches = 0
        self._last: Stop | None = None
        self._next: dict[Stop, Stop] = {}
        self._pending: list[weakref.WeakSet[Expectation]] = []
        self.is_in_forward = False
        """Whether the forward of the model runs, as opposed to that of a single layer."""
        self._ahead: dict[int, Visit] = {}
        """The visits fetched ahead for the layers that come next in forward."""
        self._flights: weakref.WeakValueDictionary[int, Flight] = weakref.WeakValueDictionary()
        self.tails = Tails(device)
        self.casts = SharedCasts(device)
        self.following: Followers | None = None
        """Keeps optimizer state beside the parameters."""
        self.landed: LandedGradients | None = None
        """The gradients that wait for a step on the device; None if the host steps the parameters."""

    def add(self, layer: Layer) -> None:
        self.layers.append(weakref.ref(layer))
        self._pending.append(weakref.WeakSet())
        count = len(self.layers)
        self._next = {
            **{(i, Direction.FORWARD): (i + 1, Direction.FORWARD) for i in range(count - 1)},
            (count - 1, Direction.FORWARD): (count - 1, Direction.BACKWARD),
            **{(i, Direction.BACKWARD): (i - 1, Direction.BACKWARD) for i in range(1, count)},
            **{(i, Direction.INFERENCE): (i + 1, Direction.INFERENCE) for i in range(count - 1)},
        }

    def known_order(self) -> dict[Stop, Stop]:
        """Return which stop is expected after which. As long as this stays the same, one step is as the next."""
        return dict(self._next)

    def parameters(self) -> list[torch.Tensor]:
        """Return all parameters that are streamed now."""
        layers = [layer for reference in self.layers if (layer := reference()) is not None]
        return [parameter for layer in layers for parameter in parameters_in(layer.slots)]

    # ---------------------------------------------------------------------------------------------------- to device

    def _load(self, index: int, place: int) -> Visit:
        layer = self.layers[index]()
        assert layer is not None
        parameters = parameters_in(layer.slots)
        return Visit(parameters, [self.bring(parameter) for parameter in parameters], place)

    def bring(self, parameter: torch.Tensor) -> Arrival | torch.Tensor:
        """Start copying one parameter's values to the device."""
        ticket = self.homes.ticket_of(parameter) if self.homes.store is not None else None
        if ticket is not None:
            return self.transfers.fetch(ticket)
        with torch.no_grad():
            copy = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=self.device)
            return copy.copy_(parameter)

    def bring_one(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a copy of one parameter for the current stream, outside of the sequence of visits."""
        visit = Visit([parameter], [self.bring(parameter)], -1)
        weight = visit.weights()[0]
        visit.leave_homes()
        return weight

    def _arrive(self, stop: Stop) -> int:
        """Note this place in the sequence, and return the number of this fetch."""
        before, self._last = self._last, stop
        if before is not None and _follows(before, stop):
            self._next[before] = stop
        self._fetches += 1
        self.stats.num_visits += 1
        return self._fetches

    def _take(self, ahead: dict[int, Visit], index: int, place: int) -> Visit:
        """Return the visit that was fetched for this place, or a new one."""
        visit = ahead.pop(index, None)
        layer = self.layers[index]()
        assert layer is not None
        if visit is not None and visit.place == place and visit.stamps == Stamp.of(parameters_in(layer.slots)):
            self.stats.num_hits += 1
            return visit
        del visit
        return self._load(index, place)

    def _look_ahead(self, stop: Stop, place: int, before: dict[int, Visit], after: dict[int, Visit]) -> None:
        """Fetch ahead for the stops that follow in the same direction, unless that was done already."""
        for distance in range(1, self.prefetch_depth + 1):
            following = self._next.get(stop)
            if following is None or following[1] is not stop[1] or following[0] in after:
                return
            if stop[1] is Direction.BACKWARD and not self._needed_in_backward(following[0]):
                return
            stop = following
            visit = before.pop(stop[0], None)
            if visit is None or visit.place != place + distance:
                visit = self._load(stop[0], place + distance)
            after[stop[0]] = visit

    def _needed_in_backward(self, index: int) -> bool:
        """Whether a graph waits for this layer (not if it is frozen) and its backward reads weights."""
        layer = self.layers[index]()
        return layer is not None and layer.needs_weights_in_backward and bool(self._pending[index])

    def fetch_forward(self, index: int, notes: Expectation | None) -> Visit:
        """Return the visit of a layer in forward. `notes` is None where no backward will follow."""
        stop = (index, Direction.INFERENCE if notes is None else Direction.FORWARD)
        place = self._arrive(stop)
        before, self._ahead = self._ahead, {}
        visit = self._take(before, index, place)
        if notes is not None:
            self._pending[index].add(notes)
            follows_at_once = self._next.get(stop) == (index, Direction.BACKWARD)
            if self.overlaps and follows_at_once and self._needed_in_backward(index):
                notes.kept = Visit(visit.parameters, visit.arrivals, place)
        if self.is_in_forward:
            self._look_ahead(stop, place, before, self._ahead)
        return visit

    def fetch_backward(self, index: int, notes: Expectation) -> Visit:
        stop = (index, Direction.BACKWARD)
        place = self._arrive(stop)
        flight = self._flight()
        kept, notes.kept = notes.kept, None
        if kept is not None:
            self.stats.num_hits += 1
            visit = kept
        else:
            visit = self._take(flight.ahead, index, place)
        before, flight.ahead = flight.ahead, {}
        self._look_ahead(stop, place, before, flight.ahead)
        return visit

    def is_called_again(self, index: int) -> bool:
        """Whether an earlier call of this layer still waits for its backward."""
        return len(self._pending[index]) > 1

    def drop_ahead(self) -> None:
        """Drop the visits that were fetched ahead."""
        self._ahead = {}

    def let_go(self) -> None:
        """Between two steps: keep no memory on the device."""
        self.drop_ahead()
        self.tails.let_go()

    # -------------------------------------------------------------------------------------------------------- home

    def _flight(self) -> Flight:
        task_id = private.graph_task_id()
        flight = self._flights.get(task_id)
        if flight is None:
            flight = self._flights[task_id] = Flight(self.transfers)
            if task_id >= 0:
                private.at_end_of_backward(flight.land)
        return flight

    def send_home(self, gradient: torch.Tensor, passage: Passage) -> torch.Tensor:
        """Return the gradient in host memory. It is complete when the passage's landing has been waited for."""
        if gradient.device == passage.host or not self._overlaps_for(gradient) or gradient.nbytes > LANDING_BYTES:
            return self._send_now(gradient, passage)
        if not _is_dense(gradient):
            gradient = gradient.contiguous()
        flight = self._flight()
        ticket = flight.send(gradient)
        if ticket is None:
            return self._send_now(gradient, passage)
        home = self.landed.home_of(ticket) if self.landed is not None else None
        passage.landing = Landing(ticket, None)
        if home is None:
            home = ticket.layout.rebuild(ticket.layout.empty(passage.host))
            passage.landing = Landing(ticket, home)
        flight.expect(ticket, passage.landing)
        return home

    def _send_now(self, gradient: torch.Tensor, passage: Passage) -> torch.Tensor:
        if gradient.device == passage.host and not self.store.keeps_bytes:  # this is a rehearsal on fake host tensors
            self.transfers.stats.num_sends += 1
            self.transfers.stats.bytes_sent += gradient.nbytes if gradient.layout is torch.strided else 0
        return gradient.to(passage.host)

    def keep_gradients(self) -> None:
        """Let gradients stay in the pinned memory in which they land, and take enough of it for all that land there."""
        if self.overlaps and self.store.keeps_bytes and self.landed is None:
            self.landed = LandedGradients()
            self.homes.presize(self._landing())

    def _landing(self) -> list[torch.Tensor]:
        """Return the parameters whose gradients land in pinned memory."""
        return [p for p in self.parameters() if p.requires_grad and p.nbytes <= LANDING_BYTES]

    def make_room_for_landings(self) -> None:
        """Take the pinned memory for gradients now, so that its size does not depend on how threads run."""
        if not self.overlaps or not self.store.keeps_bytes:
            return
        try:
            self.homes.presize(self._landing(), LANDING_BYTES)
        except StoreFullError:
            logger.info("the host budget leaves little room for gradients on their way, so they land one by one")

    def _overlaps_for(self, gradient: torch.Tensor) -> bool:
        # Anomaly detection reads every gradient at once, before it could have arrived.
        return self.overlaps and gradient.layout is torch.strided and not torch.is_anomaly_enabled()


def _is_dense(tensor: torch.Tensor) -> bool:
    return Layout.of(tensor).span == tensor.numel()


def _follows(before: Stop, stop: Stop) -> bool:
    """Whether the second stop may be expected after the first the next time too."""
    if stop[1] is Direction.INFERENCE:
        return before[1] is Direction.INFERENCE and before[0] < stop[0]
    return before[1] is not Direction.INFERENCE and (before[1], stop[1]) != (Direction.BACKWARD, Direction.FORWARD)
