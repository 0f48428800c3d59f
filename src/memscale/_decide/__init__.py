"""Stage 2: the cheapest plan that fits. A pure function of frozen data; it sees no module and no tensor.

A choice says for each block what is done to it, and for the run how large the tiles are and where the optimizer's
state waits. `search` offers the choices that no other beats, whatever the budget is; the fastest that fits is taken.

    eligible, policy/                                    what may be used: wishes that can be followed, and a policy's
    choice, cost_model, budget                           what can be chosen, what it costs, and what there is to spend
    timeline, step_time, link_clock, lanes               the model of time
    optimizer_model, optimizer_shares, early_state       the optimizer under a plan
    search, partial_choices, lowest_peak, spaced         what is worth considering
    pareto, bound                                        peak against time, and the least time of any exact plan
    travel                                               how tensors go to the next tier and come back
    write_plan, chosen, misfit                           what was decided, as a plan or as an error
    allocator/                                           PyTorch's caching allocator, as a model
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from memscale._decide.bound import least_blocking_ms
from memscale._decide.budget import Budget, Held, needed_bytes
from memscale._decide.choice import OPTIONS, Choice, Outcome, RunOptions, choice_of
from memscale._decide.cost_model import CostModel
from memscale._decide.early_state import early_candidates, late_candidates
from memscale._decide.eligible import Eligible
from memscale._decide.lowest_peak import Room
from memscale._decide.misfit import misfit
from memscale._decide.pareto import (
    by_peak,
    by_time,
    pareto_front,
    scattered,
    slowdown,
    slowdown_of,
    time_key,
    unbeaten,
    undominated,
)
from memscale._decide.search import Candidate, search
from memscale._decide.spaced import spaced_choices
from memscale._decide.travel import one_layer_bytes
from memscale._decide.write_plan import Decision, asked_for, may_step_on_host, write_plan
from memscale._plan import Action, DecisionSource, Plan, Reason
from memscale._profile import OFFLOAD, Profile, Treatment
from memscale.report.peak_against_time import PeakAgainstTime
from memscale.techniques.technique import Technique

FORCED = "force_optimize: the lowest peak that the mode allows"
LOWEST = "the lowest peak that the mode allows"
DISPROVED = "the fastest that the peak model lets fit, and its rehearsal does not"
NOTHING_ELSE = "it fits as it is, so nothing else was looked into; force_optimize=True does"


def needs_optimizing(model: CostModel, eligible: Eligible, reserve_bytes: int = 0) -> bool:
    """The smart skip: a model that already fits is left alone, unless the user insists.

    `reserve_bytes` is what the allocator holds above what is live.
    """
    baseline = model.evaluate(Choice())
    is_too_high = baseline.peak_bytes + reserve_bytes > eligible.budget.device_bytes
    return eligible.config.force_optimize or is_too_high


def decide(
    profile: Profile,
    eligible: Eligible,
    decision_source: DecisionSource = "user_config",
    *,
    margin_bytes: int = 0,
    reserve_bytes: int = 0,
    rehearsed: Mapping[Choice, int] | None = None,
    raise_if_unfit: bool = True,
) -> Plan:
    """The plan for this profile with what is eligible; `DoesNotFitError` when there is none."""
    model = CostModel(profile, eligible.hardware, overlaps=eligible.overlaps)
    plan = decide_on(
        model,
        eligible,
        decision_source,
        margin_bytes=margin_bytes,
        reserve_bytes=reserve_bytes,
        rehearsed=rehearsed,
    )
    if raise_if_unfit and not plan.fits:
        raise misfit(profile, plan, eligible.config)
    return plan


def decide_on(
    model: CostModel,
    eligible: Eligible,
    decision_source: DecisionSource = "user_config",
    *,
    margin_bytes: int = 0,
    margins: Mapping[Traits, int] | None = None,
    reserve_bytes: int = 0,
    reserves: Mapping[Kind, int] | None = None,
    rehearsed: Mapping[Choice, int] | None = None,
) -> Plan:
    """The same for somebody who decides on one profile several times; `plan.fits` is False when nothing fits.

    `margin_bytes` is how far the peak model was found to be below a rehearsal: candidates must fit with it added.
    `margins` are the same for candidates with one of these traits (`suspects_of`). Candidates that were `rehearsed`
    count with the peaks that this showed. `reserve_bytes` is what the allocator is expected to hold above what is live:
    a budget bounds both together; `reserves` are how much more than that, or less, it holds for some kinds.
    """
    budget = dataclasses.replace(eligible.budget, device_bytes=max(0, eligible.budget.device_bytes - reserve_bytes))
    baseline = model.evaluate(Choice())
    if not needs_optimizing(model, eligible, reserve_bytes):
        numbers = {"baseline_bytes": baseline.peak_bytes, "budget_bytes": eligible.budget.device_bytes}
        skipped = Choice(run=_as_asked(model, eligible))
        chosen, summary = Candidate(skipped, model.evaluate(skipped)), Reason("smart skip: fits as it is", {**numbers})
        candidates, note, fits = [chosen], NOTHING_ELSE, budget.admits(chosen.outcome)
    else:
        candidates, note = find_candidates(model, baseline, eligible), ""
        expected = _Expected(model, margin_bytes, margins or {}, reserves or {}, _by_blocks(rehearsed or {}))
        chosen, summary = _choose(candidates, baseline, budget, eligible, expected)
        fits = budget.admits(expected.of(chosen).outcome)
    front = pareto_front(_placeable(candidates, budget), baseline, chosen, model.profile)
    decision = Decision(decision_source, baseline, chosen, fits, summary, front, note)
    plan = write_plan(model, eligible, decision)
    if chosen.choice == Choice(run=_as_asked(model, eligible)):
        plan = dataclasses.replace(plan, actions=(*plan.actions, *asked_for(model, eligible)))
    return plan


def _as_asked(model: CostModel, eligible: Eligible) -> RunOptions:
    """What is done however large the budget is, because the user asks for it: what the training loop notices."""
    asked: dict[str, Any] = {}
    for technique in eligible.techniques:
        if technique.changes_loop and technique.option is not None and eligible.must_use(technique):
            for value in technique.option.values(model.traced, eligible)[:1]:
                asked[technique.option.field] = value
    return RunOptions(**asked)


def plan_as_it_is(profile: Profile, eligible: Eligible, actions: tuple[Action, ...], rule: str) -> Plan:
    """The plan that does just this, whatever else there would be; `plan.fits` says whether it may."""
    model = CostModel(profile, eligible.hardware, overlaps=eligible.overlaps)
    choice, baseline = choice_of(actions, profile), model.evaluate(Choice())
    budget, outcome = eligible.budget, model.evaluate(choice)
    numbers = {"baseline_bytes": baseline.peak_bytes, "budget_bytes": budget.device_bytes}
    chosen, fits = Candidate(choice, outcome), budget.admits(outcome)
    decision = Decision("user_config", baseline, chosen, fits, Reason(rule, {**numbers}))
    return write_plan(model, eligible, decision)


@dataclasses.dataclass(frozen=True, slots=True)
class _Expected:
    """What candidates are expected to peak at, where rehearsals have said something about it."""

    model: CostModel
    margin_bytes: int
    margins: Mapping[Traits, int]
    reserves: Mapping[Kind, int]
    rehearsed: Mapping[_Blocks, int]

    def of(self, candidate: Candidate) -> Candidate:
        peak_bytes, outcome = self._rehearsed_bytes(candidate.choice), candidate.outcome
        if peak_bytes is None:
            margin = 0 if self._was_traced(candidate.choice) else self._margin(candidate.choice)
            reserve = self.reserves.get(kind_of(candidate.choice), 0) if self.reserves else 0
            peak_bytes = outcome.peak_bytes + margin + reserve
        if peak_bytes == outcome.peak_bytes:
            return candidate
        return Candidate(candidate.choice, dataclasses.replace(outcome, peak_bytes=peak_bytes))

    def _rehearsed_bytes(self, choice: Choice) -> int | None:
        """Candidates are many, and their blocks take long to hash: most differ in something else already."""
        num_blocks, run = len(choice.blocks), choice.run
        if not any(len(blocks) == num_blocks and other == run for blocks, other in self.rehearsed):
            return None
        return self.rehearsed.get(_key(choice))

    def _margin(self, choice: Choice) -> int:
        traits = _traits_of(choice) if self.margins else frozenset()
        shared = (margin for suspects, margin in self.margins.items() if suspects & traits)
        return max(self.margin_bytes, *shared, 0)

    def _was_traced(self, choice: Choice) -> bool:
        """A choice with every block treated alike and nothing else: the profile holds the trace of such a step."""
        if len(choice.blocks) not in (0, len(self.model.blocks)) or choice.run != RunOptions():
            return False
        return len(_treatments_of(choice)) <= 1


Traits = frozenset[Treatment | Technique]
"""What is done in a plan, to whichever blocks."""


def _treatments_of(choice: Choice) -> set[Treatment]:
    """Blocks are many, and share their treatments: those that are the same object are hashed once."""
    return set({id(treatment): treatment for _, treatment in choice.blocks}.values())


def _traits_of(choice: Choice) -> Traits:
    return frozenset([*_treatments_of(choice), *choice.run.techniques])


def suspects_of(choice: Choice) -> Traits:
    """What may have made the peak model wrong about a choice: treatments whose tensors travel, as what is on its way is
    not added up block by block; without any, all that is done."""
    return frozenset(
        treatment for _, treatment in choice.blocks if treatment.offloads or treatment.streams
    ) or _traits_of(choice)


Kind = tuple[Technique, ...]
"""What is done beside the blocks in forward and backward."""


def kind_of(choice: Choice) -> Kind:
    """Choices of one kind are expected to hold about as much above what is live.

    What is made of a loss or of logits there, in large pieces or in small ones, is what leaves gaps. The treatments of
    blocks differ from each choice to the next, and what acts in the optimizer's step comes when these pieces are gone.
    """
    return tuple(technique for technique in choice.run.techniques if not technique.only_steps)


_Blocks = tuple[frozenset[tuple[str, Treatment]], RunOptions]


def _key(choice: Choice) -> _Blocks:
    """A choice, in whatever order its blocks are named."""
    return frozenset(choice.blocks), choice.run


def _by_blocks(peaks: Mapping[Choice, int]) -> dict[_Blocks, int]:
    return {_key(choice): peak_bytes for choice, peak_bytes in peaks.items()}


def _choose(
    candidates: list[Candidate], baseline: Outcome, budget: Budget, eligible: Eligible, expected: _Expected
) -> tuple[Candidate, Reason]:
    """One of the candidates. Its rule does not say that it does not fit: whether it does, its rehearsal tells."""
    placeable = _placeable(candidates, budget)
    numbers: dict[str, int | float | str] = {
        "baseline_bytes": baseline.peak_bytes,
        "budget_bytes": eligible.budget.device_bytes,
        "candidates": len(candidates),
    }

    def lowest(candidate: Candidate) -> tuple[float, ...]:
        return by_peak(expected.of(candidate))

    if eligible.config.force_optimize:
        # By the model state that comes early may raise no peak, and would by a little; its plans lower none.
        return min(
            (c for c in placeable if not c.choice.run.early_state and not c.choice.run.late_state), key=lowest
        ), Reason(FORCED, numbers)
    fitting = [c for c in placeable if budget.admits(expected.of(c).outcome)]
    if not fitting:
        return min(placeable, key=lowest), Reason(LOWEST, numbers)
    exact = [c for c in fitting if c.choice.run.is_exact]
    if exact or all(c.choice.run.is_exact for c in candidates):
        return min(exact, key=by_time), Reason("the fastest of the candidates that fit", numbers)
    return min(fitting, key=by_time), Reason("nothing exact fits: the fastest of the others that do", numbers)


def confirmed(plan: Plan, peak_bytes: int, *, fits: bool, held: Held | None = None) -> Plan:
    """The plan with what its rehearsal showed. Its rule does not go on saying what that has disproved."""
    summary = plan.summary
    if plan.fits and not fits and summary.rule != FORCED:
        summary = Reason(DISPROVED, {**summary.numbers, "predicted_bytes": plan.predicted_peak_bytes})
    plan = dataclasses.replace(plan, predicted_peak_bytes=peak_bytes, fits=fits, rehearsed=True, summary=summary)
    return plan if held is None else held.written_in(plan)


def _placeable(candidates: list[Candidate], budget: Budget) -> list[Candidate]:
    """The candidates for which host and disk have room."""
    anywhere = dataclasses.replace(budget, device_bytes=2**63)
    return [c for c in candidates if anywhere.admits(c.outcome)]


def peak_against_time(model: CostModel, eligible: Eligible, plan: Plan) -> PeakAgainstTime:
    """Everything that was profiled, where a plan may carry less; the plan's own point of the front is marked."""
    profile, baseline = model.profile, model.evaluate(Choice())
    candidates = _placeable(find_candidates(model, baseline, eligible), eligible.budget)
    wanted = choice_of(plan.actions, profile)
    chosen = next((c for c in candidates if _key(c.choice) == _key(wanted)), None)
    chosen = chosen or Candidate(wanted, model.evaluate(wanted))
    front = pareto_front(candidates, baseline, chosen, profile)
    return PeakAgainstTime(front, scattered(candidates, baseline, profile), len(candidates))


