"""Stage 1: which mode and techniques may be used. Pure data in, pure data out; the caller's `Config` is not changed."""

from __future__ import annotations

import dataclasses

from memscale._config import Config
from memscale._plan import DecisionSource


@dataclasses.dataclass(frozen=True, slots=True)
class Strategy:
    """What stage 2 may use, and who said so."""

    config: Config
    source: DecisionSource


def choose_strategy(config: Config) -> Strategy:
    """The user's own config. `auto_policy` has no policy to ask yet; the rules of the mode stand in for it."""
    return Strategy(config, "rule_fallback" if config.auto_policy else "user_config")
