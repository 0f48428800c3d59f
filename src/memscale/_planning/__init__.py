"""The architecture in order: profile a step, choose a strategy, decide, rehearse. What follows is `execute`.

A `Planner` holds what is profiled, decided and rehearsed; only frozen data crosses between the stages.

Here lies what makes one plan and attaches it: the job, the planner and its ways, the trials, the advice where nothing
fits. Around it:

    reserved/    what a plan makes the allocator reserve
    saved/       plans that are kept, and the cache
    loop/        how a plan follows the loop that trains
    recovery/    a step that ran out of memory, done again
    questions/   estimates, largest batches, a predicted step as pictures
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from memscale._decide import decide, plan_as_it_is
from memscale._decide.eligible import Eligible
from memscale._decide.misfit import misfit
from memscale._decide.policy import Strategy, choose_strategy
from memscale._plan import Action, Plan
from memscale._planning.advice import find_smaller
from memscale._planning.garbage import few_collections
from memscale._planning.job import Job
from memscale._planning.other_peaks import other_peaks
from memscale._planning.planner import Planner
from memscale._profile import Profile
from memscale._profile.inputs import Inputs
from memscale.report.peak_against_time import PeakAgainstTime


@few_collections()
def make_plan(
    job: Job,
    inputs: Inputs,
    *,
    on_weighed: Callable[[PeakAgainstTime], None] | None = None,
    on_profile: Callable[[Profile], None] | None = None,
) -> Plan:
    """The stages in order: profile, choose a strategy, decide, rehearse. `DoesNotFitError` when nothing fits.

    `StaticProfileError` when the step cannot be rehearsed on fake tensors; the model itself is never run. `on_weighed`
    gets peak against time for everything that the mode allows, whether the plan needed it or not. `on_profile` gets
    what the plain step has shown.
    """
    planner = Planner(job, inputs)
    if on_profile is not None:
        on_profile(planner.profile)
    strategy = choose_strategy(job.eligible, planner.profile)
    plan = planner.plan(strategy)
    if not plan.fits and strategy.wider is not None:
        strategy = strategy.widened()
        plan = planner.plan(strategy)
    if not plan.fits:
        advice = find_smaller(planner, strategy.eligible, plan)
        found = (None, "", None, 0) if advice is None else dataclasses.astuple(advice)
        raise misfit(planner.profile, plan, strategy.config, *found)
    if on_weighed is not None:
        travelling = planner.by(strategy.eligible.travel_of(plan))
        on_weighed(travelling.peak_against_time(strategy, plan))
    peaks = other_peaks(planner, plan, strategy.eligible)
    return dataclasses.replace(plan, strategy=strategy.reason, other_peaks=peaks)


def plan_from(profile: Profile, eligible: Eligible, *, margin_bytes: int = 0) -> Plan:
    """Strategy and decision for a step that was observed, with so much to spare; `DoesNotFitError` if nothing fits."""
    strategy = choose_strategy(eligible, profile)
    plan = _decided(profile, strategy, margin_bytes)
    if not plan.fits and strategy.wider is not None:
        strategy = strategy.widened()
        plan = _decided(profile, strategy, margin_bytes)
    if not plan.fits:
        spared = dataclasses.replace(plan, predicted_peak_bytes=plan.predicted_peak_bytes + margin_bytes)
        raise misfit(profile, spared, strategy.config)
    return dataclasses.replace(plan, strategy=strategy.reason)


def keep_plan(profile: Profile, eligible: Eligible, actions: tuple[Action, ...], rule: str) -> Plan:
    """What is done already, as a plan for a step that was observed; `DoesNotFitError` if that does not fit."""
    plan = plan_as_it_is(profile, eligible, actions, rule)
    if not plan.fits:
        raise misfit(profile, plan, eligible.config)
    return plan


def _decided(profile: Profile, strategy: Strategy, margin_bytes: int) -> Plan:
    return decide(profile, strategy.eligible, strategy.source, margin_bytes=margin_bytes, raise_if_unfit=False)
