"""The rule policy: the table of the memory budget guide, by pressure (the baseline's peak over the budget)."""

from __future__ import annotations

import math

from memscale._decide.policy.situation import Situation
from memscale._plan import Reason

RULES: tuple[tuple[float, str, str], ...] = (
    (1.0, "conservative", "under the budget: nothing, or CONSERVATIVE"),
    (1.5, "balanced", "up to 1.5 times the budget: BALANCED"),
    (3.0, "aggressive", "1.5 to 3 times the budget: AGGRESSIVE"),
    (math.inf, "aggressive", "above 3 times the budget: AGGRESSIVE, and a smaller batch if that does not fit"),
)
"""Up to this pressure: the strategy, and the rule in words."""


def choose(situation: Situation) -> tuple[str, Reason]:
    """The name of a strategy, and why."""
    pressure = situation.pressure
    name, rule = next((name, rule) for limit, name, rule in RULES if pressure <= limit)
    return name, Reason(rule, numbers_of(situation))


def numbers_of(situation: Situation) -> dict[str, int | float | str]:
    return {
        "baseline_bytes": situation.baseline.peak_bytes,
        "budget_bytes": situation.budget.device_bytes,
        "pressure": round(situation.pressure, 3),
    }
