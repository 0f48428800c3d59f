"""The optimizer under any plan, from a profile alone: what it keeps and where, what its step needs and takes. No torch.

`streamed_bytes` are the trainable bytes of blocks that are streamed: a number, or an array of them. Their state is on
the host. They are stepped there, or visit the device for it (`RunOptions.steps_on_device`).
"""

from __future__ import annotations

from typing import Any

from memscale._decide.choice import RunOptions
from memscale._decide.step_time import Moved, Pace, larger, optimizer_calls_ms
from memscale._profile import BackwardStep, GuestCost, OptimizerCost, Profile, StateShare
from memscale.techniques.technique import StepManner


class OptimizerModel:
    """The optimizer of one profile, at one pace. What a technique does to it is said by the technique: `StateRule`."""

    def __init__(self, profile: Profile, pace: Pace) -> None:
        self.profile = profile
        self.pace = pace
        self._bucketed_ms: dict[RunOptions, float] = {}
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
            step_bytes = larger(step_bytes, guests.step_bytes * is_streamed)
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
        """Of what is on the device, and of what is streamed: there, or on the host."""
        hardware = self.pace.hardware
        on_device_ms = self.manner(run).step_ms(self, run, streamed_bytes)
        if run.steps_on_device:
            return on_device_ms + self._guests_ms(run, streamed_bytes)
        if hardware.host_bytes_per_s is None:
            return on_device_ms
        host_bytes_per_s = min(hardware.host_bytes_per_s, hardware.memory_bytes_per_s)
        share_away = 1 - self.share_left(run, streamed_bytes)
        return on_device_ms + share_away * self.cost(run).moved_bytes / host_bytes_per_s * 1e3

    def _guests_ms(self, run: RunOptions, streamed_bytes: Any) -> Any:
        """Bucket by bucket: side by side one leaves while the next arrives; the first and the last have no company."""
        pace, total_ms = self.pace, 0.0 * streamed_bytes
        shares = {id(self.profile.guests): streamed_bytes / max(1, self._block_bytes)}
        for guests, is_streamed in self._guests(run, streamed_bytes):
            share = shares.get(id(guests), is_streamed)
            compute_ms = guests.launched_bytes / pace.hardware.memory_bytes_per_s * 1e3
            moved = Moved(share * guests.num_copies, share * guests.out_bytes, share * guests.in_bytes)
            host_ms = share * pace.buckets_ms(guests.num_buckets)
            total_ms = total_ms + pace.slowest_ms(share * compute_ms, share * guests.num_launches, moved, host_ms)
            if pace.overlaps:
                total_ms = total_ms + is_streamed * 2 * pace.link_ms(guests.largest_bytes)
        return total_ms

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

    def bucketed_ms(self, cost: OptimizerCost, share: Any) -> Any:
        """A few parameters at a time, with the state where it is: more launches, and Python around each bucket."""
        num_launches, host_ms = share * cost.bucketed_launches, share * self.pace.buckets_ms(cost.num_step_buckets)
        return self.pace.slowest_ms(self.compute_ms(cost, share), num_launches, Moved(), host_ms)

    def in_backward_ms(self, cost: OptimizerCost, step: BackwardStep) -> Any:
        """The same work as at once, with more launches, and Python around each bucket."""
        host_ms = self.pace.buckets_ms(step.num_buckets)
        return self.pace.slowest_ms(self.compute_ms(cost, 1.0), step.num_launches, Moved(), host_ms)

    def in_buckets_ms(self, run: RunOptions, resident_share: float) -> float:
        """Bucket by bucket. Side by side, one that travels leaves while the next arrives, and both are waited for by
        the next that travels; those that stay are stepped in between.

        See NOTE [what a bucket costs] in techniques/offload/optimizer/buckets.py.
        """
        if run not in self._bucketed_ms:
            cost = self.cost(run)
            self._bucketed_ms[run] = self._travelling_ms(cost, cost.share(resident_share))
        return self._bucketed_ms[run]

    def _travelling_ms(self, cost: OptimizerCost, share: StateShare | None) -> float:
        pace, sizes = self.pace, cost.bucket_bytes or (cost.state_bytes,)
        stays = (False,) * len(sizes) if share is None else share.stays
        compute_ms, num_launches = self.compute_ms(cost, 1.0), cost.bucket_launches
        if not pace.overlaps:
            away = [size for size, does_stay in zip(sizes, stays, strict=True) if not does_stay]
            return float(pace.slowest_ms(compute_ms, num_launches, Moved(2 * len(away), sum(away), sum(away))))
        now_ms = sent_ms = asked_ms = 0.0
        for size, does_stay in zip(sizes, stays, strict=True):
            if not does_stay and pace.hardware.link_directions > 1:
                now_ms = asked_ms = max(now_ms, sent_ms, asked_ms + pace.link_ms(size))
            elif not does_stay:
                now_ms = asked_ms = max(now_ms, sent_ms) + pace.link_ms(size)
            copies, part = Moved(0 if does_stay else 2), size / max(1, sum(sizes))
            now_ms += float(pace.slowest_ms(part * compute_ms, num_launches / len(sizes), copies))
            sent_ms = sent_ms if does_stay else now_ms + pace.link_ms(size)
        return max(now_ms, sent_ms)


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

        See NOTE [two devices] in _profile/optimizer_twin.py: as soon as something is streamed, there are more launches.
        """
        cost, rest, share = model.cost(run), model.profile.rest_optimizer, model.share_left(run, streamed_bytes)
        num_launches, compute_ms = share * cost.num_launches, model.compute_ms(cost, share)
        if cost.split_launches and model.is_itself(run) and rest is not None:
            split = model.left(run, cost.split_launches, rest.split_launches, streamed_bytes)
            num_launches = num_launches + (split - num_launches) * (share < 1)
        return model.pace.slowest_ms(compute_ms, num_launches, Moved())

    def exact_bytes(self, cost: OptimizerCost, run: RunOptions) -> tuple[int, int]:
        return cost.state_bytes, cost.step_bytes


AT_ONCE = _AtOnce()
