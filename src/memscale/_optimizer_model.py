"""The optimizer under any plan, from a profile alone: what it keeps and where, what its step needs and takes. No torch.

`streamed_bytes` are the trainable bytes of blocks that are streamed, whose state is on the host, where it is stepped: a
number, or an array of them.
"""

from __future__ import annotations

from typing import Any

from memscale import _calls
from memscale._choice import Run
from memscale._pace import Moved, Pace
from memscale._profile import OptimizerCost, Profile


class OptimizerModel:
    """Of one profile, at one pace."""

    def __init__(self, profile: Profile, pace: Pace) -> None:
        self.profile = profile
        self.pace = pace
        self._block_bytes = sum(layer.trainable_bytes for layer in profile.layers if layer.is_block)
        self._other_bytes = sum(layer.trainable_bytes for layer in profile.layers if not layer.is_block)

    def cost(self, run: Run) -> OptimizerCost:
        """With nothing streamed."""
        eight_bit = self.profile.eight_bit_optimizer
        # An optimizer that cannot be quantised keeps its state as it is.
        return eight_bit if run.quantizes_optimizer and eight_bit is not None else self.profile.optimizer

    # ---- bytes

    def resident_bytes(self, run: Run, streamed_bytes: Any) -> Any:
        """State that is on the device all the time."""
        if not run.offloads_optimizer:
            return self._unstreamed_bytes(run, streamed_bytes)
        whole, rest = self.cost(run).offloaded_state_bytes, self.profile.rest_optimizer
        rest_bytes = whole if rest is None else min(whole, rest.offloaded_state_bytes)
        return self._falling(whole, rest_bytes, streamed_bytes) - rest_bytes * (1 - self._rest_left(run))

    def bytes_away(self, run: Run, streamed_bytes: Any) -> tuple[Any, Any]:
        """State that is on the host because its parameters are; and state that may wait anywhere."""
        whole = self.cost(run).state_bytes
        nothing = 0 * streamed_bytes
        if run.offloads_optimizer:
            return nothing, whole + nothing
        return whole - self._unstreamed_bytes(run, streamed_bytes), nothing

    def step_bytes(self, run: Run, streamed_bytes: Any) -> Any:
        """What the step needs on top."""
        whole, rest = self.cost(run), self.profile.rest_optimizer
        if run.offloads_optimizer:
            return self._offloaded_step_bytes(run, streamed_bytes)
        rest_bytes = None if rest is None else min(whole.step_bytes, rest.step_bytes)
        step = self._falling(whole.step_bytes, rest_bytes, streamed_bytes)
        return step - (rest_bytes or 0) * (1 - self._rest_left(run))

    def _offloaded_step_bytes(self, run: Run, streamed_bytes: Any) -> Any:
        """The largest bucket's, which is there until the last block is streamed."""
        whole, rest = self.cost(run).offloaded_step_bytes, self.profile.rest_optimizer
        assert whole is not None
        least = whole if rest is None else min(whole, rest.offloaded_step_bytes or 0)
        if run.streams_rest and not self._rest_left(run):
            least = 0
        return least + (whole - least) * (streamed_bytes < self._block_bytes)

    def _unstreamed_bytes(self, run: Run, streamed_bytes: Any) -> Any:
        """State of what is not streamed."""
        whole, rest = self.cost(run).state_bytes, self.profile.rest_optimizer
        if rest is None:
            return whole + 0 * streamed_bytes
        # State of embeddings is not quantised.
        rest_bytes = min(whole, rest.state_bytes)
        return self._falling(whole, rest_bytes, streamed_bytes) - rest_bytes * (1 - self._rest_left(run))

    def _falling(self, whole: int, rest: int | None, streamed_bytes: Any) -> Any:
        """A cost that falls from `whole` to `rest` as blocks are streamed."""
        if rest is None or not self._block_bytes:
            return whole + 0 * streamed_bytes
        return whole - (whole - rest) * (streamed_bytes / self._block_bytes)

    def _rest_left(self, run: Run) -> float:
        """The share of what is no block that is not streamed."""
        total = self._other_bytes
        return 1 - self.profile.rest_trainable_bytes / total if run.streams_rest and total else 1.0

    # ---- time

    def step_ms(self, run: Run, streamed_bytes: Any) -> Any:
        """On the device, and on the host for what is streamed."""
        cost, hardware = self.cost(run), self.pace.hardware
        streamed_bytes = streamed_bytes + self.profile.rest_trainable_bytes * run.streams_rest
        away = streamed_bytes / max(1, self._block_bytes + self._other_bytes)
        on_host_ms = 0.0 * away
        if hardware.host_bytes_per_s is not None:
            host_bytes_per_s = min(hardware.host_bytes_per_s, hardware.memory_bytes_per_s)
            on_host_ms = away * cost.moved_bytes / host_bytes_per_s * 1e3
        counts_calls = self.pace.counts_calls
        moved_bytes = cost.moved_bytes if counts_calls else cost.launched_bytes or cost.moved_bytes
        compute_ms = (1 - away) * moved_bytes / hardware.memory_bytes_per_s * 1e3
        if counts_calls:
            compute_ms = compute_ms + _calls.optimizer_ms(cost.num_tensors)
        if not run.offloads_optimizer:
            return self.pace.slowest_ms(compute_ms, (1 - away) * cost.num_launches, Moved()) + on_host_ms
        return self._offloaded_step_ms(cost, 1 - away, compute_ms) + on_host_ms

    def _offloaded_step_ms(self, cost: OptimizerCost, share: Any, compute_ms: Any) -> Any:
        """Bucket by bucket.

        Side by side, a bucket is stepped and leaves while the next arrives, which takes no longer; the first is waited
        for. See NOTE [what a bucket costs] in techniques/offload/buckets.py.
        """
        pace = self.pace
        num_buckets, bytes_each_way = share * cost.num_buckets, share * cost.state_bytes
        num_launches, num_copies = share * cost.bucket_launches, 2 * num_buckets
        if not pace.overlaps:
            return pace.slowest_ms(compute_ms, num_launches, Moved(num_copies, bytes_each_way, bytes_each_way))
        stepped_ms = pace.slowest_ms(compute_ms, num_launches, Moved(num_copies))
        link_ms = pace.link_ms(bytes_each_way)
        if pace.hardware.link_directions < 2:
            return stepped_ms + 2 * link_ms
        return stepped_ms + link_ms + pace.link_ms(share * cost.first_bucket_bytes)
