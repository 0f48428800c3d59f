"""The Pareto front of peak against time: the plans that no other beats, as far as they differ. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memscale._decide.choice import Choice, Outcome, actions_of
from memscale._decide.search import Candidate
from memscale._plan import FrontPoint
from memscale._profile import Profile
from memscale.report.explain import words_of_actions

TimeKey = tuple[float, int, int]
"""Milliseconds, bytes, and the number of actions."""
_LEAST_STEP = 0.01
"""Points whose peaks differ by less than this share of the baseline's are shown as one."""
_MAX_POINTS = 24
_CHART_ROWS, _CHART_COLUMNS = 90, 150
"""How many dots beside one another a chart of all candidates can show apart."""


def pareto_front(
    candidates: Iterable[Candidate], baseline: Outcome, chosen: Candidate, profile: Profile
) -> tuple[FrontPoint, ...]:
    """The highest peak first. What is not exact is offered only below everything that is; thinned to what differs."""
    found = list(candidates)
    front = undominated(c for c in found if c.choice.run.is_exact)
    lossy = undominated(c for c in found if not c.choice.run.is_exact)
    front += [c for c in lossy if not front or c.outcome.peak_bytes < front[-1].outcome.peak_bytes]
    kept = _thinned(front, chosen, baseline.peak_bytes)
    return tuple(_point(candidate, baseline, profile, is_chosen=candidate is chosen) for candidate in kept)


def scattered(candidates: Sequence[Candidate], baseline: Outcome, profile: Profile) -> tuple[FrontPoint, ...]:
    """All of these, the fastest first; of those that a chart cannot show apart, the lowest."""
    times = [slowdown(candidate, baseline) for candidate in candidates]
    highest = max((candidate.outcome.peak_bytes for candidate in candidates), default=0)
    peak_step, time_step = max(1, highest // _CHART_ROWS), (max(times, default=0.0) - 1.0) / _CHART_COLUMNS or 1.0
    dots: dict[tuple[bool, int, int], Candidate] = {}
    for candidate, time in zip(candidates, times, strict=True):
        is_exact, peak_bytes = candidate.choice.run.is_exact, candidate.outcome.peak_bytes
        dot = is_exact, peak_bytes // peak_step, int((time - 1.0) / time_step)
        if dot not in dots or by_peak(candidate) < by_peak(dots[dot]):
            dots[dot] = candidate
    shown = sorted(dots.values(), key=by_time)
    return tuple(_point(candidate, baseline, profile, is_chosen=False) for candidate in shown)


def undominated(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The candidates that no other beats, the fastest first, that is from the highest peak to the lowest."""
    every = list(candidates)
    return [every[index] for index in unbeaten([by_time(candidate) for candidate in every])]


def unbeaten(keys: Sequence[TimeKey]) -> list[int]:
    """Which of these no other beats in time and peak, the fastest first; of equals the first."""
    found, lowest_bytes = [], None
    for index in sorted(range(len(keys)), key=keys.__getitem__):
        if lowest_bytes is None or keys[index][1] < lowest_bytes:
            found.append(index)
            lowest_bytes = keys[index][1]
    return found


def time_key(outcome: Outcome, num_actions: int) -> TimeKey:
    """The faster comes first; among equals the lower, and then what does less."""
    return round(outcome.step_ms, 9), outcome.peak_bytes, num_actions


def by_time(candidate: Candidate) -> TimeKey:
    return time_key(candidate.outcome, candidate.choice.num_actions)


def by_peak(candidate: Candidate) -> tuple[float, ...]:
    """Among equal peaks an exact candidate comes first, however fast the others are."""
    outcome, choice = candidate.outcome, candidate.choice
    return outcome.peak_bytes, not choice.run.is_exact, round(outcome.step_ms, 9), choice.num_actions


def _thinned(front: Sequence[Candidate], chosen: Candidate, baseline_bytes: int) -> list[Candidate]:
    """The chosen one, both ends, and others at least a step apart, in both directions from the chosen one."""
    chosen_bytes = chosen.outcome.peak_bytes
    above = [c for c in reversed(front) if c.outcome.peak_bytes > chosen_bytes]
    below = [c for c in front if c.outcome.peak_bytes < chosen_bytes]
    step_bytes = int(_LEAST_STEP * baseline_bytes)
    while True:
        kept = [*reversed(_spaced(above, chosen_bytes, step_bytes)), chosen, *_spaced(below, chosen_bytes, step_bytes)]
        if len(kept) <= _MAX_POINTS:
            return kept
        step_bytes = step_bytes * 5 // 4 + 1


def _spaced(side: Sequence[Candidate], last_bytes: int, step_bytes: int) -> list[Candidate]:
    """Away from the chosen one; the end of the front is always there."""
    kept: list[Candidate] = []
    for candidate in side:
        if abs(candidate.outcome.peak_bytes - last_bytes) >= step_bytes:
            kept.append(candidate)
            last_bytes = candidate.outcome.peak_bytes
    if side and (not kept or kept[-1] is not side[-1]):
        kept = [*kept[:-1], side[-1]] if kept and _is_near(kept[-1], side[-1], step_bytes) else [*kept, side[-1]]
    return kept


def _is_near(one: Candidate, other: Candidate, step_bytes: int) -> bool:
    return abs(one.outcome.peak_bytes - other.outcome.peak_bytes) < step_bytes


def _point(candidate: Candidate, baseline: Outcome, profile: Profile, *, is_chosen: bool) -> FrontPoint:
    return FrontPoint(
        peak_bytes=candidate.outcome.peak_bytes,
        slowdown=slowdown(candidate, baseline),
        what=describe(candidate.choice, profile),
        is_exact=candidate.choice.run.is_exact,
        is_chosen=is_chosen,
    )


def slowdown(candidate: Candidate, baseline: Outcome) -> float:
    return slowdown_of(candidate.outcome.step_ms, baseline, is_exact=candidate.choice.run.is_exact)


def slowdown_of(step_ms: float, baseline: Outcome, *, is_exact: bool) -> float:
    """No exact plan is promised to be faster than the plain step, though tiles may be."""
    ratio = round(step_ms / baseline.step_ms, 4) if baseline.step_ms else 1.0
    return max(1.0, ratio) if is_exact else ratio


def describe(choice: Choice, profile: Profile) -> str:
    """A choice in a few words: "checkpoint: 20 layers, offload optimizer"."""
    blocks = {layer.module_fqn for layer in profile.layers if layer.is_block}
    return words_of_actions(actions_of(choice, profile), blocks)