def may_be_faster_blocking(
    model: CostModel, eligible: Eligible, plan: Plan, *, spare_bytes: int, reserve_bytes: int
) -> bool:
    """Whether a plan whose transfers block could be faster than this one, whose transfers overlap.

    It is found from the profile with overlap: rehearsals without are dear, and are made only where this says so.
    `spare_bytes` is how much lower the peak of the same choice may be then, which is no more than what waits elsewhere
    can take on its way there and back. What sends nothing away is the same plan either way.
    """
    blocking = CostModel(model.profile, model.hardware)
    baseline, is_exact = blocking.evaluate(Choice()), choice_of(plan.actions, model.profile).run.is_exact
    limit = plan.predicted_slowdown
    most_bytes = eligible.budget.device_bytes - reserve_bytes + spare_bytes
    # Most often no plan at all could be, which takes no search to know.
    least_ms = least_blocking_ms(blocking, most_bytes, host_step=may_step_on_host(blocking, eligible))
    if is_exact and slowdown_of(least_ms * (1 - 1e-9), baseline, is_exact=True) >= limit:
        return False

    def could(candidate: Candidate) -> bool:
        outcome = candidate.outcome
        freed_bytes = min(spare_bytes, 2 * outcome.waiting_bytes)
        least = dataclasses.replace(outcome, peak_bytes=outcome.peak_bytes + reserve_bytes - freed_bytes)
        is_other = outcome.waiting_bytes and (candidate.choice.run.is_exact or not is_exact)
        return bool(is_other) and eligible.budget.admits(least) and slowdown(candidate, baseline) < limit

    return any(map(could, find_candidates(blocking, baseline, eligible)))


