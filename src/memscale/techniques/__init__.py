"""What a plan can do to a model: a file or a folder a technique, and the closed table of their records.

Each attaches its actions to a model and hands its undo to an `ExitStack`. Every stage iterates over `TECHNIQUES`
instead of knowing them one by one (`technique.py`). This package loads without torch: only attaching needs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from memscale._plan import Action, LayerAction
from memscale._profile import KEEP, Treatment
from memscale.techniques.checkpointing import CHECKPOINTING
from memscale.techniques.loss_by_rows import LOSS_BY_ROWS
from memscale.techniques.offload.activations import ACTIVATIONS
from memscale.techniques.offload.kept_outputs import KEPT_OUTPUTS
from memscale.techniques.offload.optimizer import OPTIMIZER
from memscale.techniques.offload.optimizer.early_state import EARLY_STATE
from memscale.techniques.offload.optimizer.in_backward import IN_BACKWARD
from memscale.techniques.offload.optimizer.in_buckets import BUCKETED_STEP
from memscale.techniques.offload.optimizer.late_state import LATE_STATE
from memscale.techniques.offload.optimizer.on_device import DEVICE_STEP
from memscale.techniques.offload.optimizer.waiting_gradients import GRADIENTS
from memscale.techniques.offload.parameters import PARAMETERS
from memscale.techniques.optimizer8bit import EIGHT_BIT
from memscale.techniques.precision import PRECISION
from memscale.techniques.technique import PlannedStep, Technique, Treated, Unrehearsed
from memscale.techniques.tiling import HEAD, INSIDE

TECHNIQUES: tuple[Technique, ...] = (
    CHECKPOINTING,
    ACTIVATIONS,
    KEPT_OUTPUTS,
    PARAMETERS,
    INSIDE,
    HEAD,
    LOSS_BY_ROWS,
    DEVICE_STEP,
    BUCKETED_STEP,
    IN_BACKWARD,
    OPTIMIZER,
    EARLY_STATE,
    LATE_STATE,
    GRADIENTS,
    PRECISION,
    EIGHT_BIT,
)
"""All that there is, in the order in which a plan names it: what is about blocks first, the mildest before others."""

_OF_ACTION = {kind: technique for technique in TECHNIQUES for kind in technique.actions}


def _how_much_leaves(treated: Treated) -> tuple[bool, bool, bool]:
    treatment = treated.treatment
    return treatment.streams, treatment.recompute == "full", treatment.offloads


TREATED: dict[Treatment, Treated] = {
    treated.treatment: treated
    for treated in (
        Treated(KEEP, ()),
        *sorted((one for technique in TECHNIQUES for one in technique.treatments), key=_how_much_leaves),
    )
}
"""How blocks are treated."""
TREATMENTS: tuple[Treatment, ...] = tuple(TREATED)
"""All that can be rehearsed and chosen, by how much of a block leaves the device: so the search numbers them."""


def technique_of(action: Action) -> Technique:
    """The technique that an action belongs to."""
    return _OF_ACTION[type(action)]


def by_technique(actions: Iterable[Action]) -> dict[str, list[Action]]:
    """The actions by the name of their technique, in the order in which these are met."""
    found: dict[str, list[Action]] = {}
    for action in actions:
        found.setdefault(technique_of(action).name, []).append(action)
    return found


def planned_step(actions: Iterable[Action]) -> PlannedStep:
    """How the optimizer steps under a plan with these actions."""
    fields: dict[str, Any] = {}
    for mine in by_technique(actions).values():
        step = technique_of(mine[0]).step
        fields |= {} if step is None else step(mine)
    return PlannedStep(**fields)


def streamed_fqns(actions: Iterable[Action]) -> tuple[str, ...]:
    """The layers whose parameters are streamed under a plan with these actions."""
    return tuple(action.module_fqn for action in actions if isinstance(action, LayerAction) and _streams(action))


def _streams(action: LayerAction) -> bool:
    traits = technique_of(action).traits
    return traits is not None and bool(traits(action).get("streams"))


def careful_actions(model: Unrehearsed) -> Iterator[Action]:
    """What a careful plan does beside the treatment of blocks, in the order in which outcomes are told."""
    for technique in sorted(TECHNIQUES, key=lambda technique: technique.outcome_rank):
        if technique.careful is not None:
            yield from technique.careful(model)


def settling_steps(actions: Iterable[Action]) -> int:
    """Steps until one is as all later ones, where transfers overlap with compute."""
    return max((technique_of(action).settling_steps for action in actions), default=1)
