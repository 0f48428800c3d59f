"""What an optimizer keeps and what its step needs, by running two of its steps on fake parameters."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from memscale._errors import quoted
from memscale._profile import BackwardStep, GuestCost, OptimizerCost, StateShare
from memscale._profile.operator_costs import Books, Work
from memscale._profile.rehearsal import device_exists
from memscale._profile.sharding import share_rows
from memscale._profile.values import Recollection
from memscale._torch import private
from memscale._torch.any_value import AnyValue
from memscale._torch.live_bytes import rounding_of
from memscale._torch.optimizer_steps import parameters_of
from memscale._torch.quiet_steps import quiet_steps
from memscale._units import round_up

logger = logging.getLogger("memscale")

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", {}),
    "adam": ("Adam", {}),
    "sgd": ("SGD", {}),
    "sgd_momentum": ("SGD", {"momentum": 0.9}),
    "rmsprop": ("RMSprop", {}),
    "adagrad": ("Adagrad", {}),
    "adafactor": ("Adafactor", {}),
}
"""Optimizers that can be named in `estimate`; `"none"` is training without one."""


Prepare = Callable[[Optimizer, Mapping[int, nn.Parameter]], None]
"""Makes a twin fit for steps on its fake parameters, which are given by the ids of those that they stand for."""


class Stepping(Protocol):
    """A step that runs bucket by bucket."""

    @property
    def moves(self) -> bool:
        """Buckets wait on another tier."""

    @property
    def prefetches(self) -> bool:
        """The next bucket arrives while one is stepped."""

    @property
    def padding_bytes(self) -> int:
        """What a bucket's memory is padded with."""

    @property
    def window_bytes(self) -> int:
        """What is on its way out holds no more than this."""

    @property
    def resident_shares(self) -> Sequence[float]:
        """Shares of the state that may stay on the device while the rest moves."""

    def stays(self, sizes: list[int], resident_share: float, *, cuts: bool) -> list[bool]:
        """Which buckets, given the bytes of their parameters, stay on the device for that share of the state; `cuts`:
        large ones would travel in stretches."""

    def order(self, sizes: list[int], travels: list[bool]) -> list[int]:
        """The order in which turns are stepped, given the bytes of their parameters and which of them travel."""

    def cuts_for(self, optimizer: Optimizer) -> bool:
        """Whether parameters that are larger than a bucket travel in stretches."""

    def split(self, sizes: list[int]) -> list[list[int]]:
        """From the sizes of parameters to the indices of those that are stepped together."""

    def stretches(
        self, optimizer: Optimizer, together: Sequence[torch.Tensor]
    ) -> Sequence[Mapping[torch.Tensor, torch.Size | None]]:
        """What of these is stepped together: all of them, None, or a stretch of one after another, of these sizes."""

    def waiting_bytes(self, optimizer: Optimizer, parameter_id: int, name: Any, value: torch.Tensor) -> int | None:
        """The bytes in which a state tensor waits in its bucket; None: it stays as it is."""

    def tables_bytes(self, optimizer: Optimizer, device_type: str) -> int:
        """What packing keeps on the device all the time."""

    def packs(self, parameter_id: int) -> bool:
        """Whether state of this parameter may wait in fewer bytes than it has."""

    def scratch_bytes(self, value: torch.Tensor) -> int:
        """The memory that packing this tensor takes."""


