"""What a policy sees: the plain step, the hardware and the budget, before any technique is tried."""

from __future__ import annotations

import dataclasses
import functools

from memscale._decide.budget import Budget
from memscale._decide.choice import Choice, Outcome
from memscale._decide.cost_model import CostModel
from memscale._decide.eligible import Eligible
from memscale._hardware import Hardware
from memscale._profile import Profile


@dataclasses.dataclass(frozen=True)
class Situation:
    """One model's plain step, and what is eligible for it as the user's config has it."""

    profile: Profile
    eligible: Eligible

    @property
    def hardware(self) -> Hardware:
        return self.eligible.hardware

    @property
    def budget(self) -> Budget:
        return self.eligible.budget

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
