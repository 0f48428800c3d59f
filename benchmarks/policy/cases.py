"""Cases to learn from: a model at some depth, a card, what the user rules out, a budget; and the truth about each.

The truth is settled by exhaustive search on the models of peak and time. For each strategy: the plan that stage 2 would
make under it, level by level as `Planner.plan` does, and the best plan there is, all exact techniques tried at once
(and what is not exact only where nothing exact fits). The fronts of the search do not depend on the device's budget, so
many budgets are answered by one search.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.policy.shapes import DEPTHS, draw_hardware, hardware_for, stretch
from memscale import Config
from memscale._decide import find_candidates
from memscale._decide.budget import Budget, full_budget
from memscale._decide.choice import Choice
from memscale._decide.cost_model import CostModel
from memscale._decide.eligible import resolve
from memscale._decide.policy import Situation, rules
from memscale._decide.policy.features import features_of
from memscale._decide.policy.strategies import STRATEGIES, WIDEST
from memscale._decide.search import Candidate
from memscale._hardware import Hardware
from memscale._profile import OptimizerCost, Profile, StepTrace, TraceKey

SETTINGS_PER_SHAPE = 8
BUDGETS_PER_SETTING = 12
TOLERANCE = 1.01
"""A strategy is as good as any if its plan is at most 1 % slower than the best."""

RULED_OUT: tuple[tuple[str, ...], ...] = (
    (), (), (), (), (), (),
    ("use_mixed_precision", "use_8bit_optimizer"), ("use_mixed_precision", "use_8bit_optimizer"),
    ("use_mixed_precision",),
    ("enable_offloading",),
    ("enable_tiling",),
    ("enable_checkpointing",),
)  # fmt: skip
"""What a user may have set to False, as often as it is listed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """What a strategy comes to."""

    fits: bool
    ratio: float
    """Its plan's predicted step time over the best one's; 0 where it does not fit."""
    is_exact: bool
    num_tried: int
    """Traces that stage 2 makes on the way there."""


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    family: str
    group: str
    """Cases of one setting differ in the budget alone."""
    features: tuple[float, ...]
    pressure: float
    rule: str
    """What the rules choose."""
    verdicts: dict[str, Verdict]
    best_is_exact: bool

    def is_good(self, strategy: str) -> bool:
        verdict = self.verdicts[strategy]
        return verdict.fits and verdict.is_exact == self.best_is_exact and verdict.ratio <= TOLERANCE


def feature_names() -> tuple[str, ...]:
    """In the order of `Case.features`."""
    nothing = Profile("cpu", "static", "", (), 0, 0, 0, (), OptimizerCost("", 0, 0, 0), StepTrace(()))
    situation = Situation(nothing, hardware_for("cpu"), Budget(1, 0, 0))
    return tuple(features_of(situation, Config()))


def draw_cases(family: str, profile: Profile, seed: str) -> list[Case]:
    """All cases of one shape, by its profile at three blocks."""
    rng = random.Random(seed)
    cases: list[Case] = []
    for number in range(SETTINGS_PER_SHAPE):
        depth, hardware = rng.choice(DEPTHS), draw_hardware(profile.device_type, rng)
        config = Config(
            offload_dir="." if hardware.disk_free_bytes is not None else None,
            async_offload=rng.random() < 0.25,
            auto_policy=True,
        ).replace(**dict.fromkeys(rng.choice(RULED_OUT), False))
        setting = _Setting(stretch(profile, depth), hardware, config)
        cases += setting.cases(family, f"{seed}/{number}", rng)
    return cases


