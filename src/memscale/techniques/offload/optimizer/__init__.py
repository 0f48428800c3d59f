"""Optimizer offload (exact): state waits on the next tier, and the user's own optimizer steps bucket by bucket.

in_buckets, in_backward, on_device                   records of other techniques that change the step
early_state, late_state                              and of those by which state travels beside forward and backward
adoption, adopted_optimizer, loaded_state            the user's optimizer, whose state waits
buckets, bucket_transfers, guests                    what is stepped together, and how it comes and goes
early_arrivals, late_departures                      before the step begins, and when it is over
waiting_gradients, gradient_homes                    gradients that wait between backward and the step
backward_steps, staged_steps                         steps in backward, and how a rehearsal runs them
separable, implementations, in_parts, resumed_steps  a step on some of the parameters, and one that goes on
shared_memory                                        parameters that lie in one memory
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from memscale._plan import OPTIMIZER_BUCKET_BYTES, OffloadOptimizer, Reason
from memscale._profile import OptimizerCost, Profile
from memscale.techniques.offload.next_tier import no_next_tier, no_tier_for_plan
from memscale.techniques.technique import RunOption, StateRule, Technique, Traced, Unrehearsed

if TYPE_CHECKING:
    from memscale._decide.choice import RunOptions
    from memscale._decide.chosen import Chosen
    from memscale._decide.eligible import Eligible
    from memscale._decide.optimizer_shares import OptimizerShares
    from memscale._decide.step_time import StepWork
    from memscale._execute.attachment import Attachment


class _FromTheNextTier:
    """What the step costs if state waits on the next tier and one bucket of it is on the device at a time."""

    def can_step(self, cost: OptimizerCost) -> bool:
        return cost.offloaded_step_bytes is not None

    def resident_bytes(self, shares: OptimizerShares, run: RunOptions, streamed_bytes: Any) -> Any:
        whole, rest = shares.cost(run).offloaded_state_bytes, shares.profile.rest_optimizer
        of_rest = whole if rest is None else min(whole, rest.offloaded_state_bytes)
        least, share = shares.left(run, whole, of_rest, streamed_bytes), self._resident_share(shares, run)
        return least if not share else least + share * (shares.unstreamed_bytes(run, streamed_bytes) - least)

    def _resident_share(self, shares: OptimizerShares, run: RunOptions) -> float:
        """The share of the movable state that stays: whole buckets stay, so it differs from what was asked for."""
        cost = shares.cost(run)
        share, away = cost.share(resident_share(run)), cost.state_bytes - cost.offloaded_state_bytes
        return 0.0 if share is None or not away else (share.state_bytes - cost.offloaded_state_bytes) / away

    def bytes_away(self, shares: OptimizerShares, run: RunOptions, streamed_bytes: Any) -> tuple[Any, Any]:
        """All but what stays for certain."""
        stays_bytes = shares.staying_bytes(run, self._resident_share(shares, run), streamed_bytes)
        return 0 * streamed_bytes, shares.bytes_in_pages(run) - stays_bytes

    def step_bytes(self, shares: OptimizerShares, run: RunOptions, streamed_bytes: Any) -> Any:
        """The bytes of the largest bucket's step and of the state that travels beside it."""
        cost, rest = shares.cost(run), shares.profile.rest_optimizer
        share = cost.share(resident_share(run))
        if share is not None:
            of_rest = share if rest is None else rest.share(resident_share(run))
            return shares.largest_left(run, share.step_bytes, of_rest.step_bytes if of_rest else 0, streamed_bytes)
        whole = cost.offloaded_step_bytes
        assert whole is not None
        least = whole if rest is None else rest.offloaded_step_bytes or 0
        return shares.largest_left(run, whole, least, streamed_bytes)

    def step_ms(self, shares: OptimizerShares, run: RunOptions, streamed_bytes: Any) -> Any:
        return shares.works_ms([self.work(shares, run, streamed_bytes)])

    def work(self, shares: OptimizerShares, run: RunOptions, streamed_bytes: Any) -> StepWork:
        return shares.travelling_work(run, resident_share(run), shares.share_left(run, streamed_bytes))

    def exact_bytes(self, cost: OptimizerCost, run: RunOptions) -> tuple[int, int]:
        share = cost.share(resident_share(run))
        if share is not None:
            return share.state_bytes, share.step_bytes
        return cost.offloaded_state_bytes, cost.offloaded_step_bytes or 0


def resident_share(run: RunOptions) -> float:
    """The share of the state that stays on the device."""
    return 1.0 - run.offloads_optimizer


def _attach(actions: Sequence[OffloadOptimizer], to: Attachment) -> None:
    to.hold_state(actions, moves=True, resident_share=max(action.resident_share for action in actions))


def _values(traced: Traced, eligible: Eligible) -> tuple[float, ...]:
    return (1.0,)  # plans that send a share away are derived from plans that send all of it


def _actions(share_away: float, profile: Profile) -> Iterator[OffloadOptimizer]:
    yield OffloadOptimizer(profile.bucket_bytes, 1.0 - share_away)


def _value(actions: Sequence[OffloadOptimizer], profile: Profile) -> float:
    return 1.0 - max(action.resident_share for action in actions)


def _step(actions: Sequence[OffloadOptimizer]) -> dict[str, Any]:
    return {
        "moves": True,
        "resident_share": max(action.resident_share for action in actions),
        "bucket_bytes": min(action.bucket_bytes for action in actions),
    }


def _careful(model: Unrehearsed) -> Iterator[OffloadOptimizer]:
    if model.can_move_state and model.state_is_large:
        yield OffloadOptimizer(OPTIMIZER_BUCKET_BYTES)


def _words(action: OffloadOptimizer) -> str:
    return "offload optimizer" + (f": {1 - action.resident_share:.1%} of its state" if action.resident_share else "")


def _reason(chosen: Chosen) -> Reason:
    model, run = chosen.model, chosen.choice.run
    numbers: dict[str, int | float | str] = {
        "state_bytes": model.optimizer.cost(run).state_bytes,
        **chosen.bucket_size(),
        **chosen.part(offloads_optimizer=0.0),
    }
    if not resident_share(run):
        return Reason("offload optimizer state: the device holds one bucket of it", numbers)
    numbers["resident_bytes"] = round(model.optimizer.resident_bytes(run, 0))
    return Reason("offload a share of the optimizer state: the least that is considered and fits", numbers)


OPTIMIZER = Technique(
    name="optimizer offload",
    family="offloading",
    switch="enable_offloading",
    actions=(OffloadOptimizer,),
    scope="run",
    travels=True,
    hindrance=no_next_tier,
    refusal=no_tier_for_plan,
    option=RunOption(field="offloads_optimizer", values=_values, actions=_actions, value=_value),
    state=StateRule(manner=_FromTheNextTier()),
    step=_step,
    only_steps=True,
    careful=_careful,
    attach=_attach,
    place=60,
    words=_words,
    outcome=lambda actions: "optimizer state",
    outcome_rank=32,
    reason=_reason,
)
