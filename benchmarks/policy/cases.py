"""Cases to learn from: a model at some depth, a card, what the user rules out, a budget; and the truth about each.

The truth is what stage 2 itself finds on the models of peak and time: for each strategy the fastest plan, over the
fastest with everything that is exact and soon found out. Where nothing of that fits, techniques that are dear to try
are needed, or inexact ones, and no short list will do. The fronts of the search do not depend on the budget, so
many budgets are answered by one search.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.policy.shapes import DEPTHS, draw_hardware, hardware_for, stretch
from memscale import Config
from memscale._decide import find_candidates
from memscale._decide.budget import Budget
from memscale._decide.choice import Choice
from memscale._decide.cost_model import CostModel
from memscale._decide.eligible import Eligible, resolve
from memscale._decide.policy import Situation, rules
from memscale._decide.policy.features import features_of
from memscale._decide.policy.strategies import SHORTLISTS, WIDEST
from memscale._decide.search import Candidate
from memscale._hardware import Hardware
from memscale._profile import STREAM, OptimizerCost, Profile, StepTrace, TraceKey
from memscale.techniques import TECHNIQUES

SETTINGS_PER_SHAPE = 4
BUDGETS_PER_SETTING = 8
TOLERANCE = 1.01
"""A strategy is as good as everything if its plan is at most 1 % slower."""

RULED_OUT: tuple[tuple[str, ...], ...] = (
    (), (), (), (), (), (),
    ("use_mixed_precision", "use_8bit_optimizer"), ("use_mixed_precision", "use_8bit_optimizer"),
    ("use_mixed_precision",),
    ("enable_offloading",),
    ("enable_tiling",),
    ("enable_checkpointing",),
)  # fmt: skip
"""What a user may have set to False, as often as it is listed."""
SAME_AS = {"conservative": "checkpoints", "balanced": "no tiles", "aggressive": "everything exact"}
"""Modes, and the short list that is the same as far as it is exact, soon found out, and travels in the first way."""
_DEAR_OR_INEXACT = frozenset(technique.name for technique in TECHNIQUES if technique.is_dear or not technique.is_exact)


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What a strategy comes to."""

    fits: bool
    ratio: float
    """Its plan's predicted step time over that of the fastest plan of all strategies; 0 where it does not fit."""
    num_tried: int
    """Traces that are made before there is a plan."""


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    family: str
    group: str
    """Cases of one setting differ in the budget alone."""
    features: tuple[int, ...]
    pressure: float
    rule: str
    """What the rules choose."""
    verdicts: dict[str, Verdict]

    def is_good(self, strategy: str) -> bool:
        """Whether it is as good as everything: the full search thins what is wide, and is not always the fastest."""
        verdict = self.verdicts[strategy]
        return verdict.fits and verdict.ratio <= TOLERANCE * self.verdicts[WIDEST].ratio


def feature_names() -> tuple[str, ...]:
    """In the order of `Case.features`."""
    nothing = Profile("cpu", "static", "", (), 0, 0, 0, (), OptimizerCost("", 0, 0, 0), StepTrace(()))
    return tuple(features_of(Situation(nothing, resolve(Config(), hardware_for("cpu")))))


def profile_hash(profile: Profile) -> str:
    """Equal for shapes that are the same step: one of them is enough to learn from."""
    return hashlib.sha256(profile.to_json().encode()).hexdigest()


def draw_cases(family: str, profile: Profile, seed: str) -> list[Case]:
    """All cases of one shape, by its profile at three blocks."""
    rng = random.Random(seed)
    cases: list[Case] = []
    for number in range(SETTINGS_PER_SHAPE):
        depth, hardware = rng.choice(DEPTHS), draw_hardware(profile.device_type, rng)
        config = Config(
            offload_dir="." if hardware.disk_free_bytes is not None else None,
            auto_policy="learned",
        ).replace(**dict.fromkeys(rng.choice(RULED_OUT), False))
        setting = _Setting(stretch(profile, depth), hardware, config)
        cases += setting.cases(family, f"{seed}/{number}", rng)
    return cases