def optimizer_cost(
    model: nn.Module,
    optimizer: str | Optimizer,
    device_type: str,
    *,
    resident: Stepping | None = None,
    offloaded: Stepping | None = None,
    is_separable: bool = True,
    in_buckets: Stepping | None = None,
    in_backward: Stepping | None = None,
    guests: Stepping | None = None,
    without: Collection[int] = (),
    idle: Collection[int] = (),
    prepare: Prepare | None = None,
    num_shards: int = 1,
    trials: Trials | None = None,
) -> OptimizerCost:
    """State and step temporaries of an optimizer over this model's parameters on this device.

    `resident` is how it steps where its state is on the device, None: as it is; `offloaded` how where it is not, None:
    it cannot; `in_buckets` how where that is chosen, its state where it is, `in_backward` how where that is; `guests`
    how parameters that are streamed visit the device to be stepped there, None: they are stepped on the host.
    `is_separable`: it can be stepped in parts. `without` leaves out parameters that are streamed, `idle` those that get
    no gradient, both by id; `prepare` is called before any step. `num_shards`: it steps one share of each parameter.
    `trials`: steps of the same optimizer on this device that are known; more are added.
    """
    if optimizer == "none":
        return OptimizerCost("none", 0, 0, 0)
    try:
        with quiet_steps():
            twin = _Twin(model, optimizer, device_type, without, idle, prepare, guests, num_shards, trials)
            cost = twin.cost(resident, offloaded, is_separable=is_separable)
            cost = cost if in_buckets is None else twin.with_buckets(cost, in_buckets)
            return cost if in_backward is None else dataclasses.replace(cost, in_backward=twin.in_backward(in_backward))
    except Exception as error:  # whatever a third party's optimizer does on fake tensors
        if isinstance(optimizer, str):
            raise
        logger.warning(
            "%s cannot be tried on fake tensors (%s); its state is taken to be AdamW's",
            type(optimizer).__name__,
            quoted(error),
        )
        logger.debug("%s failed on fake tensors", type(optimizer).__name__, exc_info=True)
        with quiet_steps():
            twin = _Twin(model, "adamw", device_type, without, idle, num_shards=num_shards)
            cost = twin.cost(None, None, is_separable=False)
        return dataclasses.replace(cost, name=f"{type(optimizer).__name__}, taken as AdamW")


def guest_cost(
    model: nn.Module,
    optimizer: str | Optimizer,
    device_type: str,
    guests: Stepping,
    streamed: Collection[int],
    idle: Collection[int] = (),
    prepare: Prepare | None = None,
    trials: Trials | None = None,
) -> GuestCost | None:
    """What it takes to step the parameters with these ids on the device; None where that cannot be tried."""
    if optimizer == "none":
        return None
    try:
        with quiet_steps():
            return _Twin(model, optimizer, device_type, streamed, idle, prepare, guests, trials=trials).guest_cost()
    except Exception as error:  # whatever a third party's optimizer does on fake tensors
        logger.debug("%s failed on fake tensors: %s", optimizer, quoted(error), exc_info=True)
        return None


def optimizer_over(
    stand_ins: Mapping[int, nn.Parameter], model: nn.Module, optimizer: str | Optimizer, device_type: str
) -> Optimizer:
    """The optimizer, without state, over fake parameters that stand in for the model's, given by the ids of those.

    It chooses its implementation as it would on the device.
    """
    twin = _Twin(model, optimizer, device_type, (), ())
    standing = {id(fake): stand_ins[number] for number, fake in twin._fakes.items() if number in stand_ins}
    groups = twin.optimizer.param_groups
    chosen = [{**group, "params": [standing[id(p)] for p in group["params"] if id(p) in standing]} for group in groups]
    return _same_class(twin.optimizer, chosen)


def over_parameters(optimizer: Optimizer, inside: Mapping[int, torch.Tensor]) -> Optimizer:
    """The same optimizer, without state, over these in the place of its parameters, by the ids of those."""
    groups = [{**g, "params": [inside[id(p)] for p in g["params"] if id(p) in inside]} for g in optimizer.param_groups]
    return _same_class(optimizer, groups)


def host_counters(optimizer: Optimizer) -> list[torch.Tensor]:
    """Step counters in its state, which stay on the host while parameters are on a device, unless the step is fused
    or capturable."""
    if any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups):
        return []
    leaves = tree_leaves(list(optimizer.state.values()))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim() == 0]


