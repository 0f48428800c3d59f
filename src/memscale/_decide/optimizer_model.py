"""The optimizer under any plan, from a profile alone: what it keeps and where, what its step needs and takes. No torch.

`streamed_bytes` are the trainable bytes of blocks that are streamed: a number, or an array of them. Their state is on
the host. They are stepped there, or visit the device for it (`RunOptions.steps_on_device`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from memscale._decide.choice import RunOptions
from memscale._decide.step_time import Moved, Pace, StepWork, Turn, larger, optimizer_calls_ms, smaller
from memscale._profile import BackwardStep, GuestCost, OptimizerCost, Profile
from memscale.techniques.technique import StepManner


class OptimizerModel:
    """The optimizer of one profile, at one pace. What a technique does to it is said by the technique: `StateRule`."""

    def __init__(self, profile: Profile, pace: Pace) -> None:
        self.profile = profile
        self.pace = pace
        self._block_bytes = sum(layer.trainable_bytes for layer in profile.layers if layer.is_block)
        self._other_bytes = sum(layer.trainable_bytes for layer in profile.layers if not layer.is_block)

    def cost(self, run: RunOptions) -> OptimizerCost:
        """The cost with nothing streamed."""
        return self._other_cost(run) or self.profile.optimizer

    def is_itself(self, run: RunOptions) -> bool:
        """Whether it costs what it does by itself."""
        return not any(t.state is not None and t.state.cost is not None for t in run.techniques)

    def _other_cost(self, run: RunOptions) -> OptimizerCost | None:
        """The cost under a technique; None where none has an effect (what cannot be quantised stays as it is)."""
        costs = [t.state.cost for t in run.techniques if t.state is not None and t.state.cost is not None]
        return next((found for cost in costs if (found := cost(self.profile)) is not None), None)

    def manner(self, run: RunOptions) -> StepManner:
        """How the optimizer steps in this run."""
        manners = (t.state.manner for t in run.techniques if t.state is not None and t.state.manner is not None)
        return next(manners, AT_ONCE)

    def can_step(self, run: RunOptions) -> bool:
        """Whether at most one technique says how the optimizer steps, and the optimizer can step so."""
        manners = [t for t in run.techniques if t.state is not None and t.state.manner is not None]
        if run.steps_on_device and self.profile.guests is None:
            return False
        return len(manners) < 2 and self.manner(run).can_step(self.cost(run))

    # ---- bytes

    def resident_bytes(self, run: RunOptions, streamed_bytes: Any) -> Any:
        """State that is on the device all the time."""
        return self.manner(run).resident_bytes(self, run, streamed_bytes)

    def bytes_away(self, run: RunOptions, streamed_bytes: Any) -> tuple[Any, Any]:
        """State that is on the host because its parameters are; and state that may wait anywhere."""
        at_home, anywhere = self.manner(run).bytes_away(self, run, streamed_bytes)
        return (0 * at_home, at_home + anywhere) if run.steps_on_device else (at_home, anywhere)

    def step_bytes(self, run: RunOptions, streamed_bytes: Any) -> Any:
        """What the step needs on top."""
        step_bytes = self.manner(run).step_bytes(self, run, streamed_bytes)
        for guests, is_streamed in self._guests(run, streamed_bytes):
            # What is large and stays is stepped between guests that come and go; what is small needs less than they do.
            beside_bytes = guests.beside_bytes * is_streamed * (step_bytes > guests.step_bytes)
            step_bytes = larger(step_bytes + beside_bytes, guests.step_bytes * is_streamed)
        return step_bytes

    def _guests(self, run: RunOptions, streamed_bytes: Any) -> list[tuple[GuestCost, Any]]:
        """What visits the device to be stepped: blocks, and what is left beside them; and whether any of it does."""
        profile = self.profile
        found = ((profile.guests, 1 * (streamed_bytes > 0)), (profile.rest_guests, 1 * run.streams_rest))
        return [(guests, here) for guests, here in found if guests is not None and run.steps_on_device]

    def unstreamed_bytes(self, run: RunOptions, streamed_bytes: Any) -> Any:
        """The state of parameters that are not streamed."""
        whole, rest = self.cost(run).state_bytes, self.profile.rest_optimizer
        if rest is None:
            return whole + 0 * streamed_bytes
        # State of embeddings is not quantised.
        return self.left(run, whole, min(whole, rest.state_bytes), streamed_bytes)

    def state_of_streamed_byte(self) -> float:
        """State that leaves the device with each trainable byte of a block that is streamed."""
        rest = self.profile.rest_optimizer
        if rest is None or not self._block_bytes:
            return 0.0
        return max(0, self.profile.optimizer.state_bytes - rest.state_bytes) / self._block_bytes

    def largest_left(self, run: RunOptions, whole: int, rest: int, streamed_bytes: Any) -> Any:
        """What is left of a cost of the largest part, which is there until the last block is streamed."""
        least = min(whole, rest) * (self._rest_left(run) > 0)
        return least + (whole - least) * (streamed_bytes < self._block_bytes)

    def left(self, run: RunOptions, whole: Any, rest: int, streamed_bytes: Any) -> Any:
        """What is left of a cost that falls from `whole` to `rest` as blocks are streamed, and on as the rest is."""
        return self._falling(whole, rest, streamed_bytes) - rest * (1 - self._rest_left(run))

    def _falling(self, whole: Any, rest: int, streamed_bytes: Any) -> Any:
        if not self._block_bytes:
            return whole + 0 * streamed_bytes
        return whole - (whole - rest) * (streamed_bytes / self._block_bytes)

    def _rest_left(self, run: RunOptions) -> float:
        """The share of what is no block that is not streamed."""
        total = self._other_bytes
        return 1 - self.profile.rest_trainable_bytes / total if run.streams_rest and total else 1.0

    # ---- time

    def step_ms(self, run: RunOptions, streamed_bytes: Any) -> Any:
        """The step over what is on the device, and over what is streamed: there, or on the host."""
        hardware, works = self.pace.hardware, list(self._guest_works(run, streamed_bytes))
        in_buckets = self.manner(run).work(self, run, streamed_bytes)
        at_once_ms = self.manner(run).step_ms(self, run, streamed_bytes) if in_buckets is None else 0.0
        on_device_ms = at_once_ms + self.works_ms(works if in_buckets is None else [in_buckets, *works])
        if run.steps_on_device or hardware.host_bytes_per_s is None:
            return on_device_ms
        host_bytes_per_s = min(hardware.host_bytes_per_s, hardware.memory_bytes_per_s)
        share_away = 1 - self.share_left(run, streamed_bytes)
        return on_device_ms + share_away * self.cost(run).moved_bytes / host_bytes_per_s * 1e3

    def works_ms(self, works: Sequence[StepWork]) -> Any:
        """Buckets of all kinds in turn: while one is stepped, the next arrives and the last leaves.

        See NOTE [the order of a step] in techniques/offload/optimizer/buckets.py, and NOTE [turns] in step_time.py.
        """
        return self.pace.turns_ms(works) if works else 0.0

    def _guest_works(self, run: RunOptions, streamed_bytes: Any) -> Iterator[StepWork]:
        """The step over what visits the device for it."""
        shares = {id(self.profile.guests): streamed_bytes / max(1, self._block_bytes)}
        for guests, is_streamed in self._guests(run, streamed_bytes):
            share = shares.get(id(guests), is_streamed)
            of_turn = smaller(share, guests.largest_bytes / max(1, guests.in_bytes))
            compute_ms = self.pace.memory_ms(guests.launched_bytes)
            yield StepWork(
                compute_ms=share * compute_ms,
                num_launches=share * guests.num_launches,
                host_ms=share * self.pace.buckets_ms(guests.num_buckets),
                moved=Moved(share * guests.num_copies, share * guests.out_bytes, share * guests.in_bytes),
                turn=Turn(of_turn * guests.in_bytes, of_turn * compute_ms, of_turn * guests.out_bytes),
                travelling_ms=share * compute_ms,
            )

    def share_left(self, run: RunOptions, streamed_bytes: Any) -> Any:
        """The share of trainable bytes that is not streamed."""
        streamed_bytes = streamed_bytes + self.profile.rest_trainable_bytes * run.streams_rest
        return 1 - streamed_bytes / max(1, self._block_bytes + self._other_bytes)

    def compute_ms(self, cost: OptimizerCost, share: Any) -> Any:
        """The time to step this share of the parameters, without launches and transfers."""
        if self.pace.counts_calls:
            moved_bytes, calls_ms = cost.moved_bytes, optimizer_calls_ms(cost.num_tensors)
        else:
            moved_bytes, calls_ms = cost.launched_bytes or cost.moved_bytes, 0.0
        return share * self.pace.memory_ms(moved_bytes) + calls_ms

    def bucketed_work(self, cost: OptimizerCost, share: Any) -> StepWork:
        """A few parameters at a time, with the state where it is: more launches, and Python around each bucket."""
        num_launches, host_ms = share * cost.bucketed_launches, share * self.pace.buckets_ms(cost.num_step_buckets)
        return StepWork(self.compute_ms(cost, share), num_launches, host_ms)

    def in_backward_ms(self, cost: OptimizerCost, step: BackwardStep) -> Any:
        """The same work as at once, with more launches, and Python around each bucket."""
        host_ms = self.pace.buckets_ms(step.num_buckets)
        return self.pace.slowest_ms(self.compute_ms(cost, 1.0), step.num_launches, Moved(), host_ms)

    def travelling_work(self, run: RunOptions, resident_share: float, share: Any) -> StepWork:
        """Bucket by bucket, with state that travels but for what stays of it."""
        cost = self.cost(run)
        sizes, kept = cost.bucket_bytes or (cost.state_bytes,), cost.share(resident_share)
        stays = (False,) * len(sizes) if kept is None else kept.stays
        away = [size for size, does_stay in zip(sizes, stays, strict=True) if not does_stay]
        num_pieces, away_bytes = cost.num_pieces or len(sizes), sum(away)
        num_copies = 2 * num_pieces * away_bytes / max(1, sum(sizes))
        turn_bytes = smaller(share * away_bytes, min(away_bytes, cost.piece_bytes or max(sizes, default=0)))
        byte_ms = self.compute_ms(cost, 1.0) / max(1, sum(sizes))
        return StepWork(
            compute_ms=self.compute_ms(cost, share),
            num_launches=share * cost.bucket_launches,
            host_ms=share * self.pace.buckets_ms(num_pieces),
            moved=Moved(share * num_copies, share * away_bytes, share * away_bytes),
            turn=Turn(turn_bytes, turn_bytes * byte_ms, turn_bytes),
            travelling_ms=share * away_bytes * byte_ms,
        )


class _AtOnce:
    """The step that an optimizer takes by itself. Its state is where its parameters are."""

    def can_step(self, cost: OptimizerCost) -> bool:
        return True

    def resident_bytes(self, model: OptimizerModel, run: RunOptions, streamed_bytes: Any) -> Any:
        return model.unstreamed_bytes(run, streamed_bytes)

    def bytes_away(self, model: OptimizerModel, run: RunOptions, streamed_bytes: Any) -> tuple[Any, Any]:
        whole = model.cost(run).state_bytes
        return whole - self.resident_bytes(model, run, streamed_bytes), 0 * streamed_bytes

    def step_bytes(self, model: OptimizerModel, run: RunOptions, streamed_bytes: Any) -> Any:
        cost, rest = model.cost(run), model.profile.rest_optimizer
        if rest is None:
            return cost.step_bytes + 0 * streamed_bytes
        if not model.is_itself(run) or cost.split_step_bytes is None:
            return model.left(run, cost.step_bytes, min(cost.step_bytes, rest.step_bytes), streamed_bytes)
        # One part needs less than all at once, or more: state is made part by part. See NOTE [two devices].
        is_split = model.share_left(run, streamed_bytes) < 1
        split_bytes = model.largest_left(run, cost.split_step_bytes, rest.step_bytes, streamed_bytes)
        return cost.step_bytes + (split_bytes - cost.step_bytes) * is_split

    def step_ms(self, model: OptimizerModel, run: RunOptions, streamed_bytes: Any) -> Any:
        """All that is on the device.

        See NOTE [two devices] in _profile/optimizer_twin: as soon as something is streamed, there are more launches.
        """
        cost, rest, share = model.cost(run), model.profile.rest_optimizer, model.share_left(run, streamed_bytes)
        num_launches, compute_ms = share * cost.num_launches, model.compute_ms(cost, share)
        if cost.split_launches and model.is_itself(run) and rest is not None:
            split = model.left(run, cost.split_launches, rest.split_launches, streamed_bytes)
            num_launches = num_launches + (split - num_launches) * (share < 1)
        return model.pace.slowest_ms(compute_ms, num_launches, Moved())

    def work(self, model: OptimizerModel, run: RunOptions, streamed_bytes: Any) -> None:
        return None

    def exact_bytes(self, cost: OptimizerCost, run: RunOptions) -> tuple[int, int]:
        return cost.state_bytes, cost.step_bytes


AT_ONCE = _AtOnce()
