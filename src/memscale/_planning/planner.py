"""The planner of one model's step: the plan that serves the budget best, of all ways in which tensors may travel.

    planner = Planner(job, inputs)
    plan = planner.plan(strategy)       # `plan.fits` says whether there is one
    planner.profile                     # what was seen so far, by the way that is tried first
    planner.by(travel)                  # by another way, on the same stage

Transfers overlap with compute, or block: whichever is better; `plan.conditions` says which it is, and why if they
block. See NOTE [two ways]. Trying techniques and rehearsing a plan is what takes long, so another way is looked into
only where it may matter: where nothing fits in the one before, where a bound says that it could be faster, and for the
lowest peak of all. On every level of techniques all ways come before the next level, since what is exact goes before
what is not.

NOTE [narrower modes]: what an allocator reserves above live bytes is known of a plan only when it has been rehearsed,
and is then expected of all others. So where the first choice turns out not to fit, plans that need less of the
allocator are passed over, and a mode that allows more might end with a slower plan than one that allows less. There the
narrower modes are planned for, too, and the best plan of all is taken.
"""

from __future__ import annotations

import dataclasses

from memscale._config import OptimizationMode
from memscale._decide import decide_on, has_faster, may_be_faster_blocking, may_be_faster_one_ahead, needs_optimizing
from memscale._decide.budget import needed_bytes
from memscale._decide.choice import choice_of
from memscale._decide.other_buckets import sizes_worth_trying
from memscale._decide.policy import Strategy
from memscale._decide.travel import Travel, most_in_flight_bytes, one_ahead, wider
from memscale._hardware import Hardware
from memscale._plan import Plan, Reason
from memscale._planning.job import Job
from memscale._planning.one_way import OneWay
from memscale._planning.optimizer_trials import OptimizerCosts
from memscale._planning.stage import Stage
from memscale._profile.inputs import Inputs
from memscale.techniques import technique_of

_WORTH_WIDENING = 0.01
"""The share of a step that wider windows must promise to save, before plans with them are rehearsed."""
_WORTH_COMING_NEARER = 0.1
"""The same of weights that are fetched one layer ahead, not two: all that streams is tried anew for it."""
MORE_BELOW = "the mode allows more, which this budget did not need and which was not looked into"


class Planner(OneWay):
    """A planner by the way that is tried first, which owns those by the others.

    Several strategies can be planned on one planner.
    """

    def __init__(
        self, job: Job, inputs: Inputs, costs: OptimizerCosts | None = None, stage: Stage | None = None
    ) -> None:
        """`costs`: those of the same optimizer over the same model, and `stage`: that of the same step, where they are
        known."""
        super().__init__(job, inputs, job.eligible.travel, costs, stage)
        self._others: dict[Travel, OneWay] = {}

    def on(self, hardware: Hardware) -> Planner:
        """The planner of the same step on another card: single techniques that were tried are not tried again."""
        here = self.hardware
        assert (here.device_type, here.unified_memory) == (hardware.device_type, hardware.unified_memory)
        job = dataclasses.replace(self.job, hardware=hardware)
        return Planner(job, self.inputs, self.costs, self.stage.for_another_card())

    def by(self, travel: Travel) -> OneWay:
        """The same step, with tensors that travel so."""
        if travel == self.travel:
            return self
        if travel not in self._others:
            job = self.job.under(travel.said_in(self.job.config))
            self._others[travel] = OneWay(job, self.inputs, travel, self.costs, self.stage)
        return self._others[travel]

    def plan(self, strategy: Strategy) -> Plan:
        """The cheapest plan that fits under this strategy; `plan.fits` is False when there is none."""
        assert strategy.eligible.hardware == self.hardware, "what is eligible there is another question"
        found = _plan_under(self, strategy)
        if strategy.config.force_optimize or not found.actions or not self.hardware.has_caching_allocator:
            return found
        return _or_narrower(self, strategy, found)


def _or_narrower(planner: Planner, strategy: Strategy, found: Plan) -> Plan:
    """The plan, or a better one of a narrower mode. See NOTE [narrower modes]."""
    best, travel = found, strategy.eligible.travel
    modes = list(OptimizationMode)
    for mode in [strategy.config.mode, *reversed(modes[: modes.index(strategy.config.mode)])]:
        narrower = dataclasses.replace(strategy, eligible=strategy.eligible.in_mode(mode))
        guess = _Way(planner, travel, narrower).guess()
        if not guess.fits or _preference(guess) >= _preference(best):
            break  # by the peak model, so that rehearsals could only be worse; and narrower modes are no better
        if mode != strategy.config.mode:
            best = min(best, _plan_under(planner, narrower), key=_preference)
    return dataclasses.replace(best, mode=found.mode)


def _plan_under(planner: Planner, strategy: Strategy) -> Plan:
    ways = [_Way(planner, travel, strategy) for travel in strategy.eligible.travels]
    if not ways[0].needs_optimizing:
        return ways[0].plan()
    if strategy.config.force_optimize:
        return _lowest(ways)
    num_levels = ways[0].num_levels
    for level in range(1, num_levels):
        plan = _cheapest(ways, level)
        if plan.fits:
            return dataclasses.replace(plan, front_note=MORE_BELOW)
    return _cheapest(ways, num_levels, looks_everywhere=True)


