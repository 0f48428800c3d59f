"""Stage 1: which mode and techniques stage 2 may use. Pure data in, pure data out; nobody's `Config` is changed.

    auto_policy=False       the user's own config                                  "user_config"
    auto_policy="learned"   the learned policy (`learned`)                         "ml"
                            the rules, where that cannot be asked                  "rule_fallback"
    auto_policy=True        the best that there is: as "learned"
    auto_policy="rule"      the rules (`rules`)                                    "rule"

Stage 2 finds the fastest plan among whatever is eligible, so a wider strategy is never slower: it is dearer to find, as
every technique must be tried, and further from the training as it was. A policy therefore looks for the strategy that
is found soonest among those that are as good as the widest. Where its choice does not fit, the widest is tried
(`Strategy.wider`).
"""

from __future__ import annotations

import dataclasses

from memscale._config import Config
from memscale._decide.eligible import Eligible
from memscale._decide.policy import learned, rules
from memscale._decide.policy.situation import Situation as Situation
from memscale._decide.policy.strategies import SHORTLISTS, STRATEGIES, WIDEST
from memscale._plan import DecisionSource, Reason
from memscale._profile import Profile


@dataclasses.dataclass(frozen=True, slots=True)
class Strategy:
    """What stage 2 may use, who said so, and why."""

    eligible: Eligible
    source: DecisionSource
    reason: Reason | None = None
    """Why it was chosen; None: it is the user's own."""
    wider: Eligible | None = None
    """What a policy would allow where nothing fits with `eligible`."""

    @property
    def config(self) -> Config:
        return self.eligible.config

    def widened(self) -> Strategy:
        """The strategy that allows everything, the last resort."""
        assert self.wider is not None
        numbers = {} if self.reason is None else self.reason.numbers
        reason = Reason(f"{self.config.mode.value} does not suffice: everything is eligible", numbers)
        return Strategy(self.wider, self.source, reason)


def choose_strategy(eligible: Eligible, profile: Profile | None = None) -> Strategy:
    """What the user's own config makes eligible, or what a policy makes of it; without the profile of a plain step
    there is nothing to choose by."""
    if not eligible.config.auto_policy:
        return Strategy(eligible, "user_config")
    if profile is None:
        return Strategy(eligible, "rule_fallback", Reason("no profile to choose by: the mode as it is"))
    situation = Situation(profile, eligible)
    if eligible.config.auto_policy == "rule":
        name, reason = rules.choose(situation)
        return _strategy(eligible, name, "rule", reason)
    try:
        name, reason = learned.choose(situation)
    except learned.NotCovered as error:
        name, reason = rules.choose(situation)
        fallen = dataclasses.replace(reason, rule=f"{reason.rule} (no learned policy: {error})")
        return _strategy(eligible, name, "rule_fallback", fallen)
    return _strategy(eligible, name, "ml", reason)


def _strategy(own: Eligible, name: str, source: DecisionSource, reason: Reason) -> Strategy:
    options = STRATEGIES | SHORTLISTS
    chosen, widest = (options[n].under(own) for n in (name, WIDEST))
    return Strategy(chosen, source, reason, wider=None if chosen.config == widest.config else widest)
