"""`Admission`: whether a step of one choice that was traced as a whole is within the budget. No torch."""

from __future__ import annotations

import dataclasses

from memscale._decide.budget import Budget
from memscale._decide.choice import Choice, Outcome
from memscale._decide.cost_model import CostModel
from memscale._profile import OptimizerCost, StepTrace


@dataclasses.dataclass(frozen=True, slots=True)
class Admission:
    """What a traced step is held against."""

    model: CostModel
    choice: Choice
    optimizer: OptimizerCost
    """The optimizer over what is not streamed, to the byte."""
    streamed_bytes: int
    """The bytes of parameters that are streamed, as the device would hold them."""
    budget: Budget
    host_bytes: int
    movable_bytes: int

    def peak_bytes(self, trace: StepTrace) -> int:
        """The peak of the whole step, with its optimizer."""
        return self.model.peak_of(trace, self.choice, self.optimizer, self.streamed_bytes)

    def admits(self, trace: StepTrace) -> bool:
        """Whether live bytes and what waits elsewhere are within the budget."""
        return self.budget.admits(Outcome(self.peak_bytes(trace), 0.0, self.host_bytes, self.movable_bytes))
