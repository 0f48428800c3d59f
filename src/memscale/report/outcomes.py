"""What the full stack did to a model, and what it did not do, with reasons."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from memscale._config import Config
from memscale._plan import Plan
from memscale._units import show_bytes
from memscale.techniques import TECHNIQUES, by_technique
from memscale.techniques.checkpointing import CHECKPOINTING
from memscale.techniques.optimizer8bit import EIGHT_BIT
from memscale.techniques.technique import Technique

NO_GAIN = "it would not lower the peak"


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """One technique."""

    technique: str
    applied: bool
    detail: str
    """What was done, or why it was not."""

    def __str__(self) -> str:
        return f"{self.technique}: {self.detail if self.applied else f'skipped, {self.detail}'}"


def outcomes(
    plan: Plan, config: Config, hindrances: Mapping[str, str], optimizer_detail: str | None
) -> tuple[Outcome, ...]:
    """Every family of techniques. `hindrances` say why some could not be used where the plan was made, by their names;
    `optimizer_detail` says what 8 bits came to where that is known already."""
    families: dict[str, list[Technique]] = {}
    for technique in sorted(TECHNIQUES, key=lambda technique: technique.outcome_rank):
        if technique.modes or getattr(config, technique.switch):  # what no mode turns on is said when the user does
            families.setdefault(technique.family, []).append(technique)
    found = {name: _of_family(family, plan, config, hindrances) for name, family in families.items()}
    if optimizer_detail is not None:
        found[EIGHT_BIT.family] = Outcome(EIGHT_BIT.family, True, optimizer_detail)
    return tuple(found.values())


def _of_family(family: list[Technique], plan: Plan, config: Config, hindrances: Mapping[str, str]) -> Outcome:
    name, switch, done = family[0].family, family[0].switch, by_technique(plan.actions)
    parts = [technique.outcome(done[technique.name]) for technique in family if technique.name in done]
    if parts:
        return Outcome(name, True, ", ".join(parts))
    others = [len(done[technique.name]) for technique in TECHNIQUES if technique.recomputes and technique.name in done]
    if family[0] is CHECKPOINTING and others:
        return Outcome(name, True, f"{sum(others)} streamed blocks are recomputed in backward")
    if not getattr(config, switch):
        return Outcome(name, False, f"{switch}=False")
    is_hindered = all(technique.name in hindrances for technique in family)
    return Outcome(name, False, hindrances[family[0].name] if is_hindered else NO_GAIN)


def describe(plan: Plan, found: tuple[Outcome, ...]) -> str:
    lines = [
        f"the full stack on {plan.model_class}: {show_bytes(plan.baseline_peak_bytes)} -> "
        f"{show_bytes(plan.predicted_peak_bytes)} predicted peak ({plan.reduction:.1%} less)"
    ]
    return "\n  ".join([*lines, *map(str, found)])
