"""Steps in backward (exact): a parameter is stepped as soon as its gradient is final, and the gradient is freed then.

At most one large gradient, or those of a few small parameters, exist at a time. The training loop notices this:
gradients cannot be read, clipped or accumulated. So parameters are stepped in backward only where the user asks for it.

Known limits: with steps in backward, parameters are not streamed, and optimizer state waits neither on another tier nor
in 8 bits, because these techniques step after backward. A model that cannot be rehearsed is not checked for weights
that are read after their step (see staged_steps.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from memscale._plan import Action, Reason, check_count
from memscale._profile import OptimizerCost, Profile
from memscale.techniques.technique import RunOption, StateRule, Technique, Traced

if TYPE_CHECKING:
    from memscale._decide.choice import RunOptions
    from memscale._decide.chosen import Chosen
    from memscale._decide.eligible import Eligible
    from memscale._decide.optimizer_shares import OptimizerShares
    from memscale._execute.attachment import Attachment

MAX_BUCKET_BYTES = 4 * 1024 * 1024
"""The most bytes of parameters that are collected before a step. Matrices of a large model are stepped one by one, each
with the few small parameters that came before it; every bucket costs launches and Python."""
_SHARE_OF_MODEL = 64
_MIN_BUCKET_BYTES = 4096
_ASKED_FOR = Reason("asked for")


def bucket_bytes_of(trainable_bytes: int) -> int:
    """Return the bucket size for a model. Small models have small buckets, so that few of their gradients coexist."""
    return min(MAX_BUCKET_BYTES, max(_MIN_BUCKET_BYTES, trainable_bytes // _SHARE_OF_MODEL))


@dataclasses.dataclass(frozen=True, slots=True)
class StepInBackward(Action):
    """Parameters are stepped in backward, as soon as their gradients are final; the gradients are freed then."""

    bucket_bytes: int
    """Parameters are collected until they have this many bytes, and are then stepped together."""
    reason: Reason = _ASKED_FOR

    def __post_init__(self) -> None:
        check_count(self, "bucket_bytes", minimum=1)


class _InBackward:
    """What the step costs after backward: nothing but its end is left then."""

    def can_step(self, cost: OptimizerCost) -> bool:
        return cost.in_backward is not None

    def resident_bytes(self, shares: OptimizerShares, run: RunOptions, streamed_bytes: Any) -> Any:
        return shares.unstreamed_bytes(run, streamed_bytes)

    def bytes_away(self, shares: OptimizerShares, run: RunOptions, streamed_bytes: Any) -> tuple[Any, Any]:
        return 0 * streamed_bytes, 0 * streamed_bytes

    def step_bytes(self, shares: OptimizerShares, run: RunOptions, streamed_bytes: Any) -> Any:
        """No bytes here: `CostModel` counts them in backward."""
        return 0 * streamed_bytes

    def step_ms(self, shares: OptimizerShares, run: RunOptions, streamed_bytes: Any) -> Any:
        cost = shares.cost(run)
        assert cost.in_backward is not None
        return shares.in_backward_ms(cost, cost.in_backward) + 0 * streamed_bytes

    def work(self, shares: OptimizerShares, run: RunOptions, streamed_bytes: Any) -> None:
        return None

    def exact_bytes(self, cost: OptimizerCost, run: RunOptions) -> tuple[int, int]:
        return cost.state_bytes, 0


def _attach(actions: Sequence[StepInBackward], to: Attachment) -> None:
    bucket_bytes = min(action.bucket_bytes for action in actions)
    if to.settings.optimizer_on_stage is not None:
        from memscale.techniques.offload.optimizer.staged_steps import rehearse_steps

        to.held += rehearse_steps(to.model, to.settings.optimizer_on_stage(to.model), bucket_bytes, to.undo)
    else:
        from memscale.techniques.offload.optimizer.backward_steps import BackwardSteps

        BackwardSteps(to.model, bucket_bytes, to.offloading.optimizer).attach(to.undo)


def _values(traced: Traced, eligible: Eligible) -> tuple[bool, ...]:
    return (True,) if traced.profile.optimizer.in_backward is not None else ()


def _actions(is_in_backward: bool, profile: Profile) -> Iterator[StepInBackward]:
    yield StepInBackward(bucket_bytes_of(profile.trainable_bytes))


def _value(actions: Sequence[StepInBackward], profile: Profile) -> bool:
    return True


def _reason(chosen: Chosen) -> Reason:
    numbers: dict[str, int | float | str] = {
        "gradient_bytes": chosen.model.profile.plain.end_bytes,
        **chosen.part(steps_in_backward=False),
    }
    return Reason("step_in_backward=True: no gradient outlives the step of its parameter", numbers)


IN_BACKWARD = Technique(
    name="step in backward",
    family="step in backward",
    switch="step_in_backward",
    actions=(StepInBackward,),
    scope="run",
    changes_loop=True,
    option=RunOption(field="steps_in_backward", values=_values, actions=_actions, value=_value),
    state=StateRule(manner=_InBackward()),
    step=lambda actions: {},  # the parameters have been stepped when the loop calls `step()`
    attach=_attach,
    place=56,
    words=lambda action: "step in backward",
    outcome=lambda actions: "parameters are stepped in backward",
    outcome_rank=37,
    reason=_reason,
)
