"""The steps that a report draws: the plain one and the one under a plan, moment by moment, and what travels when.

shown_steps(planner, plan)
"""

from __future__ import annotations

from memscale._plan import Plan
from memscale._planning.one_way import OneWay
from memscale._planning.questions.step_memory import step_memory
from memscale._planning.questions.step_times import step_times
from memscale.report.step_memory import StepMemory
from memscale.report.step_times import StepTimes


def shown_steps(planner: OneWay, plan: Plan) -> tuple[StepMemory, StepMemory, StepTimes]:
    """Rehearse both on the planner's device; its tensors travel as the plan says."""
    config = planner.job.config
    return (
        step_memory(planner, (), config),
        step_memory(planner, plan.actions, config, plan.allocator),
        step_times(planner, plan.actions, planner.job.eligible),
    )