def may_be_faster_one_ahead(model: CostModel, eligible: Eligible, plan: Plan, limit: float) -> bool:
    """Whether a choice could be below this slowdown, as exact as the plan, if one layer less were fetched ahead.

    What the allocator holds above what is live is taken to be the same as in the plan.
    """
    baseline, is_exact = model.evaluate(Choice()), choice_of(plan.actions, model.profile).run.is_exact
    reserve_bytes = needed_bytes(plan) - plan.predicted_peak_bytes

    def could(candidate: Candidate) -> bool:
        choice, outcome = candidate.choice, candidate.outcome
        if slowdown(candidate, baseline) >= limit or choice.run.is_exact < is_exact:
            return False
        spare_bytes = one_layer_bytes(model, choice)
        least = dataclasses.replace(outcome, peak_bytes=outcome.peak_bytes + reserve_bytes - spare_bytes)
        return bool(spare_bytes) and eligible.budget.admits(least)

    return any(map(could, find_candidates(model, baseline, eligible)))


def has_faster(model: CostModel, eligible: Eligible, limit: float, *, is_exact: bool, reserve_bytes: int = 0) -> bool:
    """Whether the plan for this would fit and have a slowdown below the limit, and be exact if it has to be.

    An exact candidate that does is enough to know, and is mostly among the first that are found.
    """
    free_bytes = max(0, eligible.budget.device_bytes - reserve_bytes)
    budget, baseline = dataclasses.replace(eligible.budget, device_bytes=free_bytes), model.evaluate(Choice())
    if needs_optimizing(model, eligible, reserve_bytes):
        for candidate in itertools.chain.from_iterable(_find_candidates(model, baseline, eligible)):
            is_faster = candidate.choice.run.is_exact and slowdown(candidate, baseline) < limit
            if is_faster and budget.admits(candidate.outcome):
                return True
        if is_exact:
            return False
    guess = decide_on(model, eligible, reserve_bytes=reserve_bytes)
    guessed = choice_of(guess.actions, model.profile)
    return guess.fits and guess.predicted_slowdown < limit and guessed.run.is_exact >= is_exact


