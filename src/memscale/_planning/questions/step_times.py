"""What travels when, of a step under a plan: a rehearsal of it, by the time model.

step_times(planner, plan.actions, eligible)
"""

from __future__ import annotations

from memscale._decide.choice import Choice, choice_of
from memscale._decide.eligible import Eligible
from memscale._decide.lanes import lanes_of
from memscale._plan import Action
from memscale._planning.one_way import OneWay
from memscale._profile import STREAM, TraceKey
from memscale.report.step_times import StepTimes
from memscale.techniques import technique_of


def step_times(planner: OneWay, actions: tuple[Action, ...], eligible: Eligible) -> StepTimes:
    """The times of the step as these actions change it, on the planner's device."""
    _look_into(planner, actions, eligible)
    trace = planner.trace_of(actions, eligible.config)
    choice = choice_of(actions, planner.profile) if actions else Choice()
    return lanes_of(planner.cost_model(), trace, choice)


def _look_into(planner: OneWay, actions: tuple[Action, ...], eligible: Eligible) -> None:
    """What the plan's techniques cost beside its trace: a planner that has not planned knows nothing of it."""
    if any(technique_of(action).places_model for action in actions):  # by streaming it
        planner.try_variants({TraceKey(STREAM): planner.treatments(eligible)[STREAM]}, eligible)
        planner.rest_actions()  # with it come the parameters that visit the device to be stepped
    for technique in {technique_of(action).name: technique_of(action) for action in actions}.values():
        if technique.rehearse is not None:
            technique.rehearse(planner, eligible)
