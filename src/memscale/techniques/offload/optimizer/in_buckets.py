"""The optimizer's step in buckets (exact): state stays where it is, and temporaries are those of a few parameters.

A foreach step makes temporaries as large as all parameters. Nothing moves in this technique, so it is tried before
those that move state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from memscale._plan import STEP_BUCKET_BYTES, Reason, StepInBuckets
from memscale._profile import OptimizerCost, Profile
from memscale.techniques.technique import RunOption, StateRule, Technique, Traced

if TYPE_CHECKING:
    from memscale._decide.choice import RunOptions
    from memscale._decide.chosen import Chosen
    from memscale._decide.eligible import Eligible
    from memscale._decide.optimizer_shares import OptimizerShares
    from memscale._decide.step_time import StepWork
    from memscale._execute.attachment import Attachment


class _WhereItIs:
    """What the step costs for a few parameters at a time, with their state where they are."""

    def can_step(self, cost: OptimizerCost) -> bool:
        return cost.bucketed_step_bytes is not None and cost.bucketed_step_bytes < cost.step_bytes

    def resident_bytes(self, shares: OptimizerShares, run: RunOptions, streamed_bytes: Any) -> Any:
        return shares.unstreamed_bytes(run, streamed_bytes)

    def bytes_away(self, shares: OptimizerShares, run: RunOptions, streamed_bytes: Any) -> tuple[Any, Any]:
        return shares.cost(run).state_bytes - shares.unstreamed_bytes(run, streamed_bytes), 0 * streamed_bytes

    def step_bytes(self, shares: OptimizerShares, run: RunOptions, streamed_bytes: Any) -> Any:
        """The temporaries of the largest bucket."""
        whole, rest = shares.cost(run).bucketed_step_bytes or 0, shares.profile.rest_optimizer
        least = whole if rest is None or rest.bucketed_step_bytes is None else rest.bucketed_step_bytes
        return shares.largest_left(run, whole, least, streamed_bytes)

    def step_ms(self, shares: OptimizerShares, run: RunOptions, streamed_bytes: Any) -> Any:
        return shares.works_ms([self.work(shares, run, streamed_bytes)])

    def work(self, shares: OptimizerShares, run: RunOptions, streamed_bytes: Any) -> StepWork:
        return shares.bucketed_work(shares.cost(run), shares.share_left(run, streamed_bytes))

    def exact_bytes(self, cost: OptimizerCost, run: RunOptions) -> tuple[int, int]:
        in_buckets = cost.bucketed_step_bytes
        return cost.state_bytes, cost.step_bytes if in_buckets is None else in_buckets


def _attach(actions: Sequence[StepInBuckets], to: Attachment) -> None:
    to.hold_state(actions)


def _values(traced: Traced, eligible: Eligible) -> tuple[bool, ...]:
    return (True,)


def _actions(is_in_buckets: bool, profile: Profile) -> Iterator[StepInBuckets]:
    yield StepInBuckets(STEP_BUCKET_BYTES)


def _value(actions: Sequence[StepInBuckets], profile: Profile) -> bool:
    return True


def _reason(chosen: Chosen) -> Reason:
    cost = chosen.model.optimizer.cost(chosen.choice.run)
    numbers: dict[str, int | float | str] = {
        "at_once_bytes": cost.step_bytes,
        "in_buckets_bytes": cost.bucketed_step_bytes or 0,
        **chosen.part(steps_in_buckets=False),
    }
    return Reason("step in buckets: the temporaries are those of one bucket, the state stays where it is", numbers)


BUCKETED_STEP = Technique(
    name="bucketed step",
    family="bucketed step",
    switch="enable_bucketed_step",
    actions=(StepInBuckets,),
    scope="run",
    option=RunOption(field="steps_in_buckets", values=_values, actions=_actions, value=_value),
    state=StateRule(manner=_WhereItIs()),
    step=lambda actions: {"in_buckets": True},
    only_steps=True,
    attach=_attach,
    place=55,
    words=lambda action: "step in buckets",
    outcome=lambda actions: "the optimizer steps a few parameters at a time",
    outcome_rank=36,
    reason=_reason,
)
