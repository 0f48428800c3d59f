"""How good policies are: on every architecture by trees that were trained on the others."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.policy.boosting import Settings, fit
from benchmarks.policy.cases import TOLERANCE, Case
from benchmarks.policy.shapes import architecture_of
from memscale._decide.policy.learned import first_sure
from memscale._decide.policy.strategies import SHORTLISTS, WIDEST
from memscale._decide.policy.trees import UNIT, Forest
from memscale.report.tables import table

THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99)
"""How sure the trees may have to be that a short list will do; above them: never sure."""
SAFE_SHARE = 0.95
"""The share of plans within 1 % for which the threshold is set, on architectures that are held out in training."""
BANDS = ((0.0, float("inf")), (0.0, 1.5), (1.5, 3.0), (3.0, float("inf")))
"""Of pressure, as in the rules."""


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """How a policy does where something fits that is exact and soon found out."""

    policy: str
    band: str
    num_cases: int
    fits: float
    """The share of cases in which its first choice fits, before everything becomes eligible."""
    is_close: float
    """The share of cases in which the plan is at most 1 % slower than the full search's, after that."""
    mean: float
    """Of the plan's predicted step time over that one's, after that."""
    worst_twentieth: float
    """The 95th percentile of the same."""
    num_tried: float
    """Traces that are made for the plan, on average: most of what planning costs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trained:
    """What is learned: trees for each short list, and how sure they must be."""

    forests: dict[str, Forest]
    threshold: int

    def choose(self, row: Sequence[int]) -> str:
        return first_sure(self.odds(row), self.threshold)

    def odds(self, row: Sequence[int]) -> dict[str, int]:
        return {name: forest.odds(row) for name, forest in self.forests.items()}


def log_odds(share: float) -> int:
    """In millionths."""
    return round(math.log(share / (1 - share)) * UNIT)


def fit_policy(cases: Sequence[Case]) -> Trained:
    """Nothing is taken from anywhere but these cases, the threshold included."""
    said: list[tuple[Case, dict[str, int]]] = []
    for held_out in sorted({architecture_of(case.family) for case in cases}):
        inside = [case for case in cases if architecture_of(case.family) != held_out]
        trained = Trained(fit_forests(inside), 0)
        others = [case for case in cases if architecture_of(case.family) == held_out]
        said += [(case, trained.odds(case.features)) for case in others]
    return Trained(fit_forests(cases), _lowest_safe(said))


def _lowest_safe(said: Sequence[tuple[Case, dict[str, int]]]) -> int:
    for threshold in map(log_odds, THRESHOLDS):
        chosen = [(case, first_sure(odds, threshold)) for case, odds in said]
        if sum(_ratio(case, name) <= TOLERANCE for case, name in chosen) >= SAFE_SHARE * len(said):
            return threshold
    return log_odds(0.999999)


def fit_forests(cases: Sequence[Case], settings: Settings | None = None) -> dict[str, Forest]:
    """For each short list: is it as good as everything?"""
    settings = settings or Settings()
    rows = np.array([case.features for case in cases])
    labels = {name: np.array([float(case.is_good(name)) for case in cases]) for name in SHORTLISTS}
    return {name: fit(rows, labels[name], settings) if cases else Forest(0, ()) for name in SHORTLISTS}


def held_out_policies(cases: Sequence[Case]) -> dict[str, Trained]:
    """For each architecture a policy that has seen nothing of it."""
    names = sorted({architecture_of(case.family) for case in cases})
    return {name: fit_policy([case for case in cases if architecture_of(case.family) != name]) for name in names}


def compare(cases: Sequence[Case], held_out: dict[str, Trained]) -> list[Score]:
    """By pressure, over the cases in which something fits without the last resort."""
    policies: dict[str, Callable[[Case], str]] = {
        "rules": lambda case: case.rule,
        "learned": lambda case: held_out[architecture_of(case.family)].choose(case.features),
        "everything eligible": lambda case: WIDEST,
    }
    fitting = [case for case in cases if case.verdicts[WIDEST].fits]
    scores = []
    for low, high in BANDS:
        there = [case for case in fitting if low < case.pressure <= high]
        if there:
            scores += [score(name, policy, there, _band(low, high)) for name, policy in policies.items()]
    return scores


def _band(low: float, high: float) -> str:
    if high == float("inf"):
        return f"above {low:g}" if low else "all"
    return f"{max(low, 1.0):g} to {high:g}"


def _ratio(case: Case, name: str) -> float:
    """The plan's time over that of the full search's; where the choice does not fit, the full search follows."""
    verdicts = case.verdicts
    return verdicts[name].ratio / verdicts[WIDEST].ratio if verdicts[name].fits else 1.0


def score(name: str, policy: Callable[[Case], str], cases: Sequence[Case], band: str) -> Score:
    chosen = [(case, policy(case)) for case in cases]
    first = [case.verdicts[one] for case, one in chosen]
    ratios = [_ratio(case, one) for case, one in chosen]
    # What was tried in vain is part of what is tried with everything eligible.
    tried = [case.verdicts[one if case.verdicts[one].fits else WIDEST].num_tried for case, one in chosen]
    return Score(
        policy=name,
        band=band,
        num_cases=len(cases),
        fits=sum(verdict.fits for verdict in first) / len(cases),
        is_close=sum(ratio <= TOLERANCE for ratio in ratios) / len(cases),
        mean=statistics.fmean(ratios),
        worst_twentieth=sorted(ratios)[int(0.95 * (len(ratios) - 1))],
        num_tried=statistics.fmean(tried),
    )


def scores_table(scores: Sequence[Score]) -> str:
    header = ("pressure", "policy", "cases", "fits at once", "within 1 %", "mean", "95 %", "traces")
    rows = [
        (
            score.band,
            score.policy,
            str(score.num_cases),
            f"{score.fits:.1%}",
            f"{score.is_close:.1%}",
            f"{score.mean:.4f}",
            f"{score.worst_twentieth:.4f}",
            f"{score.num_tried:.1f}",
        )
        for score in scores
    ]
    return "\n".join(table([header, *rows], left=(0, 1)))
