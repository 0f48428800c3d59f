"""What a step costs in each of the ways in which it can run."""

from __future__ import annotations

import dataclasses
import itertools

from torch.optim import Optimizer

from memscale._profile import BackwardStep, GuestCost, OptimizerCost, StateShare
from memscale._profile.optimizer_twin.bucket_cost import BucketCost, launched
from memscale._profile.optimizer_twin.bucket_trials import BucketTrials
from memscale._profile.optimizer_twin.stepping import Stepping
from memscale._profile.optimizer_twin.twin import Twin


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


@dataclasses.dataclass(frozen=True, slots=True)
class Ways:
    """How an optimizer may step. None: it does not in that way."""

    resident: Stepping | None = None
    """How it steps while its state is on the device; None: all parameters at once, as it does by itself."""
    offloaded: Stepping | None = None
    """How it steps while its state waits elsewhere."""
    in_buckets: Stepping | None = None
    """How it steps in buckets whose state stays where it is."""
    in_backward: Stepping | None = None
    """How it steps inside the backward pass."""
    guests: Stepping | None = None
    """How streamed parameters visit the device to be stepped there; None: they are stepped on the host."""
    is_separable: bool = True
    """Whether it can be stepped in parts."""
    on_device: bool = True
    """Whether it may step with all of its state on the device; False: nobody asks what that takes."""


