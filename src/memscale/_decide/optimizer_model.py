"""The optimizer under any plan, from a profile alone: what it keeps and where, what its step needs and takes. No torch.

`streamed_bytes` are the trainable bytes of blocks that are streamed, whose state is on the host, where it is stepped: a
number, or an array of them.
"""

from __future__ import annotations

from typing import Any

from memscale._decide.choice import RunOptions
from memscale._decide.step_time import Moved, Pace, optimizer_calls_ms
from memscale._profile import OptimizerCost, Profile, StateShare


class OptimizerModel:
    """Of one profile, at one pace."""

    def __init__(self, profile: Profile, pace: Pace) -> None:
        self.profile = profile
        self.pace = pace
        self._block_bytes = sum(layer.trainable_bytes for layer in profile.layers if layer.is_block)
        self._bucketed_ms: dict[RunOptions, float] = {}
        self._other_bytes = sum(layer.trainable_bytes for layer in profile.layers if not layer.is_block)

    def cost(self, run: RunOptions) -> OptimizerCost:
        """With nothing streamed."""
        eight_bit = self.profile.eight_bit_optimizer
        # An optimizer that cannot be quantised keeps its state as it is.
        return eight_bit if run.quantizes_optimizer and eight_bit is not None else self.profile.optimizer

    def can_step_in_buckets(self, run: RunOptions) -> bool:
        """Whether stepping in buckets is another way than this run's own: state that travels, is unpacked, or belongs
        to parameters some of which are streamed is stepped a few parameters at a time anyhow."""
        cost = self.cost(run)
        is_whole = not (run.offloads_optimizer or run.quantizes_optimizer or run.streams_rest)
        return is_whole and cost.bucketed_step_bytes is not None and cost.bucketed_step_bytes < cost.step_bytes

    # ---- bytes

    def resident_bytes(self, run: RunOptions, streamed_bytes: Any) -> Any:
        """State that is on the device all the time."""
        if not run.offloads_optimizer:
            return self._unstreamed_bytes(run, streamed_bytes)
        whole, rest = self.cost(run).offloaded_state_bytes, self.profile.rest_optimizer
        of_rest = whole if rest is None else min(whole, rest.offloaded_state_bytes)
        least = self._left(run, whole, of_rest, streamed_bytes)
        share = self._resident_share(run)
        return least if not share else least + share * (self._unstreamed_bytes(run, streamed_bytes) - least)

    def _resident_share(self, run: RunOptions) -> float:
        """Of the state that could wait elsewhere, what stays here: whole buckets, so not just what was asked for."""
        cost = self.cost(run)
        share, away = cost.share(run.resident_share), cost.state_bytes - cost.offloaded_state_bytes
        return 0.0 if share is None or not away else (share.state_bytes - cost.offloaded_state_bytes) / away

    def bytes_away(self, run: RunOptions, streamed_bytes: Any) -> tuple[Any, Any]:
        """State that is on the host because its parameters are; and state that may wait anywhere."""
        whole = self.cost(run).state_bytes
        nothing = 0 * streamed_bytes
        if run.offloads_optimizer:
            return nothing, whole * (1 - self._resident_share(run)) + nothing
        return whole - self._unstreamed_bytes(run, streamed_bytes), nothing

    def step_bytes(self, run: RunOptions, streamed_bytes: Any) -> Any:
        """What the step needs on top."""
        if run.offloads_optimizer:
            return self._offloaded_step_bytes(run, streamed_bytes)
        cost, rest = self.cost(run), self.profile.rest_optimizer
        if run.steps_in_buckets and cost.bucketed_step_bytes is not None:
            of_rest = cost if rest is None or rest.bucketed_step_bytes is None else rest
            return self._largest_left(run, cost.bucketed_step_bytes, of_rest.bucketed_step_bytes or 0, streamed_bytes)
        if rest is None:
            return cost.step_bytes + 0 * streamed_bytes
        if run.quantizes_optimizer or cost.split_step_bytes is None:
            return self._left(run, cost.step_bytes, min(cost.step_bytes, rest.step_bytes), streamed_bytes)
        # One part needs less than all at once, or more: state is made part by part. See NOTE [two devices].
        is_split = self._share_left(run, streamed_bytes) < 1
        split_bytes = self._largest_left(run, cost.split_step_bytes, rest.step_bytes, streamed_bytes)
        return cost.step_bytes + (split_bytes - cost.step_bytes) * is_split

    def _largest_left(self, run: RunOptions, whole: int, rest: int, streamed_bytes: Any) -> Any:
        """Of a cost of the largest part, which is there until the last block is streamed."""
        least = min(whole, rest) * (self._rest_left(run) > 0)
        return least + (whole - least) * (streamed_bytes < self._block_bytes)

    def _offloaded_step_bytes(self, run: RunOptions, streamed_bytes: Any) -> Any:
        """The largest bucket's, and what travels beside it."""
        cost, rest = self.cost(run), self.profile.rest_optimizer
        share = cost.share(run.resident_share)
        if share is not None:
            of_rest = share if rest is None else rest.share(run.resident_share)
            return self._largest_left(run, share.step_bytes, of_rest.step_bytes if of_rest else 0, streamed_bytes)
        whole = cost.offloaded_step_bytes
        assert whole is not None
        return self._largest_left(run, whole, whole if rest is None else rest.offloaded_step_bytes or 0, streamed_bytes)

    def _unstreamed_bytes(self, run: RunOptions, streamed_bytes: Any) -> Any:
        """State of what is not streamed."""
        whole, rest = self.cost(run).state_bytes, self.profile.rest_optimizer
        if rest is None:
            return whole + 0 * streamed_bytes
        # State of embeddings is not quantised.
        return self._left(run, whole, min(whole, rest.state_bytes), streamed_bytes)

    def _left(self, run: RunOptions, whole: Any, rest: int, streamed_bytes: Any) -> Any:
        """Of a cost that falls from `whole` to `rest` as blocks are streamed, and on as the rest is."""
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
        """On the device, and on the host for what is streamed."""
        hardware = self.pace.hardware
        if run.offloads_optimizer:
            on_device_ms = self._share_left(run, streamed_bytes) * self._in_buckets_ms(run)
        else:
            on_device_ms = self._at_once_ms(run, streamed_bytes)
        if hardware.host_bytes_per_s is None:
            return on_device_ms
        host_bytes_per_s = min(hardware.host_bytes_per_s, hardware.memory_bytes_per_s)
        share_away = 1 - self._share_left(run, streamed_bytes)
        return on_device_ms + share_away * self.cost(run).moved_bytes / host_bytes_per_s * 1e3

    def _share_left(self, run: RunOptions, streamed_bytes: Any) -> Any:
        """The share of trainable bytes that is not streamed."""
        streamed_bytes = streamed_bytes + self.profile.rest_trainable_bytes * run.streams_rest
        return 1 - streamed_bytes / max(1, self._block_bytes + self._other_bytes)

    def _at_once_ms(self, run: RunOptions, streamed_bytes: Any) -> Any:
        """All that is on the device.

        See NOTE [two devices] in _profile/optimizers.py: as soon as something is streamed, there are more launches.
        """
        cost, rest, share = self.cost(run), self.profile.rest_optimizer, self._share_left(run, streamed_bytes)
        num_launches, compute_ms = share * cost.num_launches, self._compute_ms(cost, share)
        if run.steps_in_buckets:
            num_launches, host_ms = share * cost.bucketed_launches, share * self.pace.buckets_ms(cost.num_step_buckets)
            return self.pace.slowest_ms(compute_ms, num_launches, Moved(), host_ms)
        if cost.split_launches and not run.quantizes_optimizer and rest is not None:
            split = self._left(run, cost.split_launches, rest.split_launches, streamed_bytes)
            num_launches = num_launches + (split - num_launches) * (share < 1)
        return self.pace.slowest_ms(compute_ms, num_launches, Moved())

    def _compute_ms(self, cost: OptimizerCost, share: Any) -> Any:
        if self.pace.counts_calls:
            moved_bytes, calls_ms = cost.moved_bytes, optimizer_calls_ms(cost.num_tensors)
        else:
            moved_bytes, calls_ms = cost.launched_bytes or cost.moved_bytes, 0.0
        return share * moved_bytes / self.pace.hardware.memory_bytes_per_s * 1e3 + calls_ms

    def _in_buckets_ms(self, run: RunOptions) -> float:
        """Bucket by bucket. Side by side, one that travels leaves while the next arrives, and both are waited for by
        the next that travels; those that stay are stepped in between.

        See NOTE [what a bucket costs] in techniques/offload/buckets.py.
        """
        if run not in self._bucketed_ms:
            self._bucketed_ms[run] = self._travelling_ms(self.cost(run), self.cost(run).share(run.resident_share))
        return self._bucketed_ms[run]

    def _travelling_ms(self, cost: OptimizerCost, share: StateShare | None) -> float:
        pace, sizes = self.pace, cost.bucket_bytes or (cost.state_bytes,)
        stays = (False,) * len(sizes) if share is None else share.stays
        compute_ms, num_launches = self._compute_ms(cost, 1.0), cost.bucket_launches
        if not pace.overlaps:
            away = [size for size, does_stay in zip(sizes, stays, strict=True) if not does_stay]
            return float(pace.slowest_ms(compute_ms, num_launches, Moved(2 * len(away), sum(away), sum(away))))
        now_ms = sent_ms = asked_ms = 0.0
        for size, does_stay in zip(sizes, stays, strict=True):
            if not does_stay and pace.hardware.link_directions > 1:
                now_ms = asked_ms = max(now_ms, sent_ms, asked_ms + pace.link_ms(size))
            elif not does_stay:
                now_ms = asked_ms = max(now_ms, sent_ms) + pace.link_ms(size)
            copies = Moved(0 if does_stay else 2)
            part = size / max(1, sum(sizes))
            now_ms += float(pace.slowest_ms(part * compute_ms, num_launches / len(sizes), copies))
            sent_ms = sent_ms if does_stay else now_ms + pace.link_ms(size)
        return max(now_ms, sent_ms)
