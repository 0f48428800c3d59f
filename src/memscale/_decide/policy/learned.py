"""A learned policy: for each short list of techniques, how likely it is to be as good as all of them.

"As good" is what stage 2 itself would say, on the models of peak and time: a plan that fits, is exact, and is at most
1 % slower than the one it finds with everything eligible. Of the lists that are likely enough to be, the one that costs
the least planning is taken; where its plan does not fit after all, everything is eligible (`Strategy.wider`).

The trees are data, `policy.json` beside this file; walking them takes nothing but Python's integers, so that the same
inputs give the same choice on every machine. `python -m benchmarks.policy --artifact FILE` trains them
(docs/design/policy.md).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import pathlib

from memscale import _json
from memscale._config import Config
from memscale._decide.policy.features import features_of
from memscale._decide.policy.rules import numbers_of
from memscale._decide.policy.situation import Situation
from memscale._decide.policy.strategies import SHORTLISTS, WIDEST
from memscale._decide.policy.trees import UNIT, Forest
from memscale._plan import Reason
from memscale._units import show_bytes
from memscale.techniques import TECHNIQUES

ARTIFACT = pathlib.Path(__file__).with_name("policy.json")
FORMAT = 2
_LARGEST_BYTES = 1_000_000
"""A file above this is not read."""


class NotCovered(Exception):
    """The learned policy cannot be asked, or not about this."""


@dataclasses.dataclass(frozen=True, slots=True)
class Artifact:
    """A trained policy."""

    format: int
    features: tuple[str, ...]
    forests: dict[str, Forest]
    """Whether each short list is as good as everything."""
    threshold: int
    """How sure the trees must be: the logarithm of odds in millionths."""
    training_hash: str
    """SHA-256 of the cases that it was trained with."""
    trained_on: str
    checksum: str = ""
    """SHA-256 of all that is above."""

    def __post_init__(self) -> None:
        if any(forest.num_features > len(self.features) for forest in self.forests.values()):
            raise ValueError("a tree asks for a feature that there is not")

    def content_hash(self) -> str:
        return hashlib.sha256(dataclasses.replace(self, checksum="").to_json().encode()).hexdigest()

    def to_json(self) -> str:
        """What `load` reads."""
        return json.dumps(_json.encode(self), sort_keys=True, separators=(",", ":")) + "\n"

    def sealed(self) -> Artifact:
        """The same, with its checksum."""
        return dataclasses.replace(self, checksum=self.content_hash())

    def choose(self, features: dict[str, int]) -> tuple[str, int]:
        """The shortest list that is likely to be as good as everything, and how likely."""
        if tuple(features) != self.features:
            raise NotCovered("policy.json was trained for other features")
        row = tuple(features.values())
        odds = {name: self.forests[name].odds(row) for name in SHORTLISTS if name in self.forests}
        name = first_sure(odds, self.threshold)
        return name, odds.get(name, 0)


def first_sure(odds: dict[str, int], threshold: int) -> str:
    """The first short list that is likely enough; everything, where there is none."""
    return next((name for name, likely in odds.items() if likely >= threshold), WIDEST)


def choose(situation: Situation) -> tuple[str, Reason]:
    """The name of a strategy, and why; `NotCovered` where the policy has not learned what is asked."""
    config = situation.eligible.config
    if config.force_optimize:
        raise NotCovered("it looks for the fastest plan, and force_optimize for the smallest")
    if any(config.asks_for(technique.switch) for technique in TECHNIQUES if not technique.is_exact):
        raise NotCovered("it has not seen plans that must be inexact")
    artifact = load(ARTIFACT)
    numbers = numbers_of(situation)
    name, odds = artifact.choose(features_of(situation))
    if name == WIDEST:
        return name, Reason("no shorter list is sure to do: everything is rehearsed", {**numbers, "strategy": name})
    rule = "the shortest list of techniques that is likely to be as good as all"
    return name, Reason(rule, {**numbers, "strategy": name, "log_odds": odds / UNIT})


def used_for(config: Config) -> str:
    """What identifies the policy that this config asks, "" where it asks none: plans that are kept depend on it."""
    if config.auto_policy not in (True, "learned"):
        return ""
    try:
        return load(ARTIFACT).checksum
    except NotCovered as error:
        return f"none: {error}"  # the plan says why


@functools.cache
def load(path: pathlib.Path) -> Artifact:
    """The artifact in this file; `NotCovered` where it is missing, damaged, or not for this version."""
    if not path.is_file():
        raise NotCovered(f"there is no {path.name}")
    try:
        if path.stat().st_size > _LARGEST_BYTES:
            raise ValueError(f"it is larger than {show_bytes(_LARGEST_BYTES)}")
        artifact: Artifact = _json.decode(Artifact, json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise NotCovered(f"{path.name} cannot be read: {error}") from error
    if artifact.format != FORMAT or not set(artifact.forests) <= set(SHORTLISTS):
        raise NotCovered(f"{path.name} is of another version")
    if artifact.checksum != artifact.content_hash():
        raise NotCovered(f"{path.name} is damaged: its checksum is another")
    return artifact
