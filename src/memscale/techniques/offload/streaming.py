"""Parameter streaming (exact): a layer's parameters live on the host and visit the device for forward and backward.

    Parameter (host) --_AtHome--> alias (host) --_Visiting--> weight (device) --> the layer

A streamed layer is a recomputed layer (`memscale._recompute`). *Inside* the recomputed region every weight is an
autograd function of the host parameter: the first forward drops the device copies, the recompute fetches them again,
and autograd itself carries the gradient home, where hooks, accumulation, sharing, clipping and the optimizer find it on
the user's own `Parameter`. `_Visiting.backward` starts the copy to the host; `_AtHome.backward`, which autograd runs in
the thread that called `backward()`, waits for it. The device's thread meanwhile goes on.

NOTE [visits]: with overlap, the layer that came next the last time is fetched while the current one computes, and the
last layer stays for the backward that follows. What is fetched ahead belongs to what will need it: the model's forward,
the graph (the last layer), the backward pass. When that ends, also by an exception, or dies (a loss thrown away), so do
the copies. A visit is used only in the place of the sequence that it was fetched for and only if every parameter
is still the same object with the same version; else it is fetched again.

NOTE [homes are written to only after they were read]: the optimizer, or anyone, may write to a home once the layer is
done, so the host waits, after it has launched a layer's compute, for the copies that this compute began with; and
for those that were fetched for nothing. Nothing is fetched ahead outside of the model's own forward and backward, where
nobody could tell when that would be.

Known limits: a parameter that is used outside of its layer, other than by being registered there too, is found on the
host. Differentiating twice through a parameter's gradient (`create_graph=True`) is refused. The optimizer's update of a
streamed parameter runs on the host's kernels. Gradients of two devices: `clip_grad_norm_` sums norms device by device,
so the total may differ from a plain model's in the last bit.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from memscale import _torch_private
from memscale._errors import PlanError, StoreFullError
from memscale._patching import OwnHook, keep_copies_clean
from memscale._plan import StreamParameters
from memscale._recompute import RecomputedForward, Region
from memscale.techniques.offload import followers
from memscale.techniques.offload.homes import (
    LARGEST_SEGMENT_BYTES,
    Homes,
    Slot,
    StayHome,
    overlapping,
    slots_of,
    unviewed,
)
from memscale.techniques.offload.host import HostStore
from memscale.techniques.offload.stores import Layout, ShapeStore, Store, StoreCounters, Ticket
from memscale.techniques.offload.transfers import Arrival, Transfers, TransferStats, order

GRADIENT_WINDOW_BYTES = 32 * 1024 * 1024
"""Gradients on their way home that may still occupy the device."""
LANDING_BYTES = 128 * 1024 * 1024
"""Pinned memory in which gradients arrive."""


class Direction(enum.Enum):
    FORWARD = "forward"
    BACKWARD = "backward"
    INFERENCE = "inference"


Stop = tuple[int, Direction]
"""A layer, by its index, in a direction: one place in the sequence of visits."""


@dataclasses.dataclass(frozen=True, slots=True)
class Stamp:
    """What must not change between two uses of a layer's parameters."""

    parameter_id: int
    version: int
    requires_grad: bool

    @classmethod
    def of(cls, parameters: Iterable[torch.Tensor]) -> tuple[Stamp, ...]:
        return tuple(cls(id(p), p._version, p.requires_grad) for p in parameters)


class Visit:
    """Device copies of one layer's parameters, there or on their way."""

    def __init__(self, parameters: list[torch.Tensor], arrivals: list[Arrival | torch.Tensor], place: int) -> None:
        self.parameters = parameters
        self.stamps = Stamp.of(parameters)
        self.place = place
        """The number of the fetch that it is meant for."""
        self.arrivals = arrivals
        self.events = [a.event for a in arrivals if isinstance(a, Arrival) and a.event is not None]

    def weights(self) -> list[torch.Tensor]:
        """The copies, for the current stream."""
        return [unviewed(a.wait()) if isinstance(a, Arrival) else a for a in self.arrivals]

    def leave_homes(self) -> None:
        """The host waits until the homes have been read. See NOTE [homes are written to only after they were read]."""
        for event in self.events[-1:]:  # one stream, in order
            order(None, event, "host after weights")
        self.events = []

    def __del__(self) -> None:
        self.leave_homes()