class _Way:
    """Planning with tensors that travel in one way."""

    def __init__(self, planner: Planner, travel: Travel, strategy: Strategy) -> None:
        self._first, self.travel, self._asked = planner, travel, strategy.config
        self.eligible = strategy.eligible.by(travel)
        self._strategy = dataclasses.replace(strategy, eligible=self.eligible)

    @property
    def planner(self) -> OneWay:
        """Made when it is asked for."""
        return self._first.by(self.travel)

    @property
    def needs_optimizing(self) -> bool:
        return needs_optimizing(self.planner.cost_model(), self.eligible, self.planner.first_reserve(self.eligible))

    @property
    def num_levels(self) -> int:
        return len(self.planner.levels(self.eligible))

    def look_into(self, num_levels: int | None = None) -> None:
        """Try what so many levels of techniques bring; None: all of them. What was tried is not tried again."""
        for level in self.planner.levels(self.eligible)[:num_levels]:
            level(self.eligible)

    def guess(self) -> Plan:
        """The plan by the peak model, without a rehearsal."""
        reserve_bytes = self.planner.first_reserve(self.eligible)
        return decide_on(self.planner.cost_model(), self.eligible, self._strategy.source, reserve_bytes=reserve_bytes)

    def plan(self) -> Plan:
        return self.planner.decide_and_rehearse(self._strategy)

    def refined(self, plan: Plan) -> Plan:
        """A faster plan than the last of this way, or that one; why its transfers block is the same."""
        found = self.planner.refined(plan, self._strategy) if plan.fits else plan
        return _as_it_travels(found, plan)

    def plan_nearer(self, farther: Plan, like: _Way) -> Plan:
        """The plan of this way, which fetches fewer layers ahead than the `farther` one."""
        if farther.fits:
            return _because_nearer(self.faster(farther, like), "with more of them this budget takes longer", farther)
        return _because_nearer(self.plan(), "with more of them nothing fits the budget", farther)

    def faster(self, plan: Plan, like: _Way) -> Plan:
        """A faster plan than this, or this, by what was taught of another way that is like this one."""
        return min(plan, self.planner.decide_and_rehearse(self._strategy, plan, like.planner), key=_rank)

    def in_other_buckets(self, plan: Plan, level: int) -> Plan:
        """The plan with state that travels in buckets of another size, where that is faster; else the plan itself."""
        model = self.planner.cost_model()
        best, sizes = plan, sizes_worth_trying(model, choice_of(plan.actions, model.profile)) if plan.fits else []
        for num_bytes in sizes:
            way = _Way(self._first, self.travel.in_buckets_of(num_bytes), self._strategy)
            way.look_into(level)
            found = way.planner.in_these_buckets(best, way.eligible)
            if found is not None:
                best = min(best, _as_it_travels(found, plan), key=_rank)
        return best

    def wider(self, plan: Plan) -> _Way | None:
        """The same with wider windows, where these promise a faster plan than this by the models of peak and time."""
        model = self.planner.cost_model()
        travel = wider(model, self.travel, self._asked) if plan.fits and plan.actions else None
        if travel is None:
            return None
        way = _Way(self._first, travel, self._strategy)
        promises = has_faster(
            model.with_window(travel.transfers.window_bytes),
            way.eligible,
            plan.predicted_slowdown * (1 - _WORTH_WIDENING),
            is_exact=_is_exact(plan),
            # What the allocator holds above what is live is taken to be the same for other plans.
            reserve_bytes=needed_bytes(plan) - plan.predicted_peak_bytes,
            # By which it will be decided, see `faster`: what cannot fit by it needs no rehearsals.
            taught=self.planner.taught.as_it_began().lessons(),
        )
        return way if promises else None

    def one_ahead(self, plan: Plan) -> _Way | None:
        """The same with weights fetched one layer ahead, where that could let a plan fit that does not, or promises a
        faster one than this. See NOTE [how far ahead] in travel.py."""
        model = self.planner.cost_model()
        travel = one_ahead(self.travel, self._asked) if plan.actions else None
        if travel is None or not any(treatment.streams for treatment in model.treatments):
            return None
        if plan.fits:
            limit = plan.predicted_slowdown * (1 - _WORTH_COMING_NEARER)
            promises = may_be_faster_one_ahead(model, self.eligible, plan, limit)
        else:
            spare_bytes = most_in_flight_bytes(model, self.travel) - most_in_flight_bytes(model, travel)
            promises = _least_needed_bytes(plan) - spare_bytes <= plan.budget_bytes
        return _Way(self._first, travel, self._strategy) if promises else None

    def may_beat(self, plan: Plan, first: _Way) -> bool:
        """Whether a better plan than this could be found if transfers block, by what is known from the first way."""
        model = first.planner.cost_model()
        spare_bytes = most_in_flight_bytes(model, first.travel)
        if not plan.fits:
            return _least_needed_bytes(plan) - spare_bytes <= plan.budget_bytes
        return may_be_faster_blocking(
            model,
            self.eligible,
            plan,
            spare_bytes=spare_bytes,
            # What the allocator holds above what is live is taken to be the same for other plans.
            reserve_bytes=needed_bytes(plan) - plan.predicted_peak_bytes,
        )


