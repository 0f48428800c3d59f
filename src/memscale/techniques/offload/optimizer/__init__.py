"""Optimizer offload (exact): state waits on the next tier, and the user's own optimizer steps bucket by bucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from memscale._plan import OPTIMIZER_BUCKET_BYTES, OffloadOptimizer, Reason
from memscale._profile import OptimizerCost, Profile
from memscale.techniques.offload.next_tier import no_next_tier, no_tier_for_plan
from memscale.techniques.technique import RunOption, StateRule, Technique

if TYPE_CHECKING:
    from memscale._decide.choice import RunOptions
    from memscale._decide.cost_model import CostModel
    from memscale._decide.eligible import Eligible
    from memscale._decide.optimizer_model import OptimizerModel
    from memscale._decide.write_plan import Chosen
    from memscale._execute.attachment import Attachment


class _FromTheNextTier:
    """State waits elsewhere; a bucket of it is on the device at a time."""

    def can_step(self, cost: OptimizerCost) -> bool:
        return cost.offloaded_step_bytes is not None

    def resident_bytes(self, model: OptimizerModel, run: RunOptions, streamed_bytes: Any) -> Any:
        whole, rest = model.cost(run).offloaded_state_bytes, model.profile.rest_optimizer
        least = whole if rest is None else min(whole, rest.offloaded_state_bytes)
        return model.left(run, whole, least, streamed_bytes)

    def bytes_away(self, model: OptimizerModel, run: RunOptions, streamed_bytes: Any) -> tuple[Any, Any]:
        nothing = 0 * streamed_bytes
        return nothing, model.cost(run).state_bytes + nothing

    def step_bytes(self, model: OptimizerModel, run: RunOptions, streamed_bytes: Any) -> Any:
        """The largest bucket's."""
        whole, rest = model.cost(run).offloaded_step_bytes, model.profile.rest_optimizer
        assert whole is not None
        least = whole if rest is None else rest.offloaded_step_bytes or 0
        return model.largest_left(run, whole, least, streamed_bytes)

    def step_ms(self, model: OptimizerModel, run: RunOptions, streamed_bytes: Any) -> Any:
        return model.share_left(run, streamed_bytes) * model.in_buckets_ms(model.cost(run))

    def exact_bytes(self, cost: OptimizerCost) -> tuple[int, int]:
        return cost.offloaded_state_bytes, cost.offloaded_step_bytes or 0


def _attach(actions: Sequence[OffloadOptimizer], to: Attachment) -> None:
    to.hold_state(actions, moves=True)


def _values(model: CostModel, eligible: Eligible) -> tuple[bool, ...]:
    return (True,)


def _actions(is_offloaded: bool, profile: Profile) -> Iterator[OffloadOptimizer]:
    yield OffloadOptimizer(OPTIMIZER_BUCKET_BYTES)


def _value(actions: Sequence[OffloadOptimizer], profile: Profile) -> bool:
    return True


def _reason(chosen: Chosen) -> Reason:
    numbers: dict[str, int | float | str] = {
        "state_bytes": chosen.model.optimizer.cost(chosen.choice.run).state_bytes,
        **chosen.part(offloads_optimizer=False),
    }
    return Reason("offload optimizer state: the device holds one bucket of it", numbers)


OPTIMIZER = Technique(
    name="optimizer offload",
    family="offloading",
    switch="enable_offloading",
    actions=(OffloadOptimizer,),
    scope="run",
    hindrance=no_next_tier,
    refusal=no_tier_for_plan,
    option=RunOption(field="offloads_optimizer", values=_values, actions=_actions, value=_value),
    state=StateRule(manner=_FromTheNextTier()),
    attach=_attach,
    place=60,
    words=lambda action: "offload optimizer",
    outcome=lambda actions: "optimizer state",
    outcome_rank=32,
    reason=_reason,
)