class Landing:
    """A gradient on its way home."""

    def __init__(self, ticket: Ticket, home: torch.Tensor) -> None:
        self.num_bytes = ticket.num_bytes
        self._ticket: Ticket | None = ticket
        self._home: torch.Tensor | None = home
        self._lock = threading.Lock()

    def wait(self) -> None:
        """Complete the gradient, in whichever thread needs it first; then let go of it."""
        with self._lock:
            (ticket, self._ticket), (home, self._home) = (self._ticket, None), (self._home, None)
            if ticket is None or home is None:
                return
            if ticket.written is not None:
                order(None, ticket.written, "host after gradient")
            if ticket.store.keeps_bytes:
                ticket.store.read(ticket, [ticket.layout.flatten(home)])
            ticket.store.free(ticket)


class Flight:
    """One backward pass: visits fetched ahead, and gradients on their way. Dies with the pass, however that ends."""

    def __init__(self, transfers: Transfers) -> None:
        self.ahead: dict[int, Visit] = {}
        self._transfers = transfers
        self._sent: list[Ticket] = []
        self._landings: collections.deque[Landing] = collections.deque()

    def send(self, gradient: torch.Tensor) -> Ticket | None:
        """Start a gradient's way home; None if there is no pinned memory for it."""
        while True:
            try:
                return self._transfers.send(gradient)
            except StoreFullError:
                if not self._land_oldest():
                    return None

    def expect(self, ticket: Ticket, landing: Landing) -> None:
        self._sent.append(ticket)
        self._landings.append(landing)
        # Pinned memory for arrivals stays bounded, however far behind the other thread is.
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
    """One use of one parameter in one graph: where its gradient goes, and what is on the way."""

    def __init__(self, streamer: Streamer, parameter: torch.Tensor, module_fqn: str) -> None:
        self.streamer = streamer
        self.host = parameter.device
        self.module_fqn = module_fqn
        self.landing: Landing | None = None


class _AtHome(torch.autograd.Function):
    """The host's end: runs in the thread that called `backward()`.

    NOTE [two nodes]: one node for both ends would let autograd sum the gradients of a shared parameter before they
    have arrived.
    """

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, passage: Passage) -> torch.Tensor:
        ctx.passage = passage
        return parameter.view_as(parameter)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        landing, ctx.passage.landing = ctx.passage.landing, None
        if landing is not None:
            landing.wait()
        return gradient, None


class _Visiting(torch.autograd.Function):
    """The device's end."""

    @staticmethod
    def forward(ctx: Any, alias: torch.Tensor, weight: list[torch.Tensor], passage: Passage) -> torch.Tensor:
        ctx.passage = passage
        return weight[0]  # in a list, so that it is no input of the graph

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                f"the gradients of {ctx.passage.module_fqn}'s parameters cannot be differentiated again "
                "(create_graph=True) while they are streamed; leave this layer out of parameter streaming"
            )
        return ctx.passage.streamer.send_home(gradient, ctx.passage), None, None


