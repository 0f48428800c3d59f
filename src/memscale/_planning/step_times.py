"""What travels when, of a step under a plan: a rehearsal of it, by the time model.

step_times(planner, plan.actions, config)
"""

from __future__ import annotations

from memscale._config import Config
from memscale._decide.choice import Choice, choice_of
from memscale._decide.lanes import lanes_of
from memscale._plan import Action
from memscale._planning.planner import Planner
from memscale.report.step_times import StepTimes


def step_times(planner: Planner, actions: tuple[Action, ...], config: Config) -> StepTimes:
    """Of the step as these actions change it, on the planner's device."""
    trace = planner.trace_of(actions, config)
    choice = choice_of(actions, planner.profile) if actions else Choice()
    return lanes_of(planner.cost_model(), trace, choice)
