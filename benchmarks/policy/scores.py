"""How good policies are: on every family of models by trees that were trained on the others."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.policy.boosting import Settings, fit
from benchmarks.policy.cases import Case, Verdict
from memscale._decide.policy.strategies import STRATEGIES, WIDEST
from memscale._decide.policy.trees import Forest
from memscale.report.tables import table

THRESHOLDS = (0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995)
"""How sure the trees may have to be that a mild strategy will do; above them: never sure."""
SAFE_FITS = 0.995
"""The share of fitting plans for which the threshold is set, on families that are held out in training."""
NUM_FOLDS = 4
MAX_MEDIAN, MIN_FITS = 1.05, 0.99
EARNED, NOT_EARNED = "The learned policy earns its place.", "The learned policy does not earn its place."
BANDS = ((0.0, float("inf")), (0.0, 1.5), (1.5, 3.0), (3.0, float("inf")))
"""Of pressure, as in the rules."""


@dataclasses.dataclass(frozen=True, slots=True)
class Score:
    """How a policy does where something fits."""

    policy: str
    band: str
    num_cases: int
    fits: float
    """The share of cases in which its plan fits."""
    median: float
    """Of its plan's predicted step time over the best one's; what does not fit is infinitely slow."""
    mean: float
    """Of the same, over the cases in which it fits."""
    worst_twentieth: float
    """The 95th percentile of the same."""
    needlessly_inexact: float
    """The share of cases in which its plan is not exact though an exact one fits."""
    num_tried: float
    """Traces that stage 2 makes for its plan, on average: what planning costs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trained:
    """What is learned: trees for each strategy but the widest, and how sure they must be."""

    forests: dict[str, Forest]
    threshold: float

    def choose(self, row: Sequence[float]) -> str:
        return _first_sure(self.probabilities(row), self.threshold)

    def probabilities(self, row: Sequence[float]) -> dict[str, float]:
        return {name: forest.probability(row) for name, forest in self.forests.items()}


def _first_sure(probabilities: dict[str, float], threshold: float) -> str:
    return next((name for name, probability in probabilities.items() if probability >= threshold), WIDEST)


def fit_policy(cases: Sequence[Case]) -> Trained:
    """Nothing is taken from anywhere but these cases, the threshold included."""
    families = sorted({case.family for case in cases})
    said: list[tuple[Case, dict[str, float]]] = []
    for fold in range(min(NUM_FOLDS, len(families))):
        held_out = set(families[fold::NUM_FOLDS])
        trained = Trained(fit_forests([case for case in cases if case.family not in held_out]), 1.0)
        said += [(case, trained.probabilities(case.features)) for case in cases if case.family in held_out]
    return Trained(fit_forests(cases), _lowest_safe(said))


def _lowest_safe(said: Sequence[tuple[Case, dict[str, float]]]) -> float:
    for threshold in THRESHOLDS:
        fits = sum(case.verdicts[_first_sure(probabilities, threshold)].fits for case, probabilities in said)
        if fits >= SAFE_FITS * len(said):
            return threshold
    return 1.0


def fit_forests(cases: Sequence[Case], settings: Settings | None = None) -> dict[str, Forest]:
    """For each strategy but the widest: is it as good as any?"""
    settings = settings or Settings()
    rows = np.array([case.features for case in cases])
    names = [name for name in STRATEGIES if name != WIDEST]
    labels = {name: np.array([float(case.is_good(name)) for case in cases]) for name in names}
    return {name: fit(rows, labels[name], settings) if cases else Forest(0.0, ()) for name in names}


def held_out_choices(cases: Sequence[Case]) -> list[str]:
    """For each case what a policy chooses that has seen nothing of its family."""
    chosen = [""] * len(cases)
    for family in sorted({case.family for case in cases}):
        trained = fit_policy([case for case in cases if case.family != family])
        for index, case in enumerate(cases):
            if case.family == family:
                chosen[index] = trained.choose(case.features)
    return chosen


def compare(cases: Sequence[Case]) -> list[Score]:
    """All cases, by pressure, and those in which the rules' plans and the learned policy's are not the same."""
    learned = dict(zip(map(id, cases), held_out_choices(cases), strict=True))
    policies: dict[str, Callable[[Case], str]] = {
        "rules": lambda case: case.rule,
        "learned": lambda case: learned[id(case)],
        "everything eligible": lambda case: WIDEST,
    }
    scores = []
    for low, high in BANDS:
        there = [case for case in cases if low < case.pressure <= high]
        if there:
            scores += [score(name, policy, there, _band(low, high)) for name, policy in policies.items()]
    differing = [case for case in cases if _differ(case.verdicts[case.rule], case.verdicts[learned[id(case)]])]
    if differing:
        scores += [score(name, policy, differing, "they differ") for name, policy in policies.items()]
    return scores


def _differ(one: Verdict, other: Verdict) -> bool:
    return (one.fits, one.ratio, one.is_exact) != (other.fits, other.ratio, other.is_exact)


def _band(low: float, high: float) -> str:
    if high == float("inf"):
        return f"above {low:g}" if low else "all"
    return f"{max(low, 1.0):g} to {high:g}"


def score(name: str, policy: Callable[[Case], str], cases: Sequence[Case], band: str) -> Score:
    verdicts = [case.verdicts[policy(case)] for case in cases]
    ratios = [verdict.ratio if verdict.fits else float("inf") for verdict in verdicts]
    fitting = [verdict.ratio for verdict in verdicts if verdict.fits]
    inexact = sum(v.fits and not v.is_exact and case.best_is_exact for v, case in zip(verdicts, cases, strict=True))
    return Score(
        policy=name,
        band=band,
        num_cases=len(cases),
        fits=len(fitting) / len(cases),
        median=statistics.median(ratios),
        mean=statistics.fmean(fitting or [float("inf")]),
        worst_twentieth=sorted(ratios)[int(0.95 * (len(ratios) - 1))],
        needlessly_inexact=inexact / len(cases),
        num_tried=statistics.fmean(verdict.num_tried for verdict in verdicts),
    )


def scores_table(scores: Sequence[Score]) -> str:
    header = ("pressure", "policy", "cases", "fits", "median", "mean", "95 %", "needlessly inexact", "traces")
    rows = [
        (
            score.band,
            score.policy,
            str(score.num_cases),
            f"{score.fits:.2%}",
            f"{score.median:.3f}",
            f"{score.mean:.3f}",
            f"{score.worst_twentieth:.3f}",
            f"{score.needlessly_inexact:.2%}",
            f"{score.num_tried:.1f}",
        )
        for score in scores
    ]
    return "\n".join(table([header, *rows], left=(0, 1)))


def verdict(scores: Sequence[Score]) -> str:
    """Whether the learned policy earns its place, by the bars that were set before it was trained."""
    of = {score.policy: score for score in scores if score.band == "all"}
    rules, learned = of["rules"], of["learned"]
    bars = {
        f"median {learned.median:.4f}, at most {MAX_MEDIAN}": learned.median <= MAX_MEDIAN,
        f"fits in {learned.fits:.2%}, at least {MIN_FITS:.0%}": learned.fits >= MIN_FITS,
        f"fits more often than the rules, {rules.fits:.2%}": learned.fits > rules.fits,
        f"median below that of the rules, {rules.median:.4f}": learned.median < rules.median,
        f"mean {learned.mean:.4f} below that of the rules, {rules.mean:.4f}": learned.mean < rules.mean,
    }
    lines = [f"{'yes' if is_met else 'NO ':3}  {bar}" for bar, is_met in bars.items()]
    return "\n".join([*lines, EARNED if all(bars.values()) else NOT_EARNED])