def _least_needed_bytes(plan: Plan) -> int:
    """What must go down for a plan to fit that does not: live bytes where these are too many by themselves."""
    live_bytes = plan.predicted_peak_bytes
    return live_bytes if live_bytes > plan.budget_bytes else needed_bytes(plan)


def _cheapest(ways: list[_Way], level: int, *, looks_everywhere: bool = False) -> Plan:
    """The cheapest plan with techniques up to this level. `looks_everywhere`: before it is said that nothing fits."""
    first, *others = ways
    first.look_into(level)
    best, fastest = first.plan(), first
    near = first.one_ahead(best)
    if near is not None:
        near.look_into(level)
        best, fastest = min((best, fastest), (near.plan_nearer(best, like=first), near), key=_rank_of_first)
    for way in others:
        if way.may_beat(best, first) or (looks_everywhere and not best.fits):
            way.look_into(level)
            rule = "with overlap this budget takes longer" if best.fits else "with overlap nothing fits the budget"
            found = _because(way.plan(), rule, best)
            best, fastest = min((best, fastest), (found, way), key=_rank_of_first)
    base = fastest if fastest.travel.overlaps else first
    wide = base.wider(best)
    if wide is not None:
        wide.look_into(level)
        found = wide.faster(best, like=base)
        found = _as_it_travels(found, best) if base is fastest else found
        best, fastest = min((best, fastest), (found, wide), key=_rank_of_first)
    # Only the fastest of all, and last: so whatever is tried beside it, no plan is slower than without it.
    return fastest.in_other_buckets(fastest.refined(best), level)


def _rank_of_first(found: tuple[Plan, _Way]) -> tuple[float, ...]:
    return _rank(found[0])


def _preference(plan: Plan) -> tuple[float, ...]:
    """What fits first, then what is exact and what is fast; else what needs least. Of equals, the one that was there
    before."""
    if not plan.fits:
        return (1, needed_bytes(plan))
    return (0, not _is_exact(plan), plan.predicted_slowdown)


def _is_exact(plan: Plan) -> bool:
    return all(technique_of(action).is_exact for action in plan.actions)


def _rank(plan: Plan) -> tuple[float, ...]:
    return (0, plan.predicted_slowdown) if plan.fits else (1, needed_bytes(plan))


def _lowest(ways: list[_Way]) -> Plan:
    """The lowest peak of all; of equal ones that of transfers that overlap."""
    for way in ways:
        way.look_into()
    guesses = [(way.guess(), way) for way in ways]
    overlapped = min((guess for guess, _ in guesses if _overlaps(guess)), key=_peak, default=None)
    rule, found = "with overlap the lowest peak is higher", list[Plan]()
    for guess, way in sorted(guesses, key=lambda one: _peak(one[0])):
        # Rehearsals are about as high as the peak model says: what that puts higher is not worth one.
        if all(not plan.fits or _peak(guess) < _peak(plan) for plan in found):
            found.append(way.plan() if overlapped is None else _because(way.plan(), rule, overlapped))
    return min(found, key=lambda plan: (not plan.fits, _peak(plan), not _overlaps(plan)))


def _peak(plan: Plan) -> int:
    return plan.predicted_peak_bytes


def _overlaps(plan: Plan) -> bool:
    return plan.conditions is not None and plan.conditions.async_offload


def _as_it_travels(plan: Plan, like: Plan) -> Plan:
    """The plan, with why the other's transfers block, or bring weights nearer to their use, if they do."""
    if plan.conditions is None or like.conditions is None:
        return plan
    found, why = plan.conditions, like.conditions
    return dataclasses.replace(plan, conditions=dataclasses.replace(found, blocking=why.blocking, nearer=why.nearer))


def _because_nearer(plan: Plan, rule: str, farther: Plan) -> Plan:
    """The plan, with why it fetches fewer layers ahead, if it is not the farther one itself."""
    if plan is farther or plan.conditions is None:
        return plan
    numbers = {"farther_bytes": needed_bytes(farther), "farther_slowdown": farther.predicted_slowdown}
    return dataclasses.replace(plan, conditions=dataclasses.replace(plan.conditions, nearer=Reason(rule, {**numbers})))


def _because(plan: Plan, rule: str, overlapped: Plan) -> Plan:
    """The plan, with why its transfers block, if they do; `overlapped` is what there would be if they did not."""
    if plan.conditions is None or plan.conditions.async_offload:
        return plan
    numbers = {"overlapped_bytes": needed_bytes(overlapped), "overlapped_slowdown": overlapped.predicted_slowdown}
    conditions = dataclasses.replace(plan.conditions, blocking=Reason(rule, {**numbers}))
    return dataclasses.replace(plan, conditions=conditions)
