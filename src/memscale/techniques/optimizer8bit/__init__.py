"""Optimizer state in 8 bits (not exact): the user's optimizer stays the user's, its waiting state is packed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from memscale._plan import QuantizeOptimizer, Reason
from memscale._profile import Profile
from memscale.techniques.technique import RunOption, StateRule, Technique, Traced

if TYPE_CHECKING:
    from memscale._decide.chosen import Chosen
    from memscale._decide.eligible import Eligible
    from memscale._execute.attachment import Attachment
    from memscale._planning.trials import Trials


def _attach(actions: Sequence[QuantizeOptimizer], to: Attachment) -> None:
    from memscale.techniques.optimizer8bit.eight_bit import EightBit

    to.hold_state(actions, packer=lambda undo: EightBit(actions[0], to.model, undo, to.device))


def _values(traced: Traced, eligible: Eligible) -> tuple[bool, ...]:
    return (True,) if traced.profile.eight_bit_optimizer is not None else ()


def _actions(is_quantized: bool, profile: Profile) -> Iterator[QuantizeOptimizer]:
    yield QuantizeOptimizer(profile.bucket_bytes)


def _value(actions: Sequence[QuantizeOptimizer], profile: Profile) -> bool:
    return True


def _asked_for(profile: Profile, eligible: Eligible) -> Iterator[QuantizeOptimizer]:
    if profile.optimizer.state_bytes:
        yield QuantizeOptimizer(profile.bucket_bytes)


def _reason(chosen: Chosen) -> Reason:
    numbers = {
        "state_bytes": chosen.model.profile.optimizer.state_bytes,
        "in_8_bit_bytes": chosen.model.optimizer.cost(chosen.choice.run).state_bytes,
        **chosen.part(quantizes_optimizer=False),
    }
    return chosen.reason_of_lossy("use_8bit_optimizer", numbers)


def _rehearse(trials: Trials, eligible: Eligible) -> None:
    trials.cost_in_8_bits()


EIGHT_BIT = Technique(
    name="8-bit optimizer",
    family="8-bit optimizer",
    switch="use_8bit_optimizer",
    actions=(QuantizeOptimizer,),
    scope="run",
    is_exact=False,
    option=RunOption(
        field="quantizes_optimizer",
        values=_values,
        actions=_actions,
        value=_value,
        asked_for=_asked_for,
    ),
    state=StateRule(cost=lambda profile: profile.eight_bit_optimizer),
    step=lambda actions: {"packs": True, "bucket_bytes": min(action.bucket_bytes for action in actions)},
    rehearse=_rehearse,
    attach=_attach,
    place=70,
    words=lambda action: "optimizer in 8 bits",
    outcome=lambda actions: "the optimizer's waiting state, in place",
    outcome_rank=50,
    reason=_reason,
)