@dataclasses.dataclass(frozen=True, slots=True)
class _BucketCost:
    """What the state of a few parameters takes on the device."""

    waiting_bytes: int
    """The bytes of the memory in which its state waits."""
    kept_bytes: int
    """The bytes of state tensors that never wait."""
    unpacked_bytes: int
    """The bytes of state tensors that wait packed, once they are unpacked for a step into memory of their own."""
    step_bytes: int
    """The step's temporaries."""
    scratch_bytes: int
    num_launches: int = 0
    """Operators of the step."""
    launched_bytes: int = 0
    making_bytes: int = 0
    """The most bytes that exist while the state is made and laid out."""
    state_bytes: int = 0
    """The bytes of the state as the optimizer makes it."""
    made_bytes: int = 0
    """The most bytes that exist while the state is made."""
    moves: bool = True
    """Its state waits elsewhere, where buckets do."""
    guest_bytes: int = 0
    """Of its parameters, where these live elsewhere, too: they visit the device with their gradients."""
    num_guests: int = 0
    parameter_bytes: int = 0
    """Of what is stepped in its turn."""

    def travels(self, how: Stepping) -> bool:
        return bool(self.guest_bytes) or (how.moves and self.moves)

    @property
    def coming_bytes(self) -> int:
        return self.waiting_bytes + 2 * self.guest_bytes

    @property
    def leaving_bytes(self) -> int:
        """Gradients do not go back."""
        return self.waiting_bytes + self.guest_bytes

    def staying(self) -> _BucketCost:
        """The same bucket where its state is left as the optimizer makes it."""
        return dataclasses.replace(
            self,
            waiting_bytes=0,
            kept_bytes=self.state_bytes,
            unpacked_bytes=0,
            scratch_bytes=0,
            making_bytes=self.made_bytes,
            moves=False,
        )

    def stays_bytes(self, how: Stepping) -> int:
        return self.kept_bytes + (0 if self.travels(how) else self.waiting_bytes)

    def stepping_bytes(self, how: Stepping) -> int:
        """Above what stays."""
        beside = self.coming_bytes if self.travels(how) else 0
        return beside + self.unpacked_bytes + max(self.step_bytes, self.scratch_bytes)


@dataclasses.dataclass(frozen=True, slots=True)
class _Trial:
    """What two steps of an optimizer over some parameters have shown, however its state is to wait afterwards."""

    optimizer: Optimizer
    states: tuple[Mapping[Any, Any], ...]
    """The states of the parameters with gradients, in their order."""
    state_bytes: int
    making_bytes: int
    """The most that there was in the first step, in which the state is made."""
    step_bytes: int
    """The temporaries of the second."""
    num_launches: int
    launched_bytes: int


Trials = dict[Hashable, _Trial]
"""By what decides what the steps take: the kinds of the parameters, group by group."""


@dataclasses.dataclass(frozen=True, slots=True)
class _StepCost:
    """What a step of all parameters takes."""

    state_bytes: int
    step_bytes: int
    """Its temporaries."""
    num_launches: int
    """Its operators."""
    launched_bytes: int
    """What they read and write."""


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


