"""State comes back under backward (exact): the step finds the first of it on the device.

Backward frees activations, and what the optimizer's step has room for beside them may come while the last blocks of
backward still compute. The step then waits for so much less. `early_arrivals.py` says when it is given up again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from memscale._config import Config
from memscale._hardware import Hardware
from memscale._plan import LayerAction, Reason, check_count
from memscale._profile import Profile
from memscale.techniques.offload.next_tier import no_next_tier
from memscale.techniques.technique import RunOption, Technique, Traced

if TYPE_CHECKING:
    from memscale._decide.chosen import Chosen
    from memscale._decide.eligible import Eligible
    from memscale._execute.attachment import Attachment

_ASKED_FOR = Reason("asked for")


@dataclasses.dataclass(frozen=True, slots=True)
class FetchStateEarly(LayerAction):
    """Just before this layer's backward, more of the optimizer's waiting state is asked for."""

    module_fqn: str
    num_bytes: int
    """How much more: whole buckets come, never more than all such layers so far have asked for."""
    reason: Reason = _ASKED_FOR

    def __post_init__(self) -> None:
        check_count(self, "num_bytes", minimum=1)


def hindrance(config: Config, hardware: Hardware) -> str:
    if not hardware.has_streams or not hardware.has_caching_allocator:
        return "state comes and leaves beside the passes on devices with streams and a caching allocator alone"
    return no_next_tier(config, hardware)


def _attach(actions: Sequence[FetchStateEarly], to: Attachment) -> None:
    to.early = actions


def _values(traced: Traced, eligible: Eligible) -> tuple[Any, ...]:
    return ()  # plans with it are derived from plans without


def _actions(early: tuple[tuple[str, int], ...], profile: Profile) -> Iterator[FetchStateEarly]:
    for module_fqn, num_bytes in early:
        yield FetchStateEarly(module_fqn, num_bytes)


def _value(actions: Sequence[FetchStateEarly], profile: Profile) -> tuple[tuple[str, int], ...]:
    return _pairs(actions)


def _pairs(actions: Sequence[FetchStateEarly]) -> tuple[tuple[str, int], ...]:
    return tuple((action.module_fqn, action.num_bytes) for action in actions)


def _reason(chosen: Chosen) -> Reason:
    run, early = chosen.choice.run, chosen.choice.run.early_state
    step_ms = chosen.model.optimizer.step_ms(run, chosen.streamed_bytes)
    numbers: dict[str, int | float | str] = {
        "early_bytes": sum(num_bytes for _, num_bytes in early),
        "blocks": len(early),
        "step_ms": round(float(step_ms), 4),
        **chosen.part(early_state=()),
    }
    return Reason("state comes back under backward: there is room for it, and the step waits for what comes", numbers)


def _words(action: FetchStateEarly) -> str:
    return "optimizer state comes back under backward"


EARLY_STATE = Technique(
    name="early state",
    family="offloading",
    switch="enable_offloading",
    actions=(FetchStateEarly,),
    scope="run",
    travels=True,
    hindrance=hindrance,
    option=RunOption(field="early_state", values=_values, actions=_actions, value=_value),
    step=lambda actions: {"early": _pairs(actions)},
    only_steps=True,
    attach=_attach,
    place=62,
    words=_words,
    said_once=lambda actions: actions[:1],
    outcome=lambda actions: "a part of the optimizer's state comes back under backward",
    outcome_rank=34,
    reason=_reason,
)
