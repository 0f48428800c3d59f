"""One adopted optimizer: its state waits in buckets, its step runs bucket by bucket, its checkpoints are unchanged.

    adopted = AdoptedOptimizer(visits, BucketSizes(resident_bytes=1 << 24))
    adopted.attach(optimizer)       # hooks on its step, on saving and on loading; existing state moves now
    adopted.detach()                # the whole state is back on its device, the hooks are gone

Which optimizers are adopted, and when, is decided in adoption.py. `Visits` (bucket_transfers.py) moves the buckets.

NOTE [a step that fails]: an error before the first bucket is stepped changes nothing; it is raised as it is, and the
step may be tried again. A failed read (or any error) after that raises `PartialStepError`: earlier buckets are updated,
later ones are not (the same holds for the stretches of a parameter), and every further step is refused until
`load_state_dict` has put a whole state in place. A failed *write* loses nothing: the state stays in memory, the step is
completed, and then the error is raised.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import sys
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import Optimizer
from torch.utils._pytree import tree_map_only

from memscale._errors import OffloadError, PartialStepError, quoted
from memscale._torch import private
from memscale._torch.optimizer_steps import parameters_of
from memscale.techniques.offload.optimizer.bucket_transfers import Entries, StretchVisit, Visit, Visits
from memscale.techniques.offload.optimizer.buckets import (
    SMALL_BYTES,
    Bucket,
    Choose,
    Waiting,
    choose_resident,
    last_turns,
    lies_as,
    split_into_buckets,
    step_order,
    stretches_of,
)
from memscale.techniques.offload.optimizer.early_arrivals import Early, EarlyArrivals
from memscale.techniques.offload.optimizer.gradient_homes import ComingGradients, has_waiting_gradients
from memscale.techniques.offload.optimizer.guests import Guests, LocalPart, visitors, wait_until_home
from memscale.techniques.offload.optimizer.in_parts import BYTES_AT_ONCE
from memscale.techniques.offload.optimizer.late_departures import LateDepartures
from memscale.techniques.offload.optimizer.loaded_state import cast_state
from memscale.techniques.offload.optimizer.resumed_steps import run_resumed
from memscale.techniques.offload.optimizer.separable import (
    SplitStep,
    State,
    StepCall,
    idle_shadow,
    put_in_order,
    skips_parameters_without_gradient,
    steps_each_element,
    take_over,
)
from memscale.techniques.offload.optimizer.shared_memory import SharedMemory
from memscale.techniques.offload.parameters.parameter_homes import overlapping
from memscale.techniques.offload.parameters.state_placement import contents_beside, stays_on_host
from memscale.techniques.offload.store.stores import Layout, Stretch
from memscale.techniques.offload.transfer.transfers import Arrival


class AdoptedOptimizer:
    """One optimizer that steps in buckets, most often because its state waits on the next tier.

    The optimizer holds this object through its hooks; this object holds no optimizer. Where no state waits, saving and
    loading are left alone: `state_dict()` is the optimizer's own and names the tensors that training goes on changing.
    """

    def __init__(
        self, visits: Visits, sizes: BucketSizes, choose: Choose | None = None, late: LateDepartures | None = None
    ) -> None:
        """`late` is what may still leave when a step is over; None: nothing."""
        self.visits = visits
        self.late = late if late is not None else LateDepartures()
        self.sizes = sizes
        self.choose = choose
        self.early = EarlyArrivals(visits)
        self.buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}
        self._shared = SharedMemory()
        self._broken: str | None = None
        self._loading: dict[str, Any] | None = None
        self._hooks = contextlib.ExitStack()
        self._step_hook: Any = None
        self._load_hook: Any = None

    # ----------------------------------------------------------------------------------------- on and off again

    def attach(self, optimizer: Optimizer) -> None:
        with contextlib.ExitStack() as undo:
            take_over(optimizer, undo)
            self._step_hook = optimizer.register_step_pre_hook(self._before_step)
            undo.callback(self._step_hook.remove)
            undo.callback(optimizer.register_load_state_dict_post_hook(self._after_load, prepend=True).remove)
            if self._lets_state_wait:
                undo.callback(optimizer.register_state_dict_post_hook(self._after_save).remove)
                self._load_hook = optimizer.register_load_state_dict_pre_hook(self._before_load)
                undo.callback(self._load_hook.remove)
                undo.callback(self._restore, weakref.ref(optimizer))
                self._send_away(optimizer)
            self._hooks = undo.pop_all()

    def detach(self) -> None:
        self._hooks.close()

    @property
    def _lets_state_wait(self) -> bool:
        """Whether state waits, on another tier or packed. Otherwise only the step runs in buckets."""
        return self.visits.store is not None or self.choose is not None

    def stay_last(self, optimizer: Optimizer) -> None:
        """Keep our step pre-hook last: the user's own hooks come first, because they may change gradients."""
        private.step_pre_hooks(optimizer).move_to_end(self._step_hook.id)

    def _restore(self, reference: weakref.ref[Optimizer]) -> None:
        optimizer = reference()
        self.early.drop()
        self.late.let_go_all()
        if optimizer is None:
            return
        lost = self.visits.restore(optimizer.state, self.buckets)
        self.buckets, self._bucket_of = [], {}
        self._move_what_stayed(optimizer)
        if lost:
            raise OffloadError(
                f"the state of {len(lost)} buckets of {type(optimizer).__name__} could not be read back and is gone; "
                f"load a checkpoint before going on. The first error: {lost[0]}"
            ) from lost[0]

    def _send_away(self, optimizer: Optimizer, *, is_astray: bool = False) -> None:
        """Send all state that is on its device to the store, a bucket at a time.

        `is_astray` says that some of the state may be on another device than its parameter.
        """
        self._update_buckets(optimizer)
        if not self._lets_state_wait:
            return
        for bucket in self.buckets:
            known = {p: optimizer.state[p] for p in bucket.parameters if p in optimizer.state}
            if bucket.ticket is None and bucket.memory is None and known:
                if is_astray:
                    self._move_beside(optimizer, bucket.parameters)  # one bucket at a time: all of them may not fit
                # The state of parameters that live on the host does not pass through the device.
                visit = Visit(known, device=bucket.parameters[0].device if bucket.has_guests else None)
                self.visits.park(optimizer.state, bucket, known, visit, exactly=True)
                self.visits.let_go(bucket)
        self._raise_failures("no step is affected")

    def follow_devices(self, optimizer: Optimizer) -> None:
        """Make new buckets for parameters that are no longer on one device together, or on another kind of device."""
        self._dissolve(optimizer, [bucket for bucket in self.buckets if not self._is_sound(bucket)])
        try:
            self._send_away(optimizer, is_astray=True)
        finally:
            self._move_what_stayed(optimizer)

    def _dissolve(self, optimizer: Optimizer, stale: Sequence[Bucket]) -> None:
        for bucket in stale:
            self.visits.dissolve(optimizer.state, bucket)
            self.buckets.remove(bucket)
            for parameter in bucket.parameters:
                del self._bucket_of[id(parameter)]

    def _follow_memory(self, optimizer: Optimizer) -> None:
        """Make new buckets for parameters that share memory since the last step, and are not stepped together."""
        stale: dict[int, Bucket] = {}
        for group in self._shared.new_groups(parameters_of(optimizer)):
            buckets = {id(one): one for p in group if (one := self._bucket_of.get(id(p))) is not None}
            if len(buckets) > 1 or any(one.stretches or not self._is_sound(one) for one in buckets.values()):
                stale |= buckets
        self._dissolve(optimizer, [*stale.values()])
        self._move_beside(optimizer, [p for bucket in stale.values() for p in bucket.parameters])

    def _move_what_stayed(self, optimizer: Optimizer) -> None:
        """Move state that is too small to travel to the device of its parameter.

        State that somebody has looked at is on the host until the next step takes it from there: it waits, too.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._move_beside(optimizer, [p for p in parameters if not self._was_looked_at(p, optimizer.state.get(p))])

    def _was_looked_at(self, parameter: torch.Tensor, entry: object) -> bool:
        bucket = self._bucket_of.get(id(parameter))
        return bucket is not None and bucket.ticket is not None and isinstance(entry, Waiting) and entry.bucket is None

    def _move_beside(self, optimizer: Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        """Move the state of these parameters that does not wait to the devices of the parameters."""
        chosen = {id(parameter) for parameter in parameters}
        for group in optimizer.param_groups:
            for parameter in (p for p in group["params"] if id(p) in chosen):
                entry = optimizer.state.get(parameter)
                values: dict[Any, Any] = entry.kept if isinstance(entry, Waiting) and entry.bucket else entry or {}
                for name, value in [*values.items()]:
                    if not isinstance(value, torch.Tensor):
                        values[name] = contents_beside(value, parameter.device)
                    elif not stays_on_host(name, value, group):
                        values[name] = value.to(parameter.device)

    def _is_sound(self, bucket: Bucket) -> bool:
        places = {_place(parameter, self._guests()) for parameter in bucket.parameters}
        if places != {_Place(bucket.device, bucket.has_guests)}:
            return False
        if bucket.memory is not None and bucket.memory.device != bucket.device:
            return False
        return bucket.moves == (self.visits.tier_of(bucket.device) is not None and not bucket.stays)

    def _guests(self) -> dict[int, torch.device]:
        """Return the devices on which parameters that live on the host are stepped, by the ids of the parameters."""
        return visitors() if self.sizes.guest_bytes is not None else {}

    def _update_buckets(self, optimizer: Optimizer) -> None:
        """Give every parameter without a bucket one: at first all of them, later those of `add_param_group`."""
        new = [p for p in parameters_of(optimizer) if id(p) not in self._bucket_of]
        places, guests = dict[_Place, list[torch.Tensor]](), self._guests() if new else {}
        for parameter in new:
            places.setdefault(_place(parameter, guests), []).append(parameter)
        own = [place for place in places if not place.has_guests]
        resident = [place for place in own if place.device.type != "cpu"] or own
        for place, same in sorted(places.items(), key=lambda item: item[0] not in resident):
            units = _together(same)
            sizes = [sum(parameter.nbytes for parameter in unit) for unit in units]
            split = split_into_buckets(sizes, self.sizes.of(place.has_guests, place in resident))
            of_buckets = [sum(sizes[index] for index in indices) for indices in split]
            share = self.sizes.resident_share if place in resident else 0.0
            cuts = self._cuts(optimizer, place.device)
            for indices, stays in zip(split, self._staying(of_buckets, share, cuts=cuts), strict=True):
                chosen = [parameter for index in indices for parameter in units[index]]
                self._add_bucket(chosen, place, stays=stays, cuts=cuts)

    def _staying(self, bucket_bytes: list[int], share: float, *, cuts: bool) -> list[bool]:
        """Say for each bucket whether its state stays on the device although it could leave."""
        if share >= 1:
            return [True] * len(bucket_bytes)
        limit = None if cuts else self.sizes.resident_bytes
        return choose_resident(bucket_bytes, share, limit or sum(bucket_bytes))

    def _cuts(self, optimizer: Optimizer, device: torch.device) -> bool:
        """Whether large parameters that travel are stepped in stretches. See NOTE [stretches] in buckets.py."""
        return self.visits.store is not None and device.type != "cpu" and steps_each_element(optimizer)

    def _add_bucket(self, parameters: list[torch.Tensor], place: _Place, *, stays: bool, cuts: bool) -> None:
        moves = not stays and self.visits.tier_of(place.device) is not None
        limit = self.sizes.guest_bytes if place.has_guests else self.sizes.resident_bytes
        is_dense = Layout.of(parameters[0]).span == parameters[0].numel()
        is_large = limit is not None and len(parameters) == 1 and parameters[0].nbytes > limit
        is_packed = self.choose is not None and any(map(self.choose.packs, parameters))
        is_cut = cuts and moves and is_large and is_dense and not is_packed
        stretches = stretches_of(parameters[0], limit or 1) if is_cut else ()
        bucket = Bucket(
            parameters, moves=moves, choose=self.choose, stays=stays, device=place.device, stretches=stretches
        )
        self.buckets.append(bucket)
        self._bucket_of.update((id(p), bucket) for p in parameters)

    # -------------------------------------------------------------------------------------------------- the step

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._broken is not None:
            raise PartialStepError(f"an earlier step failed half-way, and no state was loaded since: {self._broken}")
        self._loading = None
        self.late.begin_step()
        self._raise_failures("the step before was complete")
        call = StepCall(args[1:], kwargs)
        call.evaluate_closure()
        self._follow_memory(optimizer)
        self._update_buckets(optimizer)
        split = SplitStep(optimizer)
        run_resumed(optimizer, lambda: self._step_buckets(optimizer, split, call))
        self.visits.stats.num_steps += 1
        self._raise_failures("the step is complete")
        call.give_back_loss()
        return (idle_shadow(optimizer), *call.args), call.kwargs

    def _step_buckets(self, optimizer: Optimizer, split: SplitStep, call: StepCall) -> None:
        every = not skips_parameters_without_gradient(optimizer)
        stepped = [bucket for bucket in self.buckets if every or any(p.grad is not None for p in bucket.parameters)]
        travelling = {id(one) for one in stepped if one.moves or has_waiting_gradients(one.parameters)}
        turns = _in_order([turn for bucket in stepped for turn in _turns(bucket, optimizer.state)], travelling)
        self.early.drop_all_but(turns)
        turns.sort(key=lambda turn: not self.early.holds(*turn))  # what is there makes room for what comes
        late = self._late_among(turns)
        turns.sort(key=lambda turn: _key(turn) in late)
        progress, before = _Progress(len(turns)), set(optimizer.state)
        try:
            if not stepped:
                split.run([], {}, call.args, call.kwargs)  # the counters of groups advance nevertheless
            travel = _Travel(self.visits, optimizer.state, turns, self.early, self.late, late, travelling, every=every)
            for turn in turns:
                self._step_one(optimizer, split, call, progress, turn, travel)
            travel.let_go()
            split.merge()
        except BaseException as error:
            self._fail(optimizer, progress, error)
            raise
        finally:
            self.early.drop()
            put_in_order(optimizer, before)
            if any(bucket.has_guests for bucket in stepped):
                wait_until_home()

    def _step_one(
        self,
        optimizer: Optimizer,
        split: SplitStep,
        call: StepCall,
        progress: _Progress,
        turn: _Turn,
        travel: _Travel,
    ) -> None:
        """Step one bucket while the next bucket that travels is on its way. See NOTE [what a bucket costs]."""
        bucket, coming = turn.bucket, travel.take(turn)
        visit = coming.bring()
        # A fused step divides gradients by the scale of a `GradScaler` in its kernel, and autograd is not told.
        unscales = getattr(optimizer, "grad_scale", None) is not None
        with coming.gradients.in_place(are_written=unscales) as gradient:
            stand_ins = coming.stand_ins(gradient)
            if bucket.has_guests:
                _bring_beside(optimizer, visit.state, bucket.device)
            if bucket.moves:
                travel.let_go(but=1)
            if self._is_whole(optimizer, bucket):
                travel.fetch_next()
            progress.begin()
            state = split.run(bucket.parameters, visit.state, call.args, call.kwargs, stand_ins)
            del stand_ins, gradient
        if coming.guests is not None:
            coming.guests.go_home(gradients_are_written=unscales)
        coming.park(state, visit)
        travel.leave(coming)
        progress.end()
        self.visits.stats.num_buckets += 1

    def _late_among(self, turns: Sequence[_Turn]) -> frozenset[_Key]:
        """The turns whose state may still leave when the step is over. See NOTE [late state] in late_departures.py."""
        if not self.visits.is_asynchronous:
            return frozenset()
        return frozenset(_key(turns[index]) for index in last_turns([*map(_late_bytes, turns)], self.late.room_bytes))

    def _is_whole(self, optimizer: Optimizer, bucket: Bucket) -> bool:
        """Whether all of the bucket's state exists, so that there is room for the next bucket beside it."""
        return all(
            bucket.is_waiting(index, optimizer.state.get(p)) or p.grad is None or not bucket.moves
            for index, p in enumerate(bucket.parameters)
        )

    def _fail(self, optimizer: Optimizer, progress: _Progress, error: BaseException) -> None:
        """Record a step that failed half-way, and raise. See NOTE [a step that fails]."""
        if not progress.has_begun:
            return
        self._broken = (
            f"the step of {type(optimizer).__name__} failed after {progress.num_done} of {progress.num_buckets} "
            f"buckets ({quoted(error)}). The parameters of those are updated, the others are not: load "
            f"a checkpoint of the model and of the optimizer before going on"
        )
        if isinstance(error, Exception):
            raise PartialStepError(self._broken) from error

    def _raise_failures(self, what_is_well: str) -> None:
        if self.visits.failures:
            errors, self.visits.failures = self.visits.failures, []
            raise type(errors[0])(
                f"{errors[0]}. Nothing is lost: {what_is_well}, and the state concerned stays in memory; a checkpoint "
                f"can be saved now"
            ) from errors[0]

    # ----------------------------------------------------------------------------------------------- checkpoints

    def _after_save(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Put ordinary host tensors in place of state that waits; one bucket is read at a time.

        State that does not wait is copied too: a snapshot must show one moment, and it must be on the host, because the
        device may not have room for a second copy.
        """
        last: tuple[Bucket, torch.Tensor] | None = None
        state = {}
        for key, entry in state_dict["state"].items():
            bucket = entry.bucket if isinstance(entry, Waiting) else None
            if bucket is None:
                state[key] = tree_map_only(torch.Tensor, _snapshot, dict(entry) if isinstance(entry, dict) else entry)
                continue
            if last is None or last[0] is not bucket:
                last = None  # frees the bytes of one bucket before the next is read
                last = (bucket, bucket.read())
            state[key] = entry.snapshot(last[1])
        return {**state_dict, "state": state}

    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        """Hold the state back, because loading would put all of it on the device at once.

        If one of the user's pre-hooks comes after this one, it must see the state: loading then takes the usual way.
        """
        self._loading = None
        if not private.is_last_load_hook(optimizer, self._load_hook.id):
            return None
        self._loading = state_dict
        return {**state_dict, "state": {}}

    def _after_load(self, optimizer: Optimizer) -> None:
        self.early.drop()
        self.late.let_go_all()
        for bucket in self.buckets:
            self.visits.drop(bucket)
        self.visits.failures.clear()
        self._broken = None
        if self._loading is not None:
            loaded, self._loading = self._loading, None
            self._update_buckets(optimizer)
            state = cast_state(optimizer, loaded, self._will_wait)
            optimizer.__setstate__({"state": state, "param_groups": optimizer.param_groups})
        self._send_away(optimizer)

    def _will_wait(self, parameter: torch.Tensor, name: Any, value: torch.Tensor) -> bool:
        """Whether a state tensor goes into its bucket, so that it need not be loaded to the device first."""
        return self._bucket_of[id(parameter)].takes(parameter, name, value)


@dataclasses.dataclass(frozen=True, slots=True)
class BucketSizes:
    """How large buckets are, in bytes of parameters, and how much of the state stays on the device."""

    resident_bytes: int | None
    """The size for parameters on the device (for those on the host if none is on a device). None steps all at once."""
    resident_share: float = 0.0
    """The share of their movable state that stays on the device."""
    guest_bytes: int | None = None
    """The size for guests, which live on the host and are stepped on the device. None steps them on the host."""

    def of(self, are_guests: bool, are_resident: bool) -> int:
        if are_guests:
            assert self.guest_bytes is not None
            return self.guest_bytes
        at_once = sys.maxsize if are_resident else BYTES_AT_ONCE
        return at_once if self.resident_bytes is None else self.resident_bytes


class _Place(NamedTuple):
    """A device on which parameters are stepped, and whether they live there."""

    device: torch.device
    has_guests: bool
    """Whether the parameters live on the host and visit the device as guests."""


def _place(parameter: torch.Tensor, guests: Mapping[int, torch.device]) -> _Place:
    device = guests.get(id(parameter))
    return _Place(parameter.device, False) if device is None else _Place(device, True)


def _bring_beside(optimizer: Optimizer, state: State, device: torch.device) -> None:
    """Move all of this state to the device, except what an optimizer keeps on the host."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            values = state.get(parameter, {})
            for name, value in [*values.items()]:
                if isinstance(value, torch.Tensor) and not stays_on_host(name, value, group):
                    values[name] = value.to(device)


def _snapshot(value: torch.Tensor) -> torch.Tensor:
    return value.clone() if value.nbytes <= SMALL_BYTES or value.device.type == "cpu" else value.cpu()


class _Turn(NamedTuple):
    """One turn of a step: a bucket, or a stretch of its only parameter."""

    bucket: Bucket
    stretch: Stretch | None


_Key = tuple[int, Stretch | None]


def _key(turn: _Turn) -> _Key:
    return id(turn.bucket), turn.stretch


def _late_bytes(turn: _Turn) -> int:
    """What of this turn could still leave when the step is over. Guests are at home by then, whatever their state."""
    bucket = turn.bucket
    is_resident = bucket.moves and not bucket.has_guests and bucket.device.type != "cpu"
    return bucket.bytes_of(turn.stretch) if is_resident and bucket.num_bytes else 0


def _together(parameters: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The parameters, those that share memory with one another in one unit: operators on many tensors at once take
    turns between them, and so must a bucket."""
    units = {id(parameter): group for group in overlapping(parameters) for parameter in group}
    place = {id(parameter): number for number, parameter in enumerate(parameters)}
    ordered = {id(group): sorted(group, key=lambda one: place[id(one)]) for group in units.values()}
    return [*{id(group): ordered[id(group)] for group in (units[id(parameter)] for parameter in parameters)}.values()]


def _turns(bucket: Bucket, entries: Entries) -> list[_Turn]:
    """Return the turns of a bucket: one for each stretch if it can be cut, else one."""
    if bucket.stretches and _can_be_cut(bucket, entries.get(bucket.parameters[0])):
        return [_Turn(bucket, stretch) for stretch in bucket.stretches]
    return [_Turn(bucket, None)]


def _can_be_cut(bucket: Bucket, entry: Any) -> bool:
    """Whether gradient and state lie in memory as the parameter does: a stretch of one is the same stretch of all.

    A user's own tensors of other shapes, or of a loaded state with other strides, keep a parameter whole.
    """
    parameter = bucket.parameters[0]
    gradient, is_waiting = parameter.grad, bucket.is_waiting(0, entry)
    if gradient is None or gradient.layout is not torch.strided:
        return False
    values = entry.kept if is_waiting else entry or {}
    tensors = [value for value in values.values() if isinstance(value, torch.Tensor) and value.dim()]
    layouts = [(tuple(tensor.shape), tensor.stride()) for tensor in (gradient, *tensors)]
    if is_waiting:
        layouts += [(slot.shape, slot.stride) for slot in bucket.slots]
    return all(lies_as(parameter, *layout) for layout in layouts)


def _in_order(turns: list[_Turn], travelling: set[int]) -> list[_Turn]:
    """Return the turns in the order in which they are taken. See NOTE [the order of a step] in buckets.py.

    `travelling` are the ids of buckets of which something comes: state, guests, or gradients that wait.
    """
    sizes = [
        sum(p.nbytes for p in bucket.parameters if p.grad is not None)
        if stretch is None
        else (stretch.stop - stretch.start) * bucket.parameters[0].element_size()
        for bucket, stretch in turns
    ]
    return [turns[index] for index in step_order(sizes, [id(turn.bucket) in travelling for turn in turns])]


class _Coming:
    """What travels for one turn: state, and guests. Creating it starts the transfers."""

    def __init__(
        self,
        visits: Visits,
        entries: Entries,
        turn: _Turn,
        *,
        every: bool,
        ahead: bool,
        early: Early | None = None,
    ) -> None:
        self.turn = turn
        self.was_early = early is not None
        self.bucket, self._stretch = turn
        stretch = self._stretch
        self.guests: Guests | None = None
        self._part: LocalPart | None = None
        self._visits, self._entries = visits, entries
        self._is_ahead = ahead
        self._cut: StretchVisit | None = None
        self._arrival: Arrival | None = None
        if isinstance(early, StretchVisit):
            self._cut = early
        elif stretch is not None:
            self._cut = StretchVisit(visits, entries, self.bucket, stretch)
        else:
            self._arrival = early if early is not None else visits.start(entries, self.bucket)
        if self.bucket.has_guests:
            guests = [p for p in self.bucket.parameters if every or p.grad is not None]
            self.guests = Guests(guests, stretch)
        self.gradients = ComingGradients(() if self.bucket.has_guests else self.bucket.parameters, stretch)

    def bring(self) -> Visit:
        if self._cut is not None:
            return Visit(self._cut.bring())
        arrival, self._arrival = self._arrival, None
        return self._visits.bring(self._entries, self.bucket, arrival, is_ahead=self._is_ahead)

    def stand_ins(self, gradient: torch.Tensor | None) -> Mapping[int, torch.Tensor]:
        """Return what is stepped in place of parameters that are elsewhere, or of which only a stretch is stepped, with
        this `gradient` if that was elsewhere, too."""
        if self.guests is not None:
            return self.guests.stand_ins()
        if self._stretch is None:
            return {}
        self._part = LocalPart(self.bucket.parameters[0], self._stretch, gradient)
        return self._part.stand_ins()

    def park(self, state: State, visit: Visit) -> None:
        if self._cut is not None:
            if self._part is not None:
                self._part.end()
            self._cut.park(state)
        else:
            self._visits.park(self._entries, self.bucket, state, visit)

    def linger(self) -> None:
        """Let it leave beside what comes after the step."""
        tickets = self._cut.sent if self._cut is not None else [self.bucket.ticket]
        for ticket in tickets:
            if ticket is not None:
                self._visits.transfers.linger(ticket)

    def let_go(self) -> None:
        """Free the memory from which it was sent."""
        if self._cut is not None:
            self._cut.let_go()
        else:
            self._visits.let_go(self.bucket)
        if self.guests is not None:
            self.guests.let_go()


class _Travel:
    """The buckets that travel in one step: at most one to the device and two from it, beside what came early.

    With `every`, parameters without a gradient are stepped too.

    NOTE [room of early state]: what came early needs the link no more while it is stepped, and leaves. So that the link
    is not idle meanwhile, as many bytes of what comes behind it are asked for as early state has been stepped.
    """

    def __init__(
        self,
        visits: Visits,
        entries: Entries,
        turns: Sequence[_Turn],
        early: EarlyArrivals,
        late: LateDepartures,
        are_late: Collection[_Key],
        travelling: set[int],
        *,
        every: bool,
    ) -> None:
        self._visits, self._entries, self._early, self._every = visits, entries, early, every
        self._late, self._are_late, self._travelling = late, are_late, travelling
        self._to_come = collections.deque(turn for turn in turns if id(turn.bucket) in travelling)
        self._coming: dict[_Key, _Coming] = {}
        self._ahead_bytes: dict[_Key, int] = {}
        """What comes, or has come, for turns that are not stepped yet, and was not early."""
        self._stepped_early_bytes = 0
        self._leaving: collections.deque[_Coming] = collections.deque()

    def take(self, turn: _Turn) -> _Coming:
        """Return what was fetched ahead for this turn, or start fetching it now."""
        if id(turn.bucket) not in self._travelling:
            return self._ask(turn, ahead=False)
        self._to_come.popleft()
        coming = self._coming.pop(_key(turn), None)
        coming = coming if coming is not None else self._ask(turn, ahead=False)
        if self._ahead_bytes.pop(_key(turn), None) is None:
            self._stepped_early_bytes += turn.bucket.bytes_of(turn.stretch) if coming.was_early else 0
        return coming

    def _ask(self, turn: _Turn, *, ahead: bool) -> _Coming:
        early = self._early.take(self._entries, *turn)
        is_ahead = ahead or early is not None
        if ahead and early is None:
            self._ahead_bytes[_key(turn)] = turn.bucket.bytes_of(turn.stretch)
        return _Coming(self._visits, self._entries, turn, every=self._every, ahead=is_ahead, early=early)

    def fetch_next(self) -> None:
        """Start fetching what travels next, unless that has been started, and what there is room for behind it. See
        NOTE [room of early state]."""
        if not self._visits.is_asynchronous:
            return
        for place, turn in enumerate(self._to_come):
            if _key(turn) in self._coming or (place and self._early.holds(*turn)):
                continue
            if place and not self._has_room(turn):
                return
            self._coming[_key(turn)] = self._ask(turn, ahead=True)

    def _has_room(self, turn: _Turn) -> bool:
        ahead_bytes = sum(self._ahead_bytes.values()) + turn.bucket.bytes_of(turn.stretch)
        brings_more = turn.bucket.has_guests or has_waiting_gradients(turn.bucket.parameters)
        return not brings_more and ahead_bytes <= self._stepped_early_bytes

    def leave(self, coming: _Coming) -> None:
        """Note that this turn was stepped and that what travels of it is being sent."""
        if _key(coming.turn) in self._are_late:
            coming.linger()
            self._late.add(coming, _late_bytes(coming.turn))
            self._visits.stats.num_late += 1
        elif coming.bucket.moves:
            self._leaving.append(coming)

    def let_go(self, but: int = 0) -> None:
        """Free the memory of what is leaving, but for so many that left last."""
        while len(self._leaving) > but:
            self._leaving.popleft().let_go()


class _Progress:
    """How far a step has come."""

    def __init__(self, num_buckets: int) -> None:
        self.num_buckets = num_buckets
        self.num_done = 0
        self.has_begun = False

    def begin(self) -> None:
        self.has_begun = True

    def end(self) -> None:
        self.num_done += 1