class _Twin:
    """The same optimizer over fake parameters, choosing its implementation as the real device would."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: str | Optimizer,
        device_type: str,
        left_out: Collection[int],
        idle: Collection[int],
        prepare: Prepare | None = None,
        guests: Stepping | None = None,
        num_shards: int = 1,
        trials: Trials | None = None,
    ) -> None:
        self._left_out = left_out
        self._num_shards = num_shards
        self._guests_step = guests
        self._idle = idle
        self._prepare = prepare
        self.name = optimizer if isinstance(optimizer, str) else type(optimizer).__name__
        self.device_type = device_type
        self.mode = private.fake_tensor_mode()
        self.is_emulated = not device_exists(device_type)
        self.rounding_bytes = rounding_of(device_type)
        self.device = torch.device("cpu" if self.is_emulated else device_type)
        self._fakes: dict[int, nn.Parameter] = {}
        self._idle_fakes: dict[int, nn.Parameter] = {}
        """They get no gradient here, either: whether anything is kept for them is for the optimizer to say."""
        if isinstance(optimizer, str):
            class_name, options = OPTIMIZERS[optimizer]
            members = [list(model.parameters())]
            groups = [{"params": self._fake_all(members[0])}]
            self.optimizer: Optimizer = getattr(torch.optim, class_name)(groups, **options)
            self.optimizer.state.clear()  # Adagrad makes its state at once; made at the first step it is counted
        else:
            members = [group["params"] for group in optimizer.param_groups]
            groups = [{**group, "params": self._fake_all(group["params"])} for group in optimizer.param_groups]
            self.optimizer = _same_class(optimizer, groups)
        self._trials = {} if trials is None else trials
        self._members = members
        self._resident = [p for p in _each_once(members) if id(p) not in left_out]
        self._picked = self._pick_foreach()
        self._split = [i for i in self._picked if any(self._is_trained(p) and id(p) in left_out for p in members[i])]

    def _pick_foreach(self) -> list[int]:
        """As PyTorch does where the device has it, but never for fake tensors. Returns the groups that it is asked for.

        NOTE [two devices]: PyTorch does so only for a group whose parameters are all on such a device. When some are
        streamed, and thus on the host, those of each device are stepped for themselves, at once; an optimizer that
        cannot be split is left to PyTorch, which steps the group's parameters one by one.
        """
        has_foreach = self.device_type in private.foreach_device_types()
        groups = self.optimizer.param_groups
        free = [i for i, group in enumerate(groups) if private.chooses_by_device(self.optimizer, group)]
        for index in free:
            groups[index]["foreach"] = has_foreach
        return free if has_foreach else []

    def _fake_all(self, parameters: Any) -> list[nn.Parameter]:
        return [self._fake(p) for p in parameters if p.requires_grad and id(p) not in self._left_out]

    def _is_trained(self, parameter: torch.Tensor) -> bool:
        return parameter.requires_grad and id(parameter) not in self._idle

    def _fake(self, parameter: torch.Tensor) -> nn.Parameter:
        fakes = self._fakes if self._is_trained(parameter) else self._idle_fakes
        if id(parameter) not in fakes:
            with self.mode:
                shape, stride = parameter.shape, parameter.stride()
                if self._num_shards > 1 and shape:
                    shape = torch.Size((share_rows(parameter, self._num_shards), *shape[1:]))
                empty = torch.empty_strided(shape, stride, dtype=parameter.dtype, device=self.device)
                fakes[id(parameter)] = nn.Parameter(empty)
        return fakes[id(parameter)]

    def cost(
        self, resident: Stepping | None, offloaded: Stepping | None, *, is_separable: bool = True
    ) -> OptimizerCost:
        parameters = list(self._fakes.values())
        if not parameters and not self._guest_buckets:
            return OptimizerCost(self.name, 0, 0, 0, None if offloaded is None else 0)
        split = self._looped() if self._picked and resident is None and not is_separable else None
        if resident is not None:
            step = self._stepped(resident)
        else:
            step = self._with_guests(split if split is not None and self._split else self._whole(self._again()))
        cost = OptimizerCost(
            self.name,
            step.state_bytes,
            step.step_bytes,
            3 * sum(parameter.nbytes for parameter in parameters) + 2 * step.state_bytes,
            num_tensors=len(parameters),
            num_launches=step.num_launches,
            launched_bytes=step.launched_bytes,
            split_step_bytes=None if split is None else split.step_bytes,
            split_launches=(split or step).num_launches,
        )
        if offloaded is None:
            return cost
        buckets = self._try_buckets(offloaded)
        pieces = [self._try_pieces(offloaded, bucket) for bucket in self._filled_buckets(offloaded)]
        every = list(itertools.chain(*pieces))
        stays_bytes, step_bytes = self._in_buckets(offloaded, [*every, *self._guest_buckets])
        shares = (self._with_share(offloaded, buckets, pieces, share) for share in offloaded.resident_shares)
        return dataclasses.replace(
            cost,
            offloaded_step_bytes=step_bytes,
            offloaded_state_bytes=stays_bytes,
            bucket_bytes=tuple(bucket.waiting_bytes for bucket in buckets),
            bucket_launches=_launched(every)[0],
            num_pieces=len(every),
            piece_bytes=max((piece.waiting_bytes for piece in every), default=0),
            shares=tuple(shares),
        )

    def _with_share(
        self, how: Stepping, buckets: list[_BucketCost], pieces: list[list[_BucketCost]], resident_share: float
    ) -> StateShare:
        """What it takes while so much of the state stays on the device."""
        every = list(self._every_bucket(how))
        stays = how.stays([num_bytes for num_bytes, _ in every], resident_share, cuts=how.cuts_for(self.optimizer))
        staying = tuple(does_stay for does_stay, (_, filled) in zip(stays, every, strict=True) if filled)
        mixed = [
            [whole.staying()] if does_stay else cut
            for whole, cut, does_stay in zip(buckets, pieces, staying, strict=True)
        ]
        in_turn = [*itertools.chain(*mixed), *self._guest_buckets]
        return StateShare(resident_share, *self._in_buckets(how, in_turn), staying)

    def with_buckets(self, cost: OptimizerCost, how: Stepping) -> OptimizerCost:
        """With what a step in buckets takes whose state stays, where all at once needs a copy of everything."""
        if not self._fakes or not any(group.get("foreach") for group in self.optimizer.param_groups):
            return cost  # one parameter after the other takes no less in buckets
        buckets = self._try_buckets(how)
        return dataclasses.replace(
            cost,
            bucketed_step_bytes=self._in_buckets(how, [*buckets, *self._guest_buckets])[1],
            bucketed_launches=_launched(buckets)[0],
            num_step_buckets=len(buckets),
        )

    def in_backward(self, how: Stepping) -> BackwardStep:
        """In buckets whose state stays."""
        buckets = self._try_buckets(how)
        most_bytes = max((bucket.step_bytes for bucket in buckets), default=0)
        return BackwardStep(most_bytes, _launched(buckets)[0], len(buckets))

    def _stepped(self, how: Stepping) -> _StepCost:
        """The cost of all buckets, one after the other."""
        buckets = self._try_buckets(how)
        return _StepCost(*self._in_buckets(how, [*buckets, *self._guest_buckets]), *_launched(buckets))

    def _looped(self) -> _StepCost:
        """Of a step when something is streamed and the optimizer cannot be split. See NOTE [two devices]."""
        return self._whole(self._again(looped=self._split or self._picked))

    def _again(self, looped: Collection[int] = ()) -> Optimizer:
        """The same over all parameters, without state; those of some groups are stepped one by one."""
        groups = enumerate(self.optimizer.param_groups)
        return _same_class(self.optimizer, [{**g, "foreach": False} if i in looped else g for i, g in groups])

    def _whole(self, optimizer: Optimizer) -> _StepCost:
        """The cost of a step of all parameters at once."""
        trial = self._tried(optimizer, self._fakes)
        state_bytes = trial.state_bytes - self._counter_bytes(trial.optimizer)
        return _StepCost(state_bytes, trial.step_bytes, trial.num_launches, trial.launched_bytes)

    def _tried(self, optimizer: Optimizer, trained: dict[int, nn.Parameter], packs: tuple[bool, ...] = ()) -> _Trial:
        """Two steps with gradients for these; what is alike is tried once, whole or in buckets of any kind.

        What is prepared before its steps may be prepared by what it packs.
        """
        inside = {id(fake) for fake in trained.values()}
        members = tuple(
            (index, group.get("foreach"), id(fake) in inside, _kind(fake))
            for index, group in enumerate(optimizer.param_groups)
            for fake in group["params"]
        )
        key = members, packs if self._prepare is not None else ()
        if key not in self._trials:
            self._trials[key] = self._try(optimizer, trained)
        return self._trials[key]

    def _try(self, optimizer: Optimizer, trained: dict[int, nn.Parameter]) -> _Trial:
        books = self._books()
        with self.mode:
            for parameter in trained.values():
                parameter.grad = torch.empty_like(parameter)
            parameters = parameters_of(optimizer)
            books.see_all([parameters, [parameter.grad for parameter in parameters]])
            before = books.total_bytes
            books.reset_peak()
            if private.active_modes() == [self.mode]:
                books.recall = Recollection(self.mode)
            with books, AnyValue():
                if self._prepare is not None:
                    self._prepare(optimizer, trained)
                optimizer.step()
                making_bytes, state_bytes = books.peak_bytes - before, books.total_bytes - before
                books.reset_peak()
                books.work = Work()
                optimizer.step()
            step_bytes = max(0, books.peak_bytes - before - state_bytes)
        for parameter in trained.values():
            parameter.grad = None
        work, states = books.work, tuple(optimizer.state[parameter] for parameter in trained.values())
        moved_bytes = work.matmul_bytes + work.other_bytes
        return _Trial(optimizer, states, state_bytes, making_bytes, step_bytes, work.num_launches, moved_bytes)

    def _books(self) -> Books:
        books = Books(self.device.type, self.rounding_bytes)
        books.opens_kernels = self.device_type == "cpu"
        return books

    # ---- bucket by bucket

    def _in_buckets(self, how: Stepping, buckets: list[_BucketCost]) -> tuple[int, int]:
        """What is on the device between steps, and the most that there is above it in any step, the first included.

        The buckets are stepped in the executor's order. See NOTE [what a bucket costs] and NOTE [the order of a step]
        in techniques/offload/optimizer/buckets.py.
        """
        order = how.order([bucket.parameter_bytes for bucket in buckets], [bucket.travels(how) for bucket in buckets])
        buckets = [buckets[index] for index in order]
        tables_bytes = how.tables_bytes(self.optimizer, self.device_type) if buckets else 0
        stays_bytes = tables_bytes + sum(bucket.stays_bytes(how) for bucket in buckets)
        first = _peak_of_step(how, buckets, tables_bytes, is_first=True)
        later = _peak_of_step(how, buckets, stays_bytes, is_first=False)
        return stays_bytes, max(first, later) - stays_bytes

    def _try_buckets(self, how: Stepping) -> list[_BucketCost]:
        return [self._try_bucket(how, bucket) for bucket in self._filled_buckets(how)]

    def _filled_buckets(self, how: Stepping) -> Iterator[dict[int, nn.Parameter]]:
        """Those with parameters that are trained. The others take their room in a bucket, too."""
        yield from (bucket for _, bucket in self._every_bucket(how) if bucket)

    def _every_bucket(self, how: Stepping) -> Iterator[tuple[int, dict[int, nn.Parameter]]]:
        """The bytes of its parameters, and those that are trained."""
        for indices in how.split([parameter.nbytes for parameter in self._resident]):
            members = [self._resident[index] for index in indices]
            trained = {id(p): self._fakes[id(p)] for p in members if id(p) in self._fakes}
            yield sum(parameter.nbytes for parameter in members), trained

    def _try_bucket(self, how: Stepping, bucket: dict[int, nn.Parameter]) -> _BucketCost:
        optimizer = over_parameters(self.optimizer, {id(fake): fake for fake in bucket.values()})
        return self._try_over(how, optimizer, bucket)

    def _try_pieces(self, how: Stepping, bucket: dict[int, nn.Parameter]) -> list[_BucketCost]:
        """The turns in which a bucket is stepped whose state travels: one, or one for each stretch of a parameter."""
        numbers = {id(fake): number for number, fake in bucket.items()}
        parts = how.stretches(self.optimizer, list(bucket.values()))
        if len(parts) == 1:
            return [self._try_bucket(how, bucket)]
        return [self._try_part(how, {numbers[id(fake)]: fake for fake in part}, part) for part in parts]

    def _try_part(
        self,
        how: Stepping,
        members: Mapping[int, torch.Tensor],
        sizes: Mapping[torch.Tensor, torch.Size | None],
        groups: Sequence[Sequence[torch.Tensor]] | None = None,
    ) -> _BucketCost:
        """Some parameters, by number, or a stretch of one; `groups` holds them as the optimizer's groups do."""
        fakes: dict[int, nn.Parameter] = {}
        by_member: dict[int, nn.Parameter] = {}
        with self.mode:
            for number, parameter in members.items():
                size = sizes[parameter]
                shape, stride = (parameter.shape, parameter.stride()) if size is None else (size, (1,))
                empty = torch.empty_strided(shape, stride, dtype=parameter.dtype, device=self.device)
                fakes[number] = by_member[id(parameter)] = nn.Parameter(empty)
        own_groups = [group["params"] for group in self.optimizer.param_groups] if groups is None else groups
        pairs = zip(self.optimizer.param_groups, own_groups, strict=True)
        chosen = [{**group, "params": [by_member[id(p)] for p in own if id(p) in by_member]} for group, own in pairs]
        return self._try_over(how, _same_class(self.optimizer, chosen), fakes)

    def _try_over(self, how: Stepping, optimizer: Optimizer, bucket: dict[int, nn.Parameter]) -> _BucketCost:
        trial = self._tried(optimizer, bucket, tuple(map(how.packs, bucket)))
        counters = self._counter_bytes(trial.optimizer)
        state_bytes = trial.state_bytes - counters
        cost = self._share(how, trial, list(bucket), state_bytes)
        together = cost.waiting_bytes + state_bytes + cost.scratch_bytes
        return dataclasses.replace(
            cost,
            making_bytes=max(trial.making_bytes - counters, together),
            num_launches=trial.num_launches,
            launched_bytes=trial.launched_bytes,
            state_bytes=state_bytes,
            made_bytes=trial.making_bytes - counters,
            parameter_bytes=sum(fake.nbytes for fake in bucket.values()),
        )

    # ---- guests

    @functools.cached_property
    def _guest_buckets(self) -> list[_BucketCost]:
        """Of parameters that are streamed and visit the device to be stepped. They come after those that are there."""
        how = self._guests_step
        if how is None:
            return []
        streamed = [p for p in _each_once(self._members) if id(p) in self._left_out]
        found = []
        for indices in how.split([parameter.nbytes for parameter in streamed]):
            trained = [streamed[index] for index in indices if self._is_trained(streamed[index])]
            found += [self._try_guests(how, part) for part in how.stretches(self.optimizer, trained) if part]
        return found

    def _try_guests(self, how: Stepping, sizes: Mapping[torch.Tensor, torch.Size | None]) -> _BucketCost:
        """Some parameters, or a stretch of one."""
        cost = self._try_part(how, {id(parameter): parameter for parameter in sizes}, sizes, self._members)
        lengths = [p.nbytes if size is None else size.numel() * p.itemsize for p, size in sizes.items()]
        num_bytes = sum(round_up(length, self.rounding_bytes) for length in lengths)
        sent_bytes = num_bytes if how.prefetches else 0  # else it is there by then
        made_bytes = max(2 * num_bytes + cost.made_bytes, sent_bytes + cost.waiting_bytes + cost.state_bytes)
        return dataclasses.replace(cost, guest_bytes=num_bytes, making_bytes=made_bytes, num_guests=len(sizes))

    def _with_guests(self, step: _StepCost) -> _StepCost:
        """With what stays and comes of guests, after a step of all that is on the device."""
        how = self._guests_step
        if how is None or not self._guest_buckets:
            return step
        kept_bytes, step_bytes = self._in_buckets(how, self._guest_buckets)
        # The first guests are fetched while what is on the device is stepped.
        coming_bytes = self._guest_buckets[0].coming_bytes if how.prefetches else 0
        # What the step makes first of resident state is counted with it.
        return dataclasses.replace(
            step, state_bytes=step.state_bytes + kept_bytes, step_bytes=max(step.step_bytes + coming_bytes, step_bytes)
        )

    def guest_cost(self) -> GuestCost | None:
        how, buckets = self._guests_step, self._guest_buckets
        if how is None or not buckets:
            return None
        num_launches, launched_bytes = _launched(buckets)
        return GuestCost(
            step_bytes=self._in_buckets(how, buckets)[1],
            in_bytes=sum(bucket.coming_bytes for bucket in buckets),
            out_bytes=sum(bucket.leaving_bytes for bucket in buckets),
            num_copies=sum(2 + 3 * bucket.num_guests for bucket in buckets),
            num_launches=num_launches,
            launched_bytes=launched_bytes,
            num_buckets=len(buckets),
            largest_bytes=max(bucket.coming_bytes for bucket in buckets),
            beside_bytes=max(b.coming_bytes + 2 * b.leaving_bytes for b in buckets) if how.prefetches else 0,
        )

    def _share(self, how: Stepping, trial: _Trial, numbers: list[int], state_bytes: int) -> _BucketCost:
        """What of a bucket's state waits, and what does not."""
        waiting_bytes = unpacked_bytes = scratch_bytes = moved_bytes = 0
        for number, state in zip(numbers, trial.states, strict=True):
            for name, value in state.items():
                if not isinstance(value, torch.Tensor):
                    continue
                slot_bytes = how.waiting_bytes(trial.optimizer, number, name, value)
                if slot_bytes is None:
                    continue
                waiting_bytes += slot_bytes
                moved_bytes += round_up(value.nbytes, self.rounding_bytes)
                if slot_bytes < value.nbytes:
                    unpacked_bytes += round_up(value.nbytes, self.rounding_bytes)
                    scratch_bytes = max(scratch_bytes, how.scratch_bytes(value))
        waiting_bytes += how.padding_bytes if waiting_bytes else 0
        kept_bytes = state_bytes - moved_bytes
        return _BucketCost(waiting_bytes, kept_bytes, unpacked_bytes, trial.step_bytes, scratch_bytes)

    def _counter_bytes(self, optimizer: Optimizer) -> int:
        """The bytes of counters that are on the host in a real run, and were counted here."""
        return self.rounding_bytes * len(host_counters(optimizer)) if self.is_emulated else 0


