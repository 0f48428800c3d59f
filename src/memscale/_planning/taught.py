"""What rehearsals of plans that did not fit have taught about others, between one decision and the next."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from memscale._decide import Kind, Traits, kind_of, suspects_of
from memscale._decide.choice import Choice
from memscale._plan import Plan
from memscale._units import show_bytes
from memscale.techniques.offload.optimizer.late_state import LATE_STATE

logger = logging.getLogger("memscale")

_LATE: Traits = frozenset([LATE_STATE])


@dataclasses.dataclass(slots=True)
class Taught:
    """What rehearsals of plans that did not fit have taught about others.

    NOTE [late state teaches nothing else]: state that leaves late lies among the first activations of a forward, so
    such plans hold more above what is live than others. What one needs above the peak model is asked of those alone,
    and after a second one that did not fit there is no third: then plans are decided as if there were none.
    """

    reserve_bytes: int
    num_tried: int = 0
    """How many plans did not fit, but for those with late state."""
    margin_bytes: int = 0
    margins: dict[Traits, int] = dataclasses.field(default_factory=dict)
    plans: dict[Choice, Plan] = dataclasses.field(default_factory=dict)
    reserves: dict[Kind, int] = dataclasses.field(default_factory=dict)
    """How much more than `reserve_bytes` plans of some kinds hold above what is live; mostly less, below zero."""

    def as_it_began(self) -> Taught:
        """The same for another way, in which nothing was rehearsed yet."""
        margins, reserves = dict(self.margins), dict(self.reserves)
        return dataclasses.replace(self, margins=margins, reserves=reserves, plans={}, num_tried=0)

    @property
    def has_margins(self) -> bool:
        """Whether the peak model was wrong about plans without late state."""
        return any(suspects != _LATE for suspects in self.margins)

    def hold(self, choice: Choice, above_bytes: int) -> None:
        """A plan holds so much above what is live: others of its kind hold about as much."""
        self.reserves[kind_of(choice)] = above_bytes - self.reserve_bytes

    def lessons(self) -> dict[str, Any]:
        """What to decide by."""
        return {
            "margin_bytes": self.margin_bytes,
            "margins": self.margins,
            "reserve_bytes": self.reserve_bytes,
            "reserves": self.reserves,
            "rehearsed": self.needed(),
        }

    def needed(self) -> dict[Choice, int]:
        """What each plan needs beside the reserve: it may hold more than that above what is live."""
        return {
            choice: max(plan.predicted_peak_bytes, (plan.predicted_reserved_bytes or 0) - self.reserve_bytes)
            for choice, plan in self.plans.items()
        }

    def by(self, choice: Choice, plan: Plan, decided: Plan, *, is_last: bool) -> None:
        """The plan did not fit. `is_last`: there is one more try."""
        self.plans[choice] = plan
        if choice.run.late_state:
            needed_above = max(plan.predicted_peak_bytes, (plan.predicted_reserved_bytes or 0) - self.reserve_bytes)
            is_first = _LATE not in self.margins
            self.margins[_LATE] = needed_above - decided.predicted_peak_bytes if is_first else plan.budget_bytes
            return
        self.num_tried += 1
        above_model, suspects = plan.predicted_peak_bytes - decided.predicted_peak_bytes, suspects_of(choice)
        self.margins[suspects] = max(self.margins.get(suspects, 0), above_model)
        logger.debug("the rehearsal peaked %s above the peak model: deciding again", show_bytes(above_model))
        reserved_bytes, is_too_high = plan.predicted_reserved_bytes, plan.predicted_peak_bytes > plan.budget_bytes
        if is_last and reserved_bytes is not None and not is_too_high:
            self.reserve_bytes = plan.budget_bytes  # the lowest that there is
        elif is_last:
            self.margin_bytes = plan.budget_bytes  # what was traced as a whole is trusted
        elif reserved_bytes is not None:
            # Plans hold about as much above what is live as this one does; those that are lower less, in proportion.
            share = plan.budget_bytes / reserved_bytes if is_too_high else 1.0
            above_bytes = int((reserved_bytes - plan.predicted_peak_bytes) * share)
            more_bytes = max(0, above_bytes - self.reserve_bytes)
            self.reserve_bytes += more_bytes
            if self.margins.get(_LATE, plan.budget_bytes) < plan.budget_bytes:
                self.margins[_LATE] -= more_bytes  # which is asked of all now
