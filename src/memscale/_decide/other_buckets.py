"""Buckets of other sizes, for a plan that was found with those of the default size. No torch.

    sizes_worth_trying(model, choice)       # the sizes that could make the step noticeably shorter
    redecided(model, eligible, plan)        # the plan in the buckets that this model's profile was made for

NOTE [sizes of buckets]: the search goes by one size, since every other one has costs of the optimizer of its own. Which
blocks are treated in which way hardly depends on it, so other sizes are tried on the plan that was found. First the
plan is asked what they could save at most (`OptimizerModel.other_sizes_save_ms`), which takes no trials: smaller
buckets shorten the first arrival and the last step and departure, larger ones are fewer and leave the host less to do.
Most plans could save next to nothing, and planning takes no longer for them.
"""

from __future__ import annotations

import dataclasses

from memscale._decide.budget import needed_bytes
from memscale._decide.choice import Choice, choice_of
from memscale._decide.cost_model import CostModel
from memscale._decide.eligible import Eligible
from memscale._decide.pareto import slowdown
from memscale._decide.search import Candidate
from memscale._decide.write_plan import Decision, write_plan
from memscale._plan import Plan
from memscale._units import MIB

SIZES = (8 * MIB, 32 * MIB)
"""What is tried beside the default size."""
_WORTH_TRYING = 0.005
"""The share of a step that another size must promise to save, before a plan with it is rehearsed."""


def sizes_worth_trying(model: CostModel, choice: Choice) -> list[int]:
    """The sizes that could save enough of the step. See NOTE [sizes of buckets]."""
    run, now_bytes = choice.run, model.profile.bucket_bytes
    if run.quantizes_optimizer or not (run.offloads_optimizer or run.steps_on_device):
        return []  # nothing travels; and in 8 bits the size of a bucket is that of what is unpacked
    least_ms = _WORTH_TRYING * model.evaluate(choice).step_ms
    smaller_ms, larger_ms = model.optimizer.other_sizes_save_ms(run, model.streamed_bytes(choice))
    # Those are savings of buckets without a size, and without a number: half the size saves about half of that.
    save_ms = {size: smaller_ms * (1 - size / now_bytes) for size in SIZES if size < now_bytes}
    save_ms |= {size: larger_ms * (1 - now_bytes / size) for size in SIZES if size > now_bytes}
    return [size for size in SIZES if save_ms.get(size, 0.0) >= least_ms]


def redecided(model: CostModel, eligible: Eligible, plan: Plan) -> Plan | None:
    """What the plan does, in this model's buckets; None where that saves too little, or is not expected to fit."""
    choice, baseline = choice_of(plan.actions, model.profile), model.evaluate(Choice())
    chosen = Candidate(choice, model.evaluate(choice))
    # What the allocator holds above what is live is taken to be the same.
    needed = chosen.outcome.peak_bytes + needed_bytes(plan) - plan.predicted_peak_bytes
    expected = dataclasses.replace(chosen.outcome, peak_bytes=needed)
    found = slowdown(chosen, baseline)
    if found > plan.predicted_slowdown * (1 - _WORTH_TRYING) or not eligible.budget.admits(expected):
        return None
    shown = (
        dataclasses.replace(p, peak_bytes=chosen.outcome.peak_bytes, slowdown=found) if p.is_chosen else p
        for p in plan.front
    )
    source, summary = plan.decision_source, plan.summary
    return write_plan(model, eligible, Decision(source, baseline, chosen, True, summary, tuple(shown), plan.front_note))