def _peak_of_step(how: Stepping, buckets: list[_BucketCost], held_bytes: int, *, is_first: bool) -> int:
    """The most that there is in one step, above what the optimizer does not have; state is made in the first."""
    peak_bytes, leaving = 0, _Leaving(how.window_bytes)
    to_come = collections.deque(bucket for bucket in buckets if bucket.travels(how))
    for bucket in buckets:
        if bucket.travels(how):
            to_come.popleft()
            here_bytes = 2 * bucket.guest_bytes if is_first else bucket.coming_bytes
            peak_bytes = max(peak_bytes, held_bytes + leaving.num_bytes + here_bytes)
            leaving.let_go(but=1)
        coming_bytes = _coming_bytes(how, bucket, to_come[0], is_first=is_first) if to_come else 0
        stepping_bytes = bucket.making_bytes if is_first else bucket.stepping_bytes(how)
        peak_bytes = max(peak_bytes, held_bytes + leaving.num_bytes + coming_bytes + stepping_bytes)
        if bucket.travels(how) and how.prefetches:
            leaving.add(bucket)
        held_bytes += bucket.stays_bytes(how) if is_first else 0
    return peak_bytes


def _coming_bytes(how: Stepping, bucket: _BucketCost, following: _BucketCost, *, is_first: bool) -> int:
    """What is fetched beside a bucket's step. While state is made nothing is, and there is none to be fetched."""
    if not how.prefetches or (is_first and bucket.travels(how)):
        return 0
    return 2 * following.guest_bytes if is_first else following.coming_bytes