class StreamedForward(RecomputedForward):
    """The forward of a streamed layer."""

    def __init__(self, module: nn.Module, module_fqn: str, streamer: Streamer, index: int, *, verify: bool) -> None:
        super().__init__(module, module_fqn, verify=verify)
        self.streamer = streamer
        self.index = index
        self.anchor = streamer.anchor
        self.slots: list[Slot] = []

    def parameters(self) -> list[torch.Tensor]:
        """As they are now (`load_state_dict(assign=True)` may have replaced them), once each."""
        return list({id(p): p for slot in self.slots if (p := slot.get()) is not None}.values())

    def compute(self, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region | None) -> Any:
        notes = None if region is None else Expectation(Stamp.of(self.parameters()))
        if region is not None:
            region.notes = notes
        visit = self.streamer.fetch_forward(self.index, notes)
        try:
            with self._weights(visit):
                del visit
                return self.inner()(*args, **kwargs)
        except BaseException:
            self.streamer.drop_ahead()
            if notes is not None:
                notes.kept = None  # a traceback may hold the graph
            raise

    def recompute(self, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        notes: Expectation = region.notes
        if notes.stamps != Stamp.of(self.parameters()):
            raise RuntimeError(
                f"a parameter of {self.module_fqn} was changed between the layer's forward and its backward: "
                "the recompute would give other gradients. Call backward() before the optimizer steps."
            )
        with self._weights(self.streamer.fetch_backward(self.index, notes)):
            return self.inner()(*args, **kwargs)

    @contextlib.contextmanager
    def _weights(self, visit: Visit) -> Iterator[None]:
        """Device copies in the place of the parameters."""
        weights = {
            id(parameter): self._link(parameter, weight)
            for parameter, weight in zip(visit.parameters, visit.weights(), strict=True)
        }
        visit.arrivals = []  # the graph alone decides how long the copies live
        real = [(slot, slot.get()) for slot in self.slots]
        try:
            for slot, parameter in real:
                if parameter is not None:
                    slot.table()[slot.name] = weights[id(parameter)]
            del weights
            _refresh_flat_weights(real)
            yield
        finally:
            for slot, parameter in real:
                slot.table()[slot.name] = parameter
            _refresh_flat_weights(real)
            visit.leave_homes()

    def _link(self, parameter: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if not (parameter.requires_grad and torch.is_grad_enabled()):
            return weight
        passage = Passage(self.streamer, parameter, self.module_fqn)
        alias = _AtHome.apply(parameter, passage)  # type: ignore[no-untyped-call]
        linked: torch.Tensor = _Visiting.apply(alias, [weight], passage)  # type: ignore[no-untyped-call]
        _torch_private.run_first(linked.grad_fn)  # leave at once, not after the whole layer
        return linked


def _refresh_flat_weights(real: list[tuple[Slot, Any]]) -> None:
    """Recurrent modules keep a list of their weights beside the parameters."""
    for module in {id(slot.module()): slot.module() for slot, _ in real}.values():
        if isinstance(module, nn.RNNBase):
            module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


@dataclasses.dataclass(slots=True, weakref_slot=True, eq=False)
class Expectation:
    """What one forward leaves for its backward. Lives with the graph."""

    stamps: tuple[Stamp, ...]
    kept: Visit | None = None
    """This layer's own copies, kept for a backward that follows at once."""


@dataclasses.dataclass(slots=True)
class StreamStats:
    """What was streamed so far."""

    transfers: TransferStats
    pinned: StoreCounters
    """Homes and gradients on their way; 0 without overlap, when both are in plain memory."""
    num_visits: int = 0
    num_hits: int = 0
    """Visits that had been fetched ahead or kept."""


class Streamer:
    """Brings the parameters of the planned layers to the device and their gradients home."""

    def __init__(self, device: torch.device, transfers: Transfers, *, overlaps: bool, prefetch_depth: int) -> None:
        self.device = device
        self.transfers = transfers
        self.store = transfers.store
        self.overlaps = overlaps
        self.prefetch_depth = prefetch_depth if overlaps else 0
        self.homes = Homes(device, self.store if overlaps or not self.store.keeps_bytes else None)
        self.stats = StreamStats(transfers.stats, self.store.counters)
        # Makes checkpoint save this device's random state, whatever the layer's arguments are.
        self.anchor = torch.empty(0, device=device)
        self.layers: list[weakref.ref[StreamedForward]] = []
        self._fetches = 0
        self._last: Stop | None = None
        self._next: dict[Stop, Stop] = {}
        self._pending: list[weakref.WeakSet[Expectation]] = []
        self.is_in_forward = False
        """Of the model, as opposed to that of a single layer."""
        self._ahead: dict[int, Visit] = {}
        """For the layers that come next in forward."""
        self._flights: weakref.WeakValueDictionary[int, Flight] = weakref.WeakValueDictionary()

    def add(self, layer: StreamedForward) -> None:
        self.layers.append(weakref.ref(layer))
        self._pending.append(weakref.WeakSet())
        count = len(self.layers)
        self._next = {
            **{(i, Direction.FORWARD): (i + 1, Direction.FORWARD) for i in range(count - 1)},
            (count - 1, Direction.FORWARD): (count - 1, Direction.BACKWARD),
            **{(i, Direction.BACKWARD): (i - 1, Direction.BACKWARD) for i in range(1, count)},
            **{(i, Direction.INFERENCE): (i + 1, Direction.INFERENCE) for i in range(count - 1)},
        }

    # ---------------------------------------------------------------------------------------------------- to device

    def _load(self, index: int, place: int) -> Visit:
        layer = self.layers[index]()
        assert layer is not None
        parameters = layer.parameters()
        return Visit(parameters, [self._bring(parameter) for parameter in parameters], place)

    def _bring(self, parameter: torch.Tensor) -> Arrival | torch.Tensor:
        ticket = self.homes.ticket_of(parameter) if self.homes.store is not None else None
        if ticket is not None:
            return self.transfers.fetch(ticket)
        with torch.no_grad():
            copy = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=self.device)
            return copy.copy_(parameter)

    def _arrive(self, stop: Stop) -> int:
        """Note where we are; returns the number of this fetch."""
        before, self._last = self._last, stop
        if before is not None and _follows(before, stop):
            self._next[before] = stop
        self._fetches += 1
        self.stats.num_visits += 1
        return self._fetches

    def _take(self, ahead: dict[int, Visit], index: int, place: int) -> Visit:
        """The visit that was fetched for this place; else a new one."""
        visit = ahead.pop(index, None)
        layer = self.layers[index]()
        assert layer is not None
        if visit is not None and visit.place == place and visit.stamps == Stamp.of(layer.parameters()):
            self.stats.num_hits += 1
            return visit
        del visit
        return self._load(index, place)

    def _look_ahead(self, stop: Stop, place: int, before: dict[int, Visit], after: dict[int, Visit]) -> None:
        """Fetch for the stops that follow in the same direction, unless that is done already."""
        for distance in range(1, self.prefetch_depth + 1):
            following = self._next.get(stop)
            if following is None or following[1] is not stop[1] or following[0] in after:
                return
            if stop[1] is Direction.BACKWARD and not self._pending[following[0]]:
                return  # no graph waits for it: a frozen layer
            stop = following
            visit = before.pop(stop[0], None)
            if visit is None or visit.place != place + distance:
                visit = self._load(stop[0], place + distance)
            after[stop[0]] = visit

    def fetch_forward(self, index: int, notes: Expectation | None) -> Visit:
        """Without notes there will be no backward."""
        stop = (index, Direction.INFERENCE if notes is None else Direction.FORWARD)
        place = self._arrive(stop)
        before, self._ahead = self._ahead, {}
        visit = self._take(before, index, place)
        if notes is not None:
            self._pending[index].add(notes)
            if self.overlaps and self._next.get(stop) == (index, Direction.BACKWARD):
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

    def drop_ahead(self) -> None:
        """Nobody will use what was fetched ahead."""
        self._ahead = {}

    # -------------------------------------------------------------------------------------------------------- home

    def _flight(self) -> Flight:
        task_id = _torch_private.graph_task_id()
        flight = self._flights.get(task_id)
        if flight is None:
            flight = self._flights[task_id] = Flight(self.transfers)
            if task_id >= 0:
                _torch_private.at_end_of_backward(flight.land)
        return flight

    def send_home(self, gradient: torch.Tensor, passage: Passage) -> torch.Tensor:
        """The gradient in host memory; complete when the passage's landing has been waited for."""
        if gradient.device == passage.host or not self._overlaps_for(gradient):
            return gradient.to(passage.host)
        if not _is_dense(gradient):
            gradient = gradient.contiguous()
        flight = self._flight()
        ticket = flight.send(gradient)
        if ticket is None:
            return gradient.to(passage.host)
        home = ticket.layout.rebuild(ticket.layout.empty(passage.host))
        passage.landing = Landing(ticket, home)
        flight.expect(ticket, passage.landing)
        return home

    def _overlaps_for(self, gradient: torch.Tensor) -> bool:
        # Anomaly detection looks into every gradient at once, before it could arrive.
        return self.overlaps and gradient.layout is torch.strided and not torch.is_anomaly_enabled()


def _is_dense(tensor: torch.Tensor) -> bool:
    return Layout.of(tensor).span == tensor.numel()


def _follows(before: Stop, stop: Stop) -> bool:
    """Whether the second stop may be expected after the first the next time, too."""
    if stop[1] is Direction.INFERENCE:
        return before[1] is Direction.INFERENCE and before[0] < stop[0]
    return before[1] is not Direction.INFERENCE and (before[1], stop[1]) != (Direction.BACKWARD, Direction.FORWARD)


# ------------------------------------------------------------------------------------------------------------ attach


def attach(
    actions: Iterable[StreamParameters],
    model: nn.Module,
    device: torch.device,
    undo: contextlib.ExitStack,
    *,
    asynchronous: bool = False,
    prefetch_depth: int = 1,
    host_budget_bytes: int | None = None,
    gradient_window_bytes: int = GRADIENT_WINDOW_BYTES,
    verify: bool = False,
) -> Streamer:
    """Stream the parameters of these layers until undone. Everything else of the model is placed on `device`."""
    modules = _find(actions, model)
    device = torch.empty(0, device=device).device  # with its index, as tensors show it
    is_fake = any(_torch_private.is_fake(parameter) for parameter in model.parameters())
    if device.type == "cpu" and not is_fake:
        raise PlanError("parameters are streamed between the host and an accelerator; this plan computes on the CPU")
    streamer = _open(device, undo, asynchronous, is_fake, prefetch_depth, host_budget_bytes, gradient_window_bytes)
    streamed = streamable(model, modules.values())
    for index, (module_fqn, module) in enumerate(modules.items()):
        layer = StreamedForward(module, module_fqn, streamer, index, verify=verify)
        layer.slots = [slot for slot in slots_of(module.modules()) if id(slot.get()) in streamed]
        layer.attach(undo)
        streamer.add(layer)
        _guard(layer, streamer.homes, undo)
    undo.callback(model.register_forward_pre_hook(_ForwardStart(streamer)).remove)
    undo.callback(model.register_forward_hook(_ForwardEnd(streamer), always_call=True).remove)
    keep_copies_clean(model, undo)
    following = followers.attach(model, undo)  # undone after the homes: state follows its parameters both ways
    undo.callback(streamer.homes.restore)
    streamer.homes.move_in(model, streamed)
    following.follow_all()
    return streamer


class _ForwardStart(OwnHook):
    def __init__(self, streamer: Streamer) -> None:
        self._streamer = streamer

    def __call__(self, model: nn.Module, args: Any) -> None:
        self._streamer.is_in_forward = True


class _ForwardEnd(OwnHook):
    """The model's forward has ended, or failed."""

    def __init__(self, streamer: Streamer) -> None:
        self._streamer = streamer

    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        self._streamer.is_in_forward = False
        self._streamer.drop_ahead()


def _find(actions: Iterable[StreamParameters], model: nn.Module) -> dict[str, nn.Module]:
    modules: dict[str, nn.Module] = {}
    inside: dict[nn.Module, str] = {}
    for action in actions:
        try:
            module = model.get_submodule(action.module_fqn)
        except AttributeError as error:
            raise PlanError(
                f"the plan streams {action.module_fqn!r}, which {type(model).__name__} does not have"
            ) from error
        for part in module.modules():
            if part in inside:
                raise PlanError(f"{action.module_fqn!r} and {inside[part]!r} share a module: stream one of them")
        inside.update(dict.fromkeys(module.modules(), action.module_fqn))
        modules[action.module_fqn] = module
    return modules


def streamable(model: nn.Module, modules: Iterable[nn.Module]) -> set[int]:
    """Ids of the parameters that can live on the host: plain memory, registered nowhere but in these layers."""
    inside = {part for module in modules for part in module.modules()}
    streamed: set[int] = set()
    outside = {id(p) for part in model.modules() if part not in inside for p in part._parameters.values()}
    for group in overlapping(model.parameters()):
        if all(id(p) not in outside and _is_plain(p) for p in group):
            streamed.update(id(p) for p in group)
    return streamed


def _is_plain(parameter: torch.Tensor) -> bool:
    is_plain = type(parameter) in (nn.Parameter, torch.Tensor) or _torch_private.is_fake(parameter)
    return is_plain and parameter.layout is torch.strided


def _open(
    device: torch.device,
    undo: contextlib.ExitStack,
    asynchronous: bool,
    is_fake: bool,
    prefetch_depth: int,
    host_budget_bytes: int | None,
    gradient_window_bytes: int,
) -> Streamer:
    store: Store
    if is_fake:
        store = ShapeStore()
    else:
        store = HostStore(host_budget_bytes, pinned=asynchronous, segment_bytes=LARGEST_SEGMENT_BYTES)
    undo.callback(store.close)
    transfers = Transfers(device, store, asynchronous=asynchronous, window_bytes=gradient_window_bytes)
    undo.callback(transfers.close)
    streamer = Streamer(device, transfers, overlaps=asynchronous, prefetch_depth=prefetch_depth)
    undo.callback(streamer.drop_ahead)
    return streamer


def _guard(layer: StreamedForward, homes: Homes, undo: contextlib.ExitStack) -> None:
    """`model.to()` moves what is resident and leaves the rest at home."""
    by_module: dict[int, list[Slot]] = {}
    for slot in layer.slots:
        by_module.setdefault(id(slot.module()), []).append(slot)
    for slots in by_module.values():
        module = slots[0].module()
        assert module is not None
        StayHome(module, homes, slots).attach(undo)
