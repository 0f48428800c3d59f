"""The optimizer over fake parameters, and what its steps cost."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from memscale._profile import BackwardStep, GuestCost, OptimizerCost, StateShare
from memscale._profile.operator_costs import Books, Work
from memscale._profile.optimizer_twin.bucket_cost import BucketCost, launched, peak_of_step
from memscale._profile.optimizer_twin.same_optimizer import host_counters, over_parameters, same_class
from memscale._profile.optimizer_twin.stepping import Prepare, Stepping
from memscale._profile.rehearsal import device_exists
from memscale._profile.sharding import share_rows
from memscale._torch import private
from memscale._torch.any_value import AnyValue
from memscale._torch.live_bytes import rounding_of
from memscale._torch.optimizer_steps import parameters_of
from memscale._units import round_up

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


class Twin:
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
            self.optimizer = same_class(optimizer, groups)
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
            bucket_launches=launched(every)[0],
            num_pieces=len(every),
            piece_bytes=max((piece.waiting_bytes for piece in every), default=0),
            shares=tuple(shares),
        )

    def _with_share(
        self, how: Stepping, buckets: list[BucketCost], pieces: list[list[BucketCost]], resident_share: float
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
            bucketed_launches=launched(buckets)[0],
            num_step_buckets=len(buckets),
        )

    def in_backward(self, how: Stepping) -> BackwardStep:
        """In buckets whose state stays."""
        buckets = self._try_buckets(how)
        most_bytes = max((bucket.step_bytes for bucket in buckets), default=0)
        return BackwardStep(most_bytes, launched(buckets)[0], len(buckets))

    def _stepped(self, how: Stepping) -> _StepCost:
        """The cost of all buckets, one after the other."""
        buckets = self._try_buckets(how)
        return _StepCost(*self._in_buckets(how, [*buckets, *self._guest_buckets]), *launched(buckets))

    def _looped(self) -> _StepCost:
        """Of a step when something is streamed and the optimizer cannot be split. See NOTE [two devices]."""
        return self._whole(self._again(looped=self._split or self._picked))

    def _again(self, looped: Collection[int] = ()) -> Optimizer:
        """The same over all parameters, without state; those of some groups are stepped one by one."""
        groups = enumerate(self.optimizer.param_groups)
        return same_class(self.optimizer, [{**g, "foreach": False} if i in looped else g for i, g in groups])

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

    def _in_buckets(self, how: Stepping, buckets: list[BucketCost]) -> tuple[int, int]:
        """What is on the device between steps, and the most that there is above it in any step, the first included.

        The buckets are stepped in the executor's order. See NOTE [what a bucket costs] and NOTE [the order of a step]
        in techniques/offload/optimizer/buckets.py.
        """
        order = how.order([bucket.parameter_bytes for bucket in buckets], [bucket.travels(how) for bucket in buckets])
        buckets = [buckets[index] for index in order]
        tables_bytes = how.tables_bytes(self.optimizer, self.device_type) if buckets else 0
        stays_bytes = tables_bytes + sum(bucket.stays_bytes(how) for bucket in buckets)
        first = peak_of_step(how, buckets, tables_bytes, is_first=True)
        later = peak_of_step(how, buckets, stays_bytes, is_first=False)
        return stays_bytes, max(first, later) - stays_bytes

    def _try_buckets(self, how: Stepping) -> list[BucketCost]:
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

    def _try_bucket(self, how: Stepping, bucket: dict[int, nn.Parameter]) -> BucketCost:
        optimizer = over_parameters(self.optimizer, {id(fake): fake for fake in bucket.values()})
        return self._try_over(how, optimizer, bucket)

    def _try_pieces(self, how: Stepping, bucket: dict[int, nn.Parameter]) -> list[BucketCost]:
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
    ) -> BucketCost:
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
        return self._try_over(how, same_class(self.optimizer, chosen), fakes)

    def _try_over(self, how: Stepping, optimizer: Optimizer, bucket: dict[int, nn.Parameter]) -> BucketCost:
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
    def _guest_buckets(self) -> list[BucketCost]:
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

    def _try_guests(self, how: Stepping, sizes: Mapping[torch.Tensor, torch.Size | None]) -> BucketCost:
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
        num_launches, launched_bytes = launched(buckets)
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

    def _share(self, how: Stepping, trial: _Trial, numbers: list[int], state_bytes: int) -> BucketCost:
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
        return BucketCost(waiting_bytes, kept_bytes, unpacked_bytes, trial.step_bytes, scratch_bytes)

    def _counter_bytes(self, optimizer: Optimizer) -> int:
        """The bytes of counters that are on the host in a real run, and were counted here."""
        return self.rounding_bytes * len(host_counters(optimizer)) if self.is_emulated else 0


def _each_once(members: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """The parameters in the order of the groups."""
    return list({id(parameter): parameter for group in members for parameter in group}.values())