class _Leaving:
    """What is on its way out: state, and guests, both up to the window."""

    def __init__(self, window_bytes: int) -> None:
        self._window_bytes = window_bytes
        self._state: collections.deque[int] = collections.deque()
        self._guests: collections.deque[int] = collections.deque()

    @property
    def num_bytes(self) -> int:
        return sum(self._state) + sum(self._guests)

    def add(self, bucket: _BucketCost) -> None:
        for queue, num_bytes in ((self._state, bucket.waiting_bytes), (self._guests, bucket.guest_bytes)):
            queue.append(num_bytes)
            while sum(queue) > self._window_bytes:
                queue.popleft()

    def let_go(self, but: int) -> None:
        for queue in (self._state, self._guests):
            while len(queue) > but:
                queue.popleft()


def _each_once(members: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """The parameters in the order of the groups."""
    return list({id(parameter): parameter for group in members for parameter in group}.values())


def _launched(buckets: list[_BucketCost]) -> tuple[int, int]:
    """Operators of a step, and what they read and write."""
    return sum(bucket.num_launches for bucket in buckets), sum(bucket.launched_bytes for bucket in buckets)


def _same_class(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """An optimizer of the same class and hyperparameters over other parameters, without state or hooks."""
    twin = object.__new__(type(optimizer))
    # A scheduler puts a `step` bound to the user's optimizer on the instance: the twin's is that of the class.
    vars(twin).update({name: value for name, value in vars(optimizer).items() if name != "step"})
    for name, value in vars(optimizer).items():
        if name.endswith("_hooks"):
            setattr(twin, name, type(value)())
    twin.param_groups = groups
    twin.state = collections.defaultdict(dict)
    return twin