class StepCosts:
    """A twin's steps at once, in buckets, with its state elsewhere and inside backward."""

    def __init__(self, twin: Twin, guests: Stepping | None) -> None:
        self._twin = twin
        self._buckets = BucketTrials(twin, guests)

    def cost(self, ways: Ways) -> OptimizerCost:
        """What the step takes in each of these ways."""
        cost = OptimizerCost(self._twin.name, 0, 0, 0)
        if ways.on_device:
            cost = self._resident(ways.resident, is_separable=ways.is_separable)
        cost = cost if ways.offloaded is None else self._with_offloaded(cost, ways.offloaded)
        cost = cost if ways.in_buckets is None else self._with_buckets(cost, ways.in_buckets)
        if ways.in_backward is None:
            return cost
        return dataclasses.replace(cost, in_backward=self._in_backward(ways.in_backward))

    def _resident(self, resident: Stepping | None, *, is_separable: bool) -> OptimizerCost:
        """What the step takes where its state is on the device."""
        parameters = list(self._twin.fakes.values())
        if not parameters and not self._buckets.guests:
            return OptimizerCost(self._twin.name, 0, 0, 0)
        split = self._looped() if self._twin.picked and resident is None and not is_separable else None
        if resident is not None:
            step = self._stepped(resident)
        else:
            at_once = split if split is not None and self._twin.split else self._whole(self._twin.again())
            step = self._with_guests(at_once)
        return OptimizerCost(
            self._twin.name,
            step.state_bytes,
            step.step_bytes,
            3 * sum(parameter.nbytes for parameter in parameters) + 2 * step.state_bytes,
            num_tensors=len(parameters),
            num_launches=step.num_launches,
            launched_bytes=step.launched_bytes,
            split_step_bytes=None if split is None else split.step_bytes,
            split_launches=(split or step).num_launches,
        )

    def _with_offloaded(self, cost: OptimizerCost, how: Stepping) -> OptimizerCost:
        """The cost with what a step takes whose state waits elsewhere."""
        if not self._twin.fakes and not self._buckets.guests:
            return dataclasses.replace(cost, offloaded_step_bytes=0)
        buckets = self._buckets.try_all(how)
        pieces = [self._buckets.try_pieces(how, bucket) for bucket in self._buckets.filled(how)]
        every = list(itertools.chain(*pieces))
        stays_bytes, step_bytes = self._buckets.in_turn(how, [*every, *self._buckets.guests])
        shares = (self._with_share(how, buckets, pieces, share) for share in how.resident_shares)
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
        every = list(self._buckets.every(how))
        sizes = [num_bytes for num_bytes, _ in every]
        stays = how.stays(sizes, resident_share, cuts=how.cuts_for(self._twin.optimizer))
        staying = tuple(does_stay for does_stay, (_, filled) in zip(stays, every, strict=True) if filled)
        mixed = [
            [whole.staying()] if does_stay else cut
            for whole, cut, does_stay in zip(buckets, pieces, staying, strict=True)
        ]
        turns = [*itertools.chain(*mixed), *self._buckets.guests]
        return StateShare(resident_share, *self._buckets.in_turn(how, turns), staying)

    def _with_buckets(self, cost: OptimizerCost, how: Stepping) -> OptimizerCost:
        """The cost with that of a step in buckets whose state stays, where one at once needs a copy of everything."""
        if not self._twin.fakes or not any(group.get("foreach") for group in self._twin.optimizer.param_groups):
            return cost  # one parameter after the other takes no less in buckets
        buckets = self._buckets.try_all(how)
        return dataclasses.replace(
            cost,
            bucketed_step_bytes=self._buckets.in_turn(how, [*buckets, *self._buckets.guests])[1],
            bucketed_launches=launched(buckets)[0],
            num_step_buckets=len(buckets),
        )

    def _in_backward(self, how: Stepping) -> BackwardStep:
        """The cost of stepping in backward, in buckets whose state stays."""
        buckets = self._buckets.try_all(how)
        most_bytes = max((bucket.step_bytes for bucket in buckets), default=0)
        return BackwardStep(most_bytes, launched(buckets)[0], len(buckets))

    def guest_cost(self) -> GuestCost | None:
        how, buckets = self._buckets.how_guests, self._buckets.guests
        if how is None or not buckets:
            return None
        num_launches, launched_bytes = launched(buckets)
        return GuestCost(
            step_bytes=self._buckets.in_turn(how, buckets)[1],
            in_bytes=sum(bucket.coming_bytes for bucket in buckets),
            out_bytes=sum(bucket.leaving_bytes for bucket in buckets),
            num_copies=sum(2 + 3 * bucket.num_guests for bucket in buckets),
            num_launches=num_launches,
            launched_bytes=launched_bytes,
            num_buckets=len(buckets),
            largest_bytes=max(bucket.coming_bytes for bucket in buckets),
            beside_bytes=max(b.coming_bytes + 2 * b.leaving_bytes for b in buckets) if how.prefetches else 0,
        )

    def _stepped(self, how: Stepping) -> _StepCost:
        """The cost of all buckets, one after the other."""
        buckets = self._buckets.try_all(how)
        return _StepCost(*self._buckets.in_turn(how, [*buckets, *self._buckets.guests]), *launched(buckets))

    def _looped(self) -> _StepCost:
        """The cost of a step when something is streamed and the optimizer cannot be split. See NOTE [two devices]."""
        return self._whole(self._twin.again(looped=self._twin.split or self._twin.picked))

    def _whole(self, optimizer: Optimizer) -> _StepCost:
        """The cost of a step of all parameters at once."""
        trial = self._twin.tried(optimizer, self._twin.fakes)
        state_bytes = trial.state_bytes - self._twin.counter_bytes(trial.optimizer)
        return _StepCost(state_bytes, trial.step_bytes, trial.num_launches, trial.launched_bytes)

    def _with_guests(self, step: _StepCost) -> _StepCost:
        """The cost with what stays and comes of guests, after a step of all that is on the device."""
        how = self._buckets.how_guests
        if how is None or not self._buckets.guests:
            return step
        kept_bytes, step_bytes = self._buckets.in_turn(how, self._buckets.guests)
        # The first guests are fetched while what is on the device is stepped.
        coming_bytes = self._buckets.guests[0].coming_bytes if how.prefetches else 0
        # What the step makes first of resident state is counted with it.
        return dataclasses.replace(
            step, state_bytes=step.state_bytes + kept_bytes, step_bytes=max(step.step_bytes + coming_bytes, step_bytes)
        )
