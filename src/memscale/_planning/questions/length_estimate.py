"""What batches of many lengths would take: peak and predicted time of each bucket, before anything is allocated.

    found = estimate_lengths(job, inputs, {128: 700, 1024: 3})
    found.rows[0].plan          # of the longest; None where nothing fits it

Plans are those that a run has when its lengths are announced (`wrap(lengths=...)`): one for the longest batch, and for
shorter ones what of it they need.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from memscale._decide.choice import Choice
from memscale._decide.policy import choose_strategy
from memscale._errors import MemScaleError
from memscale._plan import Plan
from memscale._planning.job import Job
from memscale._planning.loop.shapes import bucket_top, checked_lengths, loosened, predicted_ms
from memscale._planning.planner import Planner
from memscale._profile.inputs import Inputs


@dataclasses.dataclass(frozen=True, slots=True)
class LengthRow:
    """One bucket of lengths."""

    longest: int
    """The length that is planned for; the next row begins below it."""
    share: float
    """The share of all sequences that have this length."""
    plain_bytes: int
    plain_ms: float
    plan: Plan | None
    """None: nothing fits batches of this length."""
    planned_bytes: int | None
    planned_ms: float | None


@dataclasses.dataclass(frozen=True, slots=True)
class LengthEstimate:
    """All of them, the longest first."""

    rows: tuple[LengthRow, ...]
    budget_bytes: int
    device_name: str
    mode: str

    @property
    def slowdown(self) -> float | None:
        """Predicted time over that of plain steps, in the mean over all batches; None where some do not fit."""
        if any(row.planned_ms is None for row in self.rows):
            return None
        planned = sum(row.share * (row.planned_ms or 0.0) for row in self.rows)
        plain = sum(row.share * row.plain_ms for row in self.rows)
        return planned / plain if plain else None


def estimate_lengths(job: Job, inputs: Inputs, lengths: Mapping[int, int]) -> LengthEstimate:
    """The table of a batch in these lengths, which are a histogram."""
    lengths = {length: lengths[length] for length in checked_lengths(lengths)}
    if inputs.size(1) is None:
        raise MemScaleError("lengths need a batch whose integer tensors agree in their second dimension")
    tops = {length: min(bucket_top(length), max(lengths)) for length in lengths}
    total = sum(lengths.values())
    rows, largest = list[LengthRow](), None
    for top in sorted(set(tops.values()), reverse=True):
        share = sum(count for length, count in lengths.items() if tops[length] == top) / total
        row = _row(Planner(job, inputs.resized(1, top)), job, top, share, largest)
        largest = largest or row.plan
        rows.append(row)
    budget = job.eligible.budget.device_bytes
    return LengthEstimate(tuple(rows), budget, job.hardware.device_name, job.config.mode.value)


def _row(planner: Planner, job: Job, top: int, share: float, largest: Plan | None) -> LengthRow:
    """`largest`: the plan for the longest batches that fit."""
    plain = planner.cost_model().evaluate(Choice())
    plan = _chosen(planner, job) if largest is None else loosened(planner, largest, job.eligible) or largest
    if plan is None:
        return LengthRow(top, share, plain.peak_bytes, plain.step_ms, None, None, None)
    if plan is largest:  # all of it is needed here, too
        if not plan.actions:  # nothing is rehearsed then, and the peak that it has is that of the longest
            plan = dataclasses.replace(plan, predicted_peak_bytes=plain.peak_bytes)
        plan = planner.confirm(plan, job.eligible)
    planned_ms = predicted_ms(planner, plan, job.eligible)
    return LengthRow(top, share, plain.peak_bytes, plain.step_ms, plan, plan.predicted_peak_bytes, planned_ms)


def _chosen(planner: Planner, job: Job) -> Plan | None:
    plan = planner.plan(choose_strategy(job.eligible, planner.profile))
    return plan if plan.fits else None
