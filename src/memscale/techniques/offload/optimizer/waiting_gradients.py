"""Gradients wait in host memory between backward and the optimizer's step (exact), while their weights stay.

A gradient leaves as soon as it is final and comes back for its bucket's turn in the step. In the step that gains
nothing over optimizer state that waits: a byte away is a byte that comes. But a block whose gradients are away needs so
much less when backward is over, so that its weights can stay, where it would have to be streamed: computed again, and
fetched twice. So it pays where activations are small beside weights.

The training loop may accumulate gradients and zero them. Reading, clipping, scaling or changing them before the step
raises (`_torch/waiting_gradients.py`), so no mode turns it on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from memscale._errors import ConfigError
from memscale._plan import OPTIMIZER_BUCKET_BYTES, Action, LayerAction, Reason, check_count
from memscale._profile import KEEP, Profile, TraceKey
from memscale.techniques.offload.next_tier import no_next_tier, no_tier_for_plan
from memscale.techniques.technique import RunOption, Technique, Traced

if TYPE_CHECKING:
    from memscale._decide.chosen import Chosen
    from memscale._decide.eligible import Eligible
    from memscale._execute.attachment import Attachment
    from memscale._planning.trials import Trials

SHARES = (0.5, 1.0)
"""The shares of each block's gradients that are tried."""
_ASKED_FOR = Reason("asked for")


@dataclasses.dataclass(frozen=True, slots=True)
class OffloadGradients(LayerAction):
    """Gradients of this layer's parameters wait in host memory until the optimizer steps. Those of streamed parameters
    do anyway."""

    module_fqn: str
    share: float = 1.0
    """The part of them that does: the largest ones, at most this share of the bytes."""
    bucket_bytes: int = OPTIMIZER_BUCKET_BYTES
    """The gradient of a larger parameter waits in the stretches in which the optimizer steps such a parameter."""
    reason: Reason = _ASKED_FOR

    def __post_init__(self) -> None:
        if not (isinstance(self.share, int | float) and 0 < self.share <= 1):
            raise ConfigError(f"share={self.share!r} is not allowed; it must be a number in (0, 1]")
        check_count(self, "bucket_bytes", minimum=1)


def _attach(actions: Sequence[OffloadGradients], to: Attachment) -> None:
    from memscale.techniques.offload.optimizer.gradient_homes import GradientHomes, choose_waiting

    homes = GradientHomes(to.open_tier(), min(action.bucket_bytes for action in actions))
    to.users["gradients"] = homes
    layers = []
    for action in actions:
        every = [p for p in to.find_module(action).parameters() if p.requires_grad and p.is_leaf]
        here = [p for p in every if p.device.type == to.device.type]
        layers.append(choose_waiting(here, action.share))
    homes.watch(layers, to.undo)


def _values(traced: Traced, eligible: Eligible) -> tuple[float, ...]:
    return tuple(share for share in SHARES if TraceKey(waits=share) in traced.sizes)


def _actions(share: float, profile: Profile) -> Iterator[OffloadGradients]:
    for layer in profile.layers:
        if layer.is_block:
            yield OffloadGradients(layer.module_fqn, share, profile.bucket_bytes)


def _value(actions: Sequence[OffloadGradients], profile: Profile) -> float:
    return max(action.share for action in actions)


def _rehearse(trials: Trials, eligible: Eligible) -> None:
    """Every treatment of blocks, with gradients that wait."""
    profile = trials.profile
    is_shared = profile.communication_bytes > 0 or profile.optimizer.offloaded_step_bytes is None
    if trials.is_compiled or is_shared:
        return  # the compiler would trace hooks, ranks exchange gradients, or the step is not taken in buckets
    blocks, variants = tuple(trials.rehearsal.blocks), dict[TraceKey, tuple[Action, ...]]()
    for share in SHARES:
        waiting = tuple(OffloadGradients(module_fqn, share, profile.bucket_bytes) for module_fqn in blocks)
        for treatment, actions in {KEEP: (), **trials.treatments(eligible)}.items():
            if treatment == KEEP or TraceKey(treatment) in profile.variants:
                variants[TraceKey(treatment, waits=share)] = (*actions, *waiting)
    trials.try_variants(variants, eligible)


def _reason(chosen: Chosen) -> Reason:
    model, run = chosen.model, chosen.choice.run
    numbers: dict[str, int | float | str] = {
        "gradient_bytes": round(model.optimizer.waiting_gradient_bytes(run, chosen.streamed_bytes)),
        "share": run.waiting_gradients,
        **chosen.part(waiting_gradients=0.0),
    }
    return Reason("gradients wait on the host until the step: blocks need not be streamed to make room", numbers)


def _words(action: OffloadGradients) -> str:
    return "offload gradients" + (f": {action.share:.0%} of each block's" if action.share < 1 else "")


GRADIENTS = Technique(
    name="gradient offload",
    family="gradient offload",
    switch="enable_gradient_offload",
    actions=(OffloadGradients,),
    scope="run",
    travels=True,
    hindrance=no_next_tier,
    refusal=no_tier_for_plan,
    option=RunOption(field="waiting_gradients", values=_values, actions=_actions, value=_value),
    rehearse=_rehearse,
    attach=_attach,
    place=82,
    words=_words,
    said_once=lambda actions: actions[:1],
    outcome=lambda actions: f"gradients of {len(actions)} blocks wait on the host until the step",
    outcome_rank=38,
    reason=_reason,
)
