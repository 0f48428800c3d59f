"""What an optimizer costs over a share of the model: what is left of its bytes and its time where blocks are streamed.

This is what a way of stepping (`StepManner`) counts with; `optimizer_model.py` decides which way it is. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memscale._decide.choice import RunOptions
from memscale._decide.step_time import Moved, Pace, StepWork, Turn, larger, optimizer_calls_ms, smaller
from memscale._profile import BackwardStep, OptimizerCost, Profile
from memscale.techniques.offload.pinned import PAGE_BYTES


class OptimizerShares:
    """The optimizer of one profile, at one pace."""

    def __init__(self, profile: Profile, pace: Pace) -> None:
        self.profile = profile
        self.pace = pace
        self.block_bytes = sum(layer.trainable_bytes for layer in profile.layers if layer.is_block)
        self._other_bytes = sum(layer.trainable_bytes for layer in profile.layers if not layer.is_block)
        self._costs: dict[RunOptions, OptimizerCost] = {}
        self._travelling: dict[tuple[int, float], tuple[OptimizerCost, int, int]] = {}
        """See `_travelling_bytes`; by costs, which are kept here so that no other takes the id of one that is gone."""

    def cost(self, run: RunOptions) -> OptimizerCost:
        """The cost with nothing streamed."""
        found = self._costs.get(run)
        if found is None:
            found = self._costs[run] = self._other_cost(run) or self.profile.optimizer
        return found

    def is_itself(self, run: RunOptions) -> bool:
        """Whether it costs what it does by itself."""
        return not any(t.state is not None and t.state.cost is not None for t in run.techniques)

    def _other_cost(self, run: RunOptions) -> OptimizerCost | None:
        """The cost under a technique; None where none has an effect (what cannot be quantised stays as it is)."""
        costs = [t.state.cost for t in run.techniques if t.state is not None and t.state.cost is not None]
        return next((found for cost in costs if (found := cost(self.profile)) is not None), None)

    def unstreamed_bytes(self, run: RunOptions, streamed_bytes: Any) -> Any:
        """The state of parameters that are not streamed."""
        whole, rest = self.cost(run).state_bytes, self.profile.rest_optimizer
        if rest is None:
            return whole + 0 * streamed_bytes
        # State of embeddings is not quantised.
        return self.left(run, whole, min(whole, rest.state_bytes), streamed_bytes)

    def staying_bytes(self, run: RunOptions, share: float, streamed_bytes: Any) -> Any:
        """What stays on the device for certain where this share of the state does that is not streamed.

        Whole buckets stay. Where some parameters are streamed, the others come in other buckets than all of them do,
        and up to one of these may be missing among those that stay.
        """
        is_streamed = larger(1 * (streamed_bytes > 0), 1 * run.streams_rest)
        missing_bytes = max(self.cost(run).bucket_bytes, default=0) * is_streamed
        return larger(0, share * self.unstreamed_bytes(run, streamed_bytes) - missing_bytes)

    def bytes_in_pages(self, run: RunOptions) -> int:
        """What all state takes where it waits: each bucket whole pages; and less than a page of the room is of use for
        nothing."""
        cost, guests = self.cost(run), (self.profile.guests, self.profile.rest_guests)
        num_buckets = len(cost.bucket_bytes) + sum(one.num_buckets for one in guests if one is not None)
        return cost.state_bytes + (num_buckets + 1) * PAGE_BYTES if cost.state_bytes else 0

    def state_of_streamed_byte(self) -> float:
        """State that leaves the device with each trainable byte of a block that is streamed."""
        rest = self.profile.rest_optimizer
        if rest is None or not self.block_bytes:
            return 0.0
        return max(0, self.profile.optimizer.state_bytes - rest.state_bytes) / self.block_bytes

    def largest_left(self, run: RunOptions, whole: int, rest: int, streamed_bytes: Any) -> Any:
        """What is left of a cost of the largest part, which is there until the last block is streamed."""
        least = min(whole, rest) * (self._rest_left(run) > 0)
        return least + (whole - least) * (streamed_bytes < self.block_bytes)

    def left(self, run: RunOptions, whole: Any, rest: int, streamed_bytes: Any) -> Any:
        """What is left of a cost that falls from `whole` to `rest` as blocks are streamed, and on as the rest is."""
        return self._falling(whole, rest, streamed_bytes) - rest * (1 - self._rest_left(run))

    def _falling(self, whole: Any, rest: int, streamed_bytes: Any) -> Any:
        if not self.block_bytes:
            return whole + 0 * streamed_bytes
        return whole - (whole - rest) * (streamed_bytes / self.block_bytes)

    def _rest_left(self, run: RunOptions) -> float:
        """The share of what is no block that is not streamed."""
        total = self._other_bytes
        return 1 - self.profile.rest_trainable_bytes / total if run.streams_rest and total else 1.0

    def works_ms(self, works: Sequence[StepWork], early_bytes: int = 0, late_bytes: int = 0) -> Any:
        """Buckets of all kinds in turn: while one is stepped, the next arrives and the last leaves.

        See NOTE [the order of a step] in techniques/offload/optimizer/buckets.py, and NOTE [turns] in step_time.py.
        """
        return self.pace.turns_ms(works, early_bytes, late_bytes) if works else 0.0

    def share_left(self, run: RunOptions, streamed_bytes: Any) -> Any:
        """The share of trainable bytes that is not streamed."""
        streamed_bytes = streamed_bytes + self.profile.rest_trainable_bytes * run.streams_rest
        return 1 - streamed_bytes / max(1, self.block_bytes + self._other_bytes)

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
        away_bytes, whole_bytes = self._travelling_bytes(cost, resident_share)
        sizes = cost.bucket_bytes or (cost.state_bytes,)
        num_pieces = cost.num_pieces or len(sizes)
        num_copies = 2 * num_pieces * away_bytes / max(1, whole_bytes)
        turn_bytes = smaller(share * away_bytes, min(away_bytes, cost.piece_bytes or max(sizes, default=0)))
        byte_ms = self.compute_ms(cost, 1.0) / max(1, whole_bytes)
        return StepWork(
            compute_ms=self.compute_ms(cost, share),
            num_launches=share * cost.bucket_launches,
            host_ms=share * self.pace.buckets_ms(num_pieces),
            moved=Moved(share * num_copies, share * away_bytes, share * away_bytes),
            turn=Turn(turn_bytes, turn_bytes * byte_ms, turn_bytes),
            travelling_ms=share * away_bytes * byte_ms,
        )

    def _travelling_bytes(self, cost: OptimizerCost, resident_share: float) -> tuple[int, int]:
        """The bytes of buckets that travel, and of all. Choices are many, and buckets are: they are added up once."""
        known = self._travelling.get((id(cost), resident_share))
        if known is None:
            sizes, kept = cost.bucket_bytes or (cost.state_bytes,), cost.share(resident_share)
            stays = (False,) * len(sizes) if kept is None else kept.stays
            away_bytes = sum(size for size, does_stay in zip(sizes, stays, strict=True) if not does_stay)
            known = self._travelling[id(cost), resident_share] = cost, away_bytes, sum(sizes)
        return known[1:]
