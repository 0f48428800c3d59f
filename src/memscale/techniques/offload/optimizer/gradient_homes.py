"""Gradients that wait in host memory between backward and the optimizer's step, while their weights stay.

    homes = GradientHomes(transfers, bucket_bytes)
    homes.watch(layers, undo)               # from here on their gradients leave as soon as they are final
    coming = ComingGradients(parameters)    # in the step: those of one turn are on their way back
    with coming.in_place():                 # and in `.grad`, where the optimizer finds them
        ...

A gradient leaves in the hook that autograd calls when it has stored the sum. A `WaitingGradient` takes its place, which
raises when somebody looks at it, so nothing is silently wrong. Another backward before the step adds to it as it would
to one that never left: it comes, is added to in place, and leaves again. On detach all are back.

NOTE [gradients in pieces]: a gradient of a parameter that is larger than a bucket waits in the stretches in which such
a parameter is stepped (NOTE [stretches] in buckets.py), so that a turn fetches its own alone. A step that takes other
stretches, or the whole parameter, gets the whole gradient.

NOTE [a layer at a time]: what is on its way out takes memory until it has left. When the first gradient of another
layer leaves, those of the layer before have: the stream that computes waits for them, so no more than those of one
layer and of the next are here, however large the window is, and every layer of a model is like the one before.

NOTE [somebody else's gradient]: a tensor that stands in `.grad` before backward is added to in place, and whoever has
put it there, or has it from there, may write to it later: a flat buffer of gradients is zeroed as a whole. Such a
gradient stays where it is. What backward has made anew nobody has yet, but for the hooks that were called before ours:
one that somebody has kept (`kept.append(parameter.grad)`), or a view of it, stays, too.

Gradients that are sparse, that require gradients themselves (`create_graph=True`), that are a part of another memory,
or that lie in memory in another way than their parameter stay where they are, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from memscale._errors import OffloadError
from memscale._torch import private
from memscale._torch.released_gradients import held_gradient
from memscale._torch.waiting_gradients import WaitingGradient, is_waiting
from memscale.techniques.offload.optimizer.buckets import SMALL_BYTES, SMALL_PARTS, lies_as, stretches_of
from memscale.techniques.offload.store.stores import Layout, Stretch, Ticket, can_store
from memscale.techniques.offload.transfer.stream_order import TransferStats
from memscale.techniques.offload.transfer.transfers import Arrival, Transfers

_OWN_HOLDERS = 2
"""The gradient, and the object through which its storage is looked at."""


@dataclasses.dataclass(slots=True)
class GradientStats:
    """What gradients that wait have moved so far."""

    transfers: TransferStats
    num_sent: int = 0
    sent_bytes: int = 0
    num_brought: int = 0
    """Pieces that came back."""


def choose_waiting(parameters: Sequence[torch.Tensor], share: float) -> list[torch.Tensor]:
    """The parameters of a layer whose gradients wait: the largest ones, at most this share of the bytes of all.

    Small ones stay: each would cost a transfer, and free next to nothing.
    """
    left_bytes = sum(parameter.nbytes for parameter in parameters) * share
    largest_bytes, chosen = max((parameter.nbytes for parameter in parameters), default=0), []
    for parameter in sorted(parameters, key=lambda parameter: -parameter.nbytes):
        is_small = parameter.nbytes <= SMALL_BYTES or parameter.nbytes * SMALL_PARTS <= largest_bytes
        if not is_small and parameter.nbytes <= left_bytes:
            chosen.append(parameter)
            left_bytes -= parameter.nbytes
    return chosen


class GradientHome:
    """Where one gradient waits, in one piece or in stretches. See NOTE [gradients in pieces]."""

    def __init__(self, owner: GradientHomes, gradient: torch.Tensor, stretches: Sequence[Stretch]) -> None:
        self._owner = owner
        self._layout = Layout.of(gradient)
        self._pieces: dict[Stretch, Ticket] = {}
        whole = Stretch(0, gradient.numel())
        try:
            for stretch in stretches or (whole,):
                self._pieces[stretch] = owner.transfers.send(stretch.of(gradient))
        except BaseException:
            self.free()
            raise

    def wait_sent(self) -> None:
        """Let go of the memory from which the gradient was sent."""
        for ticket in self._pieces.values():
            self._owner.transfers.wait_sent(ticket)

    def start(self, stretch: Stretch | None) -> _Coming:
        """Start bringing the gradient, or a stretch of it, for the current stream."""
        fetch, stats = self._owner.transfers.fetch, self._owner.stats
        if stretch is not None and stretch in self._pieces:
            stats.num_brought += 1
            return _Coming([fetch(self._pieces[stretch])])
        line = self._layout.empty()
        whole, arrivals = self._layout.rebuild(line), []
        for piece, ticket in self._pieces.items():
            arrivals.append(fetch(ticket, out=line[piece.start : piece.stop]))
            stats.num_brought += 1
        return _Coming(arrivals, whole if stretch is None else stretch.of(whole))

    def bring(self) -> torch.Tensor:
        return self.start(None).wait()

    def replace(self, stretch: Stretch | None, gradient: torch.Tensor) -> None:
        """Send a gradient that the step has changed."""
        if stretch is not None and stretch in self._pieces:
            self._owner.transfers.send(gradient.view(-1), self._pieces[stretch])
            return
        assert stretch is None, "a stretch of its own is not changed by any optimizer that is stepped in stretches"
        for piece, ticket in self._pieces.items():
            self._owner.transfers.send(piece.of(gradient), ticket)

    def free(self) -> None:
        while self._pieces:
            self._owner.transfers.free(self._pieces.popitem()[1])


class _Coming:
    """A gradient on its way, or a stretch of it."""

    def __init__(self, arrivals: list[Arrival], whole: torch.Tensor | None = None) -> None:
        self._arrivals, self._whole = arrivals, whole

    def wait(self) -> torch.Tensor:
        arrivals, self._arrivals = self._arrivals, []
        try:
            found = [arrivals.pop(0).wait() for _ in range(len(arrivals))]
        except BaseException:  # the traceback keeps this alive
            self._whole = None
            while arrivals:
                arrivals.pop().give_up()
            raise
        whole, self._whole = self._whole, None
        return found[0] if whole is None else whole


class GradientHomes:
    """The gradients of one model that wait elsewhere."""

    def __init__(self, transfers: Transfers, bucket_bytes: int) -> None:
        self.transfers = transfers
        self.stats = GradientStats(transfers.stats)
        self._bucket_bytes = bucket_bytes
        self._parameters: list[weakref.ref[torch.Tensor]] = []
        self._layer_of: dict[int, int] = {}
        self._is_new: dict[int, bool] = {}
        """Whether the gradient of each parameter is made anew in this backward."""
        self._leaving: list[weakref.ref[GradientHome]] = []
        """Where the gradients are going that left last, all of one layer."""
        self._layer = self._pass = -1
        self._own_references = _own_references()

    def watch(self, layers: Sequence[Sequence[torch.Tensor]], undo: contextlib.ExitStack) -> None:
        """Let the gradients of these leave, until undone; then all are back. A parameter of several layers counts with
        the first."""
        undo.callback(self._restore)
        for number, parameters in enumerate(layers):
            for parameter in parameters:
                if id(parameter) not in self._layer_of:
                    self._layer_of[id(parameter)] = number
                    self._parameters.append(weakref.ref(parameter))
                    before = functools.partial(self._before_gradient, weakref.ref(parameter))
                    undo.callback(parameter.register_hook(before).remove)
                    undo.callback(parameter.register_post_accumulate_grad_hook(self._on_gradient).remove)

    def _before_gradient(self, reference: weakref.ref[torch.Tensor], gradient: torch.Tensor) -> None:
        """See NOTE [somebody else's gradient]."""
        parameter = reference()
        if parameter is not None:
            self._is_new[id(parameter)] = held_gradient(parameter) is None

    def _is_kept(self, parameter: torch.Tensor) -> bool:
        """Whether a hook that was called before has kept the gradient. A local variable here would count as one."""
        if is_waiting(parameter.grad) or not _is_plain(parameter.grad):
            return False
        holders = private.num_holders(parameter.grad.untyped_storage())  # type: ignore[union-attr]
        return holders > _OWN_HOLDERS or sys.getrefcount(parameter.grad) > self._own_references

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if self._is_kept(parameter):
            return
        standing = parameter.grad
        gradient = standing.here if isinstance(standing, WaitingGradient) else standing
        if gradient is None or not self._is_new.get(id(parameter)) or not _can_leave(parameter, gradient):
            return
        if self._layer != self._layer_of[id(parameter)]:
            self._wait_for_leaving()
            self._layer = self._layer_of[id(parameter)]
        is_large = parameter.nbytes > self._bucket_bytes
        home = GradientHome(self, gradient, stretches_of(parameter, self._bucket_bytes) if is_large else ())
        self._leaving.append(weakref.ref(home))
        self.stats.num_sent += 1
        self.stats.sent_bytes += gradient.nbytes
        del gradient
        if isinstance(standing, WaitingGradient):
            standing.wait_at(home)
        else:
            parameter.grad = WaitingGradient(parameter, home)
        if not self.transfers.asynchronous:
            self._wait_for_leaving()  # it has left; on a stage nothing knows that otherwise
        if self._pass != private.graph_task_id():
            self._pass = private.graph_task_id()
            private.at_end_of_backward(self._wait_for_leaving)

    def _wait_for_leaving(self) -> None:
        """See NOTE [a layer at a time]."""
        leaving, self._leaving, self._layer = self._leaving, [], -1
        for home in (reference() for reference in leaving):
            if home is not None:
                home.wait_sent()

    def _restore(self) -> None:
        """Bring all gradients back. One that cannot be read is gone, which is said when the others are back."""
        lost: list[Exception] = []
        for parameter in (reference() for reference in self._parameters):
            standing = None if parameter is None else parameter.grad
            if parameter is not None and isinstance(standing, WaitingGradient):
                try:
                    parameter.grad = standing.gradient()
                except OffloadError as error:
                    lost.append(error)
                    parameter.grad = None
        if lost:
            raise OffloadError(
                f"{len(lost)} gradients could not be read back and are gone; call optimizer.zero_grad() and run "
                f"backward again before the next step. The first error: {lost[0]}"
            ) from lost[0]


def _own_references() -> int:
    """How many references to a gradient Python counts that nobody has kept."""
    with private.real_tensors():
        parameter = torch.nn.Parameter(torch.zeros(1, device="cpu"))
        parameter.grad = torch.zeros_like(parameter)
        return sys.getrefcount(parameter.grad)


def _is_plain(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and gradient.layout is torch.strided and not private.is_fake(gradient)


def _can_leave(parameter: torch.Tensor, gradient: torch.Tensor) -> bool:
    is_plain = private.is_fake(gradient) or can_store(gradient)
    if not is_plain or gradient.layout is not torch.strided or gradient.requires_grad:
        return False
    if gradient.untyped_storage().nbytes() != gradient.nbytes:
        return False
    is_dense = Layout.of(gradient).span == gradient.numel()
    return is_dense and lies_as(parameter, tuple(gradient.shape), gradient.stride())


class ComingGradients:
    """The waiting gradients of the parameters of one turn, on their way to the device. Nothing where none waits."""

    def __init__(self, parameters: Sequence[torch.Tensor], stretch: Stretch | None = None) -> None:
        self._stretch = stretch
        self._coming: list[tuple[torch.Tensor, WaitingGradient, _Coming | torch.Tensor]] = []
        for parameter in parameters:
            standing = parameter.grad
            if isinstance(standing, WaitingGradient):
                self._coming.append((parameter, standing, _start(standing, stretch)))

    @contextlib.contextmanager
    def in_place(self, *, are_written: bool = False) -> Iterator[torch.Tensor | None]:
        """The gradients are in `.grad` of their parameters, for the current stream. A stretch has no parameter of its
        own: it is what is yielded. `are_written`: the step changes them, and autograd is not told."""
        coming, self._coming = self._coming, []
        arrived = [(parameter, standing, _arrived(one)) for parameter, standing, one in coming]
        del coming
        versions = [gradient._version for _, _, gradient in arrived]
        try:
            if self._stretch is not None:
                yield arrived[0][2] if arrived else None
            else:
                for parameter, _, gradient in arrived:
                    parameter.grad = gradient
                yield None
        finally:
            for (parameter, standing, gradient), version in zip(arrived, versions, strict=True):
                if (are_written or gradient._version != version) and standing.home is not None:
                    standing.home.replace(self._stretch, gradient)  # type: ignore[attr-defined]
                if self._stretch is None:
                    parameter.grad = standing


def _start(standing: WaitingGradient, stretch: Stretch | None) -> Any:
    if isinstance(standing.home, GradientHome):
        return standing.home.start(stretch)
    gradient = standing.gradient()
    return gradient if stretch is None else stretch.of(gradient)


def _arrived(coming: Any) -> torch.Tensor:
    found: torch.Tensor = coming.wait() if isinstance(coming, _Coming) else coming
    return found


def has_waiting_gradients(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether the gradient of any of these parameters waits elsewhere."""
    return any(is_waiting(parameter.grad) for parameter in parameters if parameter.is_leaf)