class _Setting:
    """One model on one card under one config: every strategy's candidates."""

    def __init__(self, profile: Profile, hardware: Hardware, config: Config) -> None:
        self.profile = profile
        self.hardware = hardware
        self.eligible = resolve(config, hardware)
        self.budget = self.eligible.budget
        self.options = {name: self._options(strategy.under(self.eligible)) for name, strategy in SHORTLISTS.items()}
        self.options |= {mode: self.options[name] for mode, name in SAME_AS.items()}

    def _options(self, eligible: Eligible) -> _Options:
        """What can be chosen from, and how much is tried for that."""
        eligible = eligible.under(eligible.config.without(eligible.withheld | _DEAR_OR_INEXACT))
        model = CostModel(self.profile, self.hardware, overlaps=eligible.overlaps)
        tried = sum(_is_tried(key, eligible) for key in self.profile.variants)
        return _Options(find_candidates(model, model.evaluate(Choice()), eligible), tried)

    def cases(self, family: str, group: str, rng: random.Random) -> Iterator[Case]:
        """Budgets from the baseline's peak down to the lowest that anything reaches, and one below that."""
        baseline = CostModel(self.profile, self.hardware).evaluate(Choice()).peak_bytes
        lowest = self.options[WIDEST].lowest(self.budget)
        most = math.log(baseline / lowest)
        if most <= 0.02:
            return
        for index in range(BUDGETS_PER_SETTING):
            share = (index + rng.random()) / BUDGETS_PER_SETTING
            device_bytes = max(lowest, int(baseline / math.exp(max(0.001, share * most))))
            yield self._case(family, group, dataclasses.replace(self.budget, device_bytes=device_bytes))
        below = int(lowest * rng.uniform(0.6, 0.99))
        yield self._case(family, group, dataclasses.replace(self.budget, device_bytes=below))

    def _case(self, family: str, group: str, budget: Budget) -> Case:
        situation = Situation(self.profile, dataclasses.replace(self.eligible, budget=budget))
        return Case(
            family=family,
            group=group,
            features=tuple(features_of(situation).values()),
            pressure=situation.pressure,
            rule=rules.choose(situation)[0],
            verdicts=self._verdicts(budget),
        )

    def _verdicts(self, budget: Budget) -> dict[str, Verdict]:
        """The search thins what is wide: now and then a narrower one finds a plan that is faster by a trifle."""
        found = {name: options.best(budget) for name, options in self.options.items()}
        fastest = min((one.outcome.step_ms for one in found.values() if one is not None), default=1.0)
        return {
            name: Verdict(
                one is not None,
                0.0 if one is None else round(one.outcome.step_ms / fastest, 5),
                self.options[name].num_tried,
            )
            for name, one in found.items()
        }


class _Options:
    """Candidates in the order of preference of stage 2: the fastest first."""

    def __init__(self, candidates: Sequence[Candidate], num_tried: int) -> None:
        self.num_tried = num_tried
        self.candidates = sorted(candidates, key=_rank)
        outcomes = [candidate.outcome for candidate in self.candidates]
        self._peaks = np.array([outcome.peak_bytes for outcome in outcomes])
        self._hosts = np.array([outcome.host_bytes for outcome in outcomes])
        self._waits = self._hosts + np.array([outcome.movable_bytes for outcome in outcomes])

    def _placeable(self, budget: Budget) -> Any:
        return (self._hosts <= budget.host_bytes) & (self._waits <= budget.host_bytes + budget.disk_bytes)

    def best(self, budget: Budget) -> Candidate | None:
        """`Budget.admits` for all at once."""
        fits = self._placeable(budget) & (self._peaks <= budget.device_bytes)
        return self.candidates[int(np.argmax(fits))] if fits.any() else None

    def lowest(self, budget: Budget) -> int:
        return int(self._peaks[self._placeable(budget)].min())


def _rank(candidate: Candidate) -> tuple[float, int]:
    outcome = candidate.outcome
    return round(outcome.step_ms, 9), outcome.peak_bytes


def _is_tried(key: TraceKey, eligible: Eligible) -> bool:
    """Whether `Planner` makes this trace."""
    if key.tile_size and not eligible.config.enable_tiling:
        return False
    return eligible.allows(key.treatment) and (not key.streams_rest or eligible.allows(STREAM))
