"""A training step of the user's own, observed while it trains: for models that fake tensors cannot follow.

    observation = Observation(model, device_type, inputs)      # in the first moment of the user's forward
    ...                                                         # the user's forward, loss and backward
    if observation.saw_backward:
        observed = observation.close()                          # hooks and dispatch mode are gone
    profile_observed(model, observed, optimizer_cost)           # a `Profile`, like that of a rehearsal

Nothing is run that the user did not run, and nothing of the model is changed. The step runs under the careful plan
(`careful_plan` in observed_steps.py), in which every block is recomputed in backward. That recompute is the block's
plain forward, with all that it keeps, so one such step shows both: how the step goes with every block checkpointed, and
how it would go without. See NOTE [what a recompute shows].
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import nn

from memscale._profile import (
    CHECKPOINT,
    STREAM,
    Layer,
    OptimizerCost,
    Profile,
    Segment,
    StepTrace,
    TensorSpec,
    TraceKey,
    Treatment,
)
from memscale._profile.inputs import Inputs
from memscale._profile.layers import describe_layers, find_blocks, find_pieces
from memscale._profile.segments import SegmentRecorder, Traffic, no_traffic
from memscale._torch import private
from memscale._torch.live_bytes import rounding_of
from memscale._torch.overrides import ForwardOverride, keep_copies_clean
from memscale._units import round_up


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """A segment of an observed step."""

    segment: Segment
    is_recompute: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class ObservedStep:
    """What one step of the user's showed."""

    pieces: tuple[Piece, ...]
    gradients_at_peak: int
    activations_at_peak: int
    num_calls: dict[str, int]
    inputs: tuple[TensorSpec, ...]
    input_bytes: int

    @property
    def trace(self) -> StepTrace:
        segments = tuple(piece.segment for piece in self.pieces)
        return StepTrace(segments, self.gradients_at_peak, self.activations_at_peak)


@runtime_checkable
class WatchedForward(Protocol):
    """A block's forward that says when it is computed again: checkpointing and streaming put one in place."""

    watcher: Any


class Observation:
    """Watches the model from the beginning of a forward until it is closed. At most one at a time on a model."""

    def __init__(self, model: nn.Module, device_type: str, inputs: Inputs, traffic: Traffic = no_traffic) -> None:
        rounding_bytes = rounding_of(device_type)
        self._recorder = SegmentRecorder(device_type, rounding_bytes, counts_fakes=False, traffic=traffic)
        self._recorder.ends_with_backward = True
        self._inputs = inputs.specs()  # the batch itself is not kept
        self.has_failed = False
        self.thread_id, self.number = threading.get_ident(), next(_NUMBERS)
        self._undo = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            self._watch(model, undo)
            self._recorder.see_all([list(model.parameters()), list(model.buffers())], "parameters")
            before = self._recorder.total_bytes
            self._recorder.see_all(inputs.tensors(), "other")
            self._input_bytes = self._recorder.total_bytes - before
            self._recorder.open()
            for parameter in model.parameters():
                if (
                    parameter.is_leaf and parameter.grad is not None
                ):  # of an earlier batch: the step's are added to them
                    self._recorder.see(parameter.grad, "gradients")
            # NOTE [outermost mode]: the step goes on in the user's code when the forward is over, so the mode stays on
            # this thread; below all that the user may enter or leave meanwhile. Autograd takes it to its own threads.
            _sweep()
            private.insert_outermost_mode(self._recorder)
            undo.callback(_take_off, self._recorder)
            _OPEN.add(self)
            undo.callback(_OPEN.discard, self)
            self._undo = undo.pop_all()

    def _watch(self, model: nn.Module, undo: contextlib.ExitStack) -> None:
        undo.callback(self._recorder.remove_tensor_hooks)
        for module_fqn, module in find_pieces(model, find_blocks(model)).items():
            self._recorder.watch(module_fqn, module, undo)
            keep_copies_clean(module, undo)
            forward = ForwardOverride.top_of(module)
            if isinstance(forward, WatchedForward):
                forward.watcher = self._recorder
                undo.callback(setattr, forward, "watcher", None)
        self._recorder.watch_gradients(model, undo)

    @property
    def saw_backward(self) -> bool:
        return self._recorder.saw_backward

    @property
    def broke_off(self) -> bool:
        """Whether a backward pass was seen that raised: what it would have needed further on is not known."""
        return self._recorder.broke_off

    def close(self) -> ObservedStep | None:
        """What was seen; nothing of the observation is left on the model or on this thread. None: backward ran where
        it could not be seen, in another thread than the forward."""
        trace = self._recorder.close()
        self.abandon()
        if not any(segment.num_launches for segment in trace.segments if segment.phase == "backward"):
            return None
        recomputes = set(self._recorder.recomputes)
        pieces = tuple(Piece(segment, index in recomputes) for index, segment in enumerate(trace.segments))
        return ObservedStep(
            pieces,
            trace.gradients_at_peak,
            trace.activations_at_peak,
            dict(self._recorder.num_calls),
            self._inputs,
            self._input_bytes,
        )

    def fail(self) -> None:
        """The forward has raised: this thread's operators are let go by. `abandon` does the rest.

        So are those of models inside this one that are observed as well: their step has no end, either.
        """
        for other in [*_OPEN]:
            if other.thread_id == self.thread_id and other.number >= self.number:
                other.has_failed = True
                _take_off(other._recorder)

    def abandon(self) -> None:
        """Stop watching. A second call does nothing."""
        self._undo.close()
        if private.graph_task_id() < 0:
            _sweep()


