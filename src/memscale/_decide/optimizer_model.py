"""The optimizer under any plan, from a profile alone: what it keeps and where, what its step needs and takes. No torch.

`streamed_bytes` are the trainable bytes of blocks that are streamed: a number, or an array of them. Their state is on
the host. They are stepped there, or visit the device for it (`RunOptions.steps_on_device`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from memscale._decide.choice import RunOptions
from memscale._decide.optimizer_shares import OptimizerShares
from memscale._decide.step_time import Moved, Pace, StepWork, Turn, larger, smaller
from memscale._profile import GuestCost, OptimizerCost, Profile, TraceKey
from memscale.techniques.offload.pinned import PAGE_BYTES
from memscale.techniques.technique import StepManner


class RunCosts(NamedTuple):
    """The optimizer in one run, with so much streamed; see the methods of `OptimizerModel` with these names."""

    resident_bytes: int
    step_bytes: int
    at_home_bytes: int
    anywhere_bytes: int
    ms: float


class _Step(NamedTuple):
    """What the time of a step is made of, however much of the state comes early."""

    works: list[StepWork]
    at_once_ms: Any
    """What is not stepped in buckets."""
    on_host_ms: Any
    """What is stepped on the host; 0: nothing is."""


class OptimizerModel(OptimizerShares):
    """The optimizer of one profile, at one pace. What a technique does to it is said by the technique: `StateRule`."""

    def __init__(self, profile: Profile, pace: Pace) -> None:
        super().__init__(profile, pace)
        self._known: dict[tuple[RunOptions, int], tuple[RunCosts, _Step]] = {}
        self._manners: dict[RunOptions, StepManner] = {}

    def costs_of(self, run: RunOptions, streamed_bytes: int) -> RunCosts:
        """All that a choice is judged by. Choices are many, and few of them differ in this."""
        return self._known_of(run, streamed_bytes)[0]

    def costs_beside(self, base: RunOptions, streamed_bytes: int, run: RunOptions) -> RunCosts:
        """The costs of a run that differs from its base by the state that comes early or leaves late."""
        costs, step = self._known_of(base, streamed_bytes)
        return costs._replace(ms=self._ms_of(step, run, streamed_bytes))

    def _known_of(self, run: RunOptions, streamed_bytes: int) -> tuple[RunCosts, _Step]:
        found = self._known.get((run, streamed_bytes))
        if found is None:
            step = self._step(run, streamed_bytes)
            at_home_bytes, anywhere_bytes = self.bytes_away(run, streamed_bytes)
            costs = RunCosts(
                round(self.resident_bytes(run, streamed_bytes)),
                round(self.step_bytes(run, streamed_bytes)),
                round(at_home_bytes),
                round(anywhere_bytes),
                self._ms_of(step, run, streamed_bytes),
            )
            found = self._known[run, streamed_bytes] = costs, step
        return found

    def manner(self, run: RunOptions) -> StepManner:
        """How the optimizer steps in this run."""
        found = self._manners.get(run)
        if found is None:
            manners = (t.state.manner for t in run.techniques if t.state is not None and t.state.manner is not None)
            found = self._manners[run] = next(manners, AT_ONCE)
        return found

    def can_step(self, run: RunOptions) -> bool:
        """Whether at most one technique says how the optimizer steps, and the optimizer can step so."""
        manners = [t for t in run.techniques if t.state is not None and t.state.manner is not None]
        if run.steps_on_device and self.profile.guests is None:
            return False
        if run.waiting_gradients and (not run.offloads_optimizer or run.quantizes_optimizer):
            return False
        return len(manners) < 2 and self.manner(run).can_step(self.cost(run))

    # ---- bytes

    def resident_bytes(self, run: RunOptions, streamed_bytes: Any) -> Any:
        """State that is on the device all the time."""
        return self.manner(run).resident_bytes(self, run, streamed_bytes)

    def bytes_away(self, run: RunOptions, streamed_bytes: Any) -> tuple[Any, Any]:
        """State that is on the host because its parameters are; and state that may wait anywhere."""
        at_home, anywhere = self.manner(run).bytes_away(self, run, streamed_bytes)
        if run.waiting_gradients:
            anywhere = anywhere + self.waiting_gradient_bytes(run, streamed_bytes) + self._gradient_pages_bytes
        return (0 * at_home, at_home + anywhere) if run.steps_on_device else (at_home, anywhere)

    def step_bytes(self, run: RunOptions, streamed_bytes: Any) -> Any:
        """What the step needs on top."""
        step_bytes = self.manner(run).step_bytes(self, run, streamed_bytes)
        for guests, is_streamed in self._guests(run, streamed_bytes):
            # What is large and stays is stepped between guests that come and go; what is small needs less than they do.
            beside_bytes = guests.beside_bytes * is_streamed * (step_bytes > guests.step_bytes)
            step_bytes = larger(step_bytes + beside_bytes, guests.step_bytes * is_streamed)
        return step_bytes + self.coming_gradient_bytes(run, streamed_bytes)

    # ---- gradients that wait elsewhere until the step

    def waiting_gradient_bytes(self, run: RunOptions, streamed_bytes: Any) -> Any:
        """Gradients of blocks that are not streamed, as far as they wait."""
        trace = self.profile.variants.get(TraceKey(waits=run.waiting_gradients)) if run.waiting_gradients else None
        whole_bytes = 0 if trace is None else max(0, self.profile.plain.end_bytes - trace.end_bytes)
        return whole_bytes * (1 - streamed_bytes / max(1, self.block_bytes))

    def coming_gradient_bytes(self, run: RunOptions, streamed_bytes: Any) -> Any:
        """What such gradients take on the device in the step, at most: those of one turn, and of the next."""
        num_turns = 2 if self.pace.overlaps else 1
        return num_turns * smaller(self.waiting_gradient_bytes(run, streamed_bytes), self.profile.bucket_bytes)

    @property
    def _gradient_pages_bytes(self) -> int:
        """What they take more where they wait: each piece whole pages."""
        return PAGE_BYTES * (self.cost(RunOptions()).num_tensors + self.cost(RunOptions()).num_pieces)

    def _guests(self, run: RunOptions, streamed_bytes: Any) -> list[tuple[GuestCost, Any]]:
        """What visits the device to be stepped: blocks, and what is left beside them; and whether any of it does."""
        profile = self.profile
        found = ((profile.guests, 1 * (streamed_bytes > 0)), (profile.rest_guests, 1 * run.streams_rest))
        return [(guests, here) for guests, here in found if guests is not None and run.steps_on_device]

    # ---- time

    def step_ms(self, run: RunOptions, streamed_bytes: Any) -> Any:
        """The step over what is on the device, and over what is streamed: there, or on the host."""
        return self._ms_of(self._step(run, streamed_bytes), run, streamed_bytes)

    def _ms_of(self, step: _Step, run: RunOptions, streamed_bytes: Any) -> Any:
        """The time of a step with what of this run's state comes early and leaves late."""
        late_bytes = self._whole_late_bytes(run, streamed_bytes)
        return step.at_once_ms + self.works_ms(step.works, run.early_bytes, late_bytes) + step.on_host_ms

    def _step(self, run: RunOptions, streamed_bytes: Any) -> _Step:
        hardware, manner, on_host_ms = self.pace.hardware, self.manner(run), 0.0
        is_at_once = manner.work(self, run, streamed_bytes) is None
        at_once_ms = manner.step_ms(self, run, streamed_bytes) if is_at_once else 0.0
        if not run.steps_on_device and hardware.host_bytes_per_s is not None:
            host_bytes_per_s = min(hardware.host_bytes_per_s, hardware.memory_bytes_per_s)
            share_away = 1 - self.share_left(run, streamed_bytes)
            on_host_ms = share_away * self.cost(run).moved_bytes / host_bytes_per_s * 1e3
        return _Step(self._works(run, streamed_bytes), at_once_ms, on_host_ms)

    def arriving_surplus(self, run: RunOptions, streamed_bytes: int) -> int:
        """How much more arrives in the step than leaves, as far as it is state: so much of it is of use early."""
        works = self._step(run, streamed_bytes).works
        coming, leaving = (sum(getattr(work.moved, name) for work in works) for name in ("in_bytes", "out_bytes"))
        away_bytes = sum(self.bytes_away(run, streamed_bytes)) - self.waiting_gradient_bytes(run, streamed_bytes)
        surplus: int = round(min(coming - leaving, away_bytes))
        return max(0, surplus)

    def may_be_late(self, run: RunOptions, streamed_bytes: int) -> tuple[int, int]:
        """How much of what leaves in the step could leave when it is over, state of what is not streamed; and how much
        of it leaves at a time."""
        in_buckets = self.manner(run).work(self, run, streamed_bytes)
        return (0, 0) if in_buckets is None else (round(in_buckets.moved.out_bytes), round(in_buckets.turn.out_bytes))

    def _whole_late_bytes(self, run: RunOptions, streamed_bytes: Any) -> int:
        """What is late of what may be: whole turns, taken to be as large as the largest."""
        if not run.late_bytes:
            return 0
        most_bytes, turn_bytes = self.may_be_late(run, streamed_bytes)
        return min(most_bytes, run.late_bytes // max(1, turn_bytes) * turn_bytes)

    def other_sizes_save_ms(self, run: RunOptions, streamed_bytes: int) -> tuple[float, float]:
        """What buckets of any smaller size could save of the step at most, and of any larger size.

        Smaller ones shorten the first arrival, and the last step and departure; larger ones are fewer, so that the host
        has less to do for them. These are bounds: smaller ones are more, too, and larger ones take more room.
        """
        works = self._step(run, streamed_bytes).works
        early_late = run.early_bytes, self._whole_late_bytes(run, streamed_bytes)
        now_ms = self.works_ms(works, *early_late)
        smaller = [dataclasses.replace(work, turn=Turn()) for work in works]
        larger = [dataclasses.replace(work, host_ms=0.0, num_launches=0) for work in works]
        smaller_ms, larger_ms = (float(now_ms - self.works_ms(one, *early_late)) for one in (smaller, larger))
        return max(0.0, smaller_ms), max(0.0, larger_ms)

    def _works(self, run: RunOptions, streamed_bytes: Any) -> list[StepWork]:
        """What is stepped in buckets."""
        in_buckets = self.manner(run).work(self, run, streamed_bytes)
        if in_buckets is not None and run.waiting_gradients:
            in_buckets = self._with_gradients(in_buckets, run, streamed_bytes)
        return [*([] if in_buckets is None else [in_buckets]), *self._guest_works(run, streamed_bytes)]

    def _with_gradients(self, work: StepWork, run: RunOptions, streamed_bytes: Any) -> StepWork:
        """The same work where gradients come, too."""
        coming_bytes, turn, moved = self.waiting_gradient_bytes(run, streamed_bytes), work.turn, work.moved
        turn_bytes = smaller(coming_bytes, self.profile.bucket_bytes)
        num_copies = moved.num_copies + coming_bytes / self.profile.bucket_bytes
        return dataclasses.replace(
            work,
            moved=dataclasses.replace(moved, num_copies=num_copies, in_bytes=moved.in_bytes + coming_bytes),
            turn=dataclasses.replace(turn, in_bytes=turn.in_bytes + turn_bytes),
        )

    def _guest_works(self, run: RunOptions, streamed_bytes: Any) -> Iterator[StepWork]:
        """The step over what visits the device for it."""
        shares = {id(self.profile.guests): streamed_bytes / max(1, self.block_bytes)}
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


class _AtOnce:
    """The step that an optimizer takes by itself. Its state is where its parameters are."""

    def can_step(self, cost: OptimizerCost) -> bool:
        return True

    def resident_bytes(self, shares: OptimizerShares, run: RunOptions, streamed_bytes: Any) -> Any:
        return shares.unstreamed_bytes(run, streamed_bytes)

    def bytes_away(self, shares: OptimizerShares, run: RunOptions, streamed_bytes: Any) -> tuple[Any, Any]:
        whole = shares.cost(run).state_bytes
        return whole - self.resident_bytes(shares, run, streamed_bytes), 0 * streamed_bytes

    def step_bytes(self, shares: OptimizerShares, run: RunOptions, streamed_bytes: Any) -> Any:
        cost, rest = shares.cost(run), shares.profile.rest_optimizer
        if rest is None:
            return cost.step_bytes + 0 * streamed_bytes
        if not shares.is_itself(run) or cost.split_step_bytes is None:
            return shares.left(run, cost.step_bytes, min(cost.step_bytes, rest.step_bytes), streamed_bytes)
        # One part needs less than all at once, or more: state is made part by part. See NOTE [two devices].
        is_split = shares.share_left(run, streamed_bytes) < 1
        split_bytes = shares.largest_left(run, cost.split_step_bytes, rest.step_bytes, streamed_bytes)
        return cost.step_bytes + (split_bytes - cost.step_bytes) * is_split

    def step_ms(self, shares: OptimizerShares, run: RunOptions, streamed_bytes: Any) -> Any:
        """All that is on the device.

        See NOTE [two devices] in _profile/optimizer_twin: as soon as something is streamed, there are more launches.
        """
        cost, rest, share = shares.cost(run), shares.profile.rest_optimizer, shares.share_left(run, streamed_bytes)
        num_launches, compute_ms = share * cost.num_launches, shares.compute_ms(cost, share)
        if cost.split_launches and shares.is_itself(run) and rest is not None:
            split = shares.left(run, cost.split_launches, rest.split_launches, streamed_bytes)
            num_launches = num_launches + (split - num_launches) * (share < 1)
        return shares.pace.slowest_ms(compute_ms, num_launches, Moved())

    def work(self, shares: OptimizerShares, run: RunOptions, streamed_bytes: Any) -> None:
        return None

    def exact_bytes(self, cost: OptimizerCost, run: RunOptions) -> tuple[int, int]:
        return cost.state_bytes, cost.step_bytes


AT_ONCE = _AtOnce()
