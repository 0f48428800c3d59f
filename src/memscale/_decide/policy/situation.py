"""What a policy sees: the plain step, the hardware and the budget, before any technique is tried."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

from memscale._decide.choice import Choice, Outcome
from memscale._decide.cost_model import CostModel
from memscale._hardware import Hardware
from memscale._profile import Profile

if TYPE_CHECKING:
    from memscale._decide.budget import Budget


@dataclasses.dataclass(frozen=True)
class Situation:
    """One model's plain step on one hardware, under one budget."""

    profile: Profile
    hardware: Hardware
    budget: Budget

    @functools.cached_property
    def model(self) -> CostModel:
        return CostModel(dataclasses.replace(self.profile, variants={}), self.hardware)

    @functools.cached_property
    def baseline(self) -> Outcome:
        return self.model.evaluate(Choice())

    @property
    def pressure(self) -> float:
        """The baseline's peak over the budget: above 1 something must be done."""
        return self.baseline.peak_bytes / max(1, self.budget.device_bytes)