_OPEN: weakref.WeakSet[Observation] = weakref.WeakSet()
_NUMBERS = itertools.count()
_LEFT_OVER: weakref.WeakSet[SegmentRecorder] = weakref.WeakSet()


def _take_off(recorder: SegmentRecorder) -> None:
    """From this thread's modes; where it is another thread's, or autograd will put it back, the next time."""
    if recorder.is_off and recorder not in _LEFT_OVER:
        return
    recorder.is_off = True
    if not private.remove_mode(recorder) or private.graph_task_id() >= 0:
        _LEFT_OVER.add(recorder)


def _sweep() -> None:
    """Take off what could not be taken off before. It lets everything through meanwhile."""
    for recorder in list(_LEFT_OVER):
        if private.remove_mode(recorder):
            _LEFT_OVER.discard(recorder)


def profile_observed(
    model: nn.Module, observed: ObservedStep, optimizer: OptimizerCost, device_type: str, treatment: Treatment
) -> Profile:
    """The profile that this step shows, which was run with every block under `treatment`: CHECKPOINT or STREAM."""
    rounding_bytes = rounding_of(device_type)
    layers = tuple(
        dataclasses.replace(layer, num_calls=observed.num_calls.get(layer.module_fqn, 0))
        for layer in describe_layers(model)
    )
    complete = with_absent_blocks(observed.pieces, layers)
    blocks = {layer.module_fqn: layer for layer in layers if layer.is_block}
    resident = _with_resident_gradients(complete, blocks) if treatment == STREAM else complete
    plain = _without_recomputes(resident, blocks)
    variants = {TraceKey(CHECKPOINT): _trace_of(resident)}
    if treatment == STREAM:
        variants[TraceKey(STREAM)] = _trace_of(complete)
    return Profile(
        device_type=device_type,
        source="empirical",
        model_class=type(model).__name__,
        inputs=observed.inputs,
        parameter_bytes=_unique_bytes(model.parameters(), rounding_bytes),
        buffer_bytes=_unique_bytes(model.buffers(), rounding_bytes),
        input_bytes=observed.input_bytes,
        layers=layers,
        optimizer=optimizer,
        plain=dataclasses.replace(
            plain, gradients_at_peak=observed.gradients_at_peak, activations_at_peak=observed.activations_at_peak
        ),
        variants=variants if blocks else {},
    )


def _unique_bytes(tensors: Iterable[object], rounding_bytes: int) -> int:
    storages = {private.storage_key(t.untyped_storage()): t.untyped_storage() for t in tensors}  # type: ignore[attr-defined]
    return sum(round_up(storage.nbytes(), rounding_bytes) for storage in storages.values())


def _trace_of(pieces: Iterable[Piece]) -> StepTrace:
    return StepTrace(tuple(piece.segment for piece in pieces))


def with_absent_blocks(pieces: Sequence[Piece], layers: Sequence[Layer]) -> list[Piece]:
    """The step with every block in it: one that was not called this time may be called the next.

    A block that did not run gets the segments of one of the same structure that did, next to its neighbour.
    """
    groups = _grouped(pieces, {layer.module_fqn for layer in layers if layer.is_block})
    order = [layer for layer in layers if layer.is_block]
    called = {owner for owner, _ in groups}
    for index, absent in enumerate(order):
        if absent.module_fqn in called:
            continue
        twin = next((o for o in order if o.module_fqn in called and o.fingerprint == absent.fingerprint), None)
        neighbour = next((o for o in reversed(order[:index]) if o.module_fqn in called), None)
        follows = neighbour is not None
        neighbour = neighbour or next((o for o in order[index:] if o.module_fqn in called), None)
        if twin is None or neighbour is None:
            continue
        _insert(groups, absent.module_fqn, twin.module_fqn, neighbour.module_fqn, follows=follows)
        called.add(absent.module_fqn)
    return [piece for _, group in groups for piece in group]


