"""State leaves under the next forward (exact): the step does not wait for the last of it.

When a step is over, gradients go, and forward has not made its activations yet. So the last buckets of the state may
still be there while the first blocks compute. The step is shorter by the time that they take to leave, wherever as much
comes early (`early_state.py`): both directions of the link set its pace. `late_departures.py` says when it goes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from memscale._plan import LayerAction, Reason, check_count
from memscale._profile import Profile
from memscale.techniques.offload.optimizer.early_state import hindrance
from memscale.techniques.technique import RunOption, Technique, Traced

if TYPE_CHECKING:
    from memscale._decide.chosen import Chosen
    from memscale._decide.eligible import Eligible
    from memscale._execute.attachment import Attachment

_ASKED_FOR = Reason("asked for")


@dataclasses.dataclass(frozen=True, slots=True)
class SendStateLate(LayerAction):
    """So much of the optimizer's state may still leave when a step is over, until just before this layer's forward."""

    module_fqn: str
    num_bytes: int
    """How much is let go of there: whole buckets are late, never more than those layers together have that the forward
    has not come to."""
    reason: Reason = _ASKED_FOR

    def __post_init__(self) -> None:
        check_count(self, "num_bytes", minimum=1)


def _attach(actions: Sequence[SendStateLate], to: Attachment) -> None:
    to.late = actions


def _values(traced: Traced, eligible: Eligible) -> tuple[Any, ...]:
    return ()  # plans with it are derived from plans without


def _actions(late: tuple[tuple[str, int], ...], profile: Profile) -> Iterator[SendStateLate]:
    for module_fqn, num_bytes in late:
        yield SendStateLate(module_fqn, num_bytes)


def _value(actions: Sequence[SendStateLate], profile: Profile) -> tuple[tuple[str, int], ...]:
    return _pairs(actions)


def _pairs(actions: Sequence[SendStateLate]) -> tuple[tuple[str, int], ...]:
    return tuple((action.module_fqn, action.num_bytes) for action in actions)


def _reason(chosen: Chosen) -> Reason:
    run, late = chosen.choice.run, chosen.choice.run.late_state
    step_ms = chosen.model.optimizer.step_ms(run, chosen.streamed_bytes)
    numbers: dict[str, int | float | str] = {
        "late_bytes": sum(num_bytes for _, num_bytes in late),
        "blocks": len(late),
        "step_ms": round(float(step_ms), 4),
        **chosen.part(late_state=()),
    }
    return Reason(
        "state leaves under the next forward: there is room for it, and the step waits for what leaves", numbers
    )


def _words(action: SendStateLate) -> str:
    return "optimizer state leaves under the next forward"


LATE_STATE = Technique(
    name="late state",
    family="offloading",
    switch="enable_offloading",
    actions=(SendStateLate,),
    scope="run",
    travels=True,
    hindrance=hindrance,
    option=RunOption(field="late_state", values=_values, actions=_actions, value=_value),
    step=lambda actions: {"late": _pairs(actions)},
    only_steps=True,
    attach=_attach,
    place=63,
    words=_words,
    said_once=lambda actions: actions[:1],
    outcome=lambda actions: "a part of the optimizer's state leaves under the next forward",
    outcome_rank=35,
    reason=_reason,
)
