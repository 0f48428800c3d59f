"""`Chosen`: a choice with what it was made by, which is what a technique sees when it says why it was chosen."""

from __future__ import annotations

import dataclasses
from typing import Any

from memscale._config import Config
from memscale._decide.choice import Choice, RunOptions
from memscale._decide.cost_model import CostModel
from memscale._decide.eligible import Eligible
from memscale._plan import Reason
from memscale._profile import KEEP


@dataclasses.dataclass(frozen=True, slots=True)
class Chosen:
    """A choice with what it was made by: what the rule of a technique sees."""

    model: CostModel
    eligible: Eligible
    choice: Choice

    def part(self, **without: Any) -> dict[str, int | float | str]:
        """What one part of the run frees and costs: this very plan without it, and with it."""
        model, choice = self.model, self.choice
        other = Choice(choice.blocks, dataclasses.replace(choice.run, **without))
        treatments = {treatment for _, treatment in choice.blocks} or {KEEP}
        if not model.can_run(other.run) or not all(model.can_treat(other.run, treatment) for treatment in treatments):
            return {}  # one of a pair that was traced together only
        before, after = model.evaluate(other), model.evaluate(choice)
        return {
            "frees_bytes": before.peak_bytes - after.peak_bytes,
            "costs_ms": round(after.step_ms - before.step_ms, 4),
        }

    def bucket_size(self) -> dict[str, int | float | str]:
        """The size of buckets that was chosen, and what others could save of the step at most: see
        `OptimizerModel.other_sizes_save_ms`."""
        smaller_ms, larger_ms = self.model.optimizer.other_sizes_save_ms(self.choice.run, self.streamed_bytes)
        return {
            "bucket_bytes": self.model.profile.bucket_bytes,
            "smaller_buckets_save_at_most_ms": round(smaller_ms, 4),
            "larger_buckets_save_at_most_ms": round(larger_ms, 4),
        }

    @property
    def streamed_bytes(self) -> int:
        """Trainable bytes of blocks that are streamed."""
        return sum(self.model.blocks[fqn].trainable_bytes for fqn, how in self.choice.blocks if how.streams)

    def run_with(self, **options: Any) -> RunOptions:
        """The run options that were chosen, but for these."""
        return dataclasses.replace(self.choice.run, **options)

    @property
    def steps_on_host_allowed(self) -> bool:
        return self.eligible.host_step

    def reason_of_lossy(self, switch: str, numbers: dict[str, int | float | str]) -> Reason:
        return lossy_reason(self.eligible.config, switch, numbers)


def lossy_reason(config: Config, switch: str, numbers: dict[str, int | float | str]) -> Reason:
    why = f"{switch}=True" if config.asks_for(switch) else f"mode {config.mode.value}: nothing exact suffices"
    return Reason(why, numbers)
