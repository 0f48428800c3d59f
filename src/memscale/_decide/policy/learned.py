"""A learned policy: for each mild strategy, how likely it is to be as good as the widest; the first that is is taken.

"As good" is settled by exhaustive search, on the models of peak and time: a plan that fits, is as exact, and is at most
1 % slower than the best there is. The trees are data, `policy.json` beside this file; walking them takes nothing but
Python. None is in the package: what was trained did not beat the rules by the bars that were set for it, nor the
widest strategy by much (docs/design/policy.md). `python -m benchmarks.policy --artifact FILE` trains another.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib

from memscale import _json
from memscale._config import Config
from memscale._decide.policy.features import features_of
from memscale._decide.policy.rules import numbers_of
from memscale._decide.policy.situation import Situation
from memscale._decide.policy.strategies import STRATEGIES, WIDEST
from memscale._decide.policy.trees import Forest
from memscale._plan import Reason
from memscale.techniques import TECHNIQUES

ARTIFACT = pathlib.Path(__file__).with_name("policy.json")
FORMAT = 1


class NotCovered(Exception):
    """The learned policy cannot be asked, or not about this."""


@dataclasses.dataclass(frozen=True, slots=True)
class Artifact:
    """A trained policy."""

    format: int
    features: tuple[str, ...]
    forests: dict[str, Forest]
    """Whether each strategy is as good as the widest."""
    threshold: float
    """How sure the trees must be."""
    training_hash: str
    """SHA-256 of the cases that it was trained with."""
    trained_on: str

    def choose(self, features: dict[str, float]) -> tuple[str, float]:
        """The mildest strategy that is likely to be as good as any, and how likely."""
        if tuple(features) != self.features:
            raise NotCovered("policy.json was trained for other features")
        row = tuple(features.values())
        for name in STRATEGIES:
            if name in self.forests:
                probability = self.forests[name].probability(row)
                if probability >= self.threshold:
                    return name, probability
        return WIDEST, 1.0


def choose(config: Config, situation: Situation) -> tuple[str, Reason]:
    """The name of a strategy, and why; `NotCovered` where the policy has not learned what is asked."""
    if config.force_optimize:
        raise NotCovered("it looks for the fastest plan, and force_optimize for the smallest")
    if any(config.asks_for(technique.switch) for technique in TECHNIQUES if not technique.is_exact):
        raise NotCovered("it has not seen plans that must be inexact")
    artifact = load(ARTIFACT)
    numbers = numbers_of(situation)
    if situation.pressure <= 1:
        return "conservative", Reason("under the budget: nothing needs to be chosen", numbers)
    name, probability = artifact.choose(features_of(situation, config))
    rule = "nothing milder is sure to do" if name == WIDEST else "the mildest that is likely to be as good as any"
    return name, Reason(rule, {**numbers, "strategy": name, "likely": round(probability, 3)})


@functools.cache
def load(path: pathlib.Path) -> Artifact:
    if not path.is_file():
        raise NotCovered(f"there is no {path.name}")
    try:
        artifact: Artifact = _json.decode(Artifact, json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise NotCovered(f"{path.name} cannot be read: {error}") from error
    if artifact.format != FORMAT or not set(artifact.forests) <= set(STRATEGIES):
        raise NotCovered(f"{path.name} is of another version")
    return artifact