def find_candidates(model: CostModel, baseline: Outcome, eligible: Eligible) -> list[Candidate]:
    """What is eligible and no other candidate beats. It does not depend on the device's budget, so it is found once."""
    key = dataclasses.replace(eligible, budget=dataclasses.replace(eligible.budget, device_bytes=0))
    found: list[Candidate] | None = model.candidates.get(key)
    if found is None:
        parts = _find_candidates(model, baseline, eligible)
        found = model.candidates[key] = list(itertools.chain(*parts)) or [Candidate(Choice(), baseline)]
    return found


def _find_candidates(model: CostModel, baseline: Outcome, eligible: Eligible) -> Iterator[list[Candidate]]:
    """Candidates, part by part, for somebody who does not need all of them."""
    runs, budget = list(_runs(model, eligible)), eligible.budget
    found = [Candidate(Choice(), baseline)] if RunOptions() in runs else []
    for treatment in model.whole_treatments if RunOptions() in runs else ():
        if eligible.allows(treatment):
            on_device = treatment.streams and not may_step_on_host(model, eligible)
            whole = Choice(tuple((fqn, treatment) for fqn in model.blocks), RunOptions(steps_on_device=on_device))
            found.append(Candidate(whole, model.evaluate_whole(whole)))
    counts_waiting = model.most_waiting_bytes() > budget.host_bytes
    room = Room(budget.host_bytes, budget.disk_bytes)
    for some, allowed in _by_place_of_step(model, eligible, runs):
        found += search(model, some, allowed, counts_waiting=counts_waiting, room=room)
    found = [
        c for c in found if _gains_by_buckets(model, c) and _gains_by_rows(model, c) and _needs_its_place(c.choice)
    ]
    yield list(found)
    for is_exact in (True, False):
        alike = [candidate for candidate in found if candidate.choice.run.is_exact == is_exact]
        shared = _with_shares(model, alike, counts_waiting=counts_waiting)
        found += shared
        yield shared
    spaced = _spaced(model, eligible, found)
    found += spaced
    yield spaced
    yield _early(model, eligible, found)