class _Setting:
    """One model on one card under one config: every strategy's candidates at every level."""

    def __init__(self, profile: Profile, hardware: Hardware, config: Config) -> None:
        self.profile = _in_type_of(profile, hardware)
        self.hardware = hardware
        self.config = config
        self.budget = full_budget(hardware, config)
        self.levels = {
            name: list(self._levels(strategy.under(config, hardware))) for name, strategy in STRATEGIES.items()
        }

    def _levels(self, config: Config) -> Iterator[tuple[int, _Options]]:
        """How much was tried up to each level, and what can then be chosen from."""
        profiles = {"simple": _without(self.profile, inside=True, lossy=True)}
        if config.enable_tiling:
            profiles["inside"] = _without(self.profile, lossy=True)
        if config.use_mixed_precision or config.use_8bit_optimizer:
            profiles["lossy"] = self.profile
        for profile in profiles.values():
            tried = sum(_is_tried(key, config) for key in profile.variants)
            eligible = resolve(config, self.hardware)
            model = CostModel(profile, self.hardware, overlaps=eligible.overlaps)
            yield tried, _Options(find_candidates(model, model.evaluate(Choice()), eligible))

    def cases(self, family: str, group: str, rng: random.Random) -> Iterator[Case]:
        """Budgets from the baseline's peak down to the lowest that anything reaches."""
        baseline = CostModel(self.profile, self.hardware).evaluate(Choice()).peak_bytes
        lowest = min(options.lowest(self.budget) for _, options in self.levels[WIDEST])
        most = math.log(baseline / lowest)
        for index in range(BUDGETS_PER_SETTING if most > 0.02 else 0):
            share = (index + rng.random()) / BUDGETS_PER_SETTING
            device_bytes = max(lowest, int(baseline / math.exp(max(0.001, share * most))))
            yield self._case(family, group, dataclasses.replace(self.budget, device_bytes=device_bytes))

    def _case(self, family: str, group: str, budget: Budget) -> Case:
        situation = Situation(self.profile, self.hardware, budget)
        found = (options.best(budget) for _, options in self.levels[WIDEST])
        best = min((candidate for candidate in found if candidate is not None), key=_rank)
        return Case(
            family=family,
            group=group,
            features=tuple(features_of(situation, self.config).values()),
            pressure=situation.pressure,
            rule=rules.choose(situation)[0],
            verdicts=_over_the_best(
                {name: _verdict(levels, budget, best) for name, levels in self.levels.items()},
                is_exact=best.choice.run.is_exact,
            ),
            best_is_exact=best.choice.run.is_exact,
        )


def _over_the_best(verdicts: dict[str, Verdict], *, is_exact: bool) -> dict[str, Verdict]:
    """The search thins what is wide: now and then a narrower one finds a plan that is faster by a trifle."""
    fastest = min([1.0, *(v.ratio for v in verdicts.values() if v.fits and v.is_exact == is_exact)])
    return {name: dataclasses.replace(v, ratio=round(v.ratio / fastest, 5)) for name, v in verdicts.items()}


class _Options:
    """Candidates in the order of preference of stage 2: exact before all else, then the fastest."""

    def __init__(self, candidates: Sequence[Candidate]) -> None:
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


def _verdict(levels: Sequence[tuple[int, _Options]], budget: Budget, best: Candidate) -> Verdict:
    tried = 0
    for tried, options in levels:
        found = options.best(budget)
        if found is not None:
            ratio = found.outcome.step_ms / best.outcome.step_ms
            return Verdict(True, round(ratio, 5), found.choice.run.is_exact, tried)
    return Verdict(False, 0.0, False, tried)


def _rank(candidate: Candidate) -> tuple[bool, float, int]:
    outcome = candidate.outcome
    return not candidate.choice.run.is_exact, round(outcome.step_ms, 9), outcome.peak_bytes


# ---- parts of a profile


def _without(profile: Profile, *, inside: bool = False, lossy: bool = False) -> Profile:
    variants = {
        key: trace
        for key, trace in profile.variants.items()
        if not (inside and key.num_tiles) and not (lossy and key.precision)
    }
    return dataclasses.replace(
        profile,
        variants=variants,
        inside=() if inside else profile.inside,
        eight_bit_optimizer=None if lossy else profile.eight_bit_optimizer,
    )


def _in_type_of(profile: Profile, hardware: Hardware) -> Profile:
    """Traced in bf16; fp16 has the same sizes, for a card that has no other."""
    if hardware.supports_bf16:
        return profile
    variants = {
        dataclasses.replace(key, precision="float16") if key.precision else key: trace
        for key, trace in profile.variants.items()
    }
    return dataclasses.replace(profile, variants=variants)


def _is_tried(key: TraceKey, config: Config) -> bool:
    """Whether `Planner` makes this trace under this config."""
    if key.precision and not config.use_mixed_precision:
        return False
    if key.tile_size and not config.enable_tiling:
        return False
    moves = key.treatment.offloads or key.treatment.streams or key.streams_rest
    if moves and not config.enable_offloading:
        return False
    recomputes = key.treatment.recompute != "none" or key.streams_rest
    return bool(config.enable_checkpointing) or not recomputes
