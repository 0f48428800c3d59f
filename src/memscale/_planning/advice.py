"""What to do when nothing fits: a smaller batch, or a shorter sequence, that does. By prediction alone.

The plan with the lowest peak is rehearsed at other sizes, and nothing else is: a line through what this shows names the
next size to try. How many sizes are tried is bounded by the number of operators that this runs through, so that advice
takes seconds, not minutes, and is the same on every machine. What was tried is said. Where parameters, gradients and
optimizer state alone are above the budget, and nothing may be done about them, no size can help, and none is tried.
"""

from __future__ import annotations

import dataclasses
import logging
import time

from memscale._decide.budget import needed_bytes
from memscale._decide.eligible import Eligible
from memscale._decide.policy import choose_strategy
from memscale._errors import MemScaleError
from memscale._plan import Plan
from memscale._planning.planner import Planner
from memscale._units import show_bytes

logger = logging.getLogger("memscale")

MAX_SIZES = 4
"""Sizes of one dimension that are tried."""
MAX_OPERATORS = 12_000
"""Operators that advice may run through, on fake tensors, each of which takes up to a millisecond or so."""
_RUNS_A_SIZE = 2
"""How many steps one size takes: one of the unmodified model, for its profile, and one under the plan."""
_NEAR = 0.97
"""A size that fits is good enough when its peak is at least this share of the budget."""
_SILENT_S = 2.0


@dataclasses.dataclass(frozen=True, slots=True)
class Advice:
    """A remedy, and what was looked at to find one."""

    remedy: str = ""
    """"lower the batch size from 64 to 12"; "" when nothing that was tried fits."""
    tried: str = ""
    """"batch size 32, 12"; "" when nothing was looked at."""
    batch_size: int | None = None
    """The batch size of the remedy, where it is one."""
    least_bytes: int = 0
    """What a step takes at least without any activations, where this is why nothing was looked at; else 0."""


def find_smaller(planner: Planner, eligible: Eligible, plan: Plan) -> Advice | None:
    """A size that fits; None when nothing can be tried, without real data or because a single step is too long.

    The planner is that of the size that does not fit, and the plan is the lowest there; tensors travel as it says.
    """
    num_operators = _RUNS_A_SIZE * sum(segment.num_launches for segment in planner.profile.plain.segments)
    num_sizes = MAX_OPERATORS // max(1, num_operators)
    if not planner.rehearsal.is_fake or not num_sizes:
        return None
    least_bytes = _least_bytes(planner, eligible)
    if least_bytes > eligible.budget.device_bytes:
        return Advice(least_bytes=least_bytes)
    tried: list[str] = []
    for dimension, what in ((0, "batch size"), (1, "sequence length")):
        size = planner.inputs.size(dimension)
        if size is not None and size > 1 and num_sizes > 0:
            descent = _Descent(planner, eligible, plan, dimension, min(MAX_SIZES, num_sizes))
            found = descent.largest(size)
            num_sizes -= len(descent.peaks)
            tried += [f"{what} {', '.join(map(str, descent.peaks))}"] if descent.peaks else []
            if found:
                remedy = f"lower the {what} from {size} to {found}"
                return Advice(remedy, " and ".join(tried), found if dimension == 0 else None)
    return Advice("", " and ".join(tried))


def _least_bytes(planner: Planner, eligible: Eligible) -> int:
    """What a step takes without any activations: parameters, gradients and optimizer state; 0 where something is
    eligible that makes them smaller, or lets them wait elsewhere."""
    techniques = eligible.techniques
    if any(t.travels or t.changes_loop or (t.state is not None and not t.is_exact) for t in techniques):
        return 0
    profile = planner.profile
    return profile.static_bytes - profile.input_bytes + profile.plain.end_bytes


class _Descent:
    """One plan at ever better sizes of one dimension."""

    def __init__(self, planner: Planner, eligible: Eligible, plan: Plan, dimension: int, num_sizes: int) -> None:
        travel = eligible.travel_of(plan)
        self.planner, self.eligible, self.plan = planner.by(travel), eligible.by(travel), plan
        self.dimension, self.num_sizes = dimension, num_sizes
        self.peaks: dict[int, int] = {}
        self.started_s = time.monotonic()

    def largest(self, size: int) -> int:
        """The largest that was found to fit; 0 when none was."""
        budget = self.eligible.budget.device_bytes
        known = {size: needed_bytes(self.plan)}
        found, probe = 0, size // 2
        for _ in range(self.num_sizes):
            plan = self._plan_at(probe)
            if plan is None:
                break
            known[probe] = self.peaks[probe] = needed_bytes(plan)
            if not found and known[probe] >= known[size]:
                break  # what is too high does not go with this size: the optimizer's step, for one
            if plan.fits:
                found = max(found, probe)
            too_large = min(number for number in known if number > found)
            probe = _next_size(known, budget, found, too_large)
            if not found < probe < too_large or (found and known[found] >= _NEAR * budget):
                break
        if not found and self.peaks and len(self.peaks) < self.num_sizes and self._fits_anew(min(self.peaks)):
            return min(self.peaks)
        return found

    def _fits_anew(self, size: int) -> bool:
        """Whether another plan fits at this size: the lowest one at a larger size need not be the lowest here."""
        known = self.planner
        try:
            inputs = known.inputs.resized(self.dimension, size)
            planner = Planner(known.job.under(self.eligible.config), inputs, costs=known.costs)
            return planner.plan(choose_strategy(self.eligible.replace(auto_policy=False))).fits
        except MemScaleError as error:
            logger.debug("size %d was not planned for: %s", size, str(error))
            return False

    def _plan_at(self, size: int) -> Plan | None:
        """This very plan, rehearsed at this size; None where the model does not run so."""
        known = self.planner
        elapsed_s = time.monotonic() - self.started_s
        if elapsed_s > _SILENT_S:
            shown = ", ".join(f"{size}: {show_bytes(peak)}" for size, peak in self.peaks.items())
            logger.info("Nothing fits. Looking for a smaller size that does: %s; now %d.", shown, size)
        try:
            inputs = known.inputs.resized(self.dimension, size)
            planner = Planner(known.job.under(self.eligible.config), inputs, costs=known.costs)
            seen = planner.profile
            planner.profile = dataclasses.replace(known.profile, plain=seen.plain, input_bytes=seen.input_bytes)
            return planner.confirm(self.plan, self.eligible)
        except MemScaleError as error:
            logger.debug("size %d was not rehearsed: %s", size, str(error))
            return None


def _next_size(known: dict[int, int], budget: int, found: int, too_large: int) -> int:
    """Where the line through the two nearest sizes meets the budget, well inside of what is not known yet."""
    low, high = sorted(sorted(known, key=lambda size: abs(known[size] - budget))[:2])
    rise = (known[high] - known[low]) / (high - low)
    guess = int(low + (budget - known[low]) / rise) if rise > 0 else (found + too_large) // 2
    return max(found + 1, 1, min(too_large - 1, guess))