def _runs(model: CostModel, eligible: Eligible) -> Iterator[RunOptions]:
    """Every eligible way of running what is not a single block."""
    values = (_values(model, eligible, OPTIONS[field.name], field.default) for field in dataclasses.fields(RunOptions))
    for chosen in itertools.product(*values):
        run = RunOptions(*chosen)
        # What steps in 8 bits may be another class, and of the two only one may be stepped in buckets.
        if model.optimizer.can_step(run):
            yield run


def _by_place_of_step(
    model: CostModel, eligible: Eligible, runs: list[RunOptions]
) -> Iterator[tuple[list[RunOptions], list[Treatment]]]:
    """Runs that step streamed parameters on the host, and on the device, with the treatments that go with them."""
    allowed = [treatment for treatment in model.treatments if eligible.allows(treatment)]
    on_host = [run for run in runs if not run.steps_on_device]
    if may_step_on_host(model, eligible):
        yield on_host, allowed
    else:
        resident = [treatment for treatment in allowed if not treatment.streams]
        yield [run for run in on_host if not run.streams_rest], resident
    on_device = [run for run in runs if run.steps_on_device]
    if on_device:
        yield on_device, allowed


def _needs_its_place(choice: Choice) -> bool:
    """What streams nothing is found among runs that do not say where that is stepped."""
    streams = choice.run.streams_rest or any(treatment.streams for _, treatment in choice.blocks)
    return streams or not choice.run.steps_on_device