Group = tuple[str, list[Piece]]
"""What lies together in a step: pieces of one block, or ("") of what is between blocks."""


def _grouped(pieces: Sequence[Piece], blocks: Iterable[str]) -> list[Group]:
    known = set(blocks)

    def owner(piece: Piece) -> str:
        return piece.segment.module_fqn if piece.segment.module_fqn in known else ""

    return [(name, list(group)) for name, group in itertools.groupby(pieces, owner)]


def _is_forward(group: Group) -> bool:
    return group[1][0].segment.phase == "forward"


def _insert(groups: list[Group], absent: str, twin: str, neighbour: str, *, follows: bool) -> None:
    """Forward behind the neighbour's (before it, if it does not follow), backward the other way round."""
    for is_forward in (True, False):
        source = next((g for g in groups if g[0] == twin and _is_forward(g) == is_forward), None)
        place = next((i for i, g in enumerate(groups) if g[0] == neighbour and _is_forward(g) == is_forward), None)
        if source is None or place is None:
            continue
        renamed = [dataclasses.replace(p, segment=dataclasses.replace(p.segment, module_fqn=absent)) for p in source[1]]
        groups.insert(place + (follows == is_forward), (absent, renamed))


def _without_recomputes(pieces: Sequence[Piece], blocks: dict[str, Layer]) -> StepTrace:
    """The step as it would go with every block's activations kept.

    NOTE [what a recompute shows]: a recompute is the block's forward with everything kept for backward. So in the plain
    step the forward ends that much higher, and rises at most as far above what it leaves behind; the backward lacks
    just that piece. An output that the block itself keeps is counted twice, once as output: never too low.
    """
    groups = _grouped(pieces, blocks)
    kept = {owner: _recomputes_of(owner, groups) for owner in blocks}
    segments: list[Segment] = []
    for owner, group in groups:
        if not owner:
            segments += [piece.segment for piece in group]
        elif _is_forward((owner, group)):
            again = kept[owner].pop() if kept[owner] else StepTrace(())  # backward comes the other way round
            segments.append(_merged(group, again))
        else:
            segments += [piece.segment for piece in group if not piece.is_recompute]
    return StepTrace(tuple(segments))


def _recomputes_of(owner: str, groups: Sequence[Group]) -> list[StepTrace]:
    """A block's recomputes, one a forward. What has no forward of its own counts from the block's first one on."""
    ours = [group for group in groups if group[0] == owner]
    found = [[piece.segment for piece in group if piece.is_recompute] for _, group in ours]
    found = [segments for segments in found if segments]
    num_forwards = sum(map(_is_forward, ours))
    while len(found) > max(1, num_forwards):
        last = found.pop()
        found[-1] += last
    return [StepTrace(tuple(segments)) for segments in found]


def _merged(group: Sequence[Piece], again: StepTrace) -> Segment:
    """A forward in one segment, which keeps what its recompute keeps."""
    segments = [piece.segment for piece in group]
    trace = StepTrace(tuple(segments))
    totals = {
        field.name: sum(getattr(segment, field.name) for segment in segments)
        for field in dataclasses.fields(Segment)
        if field.name not in ("phase", "module_fqn", "peak_bytes", "net_bytes")
    }
    return Segment(
        phase="forward",
        module_fqn=segments[0].module_fqn,
        peak_bytes=max(trace.peak_bytes, trace.end_bytes + again.peak_bytes, 0),
        net_bytes=trace.end_bytes + again.end_bytes,
        **totals,
    )


def _with_resident_gradients(pieces: Sequence[Piece], blocks: dict[str, Layer]) -> list[Piece]:
    """The pieces as if the parameters of streamed blocks, and so their gradients, were on the device.

    The copies of the weights that visit the device stay counted in the segments: never too low.
    """
    seen: set[str] = set()
    result: list[Piece] = []
    for owner, group in reversed(_grouped(pieces, blocks)):
        more = 0
        if owner and owner not in seen and not _is_forward((owner, group)):
            seen.add(owner)  # the last backward of a block leaves its gradients behind
            more = blocks[owner].trainable_bytes
        result[:0] = [dataclasses.replace(p, segment=_heavier(p.segment, more, p is group[-1])) for p in group]
    return result


def _heavier(segment: Segment, num_bytes: int, is_last: bool) -> Segment:
    net_bytes = segment.net_bytes + num_bytes * is_last
    return dataclasses.replace(segment, peak_bytes=segment.peak_bytes + num_bytes, net_bytes=net_bytes)
