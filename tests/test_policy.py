"""Stage 1: who says which techniques may be used."""

from __future__ import annotations

from memscale import Config
from memscale._policy import choose_strategy


def test_the_users_own_config() -> None:
    config = Config(mode="conservative")
    strategy = choose_strategy(config)
    assert strategy.config == config
    assert strategy.source == "user_config"


def test_a_policy_that_is_asked_for_names_its_source() -> None:
    config = Config(auto_policy=True)
    assert choose_strategy(config).source in ("rule", "rule_fallback", "ml")
    assert config == Config(auto_policy=True), "the caller's config is not changed"