def _with_shares(model: CostModel, found: list[Candidate], *, counts_waiting: bool) -> list[Candidate]:
    """Plans that send the optimizer's state away, with a share of it left on the device; those that nothing beats.

    Where host or disk may be what a plan fails on, those that are beaten in peak and time may be what is left.

    State is on the device all the time, so leaving more of it there moves a whole front up by as many bytes: the blocks
    of plans that send all of it away are those of plans that send some.
    """
    away = [c for c in found if c.choice.run.offloads_optimizer and model.optimizer.cost(c.choice.run).shares]
    shared: list[tuple[Choice, RunOptions, Outcome]] = []
    runs_by: dict[RunOptions, list[RunOptions]] = {}
    for candidate in away if counts_waiting else undominated(away):
        choice = candidate.choice
        if choice.run not in runs_by:
            shares = [share.resident_share for share in model.optimizer.cost(choice.run).shares]
            runs_by[choice.run] = [dataclasses.replace(choice.run, offloads_optimizer=1.0 - share) for share in shares]
        runs = runs_by[choice.run]
        outcomes = model.evaluate_runs(choice, runs)
        shared += [(choice, run, outcome) for run, outcome in zip(runs, outcomes, strict=True)]
    if not counts_waiting:
        # Most of them are beaten, and are not worth a candidate of their own.
        found_keys = [by_time(candidate) for candidate in found]
        keys = [time_key(one, len(choice.blocks) + run.num_actions) for choice, run, one in shared]
        kept = sorted(unbeaten([*found_keys, *keys]))
        shared = [shared[index - len(found)] for index in kept if index >= len(found)]
    return [Candidate(Choice(choice.blocks, run), outcome) for choice, run, outcome in shared]


def _spaced(model: CostModel, eligible: Eligible, found: list[Candidate]) -> list[Candidate]:
    """Exact plans with activations that wait elsewhere, block by block far apart; those that nothing beats.

    See NOTE [far apart] in spaced.py.
    """
    if not model.window_bytes or not eligible.allows(OFFLOAD):
        return []
    exact = [candidate for candidate in found if candidate.choice.run.is_exact]
    bases = sorted(undominated(exact), key=by_peak)
    choices = dict.fromkeys(spaced_choices(model, [candidate.choice for candidate in bases]))
    spaced = [Candidate(choice, model.evaluate(choice)) for choice in choices]
    spaced += _with_shares(model, spaced, counts_waiting=False)
    kept = {id(candidate) for candidate in undominated([*exact, *spaced])}
    return [candidate for candidate in spaced if id(candidate) in kept]


def _early(model: CostModel, eligible: Eligible, found: list[Candidate]) -> list[Candidate]:
    """Exact plans with state that comes back under backward or leaves under the next forward; those that nothing beats.

    See NOTE [under backward] and NOTE [under the next forward] in early_state.py.
    """
    if not eligible.has(OPTIONS["early_state"]):
        return []
    exact = [candidate for candidate in found if candidate.choice.run.is_exact]
    bases = sorted(undominated(exact), key=by_peak)
    choices = [candidate.choice for candidate in bases]
    early = _unbeaten_of(list(early_candidates(model, choices)), exact)
    # Late state may turn out to reserve more than is expected: what is beaten by it alone stays a candidate.
    return early + _unbeaten_of(list(late_candidates(model, choices)), [*exact, *early])


def _unbeaten_of(found: list[Candidate], others: list[Candidate]) -> list[Candidate]:
    """Those that neither one another nor the others beat."""
    kept = {id(candidate) for candidate in undominated([*others, *found])}
    return [candidate for candidate in found if id(candidate) in kept]


def _gains_by_buckets(model: CostModel, candidate: Candidate) -> bool:
    """Whether the peak would be higher, or the step slower, if it did not run in buckets; True where it does not.

    Buckets take turns with streamed parameters that are stepped on the device, so they may be faster. What gains
    nothing by them is no candidate, so plans whose peak is elsewhere are what they were without them.
    """
    choice = candidate.choice
    if not choice.run.steps_in_buckets:
        return True
    at_once = dataclasses.replace(choice, run=dataclasses.replace(choice.run, steps_in_buckets=False))
    other, mine = model.evaluate(at_once), candidate.outcome
    return mine.peak_bytes < other.peak_bytes or (choice.run.steps_on_device and mine.step_ms < other.step_ms)


def _gains_by_rows(model: CostModel, candidate: Candidate) -> bool:
    """Whether the peak would be higher with the gradients of the loss at once; True where they are."""
    choice = candidate.choice
    if not choice.run.loss_by_rows:
        return True
    at_once = dataclasses.replace(choice, run=dataclasses.replace(choice.run, loss_by_rows=False))
    return candidate.outcome.peak_bytes < model.evaluate(at_once).peak_bytes


def _values(model: CostModel, eligible: Eligible, technique: Technique, nothing: Any) -> tuple[Any, ...]:
    """The values that can be chosen for a technique's option; doing nothing is one unless it must be used."""
    assert technique.option is not None
    found = technique.option.values(model.traced, eligible) if eligible.has(technique) else ()
    return found if found and eligible.must_use(technique) else (nothing, *found)
